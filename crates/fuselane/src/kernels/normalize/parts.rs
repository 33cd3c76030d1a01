//! What the forward is composed of: a [`Prologue`] gives what is normalized, an [`Epilogue`] the result.
//! The passes [`Reduce`] and [`Write`] use them, block by block.

use super::forward::{Added, Options};
use super::{Any, Gate};
use crate::kernels::lanes::Lane;
use crate::kernels::sink::{RowSink, Sink};
use crate::kernels::source::Source;
use crate::kernels::sweep::{At, Sums};
use crate::ops::act::Act;
use crate::ops::normalize::GatePosition::{self, Post, Pre};
use crate::simd::{Simd, V};

/// Gives p, what is normalized.
pub(super) trait Prologue<S: Simd>: Copy {
    /// Whether p is approximate, as the fast form of an activation is.
    const FAST: bool = false;
    /// Whether a row may be reduced in the loop that writes another one.
    const PIPELINED: bool = true;
    /// Whether it chooses block by block, and so takes no steps and stores no spans, to be less code.
    const GENERIC: bool = false;
    /// Whether rows may be written and reduced in pairs.
    const PAIRED: bool = false;
    /// Whether p is saved: where that is cheaper than to find it anew.
    #[inline(always)]
    fn saves_p(self) -> bool {
        true
    }
    /// Whether the mean of p is subtracted.
    #[inline(always)]
    fn centers(self) -> bool {
        false
    }
    /// The activation of the gate, if its values are to be found before.
    #[inline(always)]
    fn gate_before(self) -> Option<Act> {
        None
    }
    /// p of the block at `at`. x + residual goes where it is to be saved.
    fn p(self, row: &mut Inputs<'_, S>, at: At) -> V<S>;
}

/// What a prologue reads of a row, and where x + residual goes.
pub(super) struct Inputs<'r, S: Simd> {
    pub(super) x: Source<'r, S>,
    pub(super) residual: Source<'r, S>,
    pub(super) gate: Source<'r, S>,
    /// g(gate), if it was found before.
    pub(super) gate_values: &'r [Lane],
    /// x + residual; empty, if nobody wants it.
    pub(super) sum: RowSink<'r, S>,
}

#[derive(Clone, Copy)]
pub(super) struct Plain;

impl<S: Simd> Prologue<S> for Plain {
    const PAIRED: bool = true;
    #[inline(always)]
    fn saves_p(self) -> bool {
        false
    }
    #[inline(always)]
    fn p(self, row: &mut Inputs<'_, S>, at: At) -> V<S> {
        row.x.load(at)
    }
}

/// x + residual.
#[derive(Clone, Copy)]
pub(super) struct Sum;

impl<S: Simd> Prologue<S> for Sum {
    #[inline(always)]
    fn p(self, row: &mut Inputs<'_, S>, at: At) -> V<S> {
        row.x.load(at) + row.residual.load(at)
    }
}

/// x + residual, which goes to an output.
#[derive(Clone, Copy)]
pub(super) struct SavedSum;

impl<S: Simd> Prologue<S> for SavedSum {
    #[inline(always)]
    fn p(self, row: &mut Inputs<'_, S>, at: At) -> V<S> {
        let sum = Sum.p(row, at);
        row.sum.put(at, sum.round());
        sum
    }
}

/// x + residual, in the residual's memory.
#[derive(Clone, Copy)]
pub(super) struct SumInPlace;

impl<S: Simd> Prologue<S> for SumInPlace {
    #[inline(always)]
    fn p(self, row: &mut Inputs<'_, S>, at: At) -> V<S> {
        let sum = row.x.load(at) + row.sum.load(at);
        row.sum.put(at, sum.round());
        sum
    }
}

#[derive(Clone, Copy)]
pub(super) struct Centered;

impl<S: Simd> Prologue<S> for Centered {
    const PIPELINED: bool = false;
    #[inline(always)]
    fn centers(self) -> bool {
        true
    }
    #[inline(always)]
    fn p(self, row: &mut Inputs<'_, S>, at: At) -> V<S> {
        row.x.load(at)
    }
}

/// x * g(gate).
#[derive(Clone, Copy)]
pub(super) struct GatedIn<G>(pub(super) G);

