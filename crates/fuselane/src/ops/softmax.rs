//! Softmax and log-softmax over one dimension.
//!
//! ```text
//!     softmax      o = exp(x - max) / sum,    sum = sum over the dimension of exp(x - max)
//!     log-softmax  o = (x - max) - ln(sum)
//!
//!     backward     dx = o * (grad - sum over the dimension of o * grad)
//!           log    dx = grad - exp(o) * sum over the dimension of grad
//! ```
//!
//! The dimension is the last one (features) or any other (a sequence); no view is transposed and
//! no second tensor is made.
//!
//! **Over the last dimension** a row is read once. Its exponentials are kept in a few KiB of
//! scratch while their sum is formed, then scaled and written. Rows beyond `KEEP` elements are
//! read again instead. Short rows go a few at a time, so that the sums and divisions of one
//! row run behind the exponentials of the next.
//!
//! **Over another dimension** the tensor is cut into tiles of some columns. All rows of a tile are
//! read for the columns' maxima and sums, then again (from the cache, where the tile fits) for the
//! output. The sums are formed while the maxima still rise: see `column_statistics`.
//!
//! The sums add `CHUNK` blocks (or `CHUNK_ROWS` rows) as lanes, and the sums of these chunks in
//! double precision (or with compensation), so that an error does not grow with the length. Their
//! order depends on the length, and on whether the dimension is the innermost one in memory.
//!
//! A NaN, or a plus infinity, makes its row NaN. A row of nothing but minus infinity is NaN, as in
//! PyTorch, unless [`Softmax::zero_masked_rows`] is set. The maximum need not see a NaN for that:
//! the sum does.

use std::marker::PhantomData;
use std::ops::Range;

use super::contiguous_last;
use crate::error::{Error, Result};
use crate::pool::Buffer;
use crate::rows::{Named, Operands, Part, Rows, Run, RunMut, Stage, Unstage};
use crate::scratch::Scratch;
use crate::simd::{self, Kernel, Lanes, MAX_LANES, Math, Memory};
use crate::view::{View, ViewMut};
use crate::{Element, Real, isa};

/// Softmax over dimension `dim`.
///
/// ```
/// use fuselane::{Softmax, View};
/// let x = [7.0f32, 7.0, f32::NEG_INFINITY, 0.0];
/// let o = Softmax::over(-1).forward(View::new(&x, &[2, 2])?)?;
/// assert_eq!(o.as_slice::<f32>()?, [0.5, 0.5, 0.0, 1.0]);
/// # Ok::<(), fuselane::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Softmax {
    /// The dimension that is summed over; negative ones count from the last.
    pub dim: isize,
    /// Gives the logarithm of the softmax instead.
    pub log: bool,
    /// A row of nothing but minus infinity gives zeros (minus infinities for the logarithm) and
    /// zero gradients, instead of NaN.
    pub zero_masked_rows: bool,
}

impl Default for Softmax {
    fn default() -> Self {
        Self { dim: -1, log: false, zero_masked_rows: false }
    }
}

/// The most elements whose exponentials are kept in scratch.
const KEEP: usize = 16384;
/// Blocks of a row that are summed as lanes.
const CHUNK: usize = 64;
/// Rows of a column tile whose sum is formed as lanes.
const CHUNK_ROWS: usize = 32;
/// The most rows that are worked on at once, and the most elements in them.
const BATCH: usize = 16;
const BATCH_ELEMENTS: usize = 2048;
/// The most bytes in a row of a column tile, and the least: shorter ones cost more than what a tile
/// that leaves the second-level cache does. (At 8,192 rows, tiles of 64 bytes took half as long
/// again forward.) Only for want of tasks they are as short as a cache line.
const TILE_ROW: usize = 512;
const LEAST_ROW: usize = 256;
const LINE: usize = 64;
/// The most that elements may be off 0 for their exponentials to be taken as they are: sums of
/// many, and their inverses, then stay well within f32.
pub(crate) const NEAR: f32 = 60.0;
/// How far a column may exceed the maximum its sum was started with before that is replaced.
const MARGIN: f64 = 8.0;

impl Softmax {
    /// Softmax over dimension `dim`, where -1 is the last.
    pub const fn over(dim: isize) -> Self {
        Self { dim, log: false, zero_masked_rows: false }
    }

    /// The logarithm of the softmax over dimension `dim`, where -1 is the last.
    ///
    /// ```
    /// use fuselane::{Softmax, View};
    /// let o = Softmax::log_over(0).forward(View::new(&[1e4f64, 1e4], &[2, 1])?)?;
    /// assert_eq!(o.as_slice::<f64>()?, [-2f64.ln(); 2]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub const fn log_over(dim: isize) -> Self {
        Self { dim, log: true, zero_masked_rows: false }
    }

    /// Writes the softmax of `x` into `o`.
    ///
    /// ```
    /// use fuselane::{Softmax, View, ViewMut};
    /// let (x, mut o) = ([7.0f32, 0.0, 7.0, 1e4], [0.0f32; 4]);
    /// Softmax::over(0).forward_into(View::new(&x, &[2, 2])?, ViewMut::new(&mut o, &[2, 2])?)?;
    /// assert_eq!(o, [0.5, 0.0, 0.5, 1.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn forward_into(&self, x: View<'_>, o: ViewMut<'_>) -> Result<()> {
        let rows = self.checked([("x", x)], ("o", o))?.cut();
        let (isa, dtype) = (isa(), rows.rows.dtype());
        rows.for_each_task(self, |task| match (task.columns, self.log, task.n <= KEEP) {
            (false, false, true) => simd::run(isa, dtype, ForwardRows::<false, true>(task)),
            (false, false, false) => simd::run(isa, dtype, ForwardRows::<false, false>(task)),
            (false, true, _) => simd::run(isa, dtype, ForwardRows::<true, false>(task)),
            (true, false, _) => simd::run(isa, dtype, ForwardColumns::<false>(task)),
            (true, true, _) => simd::run(isa, dtype, ForwardColumns::<true>(task)),
        });
        Ok(())
    }

    /// The checks of [`Softmax::forward_into`], without the call, and the dimension that it runs
    /// along, counted from the first. No element is read or written, so that the views may stand for
    /// memory that only another device can reach.
    ///
    /// ```
    /// use fuselane::{Softmax, View, ViewMut};
    /// let (x, mut o) = ([1.0f32; 6], [0.0f32; 6]);
    /// let (x, o) = (View::new(&x, &[2, 3])?, ViewMut::new(&mut o, &[2, 3])?);
    /// assert_eq!(Softmax::over(-1).check_forward(x, o)?, 1);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn check_forward(&self, x: View<'_>, o: ViewMut<'_>) -> Result<usize> {
        Ok(self.checked([("x", x)], ("o", o))?.given)
    }

    /// The softmax of `x` in a buffer from the pool.
    ///
    /// ```
    /// use fuselane::{Softmax, View};
    /// let masked = [f32::NEG_INFINITY; 2];
    /// let softmax = Softmax { zero_masked_rows: true, ..Softmax::over(-1) };
    /// assert_eq!(softmax.forward(View::new(&masked, &[2])?)?.as_slice::<f32>()?, [0.0, 0.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn forward(&self, x: View<'_>) -> Result<Buffer> {
        let mut o = Buffer::unfilled(x.dtype(), x.shape())?;
        self.forward_into(x, o.view_mut())?;
        Ok(o)
    }

    /// Writes `dx` from the output `o` of the forward and the gradient that arrives at it.
    ///
    /// ```
    /// use fuselane::{Softmax, View, ViewMut};
    /// let (o, grad, mut dx) = ([0.25f32, 0.75], [4.0f32, 0.0], [0.0f32; 2]);
    /// let [o, grad] = [View::new(&o, &[2])?, View::new(&grad, &[2])?];
    /// Softmax::over(-1).backward_into(o, grad, ViewMut::new(&mut dx, &[2])?)?;
    /// assert_eq!(dx, [0.75, -0.75]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn backward_into(&self, o: View<'_>, grad: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let rows = self.checked([("o", o), ("grad", grad)], ("dx", dx))?.cut();
        let (isa, dtype) = (isa(), rows.rows.dtype());
        rows.for_each_task(self, |task| match (task.columns, self.log) {
            (false, false) => simd::run(isa, dtype, RowsFromOutput::<false>(task)),
            (false, true) => simd::run(isa, dtype, RowsFromOutput::<true>(task)),
            (true, false) => simd::run(isa, dtype, ColumnsFromOutput::<false>(task)),
            (true, true) => simd::run(isa, dtype, ColumnsFromOutput::<true>(task)),
        });
        Ok(())
    }

    /// The checks of [`Softmax::backward_into`], without the call; see
    /// [`Softmax::check_forward`].
    pub fn check_backward(&self, o: View<'_>, grad: View<'_>, dx: ViewMut<'_>) -> Result<usize> {
        Ok(self.checked([("o", o), ("grad", grad)], ("dx", dx))?.given)
    }

    /// `dx` of [`Softmax::backward_into`] in a buffer from the pool.
    ///
    /// ```
    /// use fuselane::{Softmax, View};
    /// let (o, grad) = (View::new(&[0.25f32, 0.75], &[2])?, View::new(&[4.0f32, 0.0], &[2])?);
    /// assert_eq!(Softmax::over(0).backward(o, grad)?.as_slice::<f32>()?, [0.75, -0.75]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn backward(&self, o: View<'_>, grad: View<'_>) -> Result<Buffer> {
        let mut dx = Buffer::unfilled(o.dtype(), o.shape())?;
        self.backward_into(o, grad, dx.view_mut())?;
        Ok(dx)
    }

    /// Writes `dx` from the input `x` of the forward, where the output was not kept. The output is
    /// computed again and not rounded, so this is the more exact form for 16-bit tensors.
    ///
    /// ```
    /// use fuselane::{Softmax, View, ViewMut};
    /// let (x, grad, mut dx) = ([7.0f32, 7.0], [4.0f32, 0.0], [0.0f32; 2]);
    /// let [x, grad] = [View::new(&x, &[2])?, View::new(&grad, &[2])?];
    /// Softmax::over(-1).backward_from_input_into(x, grad, ViewMut::new(&mut dx, &[2])?)?;
    /// assert_eq!(dx, [1.0, -1.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn backward_from_input_into(
        &self,
        x: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let rows = self.checked([("x", x), ("grad", grad)], ("dx", dx))?.cut();
        let (isa, dtype) = (isa(), rows.rows.dtype());
        rows.for_each_task(self, |task| match (task.columns, self.log) {
            (false, false) => simd::run(isa, dtype, RowsFromInput::<false>(task)),
            (false, true) => simd::run(isa, dtype, RowsFromInput::<true>(task)),
            (true, false) => simd::run(isa, dtype, ColumnsFromInput::<false>(task)),
            (true, true) => simd::run(isa, dtype, ColumnsFromInput::<true>(task)),
        });
        Ok(())
    }

    /// The checks of [`Softmax::backward_from_input_into`], without the call; see
    /// [`Softmax::check_forward`].
    pub fn check_backward_from_input(
        &self,
        x: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<usize> {
        Ok(self.checked([("x", x), ("grad", grad)], ("dx", dx))?.given)
    }

    /// `dx` of [`Softmax::backward_from_input_into`] in a buffer from the pool.
    ///
    /// ```
    /// use fuselane::{Softmax, View};
    /// let (x, grad) = (View::new(&[7.0f32, 7.0], &[2])?, View::new(&[4.0f32, 0.0], &[2])?);
    /// let dx = Softmax::over(0).backward_from_input(x, grad)?;
    /// assert_eq!(dx.as_slice::<f32>()?, [1.0, -1.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn backward_from_input(&self, x: View<'_>, grad: View<'_>) -> Result<Buffer> {
        let mut dx = Buffer::unfilled(x.dtype(), x.shape())?;
        self.backward_from_input_into(x, grad, dx.view_mut())?;
        Ok(dx)
    }

    /// Checks a call whose operands all look like the first input. Nothing is read or written.
    fn checked<'a, const I: usize>(
        &self,
        inputs: [Named<View<'a>>; I],
        (name, output): Named<ViewMut<'a>>,
    ) -> Result<Checked<'a, I>> {
        let given = self.dimension(inputs[0])?;
        let names = inputs.map(|(name, _)| name);
        let (views, output, last) = arrange(given, inputs.map(|(_, view)| view), output)?;
        let like = views[0];
        // Where it is now that dimension `last` was moved last.
        let dim = if given == last { like.rank() - 1 } else { given - usize::from(given > last) };
        let inputs = std::array::from_fn(|i| (names[i], Some(views[i])));
        let operands = Operands::plain((names[0], like), inputs, [(name, Some(output))]);
        let rows = Rows::new("softmax", operands)?;
        Ok(Checked { rows, n: like.shape()[dim], given, dim, innermost: dim + 1 == like.rank() })
    }

    /// The dimension, counted from the first.
    fn dimension(&self, (name, view): (&'static str, View<'_>)) -> Result<usize> {
        let rank = view.rank();
        if rank == 0 {
            let expected = "at least one (softmax runs along one)";
            return Err(Error::new("softmax", name, "has no dimensions", expected));
        }
        let from_first = if self.dim < 0 { self.dim + rank as isize } else { self.dim };
        usize::try_from(from_first).ok().filter(|&dim| dim < rank).ok_or_else(|| {
            Error::new(
                "softmax",
                "dim",
                format!("is {}", self.dim),
                format!("-{rank} to {} ({name} has {rank} dimensions)", rank - 1),
            )
        })
    }
}

