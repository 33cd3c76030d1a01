//! `act`: every activation, forward, in place and backward, for all inputs of a 16-bit dtype and a
//! dense sweep of the others.

use std::fmt;

use fuselane::reference::{self, Random};
use fuselane::{Act, DType, Result};

use crate::backend::Runner;
use crate::outcome::{Call, Expected, Outcomes};
use crate::tensor::Tensor;
use crate::{Bound, Case, Effort};

/// What is promised of each activation and of its gradient, in the order of [`Act::ALL`]. The terms
/// of a gradient are those of the slope: silu and both gelus have two of them, which cancel where
/// the function turns around.
///
/// The gradient of `relu_squared` is doubled after its product was rounded, which counts below the
/// smallest normal number only.
///
/// In f64, `gelu_tanh` has the exponential of a large rounded number in its tails, here as in the
/// reference.
pub const BOUNDS: [Bound; 18] = [
    Bound { output: "o of none", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "dx of none", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "o of relu", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "dx of relu", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "o of sigmoid", f32: 2.5, f16: 2000.0, bf16: 10000.0, f64: 1.0 },
    Bound { output: "dx of sigmoid", f32: 3.5, f16: 2000.0, bf16: 13000.0, f64: 1.0 },
    Bound { output: "o of silu", f32: 2.5, f16: 2000.0, bf16: 10000.0, f64: 1.0 },
    Bound { output: "dx of silu", f32: 4.5, f16: 2000.0, bf16: 12000.0, f64: 3.5 },
    Bound { output: "o of tanh", f32: 2.5, f16: 2.5, bf16: 2.5, f64: 1.0 },
    Bound { output: "dx of tanh", f32: 4.5, f16: 4.5, bf16: 4.5, f64: 4.5 },
    Bound { output: "o of gelu", f32: 7.0, f16: 7.0, bf16: 7.0, f64: 1.0 },
    Bound { output: "dx of gelu", f32: 5.0, f16: 5.0, bf16: 5.0, f64: 650.0 },
    Bound { output: "o of gelu_tanh", f32: 2.5, f16: 2.5, bf16: 2.5, f64: 2500.0 },
    Bound { output: "dx of gelu_tanh", f32: 6.0, f16: 6.0, bf16: 6.0, f64: 4000.0 },
    Bound { output: "o of softplus", f32: 3.5, f16: 3.5, bf16: 3.5, f64: 1.0 },
    Bound { output: "dx of softplus", f32: 3.0, f16: 3.0, bf16: 3.0, f64: 1.0 },
    Bound { output: "o of relu_squared", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "dx of relu_squared", f32: 0.5, f16: 0.5, bf16: 0.5, f64: 0.5 },
];

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
    let parts = if effort.step() == 1 { 16 } else { 2 };
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
    /// The names of the function and of its gradient in [`BOUNDS`].
    fn outputs(&self) -> [&'static str; 2] {
        let at = Act::ALL.into_iter().position(|act| act == self.act).expect("ALL has all");
        [BOUNDS[2 * at].output, BOUNDS[2 * at + 1].output]
    }

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
    fn parameter_dtypes(&self) -> Vec<DType> {
        Vec::new()
    }

    fn run(&self, dtype: DType, runners: &[Runner<'_>], outcomes: &mut Outcomes) {
        let act = self.act;
        if dtype.size() == 2 && self.part > 0 {
            return;
        }
        let shape = [INPUTS];
        let x = Tensor::rounded(dtype, &self.inputs(dtype), &shape);
        let values = x.values();
        let truth: Vec<f64> = values.iter().map(|&x| reference::act::forward(act, x)).collect();
        let magnitude: Vec<f64> = truth.iter().map(|o| o.abs()).collect();
        let o = Expected { truth: &truth, magnitude: &magnitude };
        let drawn = Random::new(7).normals(INPUTS);
        let gradients = [vec![1.0; INPUTS], drawn].map(|grad| {
            let grad = Tensor::rounded(dtype, &grad, &shape);
            let pairs: Vec<(f64, f64)> = values.iter().copied().zip(grad.values()).collect();
            let truth: Vec<f64> =
                pairs.iter().map(|&(x, grad)| reference::act::backward(act, x, grad)).collect();
            let magnitude: Vec<f64> = pairs
                .iter()
                .map(|&(x, grad)| grad.abs() * reference::act::slope_magnitude(act, x))
                .collect();
            (grad, truth, magnitude)
        });
        let [o_name, dx_name] = self.outputs();
        for &runner in runners {
            let (backend, call) =
                (runner.backend, Call { case: self, bounds: &BOUNDS, dtype, runner });
            let mut run = || -> Result<()> {
                let mut output = Tensor::unwritten(dtype, &shape);
                backend.act_forward(act, x.view(), output.view_mut())?;
                outcomes.compare(call, o_name, &output, o);
                let mut in_place = x.clone();
                backend.act_in_place(act, in_place.view_mut())?;
                outcomes.compare(call, o_name, &in_place, o);
                for (grad, truth, magnitude) in &gradients {
                    let mut dx = Tensor::unwritten(dtype, &shape);
                    backend.act_backward(act, x.view(), grad.view(), dx.view_mut())?;
                    outcomes.compare(call, dx_name, &dx, Expected { truth, magnitude });
                }
                Ok(())
            };
            if let Err(error) = run() {
                outcomes.fault(call, o_name, &error.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_in_the_order_of_the_activations() {
        for act in Act::ALL {
            let names = Sweep { act, part: 0, parts: 1 }.outputs();
            assert_eq!(names, [format!("o of {act}"), format!("dx of {act}")]);
        }
    }
}
