//! The passes of the backward.

use std::marker::PhantomData;
use std::ops::Range;

use super::groups::{
    BATCH, Batch, Batches, CHUNK, Chunk, Each, Groups, LEAST_APPENDED, LONG, RECENT, USUAL,
    append_step, appends, appends_chunks, bits, blocks, enter, for_each_group, for_each_span,
    fusible, gate_values, inside, kinds, of_group, of_group_mut, prefetch, prefetch_soon, read,
    scalar, short_gates, stretch, write_block,
};
use super::{GatePosition, Normalize};
use crate::ops::act::Act;
use crate::pool::{Reals, RealsMut};
use crate::rows::{Part, Runs};
use crate::scratch::Scratch;
use crate::simd::{Appender, Kernel, Lanes, Line, MAX_LANES, Math, Memory, SHORT_LIMIT, Task};
use crate::{Element, Real};

/// What takes part in a backward call, and what is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BackwardWith {
    pub(super) residual: bool,
    pub(super) gate: Option<GatePosition>,
    /// As in [`super::ForwardWith`].
    pub(super) fused: Option<Act>,
    pub(super) center: bool,
    pub(super) grad_sum: bool,
    pub(super) dx: bool,
    pub(super) dresidual: bool,
    pub(super) dgate: bool,
    pub(super) dweight: bool,
    pub(super) dbias: bool,
}

impl BackwardWith {
    const RMS: Self = Self {
        residual: false,
        gate: None,
        fused: None,
        center: false,
        grad_sum: false,
        dx: true,
        dresidual: false,
        dgate: false,
        dweight: true,
        dbias: false,
    };

    /// As [`super::ForwardWith::usual`].
    const fn usual(kind: usize, short: bool) -> Self {
        let rms = Self::RMS;
        let pre = Self { gate: Some(GatePosition::Pre), dgate: true, ..rms };
        let post = Self { gate: Some(GatePosition::Post), dgate: true, ..rms };
        let [sigmoid, silu] = short_gates(short);
        match kind {
            0 => rms,
            1 => Self { dweight: false, ..rms },
            2 => Self { residual: true, ..rms },
            3 => Self { grad_sum: true, ..rms },
            4 => Self { center: true, dbias: true, ..rms },
            5 => Self { fused: sigmoid, ..pre },
            6 => Self { fused: sigmoid, ..post },
            7 => Self { fused: silu, ..pre },
            _ => Self { fused: silu, ..post },
        }
    }

    /// Whether the gradient of p is needed.
    #[inline(always)]
    fn dp(self) -> bool {
        self.dx || self.dresidual || (self.dgate && self.gate == Some(GatePosition::Pre))
    }
}

kinds!(BackwardWith);

pub(super) struct Backward<'r> {
    pub(super) options: Normalize,
    pub(super) with: BackwardWith,
    pub(super) factor: Reals<'r>,
    pub(super) bias: Reals<'r>,
    pub(super) part: Part<'r, 5, 3, 2, 0>,
    pub(super) stream: bool,
    /// Whether the parameters, and so their gradients, are of a wider type than x.
    pub(super) exactly: bool,
    /// Where the gradients of the weight and of the bias, whichever are asked for, are summed.
    pub(super) sums: RealsMut<'r>,
}

impl Kernel for Backward<'_> {
    #[inline(always)]
    fn run<L, T>(mut self)
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let groups = Groups::new(self.factor.len(), self.options.groups);
        let act = self.options.gate_act;
        let fused = match self.exactly || self.bias.len() > 0 {
            true => None,
            false => fusible::<L>(act, self.with.gate, groups.len),
        };
        let mut with = BackwardWith { fused, ..self.with };
        let mut kind = with.kind::<L>();
        if groups.len == 0 {
            return;
        }
        // A call that is usual but for the gradient of the weight, which nobody asks for: to sum it all
        // the same takes half the time of the general code.
        let mut forgotten = Scratch::<T::Real>::new(0);
        if const { L::N == MAX_LANES } && kind == USUAL && !with.dweight && !with.dbias {
            let mut more = BackwardWith { fused, dweight: true, ..self.with };
            let usual = more.kind::<L>();
            if usual < USUAL {
                (with, kind) = (more, usual);
                forgotten = Scratch::zeros(groups.padded());
            }
        }
        let factor = groups.widen::<L>(self.factor.get());
        let bias = groups.widen::<L>(self.bias.get());
        let (mut gates, mut slopes) =
            (groups.memory(with.gate.is_some()), groups.memory(with.gate.is_some()));
        let sums: &mut [T::Real] =
            if forgotten.is_empty() { self.sums.get() } else { &mut forgotten };
        let dweight_len = if with.dweight { groups.padded() } else { 0 };
        // The sums of a part that has no more rows are recent themselves.
        let few = self.part.range().len() <= RECENT;
        let mut recent = Scratch::<T::Real>::zeros(if few { 0 } else { sums.len() });
        let zero = Real::of(0.0);
        let none = Means { delta: zero, dr: zero, rdr: zero };
        let mut left = self.part.range().len();
        while left > 0 {
            let into = if few { &mut *sums } else { &mut recent };
            let (dweight, dbias) = into.split_at_mut(dweight_len);
            let mut wanted = RECENT.min(left);
            left -= wanted;
            while let Some(runs) = self.part.next_run::<T>(wanted) {
                wanted -= runs.rows;
                let batches = groups.batches(runs.rows);
                let mut rows = BackwardRows::<T> {
                    kind,
                    with,
                    groups,
                    runs,
                    factor: &factor,
                    bias: &bias,
                    dweight: &mut *dweight,
                    dbias: &mut *dbias,
                    gates: &mut gates,
                    slopes: &mut slopes,
                    statistics: [[zero; 2]; BATCH],
                    sums: [[0.0; 3]; BATCH],
                    means: [none; BATCH],
                    exactly: self.exactly,
                    // As `Act::pull_back` does.
                    cuts: matches!(act, Act::Relu | Act::ReluSquared),
                    stream: self.stream,
                };
                rows.differentiate::<L>(act, batches);
            }
            if !few {
                add_recent::<L>(&mut recent, sums);
            }
        }
    }
}