/// A checked call, before it is cut into tasks.
struct Checked<'a, const I: usize> {
    rows: Rows<'a, I, 1>,
    /// The reduced length.
    n: usize,
    /// The reduced dimension of the caller's views.
    given: usize,
    /// The reduced dimension of the rows.
    dim: usize,
    /// Whether it is the one that rows run along.
    innermost: bool,
}

impl<'a, const I: usize> Checked<'a, I> {
    fn cut(self) -> Along<'a, I> {
        let Self { rows, n, dim, innermost, .. } = self;
        if innermost {
            return Along { rows: rows.merged(false), n, width: n, columns: false };
        }
        let rows = rows.widened(dim);
        let outer = rows.count() / n.max(1);
        let width = tile_width(n, rows.input_len(0), outer, rows.dtype().size(), I);
        Along { rows: rows.columns(dim, width), n, width, columns: true }
    }
}

/// The rows of a call, with the reduced dimension within each row, or along the rows of a column
/// tile.
struct Along<'a, const I: usize> {
    rows: Rows<'a, I, 1>,
    /// The reduced length.
    n: usize,
    /// The most elements in a row; of a tile, if the rows are those of column tiles.
    width: usize,
    columns: bool,
}

impl<const I: usize> Along<'_, I> {
    /// Calls `work` with the tasks that the call is cut into.
    fn for_each_task(&self, options: &Softmax, work: impl Fn(Task<'_, I>) + Sync) {
        let &Self { n, width, columns, .. } = self;
        let stream = self.rows.stream();
        self.rows.for_each_part(if columns { n } else { 1 }, |part| {
            work(Task { options: *options, part, n, width, columns, stream });
        });
    }
}

/// Moves the dimension that is contiguous in the output last; see [`contiguous_last`].
///
/// A last dimension of size 1 stays where it is, unless the softmax runs along it: a single column
/// is summed in the same order as one of many.
fn arrange<'a, const I: usize>(
    dim: usize,
    inputs: [View<'a>; I],
    output: ViewMut<'a>,
) -> Result<([View<'a>; I], ViewMut<'a>, usize)> {
    let rank = output.rank();
    if output.shape().last() == Some(&1) && dim + 1 < rank {
        return Ok((inputs, output, rank - 1));
    }
    contiguous_last(inputs, output)
}

/// What one thread does: all of some rows, or of some column tiles.
struct Task<'r, const I: usize> {
    options: Softmax,
    part: Part<'r, I, 1>,
    n: usize,
    width: usize,
    columns: bool,
    stream: bool,
}

/// The columns in a tile, for `outer` tensors of `n` rows of elements of `size` bytes: few enough for
/// the tile to stay in the second-level cache between its two readings, unless its rows would be too
/// short to read well, and for every thread to have some tiles. No result depends on it.
fn tile_width(n: usize, columns: usize, outer: usize, size: usize, inputs: usize) -> usize {
    let tasks = 4 * crate::parallel::current_threads();
    // Half of a cache: the other half is for what is asked for ahead, and for others. (Of 1 MiB, an
    // eighth took a fifth longer forward and a third longer backward.)
    let most = crate::machine::second_level_cache_bytes() / 2;
    let mut width = TILE_ROW / size;
    while width * size > LEAST_ROW && n.saturating_mul(inputs * width * size) > most {
        width /= 2;
    }
    while width * size > LINE && outer.saturating_mul(columns.div_ceil(width)) < tasks {
        width /= 2;
    }
    width
}

/// Rows of `len` elements to work on at once.
fn batch(len: usize) -> usize {
    (BATCH_ELEMENTS / len.max(1)).clamp(1, BATCH)
}

/// Declares kernels, one for each form of the operator, so that each is compiled by itself.
macro_rules! kernels {
    ($($name:ident<$inputs:literal $(, $constant:ident)*> = $function:ident;)*) => {
        $(
            struct $name<'r $(, const $constant: bool)*>(Task<'r, $inputs>);

            impl<$(const $constant: bool),*> Kernel for $name<'_ $(, $constant)*> {
                #[inline(always)]
                fn run<L, T>(self)
                where
                    T: Element,
                    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
                {
                    $function::<L, T $(, $constant)*>(self.0);
                }
            }
        )*
    };
}

kernels! {
    ForwardRows<1, LOG, KEPT> = forward_rows;
    ForwardColumns<1, LOG> = forward_columns;
    RowsFromOutput<2, LOG> = rows_from_output;
    ColumnsFromOutput<2, LOG> = columns_from_output;
    RowsFromInput<2, LOG> = rows_from_input;
    ColumnsFromInput<2, LOG> = columns_from_input;
}

/// Runs `$body` for each block of a range: first the whole ones, in a loop that calls nothing, so
/// that its sums stay in registers; then, with `$WHOLE` false, the row's end.
macro_rules! blocks {
    ($L:ident in $range:expr, ($i:ident, $WHOLE:ident) => $body:block) => {{
        let range: Range<usize> = $range;
        let whole = range.start + range.len() / $L::N * $L::N;
        for $i in (range.start..whole).step_by($L::N) {
            const $WHOLE: bool = true;
            $body
        }
        if whole < range.end {
            const $WHOLE: bool = false;
            let $i = whole;
            $body
        }
    }};
}

/// Elements of a loop's step, in arrays of known length: so that no step has a bound to check.
const STEP: usize = 4 * MAX_LANES;

/// Runs `$body` for each block of the first `$len` elements of some slices, which within it are
/// parts of themselves: steps of [`STEP`] elements, in a loop that calls nothing; then the rest.
macro_rules! steps {
    ($L:ident in $len:expr, [$($a:ident),*], [$($m:ident),*], ($i:ident, $WHOLE:ident) => $body:block) => {{
        let len: usize = $len;
        for k in 0..len / STEP {
            $(let $a = &$a.as_chunks::<STEP>().0[k];)*
            $(let $m = &mut $m.as_chunks_mut::<STEP>().0[k];)*
            for $i in (0..STEP).step_by($L::N) {
                const $WHOLE: bool = true;
                $body
            }
        }
        let (done, whole) = (len / STEP * STEP, len / $L::N * $L::N);
        if done < whole {
            $(let $a = &$a[done..];)*
            $(let $m = &mut $m[done..];)*
            for $i in (0..whole - done).step_by($L::N) {
                const $WHOLE: bool = true;
                $body
            }
        }
        // In whole slices: the last block of one is read together with elements before it.
        if whole < len {
            const $WHOLE: bool = false;
            let $i = whole;
            $body
        }
    }};
}

/// Blocks that are written together.
const BLOCKS: usize = STEP / MAX_LANES;

/// As [`steps`], for a loop that gives a block for each of `$row`: rounds it by
/// [`Memory::nearest`] and writes it.
macro_rules! write_steps {
    ($L:ident, $T:ident to $row:ident, [$($a:ident),*], $stream:expr, ($i:ident, $WHOLE:ident) => $value:expr) => {{
        let (len, stream): (usize, bool) = ($row.len(), $stream);
        for k in 0..len / STEP {
            $(let $a = &$a.as_chunks::<STEP>().0[k];)*
            let row = &mut $row.as_chunks_mut::<STEP>().0[k];
            for start in (0..STEP).step_by(BLOCKS * $L::N) {
                const $WHOLE: bool = true;
                let zero = $L::splat(Real::of(0.0));
                let mut blocks = [<$L as Memory<$T>>::pack(zero); BLOCKS];
                for b in 0..BLOCKS {
                    let $i = start + b * $L::N;
                    let value: $L = $value;
                    blocks[b] = <$L as Memory<$T>>::pack_exact(<$L as Memory<$T>>::nearest(value));
                }
                <$L as Memory<$T>>::write_packed(blocks, row, start, stream);
            }
        }
        let (done, whole) = (len / STEP * STEP, len / $L::N * $L::N);
        if done < whole {
            $(let $a = &$a[done..];)*
            let row = &mut $row[done..];
            for $i in (0..whole - done).step_by($L::N) {
                const $WHOLE: bool = true;
                let value: $L = $value;
                write_nearest::<$L, $T, $WHOLE>(value, row, $i, stream);
            }
        }
        if whole < len {
            const $WHOLE: bool = false;
            let $i = whole;
            let value: $L = $value;
            write_nearest::<$L, $T, $WHOLE>(value, $row, $i, stream);
        }
    }};
}

/// The block at `i` of a row.
#[inline(always)]
fn read<L, T, const WHOLE: bool>(row: &[T], i: usize, fill: T::Real) -> L
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    if WHOLE { L::read_whole(row, i) } else { L::read(row, i, fill) }
}

/// Writes the block at `i` of a row, rounded by [`Memory::nearest`].
#[inline(always)]
fn write_nearest<L, T, const WHOLE: bool>(block: L, row: &mut [T], i: usize, stream: bool)
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let block = block.nearest();
    if WHOLE {
        block.write_exact_whole(row, i, stream);
    } else {
        block.write_exact(row, i, stream);
    }
}

// Over the last dimension.

/// Fills `scratch`, in register order, with exp(x - max) of a row, and gives 1 / sum.
///
/// Zeros stand past the row's end, up to a whole number of blocks, which `scratch` has to have
/// room for. The softmax is their product, for every row: one with a NaN or a plus infinity has 1 /
/// sum = NaN, and one of nothing but minus infinity has zeros and 1 / sum = infinity.
#[inline(always)]
pub(crate) fn exp_row<L, T>(x: &[T], scratch: &mut [T::Real]) -> T::Real
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let shift = row_shift::<L, T>(x);
    inverse(exp_sum::<L, T, true, true>(x, shift, scratch), false)
}

/// What a row's exponentials are taken relative to: its maximum, but 0 where that is minus
/// infinity. Of any value where the row has a NaN.
#[inline(always)]
fn row_shift<L, T>(x: &[T]) -> T::Real
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let least = T::Real::MINUS_INFINITY;
    let mut max = L::splat(least);
    blocks!(L in 0..x.len(), (i, WHOLE) => {
        max = max.max(read::<L, T, WHOLE>(x, i, least));
    });
    let max = max.reduce_max();
    if max == least { T::Real::of(0.0) } else { max }
}

/// e^x. A softmax that is stored need not have it `EXACT`. The logarithm of a sum does: near 0, an
/// error of the sum is as large there as it is in the sum. So do gradients, in which terms cancel.
#[inline(always)]
fn exponential<L: Math, const EXACT: bool>(x: L) -> L {
    if EXACT { x.exp() } else { x.exp_for_store::<false>() }
}

/// The sum of exp(x - shift) over a row; with `KEPT`, `scratch` is filled with them, in register
/// order.
#[inline(always)]
fn exp_sum<L, T, const EXACT: bool, const KEPT: bool>(
    x: &[T],
    shift: T::Real,
    scratch: &mut [T::Real],
) -> f64
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (shift, mut total) = (L::splat(shift), 0.0);
    for start in (0..x.len()).step_by(CHUNK * L::N) {
        let mut sum = L::splat(Real::of(0.0));
        blocks!(L in start..x.len().min(start + CHUNK * L::N), (i, WHOLE) => {
            let x = read::<L, T, WHOLE>(x, i, T::Real::MINUS_INFINITY).sub(shift);
            let e = exponential::<L, EXACT>(x);
            if KEPT {
                e.set(scratch, i);
            }
            sum = sum.add(e);
        });
        total += sum.reduce_add().to_f64();
    }
    total
}

/// [`exp_sum`] of the whole blocks of several rows, then of their `ENDS`, without a shift, for lanes
/// with short forms: where all elements are within [`NEAR`] of 0, there is no maximum to look for
/// first. Tells whether some are not.
struct NearExpSums<'a, 'r, L, T: Element, const ENDS: bool> {
    x: &'a Run<'r, T>,
    rows: usize,
    /// The exponentials, `room` for each row.
    scratch: &'a mut [T::Real],
    room: usize,
    sums: &'a mut [f64; BATCH],
    lanes: PhantomData<L>,
}

