//! The forward of the normalization.
//!
//! For each row:
//!
//! ```text
//! p = x [+ residual] [* g(gate)]                               a Prologue
//! rstd = 1 / sqrt(mean((p - mean(p))^2) + eps)                 Reduce, then Moments
//! o = (p - mean(p)) * rstd * weight [+ bias] [* g(gate)]       Write, with an Epilogue
//! ```
//!
//! where mean(p) stands for 0 unless the call is centered. A call is a composition of a [`Prologue`] and
//! an [`Epilogue`]: [`Tiles::normalize`] lists the usual ones, whose loops know what they do; [`Any`]
//! serves all others, and chooses block by block. Passes go over a tile of rows: [`Reduce`] sums over what
//! a prologue gives, [`Write`] takes an epilogue's results to a sink. Where there are registers for both,
//! one loop writes a tile and reduces the next one.

use std::ops::Range;

use super::parts::{
    Biased, Centered, Epilogue, Factors, GatedIn, GatedOut, Inputs, Moments, Plain, Prologue,
    Reduce, SavedSum, Sum, SumInPlace, Weighted, Write, WriteAndReduce,
};
use super::{
    Any, AsSpan, ByRow, CHUNK, ParameterRows, SOON, Sigmoid, Silu, Sinks, TILE_ROWS, ahead, number,
    stores_span, tile_rows, tile_sink,
};
use crate::exec::rows::TaskRows;
use crate::exec::scratch::Scratch;
use crate::kernels::act;
use crate::kernels::lanes::Lane;
use crate::kernels::rows::{InputRows, OperandRows};
use crate::kernels::sink::{RowSink, Sink, TileSink};
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::{At, STEP, Sums, chunks, sweep_by, sweep_range};
use crate::ops::act::Act;
use crate::ops::normalize::GatePosition::{self, Post, Pre};
use crate::simd::{Kernel, LANES, Line, Simd, V};

/// What is added to x.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Added {
    Nothing,
    Residual,
    /// The residual; their sum goes to an output.
    ResidualSaved,
    /// The residual, whose memory receives the sum.
    ResidualInPlace,
}

/// The options of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub(crate) added: Added,
    pub(crate) gate: Option<(GatePosition, Act)>,
    pub(crate) center: bool,
    pub(crate) bias: bool,
}

impl Options {
    /// Whether x is normalized and weighted, and no more.
    #[inline(always)]
    fn is_plain(self) -> bool {
        self.added == Added::Nothing && self.gate.is_none() && !self.center && !self.bias
    }
}

/// Normalizes the rows of a task: `groups` rows after another share the parameters.
pub(crate) struct Forward<'r> {
    pub(crate) options: Options,
    pub(crate) eps: f64,
    pub(crate) groups: usize,
    /// The weight with all that is worked into it, of all groups.
    pub(crate) weight: &'r [f32],
    /// The bias of all groups; empty, if there is none.
    pub(crate) bias: &'r [f32],
    /// x, residual and gate; o and x + residual; rstd and mean.
    pub(crate) rows: TaskRows<'r, 3, 2, 0, 2>,
    pub(crate) non_temporal: bool,
}

/// The most bytes of rows that are written in pairs: two of them are asked for ahead, in the first-level
/// cache.
const PAIRED_BYTES: usize = 8 << 10;

impl Kernel for Forward<'_> {
    #[inline(always)]
    fn run<S: Simd>(mut self) {
        let (options, groups, len) = (self.options, self.groups, self.weight.len() / self.groups);
        if len == 0 {
            while let Some(row) = self.rows.next_row::<S::Elem>() {
                for saved in row.save {
                    saved.fill(number(f64::NAN));
                }
            }
            return;
        }
        let in_pairs = S::PIPELINE
            && options.is_plain()
            && groups == 1
            && len.is_multiple_of(STEP)
            && len * size_of::<S::Elem>() <= PAIRED_BYTES;
        let tile_rows = tile_rows(len, if in_pairs { 2 } else { 1 });
        let width = len.next_multiple_of(LANES);
        let scratch = |any: bool| Scratch::new(if any { tile_rows * width } else { 0 });
        let mut saved = scratch(Prologue::<S>::saves_p(Any::new(&options)));
        let mut gate_values = scratch(options.gate.is_some());
        let weight = ParameterRows::new::<S>(self.weight, groups, len);
        let bias = ParameterRows::new::<S>(self.bias, groups, len);
        let mut first = self.rows.range().start;
        while let Some(mut rows) = self.rows.next_rows::<S::Elem>(usize::MAX) {
            let count = rows.count;
            let [o, sum] = &rows.outputs;
            let non_temporal = self.non_temporal;
            Tiles::<S> {
                options,
                eps: self.eps,
                len,
                width,
                tile_rows,
                in_pairs,
                first,
                weight: &weight,
                bias: &bias,
                wish: non_temporal,
                non_temporal: [
                    non_temporal && o.aligned::<S>(),
                    non_temporal && sum.aligned::<S>(),
                ],
                rows: &mut rows,
                saved: &mut saved,
                gate_values: &mut gate_values,
                totals: [0.0; TILE_ROWS],
            }
            .normalize();
            first += count;
        }
    }
}

