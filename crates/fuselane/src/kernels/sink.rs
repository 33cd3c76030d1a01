//! Where kernels store: the one place that knows of non-temporal stores and of a row's tail.
//!
//! Non-temporal stores pay where a call's operands do not stay in the caches: an ordinary store first
//! reads the line that it is to overwrite. They need aligned addresses. Rows that have none, but follow
//! each other without gaps, are one span of memory: a [`ShiftedSink`] takes their blocks one after the
//! other, moves them by the distance to the cache line's border (a rotation of bytes, and a choice
//! between what is left of the last line and this one), and writes line after line.

use std::marker::PhantomData;
use std::ops::Range;

use super::rows::OutputRows;
use super::sweep::At;
use crate::simd::{CACHE_LINE, LANES, Line, Simd, V};

/// Takes the blocks of rows.
pub(crate) trait Sink<S: Simd> {
    /// Stores the block at `at` of a row, up to the row's end.
    fn put(&mut self, at: At, packed: S::Packed);
}

/// One row.
pub(crate) struct RowSink<'r, S: Simd> {
    row: &'r mut [S::Elem],
    non_temporal: bool,
    /// A block that waits for the other half of its line.
    first: S::Packed,
}

impl<'r, S: Simd> RowSink<'r, S> {
    /// `non_temporal` is a wish: it is followed if the row is aligned.
    #[inline(always)]
    pub(crate) fn new(row: &'r mut [S::Elem], non_temporal: bool) -> Self {
        let aligned = (row.as_ptr() as usize).is_multiple_of(S::NON_TEMPORAL_ALIGN);
        Self { row, non_temporal: non_temporal && aligned, first: S::round(S::splat(0.0)) }
    }

    /// The block at `at`, for rows that are replaced.
    #[inline(always)]
    pub(crate) fn load(&self, at: At) -> V<S> {
        V::load(self.row, at)
    }
}

impl<S: Simd> Sink<S> for RowSink<'_, S> {
    #[inline(always)]
    fn put(&mut self, at: At, packed: S::Packed) {
        const { assert!(!S::WHOLE_LINES || S::NON_TEMPORAL_ALIGN == CACHE_LINE) };
        if !at.is_full() {
            return store_tail::<S>(packed, self.row, at);
        }
        at.check(self.row.len());
        // SAFETY: the row holds the block, as was just checked. A row that is aligned to lines holds
        // aligned ones in steps, of which the slot tells the halves.
        unsafe {
            let p = self.row.as_mut_ptr().add(at.i);
            if !self.non_temporal {
                S::store(packed, p);
            } else if S::WHOLE_LINES && at.in_step {
                if at.slot.is_multiple_of(2) {
                    self.first = packed;
                } else {
                    S::store_line_non_temporal([self.first, packed], p.sub(LANES));
                }
            } else {
                S::store_non_temporal(packed, p);
            }
        }
    }
}

/// Stores the first elements of a block.
#[inline(always)]
fn store_tail<S: Simd>(packed: S::Packed, row: &mut [S::Elem], at: At) {
    let mut block = [S::Elem::default(); LANES];
    // SAFETY: the array holds a block.
    unsafe { S::store(packed, block.as_mut_ptr()) };
    copy_tail(&block, &mut row[at.i..][..at.n]);
}

/// Copies the first elements of a block, by two copies that overlap. Out of line, so that loops have
/// little of it.
#[inline(never)]
fn copy_tail<T: Copy>(block: &[T; LANES], tail: &mut [T]) {
    /// The first and the last `N` elements, which are all.
    #[inline(always)]
    fn both_ends<T: Copy, const N: usize>(block: &[T; LANES], tail: &mut [T]) {
        let start = tail.len() - N;
        tail[..N].copy_from_slice(&block[..N]);
        tail[start..].copy_from_slice(&block[start..][..N]);
    }
    match tail.len() {
        8.. => both_ends::<_, 8>(block, tail),
        4.. => both_ends::<_, 4>(block, tail),
        2.. => both_ends::<_, 2>(block, tail),
        1 => tail[0] = block[0],
        0 => {}
    }
}

/// Rows that follow each other without gaps, from the beginning of a span of memory on. What it takes
/// beyond the span's end is dropped. Only the lines at the two ends of the span, which others may write
/// to at the same time, are stored the ordinary way and in part.
pub(crate) struct ShiftedSink<'r, S: Simd> {
    /// The line that is being filled.
    at: *mut u8,
    /// The addresses of the first byte and of the one behind the last.
    ends: Range<usize>,
    /// The address of the first line that is all in the span, and the bytes of all such lines.
    inner: (usize, usize),
    /// How many bytes of the line are behind us.
    filled: usize,
    /// What moves a line by that.
    rotation: S::Line,
    /// The bytes that are filled, and a line that has them; what else is in it does not matter.
    filled_bytes: <S::Line as Line>::Bytes,
    begun: S::Line,
    /// A block that waits for the other half of its line.
    first: S::Packed,
    memory: PhantomData<&'r mut [S::Elem]>,
}

impl<'r, S: Simd> ShiftedSink<'r, S> {
    /// Blocks that are a cache line.
    const LINE_BLOCKS: usize = CACHE_LINE.div_ceil(LANES * size_of::<S::Elem>());

