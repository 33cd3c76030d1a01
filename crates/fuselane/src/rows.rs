//! The operands of a call, cut into rows: from checked views to slices that kernels work on.
//!
//! [`Rows`] takes the views of a call, checks what all operators ask of them (shapes, dtypes,
//! contiguous rows, no output over an input), and hands out the rows: in parallel, in
//! [`Part`]s that own disjoint ranges of them, and within a part one [`Row`] at a time, or a run of
//! them ([`Runs`]). The kernels above are safe code; this file holds the pointers.

use std::marker::PhantomData;
use std::ops::Range;

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::parallel;
use crate::scratch::Scratch;
use crate::simd::{Appender, Lanes, Line, MAX_LANES, Memory, STREAM_ALIGN};
use crate::view::{MAX_RANK, View, ViewMut};

#[cfg(test)]
thread_local! {
    static STREAMED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Calls `f` with all stores of its calls past the caches, as far as addresses allow.
#[cfg(test)]
pub(crate) fn streamed<R>(f: impl FnOnce() -> R) -> R {
    STREAMED.set(true);
    let result = f();
    STREAMED.set(false);
    result
}

/// A named argument.
pub(crate) type Named<V> = (&'static str, V);

/// Where the rows of one operand lie.
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
}

/// The last dimension cut into column tiles, for reductions along another one.
#[derive(Clone, Copy)]
struct Tiles {
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
    kept: [Operand; SI],
    keeps: [Operand; SO],
    tiles: Option<Tiles>,
    memory: PhantomData<(&'a [u8], &'a mut [u8])>,
}

// SAFETY: the pointers are borrows of plain numbers, shared for inputs and exclusive for outputs;
// `Part`s, the only access to them, own disjoint rows.
unsafe impl<const I: usize, const O: usize, const SI: usize, const SO: usize> Sync
    for Rows<'_, I, O, SI, SO>
{
}

/// Rows that one thread owns.
pub(crate) struct Part<'r, const I: usize, const O: usize, const SI: usize = 0, const SO: usize = 0>
{
    rows: &'r Rows<'r, I, O, SI, SO>,
    range: Range<usize>,
    at: usize,
    index: [usize; MAX_RANK],
}

/// One row of every operand.
pub(crate) struct Row<'r, T: Element, const I: usize, const O: usize, const SO: usize = 0> {
    /// Inputs, in the order they were given to [`Rows::new`].
    pub(crate) inputs: [&'r [T]; I],
    /// Outputs.
    pub(crate) outputs: [&'r mut [T]; O],
    /// Statistics to keep.
    pub(crate) keeps: [&'r mut [T::Real]; SO],
}

/// Rows of one input at equal distances.
pub(crate) struct Run<'r, T: Element> {
    base: *const T,
    /// Bytes from row to row.
    step: isize,
    rows: usize,
    len: usize,
    memory: PhantomData<&'r [T]>,
}

/// Rows of one output at equal distances.
pub(crate) struct RunMut<'r, T: Element> {
    base: *mut T,
    /// Bytes from row to row.
    step: isize,
    rows: usize,
    len: usize,
    memory: PhantomData<&'r mut [T]>,
}

/// The same rows of all operands.
pub(crate) struct Runs<
    'r,
    T: Element,
    const I: usize,
    const O: usize,
    const SI: usize = 0,
    const SO: usize = 0,
> {
    /// The number of rows.
    pub(crate) rows: usize,
    /// Inputs, in the order they were given to [`Rows::new`].
    pub(crate) inputs: [Run<'r, T>; I],
    /// Outputs.
    pub(crate) outputs: [RunMut<'r, T>; O],
    /// Statistics that the forward kept.
    pub(crate) kept: [Run<'r, T::Real>; SI],
    /// Statistics to keep.
    pub(crate) keeps: [RunMut<'r, T::Real>; SO],
}

impl<'r, T: Element> Run<'r, T> {
    const EMPTY: Self =
        Self { base: std::ptr::dangling(), step: 0, rows: 0, len: 0, memory: PhantomData };

    /// Row `row` of this run.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> &'r [T] {
        assert!(row < self.rows);
        // SAFETY: `Part::next_run` made this of rows that its part owns, and `row` is one of them.
        // An absent operand has dangling rows of no length, with step 0.
        unsafe {
            let p = self.base.wrapping_byte_offset(row as isize * self.step);
            std::slice::from_raw_parts(p, self.len)
        }
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

    /// Some rows of it.
    #[inline(always)]
    pub(crate) fn part(&self, first: usize, rows: usize) -> Self {
        assert!(first <= self.rows && rows <= self.rows - first);
        let base = self.base.wrapping_byte_offset(first as isize * self.step);
        Self { base, rows, ..*self }
    }

    /// How many bytes behind a row one begins that is good to ask for while this one is worked
    /// on, whether there is such a row or not.
    #[inline(always)]
    pub(crate) fn ahead(&self) -> isize {
        (AHEAD / self.step.unsigned_abs().max(1)).max(1) as isize * self.step
    }
}

/// How far ahead memory is asked for, in bytes of each operand. Less, and it comes too late; much
/// more, and it has left the first-level cache again. (Softmax of rows of 128, forward and backward, on
/// a Zen 4: 3.61 and 5.2 ms with 1 KiB, 3.63 and 4.7 with 2, 3.90 and 4.8 with 4, 3.90 and 5.1 with 8.)
const AHEAD: usize = 2 << 10;

impl<T: Element> RunMut<'_, T> {
    const EMPTY: Self =
        Self { base: std::ptr::dangling_mut(), step: 0, rows: 0, len: 0, memory: PhantomData };

    /// Whether all rows can be stored past the caches whole. Where only some of their blocks can, as
    /// they happen to be aligned, none should: see [`GridMut::streams`].
    #[inline(always)]
    pub(crate) fn streams(&self) -> bool {
        let aligned = (self.base as usize | self.step as usize).is_multiple_of(STREAM_ALIGN);
        aligned && self.len.is_multiple_of(MAX_LANES)
    }

    /// Whether rows follow each other without gaps.
    #[inline(always)]
    pub(crate) fn dense(&self) -> bool {
        self.step == (self.len * size_of::<T>()) as isize || self.rows == 1
    }

    /// Whether rows are to be appended to each other: where they go past the caches, which not each of them
    /// can by itself.
    #[inline(always)]
    pub(crate) fn appends<L: Lanes>(&self, stream: bool) -> bool {
        <L::Line as Line>::ANY && stream && !self.streams() && self.dense()
    }

    /// Takes all rows, if `taken`, and leaves as many without elements; otherwise gives such.
    #[inline(always)]
    pub(crate) fn take_if(&mut self, taken: bool) -> Self {
        let none = Self { rows: self.rows, ..Self::EMPTY };
        if taken { std::mem::replace(self, none) } else { none }
    }

    /// Writes `len` elements from `start` on, counted from the first one of all rows, which have to be
    /// dense.
    #[inline(always)]
    pub(crate) fn appender<L>(&mut self, (start, len): (usize, usize)) -> Appender<'_, L, T>
    where
        L: Memory<T> + Lanes<Real = T::Real>,
    {
        let all = self.rows * self.len;
        assert!(self.dense() && start <= all && len <= all - start);
        // SAFETY: as for `row`; the rows are one stretch of memory, in which these elements are, as was
        // just checked.
        let stretch = unsafe { std::slice::from_raw_parts_mut(self.base.wrapping_add(start), len) };
        Appender::new(stretch)
    }

    /// All rows; or, if they are to be `appended`, as many without elements, and what writes some of their
    /// elements.
    #[inline(always)]
    pub(crate) fn or_appender<L>(
        &mut self,
        appended: bool,
        place: (usize, usize),
    ) -> (RunMut<'_, T>, Appender<'_, L, T>)
    where
        L: Memory<T> + Lanes<Real = T::Real>,
    {
        match appended {
            true => (RunMut { rows: self.rows, ..RunMut::EMPTY }, self.appender(place)),
            false => (self.part(0, self.rows), Appender::new(&mut [])),
        }
    }

    /// The length of each row.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Some rows of it.
    #[inline(always)]
    pub(crate) fn part(&mut self, first: usize, rows: usize) -> RunMut<'_, T> {
        assert!(first <= self.rows && rows <= self.rows - first);
        let base = self.base.wrapping_byte_offset(first as isize * self.step);
        RunMut { base, rows, ..*self }
    }

    /// Row `row` of this run.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        // SAFETY: as for `Run::row`, or `Stage::of` made this of memory that holds all of its rows; the
        // borrow of `self` keeps two from being held at once.
        unsafe {
            let p = self.base.wrapping_byte_offset(row as isize * self.step);
            std::slice::from_raw_parts_mut(p, self.len)
        }
    }

    /// Two rows, which have to be different ones.
    #[inline(always)]
    pub(crate) fn two_rows(&mut self, [a, b]: [usize; 2]) -> [&mut [T]; 2] {
        assert!(a != b);
        let a: *mut [T] = self.row(a);
        // SAFETY: rows of an output do not overlap, and the result borrows `self` as long as
        // both are held.
        [unsafe { &mut *a }, self.row(b)]
    }
}

/// Memory of a task's own for rows of an output that follow each other without gaps, but begin where
/// no store may go past the caches. They are written here, and leave together, of which all but the
/// ends is aligned.
pub(crate) struct Stage<T: Element> {
    /// Of the thread's, once it is needed.
    memory: Option<Scratch<T::Real>>,
}

impl<T: Element> Stage<T> {
    /// The most bytes that it holds: a part of the second-level cache.
    const MOST: usize = 64 << 10;

    pub(crate) fn new() -> Self {
        Self { memory: None }
    }

    /// Where to write some rows, if that is here.
    #[inline(always)]
    pub(crate) fn of<'s>(&'s mut self, rows: &RunMut<'_, T>) -> Option<RunMut<'s, T>> {
        let bytes = rows.len * size_of::<T>();
        let aligned = (rows.base as usize | bytes).is_multiple_of(STREAM_ALIGN);
        let dense = rows.step == bytes as isize && rows.rows * bytes <= Self::MOST;
        if aligned || !dense {
            return None;
        }
        let needed = (rows.rows * bytes + STREAM_ALIGN).div_ceil(size_of::<T::Real>());
        let memory = self.memory.take().filter(|memory| memory.len() >= needed);
        let memory = self.memory.insert(memory.unwrap_or_else(|| Scratch::new(needed)));
        // As far from a multiple of the alignment as the rows themselves.
        let memory = memory.as_mut_ptr().cast::<T>();
        let distance = (rows.base as usize).wrapping_sub(memory as usize) % STREAM_ALIGN;
        let base = memory.wrapping_byte_add(distance);
        Some(RunMut { base, step: rows.step, rows: rows.rows, len: rows.len, memory: PhantomData })
    }
}

/// Moves rows from a [`Stage`] to where they belong, past the caches.
pub(crate) struct Unstage<'a, 'r, L, T: Element> {
    pub(crate) from: RunMut<'a, T>,
    pub(crate) to: &'a mut RunMut<'r, T>,
    pub(crate) lanes: PhantomData<L>,
}

impl<L, T> crate::simd::Task for Unstage<'_, '_, L, T>
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { from, to, .. } = self;
        assert!(from.rows == to.rows && from.len == to.len && from.step == to.step);
        assert!(to.step == (to.len * size_of::<T>()) as isize);
        let len = to.rows * to.len;
        // SAFETY: both have these rows, and without gaps, as was just checked; `to` is borrowed
        // exclusively, and `from` is ours. Numbers of the stage that nobody has written are those of
        // other scratch.
        let (from, to) = unsafe {
            (
                std::slice::from_raw_parts(from.base, len),
                std::slice::from_raw_parts_mut(to.base, len),
            )
        };
        let head = to.as_ptr().align_offset(STREAM_ALIGN).min(len);
        let body = head + (len - head) / L::N * L::N;
        to[..head].copy_from_slice(&from[..head]);
        for i in (head..body).step_by(L::N) {
            L::read_whole(from, i).write_exact_whole(to, i, true);
        }
        to[body..].copy_from_slice(&from[body..]);
    }
}