/// A tile, as some of the rows at hand.
type Tile = Range<usize>;

/// Of each row of a tile, a number.
type OfTile<N> = [N; TILE_ROWS];

/// Rows at equal distances, which go tile by tile.
struct Tiles<'t, 'r, S: Simd> {
    options: Options,
    eps: f64,
    len: usize,
    /// Numbers of scratch from row to row.
    width: usize,
    /// The most rows of a tile, and whether they go in pairs; see [`Tiles::write_and_reduce`].
    tile_rows: usize,
    in_pairs: bool,
    /// The number of the first row, which tells its parameters.
    first: usize,
    weight: &'t ParameterRows,
    bias: &'t ParameterRows,
    /// Whether outputs are to be stored non-temporally, and which of them are, row by row.
    wish: bool,
    non_temporal: [bool; 2],
    rows: &'t mut OperandRows<'r, S::Elem, 3, 2, 0, 2>,
    /// p and g(gate) of a tile.
    saved: &'t mut [Lane],
    gate_values: &'t mut [Lane],
    /// What [`Reduce`] found.
    totals: OfTile<f64>,
}

/// Writes a tile, and reduces the next one, if there is one; as spans of memory, if asked to.
type WriteTile<'p, S> = dyn Fn(&mut Tiles<'_, '_, S>, [&Tile; 2], &OfTile<Moments>, bool) + 'p;

impl<S: Simd> Tiles<'_, '_, S> {
    /// Chooses the composition.
    fn normalize(&mut self) {
        let Options { added, gate, center, bias } = self.options;
        if S::COMPOSED {
            match (added, gate, center, bias) {
                (Added::Nothing, None, false, false) => return self.run(Plain, Weighted),
                (Added::Residual, None, false, false) => return self.run(Sum, Weighted),
                (Added::ResidualSaved, None, false, false) => return self.run(SavedSum, Weighted),
                (Added::ResidualInPlace, None, false, false) => {
                    return self.run(SumInPlace, Weighted);
                }
                (Added::Nothing, None, true, false) => return self.run(Centered, Weighted),
                (Added::Nothing, None, true, true) => return self.run(Centered, Biased),
                _ => {}
            }
        }
        if V::<S>::HAS_FAST && (added, center, bias) == (Added::Nothing, false, false) {
            match gate {
                Some((Pre, Act::Sigmoid)) => return self.run(GatedIn(Sigmoid), Weighted),
                Some((Pre, Act::Silu)) => return self.run(GatedIn(Silu), Weighted),
                Some((Post, Act::Sigmoid)) => return self.run(Plain, GatedOut(Sigmoid)),
                Some((Post, Act::Silu)) => return self.run(Plain, GatedOut(Silu)),
                _ => {}
            }
        }
        let options = self.options;
        self.run(Any::new(&options), Any::new(&options));
    }

    /// Normalizes by a composition.
    fn run<P: Prologue<S>, E: Epilogue<S>>(&mut self, prologue: P, epilogue: E) {
        self.drive(
            [prologue.centers(), S::PIPELINE && P::PIPELINED],
            &|tiles, tile| tiles.reduce(prologue, tile),
            &|tiles, both, moments, span| tiles.write((prologue, epilogue), both, moments, span),
        );
    }

    /// Normalizes tile by tile. The passes are behind pointers, so that this is compiled once for all.
    #[inline(never)]
    fn drive(
        &mut self,
        [centers, pipelined]: [bool; 2],
        reduce: &dyn Fn(&mut Self, Tile),
        write: &WriteTile<'_, S>,
    ) {
        let count = self.rows.count;
        let mut tile = 0..self.tile_rows.min(count);
        reduce(self, tile.clone());
        while !tile.is_empty() {
            let next = tile.end..(tile.end + self.tile_rows).min(count);
            let moments = self.moments(centers, tile.clone());
            let span = stores_span::<S>(&self.rows.outputs[..1], &tile, self.wish);
            if pipelined && next.len() == tile.len() {
                write(self, [&tile, &next], &moments, span);
            } else {
                write(self, [&tile, &(0..0)], &moments, span);
                reduce(self, next.clone());
            }
            tile = next;
        }
    }

