//! The passes of the forward.

use std::marker::PhantomData;
use std::ops::Range;

use super::groups::{
    BATCH, Batch, Batches, CHUNK, Chunk, Each, Groups, LONG, USUAL, append_step, appends,
    appends_chunks, bits, blocks, enter, for_each_group, for_each_span, fusible, gate_values,
    inside, kinds, lines_ahead, of_group, of_group_mut, prefetch, prefetch_soon, read, scalar,
    short_gates, stretch, write, write_step,
};
use super::{GatePosition, Normalize};
use crate::ops::act::Act;
use crate::pool::Reals;
use crate::rows::{Part, Runs};
use crate::simd::{Appender, Kernel, Lanes, Line, MAX_LANES, Math, Memory, SHORT_LIMIT, Task};
use crate::{Element, Real};

/// Where what is added to x comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Added {
    Nothing,
    Input,
    /// The memory that the sum goes to.
    InPlace,
}

/// What takes part in a forward call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ForwardWith {
    pub(super) added: Added,
    pub(super) gate: Option<GatePosition>,
    /// The gate's activation, if the passes themselves evaluate its short form. Otherwise
    /// [`gate_values`] has been there before.
    pub(super) fused: Option<Act>,
    pub(super) center: bool,
    pub(super) bias: bool,
}

impl ForwardWith {
    const RMS: Self =
        Self { added: Added::Nothing, gate: None, fused: None, center: false, bias: false };

    /// The calls that have loops of their own. Those of gates are for the short forms, where the
    /// lanes have such.
    const fn usual(kind: usize, short: bool) -> Self {
        let rms = Self::RMS;
        let (pre, post) = (Some(GatePosition::Pre), Some(GatePosition::Post));
        let [sigmoid, silu] = short_gates(short);
        match kind {
            0 => rms,
            1 => Self { added: Added::Input, ..rms },
            2 => Self { added: Added::InPlace, ..rms },
            3 => Self { center: true, ..rms },
            4 => Self { center: true, bias: true, ..rms },
            5 => Self { gate: pre, fused: sigmoid, ..rms },
            6 => Self { gate: post, fused: sigmoid, ..rms },
            7 => Self { gate: pre, fused: silu, ..rms },
            _ => Self { gate: post, fused: silu, ..rms },
        }
    }

    /// Whether the first pass keeps p for the others: where that is cheaper than to find it anew.
    #[inline(always)]
    fn keeps_p(self) -> bool {
        self.added != Added::Nothing || self.gate == Some(GatePosition::Pre) || self.center
    }
}

kinds!(ForwardWith);

pub(super) struct Forward<'r> {
    pub(super) options: Normalize,
    pub(super) with: ForwardWith,
    pub(super) factor: Reals<'r>,
    pub(super) bias: Reals<'r>,
    pub(super) part: Part<'r, 3, 2, 0, 2>,
    pub(super) stream: bool,
}

impl Kernel for Forward<'_> {
    #[inline(always)]
    fn run<L, T>(mut self)
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let groups = Groups::new(self.factor.len(), self.options.groups);
        let fused = fusible::<L>(self.options.gate_act, self.with.gate, groups.len);
        let mut with = ForwardWith { fused, ..self.with };
        let kind = with.kind::<L>();
        let pairs = with == ForwardWith::RMS && groups.len * size_of::<T>() <= PAIR_ROW;
        let steps = groups.count == 1 && groups.len.is_multiple_of(PAIR_STEP);
        let in_turns = pairs && steps && groups.staggers::<L>();
        let groups = Groups { in_turns, ..groups };
        if groups.len == 0 {
            while let Some(row) = self.part.next::<T>() {
                for kept in row.keeps {
                    kept.fill(scalar(f64::NAN));
                }
            }
            return;
        }
        let factor = groups.widen::<L>(self.factor.get());
        let bias = groups.widen::<L>(self.bias.get());
        let (mut gates, mut p) =
            (groups.memory(with.gate.is_some()), groups.memory(with.keeps_p()));
        let zero = Real::of(0.0);
        let none = Statistics { near: zero, rest: zero, rstd: zero, mean: zero };
        while let Some(runs) = self.part.next_run::<T>(usize::MAX) {
            let batches = groups.batches(runs.rows);
            let mut rows = ForwardRows::<T> {
                kind,
                with,
                groups,
                runs,
                factor: &factor,
                bias: &bias,
                gates: &mut gates,
                p: &mut p,
                sums: [0.0; BATCH],
                squares: [0.0; BATCH],
                nears: [zero; BATCH],
                found: [none; BATCH],
                stream: self.stream,
            };
            rows.normalize::<L>(&self.options, batches);
        }
    }
}

