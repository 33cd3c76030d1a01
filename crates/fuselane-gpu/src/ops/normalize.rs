//! Normalization over the last dimension, with residual, gate, weight and bias fused in; see
//! [`fuselane::Normalize`] for the formulas.
//!
//! A team of units works on one group of one row. It reads p (the sum of x and the residual, gated
//! where the gate comes first) into registers, sums over it, and writes the output from them; rows
//! too long for registers are read again in each pass.
//!
//! **Numerics.** Everything is f32, rounded once at the store. The mean is taken twice: after a
//! first one m, p - m has a small mean of its own (what rounding left over), which is subtracted
//! too, so that a mean far above the deviation costs nothing.

use cubecl::prelude::*;
use fuselane::{Act, DType, GatePosition, Normalize, Result, View, WeightForm};

use crate::copy::{narrow_into, through_f32, widened};
use crate::device::Device;
use crate::kernel::math;
use crate::kernel::reduce::{Fold, Team, over_lanes, over_units};
use crate::kernel::storage::{Format, Place, cube_number, load, row_start, store};
use crate::launch::{Grid, Rows, Storage, buffer, largest, launch, one_device, team, with_words};
use crate::tensor::Tensor;

const NAME: &str = "normalize";

/// How the weight enters, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Weight {
    None,
    Plain,
    OnePlus,
}

/// Where the gate multiplies, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Gate {
    None,
    Pre,
    Post,
}

/// What the input of the normalization is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Inputs {
    residual: bool,
    gate: Gate,
    act: Act,
    weight: Weight,
    bias: bool,
    center: bool,
    /// Whether activations are stored in 16 bits.
    short: bool,
    format: Format,
}

/// What a forward does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ForwardKind {
    inputs: Inputs,
    /// Whether the sum of x and the residual is written.
    sum: bool,
    rstd: bool,
    mean: bool,
    team: Team,
    /// Vectors that each unit keeps; 0 where rows are read again.
    kept: usize,
}

/// Vectors that a unit sums before it adds them to its sum, where rows are read again: the error
/// of a sum does not grow with the row then.
const CHUNK: usize = 64;

/// x, with the residual.
#[cube]
fn sum_at<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    residual: &[Vector<E, P>],
    x_at: usize,
    residual_at: usize,
    #[comptime] inputs: Inputs,
) -> Vector<f32, N> {
    let mut sum = load::<E, P, N>(x, x_at, inputs.format);
    if comptime!(inputs.residual) {
        sum += load::<E, P, N>(residual, residual_at, inputs.format);
    }
    sum
}

/// p: the sum, with the gate where that comes first.
#[cube]
fn gated<E: Numeric, P: Size, N: Size>(
    sum: Vector<f32, N>,
    gate: &[Vector<E, P>],
    gate_at: usize,
    #[comptime] inputs: Inputs,
) -> Vector<f32, N> {
    let mut p = sum;
    if comptime!(inputs.gate == Gate::Pre) {
        let gate = load::<E, P, N>(gate, gate_at, inputs.format);
        p = p * math::value::<N>(gate, inputs.act, inputs.short);
    }
    p
}

/// The scale with the weight.
#[cube]
fn factor_at<N: Size>(
    weight: &[Vector<f32, N>],
    at: usize,
    scale: f32,
    #[comptime] kind: Weight,
) -> Vector<f32, N> {
    let mut factor = Vector::<f32, N>::new(scale);
    if comptime!(kind == Weight::Plain) {
        factor = factor * weight[at];
    }
    if comptime!(kind == Weight::OnePlus) {
        factor = factor * (Vector::<f32, N>::new(1.0f32) + weight[at]);
    }
    factor
}

/// The output of p, whose mean is `near + rest`.
#[cube]
fn output_of<E: Numeric, P: Size, N: Size>(
    p: Vector<f32, N>,
    near: f32,
    rest: f32,
    rstd: f32,
    weight: &[Vector<f32, N>],
    bias: &[Vector<f32, N>],
    feature: usize,
    gate: &[Vector<E, P>],
    gate_at: usize,
    scale: f32,
    #[comptime] inputs: Inputs,
) -> Vector<f32, N> {
    let mut q = p;
    if comptime!(inputs.center) {
        q = q - Vector::<f32, N>::new(near) - Vector::<f32, N>::new(rest);
    }
    let r = q * Vector::<f32, N>::new(rstd);
    let mut o = r * factor_at::<N>(weight, feature, scale, inputs.weight);
    if comptime!(inputs.bias) {
        o = o + bias[feature];
    }
    if comptime!(inputs.gate == Gate::Post) {
        let gate = load::<E, P, N>(gate, gate_at, inputs.format);
        o = o * math::value::<N>(gate, inputs.act, inputs.short);
    }
    o
}

