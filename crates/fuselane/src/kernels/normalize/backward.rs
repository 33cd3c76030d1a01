//! The backward of the normalization.
//!
//! For each row, of what the forward has saved, the mean of p and rstd:
//!
//! ```text
//! q = p - mean,  r = q * rstd                                  a Prologue
//! do1 = do [* g(gate)],  dr = do1 * weight
//! mean(q), mean(dr), mean(r * dr)                              Reduce, then Means
//! dp = (dr - mean(dr) - r * mean(r * dr)) * rstd               Write
//! dx = dp [* g(gate)] [+ grad_residual_out],  dgate            an Epilogue
//! dweight += do1 * r,  dbias += do1
//! ```
//!
//! As in the forward, a call is a composition: of a [`Prologue`], which knows the way from the operands to
//! r and back, and an [`Epilogue`], which knows what is asked for. [`Backward::run`] lists the usual ones,
//! [`Any`] serves all others, and [`Tiles`] drives the passes.
//!
//! **The gate** is evaluated exactly, in 16 bits too: its value enters the sums that the gradient of the
//! weight is, whose error would otherwise be that of a fast form, as this is biased. The first pass saves
//! one number ([`FoldedSigmoid`]), of which the second one makes value and slope in few steps.

mod parts;

use std::ops::Range;

use super::{
    Any, AsSpan, ByRow, CHUNK, ParameterRows, SOON, Sigmoid, Silu, Sinks, TILE_ROWS, ahead, number,
    of_slot, of_slot_mut, stores_span, tile_rows, tile_sink,
};
use crate::exec::rows::TaskRows;
use crate::exec::scratch::{Plain as _, Scratch};
use crate::kernels::act;
use crate::kernels::lanes::Lane;
use crate::kernels::rows::{InputRows, OperandRows};
use crate::kernels::sink::TileSink;
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::{At, Sums, chunks, sweep_by, sweep_range};
use crate::ops::act::Act;
use crate::ops::normalize::GatePosition::{self, Post, Pre};
use crate::simd::{Kernel, LANES, Line, Simd, V};
use parts::{
    Centered, Dx, DxDgateDweight, DxDweight, DxDweightDbias, Epilogue, Gated, In, Inputs, Moments,
    Out, Outputs, Plain, PlusResidualOut, Prologue, Sum, gradients, q_and_dr,
};

/// Rows that the parameters' gradients are summed over before they go to the sums of the task, so that a
/// small addend does not meet a large sum too often.
const RECENT: usize = 64;

/// The options of a call, and the gradients that are asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub(crate) residual: bool,
    pub(crate) gate: Option<(GatePosition, Act)>,
    pub(crate) center: bool,
    pub(crate) bias: bool,
    pub(crate) grad_residual_out: bool,
    pub(crate) dx: bool,
    pub(crate) dresidual: bool,
    pub(crate) dgate: bool,
    pub(crate) dweight: bool,
    pub(crate) dbias: bool,
}

/// The gradients of the rows of a task: `groups` rows after another share the parameters.
pub(crate) struct Backward<'r> {
    pub(crate) options: Options,
    pub(crate) groups: usize,
    /// The weight with all that is worked into it, of all groups.
    pub(crate) weight: &'r [f32],
    /// The bias of all groups; empty, if there is none.
    pub(crate) bias: &'r [f32],
    /// grad, x, residual, gate and grad_residual_out; dx, dresidual and dgate; rstd and mean.
    pub(crate) rows: TaskRows<'r, 5, 3, 2>,
    pub(crate) non_temporal: bool,
    /// The sums that dweight and dbias are, whichever are asked for, of all groups.
    pub(crate) sums: &'r mut [Lane],
}

