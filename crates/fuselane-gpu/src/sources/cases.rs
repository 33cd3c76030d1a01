//! The calls whose kernels are looked at: every operator, for every dtype and class of options.
//!
//! Sizes of two kinds: those that all vectors divide, and odd ones. Memory of one kind mostly,
//! without gaps.

use fuselane::{Act, DType, Result, Softmax};

use super::{Class, Recording};
use crate::{Device, Tensor, act, softmax};

/// The dtypes of GPUs.
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Rows of all sizes that vectors divide, and odd ones.
const WIDE: [bool; 2] = [true, false];

pub(super) fn all(recording: &mut Recording) -> Result<()> {
    act_cases(recording)?;
    softmax_cases(recording)
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

fn softmax_cases(recording: &mut Recording) -> Result<()> {
    const DIRECTIONS: [&str; 3] = ["forward", "backward", "backward from input"];
    // Rows that a part of a plane, a cube, and only a second reading can hold; and columns that
    // one cube, and several, work on.
    const SIZES: [(&str, isize, [usize; 2], bool); 8] = [
        ("row of 64", 1, [64, 64], true),
        ("row of 4096", 1, [8, 4096], true),
        ("row of 262144", 1, [2, 262_144], true),
        ("row of 33", 1, [7, 33], false),
        ("row of 200001", 1, [3, 200_001], false),
        ("column of 16", 0, [16, 4096], true),
        ("column of 8192", 0, [8192, 64], true),
        ("column of 33", 0, [33, 7], false),
    ];
    for dtype in DTYPES {
        for direction in DIRECTIONS {
            for (size, dim, shape, wide) in SIZES {
                for (log, zero_masked_rows) in [(false, false), (true, false), (false, true)] {
                    let log_word = if log { "log" } else { "" };
                    let masked = if zero_masked_rows { "masked" } else { "" };
                    let class = class("softmax", dtype, &[direction, log_word, masked, size], true);
                    let options = Softmax { dim, log, zero_masked_rows };
                    recording.call(&Class { wide, ..class }, |device| {
                        let tensor = || device.empty(dtype, &shape);
                        let (x, grad, mut o) = (tensor()?, tensor()?, tensor()?);
                        match direction {
                            "forward" => softmax::forward_into(&options, &x, &mut o),
                            "backward" => softmax::backward_into(&options, &x, &grad, &mut o),
                            _ => softmax::backward_from_input_into(&options, &x, &grad, &mut o),
                        }
                    })?;
                }
            }
        }
    }
    Ok(())
}
