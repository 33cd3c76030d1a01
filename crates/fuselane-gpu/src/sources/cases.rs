//! The calls whose kernels are looked at: every operator, for every dtype and class of options.
//!
//! Sizes of two kinds: those that all vectors divide, and odd ones. Memory of one kind mostly,
//! without gaps.

use fuselane::{
    Act, Cosine, DType, FusedAct, GatePosition, Normalize, Pairing, Partial, Positions, Result,
    Rotate, Softmax, View, WeightForm,
};

use super::{Class, Recording};
use crate::normalize::{NormalizeBackward, NormalizeForward, Residual};
use crate::ops::encode::{self, Encoder, EncodingBackward};
use crate::{AngleTable, Angles, Device, Tensor, act, normalize, softmax};

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

/// Records a call, with indices of 32 bits and, if `wide_indices`, of 64 bits too: for one dtype, as the
/// indices are the same for all.
fn call(
    recording: &mut Recording,
    class: &Class,
    wide_indices: bool,
    run: impl Fn(&Device) -> Result<()>,
) -> Result<()> {
    recording.call(class, &run)?;
    if wide_indices && class.dtype == DType::F32 {
        let options = format!("{}, 64-bit indices", class.options);
        recording.call_wide_indices(&Class { options, ..class.clone() }, &run)?;
    }
    Ok(())
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
        call(recording, &gaps, true, with_gaps)?;
        call(recording, &class("act", dtype, &["silu"], true), true, |device| {
            let [x, mut o, _] = tensors(device, dtype, true)?;
            act::forward_into(Act::Silu, &x, &mut o)
        })?;
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
                    let wide_indices = !log && !zero_masked_rows && wide;
                    call(recording, &Class { wide, ..class }, wide_indices, |device| {
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
enum CaseAngles {
    Theta(Tensor),
    Table(Box<AngleTable>),
}

impl CaseAngles {
    fn new(device: &Device, [rows, columns]: [usize; 2], table: bool) -> Result<Self> {
        if !table {
            return Ok(Self::Theta(device.empty(DType::F32, &[rows, columns])?));
        }
        let (theta, shape) = (vec![0.5f32; rows * columns], [rows, columns]);
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

/// Options of an encoding, with what goes with them.
struct Variant<O> {
    words: &'static str,
    options: O,
    /// The shape of theta; with odd sizes, its columns are as many as there are angles, or one.
    theta: [usize; 2],
    /// Whether the angles are a table's.
    table: bool,
    /// Features, of which vectors divide all.
    features: usize,
    /// Whether it goes with odd sizes too.
    odd: bool,
    /// Whether indices of 64 bits are looked at as well.
    wide_indices: bool,
}

impl<O> Variant<O> {
    fn new(words: &'static str, options: O, columns: usize) -> Self {
        let (theta, table, features, odd, wide_indices) = ([1, columns], false, 128, true, false);
        Self { words, options, theta, table, features, odd, wide_indices }
    }

    /// Features and the shape of theta, with `angles` of them if sizes are odd.
    fn sizes(&self, wide: bool, odd_features: usize, angles: usize) -> (usize, [usize; 2]) {
        let [rows, columns] = self.theta;
        match wide {
            true => (self.features, self.theta),
            false => (odd_features, [rows, columns.min(angles)]),
        }
    }
}

/// Heads of an encoded tensor.
const HEADS: usize = 4;
/// Features of a row that no registers hold.
const LONG: usize = 16_384;

fn rotate_cases(recording: &mut Recording) -> Result<()> {
    let per_token: Vec<i64> = (0..TOKENS as i64).collect();
    let per_batch: Vec<i64> = (0..2 * TOKENS as i64).collect();
    let plain = Rotate::default();
    let new = |words, options| Variant::new(words, options, 64);
    let partial = Rotate { pairs: Some(16), ..plain };
    let rotary = Rotate { partial: Partial::RotaryDim, ..partial };
    let per_batch = Rotate { positions: Positions::PerBatch(&per_batch), ..plain };
    let grid = Rotate { positions: Positions::Grid(&[8, 8]), ..plain };
    let mut variants = vec![
        new("plain", plain),
        Variant { table: true, ..new("table", plain) },
        Variant { theta: [HEADS, 64], ..new("theta per head", plain) },
        Variant { theta: [1, 1], ..new("one theta", plain) },
        new("interleaved", Rotate { pairing: Pairing::Interleaved, ..plain }),
        new("positions", Rotate { positions: Positions::PerToken(&per_token), ..plain }),
        new("positions per batch", per_batch),
        new("sequences", Rotate { sequences: Some(&[0, 16, TOKENS]), ..plain }),
        Variant { theta: [1, 32], odd: false, ..new("grid", grid) },
        Variant { theta: [1, 16], odd: false, ..new("partial", partial) },
        Variant { theta: [1, 16], odd: false, ..new("rotary dim", rotary) },
    ];
    for (words, act) in FUSED {
        variants.push(Variant { wide_indices: true, ..new(words, Rotate { act, ..plain }) });
    }
    for (words, options) in [
        ("softmax of features, positions per batch", per_batch),
        ("softmax of features, partial", partial),
    ] {
        let options = Rotate { act: FusedAct::SoftmaxFeatures, ..options };
        let theta = [1, options.pairs.unwrap_or(64)];
        variants.push(Variant { theta, odd: false, ..new(words, options) });
    }
    let long = Rotate { act: FusedAct::SoftmaxFeatures, ..plain };
    variants.push(Variant {
        theta: [1, LONG / 2],
        features: LONG,
        odd: false,
        wide_indices: true,
        ..new("softmax of long rows", long)
    });
    encoding_cases(recording, &variants, [2, TOKENS, HEADS], (6, 3))
}

fn cosine_cases(recording: &mut Recording) -> Result<()> {
    let plain = Cosine::default();
    let new = |words, options| Variant::new(words, options, 128);
    let grid = Cosine { positions: Positions::Grid(&[8, 8]), ..plain };
    let mut variants = vec![
        new("plain", plain),
        Variant { table: true, ..new("table", plain) },
        Variant { theta: [HEADS, 128], ..new("theta per head", plain) },
        Variant { theta: [1, 64], odd: false, ..new("grid", grid) },
    ];
    for (words, act) in FUSED {
        variants.push(Variant { wide_indices: true, ..new(words, Cosine { act, ..plain }) });
    }
    let long = Cosine { act: FusedAct::SoftmaxFeatures, ..plain };
    variants.push(Variant {
        theta: [1, LONG],
        features: LONG,
        odd: false,
        ..new("softmax of long rows", long)
    });
    encoding_cases(recording, &variants, [2, HEADS, TOKENS], (5, 5))
}

/// Records the variants of an encoding, of `outer` dimensions before the features; of odd sizes,
/// with the features and angles in `odd`.
fn encoding_cases<O: Encoder>(
    recording: &mut Recording,
    variants: &[Variant<O>],
    outer: [usize; 3],
    odd: (usize, usize),
) -> Result<()> {
    for dtype in DTYPES {
        for variant in variants {
            let Variant { words, options, table, .. } = variant;
            for wide in WIDE.into_iter().filter(|wide| *wide || variant.odd) {
                let (features, theta) = variant.sizes(wide, odd.0, odd.1);
                let [x_shape, o_shape] = [1, O::OUTPUTS].map(|outputs| {
                    let [batch, first, second] = outer;
                    [batch, first, second, features * outputs]
                });
                let class = class(O::NAME, dtype, &[O::NAME, words], wide);
                let wide_indices = variant.wide_indices && wide;
                let has_act = options.options().act != FusedAct::default();
                call(recording, &class, wide_indices, |device| {
                    let given = CaseAngles::new(device, theta, *table)?;
                    let x = device.empty(dtype, &x_shape)?;
                    let mut o = device.empty(dtype, &o_shape)?;
                    encode::forward_into(options, &x, given.angles(), &mut o)
                })?;
                call(recording, &class, wide_indices, |device| {
                    let given = CaseAngles::new(device, theta, *table)?;
                    let x = device.empty(dtype, &x_shape)?;
                    let grad = device.empty(dtype, &o_shape)?;
                    let (mut dx, mut dtheta) = (device.empty(dtype, &x_shape)?, given.gradient()?);
                    let x = (has_act || dtheta.is_some()).then_some(&x);
                    let (angles, dx, dtheta) = (given.angles(), Some(&mut dx), dtheta.as_mut());
                    let call = EncodingBackward { x, grad: &grad, angles, dx, dtheta };
                    encode::backward_into(options, call)
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
        /// Whether the sum overwrites the residual, whose gradient is asked for too.
        in_place: bool,
        gate: bool,
        wide_indices: bool,
    }
    let plain = |words, options| {
        let (weight, bias, residual, in_place, gate, wide_indices) =
            (true, false, false, false, false, false);
        Variant { words, options, weight, bias, residual, in_place, gate, wide_indices }
    };
    let gated =
        |gate_position, gate_act| Normalize { gate_position, gate_act, ..Normalize::rms_norm() };
    let layer = Normalize { gate_position: GatePosition::Post, ..Normalize::layer_norm() };
    let one_plus = Normalize { weight_form: WeightForm::OnePlus, ..Normalize::rms_norm() };
    let variants = [
        Variant { wide_indices: true, ..plain("rms", Normalize::rms_norm()) },
        plain("rms, one plus weight", one_plus),
        Variant {
            residual: true,
            in_place: true,
            ..plain("rms, residual in place", Normalize::rms_norm())
        },
        Variant { weight: false, ..plain("srms", Normalize::srms_norm()) },
        Variant { bias: true, ..plain("layer", Normalize::layer_norm()) },
        Variant { residual: true, ..plain("rms, residual", Normalize::rms_norm()) },
        Variant { gate: true, ..plain("rms, gate", gated(GatePosition::Pre, Act::Sigmoid)) },
        Variant {
            gate: true,
            ..plain("rms, silu gate after", gated(GatePosition::Post, Act::Silu))
        },
        Variant {
            bias: true,
            residual: true,
            gate: true,
            wide_indices: true,
            ..plain("layer, all", layer)
        },
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
                let Variant {
                    words,
                    options,
                    weight,
                    bias,
                    residual,
                    in_place,
                    gate,
                    wide_indices,
                } = *variant;
                let wide_indices = wide_indices && wide;
                let options = Normalize { groups, ..options };
                let tensors = |device: &Device, given: bool, shape: &[usize], dtype| {
                    given.then(|| device.empty(dtype, shape)).transpose()
                };
                let class = Class { wide, ..class("normalize", dtype, &[words, size], true) };
                call(recording, &class, wide_indices, |device| {
                    let like_x = |given| tensors(device, given, &shape, dtype);
                    let parameter = |given| tensors(device, given, &shape[1..], dtype);
                    let statistic = |given| tensors(device, given, &[shape[0], groups], DType::F32);
                    let (x, mut o) = (device.empty(dtype, &shape)?, device.empty(dtype, &shape)?);
                    let (weight, bias, gate) =
                        (parameter(weight)?, parameter(bias)?, like_x(gate)?);
                    let (added, mut sum) = (like_x(residual && !in_place)?, like_x(residual)?);
                    let (mut rstd, mut mean) = (statistic(true)?, statistic(options.center)?);
                    let residual = match (&added, &mut sum) {
                        (Some(added), Some(sum)) => Residual::AddInto(added, sum),
                        (None, Some(sum)) => Residual::AddInPlace(sum),
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
                call(recording, &class, wide_indices, |device| {
                    let like_x = |given| tensors(device, given, &shape, dtype);
                    let parameter = |given| tensors(device, given, &shape[1..], dtype);
                    let statistic = |given| tensors(device, given, &[shape[0], groups], DType::F32);
                    let (grad, x) = (device.empty(dtype, &shape)?, device.empty(dtype, &shape)?);
                    let rstd = device.empty(DType::F32, &[shape[0], groups])?;
                    let (given_weight, given_bias, given_gate) =
                        (parameter(weight)?, parameter(bias)?, like_x(gate)?);
                    let (mean, arriving) = (statistic(options.center)?, like_x(residual)?);
                    let (mut dx, mut dgate) = (like_x(true)?, like_x(gate)?);
                    let mut dresidual = like_x(in_place)?;
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
                            dresidual: dresidual.as_mut(),
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
