//! Over the contiguous dimension.

use cubecl::prelude::*;
use fuselane::Result;

use super::sums::{Axes, Axis, Chunk, LEAST, Span, Sums, result, scales, sweep, write};
use super::{Inputs, InputsLaunch, NAME, Plan};
use crate::kernel::reduce::{Fold, Team, over_lanes, over_units};
use crate::kernel::storage::Operand;
use crate::launch::{Grid, Rows, Storage, largest, launch, team, with_words};
use crate::tensor::Tensor;

/// `per_unit` are the vectors that each unit has in registers; 0 where rows are read again.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn softmax_rows<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    o: &mut Operand<E, P>,
    shape: &Sequence<usize>,
    rows: usize,
    vectors: usize,
    #[comptime] per_unit: usize,
    #[comptime] team: Team,
) {
    let plan = comptime!(inputs.plan);
    let units = comptime!(team.units as usize);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(team.shared()));
    let row = CUBE_POS * comptime!(team.rows as usize) + UNIT_POS_Y as usize;
    let inside = row < rows;
    // Units beyond the last row repeat it, up to the stores.
    let row = row.min(rows - 1);
    let axes = Axes {
        x: Axis { start: inputs.x.row_start(shape, row), stride: 1usize },
        grad: Axis { start: inputs.grad.row_start(shape, row), stride: 1usize },
        o: Axis { start: o.row_start(shape, row), stride: 1usize },
    };
    let first = UNIT_POS_X as usize;
    let span = Span { first, end: vectors, step: units };
    if comptime!(per_unit > 0) {
        let mut chunk = Chunk::<N>::new(per_unit);
        chunk.load::<E, P>(inputs, &axes, &span, first, per_unit);
        let mut sums = Sums::<N>::new();
        if comptime!(plan.needs_exponentials()) {
            let mut max = LEAST.runtime();
            #[unroll]
            for k in 0..per_unit {
                max = max.max(over_lanes::<N>(chunk.xs[k], Fold::Max));
            }
            sums.max = Vector::<f32, N>::new(over_units(max, &mut shared, Fold::Max, team));
            sums.shift = sums.max;
        }
        #[unroll]
        for k in 0..per_unit {
            if first + comptime!(k * units) < vectors {
                let weight = sums.add(chunk.xs[k], chunk.grads[k], plan);
                if comptime!(plan.needs_grad() || !plan.log) {
                    chunk.xs[k] = weight;
                }
            }
        }
        let scales = scales::<N>(&over_row::<N>(&sums, &mut shared, team, plan), plan);
        #[unroll]
        for k in 0..per_unit {
            let i = first + comptime!(k * units);
            if inside && i < vectors {
                let y = result::<N>(chunk.xs[k], chunk.grads[k], &scales, true, plan);
                o.store::<N>(axes.o.start + i, y);
            }
        }
    } else {
        let mut sums = sweep::<E, P, N>(inputs, &axes, &span);
        if comptime!(plan.needs_exponentials()) {
            let max = over_lanes::<N>(sums.max, Fold::Max);
            let max = over_units(max, &mut shared, Fold::Max, team);
            sums.rescale(Vector::<f32, N>::new(max), plan);
        }
        let scales = scales::<N>(&over_row::<N>(&sums, &mut shared, team, plan), plan);
        if inside {
            write::<E, P, N>(inputs, o, &axes, &span, &scales);
        }
    }
}

/// The sums of a row, in every lane, of those that its units have, relative to its maximum.
#[cube]
fn over_row<N: Size>(
    sums: &Sums<N>,
    shared: &mut Shared<[f32]>,
    #[comptime] team: Team,
    #[comptime] plan: Plan,
) -> Sums<N> {
    let mut sum = 0.0f32.runtime();
    let mut dot = 0.0f32.runtime();
    if comptime!(plan.needs_sum()) {
        sum = over_units(over_lanes::<N>(sums.sum, Fold::Sum), shared, Fold::Sum, team);
    }
    if comptime!(plan.needs_grad()) {
        dot = over_units(over_lanes::<N>(sums.dot, Fold::Sum), shared, Fold::Sum, team);
    }
    let (sum, dot) = (Vector::<f32, N>::new(sum), Vector::<f32, N>::new(dot));
    Sums::<N> { max: sums.max, shift: sums.max, sum, dot }
}

/// Gives false where no width of loads serves.
pub(super) fn run(tensors: [&Tensor; 3], storage: Storage, plan: Plan) -> Result<bool> {
    let o = tensors[2];
    let (device, tensors) = (o.device(), tensors.map(Some));
    let rows = Rows::new(tensors, *o.shape().last().unwrap_or(&1));
    let Some(width) = rows.width(device, storage, 3, &[]) else { return Ok(false) };
    let (vectors, n) = (rows.len / width.numbers, width.numbers);
    let (team, per_unit) = team(device, vectors, if plan.needs_grad() { 2 * n } else { n });
    let count = rows.count();
    let grid = Grid::of_rows(NAME, device, count, team, largest(tensors))?;
    let [x, grad, o] = [0, 1, 2];
    with_words!(storage, E => launch!(
        device, softmax_rows::<E>, grid, width.words, n,
        InputsLaunch::new(
            rows.argument(x, storage, width), rows.argument(grad, storage, width), plan,
        ),
        rows.argument(o, storage, width), rows.shape(), count, vectors, per_unit, team,
    ));
    Ok(true)
}