/// Adds what was summed of late to the sums of the part, and starts anew.
#[inline(always)]
fn add_recent<L: Lanes>(recent: &mut [L::Real], sums: &mut [L::Real]) {
    let zero = L::splat(Real::of(0.0));
    for i in (0..sums.len()).step_by(L::N) {
        L::get(sums, i).add(L::get(recent, i)).set(sums, i);
        zero.set(recent, i);
    }
}

/// What the gradients of a group need of all of it.
#[derive(Clone, Copy)]
struct Means<R> {
    /// What is left of the mean of p.
    delta: R,
    dr: R,
    /// That of r * dr.
    rdr: R,
}

/// Some rows of a backward.
struct BackwardRows<'r, T: Element> {
    kind: usize,
    with: BackwardWith,
    groups: Groups,
    runs: Runs<'r, T, 5, 3, 2>,
    factor: &'r [T::Real],
    bias: &'r [T::Real],
    dweight: &'r mut [T::Real],
    dbias: &'r mut [T::Real],
    /// g(gate), of each group of a batch; or exp(-gate), if the gate is fused.
    gates: &'r mut [T::Real],
    /// g'(gate), of each group of a batch.
    slopes: &'r mut [T::Real],
    /// Of each group of a batch: the kept mean and rstd; sums of q, of dr and of q * dr; and what comes
    /// of them.
    statistics: Each<[T::Real; 2]>,
    sums: Each<[f64; 3]>,
    means: Each<Means<T::Real>>,
    /// As in [`Backward`].
    exactly: bool,
    /// Whether the gate's gradient is 0 where the slope is, whatever arrives.
    cuts: bool,
    stream: bool,
}

/// The operands of a group.
struct BackwardGroup<'r, T: Element> {
    grad: &'r [T],
    x: &'r [T],
    residual: &'r [T],
    gate: &'r [T],
    grad_sum: &'r [T],
    dx: &'r mut [T],
    dresidual: &'r mut [T],
    dgate: &'r mut [T],
    factor: &'r [T::Real],
    bias: &'r [T::Real],
    dweight: &'r mut [T::Real],
    dbias: &'r mut [T::Real],
    gates: &'r mut [T::Real],
    slopes: &'r mut [T::Real],
}

