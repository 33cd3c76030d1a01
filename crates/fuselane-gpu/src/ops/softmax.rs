//! Softmax and log-softmax over one dimension; see [`fuselane::Softmax`] for the formulas.
//!
//! **Rows**: the dimension is the one that is contiguous in memory. A team of units works on a row
//! and keeps it in registers: maximum, sum, result. A row that is too long for that is read once
//! for its statistics and once more for the result.
//!
//! **Columns**: the dimension is another one. Units run along the contiguous dimension, so that
//! neighbours load neighbours, and each of them walks down its columns. A cube is a tile: some
//! vectors of columns wide (x), and as many units (y) share the rows of each. All rows are read for
//! the statistics, then again for the result, and nothing is transposed. Long columns are cut into
//! pieces as well: one launch writes the statistics of each piece, the next one merges them and
//! writes the result.
//!
//! Both are made of the same parts. `walk` goes over some vectors and gives their `Sums`, lane
//! by lane; those of units and pieces are merged in a fixed order; `scales` makes of them what
//! `result` needs for each vector.
//!
//! For operators that have a softmax over the sequence inside:
//!
//! ```text
//! column_statistics(operator: &'static str, x: &Tensor, dim: usize) -> Result<(Tensor, Tensor)>
//! ```
//!
//! gives the maxima and the inverses of the sums of exp(x - maximum) in f32, of x's shape with 1 for
//! `dim`.
//!
//! The maximum starts at the least finite number, not at minus infinity, which shaders cannot
//! write. A row of nothing but minus infinity has that for its maximum and 0 for its sum, and no
//! other row has this sum. A NaN, or a plus infinity, makes the sum NaN.

use cubecl::prelude::*;
use fuselane::{DType, Result, Softmax};

use crate::copy::{through_f32, widened};
use crate::device::Device;
use crate::kernel::math;
use crate::kernel::reduce::{Fold, Team, fold, over_lanes, over_units};
use crate::kernel::storage::{Format, Place, load, row_start, store, unit_number};
use crate::launch::{
    Grid, Rows, Storage, Width, buffer, largest, launch, one_device, result_like, team, unused,
    with_words,
};
use crate::tensor::Tensor;

const NAME: &str = "softmax";

/// Where maxima start.
const LEAST: f32 = f32::MIN;
/// How far numbers may exceed what their sum was started with before that is replaced: a slowly
/// rising column then does not collect a rounding error for each step.
const MARGIN: f32 = 8.0;

/// What is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Forward,
    /// The gradient, where `x` is the forward's output.
    FromOutput,
    /// The gradient, where `x` is the forward's input.
    FromInput,
}

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    kind: Kind,
    log: bool,
    zero_masked: bool,
    /// Whether the device's own exponential serves.
    short: bool,
    format: Format,
}

impl Plan {
    fn new(options: &Softmax, kind: Kind, storage: Storage) -> Self {
        let Softmax { log, zero_masked_rows: zero_masked, .. } = *options;
        // The logarithm of a sum needs it exact, and so do gradients, in which terms cancel; and
        // bf16, which reaches as low as f32, where the device's own exponential was seen to fail.
        let short = storage == Storage::F16 && kind == Kind::Forward && !log;
        Self { kind, log, zero_masked, short, format: storage.format() }
    }

    fn needs_exponentials(self) -> bool {
        self.kind != Kind::FromOutput
    }

    fn needs_grad(self) -> bool {
        self.kind != Kind::Forward
    }

    /// Whether the sums count the outputs that are not masked.
    fn counts(self) -> bool {
        self.kind == Kind::FromOutput && self.log && self.zero_masked
    }

    fn needs_sum(self) -> bool {
        self.needs_exponentials() || self.counts()
    }

    /// Which of the numbers of a piece its sum is; the maximum, if needed, is the first.
    fn sum_place(self) -> usize {
        usize::from(self.needs_exponentials())
    }

    /// Which of them its dot is.
    fn dot_place(self) -> usize {
        self.sum_place() + usize::from(self.needs_sum())
    }

    /// How many numbers a piece has.
    fn numbers_of_piece(self) -> usize {
        self.dot_place() + usize::from(self.needs_grad())
    }
}

/// Vectors that [`walk`] has in flight at once. The same for all widths, so that a column is summed
/// in the same order whatever its neighbours are.
const CHUNK: usize = 4;

// What a row or a column is reduced to.

