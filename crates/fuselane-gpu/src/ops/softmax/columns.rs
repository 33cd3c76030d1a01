//! Over a dimension that is not the contiguous one.

use cubecl::prelude::*;
use fuselane::{DType, Result, Softmax};

use super::sums::{Axes, Axis, Span, Sums, larger, scales, sweep, write};
use super::{Inputs, InputsLaunch, NAME, Pass, Plan, order};
use crate::copy::widened;
use crate::device::Device;
use crate::kernel::math;
use crate::kernel::reduce::{Fold, fold};
use crate::kernel::storage::{Operand, unit_number};
use crate::launch::{Grid, Rows, Storage, Width, buffer, largest, launch, unused, with_words};
use crate::tensor::Tensor;

/// The units of a cube that works on columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Tile {
    /// Vectors of columns, along x.
    columns: u32,
    /// Units for each of them, along y; a power of two.
    slices: u32,
}

impl Tile {
    fn units(self) -> usize {
        (self.columns * self.slices) as usize
    }
}

/// What a launch over columns does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    /// All of it.
    Whole,
    /// Writes the sums of each segment.
    Segments,
    /// Merges the sums of the segments and writes the results.
    Results,
}

impl Plan {
    /// Which of the numbers of a segment its sum is; the maximum, if needed, is the first.
    fn sum_offset(self) -> usize {
        usize::from(self.needs_exponentials())
    }

    /// Which of them its dot is.
    fn dot_offset(self) -> usize {
        self.sum_offset() + usize::from(self.needs_sum())
    }

    /// How many numbers a segment has.
    fn numbers_of_segment(self) -> usize {
        self.dot_offset() + usize::from(self.needs_grad())
    }
}

/// The fold of each lane over the slices of a tile, for all of them.
#[cube]
fn over_slices<N: Size>(
    value: Vector<f32, N>,
    shared: &mut Shared<[f32]>,
    #[comptime] kind: Fold,
    #[comptime] tile: Tile,
) -> Vector<f32, N> {
    let mut value = value;
    if comptime!(tile.slices > 1) {
        let unit = (UNIT_POS_Y * comptime!(tile.columns) + UNIT_POS_X) as usize;
        let units = comptime!(tile.units());
        #[unroll]
        for i in 0..N::value() {
            shared[unit + comptime!(i * units)] = value.extract(i);
        }
        sync_cube();
        #[unroll]
        for step in 0..comptime!(tile.slices.ilog2()) {
            let half = comptime!(tile.slices >> (step + 1));
            let away = comptime!((half * tile.columns) as usize);
            if UNIT_POS_Y < half {
                #[unroll]
                for i in 0..N::value() {
                    let at = unit + comptime!(i * units);
                    let (a, b) = (shared[at], shared[at + away]);
                    shared[at] = fold(a, b, kind);
                }
            }
            sync_cube();
        }
        #[unroll]
        for i in 0..N::value() {
            value.insert(i, shared[(UNIT_POS_X as usize) + comptime!(i * units)]);
        }
        sync_cube();
    }
    value
}

/// The sums of a tile's slices, relative to the maximum.
#[cube]
fn merged<N: Size>(
    sums: &mut Sums<N>,
    shared: &mut Shared<[f32]>,
    #[comptime] tile: Tile,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.needs_exponentials()) {
        sums.rescale(over_slices::<N>(sums.max, shared, Fold::Max, tile), plan);
    }
    if comptime!(plan.needs_sum()) {
        sums.sum = over_slices::<N>(sums.sum, shared, Fold::Sum, tile);
    }
    if comptime!(plan.needs_grad()) {
        sums.dot = over_slices::<N>(sums.dot, shared, Fold::Sum, tile);
    }
}

/// Number `which` of the sums of segment `at` of `len`.
#[cube]
fn segment_sum<N: Size>(
    segments: &[f32],
    #[comptime] which: usize,
    at: usize,
    len: usize,
) -> Vector<f32, N> {
    let mut numbers = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        numbers.insert(i, segments[(which * len + at) * N::value() + i]);
    }
    numbers
}

/// Writes it.
#[cube]
fn set_segment_sum<N: Size>(
    segments: &mut [f32],
    #[comptime] which: usize,
    at: usize,
    len: usize,
    numbers: Vector<f32, N>,
) {
    #[unroll]
    for i in 0..N::value() {
        segments[(which * len + at) * N::value() + i] = numbers.extract(i);
    }
}