impl<T: Element> BackwardRows<'_, T> {
    #[inline(always)]
    fn group(&mut self, row: usize, group: usize, slot: usize) -> BackwardGroup<'_, T> {
        let (range, registers) = (self.groups.range(group), self.groups.registers(group));
        let handed_on = slot * self.groups.handed_on()..(slot + 1) * self.groups.handed_on();
        let [grad, x, residual, gate, grad_sum] = &self.runs.inputs;
        let [dx, dresidual, dgate] = &mut self.runs.outputs;
        BackwardGroup {
            grad: &grad.row(row)[range.clone()],
            x: &x.row(row)[range.clone()],
            residual: of_group(residual.row(row), range.clone()),
            gate: of_group(gate.row(row), range.clone()),
            grad_sum: of_group(grad_sum.row(row), range.clone()),
            dx: of_group_mut(dx.row(row), range.clone()),
            dresidual: of_group_mut(dresidual.row(row), range.clone()),
            dgate: of_group_mut(dgate.row(row), range),
            factor: &self.factor[registers.clone()],
            bias: of_group(self.bias, registers.clone()),
            dweight: of_group_mut(self.dweight, registers.clone()),
            dbias: of_group_mut(self.dbias, registers),
            gates: of_group_mut(self.gates, handed_on.clone()),
            slopes: of_group_mut(self.slopes, handed_on),
        }
    }

    /// g(gate) and g'(gate) of a span of each group of a batch.
    #[inline(always)]
    fn gate_values<L>(&mut self, act: Act, batch: Batch, span: &Range<usize>)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let exactly = self.exactly;
        for_each_group!(batch, (row, group, slot) => {
            let BackwardGroup { x, gate, gates, slopes, .. } = self.group(row, group, slot);
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, x.len());
                gate_values::<L, T>(act, exactly, gate, chunk, gates, slopes);
            }
        });
    }

    /// The gradients of batch after batch; as `ForwardRows::normalize`.
    #[inline(always)]
    fn differentiate<L>(&mut self, act: Act, mut batches: Batches)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let loops = self.kind < USUAL && !self.with.center;
        let gate = self.with.gate.is_none() || self.with.fused.is_some();
        let staggers = loops && gate && self.groups.staggers::<L>();
        let mut coming = batches.next();
        let mut found = None;
        while let Some(batch) = coming {
            let far = match found.take() {
                Some(far) => far,
                None => self.means::<L>(act, batch),
            };
            coming = batches.next();
            match coming {
                Some(next) if staggers && far == 0 && next.len() == batch.len() => {
                    let (kind, rows) = (self.kind, &mut *self);
                    let far =
                        if appends::<L, T>(&rows.runs.outputs, (rows.groups, batch), rows.stream) {
                            enter!(L, kind, StaggeredAppended { rows, batch, next })
                        } else {
                            enter!(L, kind, StaggeredRows { rows, batch, next })
                        };
                    self.take_statistics(next);
                    self.sums_anew::<L>(act, next, &(0..self.groups.len), far);
                    self.means_of_sums(next.len());
                    found = Some(far);
                }
                _ => self.gradients::<L>(act, batch, far),
            }
        }
    }

    /// Takes what the forward has kept of each group.
    #[inline(always)]
    fn take_statistics(&mut self, batch: Batch) {
        let [rstds, means] = &self.runs.kept;
        for_each_group!(batch, (row, group, slot) => {
            let rstd = scalar(rstds.row(row)[group].to_f64());
            let mean = scalar(means.row(row).get(group).map_or(0.0, |mean| mean.to_f64()));
            self.statistics[slot] = [mean, rstd];
        });
    }

    /// The sums of some slots without the short form of the gate.
    #[inline(always)]
    fn sums_anew<L>(&mut self, act: Act, batch: Batch, span: &Range<usize>, slots: u32)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        for slot in bits(slots) {
            let batch = batch.one(slot);
            self.gate_values::<L>(act, batch, span);
            let rows = &mut *self;
            enter!(L, USUAL, Sums { rows, batch, span });
        }
    }

    /// The means of the first slots, of their sums.
    #[inline(always)]
    fn means_of_sums(&mut self, slots: usize) {
        let per_element = 1.0 / self.groups.len as f64;
        for slot in 0..slots {
            let ([q, dr, qdr], [_, rstd]) = (self.sums[slot], self.statistics[slot]);
            let delta = q * per_element;
            let rdr = (qdr - delta * dr) * rstd.to_f64() * per_element;
            let (delta, dr, rdr) = (scalar(delta), scalar(dr * per_element), scalar(rdr));
            self.means[slot] = Means { delta, dr, rdr };
        }
    }

    /// Whether there is a pass for the means.
    #[inline(always)]
    fn needs_means(&self) -> bool {
        self.with.center || self.with.dp()
    }

    /// Finds the means of each group; gives the slots, as bits, of those whose gates have arguments
    /// that are too large for a short form.
    #[inline(always)]
    fn means<L>(&mut self, act: Act, batch: Batch) -> u32
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        self.take_statistics(batch);
        let mut far = 0;
        if !self.needs_means() {
            return far;
        }
        let unfused = self.with.gate.is_some() && self.with.fused.is_none();
        for_each_span!(L in self.groups, span => {
            if unfused {
                self.gate_values::<L>(act, batch, span);
            }
            let (kind, rows) = (self.kind, &mut *self);
            let found = enter!(L, kind, Sums { rows, batch, span });
            self.sums_anew::<L>(act, batch, span, found);
            far |= found;
        });
        self.means_of_sums(batch.len());
        far
    }

    /// Writes the gradients, and adds to those of the parameters; `far` as
    /// [`BackwardRows::means`] gave it.
    #[inline(always)]
    fn gradients<L>(&mut self, act: Act, batch: Batch, far: u32)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let unfused = self.with.gate.is_some() && self.with.fused.is_none();
        for_each_span!(L in self.groups, span => {
            if unfused && (self.groups.len > LONG || !self.needs_means()) {
                self.gate_values::<L>(act, batch, span);
            }
            if far == 0 {
                let (kind, rows) = (self.kind, &mut *self);
                enter!(L, kind, Gradients { rows, batch, span });
                continue;
            }
            // One by one, in order: so that the parameters' gradients are summed in it.
            for slot in 0..batch.len() {
                let kind = if far >> slot & 1 == 1 { USUAL } else { self.kind };
                let (rows, batch) = (&mut *self, batch.one(slot));
                enter!(L, kind, Gradients { rows, batch, span });
            }
        });
    }
}