/// The statistics of some numbers, each lane for itself.
#[derive(CubeType)]
struct Sums<N: Size> {
    max: Vector<f32, N>,
    /// What the exponentials in `sum` and `dot` are relative to.
    shift: Vector<f32, N>,
    /// Of exp(x - shift); or how many outputs are not masked, where [`Plan::counts`].
    sum: Vector<f32, N>,
    /// Of exp(x - shift) * grad, or o * grad; or of grad for the logarithm.
    dot: Vector<f32, N>,
}

/// What [`result`] needs of a row or a column.
#[derive(CubeType)]
struct Scales<N: Size> {
    max: Vector<f32, N>,
    /// The inverse of the sum, or its logarithm for the forward of the logarithm.
    scale: Vector<f32, N>,
    /// What `grad` is reduced to.
    total: Vector<f32, N>,
}

/// e^(x - shift), lane by lane.
#[cube]
fn exponentials<N: Size>(
    x: Vector<f32, N>,
    shift: Vector<f32, N>,
    #[comptime] short: bool,
) -> Vector<f32, N> {
    let mut e = Vector::<f32, N>::new(0.0f32);
    let x = x - shift;
    #[unroll]
    for i in 0..N::value() {
        e.insert(i, math::exp_of(x.extract(i), short));
    }
    e
}

#[cube]
fn larger<N: Size>(a: Vector<f32, N>, b: Vector<f32, N>) -> Vector<f32, N> {
    let mut larger = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        larger.insert(i, a.extract(i).max(b.extract(i)));
    }
    larger
}

/// For each lane, 0 if it is minus infinity, else 1.
#[cube]
fn unmasked<N: Size>(o: Vector<f32, N>) -> Vector<f32, N> {
    let mut counts = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        counts.insert(i, select(o.extract(i) < LEAST, 0.0f32, 1.0f32));
    }
    counts
}

/// The sums of the vectors `first`, `first + step` and so on, below `end`. Vector `i` lies at
/// `x_start + i * x_stride`.
///
/// A chunk of them is loaded at once, for its maximum and then for its exponentials. These are
/// relative to a shift, which is the maximum of the first chunk until it is exceeded by [`MARGIN`].
#[cube]
#[allow(clippy::too_many_arguments)]
fn walk<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    x_start: usize,
    grad_start: usize,
    x_stride: usize,
    grad_stride: usize,
    first: usize,
    end: usize,
    step: usize,
    #[comptime] plan: Plan,
) -> Sums<N> {
    let count = comptime!(CHUNK);
    let mut max = Vector::<f32, N>::new(LEAST);
    let mut shift = Vector::<f32, N>::new(LEAST);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut dot = Vector::<f32, N>::new(0.0f32);
    let mut xs = Array::<Vector<f32, N>>::new(comptime!(count));
    let mut grads = Array::<Vector<f32, N>>::new(comptime!(count));
    let mut at = first;
    while at < end {
        #[unroll]
        for k in 0..count {
            // What is beyond the end is loaded, so that all loads go out together, and not used.
            let i = (at + k * step).min(end - 1);
            xs[k] = load::<E, P, N>(x, x_start + i * x_stride, plan.format);
            if comptime!(plan.needs_grad()) {
                grads[k] = load::<E, P, N>(grad, grad_start + i * grad_stride, plan.format);
            }
        }
        if comptime!(plan.needs_exponentials()) {
            #[unroll]
            for k in 0..count {
                max = larger::<N>(max, xs[k]);
            }
            #[unroll]
            for i in 0..N::value() {
                if max.extract(i) > shift.extract(i) + MARGIN {
                    let factor = math::exp_of(shift.extract(i) - max.extract(i), plan.short);
                    shift.insert(i, max.extract(i));
                    sum.insert(i, sum.extract(i) * factor);
                    if comptime!(plan.needs_grad() && !plan.log) {
                        dot.insert(i, dot.extract(i) * factor);
                    }
                }
            }
        }
        let mut chunk_sum = Vector::<f32, N>::new(0.0f32);
        let mut chunk_dot = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for k in 0..count {
            if at + k * step < end {
                let x = xs[k];
                let mut factor = x;
                if comptime!(plan.needs_exponentials()) {
                    factor = exponentials::<N>(x, shift, plan.short);
                    chunk_sum += factor;
                }
                if comptime!(plan.counts()) {
                    chunk_sum += unmasked::<N>(x);
                }
                if comptime!(plan.needs_grad()) {
                    if comptime!(plan.log) {
                        chunk_dot += grads[k];
                    } else {
                        chunk_dot += factor * grads[k];
                    }
                }
            }
        }
        sum += chunk_sum;
        dot += chunk_dot;
        at += count * step;
    }
    Sums::<N> { max, shift, sum, dot }
}

