//! The forward: p (the sum of x and the residual, gated where the gate comes first), its moments,
//! and the output.

use cubecl::prelude::*;
use fuselane::{Normalize, Result};

use super::NAME;
use super::inputs::{
    CHUNK, Gate, InputForm, InputTensors, Inputs, InputsLaunch, Parameters, ParametersLaunch,
    RowMoments, Sizes, SizesLaunch, Starts, Statistic, StatisticLaunch, over_row, start_if,
};
use crate::copy::{fill, through_f32};
use crate::kernel::reduce::Team;
use crate::kernel::storage::Operand;
use crate::launch::{
    Grid, Rows, Storage, buffer, check_buffers, largest, launch, team, unused, with_words,
};
use crate::tensor::Tensor;

/// What a forward does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ForwardForm {
    /// Whether the sum of x and the residual is written.
    sum: bool,
    rstd: bool,
    mean: bool,
    team: Team,
    /// Vectors that each unit has in registers; 0 where rows are read again.
    per_unit: usize,
}

/// What is summed of p.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Moment {
    Sum,
    Squares,
    Both,
}

/// Sums of p or of p - mean, and of the squares.
#[derive(CubeType, Clone, Copy)]
struct Moments<N: Size> {
    sum: Vector<f32, N>,
    squares: Vector<f32, N>,
}

#[cube]
impl<N: Size> Moments<N> {
    fn zero() -> Self {
        let zero = Vector::<f32, N>::new(0.0f32);
        Moments::<N> { sum: zero, squares: zero }
    }

    fn add(&mut self, p: Vector<f32, N>, #[comptime] moment: Moment) {
        if comptime!(moment != Moment::Squares) {
            self.sum += p;
        }
        if comptime!(moment != Moment::Sum) {
            self.squares += p * p;
        }
    }

    /// Adds a chunk, and begins that anew.
    fn take(&mut self, chunk: &mut Moments<N>, #[comptime] moment: Moment) {
        if comptime!(moment != Moment::Squares) {
            self.sum += chunk.sum;
            chunk.sum = Vector::<f32, N>::new(0.0f32);
        }
        if comptime!(moment != Moment::Sum) {
            self.squares += chunk.squares;
            chunk.squares = Vector::<f32, N>::new(0.0f32);
        }
    }
}

/// The moments of what a unit has of p, which it reads again; of p - `mean`, where both are asked
/// for.
#[cube]
fn reread_moments<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    starts: &Starts,
    end: usize,
    mean: f32,
    #[comptime] moment: Moment,
    #[comptime] team: Team,
) -> Moments<N> {
    let mut total = Moments::<N>::zero();
    let mut chunk = Moments::<N>::zero();
    let mut i = 0usize;
    let mut column = UNIT_POS_X as usize;
    while column < end {
        let sum = inputs.sum::<N>(starts, column);
        let mut p = inputs.gated::<N>(sum, starts, column, Gate::Pre);
        if comptime!(moment == Moment::Both) {
            p -= Vector::<f32, N>::new(mean);
        }
        chunk.add(p, moment);
        i += 1usize;
        if i == CHUNK {
            i = 0usize;
            total.take(&mut chunk, moment);
        }
        column += comptime!(team.units as usize);
    }
    total.take(&mut chunk, moment);
    total
}