impl<L, T> simd::Task for NearExpSums<'_, '_, L, T, false>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, rows, scratch, room, sums, .. } = self;
        let (zero, whole) = (L::splat(Real::of(0.0)), x.len() / L::N * L::N);
        let (mut noted, ahead) = (zero, x.ahead());
        if whole <= CHUNK * L::N {
            let mut lanes = [zero; BATCH];
            for (r, sum) in lanes[..rows].iter_mut().enumerate() {
                let (row, exps) = (&x.row(r)[..whole], &mut scratch[r * room..][..whole]);
                let mut total = zero;
                steps!(L in whole, [row], [exps], (i, _WHOLE) => {
                    let x = row;
                    L::prefetch(x.as_ptr().wrapping_add(i).wrapping_byte_offset(ahead));
                    let e = L::read_whole(x, i).exp_for_store::<true>();
                    noted = L::note(x, i, noted);
                    e.set(exps, i);
                    total = total.add(e);
                });
                *sum = total;
            }
            store_sums(&lanes, &mut sums[..rows]);
            return L::is_far(noted, NEAR);
        }
        for (r, total) in sums[..rows].iter_mut().enumerate() {
            let (row, exps) = (&x.row(r)[..whole], &mut scratch[r * room..][..whole]);
            *total = 0.0;
            for (x, exps) in row.chunks(CHUNK * L::N).zip(exps.chunks_mut(CHUNK * L::N)) {
                let mut sum = zero;
                steps!(L in x.len(), [x], [exps], (i, _WHOLE) => {
                    L::prefetch(x.as_ptr().wrapping_add(i).wrapping_byte_offset(ahead));
                    let e = L::read_whole(x, i).exp_for_store::<true>();
                    noted = L::note(x, i, noted);
                    e.set(exps, i);
                    sum = sum.add(e);
                });
                *total += sum.reduce_add().to_f64();
            }
        }
        L::is_far(noted, NEAR)
    }
}

/// Of the rows' ends. A task of its own, as the loop over whole blocks needs all registers.
impl<L, T> simd::Task for NearExpSums<'_, '_, L, T, true>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, rows, scratch, room, sums, .. } = self;
        let (zero, whole) = (Real::of(0.0), x.len() / L::N * L::N);
        let ones = [T::from_f64(1.0); MAX_LANES];
        let inside: L = L::read(&ones[..x.len() - whole], 0, zero);
        let (mut noted, mut lanes) = (L::splat(zero), [L::splat(zero); BATCH]);
        for (r, sum) in lanes[..rows].iter_mut().enumerate() {
            let (x, exps) = (x.row(r), &mut scratch[r * room..][..room]);
            *sum = L::read(x, whole, zero).exp_for_store::<true>().mul(inside);
            noted = L::note(x, whole, noted);
            sum.set(exps, whole);
        }
        let mut ends = [0.0; BATCH];
        store_sums(&lanes, &mut ends[..rows]);
        for (sum, end) in sums[..rows].iter_mut().zip(ends) {
            *sum += end;
        }
        L::is_far(noted, NEAR)
    }
}

/// The sums of all lanes of each row's sum, for rows of one chunk.
#[inline(always)]
fn store_sums<L: Lanes>(lanes: &[L; BATCH], sums: &mut [f64]) {
    let mut reduced = [Real::of(0.0); BATCH];
    L::reduce_add_each(lanes, &mut reduced);
    for (sum, lanes) in sums.iter_mut().zip(reduced) {
        *sum = lanes.to_f64();
    }
}

/// What [`NearExpSums`] leaves: rows with elements that are not near.
#[inline(always)]
fn finish_near_exp_sums<L, T>(
    far: bool,
    x: &Run<'_, T>,
    scratch: &mut [T::Real],
    room: usize,
    sums: &mut [f64],
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    if !far {
        return;
    }
    for (r, sum) in sums.iter_mut().enumerate() {
        let (x, scratch) = (x.row(r), &mut scratch[r * room..][..room]);
        *sum = L::enter(FinishRow::<L, T> { x, scratch, sum: *sum, lanes: PhantomData });
    }
}

struct FinishRow<'a, L, T: Element> {
    x: &'a [T],
    scratch: &'a mut [T::Real],
    sum: f64,
    lanes: PhantomData<L>,
}

impl<L, T> simd::Task for FinishRow<'_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = f64;
    #[inline(always)]
    fn run(self) -> f64 {
        let (x, mut noted) = (self.x, L::splat(Real::of(0.0)));
        for i in (0..x.len()).step_by(L::N) {
            noted = L::note(x, i, noted);
        }
        if L::is_far(noted, NEAR) {
            return exp_sum::<L, T, false, true>(x, row_shift::<L, T>(x), self.scratch);
        }
        self.sum
    }
}

/// Writes rows of scratch, each times its scale.
struct ScaleRows<'a, 'r, L, T: Element> {
    scratch: &'a [T::Real],
    room: usize,
    scales: &'a [T::Real; BATCH],
    o: &'a mut RunMut<'r, T>,
    rows: usize,
    stream: bool,
    lanes: PhantomData<L>,
}

impl<L, T> simd::Task for ScaleRows<'_, '_, L, T>
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { scratch, room, scales, o, rows, stream, .. } = self;
        for (r, &scale) in scales[..rows].iter().enumerate() {
            let (row, exps, scale) = (o.row(r), &scratch[r * room..][..room], L::splat(scale));
            write_steps!(L, T to row, [exps], stream, (i, _WHOLE) => L::get(exps, i).mul(scale));
        }
    }
}

/// [`NearExpSums`] of some rows and, in turns with it, [`ScaleRows`] of those before them, of which there
/// are at least as many: so memory is read and written at once, and neither waits for the other. For
/// rows of whole blocks, at most [`CHUNK`] of them.
struct ExpAndScaleRows<'a, 'r, L, T: Element> {
    x: &'a Run<'r, T>,
    rows: usize,
    scratch: &'a mut [T::Real],
    room: usize,
    sums: &'a mut [f64; BATCH],
    /// The exponentials of the rows before.
    before: &'a [T::Real],
    scales: &'a [T::Real],
    o: &'a mut RunMut<'r, T>,
    stream: bool,
    lanes: PhantomData<L>,
}

impl<L, T> simd::Task for ExpAndScaleRows<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, rows, scratch, room, sums, before, scales, o, stream, .. } = self;
        let (zero, len, ahead) = (L::splat(Real::of(0.0)), x.len(), AHEAD_IN_TURNS * x.ahead());
        let done = len / STEP * STEP;
        assert!(rows <= scales.len());
        let (mut noted, mut lanes) = (zero, [zero; BATCH]);
        for (r, (sum, &scale)) in lanes[..rows].iter_mut().zip(scales).enumerate() {
            let (row, exps) = (&x.row(r)[..len], &mut scratch[r * room..][..len]);
            let (to, kept, scale) = (o.row(r), &before[r * room..][..len], L::splat(scale));
            let mut total = zero;
            for k in 0..len / STEP {
                let x = &row.as_chunks::<STEP>().0[k];
                let exps = &mut exps.as_chunks_mut::<STEP>().0[k];
                let kept = &kept.as_chunks::<STEP>().0[k];
                let to = &mut to.as_chunks_mut::<STEP>().0[k];
                let next = x.as_ptr().wrapping_byte_offset(ahead);
                for line in (0..STEP * size_of::<T>()).step_by(LINE) {
                    L::prefetch(next.wrapping_byte_add(line));
                }
                for start in (0..STEP).step_by(BLOCKS * L::N) {
                    let mut blocks = [<L as Memory<T>>::pack(zero); BLOCKS];
                    for b in 0..BLOCKS {
                        let i = start + b * L::N;
                        let e = L::read_whole(x, i).exp_for_store::<true>();
                        noted = L::note(x, i, noted);
                        e.set(exps, i);
                        total = total.add(e);
                        let result: L = L::get(kept, i).mul(scale);
                        blocks[b] = <L as Memory<T>>::pack_exact(result.nearest());
                    }
                    <L as Memory<T>>::write_packed(blocks, to, start, stream);
                }
            }
            for i in (done..len).step_by(L::N) {
                let e = L::read_whole(row, i).exp_for_store::<true>();
                noted = L::note(row, i, noted);
                e.set(exps, i);
                total = total.add(e);
                let result: L = L::get(kept, i).mul(scale);
                write_nearest::<L, T, true>(result, to, i, stream);
            }
            *sum = total;
        }
        store_sums(&lanes, &mut sums[..rows]);
        L::is_far(noted, NEAR)
    }
}

/// How many times as far ahead as [`Run::ahead`] memory is asked for where it is read and written in
/// turns: 4 KiB. (On an Emerald Rapids, other distances were only tried without turns: 2 and 4 KiB took the
/// same time, 8 KiB into the second-level cache an eighth to a quarter longer.)
const AHEAD_IN_TURNS: isize = 2;
/// Batches that go in turns, each with the next: so many that the first and the last, which have no other
/// beside them, do not count.
const TURNS: usize = 64;

/// Whether rows of `n` elements go in turns: the reading of one batch with the writing of another. (Blocks
/// behind the last step of a row ask for no memory, so there has to be a step.)
#[inline(always)]
fn go_in_turns<L: Math>(n: usize) -> bool {
    let many = L::HAS_SHORT && L::MANY_REGISTERS;
    many && n.is_multiple_of(L::N) && (STEP..=CHUNK * L::N).contains(&n)
}

/// Softmax of rows in turns; `scratch` is for two batches.
#[inline(always)]
fn forward_in_turns<L, T>(
    x: &Run<'_, T>,
    o: &mut RunMut<'_, T>,
    rows: usize,
    scratch: &mut [T::Real],
    (zero_masked, stream): (bool, bool),
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (room, batch, lanes) = (x.len(), batch(x.len()), PhantomData::<L>);
    let (mut scales, mut sums) = ([Real::of(0.0); BATCH], [0.0; BATCH]);
    let (mut now, mut before) = scratch.split_at_mut(batch * room);
    let (mut start, mut kept) = (0, 0);
    while start < rows {
        let count = batch.min(rows - start);
        let (x, rows, scratch, sums) = (&x.part(start, count), count, &mut *now, &mut sums);
        let far = if kept == 0 {
            L::enter(NearExpSums::<_, _, false> { x, rows, scratch, room, sums, lanes })
        } else {
            let (o, before, scales) = (&mut o.part(start - kept, kept), &*before, &scales[..kept]);
            L::enter(ExpAndScaleRows {
                x,
                rows,
                scratch,
                room,
                sums,
                before,
                scales,
                o,
                stream,
                lanes,
            })
        };
        finish_near_exp_sums::<L, T>(far, x, now, room, &mut sums[..count]);
        if count < kept {
            let (rest, o) = (kept - count, &mut o.part(start - kept + count, kept - count));
            let (scratch, mut left) = (&before[count * room..], [Real::of(0.0); BATCH]);
            left[..rest].copy_from_slice(&scales[count..kept]);
            let (scales, rows) = (&left, rest);
            L::enter(ScaleRows::<L, T> { scratch, room, scales, o, rows, stream, lanes });
        }
        for (scale, &sum) in scales.iter_mut().zip(&sums[..count]) {
            *scale = inverse(sum, zero_masked);
        }
        std::mem::swap(&mut now, &mut before);
        (start, kept) = (start + count, count);
    }
    let (o, scratch, scales, rows) = (&mut o.part(rows - kept, kept), &*before, &scales, kept);
    L::enter(ScaleRows::<L, T> { scratch, room, scales, o, rows, stream, lanes });
}

/// Block `i` of exp(x - shift), as [`exp_sum`] kept it or computed again.
#[inline(always)]
fn exps<L, T, const EXACT: bool, const KEPT: bool>(
    x: &[T],
    i: usize,
    shift: L,
    scratch: &[T::Real],
) -> L
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    if KEPT {
        return L::get(scratch, i);
    }
    exponential::<L, EXACT>(L::read(x, i, T::Real::MINUS_INFINITY).sub(shift))
}

/// 1 / sum; 0 for a masked row if `zero_masked`. Only a masked row has a sum of 0, as the largest
/// element of any other adds 1.
#[inline(always)]
fn inverse<R: Real>(sum: f64, zero_masked: bool) -> R {
    if zero_masked && sum == 0.0 { R::of(0.0) } else { R::of(1.0 / sum) }
}

/// ln(sum); 0 for a masked row if `zero_masked`.
#[inline(always)]
fn logarithm<R: Real>(sum: f64, zero_masked: bool) -> R {
    if zero_masked && sum == 0.0 { R::of(0.0) } else { R::of(sum.ln()) }
}