/// From the sums of a whole row or column, relative to its maximum.
#[cube]
fn scales<N: Size>(sums: &Sums<N>, #[comptime] plan: Plan) -> Scales<N> {
    let mut scale = sums.sum;
    let mut total = sums.dot;
    if comptime!(plan.needs_exponentials()) {
        #[unroll]
        for i in 0..N::value() {
            let sum = sums.sum.extract(i);
            let mut factor = 1.0f32 / sum;
            if comptime!(plan.needs_grad() && !plan.log) {
                total.insert(i, sums.dot.extract(i) / sum);
            }
            if comptime!(plan.log && !plan.needs_grad()) {
                // Of nothing but minus infinity: minus infinity, by a division, as shaders cannot write it.
                factor = select(sum > 0.0f32, math::ln_of(sum), -1.0f32 / sum);
            }
            if comptime!(plan.zero_masked) {
                factor = select(sum == 0.0f32, 0.0f32, factor);
            }
            scale.insert(i, factor);
        }
    }
    Scales::<N> { max: sums.max, scale, total }
}

/// What is stored for a vector `x`. With `kept`, `x` is the exponentials already, if any.
#[cube]
fn result<N: Size>(
    x: Vector<f32, N>,
    grad: Vector<f32, N>,
    scales: &Scales<N>,
    #[comptime] kept: bool,
    #[comptime] plan: Plan,
) -> Vector<f32, N> {
    if comptime!(plan.log && !plan.needs_grad()) {
        x - scales.max - scales.scale
    } else {
        let mut o = x;
        if comptime!(plan.needs_exponentials()) {
            if comptime!(!kept) {
                o = exponentials::<N>(x, scales.max, plan.short);
            }
            o *= scales.scale;
        } else if comptime!(plan.log) {
            o = exponentials::<N>(x, Vector::<f32, N>::new(0.0f32), plan.short);
        }
        if comptime!(plan.needs_grad()) {
            o = pulled_back::<N>(o, grad, scales, plan);
        }
        o
    }
}

/// The gradient, from the softmax `o`.
#[cube]
fn pulled_back<N: Size>(
    o: Vector<f32, N>,
    grad: Vector<f32, N>,
    scales: &Scales<N>,
    #[comptime] plan: Plan,
) -> Vector<f32, N> {
    let mut dx = o * scales.total;
    if comptime!(plan.log) {
        dx = grad - dx;
    } else {
        dx = o * (grad - scales.total);
    }
    if comptime!(plan.zero_masked) {
        // Whatever arrives at a masked row, its gradient is zero. Of an output, a zero needs no
        // look at the rest of its row: any zero has this gradient.
        #[unroll]
        for i in 0..N::value() {
            let mut unmasked = scales.scale.extract(i);
            if comptime!(plan.kind == Kind::FromOutput && !plan.log) {
                unmasked = o.extract(i);
            }
            dx.insert(i, select(unmasked == 0.0f32, 0.0f32, dx.extract(i)));
        }
    }
    dx
}

// Over the contiguous dimension.