/// The sums of some segments, of `count`, of column `c` of `total`.
#[cube]
fn over_segments<N: Size>(
    segments: &[f32],
    c: usize,
    total: usize,
    count: usize,
    first: usize,
    step: usize,
    #[comptime] plan: Plan,
) -> Sums<N> {
    let len = total * count;
    let mut sums = Sums::<N>::new();
    if comptime!(plan.needs_exponentials()) {
        let mut segment = first;
        while segment < count {
            let max = segment_sum::<N>(segments, 0usize, segment * total + c, len);
            sums.max = larger::<N>(sums.max, max);
            segment += step;
        }
        sums.shift = sums.max;
    }
    let mut segment = first;
    while segment < count {
        let at = segment * total + c;
        let mut scale = Vector::<f32, N>::new(1.0f32);
        if comptime!(plan.needs_exponentials()) {
            let max = segment_sum::<N>(segments, 0usize, at, len);
            scale = math::exp::<N>(max - sums.max, plan.short);
        }
        if comptime!(plan.needs_sum()) {
            let sum = segment_sum::<N>(segments, comptime!(plan.sum_offset()), at, len);
            sums.sum += sum * scale;
        }
        if comptime!(plan.needs_grad()) {
            let dot = segment_sum::<N>(segments, comptime!(plan.dot_offset()), at, len);
            if comptime!(plan.log) {
                sums.dot += dot;
            } else {
                sums.dot += dot * scale;
            }
        }
        segment += step;
    }
    sums
}

/// `total` vectors of columns, `vectors` for each of the outer rows; each is `length` long, and cut
/// into `count` segments, whose sums are in `segments`.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn softmax_columns<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    o: &mut Operand<E, P>,
    segments: &mut [f32],
    shape: &Sequence<usize>,
    x_stride: usize,
    grad_stride: usize,
    o_stride: usize,
    length: usize,
    vectors: usize,
    total: usize,
    count: usize,
    #[comptime] stage: Stage,
    #[comptime] tile: Tile,
) {
    let plan = comptime!(inputs.plan);
    let lanes = N::value();
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.units() * lanes));
    let columns = comptime!(tile.columns as usize);
    let tiles = (total + comptime!(columns - 1)) / columns;
    let segment = CUBE_POS / tiles;
    let c = (CUBE_POS % tiles) * columns + UNIT_POS_X as usize;
    let inside = c < total && segment < count;
    // Units beyond the last column repeat it, up to the stores.
    let c = c.min(total - 1);
    let row = c / vectors;
    let axes = Axes {
        x: Axis { start: inputs.x.row_start(shape, row) + c % vectors, stride: x_stride },
        grad: Axis { start: inputs.grad.row_start(shape, row) + c % vectors, stride: grad_stride },
        o: Axis { start: o.row_start(shape, row) + c % vectors, stride: o_stride },
    };
    let len = (length + count - 1) / count;
    let span = Span {
        first: segment * len + UNIT_POS_Y as usize,
        end: length.min((segment + 1) * len),
        step: comptime!(tile.slices as usize),
    };
    if comptime!(stage == Stage::Results) {
        let slice = UNIT_POS_Y as usize;
        let mut sums = over_segments::<N>(&*segments, c, total, count, slice, span.step, plan);
        merged::<N>(&mut sums, &mut shared, tile, plan);
        let scales = scales::<N>(&sums, plan);
        if inside {
            write::<E, P, N>(inputs, o, &axes, &span, &scales);
        }
    } else {
        let mut sums = sweep::<E, P, N>(inputs, &axes, &span);
        merged::<N>(&mut sums, &mut shared, tile, plan);
        if comptime!(stage == Stage::Segments) {
            if inside && UNIT_POS_Y == 0u32 {
                let (at, len) = (segment * total + c, total * count);
                if comptime!(plan.needs_exponentials()) {
                    set_segment_sum::<N>(segments, 0usize, at, len, sums.max);
                }
                if comptime!(plan.needs_sum()) {
                    let which = comptime!(plan.sum_offset());
                    set_segment_sum::<N>(segments, which, at, len, sums.sum);
                }
                if comptime!(plan.needs_grad()) {
                    let which = comptime!(plan.dot_offset());
                    set_segment_sum::<N>(segments, which, at, len, sums.dot);
                }
            }
        } else {
            let scales = scales::<N>(&sums, plan);
            if inside {
                write::<E, P, N>(inputs, o, &axes, &span, &scales);
            }
        }
    }
}

