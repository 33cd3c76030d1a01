//! Softmax over the last dimension: row by row, a few at a time where they are short.

use std::marker::PhantomData;

use super::blocks::{
    BLOCKS, STEP, To, blocks, logarithm, pull_back, read, steps, write_nearest, write_steps,
    zero_where_zero,
};
use super::{LINE, NEAR, Task};
use crate::rows::{Run, RunMut, Stage, Unstage};
use crate::scratch::Scratch;
use crate::simd::{self, Lanes, Line, MAX_LANES, Math, Memory};
use crate::{Element, Real};

/// Blocks of a row that are summed as lanes.
const CHUNK: usize = 64;
/// The most rows that are worked on at once, and the most elements in them.
const BATCH: usize = 16;
const BATCH_ELEMENTS: usize = 2048;

/// Rows of `len` elements to work on at once.
fn batch(len: usize) -> usize {
    (BATCH_ELEMENTS / len.max(1)).clamp(1, BATCH)
}

/// Fills `scratch`, in register order, with exp(x - max) of a row, and gives 1 / sum.
///
/// Zeros stand past the row's end, up to a whole number of blocks, which `scratch` has to have
/// room for. The softmax is their product, for every row: one with a NaN or a plus infinity has 1 /
/// sum = NaN, and one of nothing but minus infinity has zeros and 1 / sum = infinity.
#[inline(always)]
pub(crate) fn exp_row<L, T>(x: &[T], scratch: &mut [T::Real]) -> T::Real
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let shift = row_shift::<L, T>(x);
    inverse(exp_sum::<L, T, true, true>(x, shift, scratch), false)
}

/// What a row's exponentials are taken relative to: its maximum, but 0 where that is minus
/// infinity. Of any value where the row has a NaN.
#[inline(always)]
fn row_shift<L, T>(x: &[T]) -> T::Real
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let least = T::Real::MINUS_INFINITY;
    let mut max = L::splat(least);
    blocks!(L in 0..x.len(), (i, WHOLE) => {
        max = max.max(read::<L, T, WHOLE>(x, i, least));
    });
    let max = max.reduce_max();
    if max == least { T::Real::of(0.0) } else { max }
}

/// e^x. A softmax that is stored need not have it `EXACT`. The logarithm of a sum does: near 0, an
/// error of the sum is as large there as it is in the sum. So do gradients, in which terms cancel.
#[inline(always)]
fn exponential<L: Math, const EXACT: bool>(x: L) -> L {
    if EXACT { x.exp() } else { x.exp_for_store::<false>() }
}

/// The sum of exp(x - shift) over a row; with `KEPT`, `scratch` is filled with them, in register
/// order.
#[inline(always)]
fn exp_sum<L, T, const EXACT: bool, const KEPT: bool>(
    x: &[T],
    shift: T::Real,
    scratch: &mut [T::Real],
) -> f64
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (shift, mut total) = (L::splat(shift), 0.0);
    for start in (0..x.len()).step_by(CHUNK * L::N) {
        let mut sum = L::splat(Real::of(0.0));
        blocks!(L in start..x.len().min(start + CHUNK * L::N), (i, WHOLE) => {
            let x = read::<L, T, WHOLE>(x, i, T::Real::MINUS_INFINITY).sub(shift);
            let e = exponential::<L, EXACT>(x);
            if KEPT {
                e.set(scratch, i);
            }
            sum = sum.add(e);
        });
        total += sum.reduce_add().to_f64();
    }
    total
}

/// [`exp_sum`] of the whole blocks of several rows, then of their `ENDS`, without a shift, for lanes
/// with short forms: where all elements are within [`NEAR`] of 0, there is no maximum to look for
/// first. Tells whether some are not.
struct NearExpSums<'a, 'r, L, T: Element, const ENDS: bool> {
    x: &'a Run<'r, T>,
    rows: usize,
    /// The exponentials, `room` for each row.
    scratch: &'a mut [T::Real],
    room: usize,
    sums: &'a mut [f64; BATCH],
    lanes: PhantomData<L>,
}

