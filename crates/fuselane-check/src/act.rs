//! `act`: every activation, forward, in place and backward, for all inputs of a 16-bit dtype and a
//! dense sweep of the others.

use std::fmt;

use fuselane::reference::{self, Random};
use fuselane::{Act, DType};

use crate::backend::Runner;
pub use crate::bounds::ACT as BOUNDS;
use crate::outcome::{Expected, Outcomes};
use crate::tensor::Tensor;
use crate::{Case, Effort};

/// Inputs in a case: as many as a 16-bit dtype has.
const INPUTS: usize = 1 << 16;

/// One activation for one slice of the inputs.
struct Sweep {
    act: Act,
    /// Which of `slices` it is. Of a 16-bit dtype there is only one.
    slice: usize,
    slices: usize,
}

pub(crate) fn cases(effort: Effort) -> Vec<Box<dyn Case>> {
    let slices = if effort.step() == 1 { 16 } else { 2 };
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for act in Act::ALL {
        for slice in 0..slices {
            cases.push(Box::new(Sweep { act, slice, slices }));
        }
    }
    cases
}

impl fmt::Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "act {} slice {}", self.act, self.slice)
    }
}

impl Sweep {
    /// The names of the function and of its gradient in [`BOUNDS`].
    fn outputs(&self) -> [&'static str; 2] {
        let at = Act::ALL.into_iter().position(|act| act == self.act).expect("ALL has all");
        [BOUNDS[2 * at].output, BOUNDS[2 * at + 1].output]
    }

    fn inputs(&self, dtype: DType) -> Vec<f64> {
        let slice = self.slice as u32;
        match dtype {
            DType::F16 => (0..=u16::MAX).map(|bits| half::f16::from_bits(bits).to_f64()).collect(),
            DType::BF16 => (0..=u16::MAX).map(|b| half::bf16::from_bits(b).to_f64()).collect(),
            // The first slice spreads over all bit patterns, the others over where the functions
            // bend: 2^-12 <= |x| < 2^8.
            DType::F32 | DType::F64 if slice == 0 => {
                (0..INPUTS as u32).map(|i| f32::from_bits(i * 65521 + 1).into()).collect()
            }
            DType::F32 => {
                let (low, high) = ((127 - 12) << 23, (127 + 8) << 23);
                let stride = (high - low) / (INPUTS as u32 / 2) / (self.slices as u32 - 1);
                let bits = (0..INPUTS as u32 / 2)
                    .map(|i| low + (i * (self.slices as u32 - 1) + slice - 1) * stride);
                bits.flat_map(|bits| [bits, bits | 1 << 31])
                    .map(|b| f32::from_bits(b).into())
                    .collect()
            }
            DType::F64 => {
                let mut random = Random::new(slice.into());
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
        if dtype.size() == 2 && self.slice > 0 {
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
        outcomes.run((self, &BOUNDS, dtype), o_name, runners, |outcomes, call| {
            let backend = call.runner.backend;
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
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_in_the_order_of_the_activations() {
        for act in Act::ALL {
            let names = Sweep { act, slice: 0, slices: 1 }.outputs();
            assert_eq!(names, [format!("o of {act}"), format!("dx of {act}")]);
        }
    }
}
