//! Rows of operands at equal distances, as kernels see them.

use std::marker::PhantomData;
use std::ops::Range;

use crate::dtype::Element;
use crate::simd::Simd;

/// How far ahead of a row memory is prefetched, in bytes of each operand. Less comes too late; much more
/// has left the first-level cache again.
const AHEAD: usize = 2 << 10;

/// Rows of one input at equal distances.
#[derive(Clone, Copy)]
pub(crate) struct InputRows<'r, T: Element> {
    base: *const T,
    /// Bytes from row to row.
    step: isize,
    count: usize,
    len: usize,
    memory: PhantomData<&'r [T]>,
}

/// Rows of one output at equal distances.
pub(crate) struct OutputRows<'r, T: Element> {
    pub(super) base: *mut T,
    /// Bytes from row to row.
    pub(super) step: isize,
    pub(super) count: usize,
    pub(super) len: usize,
    pub(super) memory: PhantomData<&'r mut [T]>,
}

/// The same rows of all operands.
pub(crate) struct OperandRows<
    'r,
    T: Element,
    const I: usize,
    const O: usize,
    const SI: usize = 0,
    const SO: usize = 0,
> {
    /// The number of rows.
    pub(crate) count: usize,
    /// Inputs, in the order of [`Operands`](crate::exec::operands::Operands).
    pub(crate) inputs: [InputRows<'r, T>; I],
    /// Outputs, in the same order.
    pub(crate) outputs: [OutputRows<'r, T>; O],
    /// Statistics that the forward saved.
    pub(crate) saved: [InputRows<'r, T::Real>; SI],
    /// Statistics to save.
    pub(crate) save: [OutputRows<'r, T::Real>; SO],
}

impl<'r, T: Element> InputRows<'r, T> {
    /// Rows without elements.
    pub(crate) const EMPTY: Self =
        Self { base: std::ptr::dangling(), step: 0, count: 0, len: 0, memory: PhantomData };

    /// `count` rows of `len` numbers, `step` bytes from one to the next.
    ///
    /// # Safety
    /// Each row is readable for `'r`, and nobody writes to it meanwhile. Where `len` is 0, it is enough
    /// that their addresses are aligned and not null.
    #[inline(always)]
    pub(crate) unsafe fn new(base: *const T, step: isize, count: usize, len: usize) -> Self {
        Self { base, step, count, len, memory: PhantomData }
    }

    /// One row.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> &'r [T] {
        assert!(row < self.count);
        // SAFETY: this is one of the rows that `new` was promised.
        unsafe {
            let p = self.base.wrapping_byte_offset(row as isize * self.step);
            std::slice::from_raw_parts(p, self.len)
        }
    }

    /// The number of rows.
    #[inline(always)]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The length of each row.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes from row to row.
    #[inline(always)]
    pub(crate) fn step(&self) -> isize {
        self.step
    }

    /// Some columns, as rows of their own.
    #[inline(always)]
    pub(crate) fn narrow(&self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.len);
        Self { base: self.base.wrapping_add(columns.start), len: columns.len(), ..*self }
    }

    /// `count` rows from row `first` on.
    #[inline(always)]
    pub(crate) fn slice(&self, first: usize, count: usize) -> Self {
        assert!(first <= self.count && count <= self.count - first);
        let base = self.base.wrapping_byte_offset(first as isize * self.step);
        Self { base, count, ..*self }
    }

    /// Bytes from a row to the one to prefetch while this one is worked on, whether there is such a row or
    /// not.
    #[inline(always)]
    pub(crate) fn ahead(&self) -> isize {
        (AHEAD / self.step.unsigned_abs().max(1)).max(1) as isize * self.step
    }
}

impl<'r, T: Element> OutputRows<'r, T> {
    /// Rows without elements.
    pub(crate) const EMPTY: Self =
        Self { base: std::ptr::dangling_mut(), step: 0, count: 0, len: 0, memory: PhantomData };

    /// `count` rows of `len` numbers, `step` bytes from one to the next.
    ///
    /// # Safety
    /// Each row is writable for the lifetime of the result, no two overlap, and nobody else comes to them
    /// meanwhile. Where `len` is 0, it is enough that their addresses are aligned and not null.
    #[inline(always)]
    pub(crate) unsafe fn new(base: *mut T, step: isize, count: usize, len: usize) -> Self {
        Self { base, step, count, len, memory: PhantomData }
    }

    /// Whether every row can be stored non-temporally whole. Where only some of the blocks can, as they
    /// happen to be aligned, none should: see [`OutputTile::aligned_at`](super::tile::OutputTile::aligned_at).
    #[inline(always)]
    pub(crate) fn aligned<S: Simd>(&self) -> bool {
        let addresses = self.base as usize | self.step as usize;
        addresses.is_multiple_of(S::NON_TEMPORAL_ALIGN)
            && self.len.is_multiple_of(S::NON_TEMPORAL_UNIT)
    }

    /// Whether rows follow each other without gaps.
    #[inline(always)]
    pub(crate) fn dense(&self) -> bool {
        self.step == (self.len * size_of::<T>()) as isize || self.count == 1
    }

    /// The number of rows.
    #[inline(always)]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The length of each row.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The first `count` rows, and the others.
    #[inline(always)]
    pub(crate) fn split_at(self, count: usize) -> (Self, Self) {
        assert!(count <= self.count);
        let Self { base, step, len, memory, .. } = self;
        let rest = base.wrapping_byte_offset(count as isize * step);
        let others = self.count - count;
        (
            Self { base, step, count, len, memory },
            Self { base: rest, step, count: others, len, memory },
        )
    }

    /// `count` rows from row `first` on.
    #[inline(always)]
    pub(crate) fn slice(&mut self, first: usize, count: usize) -> OutputRows<'_, T> {
        assert!(first <= self.count && count <= self.count - first);
        let base = self.base.wrapping_byte_offset(first as isize * self.step);
        OutputRows { base, count, ..*self }
    }

    /// One row.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.count);
        // SAFETY: this is one of the rows that `new` was promised; the borrow of `self` keeps two from
        // being held at once.
        unsafe {
            let p = self.base.wrapping_byte_offset(row as isize * self.step);
            std::slice::from_raw_parts_mut(p, self.len)
        }
    }

    /// All elements, of rows that follow each other without gaps.
    #[inline(always)]
    pub(crate) fn into_span(self) -> &'r mut [T] {
        assert!(self.dense());
        // SAFETY: the rows that `new` was promised, which have no gaps, as was just checked.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.count * self.len) }
    }

    /// Cuts the rows into parts of equally many, one behind the other; what is left over is in none.
    #[inline(always)]
    pub(crate) fn parts<const N: usize>(self) -> [Self; N] {
        let count = self.count / N;
        std::array::from_fn(
            #[inline(always)]
            |part| {
                let offset = (part * count) as isize * self.step;
                let base = self.base.wrapping_byte_offset(offset);
                Self { base, step: self.step, count, len: self.len, memory: PhantomData }
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::scratch::Scratch;
    use crate::simd::AnyWithSteps;

    #[test]
    fn aligned_are_all_rows_or_none() {
        let mut memory = Scratch::<f32>::new(4 * 128 + 16);
        for (at, step, len, aligned) in
            [(0, 128, 128, true), (0, 100, 96, false), (4, 128, 64, false)]
        {
            let base = memory[at..].as_mut_ptr();
            // SAFETY: two rows that do not overlap, within `memory`, which nobody else has.
            let rows = unsafe { OutputRows::new(base, 4 * step, 2, len) };
            assert_eq!(rows.aligned::<AnyWithSteps>(), aligned, "{at}, {step}, {len}");
        }
    }
}
