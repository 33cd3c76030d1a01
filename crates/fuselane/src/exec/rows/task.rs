//! The rows of one task.

use std::ops::Range;

use super::{Operand, Rows};
use crate::dtype::{DType, Element};
use crate::kernels::rows::{InputRows, OperandRows, OutputRows};
use crate::kernels::tile::{InputTile, OutputTile, Tile};
use crate::view::MAX_RANK;

/// The rows that one task owns.
pub(crate) struct TaskRows<
    'r,
    const I: usize,
    const O: usize,
    const SI: usize = 0,
    const SO: usize = 0,
> {
    rows: &'r Rows<'r, I, O, SI, SO>,
    range: Range<usize>,
    /// The number of the current row.
    at: usize,
    /// Its index.
    index: [usize; MAX_RANK],
}

/// One row of every operand.
pub(crate) struct Row<'r, T: Element, const I: usize, const O: usize, const SO: usize = 0> {
    /// Inputs, in the order of [`Operands`](crate::exec::operands::Operands).
    pub(crate) inputs: [&'r [T]; I],
    /// Outputs, in the same order.
    pub(crate) outputs: [&'r mut [T]; O],
    /// Statistics to save.
    pub(crate) save: [&'r mut [T::Real]; SO],
}

impl<'r, const I: usize, const O: usize, const SI: usize, const SO: usize>
    TaskRows<'r, I, O, SI, SO>
{
    /// Private to `exec::rows`, which hands out each row once.
    pub(super) fn new(rows: &'r Rows<'r, I, O, SI, SO>, range: Range<usize>) -> Self {
        let at = range.start;
        let mut task = Self { rows, range, at, index: [0; MAX_RANK] };
        task.seek(at);
        task
    }

    /// The rows of this task, by number.
    #[inline(always)]
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Goes to a row by its number.
    #[inline(never)]
    pub(crate) fn seek(&mut self, row: usize) {
        self.at = row;
        let mut rest = row;
        for d in (0..self.rows.rank).rev() {
            let size = self.rows.shape[d].max(1);
            self.index[d] = rest % size;
            rest /= size;
        }
    }

    /// The current row, if it belongs to this task; then goes on to the next.
    #[inline(always)]
    pub(crate) fn next_row<T: Element>(&mut self) -> Option<Row<'_, T, I, O, SO>> {
        if self.at >= self.range.end || self.at < self.range.start {
            return None;
        }
        let rank = self.rows.rank;
        // SAFETY: `index` is that of a row within `range`, which this task owns, and the borrow of `self`
        // keeps another row from being held at the same time. (It is taken before the index goes on, as a
        // copy of the index would wait for the stores to it.)
        let row = unsafe { self.row_at(&self.index[..rank]) };
        self.at += 1;
        for d in (0..rank).rev() {
            self.index[d] += 1;
            if self.index[d] < self.rows.shape[d] {
                break;
            }
            self.index[d] = 0;
        }
        Some(row)
    }

    /// Up to `most` rows from the current one on, as many as are at equal distances (those of one index of all
    /// dimensions but the innermost) and belong to this task; then goes on behind them.
    ///
    /// Inlined, and written in place, so that nothing of it is copied in larger pieces than it was written
    /// in: such a load would wait for the stores before it. (So would one of the index.)
    #[inline(always)]
    pub(crate) fn next_rows<T: Element>(
        &mut self,
        most: usize,
    ) -> Option<OperandRows<'_, T, I, O, SI, SO>> {
        let rows = self.rows;
        let (at, rank) = (self.at, rows.rank);
        let left = if self.range.contains(&at) { self.range.end - at } else { 0 };
        let even = match rank.checked_sub(1) {
            None => 1,
            // The last tile is shorter than the others.
            Some(d) if rows.tiles.is_some_and(|t| t.dim == d) => 1,
            Some(d) => rows.shape[d] - self.index[d],
        };
        let count = most.min(left).min(even);
        if count == 0 {
            return None;
        }
        rows.check_dtype(T::DTYPE);
        let index = &self.index[..rank];
        let mut operands = OperandRows {
            count,
            inputs: [const { InputRows::EMPTY }; I],
            outputs: [const { OutputRows::EMPTY }; O],
            saved: [const { InputRows::EMPTY }; SI],
            save: [const { OutputRows::EMPTY }; SO],
        };
        // SAFETY: these are `count` rows that this task owns, of operands of these types, and the borrow of
        // `self` keeps others from being held at the same time; see `row_at`.
        unsafe {
            for (to, o) in operands.inputs.iter_mut().zip(&rows.inputs) {
                *to = rows.input_rows(o, index, count);
            }
            for (to, o) in operands.outputs.iter_mut().zip(&rows.outputs) {
                *to = rows.output_rows(o, index, count);
            }
            for (to, o) in operands.saved.iter_mut().zip(&rows.saved) {
                *to = rows.input_rows(o, index, count);
            }
            for (to, o) in operands.save.iter_mut().zip(&rows.save) {
                *to = rows.output_rows(o, index, count);
            }
        }
        self.at += count;
        if count < even {
            self.index[rank - 1] += count;
        } else {
            self.seek(self.at);
        }
        Some(operands)
    }

    /// The rows of an input that are in a tile, all of which have to belong to this task.
    #[inline(always)]
    pub(crate) fn input<T: Element>(&self, i: usize, tile: &Tile) -> InputTile<'r, T> {
        self.check_tile(T::DTYPE, tile);
        let o = &self.rows.inputs[i];
        let (base, len) = o.row_start(self.rows.tiles, &tile.first);
        // SAFETY: all rows of the tile belong to this task, as was just checked; inputs are only read, for as
        // long as `Rows` borrows them.
        unsafe { InputTile::new(base.cast_const().cast(), len, o.tile_steps(), tile) }
    }

    /// The address of the first output's row of some index; of any value where there is none.
    #[inline(always)]
    pub(crate) fn output_address(&self, index: [usize; 3]) -> usize {
        self.rows.outputs.first().map_or(0, |o| o.row_start(self.rows.tiles, &index).0 as usize)
    }

    /// The rows of an output that are in a tile, all of which have to belong to this task.
    #[inline(always)]
    pub(crate) fn output<T: Element>(&mut self, i: usize, tile: &Tile) -> OutputTile<'_, T> {
        self.check_tile(T::DTYPE, tile);
        let o = &self.rows.outputs[i];
        let (base, len) = o.row_start(self.rows.tiles, &tile.first);
        // SAFETY: all rows of the tile belong to this task, as was just checked; the borrow of `self` keeps
        // others from being held at the same time.
        unsafe { OutputTile::new(base.cast(), len, o.tile_steps(), tile) }
    }

    #[inline(never)]
    fn check_tile(&self, dtype: DType, tile: &Tile) {
        let shape = &self.rows.shape;
        self.rows.check_dtype(dtype);
        let Tile { first: [a, b, c], rows: [outer, inner], entries, .. } = *tile;
        assert!(self.rows.rank == 3 && outer > 0 && inner > 0 && entries > 0);
        assert!(a + outer <= shape[0] && b + entries <= shape[1] && c + inner <= shape[2]);
        // Every row of the tile lies between its first and its last one.
        let first = (a * shape[1] + b) * shape[2] + c;
        let last = ((a + outer - 1) * shape[1] + b + entries - 1) * shape[2] + c + inner - 1;
        assert!(self.range.start <= first && last < self.range.end);
    }

    /// # Safety
    /// `index` is that of a row that this task owns. The caller sees to it that no row is held twice at once,
    /// and none longer than a borrow of `self`.
    unsafe fn row_at<'s, T: Element>(&self, index: &[usize]) -> Row<'s, T, I, O, SO> {
        let rows = self.rows;
        rows.check_dtype(T::DTYPE);
        // SAFETY: each operand's view was checked, when it was made, to hold all elements that an index
        // reaches; `Rows::new` checked its dtype, that rows are contiguous, and that outputs overlap nothing
        // (and a `ViewMut` not itself), and this task is the only owner of the row. The caller promises the
        // rest.
        unsafe {
            Row {
                inputs: rows.inputs.each_ref().map(|o| slice::<T>(o.row_start(rows.tiles, index))),
                outputs: rows
                    .outputs
                    .each_ref()
                    .map(|o| slice_mut::<T>(o.row_start(rows.tiles, index))),
                save: rows
                    .save
                    .each_ref()
                    .map(|o| slice_mut::<T::Real>(o.row_start(rows.tiles, index))),
            }
        }
    }
}