/// The inputs that both passes of the backward start from.
struct Inputs<'r, T: Element> {
    grad: &'r [T],
    x: &'r [T],
    residual: &'r [T],
    factor: &'r [T::Real],
}

/// A block of them.
struct Loaded<L> {
    /// The gradient that arrives.
    grad: L,
    /// x + residual.
    sum: L,
    /// p minus the kept mean.
    q: L,
    /// The gradient of the output before the gate.
    grad1: L,
    /// The weight with all that is worked into it.
    factor: L,
    /// The gradient of r.
    dr: L,
}

impl<T: Element> Inputs<'_, T> {
    /// `gate` is the gate's value, if there is a gate.
    #[inline(always)]
    fn load<L>(&self, with: BackwardWith, mean: L, gate: L, i: usize, whole: bool) -> Loaded<L>
    where
        L: Lanes<Real = T::Real> + Memory<T>,
    {
        let grad: L = read(self.grad, i, whole);
        let mut sum: L = read(self.x, i, whole);
        if with.residual {
            sum = sum.add(read(self.residual, i, whole));
        }
        let (p, grad1) = match with.gate {
            None => (sum, grad),
            Some(GatePosition::Pre) => (sum.mul(gate), grad),
            Some(GatePosition::Post) => (sum, grad.mul(gate)),
        };
        let q = if with.center { p.sub(mean) } else { p };
        let factor = L::get(self.factor, i);
        Loaded { grad, sum, q, grad1, factor, dr: grad1.mul(factor) }
    }
}

impl<T: Element> Inputs<'_, T> {
    /// [`Inputs::load`] of the first pass. Of a fused gate, it keeps e in the place of `gates`, which
    /// otherwise has the gate's values.
    #[inline(always)]
    fn load_and_gate<L>(
        &self,
        with: BackwardWith,
        mean: L,
        (gate, gates): (&[T], &mut [T::Real]),
        (i, whole): (usize, bool),
        noted: &mut L,
    ) -> Loaded<L>
    where
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        let value = match (with.gate, with.fused) {
            (None, _) => L::splat(Real::of(0.0)),
            (_, None) => L::get(gates, i),
            (_, Some(act)) => {
                *noted = <L as Memory<T>>::note(gate, i, *noted);
                let e = read::<L, T>(gate, i, whole).exp_minus_for_store();
                e.set(gates, i);
                Fused::new(e).value(act, gate, i, whole)
            }
        };
        self.load::<L>(with, mean, value, i, whole)
    }
}

/// What the gate's value and slope are made of, where it is fused: with e = exp(-gate) and
/// s = 1 / (1 + e), sigmoid is s, and silu is gate * s. The first pass keeps e for the second, which
/// takes less memory than to keep both, and less time than to find e again.
struct Fused<L> {
    e: L,
    s: L,
    divisor: L,
}

impl<L: Math> Fused<L> {
    #[inline(always)]
    fn new(e: L) -> Self {
        let divisor = e.add(L::splat(Real::of(1.0)));
        Self { e, s: divisor.reciprocal_for_store(), divisor }
    }

    /// g(gate) of a block; only silu reads it.
    #[inline(always)]
    fn value<T>(&self, act: Act, gate: &[T], i: usize, whole: bool) -> L
    where
        T: Element<Real = L::Real>,
        L: Memory<T>,
    {
        if act == Act::Silu { read::<L, T>(gate, i, whole).mul(self.s) } else { self.s }
    }

    /// g'(gate) of a block of silu.
    #[inline(always)]
    fn silu_slope(&self, gate: L) -> L {
        gate.mul_add(self.e, self.divisor).mul(self.s).mul(self.s)
    }
}

/// Adds to the sums of q and of dr, if centered, and of q * dr, of a span of each group; gives the
/// slots, as bits, of those whose gates have arguments that are too large for a short form.
struct Sums<'r, 'g, L, T: Element, const KIND: usize> {
    rows: &'r mut BackwardRows<'g, T>,
    batch: Batch,
    span: &'r Range<usize>,
    lanes: PhantomData<L>,
}