/// `vectors` are those of a group, `rows` the groups of all rows, `len` the numbers of a group.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn normalize_forward<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    residual: &[Vector<E, P>],
    gate: &[Vector<E, P>],
    weight: &[Vector<f32, N>],
    bias: &[Vector<f32, N>],
    o: &mut [Vector<E, P>],
    sum: &mut [Vector<E, P>],
    rstd: &mut [f32],
    mean: &mut [f32],
    x_place: &Place,
    residual_place: &Place,
    gate_place: &Place,
    o_place: &Place,
    sum_place: &Place,
    rstd_place: &Place,
    mean_place: &Place,
    shape: &Sequence<usize>,
    groups: usize,
    vectors: usize,
    rows: usize,
    len: f32,
    eps: f32,
    scale: f32,
    #[comptime] kind: ForwardKind,
) {
    let inputs = comptime!(kind.inputs);
    let team = comptime!(kind.team);
    let kept = comptime!(kind.kept);
    let units = comptime!(kind.team.units as usize);
    let format = comptime!(kind.inputs.format);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(kind.team.shared()));
    let number = cube_number() * comptime!(kind.team.rows as usize) + UNIT_POS_Y as usize;
    let unit = UNIT_POS_X as usize;
    // Units beyond the last row sum zeros.
    let end = select(number < rows, vectors, 0usize);
    let row = number / groups;
    let group = number % groups;
    let first = group * vectors;
    let x_at = row_start(x_place, shape, row) + first;
    let o_at = row_start(o_place, shape, row) + first;
    let mut residual_at = 0usize;
    if comptime!(kind.inputs.residual) {
        residual_at = row_start(residual_place, shape, row) + first;
    }
    let mut gate_at = 0usize;
    if comptime!(kind.inputs.gate != Gate::None) {
        gate_at = row_start(gate_place, shape, row) + first;
    }
    let mut sum_at_ = 0usize;
    if comptime!(kind.sum) {
        sum_at_ = row_start(sum_place, shape, row) + first;
    }
    let zero = Vector::<f32, N>::new(0.0f32);
    let mut p = Array::<Vector<f32, N>>::new(comptime!(kind.kept.max(1)));

    // The sum of p, if it is centered, or of its squares.
    let mut total = zero;
    if comptime!(kept > 0) {
        #[unroll]
        for i in 0..kept {
            let column = unit + comptime!(i * units);
            let mut value = zero;
            if column < end {
                let s = sum_at::<E, P, N>(x, residual, x_at + column, residual_at + column, inputs);
                if comptime!(kind.sum) {
                    store::<E, P, N>(sum, sum_at_ + column, s, format);
                }
                value = gated::<E, P, N>(s, gate, gate_at + column, inputs);
            }
            p[i] = value;
            if comptime!(kind.inputs.center) {
                total += value;
            } else {
                total += value * value;
            }
        }
    } else {
        let mut recent = zero;
        let mut i = 0usize;
        let mut column = unit;
        while column < end {
            let s = sum_at::<E, P, N>(x, residual, x_at + column, residual_at + column, inputs);
            let value = gated::<E, P, N>(s, gate, gate_at + column, inputs);
            if comptime!(kind.inputs.center) {
                recent += value;
            } else {
                recent += value * value;
            }
            i += 1usize;
            if i % CHUNK == 0usize {
                total += recent;
                recent = zero;
            }
            column += units;
        }
        total += recent;
    }
    let total = over_units(over_lanes::<N>(total, Fold::Sum), &mut shared, Fold::Sum, team);

    let mut near = 0.0f32;
    let mut rest = 0.0f32;
    let mut square = total / len;
    if comptime!(kind.inputs.center) {
        near = total / len;
        let nears = Vector::<f32, N>::new(near);
        let mut total = zero;
        let mut squares = zero;
        if comptime!(kept > 0) {
            #[unroll]
            for i in 0..kept {
                if unit + comptime!(i * units) < end {
                    let q = p[i] - nears;
                    total += q;
                    squares += q * q;
                }
            }
        } else {
            let mut recent = zero;
            let mut recent_squares = zero;
            let mut i = 0usize;
            let mut column = unit;
            while column < end {
                let s = sum_at::<E, P, N>(x, residual, x_at + column, residual_at + column, inputs);
                let q = gated::<E, P, N>(s, gate, gate_at + column, inputs) - nears;
                recent += q;
                recent_squares += q * q;
                i += 1usize;
                if i % CHUNK == 0usize {
                    total += recent;
                    squares += recent_squares;
                    recent = zero;
                    recent_squares = zero;
                }
                column += units;
            }
            total += recent;
            squares += recent_squares;
        }
        let total = over_units(over_lanes::<N>(total, Fold::Sum), &mut shared, Fold::Sum, team);
        let squares = over_units(over_lanes::<N>(squares, Fold::Sum), &mut shared, Fold::Sum, team);
        rest = total / len;
        square = squares / len - rest * rest;
        // Rounding must not make it negative; a NaN stays one.
        square = select(square < 0.0f32, 0.0f32, square);
    }
    let inverse = 1.0f32 / (square + eps).sqrt();

    if unit == 0usize && number < rows {
        if comptime!(kind.rstd) {
            rstd[row_start(rstd_place, shape, row) + group] = inverse;
        }
        if comptime!(kind.mean) {
            mean[row_start(mean_place, shape, row) + group] = near + rest;
        }
    }
    if comptime!(kept > 0) {
        #[unroll]
        for i in 0..kept {
            let column = unit + comptime!(i * units);
            if column < end {
                let y = output_of::<E, P, N>(
                    p[i], near, rest, inverse, weight, bias, first + column, gate,
                    gate_at + column, scale, inputs,
                );
                store::<E, P, N>(o, o_at + column, y, format);
            }
        }
    } else {
        let mut column = unit;
        while column < end {
            let s = sum_at::<E, P, N>(x, residual, x_at + column, residual_at + column, inputs);
            // The sum may overwrite the residual, which is read here for the last time.
            if comptime!(kind.sum) {
                store::<E, P, N>(sum, sum_at_ + column, s, format);
            }
            let value = gated::<E, P, N>(s, gate, gate_at + column, inputs);
            let y = output_of::<E, P, N>(
                value, near, rest, inverse, weight, bias, first + column, gate,
                gate_at + column, scale, inputs,
            );
            store::<E, P, N>(o, o_at + column, y, format);
            column += units;
        }
    }
}

