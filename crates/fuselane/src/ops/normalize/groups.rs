//! What the passes of both directions share: how rows are cut into groups, batches, chunks and
//! blocks, and how blocks are read and written.

use std::marker::PhantomData;
use std::ops::Range;

use super::GatePosition;
use crate::dtype::DType;
use crate::ops::act::{Act, specialized};
use crate::ops::parameter;
use crate::rows::RunMut;
use crate::scratch::Scratch;
use crate::simd::{Appender, Lanes, Line, MAX_LANES, Math, Memory, SHORT_LIMIT, Task};
use crate::view::{View, ViewMut};
use crate::{Element, Real};

/// Sums run in lanes within a chunk of this many blocks, and in f64 across chunks: fewer would cost
/// time, and more would cost accuracy.
pub(super) const CHUNK: usize = 128;

/// Of a longer group, what passes hand on is computed anew in each of them, so that no row needs
/// working memory of its own size.
pub(super) const LONG: usize = 1 << 16;

/// Groups that a pass works on, at most, before the next pass comes: what it takes to begin and end a
/// pass, and to wait for a root and a quotient between them, is shared by all.
pub(super) const BATCH: usize = 16;

/// Elements of the groups of a batch, at most: few enough to stay in the first-level cache between the
/// passes. (Twice as many, in rows of 2,048, are 8 % faster where only x is read twice, and 35 % slower
/// where p is kept. Rows of 128: 1.8 times as fast as one by one, backward 1.1 to 1.3 times.)
const BATCH_ELEMENTS: usize = 2048;

/// Rows that the parameters' gradients are summed over before they go to the sum of the part, so
/// that a small addend does not meet a large sum too often.
pub(super) const RECENT: usize = 64;

/// How a row's parameters lie in working memory: in register order, each group from a block's start.
#[derive(Clone, Copy)]
pub(super) struct Groups {
    pub(super) count: usize,
    pub(super) len: usize,
    /// Whether batches are to be of two halves that take turns; see `StaggeredPairs`.
    pub(super) in_turns: bool,
}

impl Groups {
    #[inline(always)]
    pub(super) fn new(d: usize, count: usize) -> Self {
        Self { count, len: d / count, in_turns: false }
    }

    /// Where a group lies in a row.
    #[inline(always)]
    pub(super) fn range(self, group: usize) -> Range<usize> {
        group * self.len..(group + 1) * self.len
    }

    /// Where a group lies in working memory.
    #[inline(always)]
    pub(super) fn registers(self, group: usize) -> Range<usize> {
        let len = self.len.next_multiple_of(MAX_LANES);
        group * len..(group + 1) * len
    }

    /// The length of all groups in working memory.
    #[inline(always)]
    pub(super) fn padded(self) -> usize {
        if self.len == 0 { 0 } else { self.count * self.len.next_multiple_of(MAX_LANES) }
    }

    /// Brings a parameter (empty, if there is none) into working memory.
    #[inline(always)]
    pub(super) fn widen<L>(self, values: &[L::Real]) -> Scratch<L::Real>
    where
        L: Lanes + Memory<<L as Lanes>::Real>,
    {
        let mut registers = Scratch::new(if values.is_empty() { 0 } else { self.padded() });
        if !values.is_empty() {
            for group in 0..self.count {
                let to = &mut registers[self.registers(group)];
                parameter::to_registers::<L>(&values[self.range(group)], to);
            }
        }
        registers
    }

    /// The numbers that one pass over a group hands on to the next; of a long group those of a chunk.
    #[inline(always)]
    pub(super) fn handed_on(self) -> usize {
        if self.len > LONG { CHUNK * MAX_LANES } else { self.len.next_multiple_of(MAX_LANES) }
    }

    /// Working memory for them, of each group of a batch, if there are any.
    #[inline(always)]
    pub(super) fn memory<R: Real>(self, any: bool) -> Scratch<R> {
        Scratch::new(if any { self.batch() * self.handed_on() } else { 0 })
    }