impl Kernel for Backward<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Options { residual, gate, center, bias, grad_residual_out, .. } = self.options;
        let Options { dx, dresidual, dgate, dweight, dbias, .. } = self.options;
        // Some of these sum a gradient of the weight that nobody asks for, which then is forgotten: that
        // takes half the time of the generic code.
        if S::COMPOSED && dx && !dresidual && !dgate {
            match ((residual, gate, center, grad_residual_out), dweight, dbias) {
                ((false, None, false, false), true, false) => {
                    return self.differentiate::<S, _, _>(Plain, DxDweight);
                }
                ((false, None, false, false), false, false) => {
                    return self.differentiate::<S, _, _>(Plain, Dx);
                }
                ((true, None, false, false), _, false) => {
                    return self.differentiate::<S, _, _>(Sum, DxDweight);
                }
                ((false, None, false, true), _, false) => {
                    return self.differentiate::<S, _, _>(PlusResidualOut, DxDweight);
                }
                ((false, None, true, false), true, true) => {
                    return self.differentiate::<S, _, _>(Centered, DxDweightDbias);
                }
                _ => {}
            }
        }
        let others = residual || center || grad_residual_out || dresidual || bias || dbias;
        if V::<S>::HAS_FAST && dx && dgate && !others {
            match gate {
                Some((Pre, Act::Sigmoid)) => {
                    return self.differentiate::<S, _, _>(Gated(In, Sigmoid), DxDgateDweight);
                }
                Some((Pre, Act::Silu)) => {
                    return self.differentiate::<S, _, _>(Gated(In, Silu), DxDgateDweight);
                }
                Some((Post, Act::Sigmoid)) => {
                    return self.differentiate::<S, _, _>(Gated(Out, Sigmoid), DxDgateDweight);
                }
                Some((Post, Act::Silu)) => {
                    return self.differentiate::<S, _, _>(Gated(Out, Silu), DxDgateDweight);
                }
                _ => {}
            }
        }
        let options = self.options;
        let any = Any::new(&options);
        self.differentiate::<S, _, _>(any, any);
    }
}

/// The sums of q, of dr and of q * dr of a row.
type Totals = [f64; 3];

/// The lane sums of a chunk, of what [`Totals`] are.
struct ChunkSums<S: Simd> {
    q: Sums<S, 1>,
    dr: Sums<S, 1>,
    qdr: Sums<S, 2>,
}

impl<S: Simd> ChunkSums<S> {
    #[inline(always)]
    fn zero() -> Self {
        Self { q: Sums::zero(), dr: Sums::zero(), qdr: Sums::zero() }
    }

    /// Takes q and dr of a block.
    #[inline(always)]
    fn add<P: Prologue<S>>(&mut self, prologue: P, (q, dr): (V<S>, V<S>), at: At) {
        let at = if at.is_full() { at } else { At { slot: 0, ..at } };
        self.qdr.add_product(if P::GATED { At { slot: 0, ..at } } else { at }, q, dr);
        if prologue.centers() {
            self.q.add(at, if at.is_full() { q } else { q.first(at.n, 0.0) });
            self.dr.add(at, dr);
        }
    }

    #[inline(always)]
    fn add_to(self, totals: &mut Totals) {
        let Self { q, dr, qdr } = self;
        for (total, sum) in totals.iter_mut().zip([q.total(), dr.total(), qdr.total()]) {
            *total += f64::from(sum.sum());
        }
    }
}

/// A tile, as some of the rows at hand.
type Tile = Range<usize>;

/// Of each row of a tile, a number.
type OfTile<N> = [N; TILE_ROWS];

impl Backward<'_> {
    /// Differentiates by a composition.
    fn differentiate<S: Simd, P: Prologue<S>, E: Epilogue<S>>(self, prologue: P, epilogue: E) {
        let saves_slopes = prologue.gate_before().is_some();
        self.drive::<S>(Passes {
            saves_gate: P::GATED || saves_slopes,
            saves_slopes,
            sums_dweight: epilogue.sums_dweight(),
            pipelined: S::PIPELINE && P::PIPELINED,
            reduce: &|tiles, tile| tiles.reduce(prologue, tile),
            write: &|tiles, both, moments, span| {
                tiles.write(prologue, epilogue, both, moments, span)
            },
        });
    }

    fn drive<S: Simd>(mut self, passes: Passes<'_, S>) {
        let (groups, len) = (self.groups, self.weight.len() / self.groups);
        if len == 0 {
            return;
        }
        let (width, tile_rows) = (len.next_multiple_of(LANES), tile_rows(len, 1));
        let weight = ParameterRows::new::<S>(self.weight, groups, len);
        let bias = ParameterRows::new::<S>(self.bias, groups, len);
        let of_tile = |needed| Scratch::new(if needed { tile_rows * width } else { 0 });
        let mut saved_gate = of_tile(passes.saves_gate);
        let mut slopes = of_tile(passes.saves_slopes);
        let dweight_len = if passes.sums_dweight { groups * width } else { 0 };
        let mut forgotten = Scratch::zeros(dweight_len.saturating_sub(self.sums.len()));
        let sums = if forgotten.is_empty() { self.sums } else { &mut forgotten };
        // The sums of a task that has no more rows are recent themselves.
        let few = self.rows.range().len() <= RECENT * groups;
        let mut recent = Scratch::zeros(if few { 0 } else { sums.len() });
        for first in self.rows.range().step_by(RECENT * groups) {
            let into = if few { &mut *sums } else { &mut recent };
            let (dweight, dbias) = into.split_at_mut(dweight_len);
            let mut first = first;
            let end = first + RECENT * groups;
            while let Some(mut rows) = self.rows.next_rows::<S::Elem>(end - first) {
                let count = rows.count;
                let mut tiles = Tiles::<S> {
                    call: Call { len, width, first, weight: &weight, bias: &bias },
                    non_temporal: self.non_temporal,
                    rows: &mut rows,
                    saved_gate: &mut saved_gate,
                    slopes: &mut slopes,
                    dweight: &mut *dweight,
                    dbias: &mut *dbias,
                    totals: [[0.0; 3]; TILE_ROWS],
                };
                tiles.drive(&passes, tile_rows);
                first += count;
            }
            if !few {
                // What was summed of late goes to the sums of the task, and starts anew.
                for (sum, recent) in sums.iter_mut().zip(recent.iter_mut()) {
                    *sum = sum.plus(std::mem::take(recent));
                }
            }
        }
    }
}