#[inline(always)]
fn forward_rows<L, T, const LOG: bool, const KEPT: bool>(mut task: Task<'_, 1>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (n, batch, zero_masked) = (task.n, batch(task.n), task.options.zero_masked_rows);
    let room = if KEPT { n.next_multiple_of(L::N) } else { 0 };
    let in_turns = KEPT && !LOG && go_in_turns::<L>(n);
    let mut scratch = Scratch::<T::Real>::new(batch * room * if in_turns { 2 } else { 1 });
    let scratch = &mut scratch[..];
    let (mut shifts, mut scales) = ([Real::of(0.0); BATCH], [Real::of(0.0); BATCH]);
    let mut stage = Stage::new();
    let mut sums = [0.0; BATCH];
    let most = if in_turns { TURNS * batch } else { batch };
    while let Some(runs) = task.part.next_run::<T>(most) {
        let ([all_x], [mut all_o]) = (runs.inputs, runs.outputs);
        // Rows that cannot be stored past the caches as they are go through a stage.
        if in_turns && (!task.stream || all_o.streams()) {
            let (rows, options) = (runs.rows, (zero_masked, task.stream));
            forward_in_turns::<L, T>(&all_x, &mut all_o, rows, scratch, options);
            continue;
        }
        for start in (0..runs.rows).step_by(batch) {
            let rows = batch.min(runs.rows - start);
            let (x, mut o) = (all_x.part(start, rows), all_o.part(start, rows));
            if !(KEPT && L::HAS_SHORT) {
                for (r, shift) in shifts[..rows].iter_mut().enumerate() {
                    *shift = row_shift::<L, T>(x.row(r));
                }
            }
            if KEPT && L::HAS_SHORT {
                let (x, rows, sums) = (&x, rows, &mut sums);
                let (scratch, lanes) = (&mut *scratch, PhantomData::<L>);
                let task = NearExpSums::<_, _, false> { x, rows, scratch, room, sums, lanes };
                let mut far = L::enter(task);
                if !x.len().is_multiple_of(L::N) {
                    far |=
                        L::enter(NearExpSums::<_, _, true> { x, rows, scratch, room, sums, lanes });
                }
                finish_near_exp_sums::<L, T>(far, x, scratch, room, &mut sums[..rows]);
            } else {
                for (r, sum) in sums[..rows].iter_mut().enumerate() {
                    let scratch = &mut scratch[r * room..][..room];
                    *sum = exp_sum::<L, T, LOG, KEPT>(x.row(r), shifts[r], scratch);
                }
            }
            for (scale, &sum) in scales.iter_mut().zip(&sums[..rows]) {
                *scale = if LOG { logarithm(sum, zero_masked) } else { inverse(sum, zero_masked) };
            }
            if KEPT && L::HAS_SHORT {
                let (rows, scales, stream) = (rows, &scales, task.stream);
                let (o, lanes) = (&mut o, PhantomData);
                match if stream { stage.of(o) } else { None } {
                    None => L::enter(ScaleRows::<L, T> {
                        scratch,
                        room,
                        scales,
                        o,
                        rows,
                        stream,
                        lanes,
                    }),
                    Some(mut staged) => {
                        let (o, stream, to) = (&mut staged, false, o);
                        L::enter(ScaleRows::<L, T> {
                            scratch,
                            room,
                            scales,
                            o,
                            rows,
                            stream,
                            lanes,
                        });
                        L::enter(Unstage::<L, T> { from: staged, to, lanes });
                    }
                }
                continue;
            }
            for (r, &scale) in scales[..rows].iter().enumerate() {
                let (x, o, scratch) = (x.row(r), o.row(r), &scratch[r * room..][..room]);
                let (shift, scale) = (L::splat(shifts[r]), L::splat(scale));
                blocks!(L in 0..x.len(), (i, WHOLE) => {
                    let result = if LOG {
                        read::<L, T, WHOLE>(x, i, Real::of(0.0)).sub(shift).sub(scale)
                    } else {
                        exps::<L, T, false, KEPT>(x, i, shift, scratch).mul(scale)
                    };
                    write_nearest::<L, T, WHOLE>(result, o, i, task.stream);
                });
            }
        }
    }
}

/// The sum of a row.
#[inline(always)]
fn row_sum<L, T>(x: &[T]) -> T::Real
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let mut total = 0.0;
    for start in (0..x.len()).step_by(CHUNK * L::N) {
        let mut sum = L::splat(Real::of(0.0));
        for i in (start..x.len().min(start + CHUNK * L::N)).step_by(L::N) {
            sum = sum.add(L::read(x, i, Real::of(0.0)));
        }
        total += sum.reduce_add().to_f64();
    }
    Real::of(total)
}

/// The sum of the products of two rows; asks for what lies `ahead` of them, in bytes.
#[inline(always)]
fn row_dot<L, T>(x: &[T], y: &[T], ahead: isize) -> T::Real
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let mut total = 0.0;
    for start in (0..x.len()).step_by(CHUNK * L::N) {
        let end = x.len().min(start + CHUNK * L::N);
        let sum: L = chunk_dot::<L, T>(&x[start..end], &y[start..end], ahead);
        total += sum.reduce_add().to_f64();
    }
    Real::of(total)
}

/// [`row_dot`] of at most [`CHUNK`] blocks, by lanes.
#[inline(always)]
fn chunk_dot<L, T>(x: &[T], y: &[T], ahead: isize) -> L
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let mut sum = L::splat(Real::of(0.0));
    steps!(L in x.len(), [x, y], [], (i, WHOLE) => {
        L::prefetch(x.as_ptr().wrapping_add(i).wrapping_byte_offset(ahead));
        let x: L = read::<L, T, WHOLE>(x, i, Real::of(0.0));
        sum = x.mul_add(read::<L, T, WHOLE>(y, i, Real::of(0.0)), sum);
    });
    sum
}

/// The sum of the products of [`exps`] and a row.
#[inline(always)]
fn exp_dot<L, T>(x: &[T], y: &[T], shift: T::Real) -> f64
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (shift, mut total) = (L::splat(shift), 0.0);
    for start in (0..x.len()).step_by(CHUNK * L::N) {
        let mut sum = L::splat(Real::of(0.0));
        for i in (start..x.len().min(start + CHUNK * L::N)).step_by(L::N) {
            let y: L = L::read(y, i, Real::of(0.0));
            sum = exps::<L, T, true, false>(x, i, shift, &[]).mul_add(y, sum);
        }
        total += sum.reduce_add().to_f64();
    }
    total
}

/// Whether a row is nothing but minus infinity.
#[inline(always)]
fn is_masked<L, T>(x: &[T]) -> bool
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let least = T::Real::MINUS_INFINITY;
    for i in (0..x.len()).step_by(L::N) {
        let x: L = L::read(x, i, least);
        if L::any(L::splat(least).lt(x)) || L::any(x.is_nan()) {
            return false;
        }
    }
    true
}

/// The gradient of a block, from its output (for the logarithm, the exponential of its output),
/// and from the sum over the dimension of o * grad (of grad).
#[inline(always)]
fn pull_back<L: Lanes, const LOG: bool>(o: L, grad: L, total: L) -> L {
    if LOG { o.neg_mul_add(total, grad) } else { o.mul(grad.sub(total)) }
}

#[inline(always)]
fn rows_from_output<L, T, const LOG: bool>(mut task: Task<'_, 2>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (n, batch) = (task.n, batch(task.n));
    let short = const { L::MANY_REGISTERS && !LOG } && matches!(n / L::N, 4 | 8) && n % L::N == 0;
    let (zero_masked, stream) = (task.options.zero_masked_rows, task.stream);
    let (mut totals, mut stage) = ([Real::of(0.0); BATCH], Stage::new());
    while let Some(runs) = task.part.next_run::<T>(if short { usize::MAX } else { batch }) {
        let ([all_o, all_grad], [mut all_dx]) = (runs.inputs, runs.outputs);
        let (options, lanes) = ((zero_masked, stream), PhantomData::<L>);
        // Rows that cannot be stored past the caches as they are go through a stage.
        if short && (!stream || all_dx.streams()) {
            let (o, grad, dx, rows) = (&all_o, &all_grad, &mut all_dx, runs.rows);
            match n / L::N {
                4 => L::enter(ShortRowGradients::<_, _, 4> { o, grad, dx, rows, options, lanes }),
                _ => L::enter(ShortRowGradients::<_, _, 8> { o, grad, dx, rows, options, lanes }),
            }
            continue;
        }
        for start in (0..runs.rows).step_by(batch) {
            let rows = batch.min(runs.rows - start);
            let (o, grad) = (&all_o.part(start, rows), &all_grad.part(start, rows));
            let (dx, totals) = (&mut all_dx.part(start, rows), &mut totals);
            L::enter(RowTotals::<L, T, LOG> { o, grad, rows, totals, lanes });
            match if stream { stage.of(dx) } else { None } {
                None => L::enter(RowGradients::<L, T, LOG> {
                    o,
                    grad,
                    dx,
                    rows,
                    totals,
                    options,
                    lanes,
                }),
                Some(mut staged) => {
                    let (dx, options, to) = (&mut staged, (zero_masked, false), dx);
                    L::enter(RowGradients::<L, T, LOG> {
                        o,
                        grad,
                        dx,
                        rows,
                        totals,
                        options,
                        lanes,
                    });
                    L::enter(Unstage::<L, T> { from: staged, to, lanes });
                }
            }
        }
    }
}

/// [`RowTotals`] and [`RowGradients`] of rows of `K` blocks, which stay in registers between the two: a
/// row is written while the next ones are read. (Emerald Rapids, rows of 128 from memory: 13.6 cycles for 16
/// elements instead of 15.2.) The same sums, in the same order.
struct ShortRowGradients<'a, 'r, L, T: Element, const K: usize> {
    o: &'a Run<'r, T>,
    grad: &'a Run<'r, T>,
    dx: &'a mut RunMut<'r, T>,
    rows: usize,
    /// As in [`RowGradients`].
    options: (bool, bool),
    lanes: PhantomData<L>,
}

impl<L, T, const K: usize> simd::Task for ShortRowGradients<'_, '_, L, T, K>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { o, grad, dx, rows, options: (zero_masked, stream), .. } = self;
        let (o_ahead, grad_ahead, zero) = (o.ahead(), grad.ahead(), L::splat(Real::of(0.0)));
        for r in 0..rows {
            let o = &o.row(r).as_chunks::<MAX_LANES>().0[..K];
            let grad = &grad.row(r).as_chunks::<MAX_LANES>().0[..K];
            let (mut os, mut grads, mut sum) = ([zero; K], [zero; K], zero);
            for k in 0..K {
                if (k * size_of::<[T; MAX_LANES]>()).is_multiple_of(LINE) {
                    L::prefetch(o[k].as_ptr().wrapping_byte_offset(o_ahead));
                    L::prefetch(grad[k].as_ptr().wrapping_byte_offset(grad_ahead));
                }
                (os[k], grads[k]) = (L::read_whole(&o[k], 0), L::read_whole(&grad[k], 0));
                sum = os[k].mul_add(grads[k], sum);
            }
            let total = L::splat(sum.reduce_add());
            let mut packed = [<L as Memory<T>>::pack(zero); K];
            for k in 0..K {
                let mut result = pull_back::<L, false>(os[k], grads[k], total);
                if zero_masked {
                    result = zero_where_zero(os[k], result);
                }
                packed[k] = <L as Memory<T>>::pack_exact(<L as Memory<T>>::nearest(result));
            }
            L::write_packed(packed, dx.row(r), 0, stream);
        }
    }
}

/// The sum over each row of o * grad, or of grad alone for the logarithm.
struct RowTotals<'a, 'r, L, T: Element, const LOG: bool> {
    o: &'a Run<'r, T>,
    grad: &'a Run<'r, T>,
    rows: usize,
    totals: &'a mut [T::Real; BATCH],
    lanes: PhantomData<L>,
}

impl<L, T, const LOG: bool> simd::Task for RowTotals<'_, '_, L, T, LOG>
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { o, grad, rows, totals, .. } = self;
        let ahead = o.ahead();
        if !LOG && o.len() <= CHUNK * L::N {
            let mut lanes = [L::splat(Real::of(0.0)); BATCH];
            for (r, sum) in lanes[..rows].iter_mut().enumerate() {
                *sum = chunk_dot::<L, T>(o.row(r), grad.row(r), ahead);
            }
            return L::reduce_add_each(&lanes, totals);
        }
        for (r, total) in totals[..rows].iter_mut().enumerate() {
            let (o, grad) = (o.row(r), grad.row(r));
            *total = if LOG { row_sum::<L, T>(grad) } else { row_dot::<L, T>(o, grad, ahead) };
        }
    }
}