/// Merges the maxima and sums of segments, one column for each unit, and gives the inverses of the
/// sums.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn softmax_statistics(
    segments: &[f32],
    max: &mut [f32],
    inverse: &mut [f32],
    total: usize,
    count: usize,
    #[comptime] plan: Plan,
) {
    let c = unit_number();
    if c < total {
        let sums = over_segments::<Const<1>>(segments, c, total, count, 0usize, 1usize, plan);
        max[c] = sums.max.extract(0usize);
        inverse[c] = 1.0f32 / sums.sum.extract(0usize);
    }
}

/// Gives false where no width of loads serves.
pub(super) fn run(tensors: [&Tensor; 3], dim: usize, storage: Storage, plan: Plan) -> Result<bool> {
    let Some(columns) = Columns::new(tensors, dim, storage)? else { return Ok(false) };
    let device = tensors[2].device();
    if columns.segments == 1 {
        // No sums are saved, so that any memory serves.
        columns.launch(NAME, Stage::Whole, &unused(device)?, plan)?;
    } else {
        let sums = columns.sums(device, plan)?;
        columns.launch(NAME, Stage::Segments, &sums, plan)?;
        columns.launch(NAME, Stage::Results, &sums, plan)?;
    }
    Ok(true)
}

/// The maxima along dimension `dim` of `x`, and the inverses of the sums of exp(x - maximum), in f32
/// and of the same shape with 1 for `dim`; in index order, where the contiguous dimension of `x` is
/// its last.
///
/// A column of nothing but minus infinity has the sum 0; one with a NaN or a plus infinity has NaN.
pub(crate) fn column_statistics(
    operator: &'static str,
    x: &Tensor,
    dim: usize,
) -> Result<StatisticsTensors> {
    let mut shape = x.shape().to_vec();
    shape[dim] = 1;
    let device = x.device();
    let empty = || device.empty(DType::F32, &shape);
    if x.is_empty() {
        return Ok(StatisticsTensors { maxima: empty()?, inverses: empty()? });
    }
    let (order, moved_dim) = order(x, dim);
    if moved_dim + 1 == order.len() {
        // The contiguous dimension itself, which no operator asks for.
        let x = widened(operator, x)?;
        if dim + 1 < shape.len() {
            return column_statistics(operator, &x, dim);
        }
        let x = x.reshape(&[x.shape(), &[1]].concat())?;
        return column_statistics(operator, &x, dim)?.each(|tensor| tensor.reshape(&shape));
    }
    let x = x.permute(&order)?;
    let storage = Storage::of(device, x.dtype());
    let Some(columns) = Columns::new([&x, &x, &x], moved_dim, storage)? else {
        let statistics = column_statistics(operator, &widened(operator, &x)?, moved_dim)?;
        return statistics.each(|tensor| back(tensor, &order));
    };
    let plan = Plan::new(&Softmax::default(), Pass::Forward, storage);
    let plan = Plan { short: false, ..plan };
    let segments = columns.sums(device, plan)?;
    columns.launch(operator, Stage::Segments, &segments, plan)?;
    let shape: Vec<usize> = order.iter().map(|&d| shape[d]).collect();
    let [maxima, inverses] = [device.empty(DType::F32, &shape)?, device.empty(DType::F32, &shape)?];
    let total = maxima.len();
    let grid = Grid::of_units(operator, device, total, largest([Some(&segments)]))?;
    let [from, to_max, to_inverse] =
        [&segments, &maxima, &inverses].map(|t| buffer(t, Storage::F32));
    launch!(
        device,
        softmax_statistics,
        grid,
        from,
        to_max,
        to_inverse,
        total,
        columns.segments,
        plan
    );
    StatisticsTensors { maxima, inverses }.each(|tensor| back(tensor, &order))
}

/// Of each column or row, the maximum and the inverse of the sum of exp(x - maximum).
pub(crate) struct StatisticsTensors {
    pub(crate) maxima: Tensor,
    pub(crate) inverses: Tensor,
}

impl StatisticsTensors {
    fn each(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self { maxima: change(&self.maxima)?, inverses: change(&self.inverses)? })
    }
}