/// What a group is normalized with.
#[derive(Clone, Copy)]
struct Statistics<R> {
    /// The mean but for rounding, what is left of it, and both.
    near: R,
    rest: R,
    mean: R,
    rstd: R,
}

/// Some rows of a forward.
struct ForwardRows<'r, T: Element> {
    kind: usize,
    with: ForwardWith,
    groups: Groups,
    runs: Runs<'r, T, 3, 2, 0, 2>,
    factor: &'r [T::Real],
    bias: &'r [T::Real],
    /// g(gate), of each group of a batch.
    gates: &'r mut [T::Real],
    /// What is normalized, of each group of a batch.
    p: &'r mut [T::Real],
    /// Of each group of a batch: sums of p (or of p - near) and of its square, and what comes of them.
    sums: Each<f64>,
    squares: Each<f64>,
    nears: Each<T::Real>,
    found: Each<Statistics<T::Real>>,
    stream: bool,
}

/// The operands of a group.
struct ForwardGroup<'r, T: Element> {
    x: &'r [T],
    residual: &'r [T],
    gate: &'r [T],
    o: &'r mut [T],
    sum: &'r mut [T],
    factor: &'r [T::Real],
    bias: &'r [T::Real],
    gates: &'r mut [T::Real],
    p: &'r mut [T::Real],
}