/// `kept` are the vectors that each unit keeps; 0 where rows are read again.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn softmax_rows<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    o: &mut [Vector<E, P>],
    x_place: &Place,
    grad_place: &Place,
    o_place: &Place,
    shape: &Sequence<usize>,
    rows: usize,
    vectors: usize,
    #[comptime] kept: usize,
    #[comptime] team: Team,
    #[comptime] plan: Plan,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(team.shared()));
    let row = CUBE_POS * comptime!(team.rows as usize) + UNIT_POS_Y as usize;
    let inside = row < rows;
    // Units beyond the last row repeat it, up to the stores.
    let row = row.min(rows - 1);
    let x_start = row_start(x_place, shape, row);
    let grad_start = row_start(grad_place, shape, row);
    let o_start = row_start(o_place, shape, row);
    let first = UNIT_POS_X as usize;
    let units = comptime!(team.units as usize);
    if comptime!(kept > 0) {
        let mut xs = Array::<Vector<f32, N>>::new(comptime!(kept));
        let mut grads = Array::<Vector<f32, N>>::new(comptime!(kept));
        let mut max = LEAST.runtime();
        #[unroll]
        for k in 0..kept {
            let i = (first + comptime!(k * units)).min(vectors - 1);
            xs[k] = load::<E, P, N>(x, x_start + i, plan.format);
            if comptime!(plan.needs_grad()) {
                grads[k] = load::<E, P, N>(grad, grad_start + i, plan.format);
            }
        }
        if comptime!(plan.needs_exponentials()) {
            #[unroll]
            for k in 0..kept {
                max = max.max(over_lanes::<N>(xs[k], Fold::Max));
            }
            max = over_units(max, &mut shared, Fold::Max, team);
        }
        let shift = Vector::<f32, N>::new(max);
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut dot = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for k in 0..kept {
            if first + comptime!(k * units) < vectors {
                let mut factor = xs[k];
                if comptime!(plan.needs_exponentials()) {
                    factor = exponentials::<N>(factor, shift, plan.short);
                    sum += factor;
                    if comptime!(plan.needs_grad() || !plan.log) {
                        xs[k] = factor;
                    }
                }
                if comptime!(plan.counts()) {
                    sum += unmasked::<N>(factor);
                }
                if comptime!(plan.needs_grad()) {
                    if comptime!(plan.log) {
                        dot += grads[k];
                    } else {
                        dot += factor * grads[k];
                    }
                }
            }
        }
        let sums = over_row::<N>(max, sum, dot, &mut shared, team, plan);
        let scales = scales::<N>(&sums, plan);
        #[unroll]
        for k in 0..kept {
            let i = first + comptime!(k * units);
            if inside && i < vectors {
                let y = result::<N>(xs[k], grads[k], &scales, true, plan);
                store::<E, P, N>(o, o_start + i, y, plan.format);
            }
        }
    } else {
        let sums = walk::<E, P, N>(
            x, grad, x_start, grad_start, 1usize, 1usize, first, vectors, units, plan,
        );
        let mut sum = sums.sum;
        let mut dot = sums.dot;
        let mut max = LEAST.runtime();
        if comptime!(plan.needs_exponentials()) {
            max = over_lanes::<N>(sums.max, Fold::Max);
            max = over_units(max, &mut shared, Fold::Max, team);
            let factor = exponentials::<N>(sums.shift, Vector::<f32, N>::new(max), plan.short);
            sum *= factor;
            if comptime!(!plan.log) {
                dot *= factor;
            }
        }
        let sums = over_row::<N>(max, sum, dot, &mut shared, team, plan);
        let scales = scales::<N>(&sums, plan);
        if inside {
            write::<E, P, N>(
                x, grad, o, x_start, grad_start, o_start, 1usize, 1usize, 1usize, first, vectors,
                units, &scales, plan,
            );
        }
    }
}

/// The sums of a row, in every lane.
#[cube]
fn over_row<N: Size>(
    max: f32,
    sum: Vector<f32, N>,
    dot: Vector<f32, N>,
    shared: &mut Shared<[f32]>,
    #[comptime] team: Team,
    #[comptime] plan: Plan,
) -> Sums<N> {
    let mut row_sum = 0.0f32.runtime();
    let mut row_dot = 0.0f32.runtime();
    if comptime!(plan.needs_sum()) {
        row_sum = over_units(over_lanes::<N>(sum, Fold::Sum), shared, Fold::Sum, team);
    }
    if comptime!(plan.needs_grad()) {
        row_dot = over_units(over_lanes::<N>(dot, Fold::Sum), shared, Fold::Sum, team);
    }
    let max = Vector::<f32, N>::new(max);
    let (sum, dot) = (Vector::<f32, N>::new(row_sum), Vector::<f32, N>::new(row_dot));
    Sums::<N> { max, shift: max, sum, dot }
}

/// Stores the results of the vectors that [`walk`] goes over.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    o: &mut [Vector<E, P>],
    x_start: usize,
    grad_start: usize,
    o_start: usize,
    x_stride: usize,
    grad_stride: usize,
    o_stride: usize,
    first: usize,
    end: usize,
    step: usize,
    scales: &Scales<N>,
    #[comptime] plan: Plan,
) {
    let count = comptime!(CHUNK);
    let mut xs = Array::<Vector<f32, N>>::new(comptime!(count));
    let mut grads = Array::<Vector<f32, N>>::new(comptime!(count));
    let mut at = first;
    while at < end {
        #[unroll]
        for k in 0..count {
            let i = (at + k * step).min(end - 1);
            xs[k] = load::<E, P, N>(x, x_start + i * x_stride, plan.format);
            if comptime!(plan.needs_grad()) {
                grads[k] = load::<E, P, N>(grad, grad_start + i * grad_stride, plan.format);
            }
        }
        #[unroll]
        for k in 0..count {
            let i = at + k * step;
            if i < end {
                let y = result::<N>(xs[k], grads[k], scales, false, plan);
                store::<E, P, N>(o, o_start + i * o_stride, y, plan.format);
            }
        }
        at += count * step;
    }
}