impl<L, T> simd::Task for NearExpSums<'_, '_, L, T, false>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, rows, scratch, room, sums, .. } = self;
        let (zero, whole) = (L::splat(Real::of(0.0)), x.len() / L::N * L::N);
        let (mut noted, ahead) = (zero, x.ahead());
        if whole <= CHUNK * L::N {
            let mut lanes = [zero; BATCH];
            for (r, sum) in lanes[..rows].iter_mut().enumerate() {
                let (row, exps) = (&x.row(r)[..whole], &mut scratch[r * room..][..whole]);
                let mut total = zero;
                steps!(L in whole, [row], [exps], (i, _WHOLE) => {
                    let x = row;
                    L::prefetch(x.as_ptr().wrapping_add(i).wrapping_byte_offset(ahead));
                    let e = L::read_whole(x, i).exp_for_store::<true>();
                    noted = L::note(x, i, noted);
                    e.set(exps, i);
                    total = total.add(e);
                });
                *sum = total;
            }
            store_sums(&lanes, &mut sums[..rows]);
            return L::is_far(noted, NEAR);
        }
        for (r, total) in sums[..rows].iter_mut().enumerate() {
            let (row, exps) = (&x.row(r)[..whole], &mut scratch[r * room..][..whole]);
            *total = 0.0;
            for (x, exps) in row.chunks(CHUNK * L::N).zip(exps.chunks_mut(CHUNK * L::N)) {
                let mut sum = zero;
                steps!(L in x.len(), [x], [exps], (i, _WHOLE) => {
                    L::prefetch(x.as_ptr().wrapping_add(i).wrapping_byte_offset(ahead));
                    let e = L::read_whole(x, i).exp_for_store::<true>();
                    noted = L::note(x, i, noted);
                    e.set(exps, i);
                    sum = sum.add(e);
                });
                *total += sum.reduce_add().to_f64();
            }
        }
        L::is_far(noted, NEAR)
    }
}

/// Of the rows' ends. A task of its own, as the loop over whole blocks needs all registers.
impl<L, T> simd::Task for NearExpSums<'_, '_, L, T, true>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, rows, scratch, room, sums, .. } = self;
        let (zero, whole) = (Real::of(0.0), x.len() / L::N * L::N);
        let ones = [T::from_f64(1.0); MAX_LANES];
        let inside: L = L::read(&ones[..x.len() - whole], 0, zero);
        let (mut noted, mut lanes) = (L::splat(zero), [L::splat(zero); BATCH]);
        for (r, sum) in lanes[..rows].iter_mut().enumerate() {
            let (x, exps) = (x.row(r), &mut scratch[r * room..][..room]);
            *sum = L::read(x, whole, zero).exp_for_store::<true>().mul(inside);
            noted = L::note(x, whole, noted);
            sum.set(exps, whole);
        }
        let mut ends = [0.0; BATCH];
        store_sums(&lanes, &mut ends[..rows]);
        for (sum, end) in sums[..rows].iter_mut().zip(ends) {
            *sum += end;
        }
        L::is_far(noted, NEAR)
    }
}

/// The sums of all lanes of each row's sum, for rows of one chunk.
#[inline(always)]
fn store_sums<L: Lanes>(lanes: &[L; BATCH], sums: &mut [f64]) {
    let mut reduced = [Real::of(0.0); BATCH];
    L::reduce_add_each(lanes, &mut reduced);
    for (sum, lanes) in sums.iter_mut().zip(reduced) {
        *sum = lanes.to_f64();
    }
}

/// What [`NearExpSums`] leaves: rows with elements that are not near.
#[inline(always)]
fn finish_near_exp_sums<L, T>(
    far: bool,
    x: &Run<'_, T>,
    scratch: &mut [T::Real],
    room: usize,
    sums: &mut [f64],
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    if !far {
        return;
    }
    for (r, sum) in sums.iter_mut().enumerate() {
        let (x, scratch) = (x.row(r), &mut scratch[r * room..][..room]);
        *sum = L::enter(FinishRow::<L, T> { x, scratch, sum: *sum, lanes: PhantomData });
    }
}

struct FinishRow<'a, L, T: Element> {
    x: &'a [T],
    scratch: &'a mut [T::Real],
    sum: f64,
    lanes: PhantomData<L>,
}

impl<L, T> simd::Task for FinishRow<'_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = f64;
    #[inline(always)]
    fn run(self) -> f64 {
        let (x, mut noted) = (self.x, L::splat(Real::of(0.0)));
        for i in (0..x.len()).step_by(L::N) {
            noted = L::note(x, i, noted);
        }
        if L::is_far(noted, NEAR) {
            return exp_sum::<L, T, false, true>(x, row_shift::<L, T>(x), self.scratch);
        }
        self.sum
    }
}

