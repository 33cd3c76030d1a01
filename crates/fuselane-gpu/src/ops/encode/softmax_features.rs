//! A softmax over the features is a reduction over the vectors of a token and head: a team of units
//! has them in registers. For rows that are too long for that, and for the gradient of theta, there
//! are kernels that give the statistics of each row.

use cubecl::prelude::*;
use fuselane::{DType, Result};

use super::activation::{Activation, Context, Statistics, exponentials, over_pairs};
use super::call::TokenRange;
use super::pairs::{Entries, Index, Inputs, Pairs, Problem, rotation_at};
use super::softmax_sequence::product_at;
use crate::kernel::angles::{AngleSource, Rotation};
use crate::kernel::math;
use crate::kernel::reduce::{Fold, Team, over_lanes, over_units};
use crate::kernel::storage::Operand;
use crate::launch::{Grid, Storage, buffer, launch, team, with_words};
use crate::ops::softmax::StatisticsTensors;
use crate::tensor::Tensor;

/// The row of a team, at the index of the unit's first vector.
#[derive(CubeType, Clone, Copy)]
struct TeamRow {
    index: Index,
    entries: Entries,
    /// Whether there is such a row. A team without one goes along with the last one, and writes
    /// nothing.
    exists: bool,
}

#[cube]
fn team_row(problem: &Problem, #[comptime] team: Team) -> TeamRow {
    let row = CUBE_POS * comptime!(team.rows as usize) + UNIT_POS_Y as usize;
    let row = row.min(problem.rows() - 1usize);
    let index = problem.index(row, UNIT_POS_X as usize);
    let entries = problem.entries(row);
    let exists = CUBE_POS * comptime!(team.rows as usize) + (UNIT_POS_Y as usize) < problem.rows();
    TeamRow { index, entries, exists }
}

/// The index of the unit's vector number `k`.
#[cube]
fn vector_of_unit(
    problem: &Problem,
    index: &Index,
    #[comptime] k: usize,
    #[comptime] team: Team,
) -> Index {
    problem.with_vector(index, index.vector + comptime!(k * team.units as usize))
}

/// Pairs in registers.
#[derive(CubeType)]
struct PairArray<N: Size> {
    a: Array<Vector<f32, N>>,
    b: Array<Vector<f32, N>>,
}

#[cube]
impl<N: Size> PairArray<N> {
    fn new(#[comptime] len: usize) -> Self {
        let a = Array::<Vector<f32, N>>::new(len);
        let b = Array::<Vector<f32, N>>::new(len);
        PairArray::<N> { a, b }
    }

    /// Loads pairs of x; gives their maximum.
    fn load<E: Numeric, P: Size>(
        &mut self,
        x: &Operand<E, P>,
        from: usize,
        problem: &Problem,
        index: &Index,
        #[comptime] k: usize,
    ) -> f32 {
        let pairs = problem.load_x::<E, P, N>(x, from, index);
        self.set(k, &pairs);
        over_pairs::<N>(&pairs, index, problem, Fold::Max)
    }

    fn get(&self, #[comptime] k: usize) -> Pairs<N> {
        Pairs::<N> { a: self.a[k], b: self.b[k] }
    }

    fn set(&mut self, #[comptime] k: usize, pairs: &Pairs<N>) {
        self.a[k] = pairs.a;
        self.b[k] = pairs.b;
    }
}

/// The rotations of a unit's vectors in registers.
#[derive(CubeType)]
struct RotationArray<N: Size> {
    cos: Array<Vector<f32, N>>,
    sin: Array<Vector<f32, N>>,
}

#[cube]
impl<N: Size> RotationArray<N> {
    /// Those of all entries of the batch, unless they differ.
    fn new(
        angles: &AngleSource,
        problem: &Problem,
        index: &Index,
        #[comptime] len: usize,
        #[comptime] team: Team,
    ) -> Self {
        let mut cos = Array::<Vector<f32, N>>::new(len);
        let mut sin = Array::<Vector<f32, N>>::new(len);
        if comptime!(!angles.form.is_per_batch()) {
            #[unroll]
            for k in 0..len {
                let at = vector_of_unit(problem, index, k, team);
                let rotation = rotation_at::<N>(angles, 0usize, &at);
                cos[k] = rotation.cos;
                sin[k] = rotation.sin;
            }
        }
        RotationArray::<N> { cos, sin }
    }