/// The passes of a composition, behind pointers, so that what drives them is compiled once for all.
struct Passes<'p, S: Simd> {
    /// Whether the gate is saved by the first pass, or before it with its slopes.
    saves_gate: bool,
    saves_slopes: bool,
    sums_dweight: bool,
    /// Whether a tile is written in the loop that reduces the next one.
    pipelined: bool,
    reduce: &'p dyn Fn(&mut Tiles<'_, '_, S>, Tile),
    write: &'p WriteTile<'p, S>,
}

/// Writes a tile, and reduces the next one, if there is one; as spans of memory, if asked to.
type WriteTile<'p, S> = dyn Fn(&mut Tiles<'_, '_, S>, [&Tile; 2], &OfTile<Moments<f32>>, bool) + 'p;

/// What all rows share.
#[derive(Clone, Copy)]
struct Call<'t> {
    len: usize,
    /// Numbers of scratch from row to row.
    width: usize,
    /// The number of the first row, which tells its parameters.
    first: usize,
    weight: &'t ParameterRows,
    bias: &'t ParameterRows,
}

impl<'t> Call<'t> {
    /// What the passes read of a row, and what to ask for while they read grad, x and residual, the gate,
    /// and grad_residual_out.
    #[inline(always)]
    fn inputs<'r, S: Simd>(
        &self,
        [grad, x, residual, gate, grad_residual_out]: &[InputRows<'r, S::Elem>; 5],
        row: usize,
        slopes: &'r [Lane],
        [of_most, of_gate, of_residual_out]: [Prefetch; 3],
    ) -> Inputs<'r, S>
    where
        't: 'r,
    {
        let weight = self.weight.of_row(self.first + row);
        assert!(self.len <= weight.len());
        let len = self.len;
        let x = &x.row(row)[..len];
        Inputs {
            grad: Source::new(&grad.row(row)[..len], of_most),
            x: Source::new(x, of_most),
            residual: source(residual, row, x, of_most),
            gate: source(gate, row, x, of_gate),
            grad_residual_out: source(grad_residual_out, row, x, of_residual_out),
            weight,
            bias: self.bias.of_row(self.first + row),
            slopes,
        }
    }

    /// The sums for a row's parameter, if there are any.
    #[inline(always)]
    fn sums_of_row<'s>(&self, sums: &'s mut [Lane], row: usize) -> &'s mut [Lane] {
        of_slot_mut(sums, (self.first + row) % self.weight.groups, self.width)
    }
}

/// Rows at equal distances, which go tile by tile.
struct Tiles<'t, 'r, S: Simd> {
    call: Call<'t>,
    /// Whether outputs should be stored non-temporally.
    non_temporal: bool,
    rows: &'t mut OperandRows<'r, S::Elem, 5, 3, 2>,
    /// Of a tile, what is saved of the gate (its values, if they were found before), and its slopes.
    saved_gate: &'t mut [Lane],
    slopes: &'t mut [Lane],
    dweight: &'t mut [Lane],
    dbias: &'t mut [Lane],
    /// What the first pass found.
    totals: OfTile<Totals>,
}

impl<S: Simd> Tiles<'_, '_, S> {
    fn drive(&mut self, passes: &Passes<'_, S>, tile_rows: usize) {
        let count = self.rows.count;
        let mut tile = 0..tile_rows.min(count);
        (passes.reduce)(self, tile.clone());
        while !tile.is_empty() {
            let next = tile.end..(tile.end + tile_rows).min(count);
            let moments = self.moments(tile.clone());
            if passes.pipelined && next.len() == tile.len() {
                let span = stores_span::<S>(&self.rows.outputs, &tile, self.non_temporal);
                (passes.write)(self, [&tile, &next], &moments, span);
            } else {
                let span = stores_span::<S>(&self.rows.outputs, &(0..1), self.non_temporal);
                (passes.write)(self, [&tile, &(0..0)], &moments, span);
                (passes.reduce)(self, next.clone());
            }
            tile = next;
        }
    }

