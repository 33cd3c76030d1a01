//! The kernels of the normalization: what both directions share.
//!
//! A row, which may be one of the groups of a row of x, is gone over at least twice: what is done to
//! its elements depends on sums over all of them. Rows go in tiles, pass by pass, so that what it takes
//! to begin and end a pass, and to wait for a root and a quotient between two, is shared by all rows of
//! a tile, while the tile stays in the first-level cache.

pub(crate) mod backward;
pub(crate) mod forward;
mod parts;

use std::hint::black_box;
use std::ops::Range;

use super::lanes::Lane;
use super::param;
use super::rows::OutputRows;
use super::sink::{RowSinks, ShiftedSink, TileSink};
use super::source::Prefetch;
use crate::exec::scratch::Scratch;
use crate::simd::{LANES, Line, Simd, V};

/// Elements of a chunk (see [`chunks`](super::sweep::chunks)): fewer would cost time, and more would cost
/// accuracy.
const CHUNK: usize = 128 * LANES;

/// The most rows of a tile.
const TILE_ROWS: usize = 16;

/// The most elements of a tile of several rows, which stay in the first-level cache between the passes.
/// (Twice as many, in rows of 2,048, are 8 % faster where only x is read twice, and 35 % slower where p is
/// saved. Rows of 128: 1.8 times as fast as one by one, backward 1.1 to 1.3 times.)
const TILE_ELEMENTS: usize = 2048;

/// How many rows of `len` elements a tile has, at most; a multiple of `parts` (see [`OutputRows::parts`]).
fn tile_rows(len: usize, parts: usize) -> usize {
    parts * (TILE_ELEMENTS / len.max(1)).clamp(1, TILE_ROWS / parts)
}

/// What a pass asks for: the tile that comes next, if rows follow each other, `bytes` ahead. So memory is
/// busy while this tile is worked on in the first-level cache.
#[inline(always)]
fn ahead<S: Simd>(bytes: usize) -> Prefetch {
    // (A gated norm backward took 4 % longer on a Zen 4 with all of it in the second level.)
    if S::PIPELINE { Prefetch::L2(bytes as isize) } else { Prefetch::L1(bytes as isize) }
}

/// What a loop asks for that reads straight on from row to row. (Emerald Rapids, rows of 2,048, backward:
/// 5.3 ns for 16 elements with 2 KiB, 5.8 with 4, and 5.7 to 6.0 with 4 to 8 KiB into the second-level
/// cache; with a residual 6.9, 8.0 and 7.7, with a gate 9.1, 10.2 and 9.6.)
const SOON: Prefetch = Prefetch::L1(2 << 10);

/// The activation of a gate, as a type, so that the loops of the usual calls evaluate it themselves.
trait Gate: Copy {
    /// Its value, as exact as its rounding to 16 bits needs.
    fn value<S: Simd>(gate: V<S>) -> V<S>;
    /// Its value, as exact as sums over a row need: what is off in all of their terms is not averaged out, and
    /// would come into the gradient of the weight by way of rstd.
    fn value_for_sums<S: Simd>(gate: V<S>) -> V<S>;
}

#[derive(Clone, Copy)]
struct Sigmoid;

impl Gate for Sigmoid {
    #[inline(always)]
    fn value<S: Simd>(gate: V<S>) -> V<S> {
        gate.sigmoid_fast()
    }
    #[inline(always)]
    fn value_for_sums<S: Simd>(gate: V<S>) -> V<S> {
        gate.sigmoid_for_sums()
    }
}

#[derive(Clone, Copy)]
struct Silu;

impl Gate for Silu {
    #[inline(always)]
    fn value<S: Simd>(gate: V<S>) -> V<S> {
        gate.silu_fast()
    }
    #[inline(always)]
    fn value_for_sums<S: Simd>(gate: V<S>) -> V<S> {
        gate * gate.sigmoid_for_sums()
    }
}

/// The generic composition: any `options`, chosen block by block.
struct Any<'o, Options>(&'o Options);

impl<Options> Clone for Any<'_, Options> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<Options> Copy for Any<'_, Options> {}