    /// How many groups a pass works on before the next one comes.
    #[inline(always)]
    pub(super) fn batch(self) -> usize {
        let halves = if self.in_turns { 2 } else { 1 };
        halves * (BATCH_ELEMENTS / self.len.max(1)).clamp(1, BATCH / halves)
    }

    /// How many rows make a batch; one, if that has more groups than a batch.
    #[inline(always)]
    pub(super) fn batch_rows(self) -> usize {
        (self.batch() / self.count.max(1)).max(1)
    }

    /// Whether two passes may share a loop (`Staggered` of the forward): where the lanes have registers
    /// enough for both, and what passes hand on is kept.
    #[inline(always)]
    pub(super) fn staggers<L: Lanes>(self) -> bool {
        L::MANY_REGISTERS && (1..=LONG).contains(&self.len)
    }

    /// How many elements behind a batch the next one begins, if groups and rows follow each other.
    #[inline(always)]
    pub(super) fn ahead(self, batch: Batch) -> usize {
        batch.len() * self.len
    }

    /// The batches of some rows: of some rows each, or of some groups of one.
    #[inline(always)]
    pub(super) fn batches(self, rows: usize) -> Batches {
        let steps = (self.batch_rows(), self.batch().min(self.count).max(1));
        Batches { rows, groups: self.count, steps, next: (0, 0) }
    }

    /// What a pass goes over at a time, as elements of a group, from `start` on: all of it; of a long
    /// one, a chunk.
    #[inline(always)]
    pub(super) fn span<L: Lanes>(self, start: usize) -> Option<Range<usize>> {
        let len = if self.len > LONG { CHUNK * L::N } else { self.len };
        (start < self.len).then(|| start..self.len.min(start + len))
    }

    /// Rounds sums in working memory to a gradient.
    pub(super) fn store<R: Real>(self, dtype: DType, sums: &[R], gradient: &mut ViewMut<'_>) {
        let mut values = Scratch::<R>::new(self.count * self.len);
        let values = &mut values[..self.count * self.len];
        if self.len > 0 {
            for group in 0..self.count {
                let to = &mut values[self.range(group)];
                parameter::to_index_order(dtype, &sums[self.registers(group)], to);
            }
        }
        parameter::store(gradient, values);
    }
}

/// Some groups of some rows.
#[derive(Clone, Copy)]
pub(super) struct Batch {
    /// The first row of a run and the one behind the last.
    pub(super) rows: (usize, usize),
    /// The same for groups of each row.
    pub(super) groups: (usize, usize),
    /// Which memory the first one has, of those of a batch.
    pub(super) slot: usize,
}

impl Batch {
    #[inline(always)]
    pub(super) fn len(self) -> usize {
        (self.rows.1 - self.rows.0) * (self.groups.1 - self.groups.0)
    }

    /// The one that has some slot.
    #[inline(always)]
    pub(super) fn one(self, slot: usize) -> Self {
        let groups = self.groups.1 - self.groups.0;
        let (row, group) = (self.rows.0 + slot / groups, self.groups.0 + slot % groups);
        Self { rows: (row, row + 1), groups: (group, group + 1), slot }
    }
}

/// See [`Groups::batches`].
pub(super) struct Batches {
    pub(super) rows: usize,
    pub(super) groups: usize,
    /// Rows and groups of a batch.
    pub(super) steps: (usize, usize),
    /// Where the next one begins.
    pub(super) next: (usize, usize),
}

impl Iterator for Batches {
    type Item = Batch;
    #[inline(always)]
    fn next(&mut self) -> Option<Batch> {
        let ((row, group), (rows, groups)) = (self.next, self.steps);
        let rows = (row, self.rows.min(row + rows));
        let groups = (group, self.groups.min(group + groups));
        self.next = if groups.1 < self.groups { (row, groups.1) } else { (rows.1, 0) };
        (row < self.rows).then_some(Batch { rows, groups, slot: 0 })
    }
}

/// A number for each group of a batch.
pub(super) type Each<N> = [N; BATCH];

/// The bits that are set, by number.
#[inline(always)]
pub(super) fn bits(mut set: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (set != 0).then(|| set.trailing_zeros() as usize);
        set &= set.wrapping_sub(1);
        bit
    })
}