impl<L, T, const KIND: usize> Task for Sums<'_, '_, L, T, KIND>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let Self { rows, batch, span, .. } = self;
        let with = rows.with.known::<L, KIND>();
        let zero = L::splat(Real::of(0.0));
        // As in `First`.
        let (fused, next) = (with.fused.is_some(), rows.groups.ahead(batch));
        let mut all_far = 0;
        for_each_group!(batch, (row, group, slot) => {
            let mean = L::splat(rows.statistics[slot][0]);
            let group = rows.group(row, group, slot);
            let (mut noted, mut sums) = (zero, [0.0; 3]);
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group.x.len());
                let grad = chunk.of(group.grad, true);
                let x = chunk.of(group.x, true);
                let residual = chunk.of(group.residual, with.residual);
                let factor = chunk.registers::<L>(group.factor, chunk.start, true);
                let gate = chunk.of(group.gate, with.fused.is_some());
                let gates = chunk.registers_mut::<L>(group.gates, chunk.kept, with.gate.is_some());
                let (mut qs, mut drs, mut a, mut b, mut one) = (zero, zero, zero, zero, zero);
                blocks!(L in chunk.len, read [grad, x, residual, factor, gate], write [gates],
                    (i, whole, qdrs of [a, b]) => {
                    prefetch::<L, T>(gate, i, next);
                    let inputs = Inputs { grad, x, residual, factor };
                    let at = inputs.load_and_gate::<L>(with, mean, (gate, gates), (i, whole), &mut noted);
                    let qdrs = if fused { &mut one } else { qdrs };
                    *qdrs = at.q.mul_add(at.dr, *qdrs);
                    if with.center {
                        qs = qs.add(if whole { at.q } else { inside(at.q, i, chunk.len) });
                        drs = drs.add(at.dr);
                    }
                });
                let qdrs = if fused { one } else { a.add(b) };
                for (sum, found) in sums.iter_mut().zip([qs, drs, qdrs]) {
                    *sum += found.reduce_add().to_f64();
                }
            }
            if span.start > 0 {
                for (sum, so_far) in sums.iter_mut().zip(rows.sums[slot]) {
                    *sum += so_far;
                }
            }
            rows.sums[slot] = sums;
            if fused && <L as Memory<T>>::is_far(noted, SHORT_LIMIT) {
                all_far |= 1 << slot;
            }
        });
        all_far
    }
}

/// Writes the gradients of a span of each group, and adds to those of the parameters.
struct Gradients<'r, 'g, L, T: Element, const KIND: usize> {
    rows: &'r mut BackwardRows<'g, T>,
    batch: Batch,
    span: &'r Range<usize>,
    lanes: PhantomData<L>,
}

impl<L, T, const KIND: usize> Task for Gradients<'_, '_, L, T, KIND>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { rows, batch, span, lanes } = self;
        let (with, stream, cuts) = (rows.with, rows.stream, rows.cuts);
        let next = rows.groups.ahead(batch);
        let place = (rows.groups, rows.groups.len);
        let appended = appends_chunks::<L, T>(&rows.runs.outputs, place, stream);
        for_each_group!(batch, (row, group, slot) => {
            let (statistics, means) = (rows.statistics[slot], rows.means[slot]);
            let group = &mut rows.group(row, group, slot);
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group.x.len());
                let options = (with, stream, cuts);
                let group = &mut *group;
                let task = GradientsOfChunk::<L, T, KIND, false> {
                    options,
                    group,
                    chunk,
                    statistics,
                    means,
                    next,
                    lanes,
                };
                if appended && chunk.len >= LEAST_APPENDED {
                    L::enter(task.appended());
                } else {
                    L::enter(task);
                }
            }
        });
    }
}

/// [`Gradients`] of a chunk of one group. A function of its own, as its loop needs all registers.
struct GradientsOfChunk<'r, 'g, L, T: Element, const KIND: usize, const APPENDED: bool> {
    /// What takes part, whether to stream, and [`BackwardRows::cuts`].
    options: (BackwardWith, bool, bool),
    group: &'r mut BackwardGroup<'g, T>,
    chunk: Chunk,
    statistics: [T::Real; 2],
    means: Means<T::Real>,
    /// How many elements behind this chunk to ask for memory.
    next: usize,
    lanes: PhantomData<L>,
}

impl<'r, 'g, L, T: Element, const KIND: usize> GradientsOfChunk<'r, 'g, L, T, KIND, false> {
    #[inline(always)]
    fn appended(self) -> GradientsOfChunk<'r, 'g, L, T, KIND, true> {
        let Self { options, group, chunk, statistics, means, next, lanes } = self;
        GradientsOfChunk { options, group, chunk, statistics, means, next, lanes }
    }
}