/// Writes rows of scratch, each times its scale.
struct ScaleRows<'a, 'r, L, T: Element, const APPENDED: bool> {
    scratch: &'a [T::Real],
    room: usize,
    scales: &'a [T::Real; BATCH],
    o: &'a mut RunMut<'r, T>,
    rows: usize,
    stream: bool,
    lanes: PhantomData<L>,
}

impl<'a, 'r, L, T: Element> ScaleRows<'a, 'r, L, T, false>
where
    L: Lanes<Real = T::Real> + Memory<T>,
{
    /// Enters this task, or the one that appends row to row.
    #[inline(always)]
    fn enter(self) {
        if !self.o.appends::<L>(self.stream) {
            return L::enter(self);
        }
        let Self { scratch, room, scales, o, rows, stream, lanes } = self;
        L::enter(ScaleRows::<_, _, true> { scratch, room, scales, o, rows, stream, lanes });
    }
}

impl<L, T, const APPENDED: bool> simd::Task for ScaleRows<'_, '_, L, T, APPENDED>
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { scratch, room, scales, o, rows, stream, .. } = self;
        if const { APPENDED && !<L::Line as Line>::ANY } {
            return; // never asked for
        }
        let len = o.len();
        let (mut o, mut appender) = o.or_appender::<L>(APPENDED, (0, rows * len));
        for (r, &scale) in scales[..rows].iter().enumerate() {
            let (exps, scale) = (&scratch[r * room..][..room], L::splat(scale));
            let to = match APPENDED {
                true => To::Appender(&mut appender),
                false => To::Row(o.row(r), stream),
            };
            write_steps!(L, T to to, len, [exps], (i, _WHOLE) => L::get(exps, i).mul(scale));
        }
        appender.finish();
    }
}

/// [`NearExpSums`] of some rows and, in turns with it, [`ScaleRows`] of those before them, of which there
/// are at least as many: so memory is read and written at once, and neither waits for the other. For
/// rows of at most [`CHUNK`] whole blocks; their ends are left out, as in [`NearExpSums`].
struct ExpAndScaleRows<'a, 'r, L, T: Element, const APPENDED: bool> {
    x: &'a Run<'r, T>,
    rows: usize,
    scratch: &'a mut [T::Real],
    room: usize,
    sums: &'a mut [f64; BATCH],
    /// The exponentials of the rows before.
    before: &'a [T::Real],
    scales: &'a [T::Real],
    o: &'a mut RunMut<'r, T>,
    stream: bool,
    lanes: PhantomData<L>,
}

impl<L, T, const APPENDED: bool> simd::Task for ExpAndScaleRows<'_, '_, L, T, APPENDED>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, rows, scratch, room, sums, before, scales, o, stream, .. } = self;
        if const { APPENDED && !<L::Line as Line>::ANY } {
            return false; // never asked for
        }
        let (zero, len, ahead) = (L::splat(Real::of(0.0)), x.len(), AHEAD_IN_TURNS * x.ahead());
        let (done, whole) = (len / STEP * STEP, len / L::N * L::N);
        assert!(rows <= scales.len());
        let (mut o, mut appender) = o.or_appender::<L>(APPENDED, (0, rows * len));
        let (mut noted, mut lanes) = (zero, [zero; BATCH]);
        for (r, (sum, &scale)) in lanes[..rows].iter_mut().zip(scales).enumerate() {
            let (row, exps) = (&x.row(r)[..len], &mut scratch[r * room..][..room]);
            let (kept, scale) = (&before[r * room..][..room], L::splat(scale));
            let mut to = match APPENDED {
                true => To::Appender(&mut appender),
                false => To::Row(o.row(r), stream),
            };
            let mut total = zero;
            for k in 0..len / STEP {
                let x = &row.as_chunks::<STEP>().0[k];
                let exps = &mut exps.as_chunks_mut::<STEP>().0[k];
                let kept = &kept.as_chunks::<STEP>().0[k];
                let next = x.as_ptr().wrapping_byte_offset(ahead);
                for line in (0..STEP * size_of::<T>()).step_by(LINE) {
                    L::prefetch(next.wrapping_byte_add(line));
                }
                for start in (0..STEP).step_by(BLOCKS * L::N) {
                    let mut blocks = [<L as Memory<T>>::pack(zero); BLOCKS];
                    for b in 0..BLOCKS {
                        let i = start + b * L::N;
                        let e = L::read_whole(x, i).exp_for_store::<true>();
                        noted = L::note(x, i, noted);
                        e.set(exps, i);
                        total = total.add(e);
                        let result: L = L::get(kept, i).mul(scale);
                        blocks[b] = <L as Memory<T>>::pack_exact(result.nearest());
                    }
                    to.write_blocks(blocks, k, start);
                }
            }
            for i in (done..whole).step_by(L::N) {
                let e = L::read_whole(row, i).exp_for_store::<true>();
                noted = L::note(row, i, noted);
                e.set(exps, i);
                total = total.add(e);
                to.write::<true>(L::get(kept, i).mul(scale), i, len);
            }
            if whole < len {
                to.write::<false>(L::get(kept, whole).mul(scale), whole, len);
            }
            *sum = total;
        }
        appender.finish();
        store_sums(&lanes, &mut sums[..rows]);
        L::is_far(noted, NEAR)
    }
}