/// Undoes a permutation.
fn back(tensor: &Tensor, order: &[usize]) -> Result<Tensor> {
    let mut inverse = vec![0; order.len()];
    for (at, &dim) in order.iter().enumerate() {
        inverse[dim] = at;
    }
    tensor.permute(&inverse)
}

/// A call over columns, and how it is cut.
struct Columns {
    /// The outer dimensions without the reduced one, and the contiguous one.
    rows: Rows<3>,
    /// The stride of the reduced dimension, in numbers.
    strides: [usize; 3],
    /// The reduced length.
    n: usize,
    storage: Storage,
    width: Width,
    tile: Tile,
    /// How many segments the reduced dimension is cut into.
    segments: usize,
    largest: usize,
}

impl Columns {
    /// None where no width of loads serves.
    fn new(tensors: [&Tensor; 3], dim: usize, storage: Storage) -> Result<Option<Self>> {
        let ([like, ..], device) = (tensors, tensors[0].device());
        let n = like.shape()[dim];
        let strides = tensors.map(|tensor| if n == 1 { 0 } else { tensor.strides()[dim] });
        let [a, b, c] = tensors.map(|tensor| tensor.narrow(dim, 0, 1));
        let (a, b, c) = (a?, b?, c?);
        let len = *like.shape().last().unwrap_or(&1);
        let rows = Rows::new([Some(&a), Some(&b), Some(&c)], len).flattened();
        let Some(width) = rows.width(device, storage, 3, &strides) else { return Ok(None) };
        let (tile, segments) = cut(device, n);
        let largest = largest(tensors.map(Some));
        Ok(Some(Self { rows, strides, n, storage, width, tile, segments, largest }))
    }

    /// Vectors of columns.
    fn total(&self) -> usize {
        self.rows.count() * (self.rows.len / self.width.numbers)
    }

    /// Memory for the sums of the segments.
    fn sums(&self, device: &Device, plan: Plan) -> Result<Tensor> {
        let shape = [plan.numbers_of_segment(), self.segments, self.total(), self.width.numbers];
        device.empty(DType::F32, &shape)
    }

    fn launch(
        &self,
        operator: &'static str,
        stage: Stage,
        sums: &Tensor,
        plan: Plan,
    ) -> Result<()> {
        let Self { rows, n: length, storage, width, tile, segments, .. } = self;
        let (device, n, total, storage) = (sums.device(), width.numbers, self.total(), *storage);
        let cubes = total.div_ceil(tile.columns as usize) * segments;
        let dim = CubeDim::new_2d(tile.columns, tile.slices);
        let numbers = self.largest.max(sums.len());
        let grid = Grid::new(operator, device, cubes, dim, numbers)?;
        let [x, grad, o] = [0, 1, 2];
        let [x_stride, grad_stride, o_stride] = self.strides.map(|stride| stride / n);
        with_words!(storage, E => launch!(
            device, softmax_columns::<E>, grid, width.words, n,
            InputsLaunch::new(
                rows.argument(x, storage, *width), rows.argument(grad, storage, *width), plan,
            ),
            rows.argument(o, storage, *width), buffer(sums, Storage::F32),
            rows.shape(), x_stride, grad_stride, o_stride,
            *length, rows.len / n, total, *segments, stage, *tile,
        ));
        Ok(())
    }
}

/// The tiles for columns that are `n` long, and into how many segments columns are cut, so that a large
/// device has enough to do where columns are few.
///
/// Functions of `n` alone: a column is summed in the same order, however many others there are.
fn cut(device: &Device, n: usize) -> (Tile, usize) {
    const CUBE: u32 = 256;
    // Vectors of columns that a tile should have, for whole lines of memory to be read.
    const COLUMNS: u32 = 32;
    // The least rows for a unit.
    const ROWS: usize = 16;
    // Shorter columns are not cut: a second launch costs more than it gives.
    const CUT: usize = 1024;
    let power = |count: usize| count.max(1).next_power_of_two().min(1 << 16) as u32;
    let cube = CUBE.min(device.units());
    let wanted = power(n.div_ceil(ROWS));
    let columns = (cube / wanted.min(cube)).max(COLUMNS).min(cube);
    let slices = wanted.min(cube / columns);
    // Each segment reads the sums of all of them: by this root that stays below a tenth of the
    // column itself.
    let segments = if n < CUT { 1 } else { n.isqrt() / 4 };
    (Tile { columns, slices }, segments)
}