    /// Writes a tile, and reduces the next one, if there is one, in one loop.
    fn write<P: Prologue<S>, E: Epilogue<S>>(
        &mut self,
        parts: (P, E),
        [tile, next]: [&Tile; 2],
        moments: &OfTile<Moments>,
        span: bool,
    ) {
        if S::PIPELINE && P::PIPELINED && !next.is_empty() {
            let tiles = [tile, next];
            if span {
                self.write_and_reduce::<P, E, AsSpan>(parts, tiles, moments);
            } else if P::PAIRED && E::PAIRED && self.in_pairs {
                self.write_and_reduce_pairs(parts, tiles, moments);
            } else {
                self.write_and_reduce::<P, E, ByRow>(parts, tiles, moments);
            }
        // (The last one of tiles that are pipelined hardly counts.)
        } else if <S::Line as Line>::ANY && !P::PIPELINED && !P::GENERIC && span {
            self.write_rows::<P, E, AsSpan>(parts, tile.clone(), moments);
        } else {
            self.write_rows::<P, E, ByRow>(parts, tile.clone(), moments);
        }
    }

    /// How long a tile is in memory, if its rows follow each other.
    #[inline(always)]
    fn bytes(&self, tile: &Tile) -> usize {
        tile.len() * self.len * size_of::<S::Elem>()
    }

    /// Numbers of scratch from row to row, if there are `any`.
    #[inline(always)]
    fn width_if(&self, any: bool) -> usize {
        assert!(self.len <= self.width);
        if any { self.width } else { 0 }
    }

    /// Finds g(gate) of a tile, if that is to be done before a pass; `exact` where it goes into sums.
    fn find_gate_values(&mut self, act: Option<Act>, exact: bool, tile: Tile) {
        let Some(act) = act else { return };
        let (gate, next) = (&self.rows.inputs[2], ahead::<S>(self.bytes(&tile)));
        for (values, row) in self.gate_values.chunks_exact_mut(self.width).zip(tile) {
            act::values(act, exact, Source::<S>::new(gate.row(row), next), values);
        }
    }

    /// [`Reduce`] of each row of a tile.
    fn reduce<P: Prologue<S>>(&mut self, prologue: P, tile: Tile) {
        self.find_gate_values(prologue.gate_before(), true, tile.clone());
        let this = self;
        S::call(
            #[inline(always)]
            move || {
                let (len, next) = (this.len, ahead::<S>(this.bytes(&tile)));
                let saved_width = this.width_if(prologue.saves_p());
                let gate_width = this.width_if(prologue.gate_before().is_some());
                let OperandRows { inputs, outputs: [_, sum], .. } = &mut *this.rows;
                for (slot, row) in tile.enumerate() {
                    let saved = &mut this.saved[slot * saved_width..][..saved_width];
                    let [x, residual, gate] = sources(inputs, row, len, next);
                    let gate_values = &this.gate_values[slot * gate_width..][..gate_width];
                    let sum = RowSink::new(sum.row(row), this.non_temporal[1]);
                    let x = x.without_prefetch();
                    let inputs = Inputs { x, residual, gate, gate_values, sum };
                    let mut pass = Reduce { prologue, inputs };
                    let mut total = 0.0;
                    for chunk in chunks(len, CHUNK) {
                        let mut sums = Sums::zero();
                        sweep_range::<S>(
                            chunk,
                            #[inline(always)]
                            |at| pass.block(at, saved, &mut sums),
                        );
                        total += f64::from(sums.total().sum());
                    }
                    this.totals[slot] = total;
                }
            },
        );
    }

