//! Stores past the caches for rows that follow each other without gaps and begin anywhere.
//!
//! Such stores need an aligned address, and rows whose size is no multiple of that alignment have none: they
//! begin at changing distances from a cache line's border. But all of them together are one stretch of memory. [`Appender`] takes what is to be written from
//! its beginning on, moves it by the distance to the line's border (a rotation, and a choice between what
//! is left of the last line and this one), and writes line after line. Only the lines at the two ends of the
//! stretch, which others may write to at the same time, are stored the ordinary way and in part.

use std::marker::PhantomData;
use std::ops::Range;

use super::{LINE, Memory};
use crate::dtype::Element;

/// A register of the size of a cache line, as bytes.
pub(crate) trait Line: Copy {
    /// Whether the lanes have such registers. If not, nothing of the following does anything.
    const ANY: bool;
    /// Some bytes of a line.
    type Bytes: Copy;
    /// A line of zeros.
    fn zero() -> Self;
    /// The bytes before `end`, which is less than all.
    fn before(end: usize) -> Self::Bytes;
    /// What [`Line::rotate`] takes to move byte i to i + `by`, which is less than all.
    fn order(by: usize) -> Self;
    /// Moves each byte, and those that leave the line to its beginning.
    fn rotate(self, order: Self) -> Self;
    /// Some bytes of one line, and the others of the other.
    fn select(bytes: Self::Bytes, yes: Self, no: Self) -> Self;
    /// Stores past the caches; a [fence](super::Lanes::fence) has to follow before anyone else, or an
    /// ordinary store, comes to the same place.
    ///
    /// # Safety
    /// `p` points to a writable line, and is aligned to one.
    unsafe fn put_past_caches(self, p: *mut u8);
    /// Stores some bytes, and touches no others.
    ///
    /// # Safety
    /// These bytes behind `p` are writable, and none of them is behind the line.
    unsafe fn put_some(self, p: *mut u8, bytes: Range<usize>);
}

/// For lanes that have none.
impl Line for () {
    const ANY: bool = false;
    type Bytes = ();
    #[inline(always)]
    fn zero() {}
    #[inline(always)]
    fn before(_end: usize) {}
    #[inline(always)]
    fn order(_by: usize) {}
    #[inline(always)]
    fn rotate(self, _order: Self) {}
    #[inline(always)]
    fn select(_bytes: (), _yes: Self, _no: Self) {}
    #[inline(always)]
    unsafe fn put_past_caches(self, _p: *mut u8) {}
    #[inline(always)]
    unsafe fn put_some(self, _p: *mut u8, _bytes: Range<usize>) {}
}

/// Writes a stretch of memory from its beginning on; see the module. What it takes beyond the stretch's
/// end is dropped.
pub(crate) struct Appender<'r, L: Memory<T>, T: Element<Real = L::Real>> {
    /// The line that is being filled.
    at: *mut u8,
    /// The addresses of the first byte and of the one behind the last.
    ends: Range<usize>,
    /// The address of the first line that is all in the stretch, and the bytes of all such lines.
    whole: (usize, usize),
    /// How many bytes of the line are behind us.
    filled: usize,
    /// What moves a line by that.
    order: L::Line,
    /// The bytes that are filled, and a line that has them; what else is in it does not matter.
    kept: <L::Line as Line>::Bytes,
    begun: L::Line,
    /// A block that waits for the other half of its line.
    half: L::Packed,
    memory: PhantomData<&'r mut [T]>,
}

impl<'r, L: Memory<T>, T: Element<Real = L::Real>> Appender<'r, L, T> {
    #[inline(always)]
    pub(crate) fn new(stretch: &'r mut [T]) -> Self {
        let (start, bytes) = (stretch.as_mut_ptr().cast::<u8>(), size_of_val(stretch));
        let (from, filled) = (start as usize, start as usize % LINE);
        let first = from.next_multiple_of(LINE);
        let mut new = Self {
            at: start.wrapping_sub(filled),
            ends: from..from + bytes,
            whole: (first, ((from + bytes) / LINE * LINE).saturating_sub(first)),
            filled,
            order: L::Line::zero(),
            kept: L::Line::before(0),
            begun: L::Line::zero(),
            half: L::splat(T::Real::default()).pack(),
            memory: PhantomData,
        };
        new.turn();
        new
    }

    /// Sets what depends on `filled`.
    #[inline(always)]
    fn turn(&mut self) {
        self.order = L::Line::order(self.filled);
        self.kept = L::Line::before(self.filled);
    }

    /// Writes the block at `i` of a row of `len` elements, up to its end. Blocks that are known to be
    /// `whole` come in steps of whole lines.
    #[inline(always)]
    pub(crate) fn block(&mut self, block: L::Packed, (i, whole): (usize, bool), len: usize) {
        if !whole {
            // (Its first half, if it is two blocks.)
            self.some(L::line([block; 2]), (len - i).min(L::N) * size_of::<T>());
        } else if (i / L::N + 1).is_multiple_of(L::BLOCKS_OF_LINE) {
            self.line(L::line([self.half, block]));
        } else {
            self.half = block;
        }
    }