impl<'o, Options> Any<'o, Options> {
    /// The compiler does not see through this reference. It would make a loop for each combination of
    /// options.
    #[inline(always)]
    fn new(options: &'o Options) -> Self {
        Self(black_box(options))
    }
}

/// A parameter, cut like the rows of x: each group is a row by itself.
struct ParameterRows {
    lanes: Scratch<Lane>,
    groups: usize,
    /// Numbers from row to row; 0 where there is no parameter.
    width: usize,
}

impl ParameterRows {
    /// `values` are in index order, `groups` rows of `len`; none, if there is no such parameter.
    fn new<S: Simd>(values: &[f32], groups: usize, len: usize) -> Self {
        if values.is_empty() {
            return Self { lanes: Scratch::new(0), groups, width: 0 };
        }
        let width = len.next_multiple_of(LANES);
        Self { lanes: param::rows_to_lanes::<S>(values, groups, len), groups, width }
    }

    /// What belongs to the row of some number, of all rows of a call.
    #[inline(always)]
    fn of_row(&self, row: usize) -> &[Lane] {
        &self.lanes[row % self.groups * self.width..][..self.width]
    }
}

/// What belongs to a row of a tile, of scratch with `width` numbers for each; nothing, if there is none.
#[inline(always)]
fn of_slot(scratch: &[Lane], slot: usize, width: usize) -> &[Lane] {
    if scratch.is_empty() { scratch } else { &scratch[slot * width..][..width] }
}

/// [`of_slot`], to write.
#[inline(always)]
fn of_slot_mut(scratch: &mut [Lane], slot: usize, width: usize) -> &mut [Lane] {
    if scratch.is_empty() { scratch } else { &mut scratch[slot * width..][..width] }
}

/// Rounds a number. Every NaN becomes the usual one, whose payload survives rounding to 16 bits.
#[inline(always)]
fn number(value: f64) -> f32 {
    if value.is_nan() { -f32::NAN } else { value as f32 }
}

/// How the sinks of a tile work.
trait Sinks<S: Simd> {
    type Tile<'r>: TileSink<'r, S>;
}

/// Each row by itself.
struct ByRow;

impl<S: Simd> Sinks<S> for ByRow {
    type Tile<'r> = RowSinks<'r, S>;
}

/// All rows as one span of memory, which is stored non-temporally.
struct AsSpan;

impl<S: Simd> Sinks<S> for AsSpan {
    type Tile<'r> = ShiftedSink<'r, S>;
}

/// The rows of a tile of an output, as a sink.
#[inline(always)]
fn tile_sink<'s, S: Simd, O: Sinks<S>>(
    output: &'s mut OutputRows<'_, S::Elem>,
    tile: &Range<usize>,
    non_temporal: bool,
) -> O::Tile<'s> {
    let non_temporal = non_temporal && output.aligned::<S>();
    O::Tile::new(output.slice(tile.start, tile.len()), non_temporal)
}

/// The least elements of a tile that is stored [`AsSpan`]: of fewer, too many are in lines at the ends,
/// which are stored the ordinary way. (A loop in C, norms of 127 features with ends of their own: 1.4 times
/// as long as with all stores the ordinary way. Of 512, in 16 bits, two in eighteen lines are ends.)
const LEAST_SPAN: usize = 512;

/// Whether the outputs of a tile (absent ones have no elements) are stored [`AsSpan`]: where they are to be
/// stored non-temporally, and not all of their rows can be.
fn stores_span<S: Simd>(
    outputs: &[OutputRows<'_, S::Elem>],
    tile: &Range<usize>,
    non_temporal: bool,
) -> bool {
    if !<S::Line as Line>::ANY || !non_temporal {
        return false;
    }
    let mut present = outputs.iter().filter(|rows| rows.len() > 0);
    let long = |rows: &OutputRows<'_, S::Elem>| {
        (tile.len() == 1 || rows.dense()) && tile.len() * rows.len() >= LEAST_SPAN
    };
    present.clone().all(long) && present.any(|rows| !rows.aligned::<S>())
}