    /// What each row of a tile is normalized with. It goes to the caller, where asked for.
    fn moments(&mut self, centers: bool, tile: Tile) -> OfTile<Moments> {
        let per_element = 1.0 / self.len as f64;
        let mut all = [Moments::default(); TILE_ROWS];
        let mut lows = [0.0; TILE_ROWS];
        if centers {
            for slot in 0..tile.len() {
                all[slot].mean_hi = number(self.totals[slot] * per_element);
            }
            lows = self.reduce_centered(tile.len(), &all);
        }
        for (slot, row) in tile.enumerate() {
            let Moments { mean_hi, mean_lo, rstd } = &mut all[slot];
            let low = lows[slot] * per_element;
            let variance = self.totals[slot] * per_element - low * low;
            // Rounding must not make it negative; a NaN stays one.
            let variance = if variance < 0.0 { 0.0 } else { variance };
            *mean_lo = number(low);
            *rstd = number(1.0 / (variance + self.eps).sqrt());
            let [save_rstd, save_mean] = &mut self.rows.save;
            save_rstd.row(row).fill(*rstd);
            save_mean.row(row).fill(number(f64::from(*mean_hi) + low));
        }
        all
    }

    /// Gives the sums of p - mean_hi. Those of its square take the place of the totals.
    fn reduce_centered(&mut self, rows: usize, moments: &OfTile<Moments>) -> OfTile<f64> {
        let this = self;
        S::call(
            #[inline(always)]
            move || {
                let (len, width) = (this.len, this.width_if(true));
                let mut all = [0.0; TILE_ROWS];
                for slot in 0..rows {
                    let saved = &this.saved[slot * width..][..width];
                    let mean_hi = V::<S>::splat(moments[slot].mean_hi);
                    let (mut sum, mut square) = (0.0, 0.0);
                    for chunk in chunks(len, CHUNK) {
                        let (mut sums, mut squares) = (Sums::<S, 2>::zero(), Sums::<S, 2>::zero());
                        sweep_range::<S>(
                            chunk,
                            #[inline(always)]
                            |at| {
                                let q = V::at(saved, at) - mean_hi;
                                let (q, at) = match at.is_full() {
                                    true => (q, at),
                                    false => (q.first(at.n, 0.0), At { slot: 0, ..at }),
                                };
                                sums.add(at, q);
                                squares.add_product(at, q, q);
                            },
                        );
                        sum += f64::from(sums.total().sum());
                        square += f64::from(squares.total().sum());
                    }
                    (all[slot], this.totals[slot]) = (sum, square);
                }
                all
            },
        )
    }

    /// [`Write`] of each row of a tile.
    fn write_rows<P: Prologue<S>, E: Epilogue<S>, O: Sinks<S>>(
        &mut self,
        parts: (P, E),
        tile: Tile,
        moments: &OfTile<Moments>,
    ) {
        self.find_gate_values(parts.1.gate_before(), false, tile.clone());
        let this = self;
        S::call(
            #[inline(always)]
            move || {
                let (len, next) = (this.len, ahead::<S>(this.bytes(&tile)));
                let saved_width = this.width_if(parts.0.saves_p());
                let gate_width = this.width_if(parts.1.gate_before().is_some());
                let OperandRows { inputs, outputs: [o, _], .. } = &mut *this.rows;
                let mut o = tile_sink::<S, O>(o, &tile, this.non_temporal[0]);
                for (slot, row) in tile.enumerate() {
                    let saved = &this.saved[slot * saved_width..][..saved_width];
                    let [x, _, gate] = sources(inputs, row, len, next);
                    let gate_values = &this.gate_values[slot * gate_width..][..gate_width];
                    let weight = this.weight.of_row(this.first + row);
                    let bias = this.bias.of_row(this.first + row);
                    assert!(len <= weight.len());
                    let factors = Factors { weight, bias, gate, gate_values };
                    let pass = Write::new(parts, x, factors, moments[slot]);
                    let mut o = o.row(slot, len);
                    sweep_by::<S>(
                        !P::GENERIC,
                        0..len,
                        #[inline(always)]
                        |at| o.put(at, pass.block(at, saved)),
                    );
                }
                o.finish();
            },
        );
    }

