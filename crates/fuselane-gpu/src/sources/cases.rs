//! The calls whose kernels are looked at: every operator, for every dtype and class of options.
//!
//! Sizes of two kinds: those that all vectors divide, and odd ones. Memory of one kind mostly,
//! without gaps.

use fuselane::{
    Act, Cosine, DType, FusedAct, GatePosition, Normalize, Pairing, Partial, Positions, Result,
    Rotate, Softmax, View,
};

use super::{Class, Recording};
use crate::cosine::CosineBackward;
use crate::normalize::{NormalizeBackward, NormalizeForward, Residual};
use crate::rotate::RotateBackward;
use crate::{AngleTable, Angles, Device, Tensor, act, cosine, normalize, rotate, softmax};

/// The dtypes of GPUs.
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Rows of all sizes that vectors divide, and odd ones.
const WIDE: [bool; 2] = [true, false];

pub(super) fn all(recording: &mut Recording) -> Result<()> {
    act_cases(recording)?;
    softmax_cases(recording)?;
    normalize_cases(recording)?;
    rotate_cases(recording)?;
    cosine_cases(recording)
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

/// Activations before an encoding, which differ in how they are computed.
const FUSED: [(&str, FusedAct); 3] = [
    ("silu", FusedAct::Elementwise(Act::Silu)),
    ("softmax of features", FusedAct::SoftmaxFeatures),
    ("softmax of sequence", FusedAct::SoftmaxSequence),
];
/// Tokens of an encoded tensor.
const TOKENS: usize = 64;

/// The angles of a call.
enum Given {
    Theta(Tensor),
    Table(Box<AngleTable>),
}

impl Given {
    /// For `columns` frequencies, the same for all heads.
    fn new(device: &Device, columns: usize, table: bool) -> Result<Self> {
        if !table {
            return Ok(Self::Theta(device.empty(DType::F32, &[1, columns])?));
        }
        let (theta, shape) = (vec![0.5f32; columns], [1, columns]);
        let theta = View::new(&theta, &shape)?;
        let table =
            fuselane::AngleTable::for_sequence(theta, columns, 0..TOKENS as i64, DType::F32)?;
        Ok(Self::Table(Box::new(AngleTable::upload(device, &table)?)))
    }

    fn angles(&self) -> Angles<'_> {
        match self {
            Self::Theta(theta) => Angles::Theta(theta),
            Self::Table(table) => Angles::Table(table),
        }
    }

    /// Memory for the gradient of theta.
    fn gradient(&self) -> Result<Option<Tensor>> {
        match self {
            Self::Theta(theta) => theta.device().empty(DType::F32, theta.shape()).map(Some),
            Self::Table(_) => Ok(None),
        }
    }
}

fn rotate_cases(recording: &mut Recording) -> Result<()> {
    let positions: Vec<i64> = (0..TOKENS as i64).collect();
    let plain = Rotate::default();
    // Options, frequencies for 64 pairs, whether they are a table's, and whether they go with odd
    // sizes.
    let mut variants = vec![
        ("plain", plain, 64, false, true),
        ("table", plain, 64, true, true),
        ("interleaved", Rotate { pairing: Pairing::Interleaved, ..plain }, 64, false, true),
        (
            "positions",
            Rotate { positions: Positions::PerToken(&positions), ..plain },
            64,
            false,
            true,
        ),
        ("sequences", Rotate { sequences: Some(&[0, 16, TOKENS]), ..plain }, 64, false, true),
        ("grid", Rotate { positions: Positions::Grid(&[8, 8]), ..plain }, 32, false, false),
        ("partial", Rotate { pairs: Some(16), ..plain }, 16, false, false),
        (
            "rotary dim",
            Rotate { pairs: Some(16), partial: Partial::RotaryDim, ..plain },
            16,
            false,
            false,
        ),
    ];
    for (words, act) in FUSED {
        variants.push((words, Rotate { act, ..plain }, 64, false, true));
    }
    for dtype in DTYPES {
        for (words, options, columns, table, odd) in &variants {
            for wide in WIDE.into_iter().filter(|wide| *wide || *odd) {
                let (features, columns) = if wide { (128, *columns) } else { (6, 3) };
                let shape = [2, TOKENS, 4, features];
                let class = class("rotate", dtype, &["rotate", words], wide);
                let has_act = options.act != FusedAct::default();
                recording.call(&class, |device| {
                    let given = Given::new(device, columns, *table)?;
                    let (x, mut o) = (device.empty(dtype, &shape)?, device.empty(dtype, &shape)?);
                    rotate::forward_into(options, &x, given.angles(), &mut o)
                })?;
                recording.call(&class, |device| {
                    let given = Given::new(device, columns, *table)?;
                    let (x, grad) = (device.empty(dtype, &shape)?, device.empty(dtype, &shape)?);
                    let (mut dx, mut dtheta) = (device.empty(dtype, &shape)?, given.gradient()?);
                    let x = (has_act || dtheta.is_some()).then_some(&x);
                    let (angles, dtheta) = (given.angles(), dtheta.as_mut());
                    let call = RotateBackward { x, grad: &grad, angles, dx: Some(&mut dx), dtheta };
                    rotate::backward_into(options, call)
                })?;
            }
        }
    }
    Ok(())
}

