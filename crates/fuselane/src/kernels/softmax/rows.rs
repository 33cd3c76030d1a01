//! Softmax over the last dimension: row by row, in tiles of a few where they are short.

use std::marker::PhantomData;

use super::{IN_RANGE, Task, inverse, logarithm};
use crate::exec::scratch::Scratch;
use crate::kernels::lanes::Lane;
use crate::kernels::rows::{InputRows, OutputRows};
use crate::kernels::sink::{RowSink, RowSinks, ShiftedSink, Sink, TileSink, takes_shifted};
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::{At, STEP, chunks, sweep, sweep_blocks, sweep_range};
use crate::simd::{Kernel, LANES, Line, Simd, V};

/// Elements of a row that are summed by lanes; the sums of these chunks are added in f64.
pub(super) const CHUNK: usize = 64 * LANES;
/// The most rows of a tile, and the most elements of several.
pub(super) const TILE_ROWS: usize = 16;
const TILE_ELEMENTS: usize = 2048;
/// Tiles that are pipelined, each with the next: so many that the first and the last, which have no
/// other beside them, do not count.
const PIPELINED_TILES: usize = 64;

/// Rows of `len` elements in a tile, at most.
#[inline(always)]
pub(super) fn tile_rows(len: usize) -> usize {
    (TILE_ELEMENTS / len.max(1)).clamp(1, TILE_ROWS)
}

/// Fills `scratch`, in the order of lanes, with exp(x - max) of a row, and gives 1 / sum.
///
/// Zeros stand past the row's end, up to a whole number of blocks, which `scratch` has to have room
/// for. The softmax is their product, for every row: one with a NaN or a plus infinity has 1 / sum =
/// NaN, and one of nothing but minus infinity has zeros and 1 / sum = infinity.
#[inline(always)]
pub(crate) fn exp_row<S: Simd>(x: Source<'_, S>, scratch: &mut [Lane]) -> f32 {
    let sum = exp_sum::<S>(
        x.without_prefetch(),
        row_shift(x),
        #[inline(always)]
        |at, e| e.set_at(scratch, at),
    );
    inverse(sum, false)
}

/// What a row's exponentials are taken relative to: its maximum, but 0 where that is minus infinity. Of
/// any value where the row has a NaN.
#[inline(always)]
pub(super) fn row_shift<S: Simd>(x: Source<'_, S>) -> f32 {
    let least = f32::NEG_INFINITY;
    let mut max = V::<S>::splat(least);
    sweep::<S>(
        x.len(),
        #[inline(always)]
        |at| max = max.max(x.load(at).up_to(at, least)),
    );
    let max = max.largest();
    if max == least { 0.0 } else { max }
}

/// The sum of exp(x - shift) over a row; `each` takes its blocks.
#[inline(always)]
fn exp_sum<S: Simd>(x: Source<'_, S>, shift: f32, mut each: impl FnMut(At, V<S>)) -> f64 {
    let (shift, mut total) = (V::splat(shift), 0.0);
    for chunk in chunks(x.len(), CHUNK) {
        let mut sum = V::<S>::zero();
        sweep_blocks(
            chunk,
            #[inline(always)]
            |at| {
                let e = (x.load(at) - shift).exp().up_to(at, 0.0);
                each(at, e);
                sum += e;
            },
        );
        total += f64::from(sum.sum());
    }
    total
}

/// Of each row of a tile, the shift and the sum of exp(x - shift); `each` takes the exponentials.
#[inline(always)]
fn shifts_and_sums<S: Simd>(
    x: InputRows<'_, S::Elem>,
    mut each: impl FnMut(usize, At, V<S>),
) -> ([f32; TILE_ROWS], [f64; TILE_ROWS]) {
    S::call(
        #[inline(always)]
        move || {
            let (mut shifts, mut sums) = ([0.0; TILE_ROWS], [0.0; TILE_ROWS]);
            let ahead = Prefetch::L1(x.ahead());
            for (r, shift) in shifts[..x.count()].iter_mut().enumerate() {
                *shift = row_shift(Source::<S>::new(x.row(r), ahead));
            }
            for (r, sum) in sums[..x.count()].iter_mut().enumerate() {
                *sum = exp_sum(
                    Source::<S>::new(x.row(r), Prefetch::None),
                    shifts[r],
                    #[inline(always)]
                    |at, e| each(r, at, e),
                );
            }
            (shifts, sums)
        },
    )
}

