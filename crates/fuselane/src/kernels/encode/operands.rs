//! Where encodings take their blocks from, and where they put them.

use super::segments::{Segments, padded};
use crate::kernels::lanes::Lane;
use crate::kernels::sink::{RowSink, Sink};
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::At;
use crate::kernels::tile::{InputTile, OutputTile};
use crate::simd::{Simd, V};

/// Rows that an encoding reads. A row's index is that of its batch entry, token and head in the tile.
pub(crate) trait Input<S: Simd>: Copy {
    type Row: Copy;

    /// Where the segments of a row begin.
    fn starts(&self) -> [usize; 4];

    /// Leaves the first rows.
    fn shrink(&mut self, counts: [usize; 3]);

    fn row(&self, index: [usize; 3]) -> Self::Row;

    /// `len` features of a row, which begin at `start`.
    fn segment(row: Self::Row, start: usize, len: usize) -> Self::Row;

    /// A block of a row.
    fn load(&self, row: Self::Row, at: At) -> V<S>;
}

/// Rows that an encoding writes.
pub(crate) trait Output<S: Simd>: Sized {
    type Row<'r>: OutputRow<S>
    where
        Self: 'r;

    /// Where the segments of a row begin.
    fn starts(&self) -> [usize; 4];

    /// Leaves the first rows.
    fn shrink(&mut self, counts: [usize; 3]);

    /// Segments of a row.
    fn segments(&mut self, index: [usize; 3], cut: Cut) -> OneOrTwo<Self::Row<'_>>;
}

/// `len` features that begin at `first`, and as many behind these, which begin at `second`, if there are.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    pub(super) len: usize,
    pub(super) first: usize,
    pub(super) second: Option<usize>,
}

type OneOrTwo<T> = (T, Option<T>);

/// A row that is written.
pub(crate) trait OutputRow<S: Simd> {
    /// Takes a block.
    fn put(&mut self, at: At, block: V<S>);
}

/// A tensor's elements, of which `f` makes what is encoded.
#[derive(Clone, Copy)]
pub(super) struct Elements<'t, S: Simd, F> {
    tile: InputTile<'t, S::Elem>,
    segments: &'t Segments,
    f: F,
}

impl<'t, S: Simd, F: Fn(V<S>) -> V<S>> Elements<'t, S, F> {
    #[inline(always)]
    pub(super) fn new(tile: InputTile<'t, S::Elem>, segments: &'t Segments, f: F) -> Self {
        Self { tile, segments, f }
    }
}

impl<'t, S: Simd, F: Fn(V<S>) -> V<S> + Copy> Input<S> for Elements<'t, S, F> {
    type Row = Source<'t, S>;

    #[inline(always)]
    fn starts(&self) -> [usize; 4] {
        first_four(self.segments.features())
    }

    #[inline(always)]
    fn shrink(&mut self, counts: [usize; 3]) {
        self.tile.shrink(counts);
    }

    #[inline(always)]
    fn row(&self, index: [usize; 3]) -> Self::Row {
        // Into the second-level cache, as the first one holds the tables and scratch of this tile.
        Source::new(self.tile.row(index), Prefetch::L2(self.tile.ahead()))
    }

    #[inline(always)]
    fn segment(row: Self::Row, start: usize, len: usize) -> Self::Row {
        row.narrow(start, len)
    }

    #[inline(always)]
    fn load(&self, row: Self::Row, at: At) -> V<S> {
        (self.f)(row.load(at))
    }
}

/// Scratch.
#[derive(Clone, Copy)]
pub(super) struct Lanes<'t> {
    pub(super) tile: InputTile<'t, Lane>,
    pub(super) segments: &'t Segments,
}

impl<'t, S: Simd> Input<S> for Lanes<'t> {
    type Row = &'t [Lane];

    #[inline(always)]
    fn starts(&self) -> [usize; 4] {
        first_four(self.segments.scratch())
    }

    #[inline(always)]
    fn shrink(&mut self, counts: [usize; 3]) {
        self.tile.shrink(counts);
    }

    #[inline(always)]
    fn row(&self, index: [usize; 3]) -> Self::Row {
        self.tile.row(index)
    }

    #[inline(always)]
    fn segment(row: Self::Row, start: usize, len: usize) -> Self::Row {
        &row[start..][..padded(len)]
    }