/// Runs `$body` for each span of some groups; see [`Groups::span`]. (A loop by hand: `step_by` would
/// divide, and most groups are of one span.)
macro_rules! for_each_span {
    ($L:ident in $groups:expr, $span:ident => $body:block) => {{
        let (groups, mut start): (Groups, usize) = ($groups, 0);
        while let Some($span) = groups.span::<$L>(start) {
            start = $span.end;
            let $span = &$span;
            $body
        }
    }};
}

/// Runs `$body` for each group of a batch.
macro_rules! for_each_group {
    ($batch:expr, ($row:ident, $group:ident, $slot:ident) => $body:block) => {{
        let batch: Batch = $batch;
        let mut slot = batch.slot;
        for $row in batch.rows.0..batch.rows.1 {
            for $group in batch.groups.0..batch.groups.1 {
                let $slot = slot;
                $body
                slot += 1;
            }
        }
    }};
}

/// An optional parameter of `len` numbers, widened, in index order.
pub(super) fn widened<R: Real>(parameter: Option<View<'_>>, len: usize) -> Scratch<R> {
    let mut values = Scratch::new(len);
    if let Some(parameter) = parameter {
        parameter::widen(parameter, &mut values[..len]);
    }
    values
}

/// The part of a group that a pass works on at a time.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    /// Where it starts in the group.
    pub(super) start: usize,
    /// Its length.
    pub(super) len: usize,
    /// Where it starts in [`Groups::memory`].
    pub(super) kept: usize,
}

impl Chunk {
    /// The chunk at `start` of a group of length `len`.
    #[inline(always)]
    pub(super) fn new<L: Lanes>(start: usize, len: usize) -> Self {
        let kept = if len > LONG { 0 } else { start };
        Self { start, len: (CHUNK * L::N).min(len - start), kept }
    }

    /// This part of a row, if it takes part.
    #[inline(always)]
    pub(super) fn of<T>(self, row: &[T], any: bool) -> &[T] {
        if any { &row[self.start..][..self.len] } else { &[] }
    }

    /// [`Chunk::of`], to write.
    #[inline(always)]
    pub(super) fn of_mut<T>(self, row: &mut [T], any: bool) -> &mut [T] {
        if any { &mut row[self.start..][..self.len] } else { &mut [] }
    }

    /// This part of numbers in register order, if they take part.
    #[inline(always)]
    pub(super) fn registers<L: Lanes>(
        self,
        numbers: &[L::Real],
        start: usize,
        any: bool,
    ) -> &[L::Real] {
        let len = self.len.next_multiple_of(L::N);
        if any { &numbers[start..][..len] } else { &[] }
    }

    /// [`Chunk::registers`], to write.
    #[inline(always)]
    pub(super) fn registers_mut<L: Lanes>(
        self,
        numbers: &mut [L::Real],
        start: usize,
        any: bool,
    ) -> &mut [L::Real] {
        let len = self.len.next_multiple_of(L::N);
        if any { &mut numbers[start..][..len] } else { &mut [] }
    }
}