/// Adds the sums of all lanes of each row's block, eight rows at a time.
#[inline(always)]
pub(super) fn add_lanes<S: Simd>(
    blocks: &[S::Block; TILE_ROWS],
    rows: usize,
    sums: &mut [f64; TILE_ROWS],
) {
    let eights = blocks.as_chunks::<8>().0.iter().zip(sums.as_chunks_mut::<8>().0);
    for (blocks, sums) in eights.take(rows.div_ceil(8)) {
        for (sum, lanes) in sums.iter_mut().zip(S::sum_eight(blocks)) {
            *sum += f64::from(lanes);
        }
    }
}

/// Exponentials of a row, without a maximum, to scratch. The tail is summed by itself, so that the
/// loop has no select.
struct ExpRow<'a, S: Simd> {
    x: Source<'a, S>,
    exps: &'a mut [Lane],
    sum: V<S>,
    tail: V<S>,
    /// The sum of x², which takes one instruction, bounds the magnitude of each x.
    squares: V<S>,
}

impl<S: Simd> ExpRow<'_, S> {
    #[inline(always)]
    fn block(&mut self, at: At) {
        let x = self.x.load(at);
        self.squares = x.mul_add(x, self.squares);
        let e = x.exp_fast_in_range().up_to(at, 0.0);
        e.set_at(self.exps, at);
        if at.is_full() {
            self.sum += e;
        } else {
            self.tail = e;
        }
    }
}

/// Exponentials of a row times its scale.
struct ScaleRow<'a, S: Simd, O> {
    exps: &'a [Lane],
    scale: V<S>,
    o: O,
}

impl<S: Simd, O: Sink<S>> ScaleRow<'_, S, O> {
    #[inline(always)]
    fn block(&mut self, at: At) {
        self.o.put(at, (V::<S>::at(self.exps, at) * self.scale).round_ties_away());
    }
}

/// The rows of a tile, to be scaled and written.
struct ScaleTile<'a, 'r, S, T> {
    exps: &'a [Lane],
    scales: [f32; TILE_ROWS],
    count: usize,
    /// The length of a row.
    len: usize,
    o: T,
    rows: PhantomData<&'r S>,
}

impl<'a, 'r, S: Simd, T: TileSink<'r, S>> ScaleTile<'a, 'r, S, T> {
    #[inline(always)]
    fn new(
        exps: &'a [Lane],
        scales: [f32; TILE_ROWS],
        o: OutputRows<'r, S::Elem>,
        non_temporal: bool,
    ) -> Self {
        let (count, len) = (o.count(), o.len());
        Self { exps, scales, count, len, o: T::new(o, non_temporal), rows: PhantomData }
    }

    #[inline(always)]
    fn row(&mut self, r: usize, len: usize) -> ScaleRow<'_, S, T::Row<'_>> {
        let room = len.next_multiple_of(LANES);
        let (exps, scale) = (&self.exps[r * room..][..room], V::splat(self.scales[r]));
        assert!(len <= room);
        ScaleRow { exps, scale, o: self.o.row(r, len) }
    }

    /// Writes the rows from `first` on.
    #[inline(always)]
    fn write_from(mut self, first: usize) {
        for r in first..self.count {
            let len = self.len;
            let mut row = self.row(r, len);
            sweep::<S>(
                len,
                #[inline(always)]
                |at| row.block(at),
            );
        }
        self.o.finish();
    }

    #[inline(always)]
    fn write(self) {
        S::call(
            #[inline(always)]
            move || self.write_from(0),
        );
    }
}