/// What becomes of the residual.
#[derive(Debug, Default)]
pub enum Residual<'a> {
    /// There is none.
    #[default]
    None,
    /// It is added to x; the sum is not kept.
    Add(&'a Tensor),
    /// It is added to x, and the second tensor receives the sum.
    AddInto(&'a Tensor, &'a mut Tensor),
    /// It is added to x, and its own memory receives the sum.
    AddInPlace(&'a mut Tensor),
}

/// The operands of [`forward_into`]; those of [`fuselane::NormalizeForward`].
#[derive(Debug)]
pub struct NormalizeForward<'a> {
    /// What is normalized, along its last dimension.
    pub x: &'a Tensor,
    /// One weight for each element of a row, of any dtype.
    pub weight: Option<&'a Tensor>,
    /// One bias for each element of a row, of any dtype.
    pub bias: Option<&'a Tensor>,
    /// The gate, before its activation.
    pub gate: Option<&'a Tensor>,
    /// What is added to x first.
    pub residual: Residual<'a>,
    /// Receives the result.
    pub o: &'a mut Tensor,
    /// Receives 1 / sigma of each row and group, in f32: the shape of x with `groups` for its last
    /// dimension.
    pub rstd: Option<&'a mut Tensor>,
    /// Receives the mean that was subtracted, if centered; shape and dtype as for `rstd`.
    pub mean: Option<&'a mut Tensor>,
}

impl<'a> NormalizeForward<'a> {
    /// x to o, with nothing else.
    pub fn new(x: &'a Tensor, o: &'a mut Tensor) -> Self {
        let (weight, bias, gate, rstd, mean) = (None, None, None, None, None);
        Self { x, weight, bias, gate, residual: Residual::None, o, rstd, mean }
    }
}