/// The gradients, from [`RowTotals`].
struct RowGradients<'a, 'r, L, T: Element, const LOG: bool> {
    o: &'a Run<'r, T>,
    grad: &'a Run<'r, T>,
    dx: &'a mut RunMut<'r, T>,
    rows: usize,
    totals: &'a [T::Real; BATCH],
    /// Whether masked rows are zeros, and whether to stream.
    options: (bool, bool),
    lanes: PhantomData<L>,
}

impl<L, T, const LOG: bool> simd::Task for RowGradients<'_, '_, L, T, LOG>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { o, grad, dx, rows, totals, options: (zero_masked, stream), .. } = self;
        let zero = Real::of(0.0);
        // The other pass asks for the outputs: so both keep the memory busy.
        let ahead = grad.ahead();
        for (r, &total) in totals[..rows].iter().enumerate() {
            let (o, grad, dx) = (o.row(r), grad.row(r), dx.row(r));
            if LOG && zero_masked && is_masked::<L, T>(o) {
                dx.fill(T::default());
                continue;
            }
            let total = L::splat(total);
            write_steps!(L, T to dx, [o, grad], stream, (i, WHOLE) => {
                L::prefetch(grad.as_ptr().wrapping_add(i).wrapping_byte_offset(ahead));
                let o: L = read::<L, T, WHOLE>(o, i, zero);
                let grad = read::<L, T, WHOLE>(grad, i, zero);
                let o = if LOG { o.exp() } else { o };
                let result = pull_back::<L, LOG>(o, grad, total);
                // A masked row is all zeros, and so is its gradient, whatever arrives.
                if !LOG && zero_masked { zero_where_zero(o, result) } else { result }
            });
        }
    }
}

/// Exponentials are computed again rather than kept: the row is still in the cache, and a second
/// set of kernels would cost more to compile than it saves to run.
#[inline(always)]
fn rows_from_input<L, T, const LOG: bool>(mut task: Task<'_, 2>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (batch, zero) = (batch(task.n), Real::of(0.0));
    let (mut shifts, mut scales, mut totals) = ([zero; BATCH], [zero; BATCH], [zero; BATCH]);
    while let Some(runs) = task.part.next_run::<T>(batch) {
        let ([x, grad], [mut dx]) = (runs.inputs, runs.outputs);
        for (r, shift) in shifts[..runs.rows].iter_mut().enumerate() {
            *shift = row_shift::<L, T>(x.row(r));
        }
        for (r, scale) in scales[..runs.rows].iter_mut().enumerate() {
            let (x, grad) = (x.row(r), grad.row(r));
            let sum = exp_sum::<L, T, true, false>(x, shifts[r], &mut []);
            *scale = inverse(sum, task.options.zero_masked_rows);
            totals[r] = if LOG {
                row_sum::<L, T>(grad)
            } else {
                Real::of(exp_dot::<L, T>(x, grad, shifts[r]) / sum)
            };
        }
        for (r, &scale) in scales[..runs.rows].iter().enumerate() {
            let (x, grad, dx) = (x.row(r), grad.row(r), dx.row(r));
            if scale == zero {
                dx.fill(T::default());
                continue;
            }
            let (shift, scale, total) = (L::splat(shifts[r]), L::splat(scale), L::splat(totals[r]));
            for i in (0..x.len()).step_by(L::N) {
                let grad = L::read(grad, i, zero);
                let o = exps::<L, T, true, false>(x, i, shift, &[]).mul(scale);
                let result = pull_back::<L, LOG>(o, grad, total);
                write_nearest::<L, T, false>(result, dx, i, task.stream);
            }
        }
    }
}

// Over another dimension.

/// For each column of the rows `rows` of `x`, the maximum (0 where it is minus infinity) and
/// 1 / sum, so that the softmax is exp(x - max) * inverse. Both are in register order, and have
/// to have room for a whole number of blocks.
///
/// As in [`exp_row`], `inverse` is NaN for a column with a NaN or a plus infinity, whatever `max` is
/// then; and infinity for one of nothing but minus infinity, or 0 if `zero_masked`.
#[inline(always)]
pub(crate) fn column_statistics<L, T>(
    x: &Run<'_, T>,
    rows: Range<usize>,
    zero_masked: bool,
    max: &mut [T::Real],
    inverse: &mut [T::Real],
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    column_sums::<L, T, false>(x, x, rows, max, inverse, &mut []);
    invert::<L>(inverse, zero_masked);
}

/// Replaces each sum by its inverse, as [`inverse`] does.
#[inline(always)]
fn invert<L: Lanes>(sums: &mut [L::Real], zero_masked: bool) {
    let (zero, one) = (L::splat(Real::of(0.0)), L::splat(Real::of(1.0)));
    for i in (0..sums.len()).step_by(L::N) {
        let sum = L::get(sums, i);
        let inverse = one.div(sum);
        let inverse = if zero_masked { L::select(sum.le(zero), zero, inverse) } else { inverse };
        inverse.set(sums, i);
    }
}

/// A sum of lanes and what its roundings have lost.
#[derive(Clone, Copy)]
struct Compensated<L> {
    sum: L,
    lost: L,
}

impl<L: Lanes> Compensated<L> {
    #[inline(always)]
    fn zero() -> Self {
        let zero = L::splat(Real::of(0.0));
        Self { sum: zero, lost: zero }
    }
    /// Knuth's two-sum, for terms of any size.
    #[inline(always)]
    fn add(self, term: L) -> Self {
        let sum = self.sum.add(term);
        let term_part = sum.sub(self.sum);
        let sum_part = sum.sub(term_part);
        let lost = self.sum.sub(sum_part).add(term.sub(term_part));
        Self { sum, lost: self.lost.add(lost) }
    }
    #[inline(always)]
    fn mul(self, factor: L) -> Self {
        Self { sum: self.sum.mul(factor), lost: self.lost.mul(factor) }
    }
    /// An infinite sum has lost nothing, though the difference of infinities says NaN.
    #[inline(always)]
    fn value(self) -> L {
        L::select(self.lost.is_nan(), self.sum, self.sum.add(self.lost))
    }
}

/// For each column, the maximum as in [`column_statistics`], the sum of exp(x - max) and, with
/// `DOT`, the sum of exp(x - max) * grad.
///
/// A chunk of rows is read for its maximum, then (from the first-level cache) for its exponentials.
/// These are relative to a shift, which is the maximum of the first chunk until a column exceeds
/// it by [`MARGIN`]; only then are its sums so far scaled down. So a slowly rising column does not
/// collect a rounding error for each step.
#[inline(always)]
fn column_sums<L, T, const DOT: bool>(
    x: &Run<'_, T>,
    grad: &Run<'_, T>,
    rows: Range<usize>,
    maxima: &mut [T::Real],
    sums: &mut [T::Real],
    dots: &mut [T::Real],
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    // Lanes past the end of a row are zeros, for which all of this is harmless.
    let (zero, one) = (Real::of(0.0), L::splat(Real::of(1.0)));
    let least = L::splat(T::Real::MINUS_INFINITY);
    blocks!(L in 0..x.len(), (i, WHOLE) => {
        let (mut max, mut shift, mut base) = (least, least, L::splat(zero));
        let (mut sum, mut dot) = (Compensated::<L>::zero(), Compensated::<L>::zero());
        let mut start = rows.start;
        while start < rows.end {
            let end = rows.end.min(start + CHUNK_ROWS);
            for r in start..end {
                max = max.max(read::<L, T, WHOLE>(x.row(r), i, zero));
            }
            let exceeds = shift.add(L::splat(Real::of(MARGIN))).lt(max);
            if L::any(exceeds) {
                let factor = L::select(exceeds, shift.sub(max).exp(), one);
                (sum, dot) = (sum.mul(factor), dot.mul(factor));
                shift = L::select(exceeds, max, shift);
                base = L::select(shift.le(least), L::splat(zero), shift);
            }
            let (mut chunk_sum, mut chunk_dot) = (L::splat(zero), L::splat(zero));
            for r in start..end {
                let e = read::<L, T, WHOLE>(x.row(r), i, zero).sub(base).exp();
                chunk_sum = chunk_sum.add(e);
                if DOT {
                    chunk_dot = e.mul_add(read::<L, T, WHOLE>(grad.row(r), i, zero), chunk_dot);
                }
            }
            sum = sum.add(chunk_sum);
            dot = dot.add(chunk_dot);
            start = end;
        }
        // From the shift to the maximum itself.
        let max = L::select(max.le(least), L::splat(zero), max);
        let factor = L::select(base.lt(max), base.sub(max).exp(), one);
        max.set(maxima, i);
        sum.value().mul(factor).set(sums, i);
        if DOT {
            dot.value().mul(factor).set(dots, i);
        }
    });
}

/// For each column, the sum of o * grad, or of grad alone for the logarithm.
struct ColumnTotals<'a, 'r, L, T: Element, const LOG: bool> {
    o: &'a Run<'r, T>,
    grad: &'a Run<'r, T>,
    rows: usize,
    totals: &'a mut [T::Real],
    lost: &'a mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T, const LOG: bool> simd::Task for ColumnTotals<'_, '_, L, T, LOG>
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { o, grad, rows, totals, lost, .. } = self;
        totals.fill(Real::of(0.0));
        lost.fill(Real::of(0.0));
        for start in (0..rows).step_by(CHUNK_ROWS) {
            let chunk = start..rows.min(start + CHUNK_ROWS);
            let whole = grad.len() / L::N * L::N;
            let mut i = 0;
            // Four blocks of each row at once, as long as there are four.
            macro_rules! add {
                ($blocks:literal, $whole:literal) => {{
                    let found =
                        chunk_totals::<L, T, LOG, $whole, $blocks>(o, grad, chunk.clone(), i);
                    for (b, sum) in found.into_iter().enumerate() {
                        let i = i + b * L::N;
                        let total = Compensated { sum: L::get(totals, i), lost: L::get(lost, i) };
                        let total = total.add(sum);
                        total.sum.set(totals, i);
                        total.lost.set(lost, i);
                    }
                    i += $blocks * L::N;
                }};
            }
            while i + 4 * L::N <= whole {
                add!(4, true);
            }
            while i < whole {
                add!(1, true);
            }
            if i < grad.len() {
                add!(1, false);
            }
            debug_assert!(i >= grad.len());
        }
        for i in (0..totals.len()).step_by(L::N) {
            Compensated { sum: L::get(totals, i), lost: L::get(lost, i) }.value().set(totals, i);
        }
    }
}

/// The sums of [`ColumnTotals`] over some rows, of `K` blocks of columns from `i` on.
#[inline(always)]
fn chunk_totals<L, T, const LOG: bool, const WHOLE: bool, const K: usize>(
    o: &Run<'_, T>,
    grad: &Run<'_, T>,
    chunk: Range<usize>,
    i: usize,
) -> [L; K]
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let zero = Real::of(0.0);
    let mut sums = [L::splat(zero); K];
    for r in chunk {
        let (o_row, grad_row) = (o.row(r), grad.row(r));
        for (row, step) in [(o_row, o.step()), (grad_row, grad.step())] {
            let ahead = row.as_ptr().wrapping_add(i);
            let ahead = ahead.wrapping_byte_offset(CHUNK_ROWS as isize * step).cast::<u8>();
            for line in (0..K * L::N * size_of::<T>()).step_by(LINE) {
                L::prefetch(ahead.wrapping_add(line));
            }
        }
        for b in 0..K {
            let i = i + b * L::N;
            let grad = read::<L, T, WHOLE>(grad_row, i, zero);
            sums[b] = if LOG {
                sums[b].add(grad)
            } else {
                read::<L, T, WHOLE>(o_row, i, zero).mul_add(grad, sums[b])
            };
        }
    }
    sums
}

/// For each column, 0 if it is nothing but minus infinity, else 1.
#[inline(always)]
fn unmasked_columns<L, T>(o: &Run<'_, T>, rows: usize, unmasked: &mut [T::Real])
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let (zero, one) = (L::splat(Real::of(0.0)), L::splat(Real::of(1.0)));
    let least = L::splat(T::Real::MINUS_INFINITY);
    for i in (0..o.len()).step_by(L::N) {
        let mut max = least;
        for r in 0..rows {
            max = max.max_nan(L::read(o.row(r), i, Real::of(0.0)));
        }
        L::select(max.le(least), zero, one).set(unmasked, i);
    }
}