    /// Writes a line.
    #[inline(always)]
    fn line(&mut self, line: L::Line) {
        let rotated = line.rotate(self.order);
        self.put(L::Line::select(self.kept, self.begun, rotated));
        self.begun = rotated;
    }

    /// Writes the first bytes of a line, or all of it.
    #[inline(always)]
    fn some(&mut self, line: L::Line, bytes: usize) {
        let rotated = line.rotate(self.order);
        let begun = L::Line::select(self.kept, self.begun, rotated);
        self.filled += bytes;
        if self.filled >= LINE {
            self.put(begun);
            self.begun = rotated;
            self.filled -= LINE;
        } else {
            self.begun = begun;
        }
        self.turn();
    }

    /// Stores a line, or what belongs to us of it, and goes on to the next one.
    #[inline(always)]
    fn put(&mut self, line: L::Line) {
        let (first, bytes) = self.whole;
        if (self.at as usize).wrapping_sub(first) < bytes {
            // SAFETY: all of this line is in the stretch, which is borrowed exclusively.
            unsafe { line.put_past_caches(self.at) };
        } else {
            self.put_some(line, LINE);
        }
        self.at = self.at.wrapping_add(LINE);
    }

    /// Stores what belongs to us of the bytes before `end` of a line.
    #[inline(always)]
    fn put_some(&self, line: L::Line, end: usize) {
        let at = self.at as usize;
        let from = self.ends.start.saturating_sub(at);
        let end = self.ends.end.saturating_sub(at).min(end);
        if from < end {
            // SAFETY: these bytes are in the stretch, and `end` is in the line.
            unsafe { line.put_some(self.at, from..end) };
        }
    }

    /// Writes what is left.
    #[inline(always)]
    pub(crate) fn finish(self) {
        self.put_some(self.begun, self.filled);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kernel, Lanes, MAX_LANES, Math, run};
    use super::*;
    use crate::dtype::{DType, Real};
    use crate::simd::Isa;

    /// Appends rows of 1, 2, ... to a stretch that begins some elements behind a line's border.
    struct Rows<'a> {
        rows: usize,
        len: usize,
        offset: usize,
        /// How many of all elements the stretch takes.
        taken: usize,
        written: &'a mut Option<Vec<f64>>,
    }

    impl Kernel for Rows<'_> {
        #[inline(always)]
        fn run<L, T>(self)
        where
            T: Element,
            L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
        {
            if !<L::Line as Line>::ANY {
                return;
            }
            let (len, step) = (self.len, MAX_LANES * <L as Memory<T>>::BLOCKS_OF_LINE);
            let mut memory = vec![T::from_f64(-77.0); self.taken + 4 * LINE];
            let start = memory.as_ptr().align_offset(LINE) + self.offset;
            let stretch = &mut memory[start..start + self.taken];
            let mut appender = Appender::<L, T>::new(stretch);
            for row in 0..self.rows {
                let row: Vec<T> = (0..len).map(|i| T::from_f64(number(row * len + i))).collect();
                let whole = len / step * step;
                for i in (0..whole).step_by(MAX_LANES) {
                    let block = <L as Memory<T>>::read_whole(&row, i);
                    appender.block(<L as Memory<T>>::pack(block), (i % step, true), step);
                }
                for i in (whole..len).step_by(MAX_LANES) {
                    let block = <L as Memory<T>>::read(&row, i, Real::of(-5.0));
                    appender.block(<L as Memory<T>>::pack(block), (i, false), len);
                }
            }
            appender.finish();
            L::fence();
            let (before, rest) = memory.split_at(start);
            let (written, behind) = rest.split_at(self.taken);
            assert!(before.iter().chain(behind).all(|x| x.to_f64() == -77.0), "around it");
            *self.written = Some(written.iter().map(|x| x.to_f64()).collect());
        }
    }

    /// A number that each type has exactly.
    fn number(i: usize) -> f64 {
        (i % 251) as f64
    }

    #[test]
    fn what_is_appended_arrives_and_touches_nothing_else() {
        for (isa, dtype) in Isa::available()
            .flat_map(|isa| [DType::F32, DType::BF16, DType::F16].map(|dtype| (isa, dtype)))
        {
            for len in [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 300] {
                for (rows, offset) in [(0, 3), (1, 0), (1, 31), (2, 1), (5, 0), (5, 7), (40, 16)] {
                    let all: usize = rows * len;
                    for taken in [all, all.saturating_sub(1), all.saturating_sub(40)] {
                        let mut written = None;
                        run(isa, dtype, Rows { rows, len, offset, taken, written: &mut written });
                        let Some(written) = written else { continue };
                        let want: Vec<f64> = (0..taken).map(number).collect();
                        assert!(written == want, "{isa} {dtype} {rows} rows of {len}, {offset}");
                    }
                }
            }
        }
    }
}