/// Which rows (of [`Rows`] of three dimensions) make a patch: those of some neighbouring indices of each
/// dimension.
#[derive(Clone, Copy)]
pub(crate) struct Patch {
    /// The index of the first row.
    pub(crate) first: [usize; 3],
    /// Rows along the first and along the last dimension.
    pub(crate) rows: [usize; 2],
    /// Indices of the second one; see [`Grid::entry`].
    pub(crate) entries: usize,
    /// The first index of the patch that comes next, as far as is known; it may lie anywhere.
    pub(crate) next: [usize; 3],
}

/// Rows of one input at equal distances along two dimensions.
#[derive(Clone, Copy)]
pub(crate) struct Grid<'r, T: Element> {
    base: *const T,
    /// Bytes from row to row.
    steps: [isize; 2],
    rows: [usize; 2],
    len: usize,
    /// How often all of it stands there, in rows of other indices; and the bytes from one to the next.
    entries: (usize, isize),
    /// Bytes from a row to its counterpart in the patch that comes next.
    ahead: isize,
    memory: PhantomData<&'r [T]>,
}

/// Rows of one output at equal distances along two dimensions.
pub(crate) struct GridMut<'r, T: Element> {
    base: *mut T,
    /// Bytes from row to row.
    steps: [isize; 2],
    rows: [usize; 2],
    len: usize,
    /// As in [`Grid`].
    entries: (usize, isize),
    memory: PhantomData<&'r mut [T]>,
}

