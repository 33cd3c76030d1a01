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
use fuselane::{Act, DType, GatePosition, Normalize, Result, WeightForm};

use crate::copy::{fill, through_f32, widened, write_f32};
use crate::kernel::math;
use crate::kernel::reduce::{Fold, Team, over_lanes, over_units};
use crate::kernel::storage::{Format, Place, load, row_start, store};
use crate::kernel::sums::sum_partials;
use crate::launch::{
    Grid, Rows, Storage, buffer, check_buffers, full_cube, largest, launch, one_device,
    result_like, team, unused, with_words,
};
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
        p *= math::value::<N>(gate, inputs.act, inputs.short);
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
        factor *= weight[at];
    }
    if comptime!(kind == Weight::OnePlus) {
        factor *= Vector::<f32, N>::new(1.0f32) + weight[at];
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
        q -= Vector::<f32, N>::new(near);
        q -= Vector::<f32, N>::new(rest);
    }
    let r = q * Vector::<f32, N>::new(rstd);
    let mut o = r * factor_at::<N>(weight, feature, scale, inputs.weight);
    if comptime!(inputs.bias) {
        o += bias[feature];
    }
    if comptime!(inputs.gate == Gate::Post) {
        let gate = load::<E, P, N>(gate, gate_at, inputs.format);
        o *= math::value::<N>(gate, inputs.act, inputs.short);
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
    let number = CUBE_POS * comptime!(kind.team.rows as usize) + UNIT_POS_Y as usize;
    let unit = UNIT_POS_X as usize;
    // Units beyond the last row sum zeros.
    let end = select(number < rows, vectors, 0usize);
    let row = number / groups;
    let group = number % groups;
    let first = group * vectors;
    let x_at = row_start(x_place, shape, row) + first;
    let mut residual_at = 0usize;
    if comptime!(kind.inputs.residual) {
        residual_at = row_start(residual_place, shape, row) + first;
    }
    let mut gate_at = 0usize;
    if comptime!(kind.inputs.gate != Gate::None) {
        gate_at = row_start(gate_place, shape, row) + first;
    }
    let mut sum_start = 0usize;
    if comptime!(kind.sum) {
        sum_start = row_start(sum_place, shape, row) + first;
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
                    store::<E, P, N>(sum, sum_start + column, s, format);
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
            if i == CHUNK {
                i = 0usize;
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
                if i == CHUNK {
                    i = 0usize;
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
    let o_at = row_start(o_place, shape, row) + first;
    if comptime!(kept > 0) {
        #[unroll]
        for i in 0..kept {
            let column = unit + comptime!(i * units);
            if column < end {
                let y = output_of::<E, P, N>(
                    p[i],
                    near,
                    rest,
                    inverse,
                    weight,
                    bias,
                    first + column,
                    gate,
                    gate_at + column,
                    scale,
                    inputs,
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
                store::<E, P, N>(sum, sum_start + column, s, format);
            }
            let value = gated::<E, P, N>(s, gate, gate_at + column, inputs);
            let y = output_of::<E, P, N>(
                value,
                near,
                rest,
                inverse,
                weight,
                bias,
                first + column,
                gate,
                gate_at + column,
                scale,
                inputs,
            );
            store::<E, P, N>(o, o_at + column, y, format);
            column += units;
        }
    }
}

/// What a backward does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct BackwardKind {
    inputs: Inputs,
    /// Whether a gradient arrives at the sum of x and the residual.
    grad_sum: bool,
    dx: bool,
    dresidual: bool,
    dgate: bool,
    dweight: bool,
    dbias: bool,
    team: Team,
    /// Vectors that each unit keeps; 0 where rows are read again.
    kept: usize,
}

impl BackwardKind {
    /// Whether sums over the group are needed.
    fn needs_sums(self) -> bool {
        let dgate = self.dgate && self.inputs.gate == Gate::Pre;
        self.inputs.center || self.dx || self.dresidual || dgate
    }

    fn needs_parameters(self) -> bool {
        self.dweight || self.dbias
    }
}

/// What is subtracted and multiplied in a group of a row.
#[derive(CubeType)]
struct Statistics {
    rstd: f32,
    /// The mean of p as the forward kept it.
    near: f32,
    /// What that lacks.
    rest: f32,
    mean_dr: f32,
    mean_rdr: f32,
}

/// q (but for the rest of the mean) and the gradient that arrives before the gate.
#[cube]
fn q_and_grad<N: Size>(
    sum: Vector<f32, N>,
    grad: Vector<f32, N>,
    value: Vector<f32, N>,
    near: f32,
    #[comptime] inputs: Inputs,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let mut q = sum;
    let mut grad1 = grad;
    if comptime!(inputs.gate == Gate::Pre) {
        q *= value;
    }
    if comptime!(inputs.gate == Gate::Post) {
        grad1 *= value;
    }
    if comptime!(inputs.center) {
        q -= Vector::<f32, N>::new(near);
    }
    (q, grad1)
}

/// The value of the gate, if there is one.
#[cube]
fn gate_value<N: Size>(gate: Vector<f32, N>, #[comptime] inputs: Inputs) -> Vector<f32, N> {
    let mut value = gate;
    if comptime!(inputs.gate != Gate::None) {
        value = math::value::<N>(gate, inputs.act, inputs.short);
    }
    value
}

/// The vector of an operand, or zeros where it does not take part.
#[cube]
fn load_if<E: Numeric, P: Size, N: Size>(
    buffer: &[Vector<E, P>],
    at: usize,
    #[comptime] given: bool,
    #[comptime] format: Format,
) -> Vector<f32, N> {
    let mut numbers = Vector::<f32, N>::new(0.0f32);
    if comptime!(given) {
        numbers = load::<E, P, N>(buffer, at, format);
    }
    numbers
}

/// Where a row of an operand begins, or 0 where it does not take part.
#[cube]
fn start_if(
    place: &Place,
    shape: &Sequence<usize>,
    row: usize,
    first: usize,
    #[comptime] given: bool,
) -> usize {
    let mut start = 0usize;
    if comptime!(given) {
        start = row_start(place, shape, row) + first;
    }
    start
}

/// Writes the gradients of a vector of a row; its terms of dweight and dbias.
#[cube]
fn gradients_of<E: Numeric, P: Size, N: Size>(
    sum: Vector<f32, N>,
    grad: Vector<f32, N>,
    gate: Vector<f32, N>,
    grad_sum: &[Vector<E, P>],
    weight: &[Vector<f32, N>],
    bias: &[Vector<f32, N>],
    dx: &mut [Vector<E, P>],
    dresidual: &mut [Vector<E, P>],
    dgate: &mut [Vector<E, P>],
    feature: usize,
    grad_sum_at: usize,
    dx_at: usize,
    dresidual_at: usize,
    dgate_at: usize,
    scale: f32,
    statistics: &Statistics,
    #[comptime] kind: BackwardKind,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let inputs = comptime!(kind.inputs);
    let format = comptime!(kind.inputs.format);
    let value = gate_value::<N>(gate, inputs);
    let (q, grad1) = q_and_grad::<N>(sum, grad, value, statistics.near, inputs);
    let rstd = Vector::<f32, N>::new(statistics.rstd);
    let mut r = q;
    if comptime!(kind.inputs.center) {
        r -= Vector::<f32, N>::new(statistics.rest);
    }
    r *= rstd;
    let of_weight = grad1 * r * Vector::<f32, N>::new(scale);
    let factor = factor_at::<N>(weight, feature, scale, inputs.weight);
    let mut dr = grad1 * factor;
    if comptime!(kind.inputs.center) {
        dr -= Vector::<f32, N>::new(statistics.mean_dr);
    }
    let dp = (dr - r * Vector::<f32, N>::new(statistics.mean_rdr)) * rstd;
    if comptime!(kind.dx || kind.dresidual) {
        let mut ds = dp;
        if comptime!(kind.inputs.gate == Gate::Pre) {
            ds *= value;
        }
        if comptime!(kind.grad_sum) {
            ds += load::<E, P, N>(grad_sum, grad_sum_at, format);
        }
        if comptime!(kind.dx) {
            store::<E, P, N>(dx, dx_at, ds, format);
        }
        if comptime!(kind.dresidual) {
            store::<E, P, N>(dresidual, dresidual_at, ds, format);
        }
    }
    if comptime!(kind.dgate) {
        let mut dvalue = dp * sum;
        if comptime!(kind.inputs.gate == Gate::Post) {
            let mut o1 = r * factor;
            if comptime!(kind.inputs.bias) {
                o1 += bias[feature];
            }
            dvalue = grad * o1;
        }
        let gradient = math::pull_back::<N>(gate, dvalue, inputs.act, inputs.short);
        store::<E, P, N>(dgate, dgate_at, gradient, format);
    }
    (of_weight, grad1)
}

/// The sum of a register over the rows of a team, by the units of its first row, into row `at` of
/// the partial sums.
#[cube]
fn store_partial<N: Size>(
    partials: &mut [Vector<f32, N>],
    at: usize,
    inside: bool,
    value: Vector<f32, N>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] team: Team,
) {
    if comptime!(team.rows == 1) {
        if inside {
            partials[at] = value;
        }
    } else {
        let unit = UNIT_POS_X as usize;
        shared[(UNIT_POS_Y * comptime!(team.units)) as usize + unit] = value;
        sync_cube();
        if UNIT_POS_Y == 0u32 && inside {
            let mut sum = value;
            for i in 1..comptime!(team.rows as usize) {
                sum += shared[i * comptime!(team.units as usize) + unit];
            }
            partials[at] = sum;
        }
        sync_cube();
    }
}

/// A cube works on `steps` times as many rows as its team has, of one group: on all of them, so
/// that the gradients of the parameters can be summed in registers. The partial sums of a cube are
/// a row of `dweight` and `dbias`; where nothing is kept, those of each row of its team are.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn normalize_backward<E: Numeric, P: Size, N: Size>(
    grad: &[Vector<E, P>],
    x: &[Vector<E, P>],
    residual: &[Vector<E, P>],
    gate: &[Vector<E, P>],
    grad_sum: &[Vector<E, P>],
    weight: &[Vector<f32, N>],
    bias: &[Vector<f32, N>],
    rstd: &[f32],
    mean: &[f32],
    dx: &mut [Vector<E, P>],
    dresidual: &mut [Vector<E, P>],
    dgate: &mut [Vector<E, P>],
    dweight: &mut [Vector<f32, N>],
    dbias: &mut [Vector<f32, N>],
    grad_place: &Place,
    x_place: &Place,
    residual_place: &Place,
    gate_place: &Place,
    grad_sum_place: &Place,
    rstd_place: &Place,
    mean_place: &Place,
    dx_place: &Place,
    dresidual_place: &Place,
    dgate_place: &Place,
    shape: &Sequence<usize>,
    groups: usize,
    vectors: usize,
    rows: usize,
    blocks: usize,
    steps: usize,
    len: f32,
    scale: f32,
    #[comptime] kind: BackwardKind,
) {
    let inputs = comptime!(kind.inputs);
    let team = comptime!(kind.team);
    let kept = comptime!(kind.kept);
    let units = comptime!(kind.team.units as usize);
    let team_rows = comptime!(kind.team.rows as usize);
    let format = comptime!(kind.inputs.format);
    let gated = comptime!(kind.inputs.gate != Gate::None);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(kind.team.shared()));
    let unit = UNIT_POS_X as usize;
    let (block, group) = (CUBE_POS / groups, CUBE_POS % groups);
    // A grid of two dimensions has cubes beyond the last block. They have no rows, and there is no
    // place for their partial sums.
    let partial_end = select(block < blocks, vectors, 0usize);
    let first = group * vectors;
    let zero = Vector::<f32, N>::new(0.0f32);
    let mut sums = Array::<Vector<f32, N>>::new(comptime!(kind.kept.max(1)));
    let mut grads = Array::<Vector<f32, N>>::new(comptime!(kind.kept.max(1)));
    let mut gates = Array::<Vector<f32, N>>::new(comptime!(kind.kept.max(1)));
    let mut dweights = Array::<Vector<f32, N>>::new(comptime!(kind.kept.max(1)));
    let mut dbiases = Array::<Vector<f32, N>>::new(comptime!(kind.kept.max(1)));
    #[unroll]
    for i in 0..kept {
        dweights[i] = zero;
        dbiases[i] = zero;
    }

    for step in 0..steps {
        let number = (block * steps + step) * team_rows + UNIT_POS_Y as usize;
        // Units beyond the last row sum zeros.
        let end = select(number < rows, vectors, 0usize);
        let row = select(number < rows, number, 0usize);
        let grad_at = row_start(grad_place, shape, row) + first;
        let x_at = row_start(x_place, shape, row) + first;
        let residual_at = start_if(residual_place, shape, row, first, inputs.residual);
        let gate_at = start_if(gate_place, shape, row, first, gated);
        let inverse = rstd[row_start(rstd_place, shape, row) + group];
        let mut near = 0.0f32;
        if comptime!(kind.inputs.center) {
            near = mean[row_start(mean_place, shape, row) + group];
        }

        // The sums of q, of dr and of their products.
        let mut qs = zero;
        let mut drs = zero;
        let mut products = zero;
        if comptime!(kept > 0) {
            #[unroll]
            for i in 0..kept {
                let column = unit + comptime!(i * units);
                if column < end {
                    let s =
                        sum_at::<E, P, N>(x, residual, x_at + column, residual_at + column, inputs);
                    let g = load::<E, P, N>(grad, grad_at + column, format);
                    let z = load_if::<E, P, N>(gate, gate_at + column, gated, format);
                    sums[i] = s;
                    grads[i] = g;
                    gates[i] = z;
                    if comptime!(kind.needs_sums()) {
                        let value = gate_value::<N>(z, inputs);
                        let (q, grad1) = q_and_grad::<N>(s, g, value, near, inputs);
                        let dr =
                            grad1 * factor_at::<N>(weight, first + column, scale, inputs.weight);
                        products += q * dr;
                        if comptime!(kind.inputs.center) {
                            qs += q;
                            drs += dr;
                        }
                    }
                }
            }
        } else if comptime!(kind.needs_sums()) {
            let mut column = unit;
            while column < end {
                let mut recent_qs = zero;
                let mut recent_drs = zero;
                let mut recent = zero;
                let chunk_end = end.min(column + CHUNK * units);
                while column < chunk_end {
                    let s =
                        sum_at::<E, P, N>(x, residual, x_at + column, residual_at + column, inputs);
                    let g = load::<E, P, N>(grad, grad_at + column, format);
                    let z = load_if::<E, P, N>(gate, gate_at + column, gated, format);
                    let value = gate_value::<N>(z, inputs);
                    let (q, grad1) = q_and_grad::<N>(s, g, value, near, inputs);
                    let dr = grad1 * factor_at::<N>(weight, first + column, scale, inputs.weight);
                    recent += q * dr;
                    if comptime!(kind.inputs.center) {
                        recent_qs += q;
                        recent_drs += dr;
                    }
                    column += units;
                }
                products += recent;
                if comptime!(kind.inputs.center) {
                    qs += recent_qs;
                    drs += recent_drs;
                }
            }
        }
        let mut rest = 0.0f32;
        let mut sum_dr = 0.0f32;
        let mut mean_rdr = 0.0f32;
        if comptime!(kind.inputs.center) {
            let q = over_units(over_lanes::<N>(qs, Fold::Sum), &mut shared, Fold::Sum, team);
            rest = q / len;
            sum_dr = over_units(over_lanes::<N>(drs, Fold::Sum), &mut shared, Fold::Sum, team);
        }
        if comptime!(kind.needs_sums()) {
            let product =
                over_units(over_lanes::<N>(products, Fold::Sum), &mut shared, Fold::Sum, team);
            mean_rdr = (product - rest * sum_dr) * inverse / len;
        }
        let statistics = Statistics { rstd: inverse, near, rest, mean_dr: sum_dr / len, mean_rdr };
        let grad_sum_at = start_if(grad_sum_place, shape, row, first, kind.grad_sum);
        let dx_at = start_if(dx_place, shape, row, first, kind.dx);
        let dresidual_at = start_if(dresidual_place, shape, row, first, kind.dresidual);
        let dgate_at = start_if(dgate_place, shape, row, first, kind.dgate);

        if comptime!(kept > 0) {
            #[unroll]
            for i in 0..kept {
                let column = unit + comptime!(i * units);
                if column < end {
                    let (of_weight, of_bias) = gradients_of::<E, P, N>(
                        sums[i],
                        grads[i],
                        gates[i],
                        grad_sum,
                        weight,
                        bias,
                        dx,
                        dresidual,
                        dgate,
                        first + column,
                        grad_sum_at + column,
                        dx_at + column,
                        dresidual_at + column,
                        dgate_at + column,
                        scale,
                        &statistics,
                        kind,
                    );
                    if comptime!(kind.dweight) {
                        dweights[i] += of_weight;
                    }
                    if comptime!(kind.dbias) {
                        dbiases[i] += of_bias;
                    }
                }
            }
        } else {
            // Sums that no register holds stay in their own place in memory.
            let own = ((block * team_rows + UNIT_POS_Y as usize) * groups + group) * vectors;
            let mut column = unit;
            while column < partial_end {
                let mut of_weight = zero;
                let mut of_bias = zero;
                if column < end {
                    let s =
                        sum_at::<E, P, N>(x, residual, x_at + column, residual_at + column, inputs);
                    let g = load::<E, P, N>(grad, grad_at + column, format);
                    let z = load_if::<E, P, N>(gate, gate_at + column, gated, format);
                    let (w, b) = gradients_of::<E, P, N>(
                        s,
                        g,
                        z,
                        grad_sum,
                        weight,
                        bias,
                        dx,
                        dresidual,
                        dgate,
                        first + column,
                        grad_sum_at + column,
                        dx_at + column,
                        dresidual_at + column,
                        dgate_at + column,
                        scale,
                        &statistics,
                        kind,
                    );
                    of_weight = w;
                    of_bias = b;
                }
                if comptime!(kind.dweight) {
                    if step > 0usize {
                        of_weight = dweight[own + column] + of_weight;
                    }
                    dweight[own + column] = of_weight;
                }
                if comptime!(kind.dbias) {
                    if step > 0usize {
                        of_bias = dbias[own + column] + of_bias;
                    }
                    dbias[own + column] = of_bias;
                }
                column += units;
            }
        }
    }

    if comptime!(kept > 0 && kind.needs_parameters()) {
        let shared_len = comptime!(if team.rows == 1 { 1 } else { units * team_rows });
        let mut shared = Shared::<[Vector<f32, N>]>::new_slice(shared_len);
        let own = (block * groups + group) * vectors;
        #[unroll]
        for i in 0..kept {
            let column = unit + comptime!(i * units);
            let inside = column < partial_end;
            if comptime!(kind.dweight) {
                store_partial::<N>(dweight, own + column, inside, dweights[i], &mut shared, team);
            }
            if comptime!(kind.dbias) {
                store_partial::<N>(dbias, own + column, inside, dbiases[i], &mut shared, team);
            }
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

/// The operands of [`backward_into`]; those of [`fuselane::NormalizeBackward`]. Only the gradients
/// that are asked for are computed.
#[derive(Debug)]
pub struct NormalizeBackward<'a> {
    /// The gradient that arrives at the output.
    pub grad: &'a Tensor,
    /// x of the forward; or the kept sum x + residual, with `residual` left out.
    pub x: &'a Tensor,
    /// The residual of the forward, if `x` is not the sum.
    pub residual: Option<&'a Tensor>,
    /// The gate of the forward.
    pub gate: Option<&'a Tensor>,
    /// The weight of the forward.
    pub weight: Option<&'a Tensor>,
    /// The bias of the forward; read for `dgate` of a gate in the post position only.
    pub bias: Option<&'a Tensor>,
    /// 1 / sigma, as the forward kept it.
    pub rstd: &'a Tensor,
    /// The mean, as the forward kept it; needed if centered.
    pub mean: Option<&'a Tensor>,
    /// The gradient that arrives at the sum x + residual from elsewhere.
    pub grad_residual_out: Option<&'a Tensor>,
    /// Receives the gradient of x.
    pub dx: Option<&'a mut Tensor>,
    /// Receives the gradient of the residual, which has the same values as `dx`: a caller who can
    /// use one tensor for both leaves this out.
    pub dresidual: Option<&'a mut Tensor>,
    /// Receives the gradient of the gate.
    pub dgate: Option<&'a mut Tensor>,
    /// Receives the gradient of the weight, in any dtype.
    pub dweight: Option<&'a mut Tensor>,
    /// Receives the gradient of the bias, in any dtype.
    pub dbias: Option<&'a mut Tensor>,
}

impl<'a> NormalizeBackward<'a> {
    /// The operands that are always needed; no gradient is asked for yet.
    pub fn new(grad: &'a Tensor, x: &'a Tensor, rstd: &'a Tensor) -> Self {
        Self {
            grad,
            x,
            residual: None,
            gate: None,
            weight: None,
            bias: None,
            rstd,
            mean: None,
            grad_residual_out: None,
            dx: None,
            dresidual: None,
            dgate: None,
            dweight: None,
            dbias: None,
        }
    }
}

/// Gradients, from [`backward`].
#[derive(Debug)]
pub struct NormalizeGradients {
    /// The gradient of x.
    pub dx: Tensor,
    /// The gradient of the weight, if there was one.
    pub dweight: Option<Tensor>,
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
            (Some(residual), _) if in_place => fuselane::Residual::AddInPlace(residual.view_mut()?),
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
    let mut o = result_like(NAME, "x", x, x.shape())?;
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
    let (mut o, mut rstd) = (result_like(NAME, "x", x, x.shape())?, statistic()?);
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

/// Writes the gradients that are asked for; see [`Normalize::backward_into`].
pub fn backward_into(options: &Normalize, call: NormalizeBackward<'_>) -> Result<()> {
    let NormalizeBackward { grad, x, residual, gate, weight, bias, rstd, mean, .. } = call;
    let grad_sum = call.grad_residual_out;
    let (dx, dresidual) = (call.dx.as_deref(), call.dresidual.as_deref());
    let (dgate, dweight, dbias) =
        (call.dgate.as_deref(), call.dweight.as_deref(), call.dbias.as_deref());
    one_device(
        NAME,
        [
            ("x", Some(x)),
            ("grad", Some(grad)),
            ("residual", residual),
            ("gate", gate),
            ("weight", weight),
            ("bias", bias),
            ("rstd", Some(rstd)),
            ("mean", mean),
            ("grad_residual_out", grad_sum),
            ("dx", dx),
            ("dresidual", dresidual),
            ("dgate", dgate),
            ("dweight", dweight),
            ("dbias", dbias),
        ],
    )?;
    let view = |tensor: Option<&Tensor>| tensor.map(Tensor::view).transpose();
    let view_mut = |tensor: Option<&Tensor>| tensor.map(Tensor::view_mut).transpose();
    options.check_backward(fuselane::NormalizeBackward {
        grad: grad.view()?,
        x: x.view()?,
        residual: view(residual)?,
        gate: view(gate)?,
        weight: view(weight)?,
        bias: view(bias)?,
        rstd: rstd.view()?,
        mean: view(mean)?,
        grad_residual_out: view(grad_sum)?,
        dx: view_mut(dx)?,
        dresidual: view_mut(dresidual)?,
        dgate: view_mut(dgate)?,
        dweight: view_mut(dweight)?,
        dbias: view_mut(dbias)?,
    })?;
    let widen = |tensor: Option<&Tensor>| tensor.map(|t| widened(NAME, t)).transpose();
    // The bias matters to the gradient of a gate after it only.
    let bias = bias.filter(|_| dgate.is_some() && options.gate_position == GatePosition::Post);
    let (weight, bias) = (widen(weight)?, widen(bias)?);
    let (weight, bias) = (weight.as_ref(), bias.as_ref());
    run_backward(
        options,
        Backward {
            grad,
            x,
            residual,
            gate,
            grad_sum,
            weight,
            bias,
            rstd,
            mean,
            dx,
            dresidual,
            dgate,
            dweight,
            dbias,
        },
        &|shape| x.device().empty(DType::F32, shape),
    )
}

/// The gradients of x and, if there is one, of the weight (in its dtype) in new tensors, for the
/// plain case. `kept` comes from [`forward_keeping`].
pub fn backward(
    options: &Normalize,
    grad: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    kept: &Normalized,
) -> Result<NormalizeGradients> {
    let mut dx = result_like(NAME, "x", x, x.shape())?;
    let like = |weight: &Tensor| result_like(NAME, "weight", weight, weight.shape());
    let mut dweight = weight.map(like).transpose()?;
    backward_into(
        options,
        NormalizeBackward {
            weight,
            mean: kept.mean.as_ref(),
            dx: Some(&mut dx),
            dweight: dweight.as_mut(),
            ..NormalizeBackward::new(grad, x, &kept.rstd)
        },
    )?;
    Ok(NormalizeGradients { dx, dweight })
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
            fill(NAME, statistic, f32::NAN)?;
        }
        return Ok(());
    }
    check_buffers(NAME, device, 9)?;
    let tensors = [Some(x), residual, gate, Some(o), sum, rstd, mean];
    let rows = Rows::new(tensors, d);
    if rows.count() == 0 {
        return Ok(());
    }
    let (groups, e) = (options.groups, d / options.groups);
    let Some(width) = rows.width(device, storage, 5, &[e]) else {
        let (inputs, outputs) = ([Some(x), residual, gate], [Some(o), sum]);
        return through_f32(NAME, inputs, outputs, |[x, residual, gate], [o, sum]| match (x, o) {
            (Some(x), Some(o)) => {
                run_forward(options, Forward { x, residual, gate, o, sum, ..call })
            }
            _ => Ok(()),
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

/// A checked backward. The weight and the bias are dense and of f32.
#[derive(Clone, Copy)]
struct Backward<'a> {
    grad: &'a Tensor,
    x: &'a Tensor,
    residual: Option<&'a Tensor>,
    gate: Option<&'a Tensor>,
    grad_sum: Option<&'a Tensor>,
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
    rstd: &'a Tensor,
    mean: Option<&'a Tensor>,
    dx: Option<&'a Tensor>,
    dresidual: Option<&'a Tensor>,
    dgate: Option<&'a Tensor>,
    dweight: Option<&'a Tensor>,
    dbias: Option<&'a Tensor>,
}

/// How many times a team walks on to other rows, where the gradients of parameters are summed.
///
/// There are so many cubes that they fill a device, of units that are few in a `full` cube; and so few
/// that partial sums are few: those of 2,048 blocks, of rows of 256, take 2 MiB. A register sums so
/// few rows that its error stays small; where there are very many, blocks are more.
fn steps(rows: usize, team: Team, full: u32) -> usize {
    const ROWS: usize = 16;
    const STEPS: usize = 128;
    let most = if team.units * team.rows <= full { 2048 } else { 512 };
    let blocks = (rows / ROWS).clamp(1, most);
    rows.div_ceil(blocks * team.rows as usize).clamp(1, STEPS)
}

/// `memory` gives that of the partial sums of parameters.
fn run_backward(
    options: &Normalize,
    call: Backward<'_>,
    memory: &dyn Fn(&[usize]) -> Result<Tensor>,
) -> Result<()> {
    let Backward { grad, x, residual, gate, grad_sum, weight, bias, rstd, mean, .. } = call;
    let Backward { dx, dresidual, dgate, dweight, dbias, .. } = call;
    let (device, storage) = (x.device(), Storage::of(x.device(), x.dtype()));
    let d = x.shape().last().copied().unwrap_or(1);
    if x.is_empty() {
        for gradient in dweight.into_iter().chain(dbias) {
            fill(NAME, gradient, 0.0)?;
        }
        return Ok(());
    }
    if [dx, dresidual, dgate, dweight, dbias].iter().all(Option::is_none) {
        return Ok(());
    }
    check_buffers(NAME, device, 14)?;
    let tensors =
        [Some(grad), Some(x), residual, gate, grad_sum, dx, dresidual, dgate, Some(rstd), mean];
    let rows = Rows::new(tensors, d);
    let (groups, e) = (options.groups, d / options.groups);
    let Some(width) = rows.width(device, storage, 8, &[e]) else {
        let inputs = [Some(grad), Some(x), residual, gate, grad_sum];
        let run = |inputs: [Option<&Tensor>; 5], outputs: [Option<&Tensor>; 3]| {
            let ([grad, x, residual, gate, grad_sum], [dx, dresidual, dgate]) = (inputs, outputs);
            let (Some(grad), Some(x)) = (grad, x) else { return Ok(()) };
            let call = Backward { grad, x, residual, gate, grad_sum, dx, dresidual, dgate, ..call };
            run_backward(options, call, memory)
        };
        return through_f32(NAME, inputs, [dx, dresidual, dgate], run);
    };
    let (vectors, n) = (e / width.numbers, width.numbers);
    // What a unit holds of each vector, all in f32: the sum and the gradient; the gate; what dweight
    // adds up to, where there is a weight; what dbias does, where a mean is subtracted, as then there
    // mostly is a bias. Which gradients are asked for does not matter, so that the bits of none
    // depend on that. Rows for which this is too much are read a second time for the results.
    let held = 2 + [gate.is_some(), weight.is_some(), options.center]
        .map(usize::from)
        .iter()
        .sum::<usize>();
    let (mut team, kept) = team(device, vectors, n * held);
    let full = full_cube(device);
    if team.units <= full && (dweight.is_some() || dbias.is_some()) {
        team.rows = full / team.units;
    }
    let kind = BackwardKind {
        inputs: Inputs::new(options, storage, [residual, gate, weight, bias]),
        grad_sum: grad_sum.is_some(),
        dx: dx.is_some(),
        dresidual: dresidual.is_some(),
        dgate: dgate.is_some(),
        dweight: dweight.is_some(),
        dbias: dbias.is_some(),
        team,
        kept,
    };
    let count = rows.count();
    let steps = if kind.needs_parameters() { steps(count, team, full) } else { 1 };
    let blocks = count.div_ceil(steps * team.rows as usize);
    let partial_rows = if kept > 0 { blocks } else { blocks * team.rows as usize };
    let partials = |asked: Option<&Tensor>| asked.map(|_| memory(&[partial_rows, d])).transpose();
    let (dweights, dbiases) = (partials(dweight)?, partials(dbias)?);
    let numbers = largest(tensors).max(largest([dweights.as_ref(), dbiases.as_ref()]));
    let dim = CubeDim::new_2d(team.units, team.rows);
    let grid = Grid::new(NAME, device, blocks * groups, dim, numbers)?;
    let unused = unused(device)?;
    let wide = |tensor: Option<&Tensor>| buffer(tensor.unwrap_or(&unused), Storage::F32);
    let output = |tensor: Option<&Tensor>| buffer(tensor.unwrap_or(&unused), storage);
    let place = |i: usize| rows.operand(i).place(n);
    let input = |i: usize| rows.operand(i).buffer(storage);
    with_words!(storage, E => launch!(
        device, normalize_backward::<E>, grid, width.words, n,
        input(0), input(1), input(2), input(3), input(4),
        wide(weight), wide(bias), wide(Some(rstd)), wide(mean),
        output(dx), output(dresidual), output(dgate),
        wide(dweights.as_ref()), wide(dbiases.as_ref()),
        place(0), place(1), place(2), place(3), place(4),
        rows.operand(8).place(1), rows.operand(9).place(1), place(5), place(6), place(7),
        rows.shape(), groups, vectors, count, blocks, steps, e as f32, options.scale as f32, kind,
    ));
    for (gradient, partials) in [(dweight, dweights), (dbias, dbiases)] {
        if let (Some(gradient), Some(partials)) = (gradient, partials) {
            write_f32(NAME, gradient, |sum| sum_partials(NAME, &partials, sum))?;
        }
    }
    Ok(())
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::{Device, Tuning};
    use fuselane::View;
    use std::cell::RefCell;

    /// More cubes than one dimension of a grid has: those that are too many write nothing.
    #[test]
    fn nothing_is_written_beyond_the_partial_sums() {
        for reread in [false, true] {
            let tuning = Tuning { units: Some(1), reread: Some(reread), ..Tuning::default() };
            let device = Device::open().expect("a device").tuned(tuning);
            let upload = |numbers: &[f32], shape: &[usize]| {
                device.upload(View::new(numbers, shape).expect("dense")).expect("memory")
            };
            // 256 blocks of 16 rows, for each of 300 groups.
            let (rows, d) = (4096, 300);
            let ones = upload(&vec![1.0; rows * d], &[rows, d]);
            let gradients = [upload(&vec![0.0; d], &[d]), upload(&vec![0.0; d], &[d])];
            let call = Backward {
                grad: &ones,
                x: &ones,
                residual: None,
                gate: None,
                grad_sum: None,
                weight: None,
                bias: None,
                rstd: &ones,
                mean: None,
                dx: None,
                dresidual: None,
                dgate: None,
                dweight: Some(&gradients[0]),
                dbias: Some(&gradients[1]),
            };
            let options = Normalize { groups: d, ..Normalize::rms_norm() };
            let given = RefCell::new(Vec::new());
            // Twice as much as is asked for, of which the second half is to stay.
            let memory = |shape: &[usize]| {
                let numbers = vec![7.0; 2 * shape[0] * shape[1]];
                let all = upload(&numbers, &[2 * shape[0], shape[1]]);
                given.borrow_mut().push(all.clone());
                all.narrow(0, 0, shape[0])
            };
            run_backward(&options, call, &memory).expect("gradients");
            // So many partial sums that the cubes do not fit one dimension.
            let blocks = given.borrow()[0].shape()[0] / 2;
            assert!(blocks * d > 65_535, "{blocks} blocks of {d} groups");
            for gradient in &gradients {
                let numbers = gradient.download::<f32>().expect("a gradient");
                assert!(numbers.iter().all(|&number| number == rows as f32));
            }
            for all in given.into_inner() {
                let numbers = all.download::<f32>().expect("partial sums");
                let rest = &numbers[numbers.len() / 2..];
                assert!(rest.iter().all(|&number| number == 7.0), "reread: {reread}");
            }
        }
    }
}