/// Runs `$body` for each block of a chunk of length `$len`: `$i` is its place in the operands,
/// `$whole` whether it is known to be whole, and `$slot` a number for its use. There are several of
/// these, which blocks take in turns: sums, of which one need not wait for the other; or results,
/// which `$end` stores together.
///
/// Blocks go in steps, one for each slot. In a step, the operands that are read and written are slices
/// of known length, which leaves no bound to check. Blocks behind the last step come one by one, and
/// so do all blocks of short lanes.
macro_rules! blocks {
    ($L:ident in $len:expr, read [$($r:ident),*], write [$($w:ident),*],
        ($i:ident, $whole:ident, $slot:ident of [$($slots:ident),*]) => $body:block) => {
        blocks!(@steps $L in $len, read [$($r),*], write [$($w),*],
            ($i, $whole, $slot of [$($slots),*]) => $body then {} rest at {
                $(if at < $len {
                    let ($i, $whole, $slot) = (at, false, &mut $slots);
                    $body
                    at += $L::N;
                    if const { $L::N == MAX_LANES } {
                        continue;
                    }
                })*
            })
    };
    ($L:ident in $len:expr, read [$($r:ident),*], write [$($w:ident),*],
        ($i:ident, $whole:ident, $slot:ident of [$first:ident $(, $more:ident)*]) => $body:block
        then $end:block) => {
        blocks!(@steps $L in $len, read [$($r),*], write [$($w),*],
            ($i, $whole, $slot of [$first $(, $more)*]) => $body then { let $i = 0; $end } rest at {
                let ($i, $whole) = (at, false);
                {
                    let $slot = &mut $first;
                    $body
                }
                $end
                at += $L::N;
            })
    };
    (@steps $L:ident in $len:expr, read [$($r:ident),*], write [$($w:ident),*],
        ($i:ident, $whole:ident, $slot:ident of [$($slots:ident),*]) => $body:block then $end:block
        rest $at:ident $rest:block) => {{
        const STEP: usize = MAX_LANES * [$(stringify!($slots)),*].len();
        let steps = if const { $L::N == MAX_LANES } { $len / STEP } else { 0 };
        {
            $(let $r = super::groups::in_steps::<_, STEP>($r, steps);)*
            $(let $w = super::groups::in_steps_mut::<_, STEP>($w, steps);)*
            for step in 0..steps {
                $(let $r = super::groups::step_of($r, step);)*
                $(let $w = super::groups::step_of_mut($w, step);)*
                let (mut next, $whole) = (0, true);
                $({
                    let ($i, $slot) = (next, &mut $slots);
                    $body
                    next += MAX_LANES;
                })*
                let _ = next;
                $end
            }
        }
        let mut $at = steps * STEP;
        while $at < $len $rest
    }};
}

/// An operand in steps of known length; nothing, if it takes no part.
#[inline(always)]
pub(super) fn in_steps<T, const STEP: usize>(row: &[T], steps: usize) -> &[[T; STEP]] {
    if row.is_empty() { &[] } else { &row.as_chunks().0[..steps] }
}

/// [`in_steps`], to write.
#[inline(always)]
pub(super) fn in_steps_mut<T, const STEP: usize>(row: &mut [T], steps: usize) -> &mut [[T; STEP]] {
    if row.is_empty() { &mut [] } else { &mut row.as_chunks_mut().0[..steps] }
}

/// A step of an operand.
#[inline(always)]
pub(super) fn step_of<T, const STEP: usize>(steps: &[[T; STEP]], step: usize) -> &[T] {
    if steps.is_empty() { &[] } else { &steps[step] }
}

/// [`step_of`], to write.
#[inline(always)]
pub(super) fn step_of_mut<T, const STEP: usize>(steps: &mut [[T; STEP]], step: usize) -> &mut [T] {
    if steps.is_empty() { &mut [] } else { &mut steps[step] }
}

/// What calls come to, by what takes part in them (`$With`, which has a gate that may be `fused`): the
/// number of a usual one ([`USUAL`]), as `$With::usual` lists them, and what its loops know.
macro_rules! kinds {
    ($With:ident) => {
        impl $With {
            /// What the loops of a kind know.
            #[inline(always)]
            fn known<L: Math, const KIND: usize>(self) -> Self {
                if KIND < USUAL {
                    const { Self::usual(KIND, L::HAS_SHORT) }
                } else {
                    Self { fused: None, ..self }
                }
            }

            /// The kind of this call. If it is no usual one, the gate is not fused.
            #[inline(always)]
            fn kind<L: Math>(&mut self) -> usize {
                let (mut kind, with) = (0, *self);
                while kind < USUAL && Self::usual(kind, L::HAS_SHORT) != with {
                    kind += 1;
                }
                if kind == USUAL {
                    self.fused = None;
                }
                kind
            }
        }
    };
}