impl<T: Element> ForwardRows<'_, T> {
    #[inline(always)]
    fn group(&mut self, row: usize, group: usize, slot: usize) -> ForwardGroup<'_, T> {
        let (range, registers) = (self.groups.range(group), self.groups.registers(group));
        let handed_on = slot * self.groups.handed_on()..(slot + 1) * self.groups.handed_on();
        let ([x, residual, gate], [o, sum]) = (&self.runs.inputs, &mut self.runs.outputs);
        ForwardGroup {
            x: &x.row(row)[range.clone()],
            residual: of_group(residual.row(row), range.clone()),
            gate: of_group(gate.row(row), range.clone()),
            o: &mut o.row(row)[range.clone()],
            sum: of_group_mut(sum.row(row), range),
            factor: &self.factor[registers.clone()],
            bias: of_group(self.bias, registers),
            gates: of_group_mut(self.gates, handed_on.clone()),
            p: of_group_mut(self.p, handed_on),
        }
    }

    /// g(gate) of a span of each group of a batch.
    #[inline(always)]
    fn gate_values<L>(&mut self, act: Act, batch: Batch, span: &Range<usize>)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        for_each_group!(batch, (row, group, slot) => {
            let operands = self.group(row, group, slot);
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, operands.x.len());
                gate_values::<L, T>(act, false, operands.gate, chunk, operands.gates, &mut []);
            }
        });
    }

    /// Finds p of a span of each group, keeps it where the other passes need it, and adds to the sums
    /// of p if centered, else to those of p^2; gives the slots, as bits, of those whose gates have
    /// arguments that are too large for a short form. In the `last` pass over long groups, x +
    /// residual is kept too.
    #[inline(always)]
    fn first<L>(&mut self, act: Act, batch: Batch, span: &Range<usize>, last: bool) -> u32
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        // The sum may overwrite an addend, so it is written when that was read last.
        let keeps_sum = last || self.groups.len <= LONG;
        let pre = self.with.gate == Some(GatePosition::Pre);
        if pre && self.with.fused.is_none() {
            self.gate_values::<L>(act, batch, span);
        }
        let (kind, rows) = (self.kind, &mut *self);
        let far = enter!(L, kind, First { rows, batch, span, keeps_sum });
        for slot in bits(far) {
            let batch = batch.one(slot);
            self.gate_values::<L>(act, batch, span);
            let rows = &mut *self;
            enter!(L, USUAL, First { rows, batch, span, keeps_sum });
        }
        far
    }

    /// Normalizes batch after batch.
    #[inline(always)]
    fn normalize<L>(&mut self, options: &Normalize, mut batches: Batches)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let loops = self.kind < USUAL && !self.with.center;
        let gate = self.with.gate.is_none() || self.with.fused.is_some();
        let staggers = loops && gate && self.groups.staggers::<L>();
        let mut coming = batches.next();
        // The slots of the batch that is coming, if its first pass is done.
        let mut found = None;
        while let Some(batch) = coming {
            let far = match found.take() {
                Some(far) => far,
                None => self.statistics::<L>(options, batch),
            };
            coming = batches.next();
            match coming {
                Some(next) if staggers && far == 0 && next.len() == batch.len() => {
                    let far = self.write_and_first::<L>(options.gate_act, batch, next);
                    self.keep(batch);
                    self.statistics_of_sums(options, next.len());
                    found = Some(far);
                }
                _ => {
                    self.write::<L>(options.gate_act, batch, far);
                    self.keep(batch);
                }
            }
        }
    }

    /// Gives the statistics of a batch to the caller, where asked for.
    #[inline(always)]
    fn keep(&mut self, batch: Batch) {
        let ([rstds, means], found) = (&mut self.runs.keeps, &self.found);
        for_each_group!(batch, (row, group, slot) => {
            if let Some(kept) = rstds.row(row).get_mut(group) {
                *kept = found[slot].rstd;
            }
            if let Some(kept) = means.row(row).get_mut(group) {
                *kept = found[slot].mean;
            }
        });
    }

    /// [`ForwardRows::write`] of a batch and [`ForwardRows::first`] of the one that comes next, in one
    /// loop; gives the slots of the latter.
    #[inline(always)]
    fn write_and_first<L>(&mut self, act: Act, batch: Batch, next: Batch) -> u32
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let (kind, span) = (self.kind, &(0..self.groups.len));
        let rows = &mut *self;
        let appended = appends::<L, T>(&rows.runs.outputs[..1], (rows.groups, batch), rows.stream);
        if rows.groups.in_turns && !appended {
            L::enter(StaggeredPairs::<L, T> { rows, batch, next, lanes: PhantomData });
            return 0;
        }
        let far = if appended {
            enter!(L, kind, StaggeredAppended { rows, batch, next })
        } else {
            enter!(L, kind, StaggeredRows { rows, batch, next })
        };
        let post = self.with.gate == Some(GatePosition::Post);
        if far != 0 {
            // What was stored past the caches is stored again, and in part the ordinary way.
            L::fence();
        }
        for slot in bits(far) {
            // Anew, without the short form.
            let batch = if post { batch.one(slot) } else { next.one(slot) };
            self.gate_values::<L>(act, batch, span);
            let rows = &mut *self;
            if post {
                rows.output::<L>(USUAL, batch, span);
            } else {
                let keeps_sum = true;
                enter!(L, USUAL, First { rows, batch, span, keeps_sum });
            }
        }
        if post { 0 } else { far }
    }

    /// Finds the statistics of each group; gives the slots of [`ForwardRows::first`].
    #[inline(always)]
    fn statistics<L>(&mut self, options: &Normalize, batch: Batch) -> u32
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let (act, groups, slots) = (options.gate_act, self.groups, batch.len());
        let per_element = 1.0 / groups.len as f64;
        let mut far = 0;
        for_each_span!(L in groups, span => {
            far |= self.first::<L>(act, batch, span, false);
        });
        if self.with.center {
            for (near, sum) in self.nears.iter_mut().zip(&self.sums).take(slots) {
                *near = scalar(sum * per_element);
            }
            for_each_span!(L in groups, span => {
                if groups.len > LONG {
                    let sums = self.sums;
                    self.first::<L>(act, batch, span, false);
                    self.sums = sums;
                }
                let (p, nears) = (&*self.p, &self.nears);
                let (sums, squares) = (&mut self.sums, &mut self.squares);
                L::enter(Squares::<L> { p, groups, slots, span, nears, sums, squares });
            });
        }
        self.statistics_of_sums(options, slots);
        far
    }

    /// The statistics of the first slots, of their sums.
    #[inline(always)]
    fn statistics_of_sums(&mut self, options: &Normalize, slots: usize) {
        let per_element = 1.0 / self.groups.len as f64;
        for slot in 0..slots {
            let (sum, square) = match self.with.center {
                true => (self.sums[slot], self.squares[slot]),
                false => (0.0, self.sums[slot]),
            };
            let delta = sum * per_element;
            let mean_square = square * per_element - delta * delta;
            // Rounding must not make it negative; a NaN stays one.
            let mean_square = if mean_square < 0.0 { 0.0 } else { mean_square };
            let near = self.nears[slot];
            self.found[slot] = Statistics {
                near,
                rest: scalar(delta),
                mean: scalar(near.to_f64() + delta),
                rstd: scalar(1.0 / (mean_square + options.eps).sqrt()),
            };
        }
    }

    /// Enters [`Output`].
    #[inline(always)]
    fn output<L>(&mut self, kind: usize, batch: Batch, span: &Range<usize>) -> u32
    where
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        let (rows, len) = (self, span.len().min(CHUNK * L::N));
        if appends_chunks::<L, T>(&rows.runs.outputs[..1], (rows.groups, len), rows.stream) {
            enter!(L, kind, OutputAppended { rows, batch, span })
        } else {
            enter!(L, kind, OutputRows { rows, batch, span })
        }
    }

    /// Writes the output; `far` as [`ForwardRows::first`] gave it.
    #[inline(always)]
    fn write<L>(&mut self, act: Act, batch: Batch, far: u32)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let post = self.with.gate == Some(GatePosition::Post);
        for_each_span!(L in self.groups, span => {
            if self.groups.len > LONG && self.with.keeps_p() {
                self.first::<L>(act, batch, span, true);
            }
            if post && self.with.fused.is_none() {
                self.gate_values::<L>(act, batch, span);
            }
            let mut far = far;
            if far == 0 {
                let (kind, rows) = (self.kind, &mut *self);
                far = rows.output::<L>(kind, batch, span);
            } else {
                for slot in (0..batch.len()).filter(|slot| far >> slot & 1 == 0) {
                    let (kind, rows, batch) = (self.kind, &mut *self, batch.one(slot));
                    rows.output::<L>(kind, batch, span);
                }
            }
            if far != 0 {
                // What was stored past the caches is stored again, and in part the ordinary way.
                L::fence();
            }
            for slot in bits(far) {
                let batch = batch.one(slot);
                if post {
                    self.gate_values::<L>(act, batch, span);
                }
                let rows = &mut *self;
                rows.output::<L>(USUAL, batch, span);
            }
        });
    }
}

