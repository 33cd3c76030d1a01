//! The calls whose kernels are looked at: every operator, for every dtype and class of options.
//!
//! Sizes of two kinds: those that all vectors divide, and odd ones. Memory of one kind mostly,
//! without gaps.

use fuselane::{Act, DType, Result};

use super::{Class, Recording};
use crate::{Device, Tensor, act};

/// The dtypes of GPUs.
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Rows of all sizes that vectors divide, and odd ones.
const WIDE: [bool; 2] = [true, false];

pub(super) fn all(recording: &mut Recording) -> Result<()> {
    act_cases(recording)
}

/// `class` with its sizes in words.
fn class(operator: &'static str, dtype: DType, options: &[&str], wide: bool) -> Class {
    let mut words: Vec<&str> = options.iter().copied().filter(|word| !word.is_empty()).collect();
    if !wide {
        words.push("odd");
    }
    Class { operator, dtype, options: words.join(", "), wide }
}

fn act_cases(recording: &mut Recording) -> Result<()> {
    let tensors = |device: &Device, dtype, wide| -> Result<[Tensor; 3]> {
        let tensor = || device.empty(dtype, if wide { &[64, 1024] } else { &[7, 33] });
        Ok([tensor()?, tensor()?, tensor()?])
    };
    for dtype in DTYPES {
        for wide in WIDE {
            for act in Act::ALL {
                let class = |word| class("act", dtype, &[act.name(), word], wide);
                recording.call(&class(""), |device| {
                    let [x, mut o, _] = tensors(device, dtype, wide)?;
                    act::forward_into(act, &x, &mut o)
                })?;
                recording.call(&class(""), |device| {
                    let [x, grad, mut dx] = tensors(device, dtype, wide)?;
                    act::backward_into(act, &x, &grad, &mut dx)
                })?;
                if act.has_slope_from_output() {
                    recording.call(&class("from output"), |device| {
                        let [o, grad, mut dx] = tensors(device, dtype, wide)?;
                        act::backward_from_output_into(act, &o, &grad, &mut dx)
                    })?;
                }
            }
        }
        // Memory with gaps, and indices of 64 bits.
        let gaps = class("act", dtype, &["silu", "gaps"], true);
        let with_gaps = |device: &Device| {
            let tensor = || device.empty(dtype, &[8, 16, 128])?.narrow(1, 0, 8)?.narrow(2, 0, 64);
            act::backward_into(Act::Silu, &tensor()?, &tensor()?, &mut tensor()?)
        };
        recording.call(&gaps, with_gaps)?;
        let far = class("act", dtype, &["silu", "gaps", "64-bit indices"], true);
        recording.call_far(&far, with_gaps)?;
    }
    Ok(())
}