/// Chooses the loop of a task: that of a usual call, compiled by itself, or that of the others,
/// which looks at what takes part block by block (as all do where the lanes are not fast).
macro_rules! enter {
    ($L:ident, $kind:expr, $Task:ident $fields:tt) => {
        if const { $L::N < MAX_LANES } {
            enter!(@kind $L, { USUAL }, $Task $fields)
        } else {
            match $kind {
                0 => enter!(@kind $L, 0, $Task $fields),
                1 => enter!(@kind $L, 1, $Task $fields),
                2 => enter!(@kind $L, 2, $Task $fields),
                3 => enter!(@kind $L, 3, $Task $fields),
                4 => enter!(@kind $L, 4, $Task $fields),
                5 => enter!(@kind $L, 5, $Task $fields),
                6 => enter!(@kind $L, 6, $Task $fields),
                7 if const { $L::HAS_SHORT } => enter!(@kind $L, 7, $Task $fields),
                8 if const { $L::HAS_SHORT } => enter!(@kind $L, 8, $Task $fields),
                _ => enter!(@kind $L, { USUAL }, $Task $fields),
            }
        }
    };
    (@kind $L:ident, $kind:tt, $Task:ident { $($field:tt)* }) => {
        $L::enter($Task::<$L, T, $kind> { $($field)*, lanes: PhantomData })
    };
}

/// How many kinds of calls have loops of their own, forward and backward.
pub(super) const USUAL: usize = 9;

/// The block at `i` of a row, with zeros past its end.
#[inline(always)]
pub(super) fn read<L, T>(row: &[T], i: usize, whole: bool) -> L
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let zero = Real::of(0.0);
    if whole { L::read_whole(row, i) } else { L::read(row, i, zero) }
}

/// Writes the block at `i` of a row, up to its end.
#[inline(always)]
pub(super) fn write<L, T>(block: L, row: &mut [T], i: usize, whole: bool, stream: bool)
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    if whole { block.write_whole(row, i, stream) } else { block.write(row, i, stream) }
}

/// Writes the block at `i` of a row, up to its end. If it is only `nearly` right, a tie is chance, and
/// it takes the cheaper rounding.
#[inline(always)]
pub(super) fn write_block<L, T>(
    block: L,
    row: &mut [T],
    (i, whole): (usize, bool),
    nearly: bool,
    stream: bool,
) where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let packed = packed::<L, T>(block, nearly);
    if whole {
        L::write_aligned(packed, row, i, stream)
    } else {
        L::write_end(packed, row, i, stream)
    }
}

/// A block as it is stored; see [`write_block`].
#[inline(always)]
pub(super) fn packed<L, T>(block: L, nearly: bool) -> <L as Memory<T>>::Packed
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    if nearly { <L as Memory<T>>::nearest(block).pack_exact() } else { block.pack() }
}

/// Writes the blocks of a step, which the row is; or the first of them at `i`, up to the row's end.
/// If they are only `nearly` right, a tie is chance, and they take the cheaper rounding.
#[inline(always)]
pub(super) fn write_step<L, T, const K: usize>(
    blocks: [L; K],
    row: &mut [T],
    (i, whole): (usize, bool),
    nearly: bool,
    stream: bool,
) where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let mut all = [packed::<L, T>(blocks[0], nearly); K];
    if !whole {
        return L::write_end(all[0], row, i, stream);
    }
    for k in 1..K {
        all[k] = packed::<L, T>(blocks[k], nearly);
    }
    L::write_packed(all, row, 0, stream);
}

/// Where the groups of a batch lie among the elements of an output's dense rows, and how many they are;
/// none, if the output is absent.
#[inline(always)]
pub(super) fn stretch<T: Element>(
    output: &RunMut<'_, T>,
    groups: Groups,
    batch: Batch,
) -> (usize, usize) {
    match output.len() {
        0 => (0, 0),
        row => (batch.rows.0 * row + groups.range(batch.groups.0).start, batch.len() * groups.len),
    }
}