// Over another dimension.

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
    /// Writes the sums of each piece.
    Pieces,
    /// Merges the sums of the pieces and writes the results.
    Results,
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
    sums: &Sums<N>,
    shared: &mut Shared<[f32]>,
    #[comptime] tile: Tile,
    #[comptime] plan: Plan,
) -> Sums<N> {
    let mut max = sums.max;
    let mut sum = sums.sum;
    let mut dot = sums.dot;
    if comptime!(plan.needs_exponentials()) {
        max = over_slices::<N>(max, shared, Fold::Max, tile);
        let factor = exponentials::<N>(sums.shift, max, plan.short);
        sum *= factor;
        if comptime!(!plan.log) {
            dot *= factor;
        }
    }
    if comptime!(plan.needs_sum()) {
        sum = over_slices::<N>(sum, shared, Fold::Sum, tile);
    }
    if comptime!(plan.needs_grad()) {
        dot = over_slices::<N>(dot, shared, Fold::Sum, tile);
    }
    Sums::<N> { max, shift: max, sum, dot }
}

/// Number `which` of the sums of a piece.
#[cube]
fn piece_sum<N: Size>(
    pieces: &[f32],
    #[comptime] which: usize,
    at: usize,
    len: usize,
) -> Vector<f32, N> {
    let mut numbers = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        numbers.insert(i, pieces[(which * len + at) * N::value() + i]);
    }
    numbers
}

/// Writes it.
#[cube]
fn set_piece_sum<N: Size>(
    pieces: &mut [f32],
    #[comptime] which: usize,
    at: usize,
    len: usize,
    numbers: Vector<f32, N>,
) {
    #[unroll]
    for i in 0..N::value() {
        pieces[(which * len + at) * N::value() + i] = numbers.extract(i);
    }
}

/// The sums of the pieces `first`, `first + step` and so on of column `c` of `total`.
#[cube]
fn over_pieces<N: Size>(
    pieces: &[f32],
    c: usize,
    total: usize,
    count: usize,
    first: usize,
    step: usize,
    #[comptime] plan: Plan,
) -> Sums<N> {
    let len = total * count;
    let mut max = Vector::<f32, N>::new(LEAST);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut dot = Vector::<f32, N>::new(0.0f32);
    if comptime!(plan.needs_exponentials()) {
        let mut piece = first;
        while piece < count {
            max = larger::<N>(max, piece_sum::<N>(pieces, 0usize, piece * total + c, len));
            piece += step;
        }
    }
    let mut piece = first;
    while piece < count {
        let at = piece * total + c;
        let mut factor = Vector::<f32, N>::new(1.0f32);
        if comptime!(plan.needs_exponentials()) {
            let own = piece_sum::<N>(pieces, 0usize, at, len);
            factor = exponentials::<N>(own, max, plan.short);
        }
        if comptime!(plan.needs_sum()) {
            sum += piece_sum::<N>(pieces, comptime!(plan.sum_place()), at, len) * factor;
        }
        if comptime!(plan.needs_grad()) {
            if comptime!(plan.log) {
                dot += piece_sum::<N>(pieces, comptime!(plan.dot_place()), at, len);
            } else {
                dot += piece_sum::<N>(pieces, comptime!(plan.dot_place()), at, len) * factor;
            }
        }
        piece += step;
    }
    Sums::<N> { max, shift: max, sum, dot }
}