    /// What to ask for while a tile is read, so that memory is busy: the next one, if rows follow each
    /// other.
    #[inline(always)]
    fn ahead(&self, tile: &Tile) -> Prefetch {
        ahead::<S>(tile.len() * self.call.len * size_of::<S::Elem>())
    }

    /// Finds the sums of each row of a tile, and what is needed of the gate.
    fn reduce<P: Prologue<S>>(&mut self, prologue: P, tile: Tile) {
        if let Some(act) = prologue.gate_before() {
            for (slot, row) in tile.clone().enumerate() {
                let saved_gate = of_slot_mut(self.saved_gate, slot, self.call.width);
                let slopes = of_slot_mut(self.slopes, slot, self.call.width);
                let gate = Source::<S>::new(self.rows.inputs[3].row(row), Prefetch::None);
                act::values_and_slopes(act, true, gate, saved_gate, slopes);
            }
        }
        if !prologue.reduces() {
            return;
        }
        let this = self;
        S::call(
            #[inline(always)]
            move || {
                let (call, ahead) = (this.call, this.ahead(&tile));
                for (slot, row) in tile.enumerate() {
                    let mean = V::splat(saved_mean(this.rows.saved[1].row(row)));
                    let prefetch = [Prefetch::None, ahead, Prefetch::None];
                    let inputs = call.inputs(&this.rows.inputs, row, &[], prefetch);
                    let saved_gate = of_slot_mut(this.saved_gate, slot, call.width);
                    assert!(!P::GATED || call.len <= saved_gate.len());
                    let mut totals = [0.0; 3];
                    for chunk in chunks(call.len, CHUNK) {
                        let mut sums = ChunkSums::zero();
                        sweep_range::<S>(
                            chunk,
                            #[inline(always)]
                            |at| {
                                sums.add(
                                    prologue,
                                    q_and_dr(prologue, &inputs, mean, saved_gate, at),
                                    at,
                                )
                            },
                        );
                        sums.add_to(&mut totals);
                    }
                    this.totals[slot] = totals;
                }
            },
        );
    }

    /// What is known of each row of a tile as a whole.
    #[inline(always)]
    fn moments(&self, tile: Tile) -> OfTile<Moments<f32>> {
        let mut all = [Moments::default(); TILE_ROWS];
        let per_element = 1.0 / self.call.len as f64;
        let [rstds, means] = &self.rows.saved;
        for (slot, row) in tile.enumerate() {
            let [q, dr, qdr] = self.totals[slot];
            let rstd = number(f64::from(rstds.row(row)[0]));
            let mean_q = q * per_element;
            all[slot] = Moments {
                mean: saved_mean(means.row(row)),
                rstd,
                mean_q: number(mean_q),
                mean_dr: number(dr * per_element),
                mean_rdr: number((qdr - mean_q * dr) * f64::from(rstd) * per_element),
            };
        }
        all
    }

    /// Writes a tile, and reduces the next one, if there is one, in one loop.
    fn write<P: Prologue<S>, E: Epilogue<S>>(
        &mut self,
        prologue: P,
        epilogue: E,
        [tile, next]: [&Tile; 2],
        moments: &OfTile<Moments<f32>>,
        span: bool,
    ) {
        let (parts, span) = ((prologue, epilogue), <S::Line as Line>::ANY && span);
        if S::PIPELINE && P::PIPELINED && !next.is_empty() {
            return match span {
                true => self.write_rows::<_, _, AsSpan, true>(
                    parts,
                    [tile, next],
                    0..tile.len(),
                    moments,
                ),
                false => self.write_rows::<_, _, ByRow, true>(
                    parts,
                    [tile, next],
                    0..tile.len(),
                    moments,
                ),
            };
        }
        // A function for each row, as its loop needs all registers.
        for slot in 0..tile.len() {
            let slots = slot..slot + 1;
            // (The last one of tiles that are pipelined hardly counts.)
            if <S::Line as Line>::ANY && !P::PIPELINED && !P::GENERIC && span {
                self.write_rows::<_, _, AsSpan, false>(parts, [tile; 2], slots, moments);
            } else {
                self.write_rows::<_, _, ByRow, false>(parts, [tile; 2], slots, moments);
            }
        }
    }