impl<S: Simd, G: Gate> Prologue<S> for GatedIn<G> {
    const FAST: bool = true;
    #[inline(always)]
    fn p(self, row: &mut Inputs<'_, S>, at: At) -> V<S> {
        row.x.load(at) * G::value_for_sums(row.gate.load(at))
    }
}

/// Gives the result of r, the normalized p.
pub(super) trait Epilogue<S: Simd>: Copy {
    /// As for [`Prologue`].
    const FAST: bool = false;
    /// As for [`Prologue`].
    const PAIRED: bool = false;
    /// As for [`Prologue`].
    #[inline(always)]
    fn gate_before(self) -> Option<Act> {
        None
    }
    /// The result of the block at `at`.
    fn o(self, r: V<S>, row: &Factors<'_, S>, at: At) -> V<S>;
}

/// What an epilogue reads of a row.
pub(super) struct Factors<'r, S: Simd> {
    pub(super) weight: &'r [Lane],
    pub(super) bias: &'r [Lane],
    pub(super) gate: Source<'r, S>,
    /// g(gate), if it was found before.
    pub(super) gate_values: &'r [Lane],
}

#[derive(Clone, Copy)]
pub(super) struct Weighted;

impl<S: Simd> Epilogue<S> for Weighted {
    const PAIRED: bool = true;
    #[inline(always)]
    fn o(self, r: V<S>, row: &Factors<'_, S>, at: At) -> V<S> {
        r * V::at(row.weight, at)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Biased;

impl<S: Simd> Epilogue<S> for Biased {
    #[inline(always)]
    fn o(self, r: V<S>, row: &Factors<'_, S>, at: At) -> V<S> {
        r.mul_add(V::at(row.weight, at), V::at(row.bias, at))
    }
}

/// r * weight * g(gate).
#[derive(Clone, Copy)]
pub(super) struct GatedOut<G>(pub(super) G);

impl<S: Simd, G: Gate> Epilogue<S> for GatedOut<G> {
    const FAST: bool = true;
    #[inline(always)]
    fn o(self, r: V<S>, row: &Factors<'_, S>, at: At) -> V<S> {
        r * V::at(row.weight, at) * G::value(row.gate.load(at))
    }
}

impl Any<'_, Options> {
    /// The activation of a gate at some position.
    #[inline(always)]
    fn gate(self, position: GatePosition) -> Option<Act> {
        self.0.gate.filter(|gate| gate.0 == position).map(|gate| gate.1)
    }
}

impl<S: Simd> Prologue<S> for Any<'_, Options> {
    const PIPELINED: bool = false;
    const GENERIC: bool = true;
    #[inline(always)]
    fn saves_p(self) -> bool {
        self.0.added != Added::Nothing || self.gate(Pre).is_some() || self.0.center
    }
    #[inline(always)]
    fn centers(self) -> bool {
        self.0.center
    }
    #[inline(always)]
    fn gate_before(self) -> Option<Act> {
        self.gate(Pre)
    }
    #[inline(always)]
    fn p(self, row: &mut Inputs<'_, S>, at: At) -> V<S> {
        let sum = match self.0.added {
            Added::Nothing => row.x.load(at),
            Added::Residual => Sum.p(row, at),
            Added::ResidualSaved => SavedSum.p(row, at),
            Added::ResidualInPlace => SumInPlace.p(row, at),
        };
        if self.gate(Pre).is_some() { sum * V::at(row.gate_values, at) } else { sum }
    }
}

impl<S: Simd> Epilogue<S> for Any<'_, Options> {
    #[inline(always)]
    fn gate_before(self) -> Option<Act> {
        self.gate(Post)
    }
    #[inline(always)]
    fn o(self, r: V<S>, row: &Factors<'_, S>, at: At) -> V<S> {
        let o = if self.0.bias { Biased.o(r, row, at) } else { Weighted.o(r, row, at) };
        if self.gate(Post).is_some() { o * V::at(row.gate_values, at) } else { o }
    }
}

/// The pass that sums p, if the call is centered, else p^2.
pub(super) struct Reduce<'r, S: Simd, P> {
    pub(super) prologue: P,
    pub(super) inputs: Inputs<'r, S>,
}