/// `total` vectors of columns, `vectors` for each of the outer rows; each is `length` long, and cut into
/// `pieces` pieces, whose sums are in `sums`.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn softmax_columns<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    o: &mut [Vector<E, P>],
    sums: &mut [f32],
    x_place: &Place,
    grad_place: &Place,
    o_place: &Place,
    shape: &Sequence<usize>,
    x_stride: usize,
    grad_stride: usize,
    o_stride: usize,
    length: usize,
    vectors: usize,
    total: usize,
    pieces: usize,
    #[comptime] stage: Stage,
    #[comptime] tile: Tile,
    #[comptime] plan: Plan,
) {
    let lanes = N::value();
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile.units() * lanes));
    let columns = comptime!(tile.columns as usize);
    let tiles = (total + comptime!(columns - 1)) / columns;
    let piece = CUBE_POS / tiles;
    let c = (CUBE_POS % tiles) * columns + UNIT_POS_X as usize;
    let inside = c < total && piece < pieces;
    // Units beyond the last column repeat it, up to the stores.
    let c = c.min(total - 1);
    let row = c / vectors;
    let x_start = row_start(x_place, shape, row) + c % vectors;
    let grad_start = row_start(grad_place, shape, row) + c % vectors;
    let o_start = row_start(o_place, shape, row) + c % vectors;
    let len = (length + pieces - 1) / pieces;
    let end = length.min((piece + 1) * len);
    let first = piece * len + UNIT_POS_Y as usize;
    let slices = comptime!(tile.slices as usize);
    if comptime!(stage == Stage::Results) {
        let part = over_pieces::<N>(&*sums, c, total, pieces, UNIT_POS_Y as usize, slices, plan);
        let all = merged::<N>(&part, &mut shared, tile, plan);
        let scales = scales::<N>(&all, plan);
        if inside {
            write::<E, P, N>(
                x,
                grad,
                o,
                x_start,
                grad_start,
                o_start,
                x_stride,
                grad_stride,
                o_stride,
                first,
                end,
                slices,
                &scales,
                plan,
            );
        }
    } else {
        let part = walk::<E, P, N>(
            x,
            grad,
            x_start,
            grad_start,
            x_stride,
            grad_stride,
            first,
            end,
            slices,
            plan,
        );
        let all = merged::<N>(&part, &mut shared, tile, plan);
        if comptime!(stage == Stage::Pieces) {
            if inside && UNIT_POS_Y == 0u32 {
                let (at, len) = (piece * total + c, total * pieces);
                if comptime!(plan.needs_exponentials()) {
                    set_piece_sum::<N>(sums, 0usize, at, len, all.max);
                }
                if comptime!(plan.needs_sum()) {
                    set_piece_sum::<N>(sums, comptime!(plan.sum_place()), at, len, all.sum);
                }
                if comptime!(plan.needs_grad()) {
                    set_piece_sum::<N>(sums, comptime!(plan.dot_place()), at, len, all.dot);
                }
            }
        } else {
            let scales = scales::<N>(&all, plan);
            if inside {
                write::<E, P, N>(
                    x,
                    grad,
                    o,
                    x_start,
                    grad_start,
                    o_start,
                    x_stride,
                    grad_stride,
                    o_stride,
                    first,
                    end,
                    slices,
                    &scales,
                    plan,
                );
            }
        }
    }
}

/// Merges the maxima and sums of pieces, one column for each unit, and gives the inverses of the sums.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn softmax_statistics(
    pieces: &[f32],
    max: &mut [f32],
    inverse: &mut [f32],
    total: usize,
    count: usize,
    #[comptime] plan: Plan,
) {
    let c = unit_number();
    if c < total {
        let sums = over_pieces::<Const<1>>(pieces, c, total, count, 0usize, 1usize, plan);
        max[c] = sums.max.extract(0usize);
        inverse[c] = 1.0f32 / sums.sum.extract(0usize);
    }
}

/// Writes the softmax of `x` into `o`; see [`Softmax::forward_into`].
pub fn forward_into(options: &Softmax, x: &Tensor, o: &mut Tensor) -> Result<()> {
    one_device(NAME, [("x", Some(x)), ("o", Some(o))])?;
    let dim = options.check_forward(x.view()?, o.view_mut()?)?;
    run(options, Kind::Forward, dim, x, x, o)
}

/// The softmax of `x` in a new tensor.
pub fn forward(options: &Softmax, x: &Tensor) -> Result<Tensor> {
    let mut o = result_like(NAME, "x", x, x.shape())?;
    forward_into(options, x, &mut o)?;
    Ok(o)
}

/// Writes `dx` from the output `o` of the forward and the gradient that arrives at it; see
/// [`Softmax::backward_into`].
pub fn backward_into(options: &Softmax, o: &Tensor, grad: &Tensor, dx: &mut Tensor) -> Result<()> {
    one_device(NAME, [("o", Some(o)), ("grad", Some(grad)), ("dx", Some(dx))])?;
    let dim = options.check_backward(o.view()?, grad.view()?, dx.view_mut()?)?;
    run(options, Kind::FromOutput, dim, o, grad, dx)
}

/// `dx` of [`backward_into`] in a new tensor.
pub fn backward(options: &Softmax, o: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let mut dx = result_like(NAME, "o", o, o.shape())?;
    backward_into(options, o, grad, &mut dx)?;
    Ok(dx)
}

/// Writes `dx` from the input `x` of the forward; see [`Softmax::backward_from_input_into`].
pub fn backward_from_input_into(
    options: &Softmax,
    x: &Tensor,
    grad: &Tensor,
    dx: &mut Tensor,
) -> Result<()> {
    one_device(NAME, [("x", Some(x)), ("grad", Some(grad)), ("dx", Some(dx))])?;
    let dim = options.check_backward_from_input(x.view()?, grad.view()?, dx.view_mut()?)?;
    run(options, Kind::FromInput, dim, x, grad, dx)
}