/// Exponentials of the rows of a tile, without a maximum, and their sums. Those that are not in range
/// are done again: see [`exps_and_sums`]; it tells whether there may be some.
///
/// In the same loop, rows of `another` tile are written: so memory is read and written at once, and
/// neither waits for the other.
#[inline(always)]
fn exp_tile<'r, S: Simd, T: TileSink<'r, S>>(
    x: InputRows<'_, S::Elem>,
    exps: &mut [Lane],
    another: Option<ScaleTile<'_, 'r, S, T>>,
) -> ([f64; TILE_ROWS], bool) {
    /// How many times as far ahead memory is asked for by a loop that writes, too: 4 KiB. (On an Emerald
    /// Rapids, other distances were only tried where it does not: 2 and 4 KiB took the same time, 8 KiB
    /// into the second-level cache an eighth to a quarter longer.)
    const FURTHER: isize = 2;
    S::call(
        #[inline(always)]
        move || {
            let (len, count, mut another) = (x.len(), x.count(), another);
            let (room, mut range) = (len.next_multiple_of(LANES), V::<S>::zero());
            assert!(len <= room);
            let ahead = Prefetch::L1(x.ahead() * if another.is_some() { FURTHER } else { 1 });
            let (mut lanes, mut sums) = ([S::splat(0.0); TILE_ROWS], [0.0; TILE_ROWS]);
            for r in 0..count {
                let (x, exps) = (Source::new(x.row(r), ahead), &mut exps[r * room..][..room]);
                let [sum, tail, squares] = [V::zero(); 3];
                let mut row = ExpRow::<S> { x, exps, sum, tail, squares };
                if S::PIPELINE
                    && let Some(tile) = &mut another
                {
                    let mut other = tile.row(r, len);
                    sweep::<S>(
                        len,
                        #[inline(always)]
                        |at| {
                            row.block(at);
                            other.block(at);
                        },
                    );
                } else {
                    for chunk in chunks(len, CHUNK) {
                        if chunk.start > 0 {
                            sums[r] += f64::from(row.sum.sum());
                            row.sum = V::zero();
                        }
                        sweep_range::<S>(
                            chunk,
                            #[inline(always)]
                            |at| row.block(at),
                        );
                    }
                }
                range = row.squares.max(range);
                lanes[r] = row.sum.block();
                if !len.is_multiple_of(LANES) {
                    sums[r] += f64::from(row.tail.sum());
                }
            }
            if S::PIPELINE
                && let Some(tile) = another
            {
                tile.write_from(count);
            }
            add_lanes::<S>(&lanes, count, &mut sums);
            (sums, range.largest() > IN_RANGE * IN_RANGE)
        },
    )
}

/// The largest magnitude in a row; a NaN is none.
#[inline(always)]
fn magnitude<S: Simd>(x: &[S::Elem]) -> f32 {
    let mut largest = V::<S>::zero();
    sweep::<S>(
        x.len(),
        #[inline(always)]
        |at| largest = V::load(x, at).abs().max(largest),
    );
    largest.largest()
}

/// The exponentials of the rows of a tile, and their sums, with `another` tile written on the way.
#[inline(always)]
fn exps_and_sums<'r, S: Simd, T: TileSink<'r, S>>(
    x: InputRows<'_, S::Elem>,
    exps: &mut [Lane],
    another: Option<ScaleTile<'_, 'r, S, T>>,
) -> [f64; TILE_ROWS] {
    let room = x.len().next_multiple_of(LANES);
    if !V::<S>::HAS_FAST {
        let sums = shifts_and_sums::<S>(
            x,
            #[inline(always)]
            |r, at, e| e.set_at(&mut exps[r * room..][..room], at),
        );
        return sums.1;
    }
    let (mut sums, some_out_of_range) = exp_tile::<S, T>(x, exps, another);
    if some_out_of_range {
        for r in 0..x.count() {
            if magnitude::<S>(x.row(r)) > IN_RANGE {
                let exps = &mut exps[r * room..][..room];
                let again = shifts_and_sums::<S>(
                    x.slice(r, 1),
                    #[inline(always)]
                    |_, at, e| e.set_at(exps, at),
                );
                sums[r] = again.1[0];
            }
        }
    }
    sums
}