    #[inline(always)]
    fn load(&self, row: Self::Row, at: At) -> V<S> {
        V::at(row, at)
    }
}

/// A tensor's elements, which results become by `round`. With `NON_TEMPORAL`, all segments of all rows
/// are aligned.
pub(super) struct Rounded<'t, S: Simd, R, const NON_TEMPORAL: bool> {
    pub(super) tile: OutputTile<'t, S::Elem>,
    pub(super) segments: &'t Segments,
    pub(super) round: R,
}

/// What rounds to nearest even, one type for all, so that they share their loops.
#[inline(always)]
pub(super) fn to_nearest_even<S: Simd>() -> impl Fn(V<S>) -> S::Packed + Copy {
    #[inline(always)]
    |value: V<S>| value.round()
}

/// A row of elements.
pub(super) struct RoundedRow<'r, S: Simd, R> {
    sink: RowSink<'r, S>,
    round: R,
}

impl<'t, S, R, const NON_TEMPORAL: bool> Output<S> for Rounded<'t, S, R, NON_TEMPORAL>
where
    S: Simd,
    R: Fn(V<S>) -> S::Packed + Copy,
{
    type Row<'r>
        = RoundedRow<'r, S, R>
    where
        Self: 'r;

    #[inline(always)]
    fn starts(&self) -> [usize; 4] {
        first_four(self.segments.features())
    }

    #[inline(always)]
    fn shrink(&mut self, counts: [usize; 3]) {
        self.tile.shrink(counts);
    }

    #[inline(always)]
    fn segments(&mut self, index: [usize; 3], cut: Cut) -> OneOrTwo<Self::Row<'_>> {
        let round = self.round;
        let (first, second) = cut.of(self.tile.row(index));
        let second = second.map(
            #[inline(always)]
            |row| RoundedRow::new::<NON_TEMPORAL>(row, round),
        );
        (RoundedRow::new::<NON_TEMPORAL>(first, round), second)
    }
}

impl<'r, S: Simd, R> RoundedRow<'r, S, R> {
    #[inline(always)]
    fn new<const NON_TEMPORAL: bool>(row: &'r mut [S::Elem], round: R) -> Self {
        let aligned = (row.as_ptr() as usize).is_multiple_of(S::NON_TEMPORAL_ALIGN);
        assert!(aligned || !NON_TEMPORAL);
        Self { sink: RowSink::new(row, NON_TEMPORAL), round }
    }
}

impl<S: Simd, R: Fn(V<S>) -> S::Packed> OutputRow<S> for RoundedRow<'_, S, R> {
    #[inline(always)]
    fn put(&mut self, at: At, block: V<S>) {
        self.sink.put(at, (self.round)(block));
    }
}

/// Scratch to write to.
pub(super) struct LanesMut<'t> {
    pub(super) tile: OutputTile<'t, Lane>,
    pub(super) segments: &'t Segments,
}

impl<'t, S: Simd> Output<S> for LanesMut<'t> {
    type Row<'r>
        = &'r mut [Lane]
    where
        Self: 'r;

    #[inline(always)]
    fn starts(&self) -> [usize; 4] {
        first_four(self.segments.scratch())
    }

    #[inline(always)]
    fn shrink(&mut self, counts: [usize; 3]) {
        self.tile.shrink(counts);
    }

    #[inline(always)]
    fn segments(&mut self, index: [usize; 3], cut: Cut) -> OneOrTwo<Self::Row<'_>> {
        Cut { len: padded(cut.len), ..cut }.of(self.tile.row(index))
    }
}

impl<S: Simd> OutputRow<S> for &mut [Lane] {
    #[inline(always)]
    fn put(&mut self, at: At, block: V<S>) {
        block.set_at(self, at);
    }
}

/// Where segments begin, without where the last ends.
#[inline(always)]
fn first_four([a, b, c, d, _]: [usize; 5]) -> [usize; 4] {
    [a, b, c, d]
}

impl Cut {
    #[inline(always)]
    fn of<T>(self, row: &mut [T]) -> OneOrTwo<&mut [T]> {
        let Self { len, first, second } = self;
        let Some(second) = second else { return (&mut row[first..][..len], None) };
        let (row, behind) = row.split_at_mut(second);
        (&mut row[first..][..len], Some(&mut behind[..len]))
    }
}