impl<S: Simd, P: Prologue<S>> Reduce<'_, S, P> {
    #[inline(always)]
    pub(super) fn block(&mut self, at: At, saved: &mut [Lane], sums: &mut Sums<S, 4>) {
        let p = self.prologue.p(&mut self.inputs, at);
        if self.prologue.saves_p() {
            p.set_at(saved, at);
        }
        // One sum with an activation, which needs the registers, and time enough for it to wait; and
        // behind the steps, where few blocks are left.
        let at = if P::FAST || !at.in_step { At { slot: 0, ..at } } else { at };
        if self.prologue.centers() { sums.add(at, p) } else { sums.add_product(at, p, p) }
    }
}

/// The pass that gives the result.
pub(super) struct Write<'r, S: Simd, P, E> {
    prologue: P,
    epilogue: E,
    x: Source<'r, S>,
    factors: Factors<'r, S>,
    mean_hi: V<S>,
    mean_lo: V<S>,
    rstd: V<S>,
}

impl<'r, S: Simd, P: Prologue<S>, E: Epilogue<S>> Write<'r, S, P, E> {
    #[inline(always)]
    pub(super) fn new(
        (prologue, epilogue): (P, E),
        x: Source<'r, S>,
        factors: Factors<'r, S>,
        Moments { mean_hi, mean_lo, rstd }: Moments,
    ) -> Self {
        let (mean_hi, mean_lo, rstd) = (V::splat(mean_hi), V::splat(mean_lo), V::splat(rstd));
        Self { prologue, epilogue, x, factors, mean_hi, mean_lo, rstd }
    }

    #[inline(always)]
    pub(super) fn block(&self, at: At, saved: &[Lane]) -> S::Packed {
        let p = if self.prologue.saves_p() {
            self.x.prefetch(at);
            V::at(saved, at)
        } else {
            self.x.load(at)
        };
        let q = if self.prologue.centers() { p - self.mean_hi - self.mean_lo } else { p };
        let o = self.epilogue.o(q * self.rstd, &self.factors, at);
        if P::FAST || E::FAST { o.round_ties_away() } else { o.round() }
    }
}

/// [`Write`] of one row and [`Reduce`] of another, block by block in one loop.
pub(super) struct WriteAndReduce<'r, S: Simd, P, E, O> {
    write: Write<'r, S, P, E>,
    reduce: Reduce<'r, S, P>,
    o: O,
    sums: Sums<S, 4>,
    pub(super) total: f64,
}

impl<'r, S: Simd, P: Prologue<S>, E: Epilogue<S>, O: Sink<S>> WriteAndReduce<'r, S, P, E, O> {
    #[inline(always)]
    pub(super) fn new(
        parts: (P, E),
        [[x, _, gate], [next_x, residual, next_gate]]: [[Source<'r, S>; 3]; 2],
        weight: &'r [Lane],
        moments: Moments,
        (o, sum): (O, RowSink<'r, S>),
    ) -> Self {
        let factors = Factors { weight, bias: &[], gate, gate_values: &[] };
        let write = Write::new(parts, x.without_prefetch(), factors, moments);
        let (x, gate) = (next_x, next_gate);
        let inputs = Inputs { x, residual, gate, gate_values: &[], sum };
        let reduce = Reduce { prologue: parts.0, inputs };
        Self { write, reduce, o, sums: Sums::zero(), total: 0.0 }
    }

    #[inline(always)]
    pub(super) fn block(&mut self, at: At, saved: &mut [Lane]) {
        // Loads before stores: a load waits for a store just before to an address that differs in its
        // upper bits only.
        let packed = self.write.block(at, saved);
        self.reduce.block(at, saved, &mut self.sums);
        self.o.put(at, packed);
    }

    #[inline(always)]
    pub(super) fn end_chunk(&mut self) {
        self.total += f64::from(self.sums.total().sum());
        self.sums = Sums::zero();
    }
}

/// What a row is normalized with.
#[derive(Clone, Copy, Default)]
pub(super) struct Moments {
    /// The mean but for rounding, and what is left of it.
    pub(super) mean_hi: f32,
    pub(super) mean_lo: f32,
    pub(super) rstd: f32,
}