impl<L, T, const KIND: usize, const APPENDED: bool> Task
    for GradientsOfChunk<'_, '_, L, T, KIND, APPENDED>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { options: (with, stream, cuts), group, chunk, next, .. } = self;
        if const { APPENDED && !<L::Line as Line>::ANY } {
            return; // never asked for
        }
        let with = with.known::<L, KIND>();
        let zero = L::splat(Real::of(0.0));
        let fused = with.fused.is_some();
        let numbers = Numbers::new(self.statistics, self.means);
        let grad = chunk.of(group.grad, true);
        let x = chunk.of(group.x, true);
        let residual = chunk.of(group.residual, with.residual);
        let gate = chunk.of(group.gate, with.gate.is_some());
        let grad_sum = chunk.of(group.grad_sum, with.grad_sum);
        let factor = chunk.registers::<L>(group.factor, chunk.start, true);
        let bias = chunk.registers::<L>(group.bias, chunk.start, !group.bias.is_empty());
        let gates = chunk.registers::<L>(group.gates, chunk.kept, with.gate.is_some());
        let slopes = chunk.registers::<L>(group.slopes, chunk.kept, with.dgate && !fused);
        let dx = chunk.of_mut(group.dx, with.dx);
        let dresidual = chunk.of_mut(group.dresidual, with.dresidual);
        let dgate = chunk.of_mut(group.dgate, with.dgate);
        let dweight = chunk.registers_mut::<L>(group.dweight, chunk.start, with.dweight);
        let dbias = chunk.registers_mut::<L>(group.dbias, chunk.start, with.dbias);
        let rows = [dx, dresidual, dgate];
        let none: [&mut [T]; 3] = [&mut [], &mut [], &mut []];
        let ([dx, dresidual, dgate], [all_dx, all_dresidual, all_dgate]) =
            if APPENDED { (none, rows) } else { (rows, none) };
        let mut to_dx = Appender::<L, T>::new(all_dx);
        let mut to_dresidual = Appender::<L, T>::new(all_dresidual);
        let mut to_dgate = Appender::<L, T>::new(all_dgate);
        let (mut a, mut b) = ((), ());
        blocks!(L in chunk.len,
            read [grad, x, residual, gate, grad_sum, factor, bias, gates, slopes],
            write [dx, dresidual, dgate, dweight, dbias],
            (i, whole, _slot of [a, b]) => {
            prefetch::<L, T>(x, i, next);
            prefetch::<L, T>(grad, i, next);
            prefetch::<L, T>(residual, i, next);
            if !fused {
                prefetch::<L, T>(gate, i, next);
            }
            let kept = if with.gate.is_some() { L::get(gates, i) } else { zero };
            let from = GradientInputs {
                at: Inputs { grad, x, residual, factor },
                gate,
                grad_sum,
                bias,
                slopes,
            };
            let appended =
                APPENDED.then_some([&mut to_dx, &mut to_dresidual, &mut to_dgate]);
            let to = GradientOutputs { dx, dresidual, dgate, dweight, dbias, appended };
            from.write::<L>(with, kept, &numbers, to, (i, whole), (stream, cuts));
        });
        to_dx.finish();
        to_dresidual.finish();
        to_dgate.finish();
    }
}

/// What the blocks of a group share.
struct Numbers<L> {
    mean: L,
    rstd: L,
    delta: L,
    mean_dr: L,
    mean_rdr: L,
}

impl<L: Lanes> Numbers<L> {
    #[inline(always)]
    fn new([mean, rstd]: [L::Real; 2], Means { delta, dr, rdr }: Means<L::Real>) -> Self {
        let [mean, rstd, delta, mean_dr, mean_rdr] = [mean, rstd, delta, dr, rdr].map(L::splat);
        Self { mean, rstd, delta, mean_dr, mean_rdr }
    }
}

/// What gradients are made of.
struct GradientInputs<'r, T: Element> {
    at: Inputs<'r, T>,
    gate: &'r [T],
    grad_sum: &'r [T],
    bias: &'r [T::Real],
    slopes: &'r [T::Real],
}

/// Where they go.
struct GradientOutputs<'r, 'a, L: Memory<T>, T: Element<Real = L::Real>> {
    dx: &'r mut [T],
    dresidual: &'r mut [T],
    dgate: &'r mut [T],
    dweight: &'r mut [T::Real],
    dbias: &'r mut [T::Real],
    /// What the first three are appended to, if they are not written to their rows.
    appended: Option<[&'r mut Appender<'a, L, T>; 3]>,
}