    /// That of an entry.
    fn get(
        &mut self,
        angles: &AngleSource,
        batch: usize,
        index: &Index,
        #[comptime] k: usize,
    ) -> Rotation<N> {
        if comptime!(angles.form.is_per_batch()) {
            let rotation = rotation_at::<N>(angles, batch, index);
            self.cos[k] = rotation.cos;
            self.sin[k] = rotation.sin;
        }
        Rotation::<N> { cos: self.cos[k], sin: self.sin[k] }
    }
}

/// Softmax over the features, then the encoding; each unit has `per_unit` vectors in registers.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn encode_rows<E: Numeric, P: Size, N: Size>(
    x: &Operand<E, P>,
    o: &mut Operand<E, P>,
    angles: &AngleSource,
    problem: &Problem,
    #[comptime] per_unit: usize,
    #[comptime] team: Team,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(team.shared()));
    let row = team_row(problem, team);
    let mut rotations = RotationArray::<N>::new(angles, problem, &row.index, per_unit, team);
    for batch in row.entries.first..row.entries.end {
        let from = row.index.row_start(&x.layout, batch);
        let mut xs = PairArray::<N>::new(per_unit);
        let mut max = f32::new(f32::MIN);
        #[unroll]
        for k in 0..per_unit {
            let at = vector_of_unit(problem, &row.index, k, team);
            if at.vector < problem.vectors {
                max = max.max(xs.load::<E, P>(x, from, problem, &at, k));
            }
        }
        let max = over_units(max, &mut shared, Fold::Max, team);
        let mut sum = 0.0f32;
        #[unroll]
        for k in 0..per_unit {
            let at = vector_of_unit(problem, &row.index, k, team);
            if at.vector < problem.vectors {
                let short = comptime!(problem.form.short_exp);
                let e = exponentials::<N>(&xs.get(k), max, &at, problem, short);
                xs.set(k, &e);
                sum += over_pairs::<N>(&e, &at, problem, Fold::Sum);
            }
        }
        let sum = over_units(sum, &mut shared, Fold::Sum, team);
        let scale = Vector::<f32, N>::new(1.0f32 / sum);
        let to = row.index.row_start(&o.layout, batch);
        #[unroll]
        for k in 0..per_unit {
            let at = vector_of_unit(problem, &row.index, k, team);
            if row.exists && at.vector < problem.vectors {
                let e = xs.get(k);
                let y = Pairs::<N> { a: e.a * scale, b: e.b * scale };
                let rotation = rotations.get(angles, batch, &at, k);
                problem.store_o::<E, P, N>(o, to, &at, &problem.encoded::<N>(&y, &rotation));
            }
        }
    }
}