/// A result with what its backward needs, from [`forward_keeping`].
#[derive(Debug)]
pub struct Normalized {
    /// The result.
    pub o: Tensor,
    /// 1 / sigma of each row and group.
    pub rstd: Tensor,
    /// The mean of each row and group, if centered.
    pub mean: Option<Tensor>,
}

/// Normalizes into the caller's tensors; see [`Normalize::forward_into`].
pub fn forward_into(options: &Normalize, call: NormalizeForward<'_>) -> Result<()> {
    let NormalizeForward { x, weight, bias, gate, residual, o, rstd, mean } = call;
    let (residual, sum, sum_name) = match &residual {
        Residual::None => (None, None, "residual_out"),
        Residual::Add(residual) => (Some(*residual), None, "residual_out"),
        Residual::AddInto(residual, sum) => (Some(*residual), Some(&**sum), "residual_out"),
        Residual::AddInPlace(residual) => (Some(&**residual), Some(&**residual), "residual"),
    };
    let in_place = sum_name == "residual";
    let (o, rstd, mean) = (&*o, rstd.as_deref(), mean.as_deref());
    one_device(
        NAME,
        [
            ("x", Some(x)),
            ("weight", weight),
            ("bias", bias),
            ("residual", residual),
            ("gate", gate),
            ("o", Some(o)),
            (sum_name, sum),
            ("rstd", rstd),
            ("mean", mean),
        ],
    )?;
    let view = |tensor: Option<&Tensor>| tensor.map(Tensor::view).transpose();
    let view_mut = |tensor: Option<&Tensor>| tensor.map(Tensor::view_mut).transpose();
    options.check_forward(fuselane::NormalizeForward {
        x: x.view()?,
        weight: view(weight)?,
        bias: view(bias)?,
        gate: view(gate)?,
        residual: match (residual, sum) {
            (Some(residual), _) if in_place => {
                fuselane::Residual::AddInPlace(residual.view_mut()?)
            }
            (Some(residual), Some(sum)) => {
                fuselane::Residual::AddInto(residual.view()?, sum.view_mut()?)
            }
            (Some(residual), None) => fuselane::Residual::Add(residual.view()?),
            (None, _) => fuselane::Residual::None,
        },
        o: o.view_mut()?,
        rstd: view_mut(rstd)?,
        mean: view_mut(mean)?,
    })?;
    let widen = |tensor: Option<&Tensor>| tensor.map(|t| widened(NAME, t)).transpose();
    let (weight, bias) = (widen(weight)?, widen(bias)?);
    let (weight, bias) = (weight.as_ref(), bias.as_ref());
    run_forward(options, Forward { x, residual, gate, weight, bias, o, sum, rstd, mean })
}

/// The result in a new tensor, for the plain case.
pub fn forward(options: &Normalize, x: &Tensor, weight: Option<&Tensor>) -> Result<Tensor> {
    let mut o = x.device().empty(x.dtype(), x.shape())?;
    forward_into(options, NormalizeForward { weight, ..NormalizeForward::new(x, &mut o) })?;
    Ok(o)
}

/// The result and the statistics in new tensors, for the backward.
pub fn forward_keeping(
    options: &Normalize,
    x: &Tensor,
    weight: Option<&Tensor>,
) -> Result<Normalized> {
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = options.groups;
    }
    let statistic = || x.device().empty(DType::F32, &shape);
    let (mut o, mut rstd) = (x.device().empty(x.dtype(), x.shape())?, statistic()?);
    let mut mean = if options.center { Some(statistic()?) } else { None };
    forward_into(
        options,
        NormalizeForward {
            weight,
            rstd: Some(&mut rstd),
            mean: mean.as_mut(),
            ..NormalizeForward::new(x, &mut o)
        },
    )?;
    Ok(Normalized { o, rstd, mean })
}

/// A checked forward. The parameters are dense and of f32; `residual` and `sum` may be one.
#[derive(Clone, Copy)]
struct Forward<'a> {
    x: &'a Tensor,
    residual: Option<&'a Tensor>,
    gate: Option<&'a Tensor>,
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
    o: &'a Tensor,
    sum: Option<&'a Tensor>,
    rstd: Option<&'a Tensor>,
    mean: Option<&'a Tensor>,
}