impl<'r, T: Element> Grid<'r, T> {
    /// Scratch that holds `rows` rows of `len` numbers, one after the other.
    #[inline(always)]
    pub(crate) fn dense(scratch: &'r [T], rows: [usize; 2], len: usize) -> Self {
        Self::strided(scratch, rows, [rows[1] * len, len], len)
    }

    /// Rows of `len` numbers of scratch, with these steps between them.
    #[inline(always)]
    pub(crate) fn strided(
        scratch: &'r [T],
        rows: [usize; 2],
        steps: [usize; 2],
        len: usize,
    ) -> Self {
        let last = rows.map(|rows| rows.saturating_sub(1));
        assert!(last[0] * steps[0] + last[1] * steps[1] + len <= scratch.len());
        let steps = steps.map(|step| (step * size_of::<T>()) as isize);
        let (base, entries) = (scratch.as_ptr(), (1, 0));
        Self { base, steps, rows, len, entries, ahead: 0, memory: PhantomData }
    }

    /// The number of entries, each of which has all rows.
    #[inline(always)]
    pub(crate) fn entries(&self) -> usize {
        self.entries.0
    }

    /// One of the entries. Loops that know of one only, which [`Grid::row`] and the like give, are for
    /// grids that have one.
    #[inline(always)]
    pub(crate) fn entry(&self, m: usize) -> Self {
        let (entries, step) = self.entries;
        assert!(m < entries);
        let base = self.base.wrapping_byte_offset(m as isize * step);
        Self { base, entries: (1, 0), ..*self }
    }

    /// The columns from `start` on, `len` of them, as rows of their own.
    #[inline(always)]
    pub(crate) fn narrow(self, start: usize, len: usize) -> Self {
        assert!(start + len <= self.len);
        Self { base: self.base.wrapping_add(start), len, ..self }
    }

    /// Cuts the rows at three columns.
    #[inline(always)]
    pub(crate) fn cut(self, [a, b, c]: [usize; 3]) -> [Self; 4] {
        let len = self.len;
        [self.narrow(0, a), self.narrow(a, b - a), self.narrow(b, c - b), self.narrow(c, len - c)]
    }

    /// Rows along each of the two dimensions.
    #[inline(always)]
    pub(crate) fn rows(&self) -> [usize; 2] {
        self.rows
    }

    /// The length of each row.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// A row.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize, j: usize) -> &'r [T] {
        assert!(i < self.rows[0] && j < self.rows[1]);
        debug_assert!(self.entries.0 == 1, "one entry of several");
        // SAFETY: `Part::input` made this of rows that its part owns, and this is one of them; or
        // `dense` of a slice that holds them. An absent operand has dangling rows of no length,
        // with steps of 0.
        unsafe { std::slice::from_raw_parts(at(self.base, self.steps, i, j), self.len) }
    }

    /// The whole blocks of a row.
    #[inline(always)]
    pub(crate) fn blocks(&self, i: usize, j: usize) -> &'r [[T; MAX_LANES]] {
        self.row(i, j).as_chunks().0
    }

    /// The whole groups of `K` blocks of a row.
    #[inline(always)]
    pub(crate) fn groups<const K: usize>(&self, i: usize, j: usize) -> &'r [[[T; MAX_LANES]; K]] {
        self.blocks(i, j).as_chunks().0
    }

    /// Asks for the counterpart of a block of a row in the patch that comes next: into the second-level
    /// cache, as the first one holds the tables and scratch of this patch, and can wait for few lines
    /// at a time. (Of the copy, on a Zen 4, cosine backward: 0.55 into the first, 0.86 into the second;
    /// rotate backward 0.77 and 0.84.)
    #[inline(always)]
    pub(crate) fn prefetch_block<L: crate::simd::Lanes>(&self, block: &[T; MAX_LANES]) {
        L::prefetch_far(block.as_ptr().wrapping_byte_offset(self.ahead));
    }

    /// Asks for the cache lines of a row's counterpart in the patch that comes next.
    #[inline(always)]
    pub(crate) fn prefetch_next<L: crate::simd::Lanes>(&self, i: usize, j: usize) {
        let p = at(self.base, self.steps, i, j).wrapping_byte_offset(self.ahead).cast::<u8>();
        for line in 0..(self.len * size_of::<T>()).div_ceil(64) {
            L::prefetch_far(p.wrapping_add(line * 64));
        }
    }
}