/// See [`ForwardRows::first`].
struct First<'r, 'g, L, T: Element, const KIND: usize> {
    rows: &'r mut ForwardRows<'g, T>,
    batch: Batch,
    span: &'r Range<usize>,
    keeps_sum: bool,
    lanes: PhantomData<L>,
}

impl<L, T, const KIND: usize> Task for First<'_, '_, L, T, KIND>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let Self { rows, batch, span, .. } = self;
        let with = rows.with.known::<L, KIND>();
        let stream = rows.stream && rows.runs.outputs[1].streams();
        let keeps_sum = self.keeps_sum && rows.runs.outputs[1].len() > 0;
        let pre = with.gate == Some(GatePosition::Pre);
        let (fused, unfused) = (pre && with.fused.is_some(), pre && with.fused.is_none());
        let zero = L::splat(Real::of(0.0));
        // Each pass asks for some of the next batch, so that memory is busy in both.
        let next = rows.groups.ahead(batch);
        let mut all_far = 0;
        for_each_group!(batch, (row, group, slot) => {
            let group = rows.group(row, group, slot);
            let (mut noted, mut sum_of_all) = (zero, 0.0);
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group.x.len());
                let x = chunk.of(group.x, true);
                let residual = chunk.of(group.residual, with.added == Added::Input);
                let sum = chunk.of_mut(group.sum, keeps_sum || with.added == Added::InPlace);
                let gate = chunk.of(group.gate, fused);
                let gates = chunk.registers::<L>(group.gates, chunk.kept, unfused);
                let kept = chunk.registers_mut::<L>(group.p, chunk.kept, with.keeps_p());
                // Four sums; or one, as the short form needs the registers, and time enough for it to
                // wait.
                let (mut a, mut b, mut c, mut d, mut one) = (zero, zero, zero, zero, zero);
                blocks!(L in chunk.len, read [x, residual, gate, gates], write [sum, kept],
                    (i, whole, total of [a, b, c, d]) => {
                    let total = if fused { &mut one } else { total };
                    prefetch::<L, T>(residual, i, next);
                    prefetch::<L, T>(gate, i, next);
                    let inputs = FirstInputs { x, residual, gate, gates };
                    let p = inputs.p::<L>(with, (sum, keeps_sum), (i, whole), &mut noted, stream);
                    if with.keeps_p() {
                        p.set(kept, i);
                    }
                    *total = if with.center { total.add(p) } else { p.mul_add(p, *total) };
                });
                let total = if fused { one } else { a.add(b).add(c.add(d)) };
                sum_of_all += total.reduce_add().to_f64();
            }
            let so_far = if span.start == 0 { 0.0 } else { rows.sums[slot] };
            rows.sums[slot] = so_far + sum_of_all;
            if fused && L::is_far(noted, SHORT_LIMIT) {
                all_far |= 1 << slot;
            }
        });
        all_far
    }
}