/// How many times as far ahead as [`Run::ahead`] memory is asked for where it is read and written in
/// turns: 4 KiB. (On an Emerald Rapids, other distances were only tried without turns: 2 and 4 KiB took the
/// same time, 8 KiB into the second-level cache an eighth to a quarter longer.)
const AHEAD_IN_TURNS: isize = 2;
/// Batches that go in turns, each with the next: so many that the first and the last, which have no other
/// beside them, do not count.
const TURNS: usize = 64;

/// Whether rows of `n` elements go in turns: the reading of one batch with the writing of another. (Blocks
/// behind the last step of a row ask for no memory, so there has to be a step.)
#[inline(always)]
fn go_in_turns<L: Math>(n: usize) -> bool {
    let many = L::HAS_SHORT && L::MANY_REGISTERS;
    many && (STEP..=CHUNK * L::N).contains(&n)
}

/// Softmax of rows in turns; `scratch` is for two batches.
#[inline(always)]
fn forward_in_turns<L, T>(
    x: &Run<'_, T>,
    o: &mut RunMut<'_, T>,
    rows: usize,
    scratch: &mut [T::Real],
    (zero_masked, stream): (bool, bool),
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (n, lanes) = (x.len(), PhantomData::<L>);
    let (room, batch, appended) = (n.next_multiple_of(L::N), batch(n), o.appends::<L>(stream));
    let (mut scales, mut sums) = ([Real::of(0.0); BATCH], [0.0; BATCH]);
    let (mut now, mut before) = scratch.split_at_mut(batch * room);
    let (mut start, mut kept) = (0, 0);
    while start < rows {
        let count = batch.min(rows - start);
        let (x, rows, scratch, sums) = (&x.part(start, count), count, &mut *now, &mut sums);
        let mut far = if kept == 0 {
            L::enter(NearExpSums::<_, _, false> { x, rows, scratch, room, sums, lanes })
        } else {
            let (o, before, scales) = (&mut o.part(start - kept, kept), &*before, &scales[..kept]);
            macro_rules! enter {
                ($APPENDED:literal) => {
                    L::enter(ExpAndScaleRows::<_, _, $APPENDED> {
                        x,
                        rows,
                        scratch,
                        room,
                        sums,
                        before,
                        scales,
                        o,
                        stream,
                        lanes,
                    })
                };
            }
            if appended { enter!(true) } else { enter!(false) }
        };
        if !n.is_multiple_of(L::N) {
            let scratch = &mut *now;
            far |= L::enter(NearExpSums::<_, _, true> { x, rows, scratch, room, sums, lanes });
        }
        finish_near_exp_sums::<L, T>(far, x, now, room, &mut sums[..count]);
        if count < kept {
            let (rest, o) = (kept - count, &mut o.part(start - kept + count, kept - count));
            let (scratch, mut left) = (&before[count * room..], [Real::of(0.0); BATCH]);
            left[..rest].copy_from_slice(&scales[count..kept]);
            let (scales, rows) = (&left, rest);
            ScaleRows::<L, T, false> { scratch, room, scales, o, rows, stream, lanes }.enter();
        }
        for (scale, &sum) in scales.iter_mut().zip(&sums[..count]) {
            *scale = inverse(sum, zero_masked);
        }
        std::mem::swap(&mut now, &mut before);
        (start, kept) = (start + count, count);
    }
    let (o, scratch, scales, rows) = (&mut o.part(rows - kept, kept), &*before, &scales, kept);
    ScaleRows::<L, T, false> { scratch, room, scales, o, rows, stream, lanes }.enter();
}