    /// Writes the gradients of some rows of a tile, and adds to those of the parameters.
    ///
    /// With `REDUCE`, it finds the sums of the same rows of the next tile in the same loop; see
    /// `write_and_reduce` of the forward. What is saved of the next row's gate takes the place of what was
    /// just used.
    fn write_rows<P: Prologue<S>, E: Epilogue<S>, O: Sinks<S>, const REDUCE: bool>(
        &mut self,
        (prologue, epilogue): (P, E),
        [tile, next]: [&Tile; 2],
        slots: Range<usize>,
        moments: &OfTile<Moments<f32>>,
    ) {
        let this = self;
        S::call(
            #[inline(always)]
            move || {
                let (call, ahead) = (this.call, this.ahead(tile));
                // In here, where the compiler knows which they are.
                let [of_row, of_next] = match REDUCE {
                    true => [[Prefetch::None, Prefetch::None, SOON], [SOON, SOON, Prefetch::None]],
                    false if P::GATED => [[ahead, Prefetch::None, Prefetch::None]; 2],
                    false => [[ahead, ahead, Prefetch::None]; 2],
                };
                let Call { len, width, .. } = call;
                let OperandRows { inputs, outputs, .. } = &mut *this.rows;
                let rows = tile.start + slots.start..tile.start + slots.end;
                let [dx, dresidual, dgate] = outputs;
                // (0 of those that are not asked for.)
                let dx_len = if epilogue.writes_dx() { len } else { dx.len() };
                let dgate_len = if epilogue.writes_dgate() { len } else { dgate.len() };
                let dresidual_len = dresidual.len();
                let mut dx = tile_sink::<S, O>(dx, &rows, this.non_temporal);
                let mut dresidual = tile_sink::<S, O>(dresidual, &rows, this.non_temporal);
                let mut dgate = tile_sink::<S, O>(dgate, &rows, this.non_temporal);
                for slot in slots.clone() {
                    let row = tile.start + slot;
                    let saved_gate = of_slot_mut(this.saved_gate, slot, width);
                    let slopes = of_slot(this.slopes, slot, width);
                    let row_inputs = call.inputs::<S>(inputs, row, slopes, of_row);
                    let next_inputs = call.inputs::<S>(inputs, next.start + slot, &[], of_next);
                    let moments = moments[slot].splat();
                    let mut to = Outputs {
                        dx: dx.row(slot - slots.start, dx_len),
                        dresidual: dresidual.row(slot - slots.start, dresidual_len),
                        dgate: dgate.row(slot - slots.start, dgate_len),
                        dweight: call.sums_of_row(this.dweight, row),
                        dbias: call.sums_of_row(this.dbias, row),
                    };
                    // What a step checks, so that the compiler sees it hold.
                    assert!(!P::GATED || len <= saved_gate.len());
                    assert!(!epilogue.sums_dweight() || len <= to.dweight.len());
                    let mut totals = [0.0; 3];
                    for chunk in chunks(len, CHUNK) {
                        let mut sums = ChunkSums::zero();
                        sweep_by::<S>(
                            !P::GENERIC,
                            chunk,
                            #[inline(always)]
                            |at| {
                                // Loads before stores: a load waits for a store just before to an address
                                // that differs in its upper bits only, as those of rows of 4 KiB do.
                                let found =
                                    gradients(prologue, &row_inputs, &moments, saved_gate, at);
                                if REDUCE {
                                    let zero = V::zero();
                                    let next =
                                        q_and_dr(prologue, &next_inputs, zero, saved_gate, at);
                                    sums.add(prologue, next, at);
                                }
                                epilogue.put(found, &mut to, at);
                            },
                        );
                        sums.add_to(&mut totals);
                    }
                    if REDUCE {
                        this.totals[slot] = totals;
                    }
                }
                dx.finish();
                dresidual.finish();
                dgate.finish();
            },
        );
    }
}

/// A row of an operand that may be absent: x then stands for it, which nobody reads. So the compiler knows
/// how long all are.
#[inline(always)]
fn source<'r, S: Simd>(
    rows: &InputRows<'r, S::Elem>,
    row: usize,
    x: &'r [S::Elem],
    ahead: Prefetch,
) -> Source<'r, S> {
    Source::new(if rows.len() > 0 { &rows.row(row)[..x.len()] } else { x }, ahead)
}

/// The mean of a row that the forward has saved, if it has.
#[inline(always)]
fn saved_mean(mean: &[f32]) -> f32 {
    mean.first().map_or(0.0, |&mean| number(f64::from(mean)))
}