    #[inline(always)]
    pub(crate) fn new(span: &'r mut [S::Elem]) -> Self {
        let (start, bytes) = (span.as_mut_ptr().cast::<u8>(), size_of_val(span));
        let (from, filled) = (start as usize, start as usize % CACHE_LINE);
        let first = from.next_multiple_of(CACHE_LINE);
        let lines_end = (from + bytes) / CACHE_LINE * CACHE_LINE;
        let mut new = Self {
            at: start.wrapping_sub(filled),
            ends: from..from + bytes,
            inner: (first, lines_end.saturating_sub(first)),
            filled,
            rotation: S::Line::zero(),
            filled_bytes: S::Line::before(0),
            begun: S::Line::zero(),
            first: S::round(S::splat(0.0)),
            memory: PhantomData,
        };
        new.rotate();
        new
    }

    /// Sets what depends on `filled`.
    #[inline(always)]
    fn rotate(&mut self) {
        self.rotation = S::Line::rotation(self.filled);
        self.filled_bytes = S::Line::before(self.filled);
    }

    /// Takes a line.
    #[inline(always)]
    fn put_line(&mut self, line: S::Line) {
        let rotated = line.rotate(self.rotation);
        self.store(S::Line::select(self.filled_bytes, self.begun, rotated));
        self.begun = rotated;
    }

    /// Takes the first bytes of a line, or all of it.
    #[inline(always)]
    fn put_some(&mut self, line: S::Line, bytes: usize) {
        let rotated = line.rotate(self.rotation);
        let begun = S::Line::select(self.filled_bytes, self.begun, rotated);
        self.filled += bytes;
        if self.filled >= CACHE_LINE {
            self.store(begun);
            self.begun = rotated;
            self.filled -= CACHE_LINE;
        } else {
            self.begun = begun;
        }
        self.rotate();
    }

    /// Stores a line, or what belongs to us of it, and goes on to the next one.
    #[inline(always)]
    fn store(&mut self, line: S::Line) {
        let (first, bytes) = self.inner;
        if (self.at as usize).wrapping_sub(first) < bytes {
            // SAFETY: all of this line is in the span, which is borrowed exclusively.
            unsafe { line.store_non_temporal(self.at) };
        } else {
            self.store_some(line, CACHE_LINE);
        }
        self.at = self.at.wrapping_add(CACHE_LINE);
    }

    /// Stores what belongs to us of the bytes before `end` of a line.
    #[inline(always)]
    fn store_some(&self, line: S::Line, end: usize) {
        let at = self.at as usize;
        let from = self.ends.start.saturating_sub(at);
        let end = self.ends.end.saturating_sub(at).min(end);
        if from < end {
            // SAFETY: these bytes are in the span, and `end` is in the line.
            unsafe { line.store_some(self.at, from..end) };
        }
    }

    /// Stores what is left.
    #[inline(always)]
    pub(crate) fn finish(self) {
        self.store_some(self.begun, self.filled);
    }
}

impl<S: Simd> Sink<S> for &mut ShiftedSink<'_, S> {
    #[inline(always)]
    fn put(&mut self, at: At, packed: S::Packed) {
        if !at.in_step {
            // (Its first half, if a line is two blocks.)
            self.put_some(S::line([packed; 2]), at.n * size_of::<S::Elem>());
        } else if (at.slot + 1).is_multiple_of(ShiftedSink::<S>::LINE_BLOCKS) {
            self.put_line(S::line([self.first, packed]));
        } else {
            self.first = packed;
        }
    }
}

/// The rows of a tile of an output: each by itself, or all as one span of memory.
pub(crate) trait TileSink<'r, S: Simd> {
    type Row<'s>: Sink<S>
    where
        Self: 's;
    fn new(rows: OutputRows<'r, S::Elem>, non_temporal: bool) -> Self;
    /// A row of the tile, which is `len` elements long: the loop's own number, so that blocks within it need no
    /// check. Rows have to be taken in order.
    fn row(&mut self, row: usize, len: usize) -> Self::Row<'_>;
    fn finish(self);
}

/// Each row by itself.
pub(crate) struct RowSinks<'r, S: Simd> {
    rows: OutputRows<'r, S::Elem>,
    non_temporal: bool,
}

impl<'r, S: Simd> TileSink<'r, S> for RowSinks<'r, S> {
    type Row<'s>
        = RowSink<'s, S>
    where
        Self: 's;
    #[inline(always)]
    fn new(rows: OutputRows<'r, S::Elem>, non_temporal: bool) -> Self {
        Self { rows, non_temporal }
    }
    #[inline(always)]
    fn row(&mut self, row: usize, len: usize) -> RowSink<'_, S> {
        RowSink::new(&mut self.rows.row(row)[..len], self.non_temporal)
    }
    #[inline(always)]
    fn finish(self) {}
}

impl<'r, S: Simd> TileSink<'r, S> for ShiftedSink<'r, S> {
    type Row<'s>
        = &'s mut Self
    where
        Self: 's;
    #[inline(always)]
    fn new(rows: OutputRows<'r, S::Elem>, _non_temporal: bool) -> Self {
        ShiftedSink::new(rows.into_span())
    }
    #[inline(always)]
    fn row(&mut self, _row: usize, _len: usize) -> &mut Self {
        self
    }
    #[inline(always)]
    fn finish(self) {
        ShiftedSink::finish(self);
    }
}

/// Whether rows take a [`ShiftedSink`]: where they are to be stored non-temporally, which by themselves
/// they cannot be.
#[inline(always)]
pub(crate) fn takes_shifted<S: Simd>(rows: &OutputRows<'_, S::Elem>, non_temporal: bool) -> bool {
    <S::Line as Line>::ANY && non_temporal && !rows.aligned::<S>() && rows.dense()
}
