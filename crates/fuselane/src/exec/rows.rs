//! The rows of a call: from checked views to the slices that kernels work on.
//!
//! [`Rows`] checks the operands of a call and hands their rows out, in parallel: each task owns a range of
//! them, its [`TaskRows`], and takes one [`Row`](task::Row) at a time, or several at equal distances
//! ([`OperandRows`](crate::kernels::rows::OperandRows)). Kernels are safe code; this file has the pointers.

mod task;

pub(crate) use task::TaskRows;

use std::marker::PhantomData;
use std::ops::Range;

use super::operands::{Named, Operands, disjoint};
use super::parallel;
use super::scratch::Plain;
use crate::dtype::DType;
use crate::error::Result;
use crate::view::{MAX_RANK, View, ViewMut};

#[cfg(test)]
thread_local! {
    static FORCED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Calls `f` with non-temporal stores in all of its calls, as far as addresses allow.
#[cfg(test)]
pub(crate) fn force_non_temporal<R>(f: impl FnOnce() -> R) -> R {
    FORCED.set(true);
    let result = f();
    FORCED.set(false);
    result
}

/// The layout of the rows of one operand.
#[derive(Clone, Copy)]
struct Operand {
    /// Null when the operand is absent.
    base: *mut u8,
    size: usize,
    len: usize,
    /// Bytes from row to row, for each dimension.
    steps: [isize; MAX_RANK],
}

impl Operand {
    const ABSENT: Self = Self { base: std::ptr::null_mut(), size: 1, len: 0, steps: [0; MAX_RANK] };

    /// The address of a row, and its length. (Both come in registers.)
    #[inline(never)]
    fn row_start(&self, tiles: Option<ColumnTiles>, index: &[usize]) -> (*mut u8, usize) {
        if self.base.is_null() {
            return (std::ptr::NonNull::<u64>::dangling().as_ptr().cast(), 0);
        }
        let mut offset = 0;
        for (&i, &step) in index.iter().zip(&self.steps) {
            offset += i as isize * step;
        }
        let len = match tiles {
            None => self.len,
            Some(t) => self.len.saturating_sub(index[t.dim] * t.width).min(t.width),
        };
        (self.base.wrapping_offset(offset), len)
    }
}

/// The last dimension cut into tiles of columns, for reductions along another one.
#[derive(Clone, Copy)]
struct ColumnTiles {
    dim: usize,
    width: usize,
}

/// The rows of `I` inputs and `O` outputs of the activations' dtype, and of `SI` and `SO`
/// statistics of the arithmetic type. Absent operands have empty rows.
pub(crate) struct Rows<'a, const I: usize, const O: usize, const SI: usize = 0, const SO: usize = 0>
{
    dtype: DType,
    rank: usize,
    shape: [usize; MAX_RANK],
    count: usize,
    inputs: [Operand; I],
    outputs: [Operand; O],
    saved: [Operand; SI],
    save: [Operand; SO],
    tiles: Option<ColumnTiles>,
    memory: PhantomData<(&'a [u8], &'a mut [u8])>,
}

// SAFETY: the pointers are borrows of plain numbers, shared for inputs and exclusive for outputs;
// `TaskRows`s, the only access to them, own disjoint rows.
unsafe impl<const I: usize, const O: usize, const SI: usize, const SO: usize> Sync
    for Rows<'_, I, O, SI, SO>
{
}

impl<'a, const I: usize, const O: usize, const SI: usize, const SO: usize> Rows<'a, I, O, SI, SO> {
    /// Checks the operands and collects their rows: all dimensions but the last, in index order.
    pub(crate) fn new(
        operator: &'static str,
        operands: Operands<'a, I, O, SI, SO>,
    ) -> Result<Self> {
        operands.check(operator)?;
        let mut written = Vec::with_capacity(O + SO);
        for (name, view) in operands.outputs.iter().chain(&operands.save) {
            if let Some(view) = view {
                written.push((*name, view.as_view()));
            }
        }
        disjoint(operator, &operands.inputs, &written)?;
        disjoint(operator, &operands.saved, &written)?;

        let input = |(_, view): Named<Option<View<'a>>>| match view {
            Some(view) => operand(view.as_ptr().cast_mut(), &view),
            None => Operand::ABSENT,
        };
        let output = |(_, view): Named<Option<ViewMut<'a>>>| match view {
            Some(view) => operand(view.raw(), &view.as_view()),
            None => Operand::ABSENT,
        };
        let like = operands.like.1;
        let outer = &like.shape()[..like.rank() - 1];
        let mut shape = [1; MAX_RANK];
        shape[..outer.len()].copy_from_slice(outer);
        Ok(Self {
            dtype: like.dtype(),
            rank: outer.len(),
            shape,
            count: outer.iter().product(),
            inputs: operands.inputs.map(input),
            outputs: operands.outputs.map(output),
            saved: operands.saved.map(input),
            save: operands.save.map(output),
            tiles: None,
            memory: PhantomData,
        })
    }

    /// Joins neighbouring dimensions that every operand steps through evenly, so that stepping is
    /// rare; with `flat`, rows too, so that a dense tensor is a single row.
    pub(crate) fn merged(mut self, flat: bool) -> Self {
        if self.count == 0 {
            return self;
        }
        let mut dims: Vec<usize> = (0..self.rank).filter(|&d| self.shape[d] != 1).collect();
        if flat {
            while let Some(&last) = dims.last() {
                let size = self.shape[last];
                if !self.operands().all(|o| o.steps[last] == (o.len * o.size) as isize) {
                    break;
                }
                self.for_each_operand(|o| o.len *= size);
                dims.pop();
            }
        }
        let mut merged: Vec<usize> = Vec::with_capacity(dims.len());
        for &d in dims.iter().rev() {
            if let Some(&inner) = merged.last() {
                let size = self.shape[inner];
                if self.operands().all(|o| o.steps[d] == o.steps[inner] * size as isize) {
                    self.shape[inner] *= self.shape[d];
                    continue;
                }
            }
            merged.push(d);
        }
        merged.reverse();
        let old = self.shape;
        self.shape = [1; MAX_RANK];
        for (i, &d) in merged.iter().enumerate() {
            self.shape[i] = old[d];
        }
        self.for_each_operand(|o| {
            let old = o.steps;
            o.steps = [0; MAX_RANK];
            for (i, &d) in merged.iter().enumerate() {
                o.steps[i] = old[d];
            }
        });
        self.rank = merged.len();
        self.count = self.shape[..self.rank].iter().product();
        self
    }

    /// Makes rows longer by the dimensions after `dim` that every operand holds densely, for
    /// operators whose columns do not depend on each other.
    pub(crate) fn widened(mut self, dim: usize) -> Self {
        while self.rank > dim + 1 && self.count > 0 {
            let (last, size) = (self.rank - 1, self.shape[self.rank - 1]);
            let dense = self.operands().all(|o| o.steps[last] == (o.len * o.size) as isize);
            if size != 1 && !dense {
                break;
            }
            self.for_each_operand(|o| {
                o.len *= size;
                o.steps[last] = 0;
            });
            self.shape[last] = 1;
            self.rank = last;
            self.count /= size;
        }
        self
    }

    /// Moves dimension `dim` (not the last) innermost, and cuts the rows into tiles of `width`
    /// columns: the rows of one tile along `dim` follow each other.
    pub(crate) fn column_tiles(mut self, dim: usize, width: usize) -> Self {
        let len = self.operands().map(|o| o.len).max().unwrap_or(0);
        let along = self.shape[dim];
        self.shape.copy_within(dim + 1..self.rank, dim);
        self.shape[self.rank - 1] = len.div_ceil(width);
        self.shape[self.rank] = along;
        let rank = self.rank;
        self.for_each_operand(|o| {
            let step = o.steps[dim];
            o.steps.copy_within(dim + 1..rank, dim);
            o.steps[rank - 1] = (width * o.size) as isize;
            o.steps[rank] = step;
        });
        self.tiles = Some(ColumnTiles { dim: rank - 1, width });
        self.rank += 1;
        self.count = self.shape[..self.rank].iter().product();
        self
    }

    /// Cuts each row of every operand into `groups` rows of equal length, one behind the other.
    pub(crate) fn split(mut self, groups: usize) -> Self {
        let rank = self.rank;
        self.shape[rank] = groups;
        self.for_each_operand(|o| {
            o.len /= groups;
            o.steps[rank] = (o.len * o.size) as isize;
        });
        self.rank += 1;
        self.count *= groups;
        self
    }

    /// Cuts each row into rows of at most `width`, for operators that work element by element.
    pub(crate) fn tiled(mut self, width: usize) -> Self {
        let (rank, len) = (self.rank, self.operands().map(|o| o.len).max().unwrap_or(0));
        self.shape[rank] = len.div_ceil(width);
        self.for_each_operand(|o| o.steps[rank] = (width * o.size) as isize);
        self.tiles = Some(ColumnTiles { dim: rank, width });
        self.rank += 1;
        self.count = self.shape[..self.rank].iter().product();
        self
    }

    /// Whether stores should be non-temporal: where the operands of the call together do not fit into the
    /// caches. (An ordinary store that misses the caches first reads the line that it is to overwrite.)
    pub(crate) fn non_temporal(&self) -> bool {
        #[cfg(test)]
        if FORCED.get() {
            return true;
        }
        self.row_bytes().saturating_mul(self.count) >= crate::machine::cached_bytes()
    }

    /// The number of rows.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Whether there is nothing to read or write. Of rows without elements there may be more than
    /// anyone could walk over.
    fn is_empty(&self) -> bool {
        self.count == 0 || self.operands().all(|o| o.len == 0)
    }

    /// The length of each row of an input.
    pub(crate) fn input_len(&self, i: usize) -> usize {
        self.inputs[i].len
    }

    /// The activations' dtype.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The length of an operand's longest row.
    fn tile_len(&self, o: &Operand) -> usize {
        self.tiles.map_or(o.len, |t| o.len.min(t.width))
    }

    /// The bytes that one row of all operands takes.
    fn row_bytes(&self) -> usize {
        self.operands().map(|o| self.tile_len(o) * o.size).sum()
    }

    /// Runs `work` over all rows, in parallel where that pays, in tasks of whole groups of `group` rows.
    pub(crate) fn for_each_task(
        &self,
        group: usize,
        work: impl Fn(TaskRows<'_, I, O, SI, SO>) + Sync,
    ) {
        if self.is_empty() {
            return;
        }
        parallel::for_each_range(self.count / group, self.row_bytes() * group, |range| {
            work(self.task(range.start * group..range.end * group));
        });
    }

    /// Runs `work` over all rows in a number of tasks that depends on the sizes alone, each with a vector of
    /// partial sums, and adds these vectors to `total`, in order.
    pub(crate) fn sum_over_tasks<R: Plain>(
        &self,
        group: usize,
        total: &mut [R],
        work: impl Fn(TaskRows<'_, I, O, SI, SO>, &mut [R]) + Sync,
    ) {
        if self.is_empty() {
            return;
        }
        let groups = self.count / group.max(1);
        parallel::sum_over_ranges(groups, self.row_bytes() * group, total, |range, partial| {
            work(self.task(range.start * group..range.end * group), partial);
        });
    }

    /// Runs `work` over groups of `group` rows, in parallel where that pays, each with its own
    /// `len` numbers of `results`.
    pub(crate) fn for_each_group<R: Plain>(
        &self,
        group: usize,
        results: &mut [R],
        len: usize,
        work: impl Fn(TaskRows<'_, I, O, SI, SO>, &mut [R]) + Sync,
    ) {
        if self.count == 0 || len == 0 {
            return;
        }
        parallel::for_each_chunk(
            self.count / group,
            self.row_bytes() * group,
            results,
            len,
            |i, chunk| {
                work(self.task(i * group..(i + 1) * group), chunk);
            },
        );
    }

    /// The rows of one task. Private: the functions above hand out each row once.
    fn task(&self, range: Range<usize>) -> TaskRows<'_, I, O, SI, SO> {
        TaskRows::new(self, range)
    }

    fn operands(&self) -> impl Iterator<Item = &Operand> {
        let all = self.inputs.iter().chain(&self.outputs).chain(&self.saved).chain(&self.save);
        all.filter(|o| !o.base.is_null())
    }

    fn for_each_operand(&mut self, f: impl FnMut(&mut Operand)) {
        let all = self.inputs.iter_mut().chain(&mut self.outputs);
        let all = all.chain(&mut self.saved).chain(&mut self.save);
        all.filter(|o| !o.base.is_null()).for_each(f);
    }
}

fn operand(base: *mut u8, view: &View<'_>) -> Operand {
    let size = view.dtype().size();
    let mut steps = [0; MAX_RANK];
    let (&len, outer) = view.shape().split_last().unwrap_or((&1, &[]));
    // The strides of an empty view may be anything, and products with them overflow. So may the stride
    // of a single index, which is never taken and says nothing of how rows are aligned.
    if !view.is_empty() {
        let strides = view.strides()[..outer.len()].iter().zip(outer);
        for (step, (&stride, &count)) in steps.iter_mut().zip(strides) {
            *step = if count > 1 { stride.wrapping_mul(size as isize) } else { 0 };
        }
    }
    Operand { base, size, len, steps }
}