/// The inputs of the first pass.
struct FirstInputs<'r, T: Element> {
    x: &'r [T],
    residual: &'r [T],
    gate: &'r [T],
    gates: &'r [T::Real],
}

impl<T: Element> FirstInputs<'_, T> {
    /// What is normalized, of a block. x + residual goes to the memory of the sum, if it is to be kept.
    #[inline(always)]
    fn p<L>(
        &self,
        with: ForwardWith,
        (sum, keeps_sum): (&mut [T], bool),
        (i, whole): (usize, bool),
        noted: &mut L,
        stream: bool,
    ) -> L
    where
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        let x: L = read(self.x, i, whole);
        let s = match with.added {
            Added::Nothing => x,
            Added::Input => x.add(read(self.residual, i, whole)),
            Added::InPlace => x.add(read(sum, i, whole)),
        };
        if with.added != Added::Nothing && keeps_sum {
            write(s, sum, i, whole, stream);
        }
        match (with.gate, with.fused) {
            (Some(GatePosition::Pre), None) => s.mul(L::get(self.gates, i)),
            (Some(GatePosition::Pre), Some(act)) => {
                *noted = L::note(self.gate, i, *noted);
                s.mul(act.stored_value::<L, true>(read(self.gate, i, whole)))
            }
            _ => s,
        }
    }
}

/// Adds to the sums of p - near and of its square, of a span of each group.
struct Squares<'r, L: Lanes> {
    p: &'r [L::Real],
    groups: Groups,
    slots: usize,
    span: &'r Range<usize>,
    nears: &'r Each<L::Real>,
    sums: &'r mut Each<f64>,
    squares: &'r mut Each<f64>,
}

impl<L> Task for Squares<'_, L>
where
    L: Lanes + Memory<<L as Lanes>::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { groups, .. } = self;
        let zero = L::splat(Real::of(0.0));
        for slot in 0..self.slots {
            let near = L::splat(self.nears[slot]);
            let (mut sum, mut square) = (0.0, 0.0);
            for start in self.span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, groups.len);
                let first = slot * groups.handed_on() + chunk.kept;
                let p = chunk.registers::<L>(self.p, first, true);
                let (mut a, mut b) = ((zero, zero), (zero, zero));
                blocks!(L in chunk.len, read [p], write [], (i, whole, total of [a, b]) => {
                    let mut q = L::get(p, i).sub(near);
                    if !whole {
                        q = inside(q, i, chunk.len);
                    }
                    *total = (total.0.add(q), q.mul_add(q, total.1));
                });
                sum += a.0.add(b.0).reduce_add().to_f64();
                square += a.1.add(b.1).reduce_add().to_f64();
            }
            if self.span.start > 0 {
                (sum, square) = (self.sums[slot] + sum, self.squares[slot] + square);
            }
            (self.sums[slot], self.squares[slot]) = (sum, square);
        }
    }
}

/// Writes the output of a span of each group, and gives the slots, as bits, of those whose gates have
/// arguments that are too large for a short form.
struct Output<'r, 'g, L, T: Element, const KIND: usize, const APPENDED: bool> {
    rows: &'r mut ForwardRows<'g, T>,
    batch: Batch,
    span: &'r Range<usize>,
    lanes: PhantomData<L>,
}

type OutputRows<'r, 'g, L, T, const KIND: usize> = Output<'r, 'g, L, T, KIND, false>;
type OutputAppended<'r, 'g, L, T, const KIND: usize> = Output<'r, 'g, L, T, KIND, true>;