/// For each column of a tile, the sum of the exponentials, for lanes with short forms; they are
/// relative to `shifts` or, without, to 0. Tells whether an element is beyond [`NEAR`]: without
/// shifts, the sums are then no good.
///
/// The rows go in chunks that stay in the first-level cache, and each chunk by blocks of columns,
/// whose sums stay in registers.
struct ShortColumnSums<'a, 'r, L, T: Element, const PART: u8> {
    x: &'a Run<'r, T>,
    rows: usize,
    shifts: &'a [T::Real],
    sums: &'a mut [T::Real],
    /// What rounding has lost of the sums.
    lost: &'a mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T, const PART: u8> simd::Task for ShortColumnSums<'_, '_, L, T, PART>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, rows, shifts, sums, lost, .. } = self;
        let zero = L::splat(Real::of(0.0));
        let whole = x.len() / L::N * L::N;
        let columns = match PART {
            WHOLE_BLOCKS => 0..whole,
            ROW_END => whole..x.len(),
            _ => 0..x.len(),
        };
        let mut noted = zero;
        for start in (0..rows).step_by(CHUNK_ROWS) {
            let chunk = start..rows.min(start + CHUNK_ROWS);
            let mut i = columns.start;
            // Two blocks of each row at once, as long as there are two.
            macro_rules! add {
                ($blocks:literal) => {{
                    let rows = ChunkOfRows { x, shifts, chunk: chunk.clone() };
                    let (found, seen) = rows.sums::<L, PART, $blocks>(i, noted);
                    noted = seen;
                    for (b, sum) in found.into_iter().enumerate() {
                        let i = i + b * L::N;
                        let mut total = Compensated { sum, lost: zero };
                        if start > 0 {
                            let so_far =
                                Compensated { sum: L::get(sums, i), lost: L::get(lost, i) };
                            total = so_far.add(sum);
                        }
                        total.sum.set(sums, i);
                        total.lost.set(lost, i);
                    }
                    i += $blocks * L::N;
                }};
            }
            while PART == WHOLE_BLOCKS && i + 2 * L::N <= columns.end {
                add!(2);
            }
            while i < columns.end {
                add!(1);
            }
        }
        for i in columns.step_by(L::N) {
            Compensated { sum: L::get(sums, i), lost: L::get(lost, i) }.value().set(sums, i);
        }
        L::is_far(noted, NEAR)
    }
}

/// A few rows of what [`ShortColumnSums`] works on.
struct ChunkOfRows<'a, 'r, T: Element> {
    x: &'a Run<'r, T>,
    shifts: &'a [T::Real],
    chunk: Range<usize>,
}

impl<T: Element> ChunkOfRows<'_, '_, T> {
    /// The sums of the exponentials of `K` blocks of columns from `i` on, and `noted` with them.
    #[inline(always)]
    fn sums<L, const PART: u8, const K: usize>(&self, i: usize, mut noted: L) -> ([L; K], L)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        let mut sums = [L::splat(Real::of(0.0)); K];
        let ahead = CHUNK_ROWS as isize * self.x.step();
        for r in self.chunk.clone() {
            let row = self.x.row(r);
            L::prefetch(row.as_ptr().wrapping_add(i).wrapping_byte_offset(ahead));
            for b in 0..K {
                let i = i + b * L::N;
                let e = if PART == WHOLE_BLOCKS {
                    let x: L = L::read_whole(row, i);
                    noted = L::note(row, i, noted);
                    x.exp_for_store::<true>()
                } else if PART == ROW_END {
                    noted = L::note(row, i, noted);
                    L::read(row, i, Real::of(0.0)).exp_for_store::<false>()
                } else {
                    let x: L = L::read(row, i, Real::of(0.0));
                    x.sub(L::get(self.shifts, i)).exp_for_store::<false>()
                };
                sums[b] = sums[b].add(e);
            }
        }
        (sums, noted)
    }
}

/// What [`ShortColumnSums`] works on: whole blocks of columns without shifts, what is left of them,
/// or all with shifts. Each is a function of its own, so that the first one's loop is small.
const WHOLE_BLOCKS: u8 = 0;
const ROW_END: u8 = 1;
const SHIFTED: u8 = 2;

/// What the exponentials of each column are relative to: 0 where all of it is near, else its
/// maximum (but 0 where that is minus infinity). So a near column does not depend on others.
struct ColumnShifts<'a, 'r, L, T: Element> {
    x: &'a Run<'r, T>,
    rows: usize,
    shifts: &'a mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T> simd::Task for ColumnShifts<'_, '_, L, T>
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let least = L::splat(T::Real::MINUS_INFINITY);
        let (zero, near) = (L::splat(Real::of(0.0)), L::splat(Real::of(f64::from(NEAR))));
        blocks!(L in 0..self.x.len(), (i, WHOLE) => {
            let (mut max, mut magnitude) = (least, zero);
            for r in 0..self.rows {
                let x: L = read::<L, T, WHOLE>(self.x.row(r), i, Real::of(0.0));
                max = max.max(x);
                magnitude = x.abs().max(magnitude);
            }
            let shift = L::select(max.le(least), zero, max);
            L::select(near.lt(magnitude), shift, zero).set(self.shifts, i);
        });
    }
}

/// Writes each column's exponentials times its scale.
struct ScaleColumns<'a, 'r, L, T: Element> {
    x: &'a Run<'r, T>,
    o: &'a mut RunMut<'r, T>,
    rows: usize,
    shifts: Option<&'a [T::Real]>,
    scales: &'a [T::Real],
    stream: bool,
    lanes: PhantomData<L>,
}

impl<L, T> simd::Task for ScaleColumns<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { x, o, rows, shifts, scales, stream, .. } = self;
        for r in 0..rows {
            let (x, o) = (x.row(r), o.row(r));
            if let Some(shifts) = shifts {
                for i in (0..x.len()).step_by(L::N) {
                    let x: L = L::read(x, i, Real::of(0.0)).sub(L::get(shifts, i));
                    let result = x.exp_for_store::<false>().mul(L::get(scales, i));
                    write_nearest::<L, T, false>(result, o, i, stream);
                }
            } else {
                write_steps!(L, T to o, [x, scales], stream, (i, WHOLE) => {
                    let x: L = read::<L, T, WHOLE>(x, i, Real::of(0.0));
                    let e = if WHOLE { x.exp_for_store::<true>() } else { x.exp_for_store::<false>() };
                    e.mul(L::get(scales, i))
                });
            }
        }
    }
}

/// [`forward_columns`] for lanes with short forms.
#[inline(always)]
fn short_forward_columns<L, T>(mut task: Task<'_, 1>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let room = task.width.next_multiple_of(L::N);
    let mut scratch = [room; 3].map(Scratch::<T::Real>::new);
    let [shifts, sums, lost] = &mut scratch;
    while let Some(runs) = task.part.next_run::<T>(task.n) {
        let ([x], [mut o], rows) = (runs.inputs, runs.outputs, runs.rows);
        let (x, o, lanes) = (&x, &mut o, PhantomData::<L>);
        let stream = task.stream && o.streams();
        let room = x.len().next_multiple_of(L::N);
        let (sums, lost) = (&mut sums[..room], &mut lost[..room]);
        macro_rules! sums {
            ($part:ident, $shifts:expr) => {
                L::enter(ShortColumnSums::<L, T, $part> {
                    x,
                    rows,
                    shifts: $shifts,
                    sums,
                    lost,
                    lanes,
                })
            };
        }
        let mut shift = None;
        if sums!(WHOLE_BLOCKS, &[]) | (!x.len().is_multiple_of(L::N) && sums!(ROW_END, &[])) {
            let shifts = &mut shifts[..room];
            L::enter(ColumnShifts { x, rows, shifts, lanes });
            sums!(SHIFTED, shifts);
            shift = Some(&*shifts);
        }
        invert::<L>(sums, task.options.zero_masked_rows);
        let scales = &*sums;
        L::enter(ScaleColumns { x, o, rows, shifts: shift, scales, stream, lanes });
    }
}

#[inline(always)]
fn forward_columns<L, T, const LOG: bool>(mut task: Task<'_, 1>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    if L::HAS_SHORT && !LOG {
        return short_forward_columns::<L, T>(task);
    }
    let zero_masked = task.options.zero_masked_rows;
    let mut scratch = [task.width; 2].map(Scratch::<T::Real>::new);
    let [max, scale] = &mut scratch;
    while let Some(runs) = task.part.next_run::<T>(task.n) {
        let ([x], [mut o]) = (runs.inputs, runs.outputs);
        let room = x.len().next_multiple_of(L::N);
        let (max, scale) = (&mut max[..room], &mut scale[..room]);
        column_sums::<L, T, false>(&x, &x, 0..runs.rows, max, scale, &mut []);
        if LOG {
            for scale in scale.iter_mut() {
                *scale = logarithm(scale.to_f64(), zero_masked);
            }
        } else {
            invert::<L>(scale, zero_masked);
        }
        let stream = task.stream && o.streams();
        for r in 0..runs.rows {
            let (x, o) = (x.row(r), o.row(r));
            blocks!(L in 0..x.len(), (i, WHOLE) => {
                let x = read::<L, T, WHOLE>(x, i, Real::of(0.0)).sub(L::get(max, i));
                let scale = L::get(scale, i);
                let result = if LOG { x.sub(scale) } else { x.exp().mul(scale) };
                write_nearest::<L, T, WHOLE>(result, o, i, stream);
            });
        }
    }
}

#[inline(always)]
fn columns_from_output<L, T, const LOG: bool>(mut task: Task<'_, 2>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let look_for_masked = LOG && task.options.zero_masked_rows;
    let mut scratch = [task.width; 3].map(Scratch::<T::Real>::new);
    let [totals, lost, unmasked] = &mut scratch;
    while let Some(runs) = task.part.next_run::<T>(task.n) {
        let ([o, grad], [mut dx], rows) = (runs.inputs, runs.outputs, runs.rows);
        let (o, grad, dx, lanes) = (&o, &grad, &mut dx, PhantomData::<L>);
        let room = o.len().next_multiple_of(L::N);
        let (totals, lost) = (&mut totals[..room], &mut lost[..room]);
        L::enter(ColumnTotals::<_, _, LOG> { o, grad, rows, totals, lost, lanes });
        let unmasked = &mut unmasked[..if look_for_masked { room } else { 0 }];
        if look_for_masked {
            unmasked_columns::<L, T>(o, rows, unmasked);
        }
        let zero_masked = !LOG && task.options.zero_masked_rows;
        let options = (zero_masked, task.stream && dx.streams());
        L::enter(ColumnGradients::<_, _, LOG> {
            o,
            grad,
            dx,
            rows,
            totals,
            unmasked,
            options,
            lanes,
        });
    }
}

/// The gradients, from [`ColumnTotals`].
struct ColumnGradients<'a, 'r, L, T: Element, const LOG: bool> {
    o: &'a Run<'r, T>,
    grad: &'a Run<'r, T>,
    dx: &'a mut RunMut<'r, T>,
    rows: usize,
    totals: &'a [T::Real],
    /// 0 for each masked column, if they are to have zeros.
    unmasked: &'a [T::Real],
    /// Whether gradients of zeros are zeros, and whether to stream.
    options: (bool, bool),
    lanes: PhantomData<L>,
}

impl<L, T, const LOG: bool> simd::Task for ColumnGradients<'_, '_, L, T, LOG>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { o, grad, dx, rows, totals, unmasked, options: (zero_masked, stream), .. } = self;
        let zero = Real::of(0.0);
        for r in 0..rows {
            let (o, grad, dx) = (o.row(r), grad.row(r), dx.row(r));
            if !unmasked.is_empty() {
                for i in (0..o.len()).step_by(L::N) {
                    let (o, grad): (L, L) = (L::read(o, i, zero), L::read(grad, i, zero));
                    let o = if LOG { o.exp() } else { o };
                    let result = pull_back::<L, LOG>(o, grad, L::get(totals, i));
                    let result = zero_where_zero(L::get(unmasked, i), result);
                    write_nearest::<L, T, false>(result, dx, i, stream);
                }
                continue;
            }
            write_steps!(L, T to dx, [o, grad, totals], stream, (i, WHOLE) => {
                let o: L = read::<L, T, WHOLE>(o, i, zero);
                let grad = read::<L, T, WHOLE>(grad, i, zero);
                let o = if LOG { o.exp() } else { o };
                let result = pull_back::<L, LOG>(o, grad, L::get(totals, i));
                if zero_masked { zero_where_zero(o, result) } else { result }
            });
        }
    }
}