/// The output of p at a column of a group that begins at vector `first` of its row.
#[cube]
fn output<E: Numeric, P: Size, N: Size>(
    p: Vector<f32, N>,
    moments: &RowMoments,
    inputs: &Inputs<E, P>,
    starts: &Starts,
    parameters: &Parameters<N>,
    scale: f32,
    first: usize,
    column: usize,
) -> Vector<f32, N> {
    let form = comptime!(inputs.form);
    let mut q = p;
    if comptime!(form.center) {
        q -= Vector::<f32, N>::new(moments.mean_hi);
        q -= Vector::<f32, N>::new(moments.mean_lo);
    }
    let r = q * Vector::<f32, N>::new(moments.rstd);
    let mut o = r * parameters.scaled_weight(first + column, scale, form);
    if comptime!(form.bias) {
        o += parameters.bias[first + column];
    }
    inputs.gated::<N>(o, starts, column, Gate::Post)
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn normalize_forward<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    parameters: &Parameters<N>,
    o: &mut Operand<E, P>,
    sum: &mut Operand<E, P>,
    rstd: &mut Statistic,
    mean: &mut Statistic,
    sizes: &Sizes,
    eps: f32,
    scale: f32,
    #[comptime] form: ForwardForm,
) {
    let team = comptime!(form.team);
    let per_unit = comptime!(form.per_unit);
    let units = comptime!(form.team.units as usize);
    let center = comptime!(inputs.form.center);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(form.team.shared()));
    let number = CUBE_POS * comptime!(form.team.rows as usize) + UNIT_POS_Y as usize;
    let unit = UNIT_POS_X as usize;
    // Units beyond the last row sum zeros.
    let end = select(number < sizes.rows, sizes.vectors, 0usize);
    let row = number / sizes.groups;
    let group = number % sizes.groups;
    let first = group * sizes.vectors;
    let starts = inputs.starts(&sizes.shape, row, first);
    let sum_start = start_if::<E, P>(&*sum, &sizes.shape, row, first, form.sum);
    let zero = Vector::<f32, N>::new(0.0f32);
    let mut ps = Array::<Vector<f32, N>>::new(comptime!(form.per_unit.max(1)));

    // The sum of p, if it is centered, or of its squares.
    let moment = comptime!(if center { Moment::Sum } else { Moment::Squares });
    let moments = if comptime!(per_unit > 0) {
        let mut moments = Moments::<N>::zero();
        #[unroll]
        for i in 0..per_unit {
            let column = unit + comptime!(i * units);
            let mut p = zero;
            if column < end {
                let s = inputs.sum::<N>(&starts, column);
                if comptime!(form.sum) {
                    sum.store::<N>(sum_start + column, s);
                }
                p = inputs.gated::<N>(s, &starts, column, Gate::Pre);
            }
            ps[i] = p;
            moments.add(p, moment);
        }
        moments
    } else {
        reread_moments::<E, P, N>(inputs, &starts, end, 0.0f32, moment, team)
    };
    let mut mean_hi = 0.0f32;
    let mut mean_lo = 0.0f32;
    let variance = if comptime!(center) {
        mean_hi = over_row::<N>(moments.sum, &mut shared, team) / sizes.len;
        let moments = if comptime!(per_unit > 0) {
            let mut moments = Moments::<N>::zero();
            #[unroll]
            for i in 0..per_unit {
                if unit + comptime!(i * units) < end {
                    moments.add(ps[i] - Vector::<f32, N>::new(mean_hi), Moment::Both);
                }
            }
            moments
        } else {
            reread_moments::<E, P, N>(inputs, &starts, end, mean_hi, Moment::Both, team)
        };
        mean_lo = over_row::<N>(moments.sum, &mut shared, team) / sizes.len;
        let squares = over_row::<N>(moments.squares, &mut shared, team);
        let variance = squares / sizes.len - mean_lo * mean_lo;
        // Rounding must not make it negative; a NaN stays one.
        select(variance < 0.0f32, 0.0f32, variance)
    } else {
        over_row::<N>(moments.squares, &mut shared, team) / sizes.len
    };
    let moments = RowMoments { mean_hi, mean_lo, rstd: 1.0f32 / (variance + eps).sqrt() };

    if unit == 0usize && number < sizes.rows {
        if comptime!(form.rstd) {
            rstd.set(&sizes.shape, row, group, moments.rstd);
        }
        if comptime!(form.mean) {
            mean.set(&sizes.shape, row, group, mean_hi + mean_lo);
        }
    }
    let o_start = o.row_start(&sizes.shape, row) + first;
    if comptime!(per_unit > 0) {
        #[unroll]
        for i in 0..per_unit {
            let column = unit + comptime!(i * units);
            if column < end {
                let y = output::<E, P, N>(
                    ps[i], &moments, inputs, &starts, parameters, scale, first, column,
                );
                o.store::<N>(o_start + column, y);
            }
        }
    } else {
        let mut column = unit;
        while column < end {
            let s = inputs.sum::<N>(&starts, column);
            // The sum may overwrite the residual, which is read here for the last time.
            if comptime!(form.sum) {
                sum.store::<N>(sum_start + column, s);
            }
            let p = inputs.gated::<N>(s, &starts, column, Gate::Pre);
            let y =
                output::<E, P, N>(p, &moments, inputs, &starts, parameters, scale, first, column);
            o.store::<N>(o_start + column, y);
            column += units;
        }
    }
}

/// A checked forward. The residual and `sum` may be one.
#[derive(Clone, Copy)]
pub(super) struct Forward<'a> {
    pub(super) inputs: InputTensors<'a>,
    pub(super) o: &'a Tensor,
    pub(super) sum: Option<&'a Tensor>,
    pub(super) rstd: Option<&'a Tensor>,
    pub(super) mean: Option<&'a Tensor>,
}

pub(super) fn run(options: &Normalize, call: Forward<'_>) -> Result<()> {
    let Forward { inputs, o, sum, rstd, mean } = call;
    let InputTensors { x, residual, gate, weight, bias } = inputs;
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
        let tensors = ([Some(x), residual, gate], [Some(o), sum]);
        return through_f32(NAME, tensors.0, tensors.1, |[x, residual, gate], [o, sum]| {
            let (Some(x), Some(o)) = (x, o) else { return Ok(()) };
            let inputs = InputTensors { x, residual, gate, ..inputs };
            run(options, Forward { inputs, o, sum, ..call })
        });
    };
    let (vectors, n) = (e / width.numbers, width.numbers);
    let (team, per_unit) = team(device, vectors, n);
    let [has_sum, has_rstd, has_mean] = [sum, rstd, mean].map(|tensor| tensor.is_some());
    let form = ForwardForm { sum: has_sum, rstd: has_rstd, mean: has_mean, team, per_unit };
    let inputs = InputForm::new(options, storage, inputs);
    let count = rows.count() * groups;
    let grid = Grid::of_rows(NAME, device, count, team, largest(tensors))?;
    let unused = unused(device)?;
    let wide = |tensor: Option<&Tensor>| buffer(tensor.unwrap_or(&unused), Storage::F32);
    let statistic = |tensor, i| StatisticLaunch::new(wide(tensor), rows.layout(i, 1));
    with_words!(storage, E => launch!(
        device, normalize_forward::<E>, grid, width.words, n,
        InputsLaunch::new(
            rows.argument(0, storage, width), rows.argument(1, storage, width),
            rows.argument(2, storage, width), inputs,
        ),
        ParametersLaunch::new(wide(weight), wide(bias)),
        rows.argument(3, storage, width), rows.output(4, &unused, storage, width),
        statistic(rstd, 5), statistic(mean, 6),
        SizesLaunch::new(rows.shape(), groups, vectors, count, e as f32),
        options.eps as f32, options.scale as f32, form,
    ));
    Ok(())
}
