//! Where encodings take their blocks from, and where they put them.

use super::segments::{Segments, padded};
use crate::kernels::lanes::Lane;
use crate::kernels::sink::{RowSink, Sink};
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::At;
use crate::kernels::tile::{InputTile, OutputTile};
use crate::simd::{NON_TEMPORAL_ALIGN, Simd, V};

/// Rows that an encoding reads. A row's index is that of its batch entry, token and head in the tile.
pub(crate) trait Input<S: Simd>: Copy {
    type Row: Copy;

    /// The segments, as rows of their own.
    fn cut(self) -> [Self; 4];

    /// Leaves the first rows and features.
    fn shrink(&mut self, counts: [usize; 3], len: usize);

    fn row(&self, index: [usize; 3]) -> Self::Row;

    /// A block of a row.
    fn load(&self, row: Self::Row, at: At) -> V<S>;
}

/// Rows that an encoding writes.
pub(crate) trait Output<S: Simd>: Sized {
    type Row<'r>: OutputRow<S>
    where
        Self: 'r;

    /// The segments, as rows of their own.
    fn cut(self) -> [Self; 4];

    /// Leaves the first rows and features.
    fn shrink(&mut self, counts: [usize; 3], len: usize);

    fn row(&mut self, index: [usize; 3]) -> Self::Row<'_>;
}

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
    fn cut(self) -> [Self; 4] {
        let [a, b, c, d] = narrow(self.tile, self.segments.features());
        [
            Self { tile: a, ..self },
            Self { tile: b, ..self },
            Self { tile: c, ..self },
            Self { tile: d, ..self },
        ]
    }

    #[inline(always)]
    fn shrink(&mut self, counts: [usize; 3], len: usize) {
        self.tile.shrink(counts, len);
    }

    #[inline(always)]
    fn row(&self, index: [usize; 3]) -> Self::Row {
        // Into the second-level cache, as the first one holds the tables and scratch of this tile.
        Source::new(self.tile.row(index), Prefetch::L2(self.tile.ahead()))
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
    fn cut(self) -> [Self; 4] {
        let [a, b, c, d] = narrow(self.tile, self.segments.scratch());
        [
            Self { tile: a, ..self },
            Self { tile: b, ..self },
            Self { tile: c, ..self },
            Self { tile: d, ..self },
        ]
    }

    #[inline(always)]
    fn shrink(&mut self, counts: [usize; 3], len: usize) {
        self.tile.shrink(counts, padded(len));
    }

    #[inline(always)]
    fn row(&self, index: [usize; 3]) -> Self::Row {
        self.tile.row(index)
    }

    #[inline(always)]
    fn load(&self, row: Self::Row, at: At) -> V<S> {
        V::at(row, at)
    }
}

/// A tensor's elements, which results become by `round`. With `NON_TEMPORAL`, all segments of all rows
/// are aligned.
pub(super) struct Rounded<'t, S: Simd, R, const NON_TEMPORAL: bool> {
    tile: OutputTile<'t, S::Elem>,
    segments: &'t Segments,
    round: R,
}

impl<'t, S: Simd, R, const NON_TEMPORAL: bool> Rounded<'t, S, R, NON_TEMPORAL>
where
    R: Fn(V<S>) -> S::Packed + Copy,
{
    #[inline(always)]
    pub(super) fn new(tile: OutputTile<'t, S::Elem>, segments: &'t Segments, round: R) -> Self {
        Self { tile, segments, round }
    }
}

/// Elements that results are rounded to, to nearest even.
#[inline(always)]
pub(super) fn nearest_even<'t, S: Simd, const NON_TEMPORAL: bool>(
    tile: OutputTile<'t, S::Elem>,
    segments: &'t Segments,
) -> Rounded<'t, S, impl Fn(V<S>) -> S::Packed + Copy, NON_TEMPORAL> {
    Rounded::new(
        tile,
        segments,
        #[inline(always)]
        |value| value.round(),
    )
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
    fn cut(self) -> [Self; 4] {
        let Self { tile, segments, round } = self;
        let [a, b, c, d] = cut(tile, segments.features());
        [
            Self { tile: a, segments, round },
            Self { tile: b, segments, round },
            Self { tile: c, segments, round },
            Self { tile: d, segments, round },
        ]
    }

    #[inline(always)]
    fn shrink(&mut self, counts: [usize; 3], len: usize) {
        self.tile.shrink(counts, len);
    }

    #[inline(always)]
    fn row(&mut self, index: [usize; 3]) -> Self::Row<'_> {
        let row = self.tile.row(index);
        let aligned = (row.as_ptr() as usize).is_multiple_of(NON_TEMPORAL_ALIGN);
        assert!(aligned || !NON_TEMPORAL);
        RoundedRow { sink: RowSink::new(row, NON_TEMPORAL), round: self.round }
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
    fn cut(self) -> [Self; 4] {
        let Self { tile, segments } = self;
        let [a, b, c, d] = cut(tile, segments.scratch());
        [
            Self { tile: a, segments },
            Self { tile: b, segments },
            Self { tile: c, segments },
            Self { tile: d, segments },
        ]
    }

    #[inline(always)]
    fn shrink(&mut self, counts: [usize; 3], len: usize) {
        self.tile.shrink(counts, padded(len));
    }

    #[inline(always)]
    fn row(&mut self, index: [usize; 3]) -> Self::Row<'_> {
        self.tile.row(index)
    }
}

impl<S: Simd> OutputRow<S> for &mut [Lane] {
    #[inline(always)]
    fn put(&mut self, at: At, block: V<S>) {
        block.set_at(self, at);
    }
}

/// The segments of rows to read. (Array by array, as `map` of an array is not inlined.)
#[inline(always)]
fn narrow<T: Copy>(tile: InputTile<'_, T>, edges: [usize; 5]) -> [InputTile<'_, T>; 4] {
    let [start, a, b, c, end] = edges;
    [tile.narrow(start..a), tile.narrow(a..b), tile.narrow(b..c), tile.narrow(c..end)]
}

/// Cuts rows where segments begin.
#[inline(always)]
fn cut<T: Copy>(tile: OutputTile<'_, T>, [_, a, b, c, end]: [usize; 5]) -> [OutputTile<'_, T>; 4] {
    assert!(end <= tile.len());
    let [first, rest] = tile.split_at(a);
    let [second, rest] = rest.split_at(b - a);
    let [third, fourth] = rest.split_at(c - b);
    [first, second, third, fourth]
}
