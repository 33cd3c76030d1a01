//! `act`: every activation, forward, in place and backward, for all inputs of a 16-bit dtype and a
//! dense sweep of the others.

use std::fmt;

use fuselane::reference::{self, Random};
use fuselane::{Act, DType, Isa, Result, with_isa};

use crate::outcome::{Call, Expected, Outcomes};
use crate::tensor::Tensor;
use crate::{Bound, Case, Effort};

/// What is promised of an activation and of its gradient. The terms are those of the slope: silu
/// and both gelus have two of them, which cancel where the function turns around.
pub const fn bounds(act: Act) -> [Bound; 2] {
    const fn both(o: [f64; 2], dx: [f64; 2]) -> [Bound; 2] {
        [
            Bound { output: "o", f32: o[0], f64: o[1] },
            Bound { output: "dx", f32: dx[0], f64: dx[1] },
        ]
    }
    match act {
        Act::None | Act::Relu => both([0.0, 0.0], [0.0, 0.0]),
        Act::ReluSquared => both([0.0, 0.0], [0.0, 0.0]),
        Act::Sigmoid => both([3.0, 3.0], [3.0, 3.0]),
        Act::Silu => both([3.0, 3.0], [3.0, 3.0]),
        Act::Tanh => both([3.0, 3.0], [3.0, 3.0]),
        Act::Gelu => both([3.0, 3.0], [3.0, 3.0]),
        Act::GeluTanh => both([3.0, 3.0], [3.0, 3.0]),
        Act::Softplus => both([3.0, 3.0], [3.0, 3.0]),
    }
}

/// Inputs in a case: as many as a 16-bit dtype has.
const INPUTS: usize = 1 << 16;

/// One activation for one slice of the inputs.
struct Sweep {
    act: Act,
    /// Slice `part` of `parts`. Of a 16-bit dtype there is only one.
    part: usize,
    parts: usize,
}

pub(crate) fn cases(effort: Effort) -> Vec<Box<dyn Case>> {
    let parts = match effort {
        Effort::Quick => 2,
        Effort::Full => 16,
    };
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for act in Act::ALL {
        for part in 0..parts {
            cases.push(Box::new(Sweep { act, part, parts }));
        }
    }
    cases
}

impl fmt::Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "act {} part {}", self.act, self.part)
    }
}

impl Sweep {
    fn inputs(&self, dtype: DType) -> Vec<f64> {
        let part = self.part as u32;
        match dtype {
            DType::F16 => (0..=u16::MAX).map(|bits| half::f16::from_bits(bits).to_f64()).collect(),
            DType::BF16 => (0..=u16::MAX).map(|b| half::bf16::from_bits(b).to_f64()).collect(),
            // The first part spreads over all bit patterns, the others over where the functions
            // bend: 2^-12 <= |x| < 2^8.
            DType::F32 | DType::F64 if part == 0 => {
                (0..INPUTS as u32).map(|i| f32::from_bits(i * 65521 + 1).into()).collect()
            }
            DType::F32 => {
                let (low, high) = ((127 - 12) << 23, (127 + 8) << 23);
                let stride = (high - low) / (INPUTS as u32 / 2) / (self.parts as u32 - 1);
                let bits = (0..INPUTS as u32 / 2)
                    .map(|i| low + (i * (self.parts as u32 - 1) + part - 1) * stride);
                bits.flat_map(|bits| [bits, bits | 1 << 31])
                    .map(|b| f32::from_bits(b).into())
                    .collect()
            }
            DType::F64 => {
                let mut random = Random::new(part.into());
                (0..INPUTS)
                    .map(|_| {
                        let sign = if random.bits() & 1 == 0 { 1.0 } else { -1.0 };
                        sign * random.uniform(-12.0, 8.0).exp2()
                    })
                    .collect()
            }
        }
    }
}

impl Case for Sweep {
    fn run(&self, dtype: DType, isas: &[Isa], outcomes: &mut Outcomes) {
        let act = self.act;
        if dtype.size() == 2 && self.part > 0 {
            return;
        }
        let x = Tensor::rounded(dtype, &self.inputs(dtype), &[INPUTS]);
        let values = x.values();
        let truth: Vec<f64> = values.iter().map(|&x| reference::act::forward(act, x)).collect();
        let magnitude: Vec<f64> = truth.iter().map(|o| o.abs()).collect();
        let o = Expected { truth: &truth, magnitude: &magnitude };
        let drawn = Random::new(7).normals(INPUTS);
        let gradients = [vec![1.0; INPUTS], drawn].map(|grad| {
            let grad = Tensor::rounded(dtype, &grad, &[INPUTS]);
            let pairs: Vec<(f64, f64)> = values.iter().copied().zip(grad.values()).collect();
            let truth: Vec<f64> =
                pairs.iter().map(|&(x, grad)| reference::act::backward(act, x, grad)).collect();
            let magnitude: Vec<f64> = pairs
                .iter()
                .map(|&(x, grad)| grad.abs() * reference::act::slope_magnitude(act, x))
                .collect();
            (grad, truth, magnitude)
        });
        for &isa in isas {
            let call = Call { case: self, bounds: &bounds(act), dtype, isa };
            let result = with_isa(isa, || -> Result<()> {
                let mut output = Tensor::unwritten(dtype, &[INPUTS]);
                act.forward_into(x.view(), output.view_mut())?;
                outcomes.compare(call, "o", &output, o);
                let mut in_place = x.clone();
                act.forward_in_place(in_place.view_mut())?;
                outcomes.compare(call, "o", &in_place, o);
                for (grad, truth, magnitude) in &gradients {
                    let mut dx = Tensor::unwritten(dtype, &[INPUTS]);
                    act.backward_into(x.view(), grad.view(), dx.view_mut())?;
                    outcomes.compare(call, "dx", &dx, Expected { truth, magnitude });
                }
                Ok(())
            });
            if let Err(error) = result.and_then(|result| result) {
                outcomes.fault(call, "o", &error.to_string());
            }
        }
    }
}