impl<'r, T: Element> GridMut<'r, T> {
    /// Cuts the rows in two at a column.
    #[inline(always)]
    pub(crate) fn split_at(self, column: usize) -> [Self; 2] {
        assert!(column <= self.len);
        let Self { base, steps, rows, len, entries, memory } = self;
        let (second, rest) = (base.wrapping_add(column), len - column);
        // Rows of an output do not overlap, and columns neither.
        [
            Self { base, steps, rows, len: column, entries, memory },
            Self { base: second, steps, rows, len: rest, entries, memory },
        ]
    }

    /// As [`Grid::entry`].
    #[inline(always)]
    pub(crate) fn entry(&mut self, m: usize) -> GridMut<'_, T> {
        let &mut Self { base, steps, rows, len, entries: (entries, step), .. } = self;
        assert!(m < entries);
        let base = base.wrapping_byte_offset(m as isize * step);
        GridMut { base, steps, rows, len, entries: (1, 0), memory: PhantomData }
    }

    /// The same rows, for a while.
    #[inline(always)]
    pub(crate) fn reborrow(&mut self) -> GridMut<'_, T> {
        let &mut Self { base, steps, rows, len, entries, .. } = self;
        GridMut { base, steps, rows, len, entries, memory: PhantomData }
    }

    /// Cuts the rows at three columns.
    #[inline(always)]
    pub(crate) fn cut(self, [a, b, c]: [usize; 3]) -> [Self; 4] {
        let [first, rest] = self.split_at(a);
        let [second, rest] = rest.split_at(b - a);
        let [third, last] = rest.split_at(c - b);
        [first, second, third, last]
    }

    /// Scratch that holds `rows` rows of `len` numbers, one after the other.
    #[inline(always)]
    pub(crate) fn dense(scratch: &'r mut [T], rows: [usize; 2], len: usize) -> Self {
        let Grid { steps, entries, .. } = Grid::dense(scratch, rows, len);
        Self { base: scratch.as_mut_ptr(), steps, rows, len, entries, memory: PhantomData }
    }

    /// A row.
    #[inline(always)]
    pub(crate) fn row(&mut self, i: usize, j: usize) -> &mut [T] {
        assert!(i < self.rows[0] && j < self.rows[1]);
        debug_assert!(self.entries.0 == 1, "one entry of several");
        // SAFETY: as for `Grid::row`; the borrow of `self` keeps two from being held at once.
        unsafe {
            std::slice::from_raw_parts_mut(at(self.base, self.steps, i, j).cast_mut(), self.len)
        }
    }

    /// The whole blocks of a row.
    #[inline(always)]
    pub(crate) fn blocks(&mut self, i: usize, j: usize) -> &mut [[T; MAX_LANES]] {
        self.row(i, j).as_chunks_mut().0
    }

    /// Whether every row is aligned for stores past the caches.
    #[inline(always)]
    pub(crate) fn is_aligned(&self) -> bool {
        self.bytes_between().is_multiple_of(STREAM_ALIGN)
    }

    /// A number that is a multiple of a power of two where all addresses of rows are.
    #[inline(always)]
    fn bytes_between(&self) -> usize {
        let ([outer, inner], (_, entry)) = (self.steps, self.entries);
        self.base as usize | outer as usize | inner as usize | entry as usize
    }

    /// Whether every row is of whole groups of two blocks that begin with a cache line each (blocks of
    /// 16 bits; others are cache lines themselves). Lines that are stored past the caches want to be written
    /// as one: on an Emerald Rapids, a copy of rows in two halves, block by block in turns, ran at 40 to 50
    /// GB/s, and line by line at 54 to 60.
    #[inline(always)]
    pub(crate) fn has_lines(&self) -> bool {
        self.bytes_between().is_multiple_of(2 * STREAM_ALIGN)
            && self.len.is_multiple_of(2 * MAX_LANES)
    }

    /// The whole groups of `K` blocks of a row, of a grid that is aligned or has lines with `ALIGNED`,
    /// which spares loops the look at each address.
    #[inline(always)]
    pub(crate) fn groups<const ALIGNED: bool, const K: usize>(
        &mut self,
        i: usize,
        j: usize,
    ) -> &mut [[[T; MAX_LANES]; K]] {
        let blocks = self.blocks(i, j);
        assert!(!ALIGNED || (blocks.as_ptr() as usize).is_multiple_of(K * STREAM_ALIGN));
        blocks.as_chunks_mut().0
    }

    /// Whether rows that are cut into pieces can be stored past the caches altogether. A cache line of
    /// which one part goes past them and another does not is slow: rotate, rows of 80 features in two
    /// halves, took 5.7 ns for 16 elements, and 2.6 all through the caches (rows of 128: 1.2).
    #[inline(always)]
    pub(crate) fn streams(&self, cuts: [usize; 3]) -> bool {
        let [a, b, c] = cuts;
        self.is_aligned() && [a, b, c, self.len].iter().all(|cut| cut.is_multiple_of(MAX_LANES))
    }

    /// [`GridMut::blocks`] of an aligned grid, which spares loops the look at each block's address.
    #[inline(always)]
    pub(crate) fn aligned_blocks(&mut self, i: usize, j: usize) -> &mut [[T; MAX_LANES]] {
        let blocks = self.blocks(i, j);
        assert!((blocks.as_ptr() as usize).is_multiple_of(STREAM_ALIGN));
        blocks
    }

    /// The length of each row.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// Where a row of a grid begins.