fn cosine_cases(recording: &mut Recording) -> Result<()> {
    let plain = Cosine::default();
    // Options, axes of a grid, whether the angles are a table's, and whether they go with odd
    // sizes.
    let mut variants = vec![
        ("plain", plain, 1, false, true),
        ("table", plain, 1, true, true),
        ("grid", Cosine { positions: Positions::Grid(&[8, 8]), ..plain }, 2, false, false),
    ];
    for (words, act) in FUSED {
        variants.push((words, Cosine { act, ..plain }, 1, false, true));
    }
    for dtype in DTYPES {
        for (words, options, axes, table, odd) in &variants {
            for wide in WIDE.into_iter().filter(|wide| *wide || *odd) {
                let features = if wide { 128 } else { 5 };
                let columns = features / axes;
                let (shape, twice) = ([2, 4, TOKENS, features], [2, 4, TOKENS, 2 * features]);
                let class = class("cosine", dtype, &["cosine", words], wide);
                let has_act = options.act != FusedAct::default();
                recording.call(&class, |device| {
                    let given = Given::new(device, columns, *table)?;
                    let (x, mut o) = (device.empty(dtype, &shape)?, device.empty(dtype, &twice)?);
                    cosine::forward_into(options, &x, given.angles(), &mut o)
                })?;
                recording.call(&class, |device| {
                    let given = Given::new(device, columns, *table)?;
                    let (x, grad) = (device.empty(dtype, &shape)?, device.empty(dtype, &twice)?);
                    let (mut dx, mut dtheta) = (device.empty(dtype, &shape)?, given.gradient()?);
                    let x = (has_act || dtheta.is_some()).then_some(&x);
                    let (angles, dtheta) = (given.angles(), dtheta.as_mut());
                    let call = CosineBackward { x, grad: &grad, angles, dx: Some(&mut dx), dtheta };
                    cosine::backward_into(options, call)
                })?;
            }
        }
    }
    Ok(())
}