impl<T: Element> GradientInputs<'_, T> {
    /// Writes the gradients of a block, and adds to those of the parameters. `kept` is the gate's value,
    /// or e if it is fused.
    #[inline(always)]
    fn write<L>(
        &self,
        with: BackwardWith,
        kept: L,
        numbers: &Numbers<L>,
        mut to: GradientOutputs<'_, '_, L, T>,
        (i, whole): (usize, bool),
        (stream, cuts): (bool, bool),
    ) where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let (zero, len) = (L::splat(Real::of(0.0)), self.at.grad.len());
        let (pre, fused) = (with.gate == Some(GatePosition::Pre), with.fused.is_some());
        let parts = Fused::new(kept);
        let value = match with.fused {
            None => kept,
            Some(act) => parts.value(act, self.gate, i, whole),
        };
        let at = self.at.load::<L>(with, numbers.mean, value, i, whole);
        // From a fused gate to the results, the ways are short: many have to be under way at once.
        // (Its value is bounded, so that the products are in range in any order.)
        let (short, scale) = (pre && fused, value.mul(numbers.rstd));
        let r = match with.center {
            true => at.q.sub(numbers.delta).mul(numbers.rstd),
            false if short => at.sum.mul(scale),
            false => at.q.mul(numbers.rstd),
        };
        if with.dweight {
            at.grad1.mul_add(r, L::get(to.dweight, i)).set(to.dweight, i);
        }
        if with.dbias {
            at.grad1.add(L::get(to.dbias, i)).set(to.dbias, i);
        }
        let dr = if with.center { at.dr.sub(numbers.mean_dr) } else { at.dr };
        let unscaled = r.neg_mul_add(numbers.mean_rdr, dr);
        let dp = unscaled.mul(numbers.rstd);
        let mut ds = match pre {
            true if short => unscaled.mul(scale),
            true => dp.mul(value),
            false => dp,
        };
        if with.dgate {
            let gradient = match with.fused {
                // sigmoid' is s^2 e. One s of it is in r, which is sum * s * rstd (a fused gate is
                // never centered); or in dr.
                Some(Act::Sigmoid) if pre => unscaled.mul(r.mul(parts.e.mul(parts.s))),
                Some(Act::Sigmoid) => at.dr.mul(r).mul(parts.e.mul(parts.s)),
                Some(_) if pre => {
                    let slope = parts.silu_slope(read(self.gate, i, whole));
                    unscaled.mul(at.sum.mul(numbers.rstd).mul(slope))
                }
                _ => {
                    let dvalue = if pre {
                        dp.mul(at.sum)
                    } else if self.bias.is_empty() {
                        at.grad.mul(r.mul(at.factor))
                    } else {
                        at.grad.mul(r.mul(at.factor).add(L::get(self.bias, i)))
                    };
                    let slope = match fused {
                        true => parts.silu_slope(read(self.gate, i, whole)),
                        false => L::get(self.slopes, i),
                    };
                    let gradient = dvalue.mul(slope);
                    if !fused && cuts {
                        L::select(slope.le(zero), zero, gradient)
                    } else {
                        gradient
                    }
                }
            };
            match &mut to.appended {
                None => write_block(gradient, to.dgate, (i, whole), fused, stream),
                Some([_, _, dgate]) => append_step([gradient], dgate, (i, whole), fused, len),
            }
        }
        if with.grad_sum {
            ds = ds.add(read(self.grad_sum, i, whole));
        }
        if with.dx {
            match &mut to.appended {
                None => write_block(ds, to.dx, (i, whole), fused, stream),
                Some([dx, ..]) => append_step([ds], dx, (i, whole), fused, len),
            }
        }
        if with.dresidual {
            match &mut to.appended {
                None => write_block(ds, to.dresidual, (i, whole), fused, stream),
                Some([_, dresidual, _]) => append_step([ds], dresidual, (i, whole), fused, len),
            }
        }
    }
}

/// [`Gradients`] of a batch and [`Sums`] of the one that comes next, block by block in one loop; see
/// `Staggered` of the forward. e of a block of the next batch takes the place of what was just used.
struct Staggered<'r, 'g, L, T: Element, const KIND: usize, const APPENDED: bool> {
    rows: &'r mut BackwardRows<'g, T>,
    batch: Batch,
    next: Batch,
    lanes: PhantomData<L>,
}

type StaggeredRows<'r, 'g, L, T, const KIND: usize> = Staggered<'r, 'g, L, T, KIND, false>;
type StaggeredAppended<'r, 'g, L, T, const KIND: usize> = Staggered<'r, 'g, L, T, KIND, true>;