impl Inputs {
    fn new(
        options: &Normalize,
        storage: Storage,
        [residual, gate, weight, bias]: [Option<&Tensor>; 4],
    ) -> Self {
        Self {
            residual: residual.is_some(),
            gate: match (gate, options.gate_position) {
                (None, _) => Gate::None,
                (_, GatePosition::Pre) => Gate::Pre,
                (_, GatePosition::Post) => Gate::Post,
            },
            // One kernel for all calls without a gate.
            act: gate.map_or(Act::None, |_| options.gate_act),
            weight: match (weight, options.weight_form) {
                (None, _) => Weight::None,
                (_, WeightForm::Plain) => Weight::Plain,
                (_, WeightForm::OnePlus) => Weight::OnePlus,
            },
            bias: bias.is_some(),
            center: options.center,
            short: storage.is_short(),
            format: storage.format(),
        }
    }
}

fn run_forward(options: &Normalize, call: Forward<'_>) -> Result<()> {
    let Forward { x, residual, gate, weight, bias, o, sum, rstd, mean } = call;
    let (device, storage) = (x.device(), Storage::of(x.device(), x.dtype()));
    let d = x.shape().last().copied().unwrap_or(1);
    if d == 0 {
        for statistic in rstd.into_iter().chain(mean) {
            fill(statistic, f32::NAN)?;
        }
        return Ok(());
    }
    let tensors = [Some(x), residual, gate, Some(o), sum, rstd, mean];
    let rows = Rows::new(tensors, d);
    if rows.count() == 0 {
        return Ok(());
    }
    let (groups, e) = (options.groups, d / options.groups);
    let Some(width) = rows.width(device, storage, 5, &[e]) else {
        let (inputs, outputs) = ([Some(x), residual, gate], [Some(o), sum]);
        return through_f32(NAME, inputs, outputs, |[x, residual, gate], [o, sum]| {
            match (x, o) {
                (Some(x), Some(o)) => {
                    run_forward(options, Forward { x, residual, gate, o, sum, ..call })
                }
                _ => Ok(()),
            }
        });
    };
    let (vectors, n) = (e / width.numbers, width.numbers);
    let (team, kept) = team(device, vectors, n);
    let kind = ForwardKind {
        inputs: Inputs::new(options, storage, [residual, gate, weight, bias]),
        sum: sum.is_some(),
        rstd: rstd.is_some(),
        mean: mean.is_some(),
        team,
        kept,
    };
    let count = rows.count() * groups;
    let grid = Grid::of_rows(NAME, device, count, team, largest(tensors))?;
    let unused = unused(device)?;
    let parameter = |tensor: Option<&Tensor>| buffer(tensor.unwrap_or(&unused), Storage::F32);
    let output = |tensor: Option<&Tensor>, storage| buffer(tensor.unwrap_or(&unused), storage);
    let [x, residual, gate, o, sum_rows] = [0, 1, 2, 3, 4].map(|i| rows.operand(i));
    let [rstd_rows, mean_rows] = [5, 6].map(|i| rows.operand(i));
    with_words!(storage, E => launch!(
        device, normalize_forward::<E>, grid, width.words, n,
        x.buffer(storage), residual.buffer(storage), gate.buffer(storage),
        parameter(weight), parameter(bias),
        o.buffer(storage), output(sum, storage),
        output(rstd, Storage::F32), output(mean, Storage::F32),
        x.place(n), residual.place(n), gate.place(n), o.place(n), sum_rows.place(n),
        rstd_rows.place(1), mean_rows.place(1),
        rows.shape(), groups, vectors, count, e as f32, options.eps as f32,
        options.scale as f32, kind,
    ));
    Ok(())
}

/// A little memory, to stand where a kernel has an argument that it does not touch.
fn unused(device: &Device) -> Result<Tensor> {
    device.empty(DType::F32, &[16])
}

/// Writes one number everywhere; for calls that have no rows.
fn fill(tensor: &Tensor, number: f32) -> Result<()> {
    let numbers = vec![number; tensor.len()];
    let numbers = tensor.device().upload(View::new(&numbers, tensor.shape())?)?;
    narrow_into(NAME, &numbers, tensor)
}