    /// [`WriteAndReduce`] of the rows of a tile and of the next one. So memory is read and written all the time,
    /// where either pass alone would leave one of the two idle: non-temporal stores wait in few buffers.
    /// (On an Emerald Rapids, rows of 2,048: 2.2 ns for 16 elements instead of 2.7 from the last-level
    /// cache, and 3.2 instead of 3.8 from memory.) p of the next row takes the place of what was just used.
    fn write_and_reduce<P: Prologue<S>, E: Epilogue<S>, O: Sinks<S>>(
        &mut self,
        parts: (P, E),
        [tile, next]: [&Tile; 2],
        moments: &OfTile<Moments>,
    ) {
        let this = self;
        S::call(
            #[inline(always)]
            move || {
                let (len, saved_width) = (this.len, this.width_if(parts.0.saves_p()));
                let OperandRows { inputs, outputs: [o, sum], .. } = &mut *this.rows;
                let mut o = tile_sink::<S, O>(o, tile, this.non_temporal[0]);
                for (slot, (row, next)) in tile.clone().zip(next.clone()).enumerate() {
                    let saved = &mut this.saved[slot * saved_width..][..saved_width];
                    let sources =
                        [sources(inputs, row, len, SOON), sources(inputs, next, len, SOON)];
                    let weight = this.weight.of_row(this.first + row);
                    assert!(len <= weight.len());
                    let sinks =
                        (o.row(slot, len), RowSink::new(sum.row(next), this.non_temporal[1]));
                    let mut pass =
                        WriteAndReduce::new(parts, sources, weight, moments[slot], sinks);
                    for chunk in chunks(len, CHUNK) {
                        sweep_range::<S>(
                            chunk,
                            #[inline(always)]
                            |at| pass.block(at, saved),
                        );
                        pass.end_chunk();
                    }
                    this.totals[slot] = pass.total;
                }
                o.finish();
            },
        );
    }

    /// [`Tiles::write_and_reduce`] of rows that save nothing; a row of the first half of a tile and one
    /// of the second are interleaved. So memory is read and written at two places, which keeps more of it busy, and
    /// the weight is read half as often. (The same machine, from memory: 0.90 of the time. A loop in C takes
    /// 9.0 cycles for 16 elements one row at a time, 8.0 with two, 8.0 to 8.4 with four. With a residual or a
    /// gate, it gains nothing.)
    fn write_and_reduce_pairs<P: Prologue<S>, E: Epilogue<S>>(
        &mut self,
        parts: (P, E),
        [tile, next]: [&Tile; 2],
        moments: &OfTile<Moments>,
    ) {
        let this = self;
        S::call(
            #[inline(always)]
            move || {
                let (len, half) = (this.len, tile.len() / 2);
                let ahead = Prefetch::L1(this.bytes(tile) as isize);
                let OperandRows { inputs, outputs: [o, sum], .. } = &mut *this.rows;
                let o = o.slice(tile.start, tile.len());
                let (o, sum) = (o.parts::<2>(), sum.slice(next.start, next.len()).parts::<2>());
                let ([mut o_a, mut o_b], [mut sum_a, mut sum_b]) = (o, sum);
                for slot in 0..half {
                    // (An attribute stands at an argument.)
                    let pass = std::convert::identity(
                        #[inline(always)]
                        |slot, o, sum| {
                            let (row, next) = (tile.start + slot, next.start + slot);
                            let of_row = sources(inputs, row, len, ahead);
                            let sources = [of_row, sources(inputs, next, len, ahead)];
                            let weight = this.weight.of_row(this.first + row);
                            assert!(len <= weight.len());
                            let o = RowSink::new(o, this.non_temporal[0]);
                            let sinks = (o, RowSink::new(sum, false));
                            WriteAndReduce::new(parts, sources, weight, moments[slot], sinks)
                        },
                    );
                    let mut a = pass(slot, &mut o_a.row(slot)[..len], sum_a.row(slot));
                    let mut b = pass(slot + half, &mut o_b.row(slot)[..len], sum_b.row(slot));
                    for chunk in chunks(len, CHUNK) {
                        sweep_range::<S>(
                            chunk,
                            #[inline(always)]
                            |at| {
                                a.block(at, &mut []);
                                b.block(at, &mut []);
                            },
                        );
                        a.end_chunk();
                        b.end_chunk();
                    }
                    (this.totals[slot], this.totals[slot + half]) = (a.total, b.total);
                }
            },
        );
    }
}

/// The x, residual and gate of a row of `len` elements, and what to ask for while they are read. x stands
/// for an absent one, which nobody reads: so the compiler knows how long they are.
#[inline(always)]
fn sources<'r, S: Simd>(
    [x, residual, gate]: &[InputRows<'r, S::Elem>; 3],
    row: usize,
    len: usize,
    ahead: Prefetch,
) -> [Source<'r, S>; 3] {
    let x = &x.row(row)[..len];
    let residual = if residual.len() > 0 { &residual.row(row)[..len] } else { x };
    let gate = if gate.len() > 0 { &gate.row(row)[..len] } else { x };
    [Source::new(x, ahead), Source::new(residual, ahead), Source::new(gate, ahead)]
}