#[inline(always)]
fn columns_from_input<L, T, const LOG: bool>(mut task: Task<'_, 2>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (zero, zero_masked) = (Real::of(0.0), task.options.zero_masked_rows);
    let mut scratch = [task.width; 4].map(Scratch::<T::Real>::new);
    let [max, scale, totals, lost] = &mut scratch;
    while let Some(runs) = task.part.next_run::<T>(task.n) {
        let ([x, grad], [mut dx]) = (runs.inputs, runs.outputs);
        let room = x.len().next_multiple_of(L::N);
        let (max, scale) = (&mut max[..room], &mut scale[..room]);
        let (totals, lost) = (&mut totals[..room], &mut lost[..room]);
        if LOG {
            column_sums::<L, T, false>(&x, &grad, 0..runs.rows, max, scale, totals);
            let lanes = PhantomData::<L>;
            let (o, grad, rows) = (&x, &grad, runs.rows);
            L::enter(ColumnTotals::<_, _, true> { o, grad, rows, totals, lost, lanes });
            invert::<L>(scale, zero_masked);
        } else {
            column_sums::<L, T, true>(&x, &grad, 0..runs.rows, max, scale, totals);
            invert::<L>(scale, zero_masked);
            for i in (0..room).step_by(L::N) {
                L::get(totals, i).mul(L::get(scale, i)).set(totals, i);
            }
        }
        let stream = task.stream && dx.streams();
        for r in 0..runs.rows {
            let (x, grad, dx) = (x.row(r), grad.row(r), dx.row(r));
            for i in (0..x.len()).step_by(L::N) {
                let (x, grad): (L, L) = (L::read(x, i, zero), L::read(grad, i, zero));
                let o = x.sub(L::get(max, i)).exp().mul(L::get(scale, i));
                let mut result = pull_back::<L, LOG>(o, grad, L::get(totals, i));
                if zero_masked {
                    result = zero_where_zero(L::get(scale, i), result);
                }
                write_nearest::<L, T, false>(result, dx, i, stream);
            }
        }
    }
}

