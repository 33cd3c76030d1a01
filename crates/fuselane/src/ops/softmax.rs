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
//! The dimension may be the last one (features) or any other (a sequence); nothing is transposed.
//!
//! **Over the last dimension** a row is read once: its exponentials are kept in scratch while their
//! sum is formed, then scaled and written. Short rows go a few at a time, so that the sums and
//! divisions of one run behind the exponentials of the next. **Over another dimension** the tensor is
//! cut into tiles of some columns, which are read for the columns' maxima and sums, then again (from the
//! cache, where a tile fits) for the output.
//!
//! Sums run in lanes within chunks of elements or rows, and in f64 (or with compensation) across chunks.
//! Their order depends on the length, and on whether the dimension is the innermost one in memory.
//! In 16 bits, no maximum is needed where all elements are near 0: see `kernels::softmax`.
//!
//! A NaN, or plus infinity, makes its row NaN, by way of the sum. A row of nothing but minus infinity is
//! NaN, as in PyTorch, unless [`Softmax::zero_masked_rows`] is set.

#[cfg(test)]
mod tests;

use super::{contiguous_last, double};
use crate::error::{Error, Result};
use crate::exec::operands::{Named, Operands};
use crate::exec::rows::Rows;
use crate::kernels::softmax::{
    BackwardColumns, BackwardColumnsFromInput, BackwardRows, BackwardRowsFromInput, ForwardColumns,
    ForwardLogRows, ForwardRows, Log, Plain, Task,
};
use crate::pool::Buffer;
use crate::reference::softmax;
use crate::simd::dispatch;
use crate::view::{View, ViewMut};
use crate::{DType, Isa, isa};

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

/// The most bytes in a row of a column tile, and the least: shorter rows cost more than a tile that leaves
/// the second-level cache does. Only for want of tasks they are as short as a cache line.
const TILE_ROW: usize = 512;
const LEAST_ROW: usize = 256;
const LINE: usize = 64;

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
        self.run(
            [("x", x)],
            ("o", o),
            |[x], dims| softmax::forward(self, x, dims),
            |isa, dtype, columns, task| match (columns, self.log) {
                (false, false) => dispatch(isa, dtype, ForwardRows(task)),
                (false, true) => dispatch(isa, dtype, ForwardLogRows(task)),
                (true, false) => dispatch(isa, dtype, ForwardColumns(task, Plain)),
                (true, true) => dispatch(isa, dtype, ForwardColumns(task, Log)),
            },
        )
    }

    /// The checks of [`Softmax::forward_into`] alone, and the dimension that it runs along, counted
    /// from the first. No element is read or written: views may stand for another device's memory.
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
        Buffer::filled(x.dtype(), x.shape(), |o| self.forward_into(x, o))
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
        self.run(
            [("o", o), ("grad", grad)],
            ("dx", dx),
            |[o, grad], dims| softmax::backward_from_output(self, o, grad, dims),
            |isa, dtype, columns, task| match (columns, self.log) {
                (false, false) => dispatch(isa, dtype, BackwardRows(task, Plain)),
                (false, true) => dispatch(isa, dtype, BackwardRows(task, Log)),
                (true, false) => dispatch(isa, dtype, BackwardColumns(task, Plain)),
                (true, true) => dispatch(isa, dtype, BackwardColumns(task, Log)),
            },
        )
    }

    /// The checks of [`Softmax::backward_into`] alone; see [`Softmax::check_forward`].
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
        Buffer::filled(o.dtype(), o.shape(), |dx| self.backward_into(o, grad, dx))
    }

    /// Writes `dx` from the input `x` of the forward. The output is computed again and not rounded, so
    /// this is the more exact form in 16 bits.
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
        self.run(
            [("x", x), ("grad", grad)],
            ("dx", dx),
            |[x, grad], dims| softmax::backward_from_input(self, x, grad, dims),
            |isa, dtype, columns, task| match (columns, self.log) {
                (false, false) => dispatch(isa, dtype, BackwardRowsFromInput(task, Plain)),
                (false, true) => dispatch(isa, dtype, BackwardRowsFromInput(task, Log)),
                (true, false) => dispatch(isa, dtype, BackwardColumnsFromInput(task, Plain)),
                (true, true) => dispatch(isa, dtype, BackwardColumnsFromInput(task, Log)),
            },
        )
    }

    /// The checks of [`Softmax::backward_from_input_into`] alone; see [`Softmax::check_forward`].
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
        Buffer::filled(x.dtype(), x.shape(), |dx| self.backward_from_input_into(x, grad, dx))
    }

    /// Checks a call whose operands all look like the first input, and runs it: by the reference's
    /// `formula` on f64, else by `kernels` on each task, along the rows of column tiles or within rows.
    fn run<const I: usize>(
        &self,
        inputs: [Named<View<'_>>; I],
        (name, mut output): Named<ViewMut<'_>>,
        formula: impl Fn([&[f64]; I], softmax::Dims) -> Vec<f64>,
        kernels: impl Fn(Isa, DType, bool, Task<'_, I>) + Sync,
    ) -> Result<()> {
        let Checked { rows, n, given, dim, columns } =
            self.checked(inputs, (name, output.reborrow()))?;
        let (isa, dtype) = (isa(), rows.dtype());
        if dtype == DType::F64 {
            double::along(given, inputs.map(|(_, view)| view), output, formula);
            return Ok(());
        }
        let (rows, width, group) = if columns {
            let rows = rows.widened(dim);
            let outer = rows.count() / n.max(1);
            let width = tile_width(n, rows.input_len(0), outer, dtype.size(), I);
            (rows.column_tiles(dim, width), width, n)
        } else {
            (rows.merged(false), n, 1)
        };
        let (zero_masked, non_temporal) = (self.zero_masked_rows, rows.non_temporal());
        rows.for_each_task(group, |rows| {
            kernels(isa, dtype, columns, Task { rows, n, width, zero_masked, non_temporal });
        });
        Ok(())
    }

    /// Checks a call. Nothing is read or written.
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
        Ok(Checked { rows, n: like.shape()[dim], given, dim, columns: dim + 1 < like.rank() })
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
            let expected = format!("-{rank} to {} ({name} has {rank} dimensions)", rank - 1);
            Error::new("softmax", "dim", format!("is {}", self.dim), expected)
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
    /// Whether rows run along another one.
    columns: bool,
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

/// The columns in a tile, for `outer` tensors of `n` rows of elements of `size` bytes: few enough for the
/// tile to stay in the second-level cache between its two readings, and for every thread to have some
/// tiles, but enough for rows to be read well. No result depends on it.
fn tile_width(n: usize, columns: usize, outer: usize, size: usize, inputs: usize) -> usize {
    let tasks = 4 * crate::exec::parallel::current_threads();
    // The other half of the cache is for what is asked for ahead, and for others.
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