fn normalize_cases(recording: &mut Recording) -> Result<()> {
    struct Variant {
        words: &'static str,
        options: Normalize,
        weight: bool,
        bias: bool,
        residual: bool,
        gate: bool,
    }
    let plain = |words, options| {
        let (weight, bias, residual, gate) = (true, false, false, false);
        Variant { words, options, weight, bias, residual, gate }
    };
    let gated =
        |gate_position, gate_act| Normalize { gate_position, gate_act, ..Normalize::rms_norm() };
    let layer = Normalize { gate_position: GatePosition::Post, ..Normalize::layer_norm() };
    let variants = [
        plain("rms", Normalize::rms_norm()),
        Variant { weight: false, ..plain("srms", Normalize::srms_norm()) },
        Variant { bias: true, ..plain("layer", Normalize::layer_norm()) },
        Variant { residual: true, ..plain("rms, residual", Normalize::rms_norm()) },
        Variant { gate: true, ..plain("rms, gate", gated(GatePosition::Pre, Act::Sigmoid)) },
        Variant {
            gate: true,
            ..plain("rms, silu gate after", gated(GatePosition::Post, Act::Silu))
        },
        Variant { bias: true, residual: true, gate: true, ..plain("layer, all", layer) },
    ];
    // Rows that a part of a plane, a cube, and only a second reading can hold; and one in groups.
    const SIZES: [(&str, [usize; 2], usize, bool); 5] = [
        ("row of 64", [64, 64], 1, true),
        ("row of 4096", [16, 4096], 1, true),
        ("row of 262144", [2, 262_144], 1, true),
        ("groups of 128", [16, 4096], 32, true),
        ("row of 33", [7, 33], 1, false),
    ];
    for dtype in DTYPES {
        for variant in &variants {
            for (size, shape, groups, wide) in SIZES {
                let Variant { words, options, weight, bias, residual, gate } = *variant;
                let options = Normalize { groups, ..options };
                let tensors = |device: &Device, given: bool, shape: &[usize], dtype| {
                    given.then(|| device.empty(dtype, shape)).transpose()
                };
                let class = Class { wide, ..class("normalize", dtype, &[words, size], true) };
                recording.call(&class, |device| {
                    let like_x = |given| tensors(device, given, &shape, dtype);
                    let parameter = |given| tensors(device, given, &shape[1..], dtype);
                    let kept = |given| tensors(device, given, &[shape[0], groups], DType::F32);
                    let (x, mut o) = (device.empty(dtype, &shape)?, device.empty(dtype, &shape)?);
                    let (weight, bias, gate) =
                        (parameter(weight)?, parameter(bias)?, like_x(gate)?);
                    let (added, mut sum) = (like_x(residual)?, like_x(residual)?);
                    let (mut rstd, mut mean) = (kept(true)?, kept(options.center)?);
                    let residual = match (&added, &mut sum) {
                        (Some(added), Some(sum)) => Residual::AddInto(added, sum),
                        _ => Residual::None,
                    };
                    normalize::forward_into(
                        &options,
                        NormalizeForward {
                            weight: weight.as_ref(),
                            bias: bias.as_ref(),
                            gate: gate.as_ref(),
                            residual,
                            rstd: rstd.as_mut(),
                            mean: mean.as_mut(),
                            ..NormalizeForward::new(&x, &mut o)
                        },
                    )
                })?;
                recording.call(&class, |device| {
                    let like_x = |given| tensors(device, given, &shape, dtype);
                    let parameter = |given| tensors(device, given, &shape[1..], dtype);
                    let kept = |given| tensors(device, given, &[shape[0], groups], DType::F32);
                    let (grad, x) = (device.empty(dtype, &shape)?, device.empty(dtype, &shape)?);
                    let rstd = device.empty(DType::F32, &[shape[0], groups])?;
                    let (given_weight, given_bias, given_gate) =
                        (parameter(weight)?, parameter(bias)?, like_x(gate)?);
                    let (mean, arriving) = (kept(options.center)?, like_x(residual)?);
                    let (mut dx, mut dgate) = (like_x(true)?, like_x(gate)?);
                    let (mut dweight, mut dbias) = (parameter(weight)?, parameter(bias)?);
                    normalize::backward_into(
                        &options,
                        NormalizeBackward {
                            gate: given_gate.as_ref(),
                            weight: given_weight.as_ref(),
                            bias: given_bias.as_ref(),
                            mean: mean.as_ref(),
                            grad_residual_out: arriving.as_ref(),
                            dx: dx.as_mut(),
                            dgate: dgate.as_mut(),
                            dweight: dweight.as_mut(),
                            dbias: dbias.as_mut(),
                            ..NormalizeBackward::new(&grad, &x, &rstd)
                        },
                    )
                })?;
            }
        }
    }
    Ok(())
}