/// `value`, but 0 where `flag` is.
#[inline(always)]
fn zero_where_zero<L: Lanes>(flag: L, value: L) -> L {
    let zero = L::splat(Real::of(0.0));
    L::select(flag.le(zero), zero, value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Isa, with_isa};
    use half::{bf16, f16};

    const INF: f64 = f64::INFINITY;

    /// The lines of a dense tensor along `dim`, as indices.
    fn lines(shape: &[usize], dim: usize) -> Vec<Vec<usize>> {
        let inner: usize = shape[dim + 1..].iter().product();
        let outer: usize = shape[..dim].iter().product();
        let n = shape[dim];
        let line = |o: usize, i: usize| (0..n).map(|t| (o * n + t) * inner + i).collect();
        (0..outer).flat_map(|o| (0..inner).map(move |i| line(o, i))).collect()
    }

    /// The formula, line by line, in f64.
    fn plain_forward(softmax: Softmax, x: &[f64], shape: &[usize], dim: usize) -> Vec<f64> {
        let mut o = vec![f64::NAN; x.len()];
        for line in lines(shape, dim) {
            let max = line.iter().fold(-INF, |max, &i| x[i].max(max));
            let sum: f64 = line.iter().map(|&i| (x[i] - max).exp()).sum();
            for &i in &line {
                o[i] = match (max == -INF && softmax.zero_masked_rows, softmax.log) {
                    (true, false) => 0.0,
                    (true, true) => -INF,
                    (false, false) => (x[i] - max).exp() / sum,
                    (false, true) => x[i] - max - sum.ln(),
                };
            }
        }
        o
    }

    /// The formula, and the size of its terms before they cancel.
    fn plain_backward(
        log: bool,
        o: &[f64],
        grad: &[f64],
        shape: &[usize],
        dim: usize,
    ) -> (Vec<f64>, Vec<f64>) {
        let (mut dx, mut scale) = (vec![f64::NAN; o.len()], vec![f64::NAN; o.len()]);
        for line in lines(shape, dim) {
            let term = |i: usize| if log { grad[i] } else { o[i] * grad[i] };
            let total: f64 = line.iter().map(|&i| term(i)).sum();
            let terms: f64 = line.iter().map(|&i| term(i).abs()).sum();
            for &i in &line {
                let p = if log { o[i].exp() } else { o[i] };
                dx[i] = if log { grad[i] - p * total } else { p * (grad[i] - total) };
                scale[i] = if log { 1.0 } else { p } * grad[i].abs() + p * terms;
            }
        }
        (dx, scale)
    }

    /// Numbers that look random, within -scale..scale.
    fn numbers<T: Element>(len: usize, seed: u64, scale: f64) -> Vec<T> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let next = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            T::from_f64(((state >> 33) as f64 / (1u64 << 30) as f64 - 1.0) * scale)
        };
        (0..len).map(next).collect()
    }

    fn wide<T: Element>(x: &[T]) -> Vec<f64> {
        x.iter().map(|x| x.to_f64()).collect()
    }

    /// The largest error beyond the rounding to `T`, in units of the arithmetic type's epsilon at
    /// each element's scale.
    fn error<T: Element>(got: &[T], want: &[f64], scale: impl Fn(usize) -> f64) -> f64 {
        let (digits, least) = match T::DTYPE {
            DType::F32 => (23, -126),
            DType::F16 => (10, -14),
            DType::BF16 => (7, -126),
            DType::F64 => (52, -1022),
        };
        let epsilon = if T::DTYPE == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        assert_eq!(got.len(), want.len());
        let errors = got.iter().zip(want).enumerate().map(|(i, (got, &want))| {
            let got = got.to_f64();
            if got == want || got.is_nan() && want.is_nan() {
                return 0.0;
            }
            let exponent = want.abs().log2().floor().max(f64::from(least));
            let rounding = 0.5 * 2f64.powf(exponent - f64::from(digits));
            let error = ((got - want).abs() - rounding).max(0.0) / (epsilon * scale(i));
            if error.is_nan() { INF } else { error }
        });
        errors.fold(0.0, f64::max)
    }

    fn for_each_isa(test: impl Fn() -> Result<()>) -> Result<()> {
        Isa::available().try_for_each(|isa| with_isa(isa, &test)?)
    }

    #[test]
    fn known_answers() -> Result<()> {
        for_each_isa(|| {
            let x = [0.0, 1.0, 2.0, 5.0, 5.0, 5.0];
            let x = View::new(&x, &[2, 3])?;
            let third = 1.0 / 3.0;
            let want = [0.09003057317038046, 0.24472847105479767, 0.6652409557748219];
            let o = Softmax::over(-1).forward(x)?;
            let want = [&want[..], &[third; 3]].concat();
            assert!(error(o.as_slice::<f64>()?, &want, |i| want[i].abs()) < 2.0);
            let o = Softmax::over(0).forward(x)?;
            let (a, b) = (1.0 / (1.0 + 5f64.exp()), 1.0 / (1.0 + 3f64.exp()));
            let m = 1.0 / (1.0 + 4f64.exp());
            let want = [a, m, b, 1.0 - a, 1.0 - m, 1.0 - b];
            assert!(error(o.as_slice::<f64>()?, &want, |i| want[i]) < 8.0);
            let o = Softmax::log_over(1).forward(x)?;
            let want = [-2.4076059644443806, -1.4076059644443804, -0.4076059644443804];
            let want = [&want[..], &[-3f64.ln(); 3]].concat();
            assert!(error(o.as_slice::<f64>()?, &want, |i| want[i].abs()) < 2.0);
            Ok(())
        })
    }

    #[test]
    fn arguments_are_checked() -> Result<()> {
        let (x, mut o) = ([1.0f32; 6], [1.0f32; 6]);
        let view = View::new(&x, &[2, 3])?;
        for dim in [2, -3] {
            let error = Softmax::over(dim).forward(view).unwrap_err();
            assert_eq!((error.operator(), error.argument()), ("softmax", "dim"));
            let (got, range) = (format!("is {dim}"), "-2 to 1 (x has 2 dimensions)");
            assert_eq!((error.got(), error.expected()), (&got[..], range));
        }
        let error = Softmax::over(0).forward(View::new(&x[..1], &[])?).unwrap_err();
        assert_eq!(error.argument(), "x");
        let error =
            Softmax::over(0).forward_into(view, ViewMut::new(&mut o, &[3, 2])?).unwrap_err();
        assert_eq!(error.argument(), "o");
        let halves = [f16::ONE; 6];
        let error = Softmax::over(0).backward(view, View::new(&halves, &[2, 3])?).unwrap_err();
        assert_eq!(error.argument(), "grad");
        // Nothing to do.
        for shape in [[0, 3], [3, 0], [0, 0]] {
            let x = View::new(&x[..0], &shape)?;
            for dim in [0, 1] {
                assert!(Softmax::over(dim).forward(x)?.is_empty());
                assert!(Softmax::log_over(dim).backward(x, x)?.is_empty());
                assert!(Softmax::over(dim).backward_from_input(x, x)?.is_empty());
            }
        }
        Ok(())
    }

    /// Forward and both backward forms of one shape, over every dimension, against the formula.
    fn check<T: Element>(shape: &[usize], size: f64) -> Result<()> {
        let len = shape.iter().product();
        let (x, grad) = (numbers::<T>(len, 1, size), numbers::<T>(len, 2, 2.0));
        let (wide_x, wide_grad) = (wide(&x), wide(&grad));
        let (x, grad) = (View::new(&x, shape)?, View::new(&grad, shape)?);
        for (dim, log) in (0..shape.len()).flat_map(|d| [(d, false), (d, true)]) {
            let softmax = Softmax { dim: dim as isize, log, zero_masked_rows: false };
            let bound = |name, error: f64, bound| {
                assert!(error <= bound, "{name} {} {shape:?} {softmax:?} {error}", T::DTYPE);
            };
            let want = plain_forward(softmax, &wide_x, shape, dim);
            let mut o = vec![T::from_f64(f64::NAN); len];
            softmax.forward_into(x, ViewMut::new(&mut o, shape)?)?;
            // The rounding of x - max, up to 2 * size, is relative in the exponential.
            let scale = |i: usize| if log { 2.0 * size + want[i].abs() } else { want[i] * size };
            // The short exponentials are right to 2^-13.5 and 2^-11, in ulp of f32 (2^-23).
            let k = match T::DTYPE {
                DType::F16 if !log => 724.0,
                DType::BF16 if !log => 4096.0,
                _ => 3.0,
            };
            bound("forward", error(&o, &want, scale), k);

            let mut dx = vec![T::from_f64(f64::NAN); len];
            let o_view = View::new(&o, shape)?;
            softmax.backward_into(o_view, grad, ViewMut::new(&mut dx, shape)?)?;
            let (from_o, scale) = plain_backward(log, &wide(&o), &wide_grad, shape, dim);
            bound("from output", error(&dx, &from_o, |i| scale[i]), 3.0);

            dx.fill(T::from_f64(f64::NAN));
            softmax.backward_from_input_into(x, grad, ViewMut::new(&mut dx, shape)?)?;
            let (from_x, scale) = plain_backward(log, &want, &wide_grad, shape, dim);
            bound("from input", error(&dx, &from_x, |i| scale[i] * size), 3.0);
        }
        Ok(())
    }

    #[test]
    fn the_formula_for_all_sizes_dtypes_and_dimensions() -> Result<()> {
        for_each_isa(|| {
            for n in [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 128, 200] {
                for shape in [&[n][..], &[3, n], &[n, 5], &[2, n, 33], &[2, 3, n, 2]] {
                    check::<f32>(shape, 4.0)?;
                    check::<bf16>(shape, 4.0)?;
                    check::<f16>(shape, 4.0)?;
                    check::<f64>(shape, 4.0)?;
                }
            }
            Ok(())
        })
    }

    #[test]
    fn long_rows_and_columns_stay_exact() -> Result<()> {
        for_each_isa(|| {
            check::<f32>(&[2, 40_001], 1.0)?;
            check::<f32>(&[40_001, 2], 1.0)?;
            check::<bf16>(&[1, 20_000, 3], 8.0)?;
            // Columns that rise or fall slowly: the first replaces its maximum again and again.
            let x: Vec<f32> = (0..5000).flat_map(|i| [(i / 32) as f32, (-i / 32) as f32]).collect();
            let x: Vec<f32> = x.iter().map(|x| x / 4.0).collect();
            let want = plain_forward(Softmax::over(0), &wide(&x), &[5000, 2], 0);
            let o = Softmax::over(0).forward(View::new(&x, &[5000, 2])?)?;
            let error = error(o.as_slice::<f32>()?, &want, |i| want[i]);
            assert!(error < 4.0, "{error}");
            Ok(())
        })
    }

    #[test]
    fn rows_sum_to_one_even_when_huge() -> Result<()> {
        for_each_isa(|| {
            let x: Vec<f32> = numbers(64 * 96, 5, 1e4);
            for (dim, log) in [(0, false), (1, false), (0, true), (1, true)] {
                let softmax = Softmax { dim, log, zero_masked_rows: false };
                let o = softmax.forward(View::new(&x, &[64, 96])?)?.to_vec::<f32>()?;
                for line in lines(&[64, 96], dim as usize) {
                    let p = |i: usize| f64::from(o[i]);
                    let sum: f64 = line.iter().map(|&i| if log { p(i).exp() } else { p(i) }).sum();
                    assert!((sum - 1.0).abs() < 1e-5, "{sum}");
                }
            }
            Ok(())
        })
    }

    /// Lines, and what their softmax is: `None` for NaN.
    #[test]
    fn nan_infinities_and_masks() -> Result<()> {
        const NAN: f64 = f64::NAN;
        for_each_isa(|| {
            for n in [3, 8, 21, 64, 70, 128, 20_000] {
                let line = |kind: usize, t: usize| match (kind, t) {
                    (0, 0) | (1, 2) => NAN,
                    (2, 1) => INF,
                    (3, _) => -INF,
                    (4, 0) => NAN,
                    (4, _) => -INF,
                    (5, 1) => 1.0,
                    (5, _) => -INF,
                    (6, t) if t + 1 == n => NAN,
                    (7, t) if t + 1 == n => 0.0,
                    (7, _) => -INF,
                    (_, t) => (t % 3) as f64,
                };
                for (by_columns, dtype) in [
                    (false, DType::F32),
                    (false, DType::BF16),
                    (true, DType::F32),
                    (true, DType::BF16),
                ] {
                    let shape = if by_columns { [n, 9] } else { [9, n] };
                    let dim = isize::from(!by_columns);
                    let at = |i: usize| if by_columns { (i % 9, i / 9) } else { (i / n, i % n) };
                    let x: Vec<f64> = (0..9 * n).map(|i| line(at(i).0, at(i).1)).collect();
                    crate::dtype::with_element!(dtype, T => {
                        let x: Vec<T> = x.iter().map(|&x| T::from_f64(x)).collect();
                        let grad: Vec<T> = numbers(x.len(), 3, 1.0);
                        let (x, grad) = (View::new(&x, &shape)?, View::new(&grad, &shape)?);
                        for (log, zero_masked_rows) in
                            [(false, false), (false, true), (true, false), (true, true)]
                        {
                            let softmax = Softmax { dim, log, zero_masked_rows };
                            let o = softmax.forward(x)?;
                            let from_o = softmax.backward(o.view(), grad)?.view().to_f64_vec();
                            let from_x = softmax.backward_from_input(x, grad)?.view().to_f64_vec();
                            let (o, grad) = (o.view().to_f64_vec(), grad.to_f64_vec());
                            for i in 0..9 * n {
                                let all = [o[i], from_o[i], from_x[i]];
                                let what = format!("{softmax:?} {dtype} {n} {:?} {all:?}", at(i));
                                match at(i).0 {
                                    3 if zero_masked_rows => {
                                        let masked = if log { -INF } else { 0.0 };
                                        assert_eq!(all, [masked, 0.0, 0.0], "{what}");
                                    }
                                    0 | 1 | 2 | 3 | 4 | 6 => {
                                        assert!(all.iter().all(|v| v.is_nan()), "{what}");
                                    }
                                    kind @ (5 | 7) => {
                                        let one = at(i).1 == if kind == 5 { 1 } else { n - 1 };
                                        let p = f64::from(u8::from(one));
                                        assert_eq!(o[i], if log { p.ln() } else { p }, "{what}");
                                        if log && !one {
                                            assert_eq!(all[1..], [grad[i]; 2], "{what}");
                                        } else if !log {
                                            assert_eq!(all[1..], [0.0; 2], "{what}");
                                        }
                                    }
                                    _ => assert!(all.iter().all(|v| v.is_finite()), "{what}"),
                                }
                            }
                        }
                    });
                }
            }
            Ok(())
        })
    }

    #[test]
    fn infinite_gradients_follow_ieee() -> Result<()> {
        // The sum is infinite: -inf for the finite ones, inf - inf for the other.
        let (o, grad) = ([0.5f32; 6], [1.0f32, 1.0, 1.0, f32::INFINITY, 1.0, 1.0]);
        let by_columns = (View::new(&o, &[2, 3])?, View::new(&grad, &[2, 3])?);
        let dx = Softmax::over(0).backward(by_columns.0, by_columns.1)?.to_vec::<f32>()?;
        assert!(dx[0] == f32::NEG_INFINITY && dx[3].is_nan() && dx[1] == 0.0);
        let dx =
            Softmax::over(0).backward(View::new(&o[..2], &[2])?, View::new(&grad[2..4], &[2])?)?;
        let dx = dx.as_slice::<f32>()?;
        assert!(dx[0] == f32::NEG_INFINITY && dx[1].is_nan());
        Ok(())
    }

    #[test]
    fn views_of_all_kinds() -> Result<()> {
        for_each_isa(|| {
            let shape = [3, 20, 5, 24];
            let len: usize = shape.iter().product();
            let x: Vec<f32> = numbers(len, 8, 3.0);
            let dense = View::new(&x, &shape)?;
            for dim in 0..4 {
                let want = Softmax::over(dim).forward(dense)?.to_vec::<f32>()?;
                // Any order of dimensions gives the same bits, whichever is contiguous.
                for order in [[0, 2, 1, 3], [2, 1, 3, 0], [3, 2, 1, 0], [0, 1, 3, 2]] {
                    let place = order.iter().position(|&d| d == dim as usize).unwrap();
                    let mut o = vec![f32::NAN; len];
                    Softmax::over(place as isize).forward_into(
                        dense.permute(&order)?,
                        ViewMut::new(&mut o, &shape)?.permute(&order)?,
                    )?;
                    assert_eq!(o, want, "{dim} {order:?}");
                }
                // Parts of larger tensors, in and out.
                let mut o = vec![f32::NAN; len];
                let (outer, start, part) = (if dim == 0 { 2 } else { 0 }, 1, 2);
                Softmax::over(dim).forward_into(
                    dense.narrow(outer, start, part)?,
                    ViewMut::new(&mut o, &shape)?.narrow(outer, start, part)?,
                )?;
                let stride = dense.strides()[outer] as usize;
                for (i, (got, want)) in o.iter().zip(&want).enumerate() {
                    let inside = (start..start + part).contains(&(i / stride % shape[outer]));
                    assert!(if inside { got == want } else { got.is_nan() });
                }
                // A gradient that is the same for all of the first dimension.
                let one = View::new(&x[..len / 3], &shape[1..])?.broadcast(&shape)?;
                let dense_one = x[..len / 3].repeat(3);
                let softmax = Softmax::over(dim);
                assert_eq!(
                    softmax.backward_from_input(dense, one)?.to_vec::<f32>()?,
                    softmax
                        .backward_from_input(dense, View::new(&dense_one, &shape)?)?
                        .to_vec::<f32>()?
                );
            }
            Ok(())
        })
    }

    #[test]
    fn the_same_bits_for_any_threads_and_batch() -> Result<()> {
        let shape = [6, 300, 3, 200]; // 2 MiB of bf16
        let len: usize = shape.iter().product();
        let (x, grad) = (numbers::<bf16>(len, 1, 4.0), numbers::<bf16>(len, 2, 1.0));
        let (x, grad) = (View::new(&x, &shape)?, View::new(&grad, &shape)?);
        for (dim, log) in [(1, false), (1, true), (3, false), (3, true)] {
            let softmax = Softmax { dim, log, zero_masked_rows: true };
            let all = |x: View<'_>, grad: View<'_>| -> Result<Vec<Vec<bf16>>> {
                let o = softmax.forward(x)?;
                let from_o = softmax.backward(o.view(), grad)?.to_vec()?;
                let from_x = softmax.backward_from_input(x, grad)?.to_vec()?;
                Ok(vec![o.to_vec()?, from_o, from_x])
            };
            let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
            let want = pool(1).install(|| all(x, grad))?;
            for threads in [2, 3, 7] {
                assert!(pool(threads).install(|| all(x, grad))? == want);
            }
            // One entry of the batch, and one head of it, by themselves.
            let got = all(x.narrow(0, 4, 1)?, grad.narrow(0, 4, 1)?)?;
            let size = len / 6;
            assert!(got.iter().zip(&want).all(|(got, want)| *got == want[4 * size..5 * size]));
            let head = |v: View<'_>| -> Result<Vec<f64>> { Ok(v.narrow(2, 1, 1)?.to_f64_vec()) };
            let got = all(x.narrow(2, 1, 1)?, grad.narrow(2, 1, 1)?)?;
            for (got, want) in got.iter().zip(&want) {
                assert!(wide(got) == head(View::new(want, &shape)?)?);
            }
        }
        Ok(())
    }

    /// Rows of whole blocks, which wide lanes take in turns: whole batches and a shorter one, among
    /// them rows that are far, masked or NaN, each as it is by itself.
    #[test]
    fn rows_in_turns_are_what_they_are_alone() -> Result<()> {
        fn check<T: Element>(rows: usize, n: usize) -> Result<()> {
            let mut x: Vec<T> = numbers(rows * n, 7, 4.0);
            for (r, row) in x.chunks_mut(n).enumerate() {
                match r % 11 {
                    3 => row[n / 2] = T::from_f64(300.0),
                    5 => row[0] = T::from_f64(-200.0),
                    7 => row.fill(T::from_f64(-INF)),
                    8 => row[n - 1] = T::from_f64(f64::NAN),
                    _ => {}
                }
            }
            let view = View::new(&x, &[rows, n])?;
            let softmax = Softmax { zero_masked_rows: true, ..Softmax::over(-1) };
            let together = softmax.forward(view)?.view().to_f64_vec();
            for (r, got) in together.chunks(n).enumerate() {
                let alone = softmax.forward(view.narrow(0, r, 1)?)?.view().to_f64_vec();
                let same = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
                assert!(got.iter().zip(&alone).all(same), "row {r} of {rows}, {n} {}", T::DTYPE);
                assert_eq!(got[0].is_nan(), r % 11 == 8);
            }
            Ok(())
        }
        for_each_isa(|| {
            for (rows, n) in
                [(1, 16), (17, 128), (53, 48), (40, 208), (7, 1024), (1100, 128), (2100, 64)]
            {
                check::<bf16>(rows, n)?;
                check::<f16>(rows, n)?;
                check::<f32>(rows, n)?;
            }
            Ok(())
        })
    }

    /// The helpers that other operators use.
    struct Helpers<'r>(Part<'r, 1, 1>);

    impl Kernel for Helpers<'_> {
        #[inline(always)]
        fn run<L, T>(mut self)
        where
            T: Element,
            L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
        {
            // Rows 0..5 by columns, the others each by itself.
            let Some(runs) = self.0.next_run::<T>(usize::MAX) else { return };
            let ([x], [mut o]) = (runs.inputs, runs.outputs);
            let mut scratch = [x.len(); 2].map(Scratch::<T::Real>::new);
            let [max, inverse] = &mut scratch;
            column_statistics::<L, T>(&x, 0..5, false, max, inverse);
            for r in 0..runs.rows {
                let scale = exp_row::<L, T>(x.row(r), if r < 5 { continue } else { max });
                for i in (0..x.len()).step_by(L::N) {
                    L::get(max, i).mul(L::splat(scale)).write(o.row(r), i, false);
                }
            }
            column_statistics::<L, T>(&x, 0..5, false, max, inverse);
            for (r, i) in (0..5).flat_map(|r| (0..x.len()).step_by(L::N).map(move |i| (r, i))) {
                let e = L::read(x.row(r), i, Real::of(0.0)).sub(L::get(max, i)).exp();
                e.mul(L::get(inverse, i)).write(o.row(r), i, false);
            }
        }
    }

    /// In a dtype without a short exponential, which the helpers do not use.
    #[test]
    fn helpers_agree_with_the_operator() -> Result<()> {
        let x: Vec<f32> = numbers(9 * 37, 4, 5.0);
        let mut o = vec![f32::NAN; x.len()];
        let view = View::new(&x, &[9, 37])?;
        let output = ViewMut::new(&mut o, &[9, 37])?;
        let operands = Operands::plain(("x", view), [("x", Some(view))], [("o", Some(output))]);
        let rows = Rows::new("test", operands)?;
        rows.for_each_part(9, |part| simd::run(isa(), DType::F32, Helpers(part)));
        let by_columns = Softmax::over(0).forward(view.narrow(0, 0, 5)?)?;
        let by_rows = Softmax::over(1).forward(view.narrow(0, 5, 4)?)?;
        assert_eq!(o[..5 * 37], *by_columns.as_slice::<f32>()?);
        assert_eq!(o[5 * 37..], *by_rows.as_slice::<f32>()?);
        Ok(())
    }
}