/// Block `i` of exp(x - shift), as [`exp_sum`] kept it or computed again.
#[inline(always)]
fn exps<L, T, const EXACT: bool, const KEPT: bool>(
    x: &[T],
    i: usize,
    shift: L,
    scratch: &[T::Real],
) -> L
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    if KEPT {
        return L::get(scratch, i);
    }
    exponential::<L, EXACT>(L::read(x, i, T::Real::MINUS_INFINITY).sub(shift))
}

/// 1 / sum; 0 for a masked row if `zero_masked`. Only a masked row has a sum of 0, as the largest
/// element of any other adds 1.
#[inline(always)]
fn inverse<R: Real>(sum: f64, zero_masked: bool) -> R {
    if zero_masked && sum == 0.0 { R::of(0.0) } else { R::of(1.0 / sum) }
}

#[inline(always)]
pub(super) fn forward_rows<L, T, const LOG: bool, const KEPT: bool>(mut task: Task<'_, 1>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (n, batch, zero_masked) = (task.n, batch(task.n), task.options.zero_masked_rows);
    let room = if KEPT { n.next_multiple_of(L::N) } else { 0 };
    let in_turns = KEPT && !LOG && go_in_turns::<L>(n);
    let mut scratch = Scratch::<T::Real>::new(batch * room * if in_turns { 2 } else { 1 });
    let scratch = &mut scratch[..];
    let (mut shifts, mut scales) = ([Real::of(0.0); BATCH], [Real::of(0.0); BATCH]);
    let mut stage = Stage::new();
    let mut sums = [0.0; BATCH];
    let most = if in_turns { TURNS * batch } else { batch };
    while let Some(runs) = task.part.next_run::<T>(most) {
        let ([all_x], [mut all_o]) = (runs.inputs, runs.outputs);
        // Rows that can neither be stored past the caches as they are nor be appended may go through a stage.
        let stream = task.stream;
        if in_turns && (!stream || all_o.streams() || all_o.appends::<L>(stream)) {
            let (rows, options) = (runs.rows, (zero_masked, stream));
            forward_in_turns::<L, T>(&all_x, &mut all_o, rows, scratch, options);
            continue;
        }
        for start in (0..runs.rows).step_by(batch) {
            let rows = batch.min(runs.rows - start);
            let (x, mut o) = (all_x.part(start, rows), all_o.part(start, rows));
            if !(KEPT && L::HAS_SHORT) {
                for (r, shift) in shifts[..rows].iter_mut().enumerate() {
                    *shift = row_shift::<L, T>(x.row(r));
                }
            }
            if KEPT && L::HAS_SHORT {
                let (x, rows, sums) = (&x, rows, &mut sums);
                let (scratch, lanes) = (&mut *scratch, PhantomData::<L>);
                let task = NearExpSums::<_, _, false> { x, rows, scratch, room, sums, lanes };
                let mut far = L::enter(task);
                if !x.len().is_multiple_of(L::N) {
                    far |=
                        L::enter(NearExpSums::<_, _, true> { x, rows, scratch, room, sums, lanes });
                }
                finish_near_exp_sums::<L, T>(far, x, scratch, room, &mut sums[..rows]);
            } else {
                for (r, sum) in sums[..rows].iter_mut().enumerate() {
                    let scratch = &mut scratch[r * room..][..room];
                    *sum = exp_sum::<L, T, LOG, KEPT>(x.row(r), shifts[r], scratch);
                }
            }
            for (scale, &sum) in scales.iter_mut().zip(&sums[..rows]) {
                *scale = if LOG { logarithm(sum, zero_masked) } else { inverse(sum, zero_masked) };
            }
            if KEPT && L::HAS_SHORT {
                let (scales, o, lanes) = (&scales, &mut o, PhantomData::<L>);
                let staged = stream && !o.appends::<L>(stream);
                match if staged { stage.of(o) } else { None } {
                    None => {
                        ScaleRows::<L, T, false> { scratch, room, scales, o, rows, stream, lanes }
                            .enter();
                    }
                    Some(mut staged) => {
                        let (o, stream, to) = (&mut staged, false, o);
                        ScaleRows::<L, T, false> { scratch, room, scales, o, rows, stream, lanes }
                            .enter();
                        L::enter(Unstage::<L, T> { from: staged, to, lanes });
                    }
                }
                continue;
            }
            for (r, &scale) in scales[..rows].iter().enumerate() {
                let (x, o, scratch) = (x.row(r), o.row(r), &scratch[r * room..][..room]);
                let (shift, scale) = (L::splat(shifts[r]), L::splat(scale));
                blocks!(L in 0..x.len(), (i, WHOLE) => {
                    let result = if LOG {
                        read::<L, T, WHOLE>(x, i, Real::of(0.0)).sub(shift).sub(scale)
                    } else {
                        exps::<L, T, false, KEPT>(x, i, shift, scratch).mul(scale)
                    };
                    write_nearest::<L, T, WHOLE>(result, o, i, task.stream);
                });
            }
        }
    }
}