/// `dx` of [`backward_from_input_into`] in a new tensor.
pub fn backward_from_input(options: &Softmax, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let mut dx = result_like(NAME, "x", x, x.shape())?;
    backward_from_input_into(options, x, grad, &mut dx)?;
    Ok(dx)
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
) -> Result<(Tensor, Tensor)> {
    let mut shape = x.shape().to_vec();
    shape[dim] = 1;
    let device = x.device();
    let empty = || device.empty(DType::F32, &shape);
    if x.is_empty() {
        return Ok((empty()?, empty()?));
    }
    let (order, place) = order(x, dim);
    if place + 1 == order.len() {
        // The contiguous dimension itself, which no operator asks for.
        let x = widened(operator, x)?;
        if dim + 1 < shape.len() {
            return column_statistics(operator, &x, dim);
        }
        let (max, inverse) =
            column_statistics(operator, &x.reshape(&[x.shape(), &[1]].concat())?, dim)?;
        return Ok((max.reshape(&shape)?, inverse.reshape(&shape)?));
    }
    let x = x.permute(&order)?;
    let storage = Storage::of(device, x.dtype());
    let Some(columns) = Columns::new([&x, &x, &x], place, storage)? else {
        let (max, inverse) = column_statistics(operator, &widened(operator, &x)?, place)?;
        return Ok((back(&max, &order)?, back(&inverse, &order)?));
    };
    let plan = Plan::new(&Softmax::default(), Kind::Forward, storage);
    let plan = Plan { short: false, ..plan };
    let pieces = columns.sums(device, plan)?;
    columns.launch(operator, Stage::Pieces, &pieces, plan)?;
    let shape: Vec<usize> = order.iter().map(|&d| shape[d]).collect();
    let [max, inverse] = [device.empty(DType::F32, &shape)?, device.empty(DType::F32, &shape)?];
    let total = max.len();
    let grid = Grid::of_units(operator, device, total, largest([Some(&pieces)]))?;
    let [from, to_max, to_inverse] = [&pieces, &max, &inverse].map(|t| buffer(t, Storage::F32));
    launch!(
        device,
        softmax_statistics,
        grid,
        from,
        to_max,
        to_inverse,
        total,
        columns.pieces,
        plan
    );
    Ok((back(&max, &order)?, back(&inverse, &order)?))
}

fn run(
    options: &Softmax,
    kind: Kind,
    dim: usize,
    x: &Tensor,
    grad: &Tensor,
    o: &Tensor,
) -> Result<()> {
    if o.is_empty() {
        return Ok(());
    }
    let (order, dim) = order(o, dim);
    let [x, grad, o] = [x.permute(&order)?, grad.permute(&order)?, o.permute(&order)?];
    let storage = Storage::of(o.device(), o.dtype());
    let plan = Plan::new(options, kind, storage);
    let done = if dim + 1 == order.len() {
        run_rows(&x, &grad, &o, storage, plan)?
    } else {
        run_columns(&x, &grad, &o, dim, storage, plan)?
    };
    if done {
        return Ok(());
    }
    through_f32(NAME, [Some(&x), Some(&grad)], [Some(&o)], |[x, grad], [o]| match (x, grad, o) {
        (Some(x), Some(grad), Some(o)) => run(options, kind, dim, x, grad, o),
        _ => Ok(()),
    })
}

/// The order of dimensions that moves the contiguous one of `output` last, and where `dim` is then.
///
/// A last dimension of size 1 stays where it is, unless the softmax runs along it: a single column
/// is summed in the same order as one of many.
fn order(output: &Tensor, dim: usize) -> (Vec<usize>, usize) {
    let (shape, strides) = (output.shape(), output.strides());
    let rank = shape.len();
    let one = (0..rank).rev().find(|&d| strides[d] == 1 && shape[d] > 1);
    let stays = shape[rank - 1] == 1 && dim + 1 < rank;
    let last = one.filter(|_| !stays).unwrap_or(rank - 1);
    let order = (0..rank).filter(|&d| d != last).chain([last]).collect();
    let place = if dim == last { rank - 1 } else { dim - usize::from(dim > last) };
    (order, place)
}

/// Undoes a permutation.
fn back(tensor: &Tensor, order: &[usize]) -> Result<Tensor> {
    let mut inverse = vec![0; order.len()];
    for (place, &dim) in order.iter().enumerate() {
        inverse[dim] = place;
    }
    tensor.permute(&inverse)
}

