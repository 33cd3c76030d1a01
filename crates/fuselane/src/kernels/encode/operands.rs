//! Where encodings take their blocks from, and where they put them.

use super::segments::{Segments, padded};
use crate::kernels::lanes::Lane;
use crate::kernels::sink::{RowSink, Sink};
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::At;
use crate::kernels::tile::{InputTile, OutputTile};
use crate::simd::{Simd, V};

/// Rows that an encoding reads.
pub(crate) trait Input<S: Simd>: Copy {
    /// What a row consists of.
    type Number: Copy;

    fn tile(&self) -> InputTile<'_, Self::Number>;

    /// Where the segments of a row begin.
    fn starts(&self) -> [usize; 4];

    /// How many numbers a segment of `len` features has.
    fn numbers(len: usize) -> usize;

    /// A block of a segment.
    fn load(&self, segment: &[Self::Number], at: At) -> V<S>;
}

/// Rows that an encoding writes.
pub(crate) trait Output<S: Simd>: Sized {
    /// What a row consists of.
    type Number: Copy;
    /// How results become numbers.
    type Round: Copy;
    type Segment<'r>: OutputSegment<S>
    where
        Self: 'r;

    fn tile(&mut self) -> OutputTile<'_, Self::Number>;

    fn round(&self) -> Self::Round;

    /// Where the segments of a row begin.
    fn starts(&self) -> [usize; 4];

    /// Segments of a row.
    fn segments<'r>(
        row: &'r mut [Self::Number],
        cut: Cut,
        round: Self::Round,
    ) -> OneOrTwo<Self::Segment<'r>>
    where
        Self: 'r;
}

/// `len` features that begin at `first`, and as many behind these, which begin at `second`, if there are.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    pub(super) len: usize,
    pub(super) first: usize,
    pub(super) second: Option<usize>,
}

type OneOrTwo<T> = (T, Option<T>);

/// A segment of a row that is written.
pub(crate) trait OutputSegment<S: Simd> {
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
    type Number = S::Elem;

    #[inline(always)]
    fn tile(&self) -> InputTile<'_, S::Elem> {
        self.tile
    }

    #[inline(always)]
    fn starts(&self) -> [usize; 4] {
        first_four(self.segments.features())
    }

    #[inline(always)]
    fn numbers(len: usize) -> usize {
        len
    }

    #[inline(always)]
    fn load(&self, segment: &[S::Elem], at: At) -> V<S> {
        // Into the second-level cache, as the first one holds the tables and scratch of this tile.
        let source = Source::<S>::new(segment, Prefetch::L2(self.tile.ahead()));
        (self.f)(source.load(at))
    }
}

/// Scratch.
#[derive(Clone, Copy)]
pub(super) struct Lanes<'t> {
    pub(super) tile: InputTile<'t, Lane>,
    pub(super) segments: &'t Segments,
}

impl<'t, S: Simd> Input<S> for Lanes<'t> {
    type Number = Lane;

    #[inline(always)]
    fn tile(&self) -> InputTile<'_, Lane> {
        self.tile
    }

    #[inline(always)]
    fn starts(&self) -> [usize; 4] {
        first_four(self.segments.scratch())
    }

    #[inline(always)]
    fn numbers(len: usize) -> usize {
        padded(len)
    }

    #[inline(always)]
    fn load(&self, segment: &[Lane], at: At) -> V<S> {
        V::at(segment, at)
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

/// A segment of a row of elements.
pub(super) struct RoundedSegment<'r, S: Simd, R> {
    sink: RowSink<'r, S>,
    round: R,
}

impl<'t, S, R, const NON_TEMPORAL: bool> Output<S> for Rounded<'t, S, R, NON_TEMPORAL>
where
    S: Simd,
    R: Fn(V<S>) -> S::Packed + Copy,
{
    type Number = S::Elem;
    type Round = R;
    type Segment<'r>
        = RoundedSegment<'r, S, R>
    where
        Self: 'r;

    #[inline(always)]
    fn tile(&mut self) -> OutputTile<'_, S::Elem> {
        self.tile.reborrow()
    }

    #[inline(always)]
    fn round(&self) -> R {
        self.round
    }

    #[inline(always)]
    fn starts(&self) -> [usize; 4] {
        first_four(self.segments.features())
    }

    #[inline(always)]
    fn segments<'r>(row: &'r mut [S::Elem], cut: Cut, round: R) -> OneOrTwo<Self::Segment<'r>>
    where
        Self: 'r,
    {
        let (first, second) = cut.of(row);
        let second = second.map(
            #[inline(always)]
            |row| RoundedSegment::new::<NON_TEMPORAL>(row, round),
        );
        (RoundedSegment::new::<NON_TEMPORAL>(first, round), second)
    }
}

impl<'r, S: Simd, R> RoundedSegment<'r, S, R> {
    #[inline(always)]
    fn new<const NON_TEMPORAL: bool>(row: &'r mut [S::Elem], round: R) -> Self {
        let aligned = (row.as_ptr() as usize).is_multiple_of(S::NON_TEMPORAL_ALIGN);
        assert!(aligned || !NON_TEMPORAL);
        Self { sink: RowSink::new(row, NON_TEMPORAL), round }
    }
}

impl<S: Simd, R: Fn(V<S>) -> S::Packed> OutputSegment<S> for RoundedSegment<'_, S, R> {
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
    type Number = Lane;
    type Round = ();
    type Segment<'r>
        = &'r mut [Lane]
    where
        Self: 'r;

    #[inline(always)]
    fn tile(&mut self) -> OutputTile<'_, Lane> {
        self.tile.reborrow()
    }

    #[inline(always)]
    fn round(&self) {}

    #[inline(always)]
    fn starts(&self) -> [usize; 4] {
        first_four(self.segments.scratch())
    }

    #[inline(always)]
    fn segments<'r>(row: &'r mut [Lane], cut: Cut, _: ()) -> OneOrTwo<Self::Segment<'r>>
    where
        Self: 'r,
    {
        Cut { len: padded(cut.len), ..cut }.of(row)
    }
}

impl<S: Simd> OutputSegment<S> for &mut [Lane] {
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