/// The sum of a row.
#[inline(always)]
fn row_sum<L, T>(x: &[T]) -> T::Real
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let mut total = 0.0;
    for start in (0..x.len()).step_by(CHUNK * L::N) {
        let mut sum = L::splat(Real::of(0.0));
        for i in (start..x.len().min(start + CHUNK * L::N)).step_by(L::N) {
            sum = sum.add(L::read(x, i, Real::of(0.0)));
        }
        total += sum.reduce_add().to_f64();
    }
    Real::of(total)
}

/// The sum of the products of two rows; asks for what lies `ahead` of them, in bytes.
#[inline(always)]
fn row_dot<L, T>(x: &[T], y: &[T], ahead: isize) -> T::Real
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let mut total = 0.0;
    for start in (0..x.len()).step_by(CHUNK * L::N) {
        let end = x.len().min(start + CHUNK * L::N);
        let sum: L = chunk_dot::<L, T>(&x[start..end], &y[start..end], ahead);
        total += sum.reduce_add().to_f64();
    }
    Real::of(total)
}

/// [`row_dot`] of at most [`CHUNK`] blocks, by lanes.
#[inline(always)]
fn chunk_dot<L, T>(x: &[T], y: &[T], ahead: isize) -> L
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let mut sum = L::splat(Real::of(0.0));
    steps!(L in x.len(), [x, y], [], (i, WHOLE) => {
        L::prefetch(x.as_ptr().wrapping_add(i).wrapping_byte_offset(ahead));
        let x: L = read::<L, T, WHOLE>(x, i, Real::of(0.0));
        sum = x.mul_add(read::<L, T, WHOLE>(y, i, Real::of(0.0)), sum);
    });
    sum
}

/// The sum of the products of [`exps`] and a row.
#[inline(always)]
fn exp_dot<L, T>(x: &[T], y: &[T], shift: T::Real) -> f64
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (shift, mut total) = (L::splat(shift), 0.0);
    for start in (0..x.len()).step_by(CHUNK * L::N) {
        let mut sum = L::splat(Real::of(0.0));
        for i in (start..x.len().min(start + CHUNK * L::N)).step_by(L::N) {
            let y: L = L::read(y, i, Real::of(0.0));
            sum = exps::<L, T, true, false>(x, i, shift, &[]).mul_add(y, sum);
        }
        total += sum.reduce_add().to_f64();
    }
    total
}

/// Whether a row is nothing but minus infinity.
#[inline(always)]
fn is_masked<L, T>(x: &[T]) -> bool
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let least = T::Real::MINUS_INFINITY;
    for i in (0..x.len()).step_by(L::N) {
        let x: L = L::read(x, i, least);
        if L::any(L::splat(least).lt(x)) || L::any(x.is_nan()) {
            return false;
        }
    }
    true
}