impl<L, T, const KIND: usize, const APPENDED: bool> Task for Output<'_, '_, L, T, KIND, APPENDED>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let Self { rows, batch, span, .. } = self;
        let (with, stream) = (rows.with.known::<L, KIND>(), rows.stream);
        if const { APPENDED && !<L::Line as Line>::ANY } {
            return 0; // never asked for
        }
        let post = with.gate == Some(GatePosition::Post);
        let (fused, unfused) = (post && with.fused.is_some(), post && with.fused.is_none());
        let zero = L::splat(Real::of(0.0));
        let next = rows.groups.ahead(batch);
        let mut all_far = 0;
        for_each_group!(batch, (row, group, slot) => {
            let Statistics { near, rest, rstd, .. } = rows.found[slot];
            let (near, rest, scale) = (L::splat(near), L::splat(rest), L::splat(rstd));
            let group = rows.group(row, group, slot);
            let (group_o, all_o) = match APPENDED {
                true => (&mut [][..], &mut group.o[span.clone()]),
                false => (group.o, &mut [][..]),
            };
            let mut appended = Appender::<L, T>::new(all_o);
            let mut noted = zero;
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group.x.len());
                let (x, o) = (chunk.of(group.x, true), chunk.of_mut(group_o, !APPENDED));
                let gate = with.gate.is_some() && (post || with.fused.is_none());
                let gate = chunk.of(group.gate, gate);
                let kept = chunk.registers::<L>(group.p, chunk.kept, with.keeps_p());
                let gates = chunk.registers::<L>(group.gates, chunk.kept, unfused);
                let factor = chunk.registers::<L>(group.factor, chunk.start, true);
                let bias = chunk.registers::<L>(group.bias, chunk.start, with.bias);
                let (mut a, mut b) = (zero, zero);
                blocks!(L in chunk.len, read [x, gate, kept, gates, factor, bias], write [o],
                    (i, whole, y of [a, b]) => {
                    prefetch::<L, T>(x, i, next);
                    prefetch::<L, T>(gate, i, next);
                    let p: L = if with.keeps_p() { L::get(kept, i) } else { read(x, i, whole) };
                    let q = if with.center { p.sub(near).sub(rest) } else { p };
                    let inputs = OutputInputs { gate, gates, factor, bias };
                    *y = inputs.output::<L>(with, q.mul(scale), (i, whole), &mut noted);
                } then {
                    if APPENDED {
                        append_step([a, b], &mut appended, (i, whole), with.fused.is_some(), chunk.len);
                    } else {
                        write_step([a, b], o, (i, whole), with.fused.is_some(), stream);
                    }
                });
            }
            appended.finish();
            if fused && L::is_far(noted, SHORT_LIMIT) {
                all_far |= 1 << slot;
            }
        });
        all_far
    }
}

/// What the output is made of, besides what is normalized.
struct OutputInputs<'r, T: Element> {
    gate: &'r [T],
    gates: &'r [T::Real],
    factor: &'r [T::Real],
    bias: &'r [T::Real],
}

impl<T: Element> OutputInputs<'_, T> {
    /// The output of a block, of r.
    #[inline(always)]
    fn output<L>(&self, with: ForwardWith, r: L, (i, whole): (usize, bool), noted: &mut L) -> L
    where
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        let factor = L::get(self.factor, i);
        let y = match with.bias {
            true => r.mul_add(factor, L::get(self.bias, i)),
            false => r.mul(factor),
        };
        match (with.gate, with.fused) {
            (Some(GatePosition::Post), None) => y.mul(L::get(self.gates, i)),
            (Some(GatePosition::Post), Some(act)) => {
                *noted = L::note(self.gate, i, *noted);
                y.mul(act.stored_value::<L, true>(read(self.gate, i, whole)))
            }
            _ => y,
        }
    }
}

/// [`Output`] of a batch and [`First`] of the one that comes next, block by block in one loop. So memory
/// is read and written all the time, where either pass alone would leave one of the two idle: stores
/// past the caches wait in few buffers. (On an Emerald Rapids, rows of 2,048: 2.2 ns for 16 elements
/// instead of 2.7 from the last-level cache, and 3.2 instead of 3.8 from memory.) The sums are those of
/// [`First`], in the same order. p of a block of the next batch takes the place of what was just used.
/// Gives the slots, as bits, of those whose gates have arguments that are too large for a short form.
struct Staggered<'r, 'g, L, T: Element, const KIND: usize, const APPENDED: bool> {
    rows: &'r mut ForwardRows<'g, T>,
    batch: Batch,
    next: Batch,
    lanes: PhantomData<L>,
}

type StaggeredRows<'r, 'g, L, T, const KIND: usize> = Staggered<'r, 'g, L, T, KIND, false>;
type StaggeredAppended<'r, 'g, L, T, const KIND: usize> = Staggered<'r, 'g, L, T, KIND, true>;