/// `o = softmax(x)`.
pub(crate) struct ForwardRows<'r>(pub(crate) Task<'r, 1>);

impl Kernel for ForwardRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Task { mut rows, n, zero_masked, non_temporal, .. } = self.0;
        // (Blocks behind the last step of a row ask for no memory, so there has to be a step.)
        let pipelined = S::PIPELINE && V::<S>::HAS_FAST && (STEP..=CHUNK).contains(&n);
        let options = Options { non_temporal, zero_masked, pipelined };
        let (tiles, scratch) = if pipelined { (PIPELINED_TILES, 2) } else { (1, 1) };
        let room = tile_rows(n) * n.next_multiple_of(LANES);
        let mut exps = Scratch::<Lane>::new(scratch * room);
        while let Some(all) = rows.next_rows::<S::Elem>(tiles * tile_rows(n)) {
            let ([x], [o], exps) = (all.inputs, all.outputs, exps.split_at_mut(room));
            if <S::Line as Line>::ANY && takes_shifted::<S>(&o, non_temporal) {
                forward::<S, ShiftedSink<'_, S>>(x, o, exps, options);
            } else {
                forward::<S, RowSinks<'_, S>>(x, o, exps, options);
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Options {
    non_temporal: bool,
    zero_masked: bool,
    /// Whether each tile is written while the next one is read.
    pipelined: bool,
}

#[inline(always)]
fn forward<'r, S: Simd, T: TileSink<'r, S>>(
    x: InputRows<'r, S::Elem>,
    mut o: OutputRows<'r, S::Elem>,
    (mut exps, mut exps_before): (&mut [Lane], &mut [Lane]),
    Options { non_temporal, zero_masked, pipelined }: Options,
) {
    let mut before: Option<(OutputRows<'r, S::Elem>, [f32; TILE_ROWS])> = None;
    for start in (0..x.count()).step_by(tile_rows(x.len())) {
        let count = tile_rows(x.len()).min(x.count() - start);
        let (tile, others) = o.split_at(count);
        o = others;
        let another = match before.take() {
            Some((o, scales)) if S::PIPELINE => {
                Some(ScaleTile::<S, T>::new(exps_before, scales, o, non_temporal))
            }
            _ => None,
        };
        let sums = exps_and_sums::<S, T>(x.slice(start, count), exps, another);
        let mut scales = [0.0; TILE_ROWS];
        for (scale, &sum) in scales.iter_mut().zip(&sums[..count]) {
            *scale = inverse(sum, zero_masked);
        }
        if pipelined {
            before = Some((tile, scales));
            std::mem::swap(&mut exps, &mut exps_before);
        } else {
            ScaleTile::<S, T>::new(exps, scales, tile, non_temporal).write();
        }
    }
    if let Some((o, scales)) = before {
        ScaleTile::<S, T>::new(exps_before, scales, o, non_temporal).write();
    }
}

/// `o = ln(softmax(x))`.
pub(crate) struct ForwardLogRows<'r>(pub(crate) Task<'r, 1>);

impl Kernel for ForwardLogRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Task { mut rows, n, zero_masked, non_temporal, .. } = self.0;
        while let Some(tile) = rows.next_rows::<S::Elem>(tile_rows(n)) {
            let ([x], [mut o]) = (tile.inputs, tile.outputs);
            let (shifts, sums) = shifts_and_sums::<S>(
                x,
                #[inline(always)]
                |_, _, _| {},
            );
            S::call(
                #[inline(always)]
                move || {
                    for r in 0..x.count() {
                        let (x, shift) = (x.row(r), V::<S>::splat(shifts[r]));
                        let logarithm = V::splat(logarithm(sums[r], zero_masked));
                        let mut o = RowSink::<S>::new(o.row(r), non_temporal);
                        sweep::<S>(
                            n,
                            #[inline(always)]
                            |at| {
                                let result = V::load(x, at) - shift - logarithm;
                                o.put(at, result.round_ties_away());
                            },
                        );
                    }
                },
            );
        }
    }
}