#[inline(always)]
pub(super) fn rows_from_output<L, T, const LOG: bool>(mut task: Task<'_, 2>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (n, batch) = (task.n, batch(task.n));
    let short = const { L::MANY_REGISTERS && !LOG } && matches!(n / L::N, 4 | 8) && n % L::N == 0;
    let (zero_masked, stream) = (task.options.zero_masked_rows, task.stream);
    let (mut totals, mut stage) = ([Real::of(0.0); BATCH], Stage::new());
    while let Some(runs) = task.part.next_run::<T>(if short { usize::MAX } else { batch }) {
        let ([all_o, all_grad], [mut all_dx]) = (runs.inputs, runs.outputs);
        let (options, lanes) = ((zero_masked, stream), PhantomData::<L>);
        // Rows that cannot be stored past the caches as they are, are appended or go through a stage.
        if short && (!stream || all_dx.streams()) {
            let (o, grad, dx, rows) = (&all_o, &all_grad, &mut all_dx, runs.rows);
            match n / L::N {
                4 => L::enter(ShortRowGradients::<_, _, 4> { o, grad, dx, rows, options, lanes }),
                _ => L::enter(ShortRowGradients::<_, _, 8> { o, grad, dx, rows, options, lanes }),
            }
            continue;
        }
        for start in (0..runs.rows).step_by(batch) {
            let rows = batch.min(runs.rows - start);
            let (o, grad) = (&all_o.part(start, rows), &all_grad.part(start, rows));
            let (dx, totals) = (&mut all_dx.part(start, rows), &mut totals);
            L::enter(RowTotals::<L, T, LOG> { o, grad, rows, totals, lanes });
            macro_rules! enter {
                ($APPENDED:literal, $dx:ident, $options:ident) => {{
                    let (dx, options) = ($dx, $options);
                    L::enter(RowGradients::<L, T, LOG, $APPENDED> {
                        o,
                        grad,
                        dx,
                        rows,
                        totals,
                        options,
                        lanes,
                    })
                }};
            }
            if !LOG && dx.appends::<L>(stream) {
                enter!(true, dx, options);
                continue;
            }
            match if stream { stage.of(dx) } else { None } {
                None => enter!(false, dx, options),
                Some(mut staged) => {
                    let (to_stage, unstreamed) = (&mut staged, (zero_masked, false));
                    enter!(false, to_stage, unstreamed);
                    L::enter(Unstage::<L, T> { from: staged, to: dx, lanes });
                }
            }
        }
    }
}

/// [`RowTotals`] and [`RowGradients`] of rows of `K` blocks, which stay in registers between the two: a
/// row is written while the next ones are read. (Emerald Rapids, rows of 128 from memory: 13.6 cycles for 16
/// elements instead of 15.2.) The same sums, in the same order.
struct ShortRowGradients<'a, 'r, L, T: Element, const K: usize> {
    o: &'a Run<'r, T>,
    grad: &'a Run<'r, T>,
    dx: &'a mut RunMut<'r, T>,
    rows: usize,
    /// As in [`RowGradients`].
    options: (bool, bool),
    lanes: PhantomData<L>,
}

impl<L, T, const K: usize> simd::Task for ShortRowGradients<'_, '_, L, T, K>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { o, grad, dx, rows, options: (zero_masked, stream), .. } = self;
        let (o_ahead, grad_ahead, zero) = (o.ahead(), grad.ahead(), L::splat(Real::of(0.0)));
        for r in 0..rows {
            let o = &o.row(r).as_chunks::<MAX_LANES>().0[..K];
            let grad = &grad.row(r).as_chunks::<MAX_LANES>().0[..K];
            let (mut os, mut grads, mut sum) = ([zero; K], [zero; K], zero);
            for k in 0..K {
                if (k * size_of::<[T; MAX_LANES]>()).is_multiple_of(LINE) {
                    L::prefetch(o[k].as_ptr().wrapping_byte_offset(o_ahead));
                    L::prefetch(grad[k].as_ptr().wrapping_byte_offset(grad_ahead));
                }
                (os[k], grads[k]) = (L::read_whole(&o[k], 0), L::read_whole(&grad[k], 0));
                sum = os[k].mul_add(grads[k], sum);
            }
            let total = L::splat(sum.reduce_add());
            let mut packed = [<L as Memory<T>>::pack(zero); K];
            for k in 0..K {
                let mut result = pull_back::<L, false>(os[k], grads[k], total);
                if zero_masked {
                    result = zero_where_zero(os[k], result);
                }
                packed[k] = <L as Memory<T>>::pack_exact(<L as Memory<T>>::nearest(result));
            }
            L::write_packed(packed, dx.row(r), 0, stream);
        }
    }
}

/// The sum over each row of o * grad, or of grad alone for the logarithm.
struct RowTotals<'a, 'r, L, T: Element, const LOG: bool> {
    o: &'a Run<'r, T>,
    grad: &'a Run<'r, T>,
    rows: usize,
    totals: &'a mut [T::Real; BATCH],
    lanes: PhantomData<L>,
}

impl<L, T, const LOG: bool> simd::Task for RowTotals<'_, '_, L, T, LOG>
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { o, grad, rows, totals, .. } = self;
        let ahead = o.ahead();
        if !LOG && o.len() <= CHUNK * L::N {
            let mut lanes = [L::splat(Real::of(0.0)); BATCH];
            for (r, sum) in lanes[..rows].iter_mut().enumerate() {
                *sum = chunk_dot::<L, T>(o.row(r), grad.row(r), ahead);
            }
            return L::reduce_add_each(&lanes, totals);
        }
        for (r, total) in totals[..rows].iter_mut().enumerate() {
            let (o, grad) = (o.row(r), grad.row(r));
            *total = if LOG { row_sum::<L, T>(grad) } else { row_dot::<L, T>(o, grad, ahead) };
        }
    }
}