impl<L, T, const KIND: usize, const APPENDED: bool> Task for Staggered<'_, '_, L, T, KIND, APPENDED>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let Self { rows, batch, next, .. } = self;
        let (with, stream) = (rows.with.known::<L, KIND>(), rows.stream);
        if const { !L::MANY_REGISTERS || KIND == USUAL || APPENDED && !<L::Line as Line>::ANY }
            || with.center
        {
            return 0; // never asked for
        }
        let keeps_sum = rows.runs.outputs[1].len() > 0;
        let stream_sum = stream && rows.runs.outputs[1].streams();
        let post = with.gate == Some(GatePosition::Post);
        let fused = !post && with.fused.is_some();
        let zero = L::splat(Real::of(0.0));
        let mut all_far = 0;
        let [o, sum] = &mut rows.runs.outputs;
        let place = stretch(o, rows.groups, batch);
        let (mut o, mut appended) = o.or_appender::<L>(APPENDED, place);
        for slot in 0..batch.len() {
            let (at, next) = (batch.one(slot), next.one(slot));
            let scale = L::splat(rows.found[slot].rstd);
            let [x, residual, gate] = &rows.runs.inputs;
            let of = |at: Batch| rows.groups.range(at.groups.0);
            let next_residual = of_group(residual.row(next.rows.0), of(next));
            let gate_row = if post { at } else { next };
            let gate = of_group(gate.row(gate_row.rows.0), of(gate_row));
            let (group_x, next_x) = (&x.row(at.rows.0)[of(at)], &x.row(next.rows.0)[of(next)]);
            let group_o = of_group_mut(o.row(at.rows.0), of(at));
            let next_sum = of_group_mut(sum.row(next.rows.0), of(next));
            let handed_on = slot * rows.groups.handed_on()..(slot + 1) * rows.groups.handed_on();
            let (group_p, registers) =
                (of_group_mut(rows.p, handed_on), rows.groups.registers(at.groups.0));
            let (group_factor, group_bias) =
                (&rows.factor[registers.clone()], of_group(rows.bias, registers));
            let (mut noted, mut sum_of_all) = (zero, 0.0);
            for start in (0..group_x.len()).step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group_x.len());
                let (x, o) = (chunk.of(group_x, true), chunk.of_mut(group_o, !APPENDED));
                let next_x = chunk.of(next_x, true);
                let residual = chunk.of(next_residual, with.added == Added::Input);
                let sum = chunk.of_mut(next_sum, keeps_sum || with.added == Added::InPlace);
                let gate = chunk.of(gate, with.gate.is_some());
                let kept = chunk.registers_mut::<L>(group_p, chunk.kept, with.keeps_p());
                let factor = chunk.registers::<L>(group_factor, chunk.start, true);
                let bias = chunk.registers::<L>(group_bias, chunk.start, with.bias);
                // The outputs and the sums of four blocks.
                let (mut a, mut b, mut c, mut d) =
                    ((zero, zero), (zero, zero), (zero, zero), (zero, zero));
                let mut one = zero;
                blocks!(L in chunk.len, read [x, next_x, residual, gate, factor, bias],
                    write [o, sum, kept], (i, whole, at of [a, b, c, d]) => {
                    prefetch_soon::<L, T>(next_x, i);
                    prefetch_soon::<L, T>(residual, i);
                    prefetch_soon::<L, T>(gate, i);
                    let p: L = if with.keeps_p() { L::get(kept, i) } else { read(x, i, whole) };
                    let inputs = OutputInputs { gate, gates: &[], factor, bias };
                    at.0 = inputs.output::<L>(with, p.mul(scale), (i, whole), &mut noted);
                    let inputs = FirstInputs { x: next_x, residual, gate, gates: &[] };
                    let kept_sum = (&mut *sum, keeps_sum);
                    let p = inputs.p::<L>(with, kept_sum, (i, whole), &mut noted, stream_sum);
                    if with.keeps_p() {
                        p.set(kept, i);
                    }
                    let total = if fused { &mut one } else { &mut at.1 };
                    *total = p.mul_add(p, *total);
                } then {
                    let (blocks, nearly) = ([a.0, b.0, c.0, d.0], with.fused.is_some());
                    if APPENDED {
                        append_step(blocks, &mut appended, (i, whole), nearly, chunk.len);
                    } else {
                        write_step(blocks, o, (i, whole), nearly, stream);
                    }
                });
                let total = if fused { one } else { a.1.add(b.1).add(c.1.add(d.1)) };
                sum_of_all += total.reduce_add().to_f64();
            }
            rows.sums[slot] = sum_of_all;
            if with.fused.is_some() && L::is_far(noted, SHORT_LIMIT) {
                all_far |= 1 << slot;
            }
        }
        appended.finish();
        all_far
    }
}