impl Operand {
    /// Its steps along the dimensions of a tile.
    #[inline(always)]
    fn tile_steps(&self) -> [isize; 3] {
        [self.steps[0], self.steps[1], self.steps[2]]
    }
}

impl<const I: usize, const O: usize, const SI: usize, const SO: usize> Rows<'_, I, O, SI, SO> {
    #[inline(always)]
    fn check_dtype(&self, dtype: DType) {
        assert!(dtype == self.dtype, "rows of {} taken as {dtype}", self.dtype);
    }

    /// The address and length of a row of an operand, and the bytes to the next row.
    #[inline(always)]
    fn row_and_step(&self, o: &Operand, index: &[usize]) -> (*mut u8, usize, isize) {
        let (base, len) = o.row_start(self.tiles, index);
        (base, len, index.len().checked_sub(1).map_or(0, |d| o.steps[d]))
    }

    /// `count` rows of an input from an index on.
    ///
    /// # Safety
    /// As for [`InputRows::new`]: there are such rows, of numbers `T`.
    #[inline(always)]
    unsafe fn input_rows<'s, T: Element>(
        &self,
        o: &Operand,
        index: &[usize],
        count: usize,
    ) -> InputRows<'s, T> {
        let (base, len, step) = self.row_and_step(o, index);
        // SAFETY: the caller's promise.
        unsafe { InputRows::new(base.cast_const().cast(), step, count, len) }
    }

    /// `count` rows of an output from an index on.
    ///
    /// # Safety
    /// As for [`OutputRows::new`]: there are such rows, of numbers `T`, and nobody else has them.
    #[inline(always)]
    unsafe fn output_rows<'s, T: Element>(
        &self,
        o: &Operand,
        index: &[usize],
        count: usize,
    ) -> OutputRows<'s, T> {
        let (base, len, step) = self.row_and_step(o, index);
        // SAFETY: the caller's promise.
        unsafe { OutputRows::new(base.cast(), step, count, len) }
    }
}

/// # Safety
/// As for [`std::slice::from_raw_parts`].
#[inline(always)]
unsafe fn slice<'s, T>((p, len): (*mut u8, usize)) -> &'s [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(p.cast(), len) }
}

/// # Safety
/// As for [`std::slice::from_raw_parts_mut`].
#[inline(always)]
unsafe fn slice_mut<'s, T>((p, len): (*mut u8, usize)) -> &'s mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(p.cast(), len) }
}