impl<L, T, const KIND: usize, const APPENDED: bool> Task for Staggered<'_, '_, L, T, KIND, APPENDED>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let Self { rows, batch, next, .. } = self;
        let (with, stream, cuts) = (rows.with.known::<L, KIND>(), rows.stream, rows.cuts);
        if const { !L::MANY_REGISTERS || KIND == USUAL || APPENDED && !<L::Line as Line>::ANY }
            || with.center
        {
            return 0; // never asked for
        }
        let zero = L::splat(Real::of(0.0));
        let fused = with.fused.is_some();
        let mut all_far = 0;
        let [dx, _, dgate] = &mut rows.runs.outputs;
        let (mut all_dx, mut all_dgate) = (dx.take_if(APPENDED), dgate.take_if(APPENDED));
        let (at_dx, at_dgate) =
            (stretch(&all_dx, rows.groups, batch), stretch(&all_dgate, rows.groups, batch));
        let mut appended_dx = all_dx.appender::<L>(at_dx);
        let mut appended_dgate = all_dgate.appender::<L>(at_dgate);
        let mut no_dresidual = Appender::<L, T>::new(&mut []);
        for slot in 0..batch.len() {
            let (at, next) = (batch.one(slot), next.one(slot));
            let numbers = Numbers::<L>::new(rows.statistics[slot], rows.means[slot]);
            let [grad, x, residual, gate, _] = &rows.runs.inputs;
            let range = rows.groups.range(next.groups.0);
            let next_grad = &grad.row(next.rows.0)[range.clone()];
            let next_x = &x.row(next.rows.0)[range.clone()];
            let next_residual = of_group(residual.row(next.rows.0), range.clone());
            let next_gate = of_group(gate.row(next.rows.0), range);
            let next_factor = &rows.factor[rows.groups.registers(next.groups.0)];
            let group = rows.group(at.rows.0, at.groups.0, slot);
            let (mut noted, mut sum) = (zero, 0.0);
            for start in (0..group.x.len()).step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group.x.len());
                let grad = chunk.of(group.grad, true);
                let x = chunk.of(group.x, true);
                let residual = chunk.of(group.residual, with.residual);
                let gate = chunk.of(group.gate, with.gate.is_some());
                let grad_sum = chunk.of(group.grad_sum, with.grad_sum);
                let factor = chunk.registers::<L>(group.factor, chunk.start, true);
                let gates = chunk.registers_mut::<L>(group.gates, chunk.kept, with.gate.is_some());
                let dx = chunk.of_mut(group.dx, with.dx && !APPENDED);
                let dgate = chunk.of_mut(group.dgate, with.dgate && !APPENDED);
                let dweight = chunk.registers_mut::<L>(group.dweight, chunk.start, with.dweight);
                let next_grad = chunk.of(next_grad, true);
                let next_x = chunk.of(next_x, true);
                let next_residual = chunk.of(next_residual, with.residual);
                let next_gate = chunk.of(next_gate, with.gate.is_some());
                let next_factor = chunk.registers::<L>(next_factor, chunk.start, true);
                let (mut a, mut b, mut one) = (zero, zero, zero);
                blocks!(L in chunk.len,
                    read [grad, x, residual, gate, grad_sum, factor,
                        next_grad, next_x, next_residual, next_gate, next_factor],
                    write [gates, dx, dgate, dweight], (i, whole, qdrs of [a, b]) => {
                    prefetch_soon::<L, T>(next_grad, i);
                    prefetch_soon::<L, T>(next_x, i);
                    prefetch_soon::<L, T>(next_residual, i);
                    prefetch_soon::<L, T>(next_gate, i);
                    prefetch_soon::<L, T>(grad_sum, i);
                    let kept = if with.gate.is_some() { L::get(gates, i) } else { zero };
                    // Loads before stores: an address that differs from that of a store just before
                    // in its upper bits only, as those of rows of 4 KiB do, has to wait for it.
                    let inputs = Inputs {
                        grad: next_grad,
                        x: next_x,
                        residual: next_residual,
                        factor: next_factor,
                    };
                    let of_next = (next_gate, &mut *gates);
                    let at = inputs.load_and_gate::<L>(with, zero, of_next, (i, whole), &mut noted);
                    let qdrs = if fused { &mut one } else { qdrs };
                    *qdrs = at.q.mul_add(at.dr, *qdrs);
                    let at = Inputs { grad, x, residual, factor };
                    let from = GradientInputs { at, gate, grad_sum, bias: &[], slopes: &[] };
                    let to = GradientOutputs {
                        dx,
                        dresidual: &mut [],
                        dgate,
                        dweight,
                        dbias: &mut [],
                        appended: APPENDED.then_some([
                            &mut appended_dx,
                            &mut no_dresidual,
                            &mut appended_dgate,
                        ]),
                    };
                    from.write::<L>(with, kept, &numbers, to, (i, whole), (stream, cuts));
                });
                sum += if fused { one } else { a.add(b) }.reduce_add().to_f64();
            }
            rows.sums[slot] = [0.0, 0.0, sum];
            if fused && <L as Memory<T>>::is_far(noted, SHORT_LIMIT) {
                all_far |= 1 << slot;
            }
        }
        appended_dx.finish();
        appended_dgate.finish();
        if APPENDED {
            let [dx, _, dgate] = &mut rows.runs.outputs;
            (*dx, *dgate) = (all_dx, all_dgate);
        }
        all_far
    }
}