/// dx through a softmax over the features; each unit has `per_unit` vectors in registers.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn encode_rows_backward<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    dx: &mut Operand<E, P>,
    angles: &AngleSource,
    problem: &Problem,
    #[comptime] per_unit: usize,
    #[comptime] team: Team,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(team.shared()));
    let row = team_row(problem, team);
    let mut rotations = RotationArray::<N>::new(angles, problem, &row.index, per_unit, team);
    for batch in row.entries.first..row.entries.end {
        let x_from = row.index.row_start(&inputs.x.layout, batch);
        let grad_from = row.index.row_start(&inputs.grad.layout, batch);
        let mut xs = PairArray::<N>::new(per_unit);
        let mut dys = PairArray::<N>::new(per_unit);
        let mut max = f32::new(f32::MIN);
        // Both tensors in one loop: with one for each, NVIDIA's compiler spills.
        #[unroll]
        for k in 0..per_unit {
            let at = vector_of_unit(problem, &row.index, k, team);
            if at.vector < problem.vectors {
                max = max.max(xs.load::<E, P>(&inputs.x, x_from, problem, &at, k));
                let pairs = problem.load_grad::<E, P, N>(&inputs.grad, grad_from, &at);
                let rotation = rotations.get(angles, batch, &at, k);
                dys.set(k, &problem.decoded::<N>(&pairs, &rotation));
            }
        }
        let max = over_units(max, &mut shared, Fold::Max, team);
        let mut sum = 0.0f32;
        let mut dot = 0.0f32;
        #[unroll]
        for k in 0..per_unit {
            let at = vector_of_unit(problem, &row.index, k, team);
            if at.vector < problem.vectors {
                let e = exponentials::<N>(&xs.get(k), max, &at, problem, false);
                xs.set(k, &e);
                sum += over_pairs::<N>(&e, &at, problem, Fold::Sum);
                let product = Pairs::<N> { a: e.a * dys.a[k], b: e.b * dys.b[k] };
                dot += over_pairs::<N>(&product, &at, problem, Fold::Sum);
            }
        }
        let sum = over_units(sum, &mut shared, Fold::Sum, team);
        let dot = over_units(dot, &mut shared, Fold::Sum, team) / sum;
        let scale = Vector::<f32, N>::new(1.0f32 / sum);
        let dot = Vector::<f32, N>::new(dot);
        let to = row.index.row_start(&dx.layout, batch);
        #[unroll]
        for k in 0..per_unit {
            let at = vector_of_unit(problem, &row.index, k, team);
            if row.exists && at.vector < problem.vectors {
                let pairs = Pairs::<N> {
                    a: xs.a[k] * scale * (dys.a[k] - dot),
                    b: xs.b[k] * scale * (dys.b[k] - dot),
                };
                problem.store_dx::<E, P, N>(dx, to, &at, &pairs);
            }
        }
    }
}

/// The statistics of each (batch, token, head), by teams that read a row twice.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn row_statistics<E: Numeric, P: Size, N: Size>(
    x: &Operand<E, P>,
    statistics: &mut Statistics,
    problem: &Problem,
    #[comptime] team: Team,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(team.shared()));
    let row = team_row(problem, team);
    let units = comptime!(team.units as usize);
    for batch in row.entries.first..row.entries.end {
        let from = row.index.row_start(&x.layout, batch);
        let mut max = f32::new(f32::MIN);
        let mut vector = row.index.vector;
        while vector < problem.features {
            max = max.max(over_lanes::<N>(x.load::<N>(from + vector), Fold::Max));
            vector += units;
        }
        let max = over_units(max, &mut shared, Fold::Max, team);
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut vector = row.index.vector;
        while vector < problem.features {
            sum += math::exp::<N>(x.load::<N>(from + vector) - Vector::<f32, N>::new(max), false);
            vector += units;
        }
        let sum = over_lanes::<N>(sum, Fold::Sum);
        let sum = over_units(sum, &mut shared, Fold::Sum, team);
        if row.exists && UNIT_POS_X == 0u32 {
            let at = problem.row_number(batch, &row.index);
            statistics.maxima[at] = max;
            statistics.inverses[at] = 1.0f32 / sum;
        }
    }
}

/// The sum of f(x) times its gradient of each (batch, token, head).
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn row_dots<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    dots: &mut [f32],
    context: &Context,
    #[comptime] team: Team,
) {
    let problem = &context.problem;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(team.shared()));
    let row = team_row(problem, team);
    for batch in row.entries.first..row.entries.end {
        let x_from = row.index.row_start(&inputs.x.layout, batch);
        let grad_from = row.index.row_start(&inputs.grad.layout, batch);
        let mut dot = Vector::<f32, N>::new(0.0f32);
        let mut vector = row.index.vector;
        while vector < problem.vectors {
            let at = problem.with_vector(&row.index, vector);
            let product = product_at::<E, P, N>(inputs, context, x_from, grad_from, batch, &at);
            dot += product.a;
            if comptime!(problem.form.is_rotate()) {
                if at.rotates {
                    dot += product.b;
                }
            }
            vector += comptime!(team.units as usize);
        }
        let dot = over_units(over_lanes::<N>(dot, Fold::Sum), &mut shared, Fold::Sum, team);
        if row.exists && UNIT_POS_X == 0u32 {
            dots[problem.row_number(batch, &row.index)] = dot;
        }
    }
}