/// [`Staggered`] of a plain norm, whose batches are of two halves: a row of one half and a row of the
/// other take turns, step by step. So memory is read and written at two places, which keeps more of it
/// busy, and the weight is read half as often. (Emerald Rapids, rows of 2,048 from memory: 0.90 of the
/// time. A loop in C takes 9.0 cycles for 16 elements one row at a time, 8.0 with two, 8.0 to 8.4 with
/// four. With a residual, a gate or backward, turns gain nothing.)
struct StaggeredPairs<'r, 'g, L, T: Element> {
    rows: &'r mut ForwardRows<'g, T>,
    batch: Batch,
    next: Batch,
    lanes: PhantomData<L>,
}

/// Blocks of a step of [`StaggeredPairs`], as many as sums in [`First`], and elements.
const PAIR_BLOCKS: usize = 4;
const PAIR_STEP: usize = PAIR_BLOCKS * MAX_LANES;

/// The most bytes of a row of [`StaggeredPairs`], which asks for the next two in the first-level cache.
const PAIR_ROW: usize = 8 << 10;

impl<L, T> Task for StaggeredPairs<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { rows, batch, next, .. } = self;
        if const { !L::MANY_REGISTERS } {
            return; // never asked for
        }
        let (half, ahead) = (batch.len() / 2, rows.groups.ahead(batch));
        for slot in 0..half {
            let slots = [slot, slot + half];
            let (at, next) = (slots.map(|s| batch.rows.0 + s), slots.map(|s| next.rows.0 + s));
            let scales = slots.map(|slot| rows.found[slot].rstd);
            let x = &rows.runs.inputs[0];
            let (x, next_x) = (at.map(|row| x.row(row)), next.map(|row| x.row(row)));
            let mut o = rows.runs.outputs[0].two_rows(at);
            let mut sums_of_all = [0.0; 2];
            for start in (0..x[0].len()).step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, x[0].len());
                let factor = chunk.registers::<L>(rows.factor, chunk.start, true);
                let [o_0, o_1] = &mut o;
                let mut turns = [
                    Turn::<L, T>::new(chunk, (x[0], next_x[0]), o_0, scales[0]),
                    Turn::<L, T>::new(chunk, (x[1], next_x[1]), o_1, scales[1]),
                ];
                for (step, factor) in factor.as_chunks().0.iter().enumerate() {
                    for turn in &mut turns {
                        turn.step(step, factor, ahead, rows.stream);
                    }
                }
                for (sum, turn) in sums_of_all.iter_mut().zip(turns) {
                    let [a, b, c, d] = turn.sums;
                    *sum += a.add(b).add(c.add(d)).reduce_add().to_f64();
                }
            }
            for (slot, sum) in slots.into_iter().zip(sums_of_all) {
                rows.sums[slot] = sum;
            }
        }
    }
}

/// A chunk of one of two rows that take turns, and of the row that takes its place.
struct Turn<'r, L, T: Element> {
    x: &'r [[T; PAIR_STEP]],
    next_x: &'r [[T; PAIR_STEP]],
    o: &'r mut [[T; PAIR_STEP]],
    scale: L,
    sums: [L; PAIR_BLOCKS],
}

impl<'r, L, T> Turn<'r, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    #[inline(always)]
    fn new(chunk: Chunk, (x, next_x): (&'r [T], &'r [T]), o: &'r mut [T], scale: T::Real) -> Self {
        Self {
            x: chunk.of(x, true).as_chunks().0,
            next_x: chunk.of(next_x, true).as_chunks().0,
            o: chunk.of_mut(o, true).as_chunks_mut().0,
            scale: L::splat(scale),
            sums: [L::splat(Real::of(0.0)); PAIR_BLOCKS],
        }
    }

    /// Writes a step of the output, and adds one of the next row to the sums. Asks for what lies `ahead`
    /// elements behind that.
    #[inline(always)]
    fn step(&mut self, step: usize, factor: &[T::Real; PAIR_STEP], ahead: usize, stream: bool) {
        let (x, next_x) = (&self.x[step], &self.next_x[step]);
        let mut outputs = [self.scale; PAIR_BLOCKS];
        for k in 0..PAIR_BLOCKS {
            let i = k * MAX_LANES;
            for line in lines_ahead::<L, T>(next_x, i, ahead) {
                L::prefetch(line);
            }
            let (x, p): (L, L) = (L::read_whole(x, i), L::read_whole(next_x, i));
            outputs[k] = x.mul(self.scale).mul(L::get(factor, i));
            self.sums[k] = p.mul_add(p, self.sums[k]);
        }
        write_step(outputs, &mut self.o[step], (0, true), false, stream);
    }
}