/// The gradients, from [`RowTotals`].
struct RowGradients<'a, 'r, L, T: Element, const LOG: bool, const APPENDED: bool> {
    o: &'a Run<'r, T>,
    grad: &'a Run<'r, T>,
    dx: &'a mut RunMut<'r, T>,
    rows: usize,
    totals: &'a [T::Real; BATCH],
    /// Whether masked rows are zeros, and whether to stream.
    options: (bool, bool),
    lanes: PhantomData<L>,
}

impl<L, T, const LOG: bool, const APPENDED: bool> simd::Task
    for RowGradients<'_, '_, L, T, LOG, APPENDED>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { o, grad, dx, rows, totals, options: (zero_masked, stream), .. } = self;
        if const { APPENDED && (LOG || !<L::Line as Line>::ANY) } {
            return; // never asked for
        }
        let (zero, len) = (Real::of(0.0), dx.len());
        let (mut dx, mut appender) = dx.or_appender::<L>(APPENDED, (0, rows * len));
        // The other pass asks for the outputs: so both keep the memory busy.
        let ahead = grad.ahead();
        for (r, &total) in totals[..rows].iter().enumerate() {
            let (o, grad) = (o.row(r), grad.row(r));
            if LOG && zero_masked && is_masked::<L, T>(o) {
                dx.row(r).fill(T::default());
                continue;
            }
            let total = L::splat(total);
            let to = match APPENDED {
                true => To::Appender(&mut appender),
                false => To::Row(dx.row(r), stream),
            };
            write_steps!(L, T to to, len, [o, grad], (i, WHOLE) => {
                L::prefetch(grad.as_ptr().wrapping_add(i).wrapping_byte_offset(ahead));
                let o: L = read::<L, T, WHOLE>(o, i, zero);
                let grad = read::<L, T, WHOLE>(grad, i, zero);
                let o = if LOG { o.exp() } else { o };
                let result = pull_back::<L, LOG>(o, grad, total);
                // A masked row is all zeros, and so is its gradient, whatever arrives.
                if !LOG && zero_masked { zero_where_zero(o, result) } else { result }
            });
        }
        appender.finish();
    }
}

/// Exponentials are computed again rather than kept: the row is still in the cache, and a second
/// set of kernels would cost more to compile than it saves to run.
#[inline(always)]
pub(super) fn rows_from_input<L, T, const LOG: bool>(mut task: Task<'_, 2>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (batch, zero) = (batch(task.n), Real::of(0.0));
    let (mut shifts, mut scales, mut totals) = ([zero; BATCH], [zero; BATCH], [zero; BATCH]);
    while let Some(runs) = task.part.next_run::<T>(batch) {
        let ([x, grad], [mut dx]) = (runs.inputs, runs.outputs);
        for (r, shift) in shifts[..runs.rows].iter_mut().enumerate() {
            *shift = row_shift::<L, T>(x.row(r));
        }
        for (r, scale) in scales[..runs.rows].iter_mut().enumerate() {
            let (x, grad) = (x.row(r), grad.row(r));
            let sum = exp_sum::<L, T, true, false>(x, shifts[r], &mut []);
            *scale = inverse(sum, task.options.zero_masked_rows);
            totals[r] = if LOG {
                row_sum::<L, T>(grad)
            } else {
                Real::of(exp_dot::<L, T>(x, grad, shifts[r]) / sum)
            };
        }
        for (r, &scale) in scales[..runs.rows].iter().enumerate() {
            let (x, grad, dx) = (x.row(r), grad.row(r), dx.row(r));
            if scale == zero {
                dx.fill(T::default());
                continue;
            }
            let (shift, scale, total) = (L::splat(shifts[r]), L::splat(scale), L::splat(totals[r]));
            for i in (0..x.len()).step_by(L::N) {
                let grad = L::read(grad, i, zero);
                let o = exps::<L, T, true, false>(x, i, shift, &[]).mul(scale);
                let result = pull_back::<L, LOG>(o, grad, total);
                write_nearest::<L, T, false>(result, dx, i, task.stream);
            }
        }
    }
}