/// The teams of a launch, and how many entries of the batch each of them walks over.
fn grid(range: &TokenRange<'_>, team: Team) -> Result<(Grid, usize)> {
    let rows = range.rows();
    let chunk = range.call.chunk(rows * team.units as usize);
    let rows = rows * range.batch().div_ceil(chunk);
    Ok((Grid::of_rows(range.call.operator, range.device, rows, team, range.numbers)?, chunk))
}

/// Gives false where registers do not hold a row.
pub(super) fn forward(range: &TokenRange<'_>, x: &Tensor, o: &Tensor) -> Result<bool> {
    let TokenRange { device, storage, width, .. } = *range;
    // Two features, a cosine and a sine for each number of a vector.
    let (team, per_unit) = team(device, range.vectors(), 4 * width.numbers);
    if per_unit == 0 {
        return Ok(false);
    }
    let (grid, chunk) = grid(range, team)?;
    with_words!(storage, E => launch!(
        device, encode_rows::<E>, grid, width.words, width.numbers,
        range.operand(x), range.operand(o), range.angles(),
        range.problem(chunk, Activation::Rows), per_unit, team,
    ));
    Ok(true)
}

/// Gives false where registers do not hold a row.
pub(super) fn backward(range: &TokenRange<'_>, [x, grad, dx]: [&Tensor; 3]) -> Result<bool> {
    let TokenRange { device, storage, width, .. } = *range;
    // Two features, their gradients, a cosine and a sine for each number of a vector.
    let (team, per_unit) = team(device, range.vectors(), 6 * width.numbers);
    if per_unit == 0 {
        return Ok(false);
    }
    let (grid, chunk) = grid(range, team)?;
    with_words!(storage, E => launch!(
        device, encode_rows_backward::<E>, grid, width.words, width.numbers,
        range.inputs([x, grad]), range.operand(dx), range.angles(),
        range.problem(chunk, Activation::Rows), per_unit, team,
    ));
    Ok(true)
}

/// The statistics of the rows of `x`, with loads as wide as `x` alone allows.
pub(super) fn statistics(range: &TokenRange<'_>, x: &Tensor) -> Result<StatisticsTensors> {
    let range = &range.of_tensors(&[Some(x)])?;
    let TokenRange { device, storage, width, .. } = *range;
    let empty = || device.empty(DType::F32, &x.shape()[..3]);
    let statistics = StatisticsTensors { maxima: empty()?, inverses: empty()? };
    let features = range.call.encoding.features / width.numbers;
    let (team, _) = team(device, features, 1);
    let (grid, chunk) = grid(range, team)?;
    with_words!(storage, E => launch!(
        device, row_statistics::<E>, grid, width.words, width.numbers,
        range.operand(x), (&statistics).into(), range.problem(chunk, Activation::Rows), team,
    ));
    Ok(statistics)
}

/// The sums that the gradients of a softmax need.
pub(super) fn dots(
    range: &TokenRange<'_>,
    statistics: &StatisticsTensors,
    [x, grad]: [&Tensor; 2],
) -> Result<Tensor> {
    let TokenRange { device, storage, width, .. } = *range;
    let dots = device.empty(DType::F32, &x.shape()[..3])?;
    let (team, _) = team(device, range.vectors(), 1);
    let (grid, chunk) = grid(range, team)?;
    with_words!(storage, E => launch!(
        device, row_dots::<E>, grid, width.words, width.numbers,
        range.inputs([x, grad]), buffer(&dots, Storage::F32),
        range.context(statistics, chunk, Activation::Rows), team,
    ));
    Ok(dots)
}