#[inline(always)]
fn at<T>(base: *const T, steps: [isize; 2], i: usize, j: usize) -> *const T {
    // The steps of operands without elements are 0, so that this cannot overflow.
    base.wrapping_byte_offset(i as isize * steps[0] + j as isize * steps[1])
}

/// What [`Rows::new`] takes.
pub(crate) struct Operands<'a, const I: usize, const O: usize, const SI: usize, const SO: usize> {
    /// The activations' dtype and the shape of all dimensions but the last: those of this view.
    pub(crate) like: Named<View<'a>>,
    pub(crate) inputs: [Named<Option<View<'a>>>; I],
    pub(crate) outputs: [Named<Option<ViewMut<'a>>>; O],
    /// The last dimension of each statistic.
    pub(crate) statistics_len: usize,
    pub(crate) kept: [Named<Option<View<'a>>>; SI],
    pub(crate) keeps: [Named<Option<ViewMut<'a>>>; SO],
    /// The last dimension of each input, then of each output, where it is not that of `like`.
    pub(crate) input_len: [Option<usize>; I],
    pub(crate) output_len: [Option<usize>; O],
}

impl<'a, const I: usize, const O: usize> Operands<'a, I, O, 0, 0> {
    /// Operands without statistics whose rows are all as long as those of `like`.
    pub(crate) fn plain(
        like: Named<View<'a>>,
        inputs: [Named<Option<View<'a>>>; I],
        outputs: [Named<Option<ViewMut<'a>>>; O],
    ) -> Self {
        Self {
            like,
            inputs,
            outputs,
            statistics_len: 0,
            kept: [],
            keeps: [],
            input_len: [None; I],
            output_len: [None; O],
        }
    }
}

impl<const I: usize, const O: usize, const SI: usize, const SO: usize> Operands<'_, I, O, SI, SO> {
    /// Checks the shape, dtype and rows of each operand, but not whether they overlap.
    pub(crate) fn check(&self, operator: &'static str) -> Result<()> {
        let like = self.like;
        let (dtype, real) = (like.1.dtype(), like.1.dtype().real());
        let Some(&len) = like.1.shape().last() else {
            return Err(Error::new(
                operator,
                like.0,
                "has no dimensions",
                "at least one (rows run along the last)",
            ));
        };
        for (i, &(name, view)) in self.inputs.iter().enumerate() {
            if let Some(view) = view {
                check(operator, &like, name, view, dtype, self.input_len[i].unwrap_or(len))?;
            }
        }
        for (i, (name, view)) in self.outputs.iter().enumerate() {
            if let Some(view) = view {
                let len = self.output_len[i].unwrap_or(len);
                check(operator, &like, name, view.as_view(), dtype, len)?;
            }
        }
        let statistics = self.statistics_len;
        for &(name, view) in &self.kept {
            if let Some(view) = view {
                check(operator, &like, name, view, real, statistics)?;
            }
        }
        for (name, view) in &self.keeps {
            if let Some(view) = view {
                check(operator, &like, name, view.as_view(), real, statistics)?;
            }
        }
        Ok(())
    }
}

/// Checks one operand against the shape of `like` (last dimension `len`) and `dtype`.
fn check(
    operator: &'static str,
    like: &Named<View<'_>>,
    name: &'static str,
    view: View<'_>,
    dtype: DType,
    len: usize,
) -> Result<()> {
    let mut expected = [0; MAX_RANK];
    let rank = like.1.rank();
    expected[..rank].copy_from_slice(like.1.shape());
    expected[rank - 1] = len;
    if view.shape() != &expected[..rank] {
        return Err(Error::new(
            operator,
            name,
            format!("has shape {:?}", view.shape()),
            format!("{:?} (from {} {:?})", &expected[..rank], like.0, like.1.shape()),
        ));
    }
    if view.dtype() != dtype {
        let why = if dtype == like.1.dtype() { "dtype of" } else { "arithmetic type of" };
        return Err(Error::new(
            operator,
            name,
            format!("has dtype {}", view.dtype()),
            format!("{dtype} ({why} {})", like.0),
        ));
    }
    contiguous_rows(operator, name, view)
}

/// The last dimension has to be contiguous.
pub(crate) fn contiguous_rows(
    operator: &'static str,
    name: &'static str,
    view: View<'_>,
) -> Result<()> {
    match (view.shape().last(), view.strides().last()) {
        (Some(&size), Some(&stride)) if size > 1 && stride != 1 && !view.is_empty() => {
            Err(Error::new(
                operator,
                name,
                format!("has stride {stride} in its last dimension"),
                "1 (rows have to be contiguous; permute or copy it first)",
            ))
        }
        _ => Ok(()),
    }
}

/// No output may share memory with an input or another output.
pub(crate) fn disjoint(
    operator: &'static str,
    inputs: &[Named<Option<View<'_>>>],
    outputs: &[Named<View<'_>>],
) -> Result<()> {
    for (i, (name, output)) in outputs.iter().enumerate() {
        let others = inputs
            .iter()
            .filter_map(|&(name, view)| Some((name, view?)))
            .chain(outputs[..i].iter().copied());
        for (other_name, other) in others {
            let (a, b) = (output.span(), other.span());
            if a.start < b.end && b.start < a.end {
                return Err(Error::new(
                    operator,
                    name,
                    format!("overlaps {other_name} in memory"),
                    "memory of its own",
                ));
            }
        }
    }
    Ok(())
}

impl<'a, const I: usize, const O: usize, const SI: usize, const SO: usize> Rows<'a, I, O, SI, SO> {
    /// Checks the operands and collects their rows: all dimensions but the last, in index order.
    pub(crate) fn new(
        operator: &'static str,
        operands: Operands<'a, I, O, SI, SO>,
    ) -> Result<Self> {
        operands.check(operator)?;
        let mut written = Vec::with_capacity(O + SO);
        for (name, view) in operands.outputs.iter().chain(&operands.keeps) {
            if let Some(view) = view {
                written.push((*name, view.as_view()));
            }
        }
        disjoint(operator, &operands.inputs, &written)?;
        disjoint(operator, &operands.kept, &written)?;

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
            kept: operands.kept.map(input),
            keeps: operands.keeps.map(output),
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
        let mut kept: Vec<usize> = Vec::with_capacity(dims.len());
        for &d in dims.iter().rev() {
            if let Some(&inner) = kept.last() {
                let size = self.shape[inner];
                if self.operands().all(|o| o.steps[d] == o.steps[inner] * size as isize) {
                    self.shape[inner] *= self.shape[d];
                    continue;
                }
            }
            kept.push(d);
        }
        kept.reverse();
        let old = self.shape;
        self.shape = [1; MAX_RANK];
        for (i, &d) in kept.iter().enumerate() {
            self.shape[i] = old[d];
        }
        self.for_each_operand(|o| {
            let old = o.steps;
            o.steps = [0; MAX_RANK];
            for (i, &d) in kept.iter().enumerate() {
                o.steps[i] = old[d];
            }
        });
        self.rank = kept.len();
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
    pub(crate) fn columns(mut self, dim: usize, width: usize) -> Self {
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
        self.tiles = Some(Tiles { dim: rank - 1, width });
        self.rank += 1;
        self.count = self.shape[..self.rank].iter().product();
        self
    }

    /// Cuts each row into rows of at most `width`, for operators that work element by element.
    pub(crate) fn tiled(mut self, width: usize) -> Self {
        let (rank, len) = (self.rank, self.operands().map(|o| o.len).max().unwrap_or(0));
        self.shape[rank] = len.div_ceil(width);
        self.for_each_operand(|o| o.steps[rank] = (width * o.size) as isize);
        self.tiles = Some(Tiles { dim: rank, width });
        self.rank += 1;
        self.count = self.shape[..self.rank].iter().product();
        self
    }

    /// Whether stores should go past the caches: where the call's operands do not fit there
    /// together. (A store that misses the caches first reads the line that it is to overwrite.)
    pub(crate) fn stream(&self) -> bool {
        #[cfg(test)]
        if STREAMED.get() {
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
    fn tile(&self, o: &Operand) -> usize {
        self.tiles.map_or(o.len, |t| o.len.min(t.width))
    }

    /// The bytes that one row of all operands takes.
    fn row_bytes(&self) -> usize {
        self.operands().map(|o| self.tile(o) * o.size).sum()
    }

    /// Runs `work` over all rows, in parallel where that pays, in parts of whole groups of
    /// `group` rows.
    pub(crate) fn for_each_part(&self, group: usize, work: impl Fn(Part<'_, I, O, SI, SO>) + Sync) {
        if self.is_empty() {
            return;
        }
        parallel::for_each_range(self.count / group, self.row_bytes() * group, |range| {
            work(self.part(range.start * group..range.end * group));
        });
    }

    /// Runs `work` over rows in a fixed number of blocks (a function of the sizes alone), each
    /// with a vector of partial sums, and adds these vectors in order into `total`.
    pub(crate) fn sum_over_parts<R: crate::dtype::Real>(
        &self,
        group: usize,
        total: &mut [R],
        work: impl Fn(Part<'_, I, O, SI, SO>, &mut [R]) + Sync,
    ) {
        if self.is_empty() {
            return;
        }
        let groups = self.count / group.max(1);
        parallel::sum_over_ranges(groups, self.row_bytes() * group, total, |range, partial| {
            work(self.part(range.start * group..range.end * group), partial);
        });
    }

    /// Runs `work` over groups of `group` rows, in parallel where that pays, each with its own
    /// `len` numbers of `results`.
    pub(crate) fn for_each_group<R: crate::dtype::Real>(
        &self,
        group: usize,
        results: &mut [R],
        len: usize,
        work: impl Fn(Part<'_, I, O, SI, SO>, &mut [R]) + Sync,
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
                work(self.part(i * group..(i + 1) * group), chunk);
            },
        );
    }

    /// Private: the functions above hand out each row once.
    fn part(&self, range: Range<usize>) -> Part<'_, I, O, SI, SO> {
        let at = range.start;
        let mut part = Part { rows: self, range, at, index: [0; MAX_RANK] };
        part.seek(at);
        part
    }

    /// Where a row of an operand begins, and its length.
    #[inline(always)]
    fn place(&self, o: &Operand, index: &[usize]) -> (*mut u8, usize) {
        if o.base.is_null() {
            return (std::ptr::NonNull::<u64>::dangling().as_ptr().cast(), 0);
        }
        let mut offset = 0;
        for (&i, &step) in index.iter().zip(&o.steps) {
            offset += i as isize * step;
        }
        let len = match self.tiles {
            None => o.len,
            Some(t) => o.len.saturating_sub(index[t.dim] * t.width).min(t.width),
        };
        (o.base.wrapping_offset(offset), len)
    }

    /// `rows` rows of an input of numbers `T`, from an index on; see [`Part::next_run`].
    #[inline(always)]
    fn run<T: Element>(&self, o: &Operand, index: &[usize], rows: usize) -> Run<'_, T> {
        let (base, len) = self.place(o, index);
        let step = index.len().checked_sub(1).map_or(0, |d| o.steps[d]);
        Run { base: base.cast_const().cast(), step, rows, len, memory: PhantomData }
    }

    /// [`Rows::run`] of an output.
    #[inline(always)]
    fn run_mut<T: Element>(&self, o: &Operand, index: &[usize], rows: usize) -> RunMut<'_, T> {
        let Run { base, step, len, .. } = self.run::<T>(o, index, rows);
        RunMut { base: base.cast_mut(), step, rows, len, memory: PhantomData }
    }

    fn operands(&self) -> impl Iterator<Item = &Operand> {
        let all = self.inputs.iter().chain(&self.outputs).chain(&self.kept).chain(&self.keeps);
        all.filter(|o| !o.base.is_null())
    }

    fn for_each_operand(&mut self, f: impl FnMut(&mut Operand)) {
        let all = self.inputs.iter_mut().chain(&mut self.outputs);
        let all = all.chain(&mut self.kept).chain(&mut self.keeps);
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

impl<'r, const I: usize, const O: usize, const SI: usize, const SO: usize> Part<'r, I, O, SI, SO> {
    /// The rows of this part, by number.
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

    /// The row at the current place, if it is in this part; then goes on to the next.
    #[inline(always)]
    pub(crate) fn next<T: Element>(&mut self) -> Option<Row<'_, T, I, O, SO>> {
        if self.at >= self.range.end || self.at < self.range.start {
            return None;
        }
        let rank = self.rows.rank;
        // SAFETY: `index` is that of a row within `range`, which this part owns, and the borrow of
        // `self` keeps another row from being held at the same time. (It is taken before the index
        // goes on, as a copy of the index would have to wait for what was written to it last.)
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

    /// Up to `most` rows from the current place on, as many as lie at equal distances (those of one
    /// index of all dimensions but the innermost) in this part; then goes on behind them.
    ///
    /// Inlined, and written in place, so that nothing of it is copied in larger pieces than it was
    /// written in: such a copy waits until that is done, behind all results on their way to memory. (So
    /// would one of the index.) That was a sixth of the time of a softmax of rows of 128.
    #[inline(always)]
    pub(crate) fn next_run<T: Element>(
        &mut self,
        most: usize,
    ) -> Option<Runs<'_, T, I, O, SI, SO>> {
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
        assert!(T::DTYPE == rows.dtype, "rows of {} taken as {}", rows.dtype, T::DTYPE);
        let index = &self.index[..rank];
        let mut runs = Runs {
            rows: count,
            inputs: [const { Run::EMPTY }; I],
            outputs: [const { RunMut::EMPTY }; O],
            kept: [const { Run::EMPTY }; SI],
            keeps: [const { RunMut::EMPTY }; SO],
        };
        for (run, o) in runs.inputs.iter_mut().zip(&rows.inputs) {
            *run = rows.run(o, index, count);
        }
        for (run, o) in runs.outputs.iter_mut().zip(&rows.outputs) {
            *run = rows.run_mut(o, index, count);
        }
        for (run, o) in runs.kept.iter_mut().zip(&rows.kept) {
            *run = rows.run(o, index, count);
        }
        for (run, o) in runs.keeps.iter_mut().zip(&rows.keeps) {
            *run = rows.run_mut(o, index, count);
        }
        self.at += count;
        if count < even {
            self.index[rank - 1] += count;
        } else {
            self.seek(self.at);
        }
        Some(runs)
    }

    /// The rows of an input that are in a patch, all of which have to be in this part.
    #[inline(always)]
    pub(crate) fn input<T: Element>(&self, i: usize, patch: &Patch) -> Grid<'r, T> {
        self.check_patch::<T>(patch);
        let o = &self.rows.inputs[i];
        let mut ahead = 0isize;
        for d in 0..3 {
            let steps = (patch.next[d] as isize).wrapping_sub(patch.first[d] as isize);
            ahead = ahead.wrapping_add(steps.wrapping_mul(o.steps[d]));
        }
        let (base, len) = self.rows.place(o, &patch.first);
        let (base, steps) = (base.cast_const().cast(), [o.steps[0], o.steps[2]]);
        let entries = (patch.entries, if patch.entries > 1 { o.steps[1] } else { 0 });
        Grid { base, steps, rows: patch.rows, len, entries, ahead, memory: PhantomData }
    }

    /// The address of the first output's row of some index; of any value where there is none.
    #[inline(always)]
    pub(crate) fn output_address(&self, index: [usize; 3]) -> usize {
        self.rows.outputs.first().map_or(0, |o| self.rows.place(o, &index).0 as usize)
    }

    /// The rows of an output that are in a patch, all of which have to be in this part.
    #[inline(always)]
    pub(crate) fn output<T: Element>(&mut self, i: usize, patch: &Patch) -> GridMut<'_, T> {
        self.check_patch::<T>(patch);
        let o = &self.rows.outputs[i];
        let (base, len) = self.rows.place(o, &patch.first);
        let (base, steps) = (base.cast(), [o.steps[0], o.steps[2]]);
        let entries = (patch.entries, if patch.entries > 1 { o.steps[1] } else { 0 });
        GridMut { base, steps, rows: patch.rows, len, entries, memory: PhantomData }
    }

    #[inline(always)]
    fn check_patch<T: Element>(&self, patch: &Patch) {
        let (dtype, shape) = (self.rows.dtype, &self.rows.shape);
        assert!(T::DTYPE == dtype, "rows of {dtype} taken as {}", T::DTYPE);
        let Patch { first: [a, b, c], rows: [outer, inner], entries, .. } = *patch;
        assert!(self.rows.rank == 3 && outer > 0 && inner > 0 && entries > 0);
        assert!(a + outer <= shape[0] && b + entries <= shape[1] && c + inner <= shape[2]);
        // Every row of the patch lies between its first and its last one.
        let first = (a * shape[1] + b) * shape[2] + c;
        let last = ((a + outer - 1) * shape[1] + b + entries - 1) * shape[2] + c + inner - 1;
        assert!(self.range.start <= first && last < self.range.end);
    }

    /// # Safety
    /// `index` is that of a row that this part owns. The caller sees to it that no row is held
    /// twice at once, and none longer than a borrow of this part.
    unsafe fn row_at<'s, T: Element>(&self, index: &[usize]) -> Row<'s, T, I, O, SO> {
        let rows = self.rows;
        assert!(T::DTYPE == rows.dtype, "rows of {} taken as {}", rows.dtype, T::DTYPE);
        // SAFETY: each operand's view was checked, when it was made, to hold all elements that an
        // index reaches; `Rows::new` checked its dtype, that rows are contiguous, and that outputs
        // overlap nothing (and a `ViewMut` not itself), and this part is the only owner of the
        // row, of which the caller promises the rest.
        unsafe {
            Row {
                inputs: rows.inputs.each_ref().map(|o| slice::<T>(rows.place(o, index))),
                outputs: rows.outputs.each_ref().map(|o| slice_mut::<T>(rows.place(o, index))),
                keeps: rows.keeps.each_ref().map(|o| slice_mut::<T::Real>(rows.place(o, index))),
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{self, Isa, Kernel, Lanes, Math, Memory};

    #[test]
    fn rows_stream_whole_or_not_at_all() {
        let mut memory = Scratch::<f32>::new(4 * 128 + 16);
        // Halves of 40 are a multiple of 32 bytes in f32, but no whole blocks.
        for (len, cut, streams) in
            [(128, 64, true), (96, 48, true), (80, 40, false), (72, 72, false)]
        {
            let rows = GridMut::dense(&mut memory, [2, 2], len);
            assert_eq!(rows.streams([cut, cut, len]), streams, "{len}");
            let rows = GridMut::dense(&mut memory[1..], [2, 2], len);
            assert!(!rows.streams([cut, cut, len]), "{len}");
        }
        for (at, step, len, streams) in
            [(0, 128, 128, true), (0, 100, 96, false), (4, 128, 64, false)]
        {
            let (base, step) = (memory[at..].as_mut_ptr(), 4 * step);
            let run = RunMut { base, step, rows: 2, len, memory: PhantomData };
            assert_eq!(run.streams(), streams, "{at}, {step}, {len}");
        }
    }

    /// Writes 1, 2, ... to rows within `numbers` through a stage.
    struct Staged<'a> {
        numbers: &'a mut Vec<f64>,
        first: usize,
        rows: usize,
        len: usize,
        was_staged: &'a mut bool,
    }

    impl Kernel for Staged<'_> {
        #[inline(always)]
        fn run<L, T>(self)
        where
            T: Element,
            L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
        {
            let Self { first, rows, len, .. } = self;
            let mut memory: Vec<T> = self.numbers.iter().map(|&x| T::from_f64(x)).collect();
            let (base, step) = (memory[first..].as_mut_ptr(), (len * size_of::<T>()) as isize);
            assert!(first + rows * len <= memory.len());
            let mut to = RunMut { base, step, rows, len, memory: PhantomData };
            let mut stage = Stage::new();
            // Twice, as the second time its memory is there already.
            for _ in 0..2 {
                let Some(mut from) = stage.of(&to) else { return };
                *self.was_staged = true;
                for row in 0..rows {
                    for (i, x) in from.row(row).iter_mut().enumerate() {
                        *x = T::from_f64((row * len + i + 1) as f64);
                    }
                }
                L::enter(Unstage::<L, T> { from, to: &mut to, lanes: PhantomData });
                L::fence();
            }
            *self.numbers = memory.iter().map(|x| x.to_f64()).collect();
        }
    }

    #[test]
    fn staged_rows_arrive_and_touch_nothing_else() {
        let dtypes = [DType::F32, DType::BF16, DType::F16, DType::F64];
        let each =
            dtypes.into_iter().flat_map(|dtype| Isa::available().map(move |isa| (dtype, isa)));
        for (dtype, isa) in each {
            let mut any = false;
            for first in 0..20 {
                for (rows, len) in [(1, 1), (1, 7), (2, 8), (3, 31), (5, 33), (7, 17), (2, 16)] {
                    let count = rows * len;
                    let mut numbers = vec![-1.0; first + count + 5];
                    let mut was_staged = false;
                    let kernel = Staged {
                        numbers: &mut numbers,
                        first,
                        rows,
                        len,
                        was_staged: &mut was_staged,
                    };
                    simd::run(isa, dtype, kernel);
                    any |= was_staged;
                    if was_staged {
                        let inside = first..first + count;
                        for (i, &x) in numbers.iter().enumerate() {
                            let want = if inside.contains(&i) { i - first + 1 } else { 0 };
                            assert_eq!(
                                x,
                                if want == 0 { -1.0 } else { want as f64 },
                                "{dtype} {i}"
                            );
                        }
                    }
                }
            }
            assert!(any, "{dtype} {isa}: nothing was staged");
        }
    }
}