/// Gives false where no width of loads serves.
fn run_rows(x: &Tensor, grad: &Tensor, o: &Tensor, storage: Storage, plan: Plan) -> Result<bool> {
    let (device, tensors) = (o.device(), [Some(x), Some(grad), Some(o)]);
    let rows = Rows::new(tensors, *o.shape().last().unwrap_or(&1));
    let Some(width) = rows.width(device, storage, 3, &[]) else { return Ok(false) };
    let (vectors, n) = (rows.len / width.numbers, width.numbers);
    let (team, kept) = team(device, vectors, if plan.needs_grad() { 2 * n } else { n });
    let count = rows.count();
    let grid = Grid::of_rows(NAME, device, count, team, largest(tensors))?;
    let [x, grad, o] = [0, 1, 2].map(|i| rows.operand(i));
    with_words!(storage, E => launch!(
        device, softmax_rows::<E>, grid, width.words, n,
        x.buffer(storage), grad.buffer(storage), o.buffer(storage),
        x.place(n), grad.place(n), o.place(n),
        rows.shape(), count, vectors, kept, team, plan,
    ));
    Ok(true)
}

/// Gives false where no width of loads serves.
fn run_columns(
    x: &Tensor,
    grad: &Tensor,
    o: &Tensor,
    dim: usize,
    storage: Storage,
    plan: Plan,
) -> Result<bool> {
    let Some(columns) = Columns::new([x, grad, o], dim, storage)? else { return Ok(false) };
    if columns.pieces == 1 {
        // Nothing is kept, so that any memory serves.
        columns.launch(NAME, Stage::Whole, &unused(o.device())?, plan)?;
    } else {
        let sums = columns.sums(o.device(), plan)?;
        columns.launch(NAME, Stage::Pieces, &sums, plan)?;
        columns.launch(NAME, Stage::Results, &sums, plan)?;
    }
    Ok(true)
}

/// A call over columns, and how it is cut.
struct Columns {
    /// The outer dimensions without the reduced one, and the contiguous one.
    rows: Rows<3>,
    /// The step of the reduced dimension, in numbers.
    strides: [usize; 3],
    /// The reduced length.
    n: usize,
    storage: Storage,
    width: Width,
    tile: Tile,
    /// How many pieces the reduced dimension is cut into.
    pieces: usize,
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
        let (tile, pieces) = cut(device, n);
        let largest = largest(tensors.map(Some));
        Ok(Some(Self { rows, strides, n, storage, width, tile, pieces, largest }))
    }

    /// Vectors of columns.
    fn total(&self) -> usize {
        self.rows.count() * (self.rows.len / self.width.numbers)
    }

    /// Memory for the sums of the pieces.
    fn sums(&self, device: &Device, plan: Plan) -> Result<Tensor> {
        let shape = [plan.numbers_of_piece(), self.pieces, self.total(), self.width.numbers];
        device.empty(DType::F32, &shape)
    }

    fn launch(
        &self,
        operator: &'static str,
        stage: Stage,
        sums: &Tensor,
        plan: Plan,
    ) -> Result<()> {
        let Self { rows, n: length, storage, width, tile, pieces, .. } = self;
        let (device, n, total, storage) = (sums.device(), width.numbers, self.total(), *storage);
        let cubes = total.div_ceil(tile.columns as usize) * pieces;
        let dim = CubeDim::new_2d(tile.columns, tile.slices);
        let numbers = self.largest.max(sums.len());
        let grid = Grid::new(operator, device, cubes, dim, numbers)?;
        let [x, grad, o] = [0, 1, 2].map(|i| rows.operand(i));
        let [x_stride, grad_stride, o_stride] = self.strides.map(|stride| stride / n);
        with_words!(storage, E => launch!(
            device, softmax_columns::<E>, grid, width.words, n,
            x.buffer(storage), grad.buffer(storage), o.buffer(storage),
            buffer(sums, Storage::F32),
            x.place(n), grad.place(n), o.place(n), rows.shape(),
            x_stride, grad_stride, o_stride,
            *length, rows.len / n, total, *pieces, stage, *tile, plan,
        ));
        Ok(())
    }
}

/// The tiles for columns that are `n` long, and into how many pieces columns are cut, so that a large
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
    // Each piece reads the sums of all of them: by this root that stays below a tenth of the
    // column itself.
    let pieces = if n < CUT { 1 } else { n.isqrt() / 4 };
    (Tile { columns, slices }, pieces)
}