/// Whether the results of a batch are to be appended, group behind group, and not to be written to each by
/// itself: where they go past the caches, which not each of them can.
#[inline(always)]
pub(super) fn appends<L: Lanes, T: Element>(
    outputs: &[RunMut<'_, T>],
    (groups, batch): (Groups, Batch),
    stream: bool,
) -> bool {
    let mut present = outputs.iter().filter(|output| output.len() > 0);
    appends_chunks::<L, T>(outputs, (groups, batch.len() * groups.len), stream)
        && present.all(|output| output.dense())
}

/// Whether results are to be appended within each chunk of `len` elements.
#[inline(always)]
pub(super) fn appends_chunks<L: Lanes, T: Element>(
    outputs: &[RunMut<'_, T>],
    (groups, len): (Groups, usize),
    stream: bool,
) -> bool {
    let mut present = outputs.iter().filter(|output| output.len() > 0);
    let wish = <L::Line as Line>::ANY && stream && len >= LEAST_APPENDED;
    let whole = groups.len.is_multiple_of(MAX_LANES);
    wish && (!whole || present.any(|output| !output.streams()))
}

/// Elements that are appended to each other, at least: fewer would be mostly ends, which are stored the
/// ordinary way. (A loop in C, norms of 127 features with ends of their own: 1.4 times as long as with all
/// stores the ordinary way. Of 512, in 16 bits, two in eighteen lines are ends.)
pub(super) const LEAST_APPENDED: usize = 512;

/// [`write_step`] to what rows are appended to, of which `len` elements are in this one.
#[inline(always)]
pub(super) fn append_step<L, T, const K: usize>(
    blocks: [L; K],
    to: &mut Appender<'_, L, T>,
    (i, whole): (usize, bool),
    nearly: bool,
    len: usize,
) where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    for k in 0..if whole { K } else { 1 } {
        to.block(packed::<L, T>(blocks[k], nearly), (i + k * L::N, whole), len);
    }
}

/// The block at `i` of a row of length `len`, with zeros past its end.
#[inline(always)]
pub(super) fn inside<L: Lanes + Memory<<L as Lanes>::Real>>(block: L, i: usize, len: usize) -> L {
    let ones = [Real::of(1.0); MAX_LANES];
    let zero = L::splat(Real::of(0.0));
    let inside = L::read(&ones[..(len - i).min(L::N)], 0, Real::of(0.0));
    L::select(zero.lt(inside), block, zero)
}

/// Asks for what lies `ahead` elements behind the block at `i`, once for each line of the cache. That
/// is the next group's, if groups and rows follow each other: so memory is busy while this row is
/// worked on in the caches.
#[inline(always)]
pub(super) fn prefetch<L: Lanes, T>(row: &[T], i: usize, ahead: usize) {
    for line in lines_ahead::<L, T>(row, i, ahead) {
        // (A gated norm backward took 4 % longer on a Zen 4 with all of it in the second level.)
        if const { L::MANY_REGISTERS } { L::prefetch_far(line) } else { L::prefetch(line) }
    }
}

/// [`prefetch`] in a loop that reads straight on from row to row: what it soon needs, into the first-level
/// cache.
#[inline(always)]
pub(super) fn prefetch_soon<L: Lanes, T>(row: &[T], i: usize) {
    for line in lines_ahead::<L, T>(row, i, SOON / size_of::<T>()) {
        L::prefetch(line);
    }
}

/// How far ahead [`prefetch_soon`] asks, in bytes. (Emerald Rapids, rows of 2,048, backward: 5.3 ns for 16
/// elements with 2 KiB, 5.8 with 4, and 5.7 to 6.0 with 4 to 8 KiB into the second-level cache; with a
/// residual 6.9, 8.0 and 7.7, with a gate 9.1, 10.2 and 9.6.)
const SOON: usize = 2 << 10;

/// The cache lines that lie `ahead` elements behind the block at `i`, if those begin there.
#[inline(always)]
pub(super) fn lines_ahead<L: Lanes, T>(
    row: &[T],
    i: usize,
    ahead: usize,
) -> impl Iterator<Item = *const u8> {
    let (at, bytes) = (i * size_of::<T>(), L::N * size_of::<T>());
    let begins = !row.is_empty() && at % LINE.max(bytes) == 0;
    let next = row.as_ptr().wrapping_add(i + ahead).cast::<u8>();
    let lines = if begins { bytes.div_ceil(LINE) } else { 0 };
    (0..lines).map(move |line| next.wrapping_add(line * LINE))
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// The part of a row that belongs to a group; empty where the operand is absent.
#[inline(always)]
pub(super) fn of_group<T>(row: &[T], range: Range<usize>) -> &[T] {
    if row.is_empty() { row } else { &row[range] }
}

/// [`of_group`], to write.
#[inline(always)]
pub(super) fn of_group_mut<T>(row: &mut [T], range: Range<usize>) -> &mut [T] {
    if row.is_empty() { row } else { &mut row[range] }
}

/// Rounds a scalar to the arithmetic type. Every NaN becomes the usual one, whose payload
/// survives rounding to 16 bits.
#[inline(always)]
pub(super) fn scalar<R: Real>(value: f64) -> R {
    R::of(if value.is_nan() { -f64::NAN } else { value })
}

/// The activations that a gate may be fused with, or none where the lanes have no short forms.
pub(super) const fn short_gates(short: bool) -> [Option<Act>; 2] {
    if short { [Some(Act::Sigmoid), Some(Act::Silu)] } else { [None, None] }
}

/// The activation of a gate that the passes may evaluate themselves, if the call is a usual one. Of
/// a long group they would do so in each pass.
#[inline(always)]
pub(super) fn fusible<L: Math>(act: Act, gate: Option<GatePosition>, len: usize) -> Option<Act> {
    let short = L::HAS_SHORT && gate.is_some() && act.has_short_form() && len <= LONG;
    short.then_some(act)
}

/// g(gate) of a chunk and, unless `slopes` is empty, g'(gate), in register order. They need not be
/// `exactly` right where all that comes of them is stored as the gate is.
#[inline(always)]
pub(super) fn gate_values<L, T>(
    act: Act,
    exactly: bool,
    gate: &[T],
    chunk: Chunk,
    values: &mut [T::Real],
    slopes: &mut [T::Real],
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    /// With `SHORT`, short forms of whole blocks only, and tells whether there are arguments too
    /// large for them; else all from `start` on.
    struct Values<'r, L, T: Element, const SHORT: bool> {
        act: Act,
        gate: &'r [T],
        start: usize,
        exactly: bool,
        values: &'r mut [T::Real],
        slopes: &'r mut [T::Real],
        lanes: PhantomData<L>,
    }
    impl<L, T, const SHORT: bool> Task for Values<'_, L, T, SHORT>
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        type Output = bool;
        #[inline(always)]
        fn run(self) -> bool {
            let Self { act, gate, start, exactly, values, slopes, .. } = self;
            let mut noted = L::splat(Real::of(0.0));
            let len = if SHORT { gate.len() / L::N * L::N } else { gate.len() };
            specialized!(act => for i in (start..len).step_by(L::N) {
                let x = read::<L, T>(gate, i, SHORT);
                if SHORT {
                    noted = L::note(gate, i, noted);
                }
                let (value, slope) = if SHORT {
                    act.stored_value_and_slope::<L, true>(x)
                } else if exactly || const { !L::HAS_SHORT } {
                    act.value_and_slope(x)
                } else {
                    act.stored_value_and_slope::<L, false>(x)
                };
                value.set(values, i);
                if !slopes.is_empty() {
                    slope.set(slopes, i);
                }
            });
            SHORT && L::is_far(noted, SHORT_LIMIT)
        }
    }
    let (gate, has_slopes, lanes) = (chunk.of(gate, true), !slopes.is_empty(), PhantomData::<L>);
    let values = chunk.registers_mut::<L>(values, chunk.kept, true);
    let slopes = chunk.registers_mut::<L>(slopes, chunk.kept, has_slopes);
    let mut start = 0;
    if const { L::HAS_SHORT } && !exactly && act.has_short_form() {
        let short = Values::<_, _, true> { act, gate, start, exactly, values, slopes, lanes };
        if !L::enter(short) {
            start = gate.len() / L::N * L::N;
        }
    }
    if start < gate.len() {
        L::enter(Values::<_, _, false> { act, gate, start, exactly, values, slopes, lanes });
    }
}

pub(super) use {blocks, enter, for_each_group, for_each_span, kinds};
