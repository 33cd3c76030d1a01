//! Softmax over another dimension: along the columns of tiles, whose rows are read one after another.

use std::marker::PhantomData;
use std::ops::Range;

use super::blocks::{
    BLOCKS, STEP, To, blocks, logarithm, pull_back, read, write_nearest, write_steps,
    zero_where_zero,
};
use super::{LINE, NEAR, Task};
use crate::rows::{Run, RunMut};
use crate::scratch::Scratch;
use crate::simd::{self, Lanes, Math, Memory};
use crate::{Element, Real};

/// Rows of a column tile whose sum is formed as lanes.
const CHUNK_ROWS: usize = 32;
/// How far a column may exceed the maximum its sum was started with before that is replaced.
const MARGIN: f64 = 8.0;

/// For each column of the rows `rows` of `x`, the maximum (0 where it is minus infinity) and
/// 1 / sum, so that the softmax is exp(x - max) * inverse. Both are in register order, and have
/// to have room for a whole number of blocks.
///
/// As in [`super::exp_row`], `inverse` is NaN for a column with a NaN or a plus infinity, whatever `max` is
/// then; and infinity for one of nothing but minus infinity, or 0 if `zero_masked`.
#[inline(always)]
pub(crate) fn column_statistics<L, T>(
    x: &Run<'_, T>,
    rows: Range<usize>,
    zero_masked: bool,
    max: &mut [T::Real],
    inverse: &mut [T::Real],
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    column_sums::<L, T, false>(x, x, rows, max, inverse, &mut []);
    invert::<L>(inverse, zero_masked);
}

/// Replaces each sum by its inverse; by 0 where a column is masked, if `zero_masked`.
#[inline(always)]
fn invert<L: Lanes>(sums: &mut [L::Real], zero_masked: bool) {
    let (zero, one) = (L::splat(Real::of(0.0)), L::splat(Real::of(1.0)));
    for i in (0..sums.len()).step_by(L::N) {
        let sum = L::get(sums, i);
        let inverse = one.div(sum);
        let inverse = if zero_masked { L::select(sum.le(zero), zero, inverse) } else { inverse };
        inverse.set(sums, i);
    }
}

/// A sum of lanes and what its roundings have lost.
#[derive(Clone, Copy)]
struct Compensated<L> {
    sum: L,
    lost: L,
}

impl<L: Lanes> Compensated<L> {
    #[inline(always)]
    fn zero() -> Self {
        let zero = L::splat(Real::of(0.0));
        Self { sum: zero, lost: zero }
    }
    /// Knuth's two-sum, for terms of any size.
    #[inline(always)]
    fn add(self, term: L) -> Self {
        let sum = self.sum.add(term);
        let term_part = sum.sub(self.sum);
        let sum_part = sum.sub(term_part);
        let lost = self.sum.sub(sum_part).add(term.sub(term_part));
        Self { sum, lost: self.lost.add(lost) }
    }
    #[inline(always)]
    fn mul(self, factor: L) -> Self {
        Self { sum: self.sum.mul(factor), lost: self.lost.mul(factor) }
    }
    /// An infinite sum has lost nothing, though the difference of infinities says NaN.
    #[inline(always)]
    fn value(self) -> L {
        L::select(self.lost.is_nan(), self.sum, self.sum.add(self.lost))
    }
}

/// For each column, the maximum as in [`column_statistics`], the sum of exp(x - max) and, with
/// `DOT`, the sum of exp(x - max) * grad.
///
/// A chunk of rows is read for its maximum, then (from the first-level cache) for its exponentials.
/// These are relative to a shift, which is the maximum of the first chunk until a column exceeds
/// it by [`MARGIN`]; only then are its sums so far scaled down. So a slowly rising column does not
/// collect a rounding error for each step.
#[inline(always)]
fn column_sums<L, T, const DOT: bool>(
    x: &Run<'_, T>,
    grad: &Run<'_, T>,
    rows: Range<usize>,
    maxima: &mut [T::Real],
    sums: &mut [T::Real],
    dots: &mut [T::Real],
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    // Lanes past the end of a row are zeros, for which all of this is harmless.
    let (zero, one) = (Real::of(0.0), L::splat(Real::of(1.0)));
    let least = L::splat(T::Real::MINUS_INFINITY);
    blocks!(L in 0..x.len(), (i, WHOLE) => {
        let (mut max, mut shift, mut base) = (least, least, L::splat(zero));
        let (mut sum, mut dot) = (Compensated::<L>::zero(), Compensated::<L>::zero());
        let mut start = rows.start;
        while start < rows.end {
            let end = rows.end.min(start + CHUNK_ROWS);
            for r in start..end {
                max = max.max(read::<L, T, WHOLE>(x.row(r), i, zero));
            }
            let exceeds = shift.add(L::splat(Real::of(MARGIN))).lt(max);
            if L::any(exceeds) {
                let factor = L::select(exceeds, shift.sub(max).exp(), one);
                (sum, dot) = (sum.mul(factor), dot.mul(factor));
                shift = L::select(exceeds, max, shift);
                base = L::select(shift.le(least), L::splat(zero), shift);
            }
            let (mut chunk_sum, mut chunk_dot) = (L::splat(zero), L::splat(zero));
            for r in start..end {
                let e = read::<L, T, WHOLE>(x.row(r), i, zero).sub(base).exp();
                chunk_sum = chunk_sum.add(e);
                if DOT {
                    chunk_dot = e.mul_add(read::<L, T, WHOLE>(grad.row(r), i, zero), chunk_dot);
                }
            }
            sum = sum.add(chunk_sum);
            dot = dot.add(chunk_dot);
            start = end;
        }
        // From the shift to the maximum itself.
        let max = L::select(max.le(least), L::splat(zero), max);
        let factor = L::select(base.lt(max), base.sub(max).exp(), one);
        max.set(maxima, i);
        sum.value().mul(factor).set(sums, i);
        if DOT {
            dot.value().mul(factor).set(dots, i);
        }
    });
}

/// For each column, the sum of o * grad, or of grad alone for the logarithm.
struct ColumnTotals<'a, 'r, L, T: Element, const LOG: bool> {
    o: &'a Run<'r, T>,
    grad: &'a Run<'r, T>,
    rows: usize,
    totals: &'a mut [T::Real],
    lost: &'a mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T, const LOG: bool> simd::Task for ColumnTotals<'_, '_, L, T, LOG>
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { o, grad, rows, totals, lost, .. } = self;
        totals.fill(Real::of(0.0));
        lost.fill(Real::of(0.0));
        for start in (0..rows).step_by(CHUNK_ROWS) {
            let chunk = start..rows.min(start + CHUNK_ROWS);
            let whole = grad.len() / L::N * L::N;
            let mut i = 0;
            // Four blocks of each row at once, as long as there are four.
            macro_rules! add {
                ($blocks:literal, $whole:literal) => {{
                    let found =
                        chunk_totals::<L, T, LOG, $whole, $blocks>(o, grad, chunk.clone(), i);
                    for (b, sum) in found.into_iter().enumerate() {
                        let i = i + b * L::N;
                        let total = Compensated { sum: L::get(totals, i), lost: L::get(lost, i) };
                        let total = total.add(sum);
                        total.sum.set(totals, i);
                        total.lost.set(lost, i);
                    }
                    i += $blocks * L::N;
                }};
            }
            while i + 4 * L::N <= whole {
                add!(4, true);
            }
            while i < whole {
                add!(1, true);
            }
            if i < grad.len() {
                add!(1, false);
            }
            debug_assert!(i >= grad.len());
        }
        for i in (0..totals.len()).step_by(L::N) {
            Compensated { sum: L::get(totals, i), lost: L::get(lost, i) }.value().set(totals, i);
        }
    }
}

/// The sums of [`ColumnTotals`] over some rows, of `K` blocks of columns from `i` on.
#[inline(always)]
fn chunk_totals<L, T, const LOG: bool, const WHOLE: bool, const K: usize>(
    o: &Run<'_, T>,
    grad: &Run<'_, T>,
    chunk: Range<usize>,
    i: usize,
) -> [L; K]
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let zero = Real::of(0.0);
    let mut sums = [L::splat(zero); K];
    for r in chunk {
        let (o_row, grad_row) = (o.row(r), grad.row(r));
        for (row, step) in [(o_row, o.step()), (grad_row, grad.step())] {
            let ahead = row.as_ptr().wrapping_add(i);
            let ahead = ahead.wrapping_byte_offset(CHUNK_ROWS as isize * step).cast::<u8>();
            for line in (0..K * L::N * size_of::<T>()).step_by(LINE) {
                L::prefetch(ahead.wrapping_add(line));
            }
        }
        for b in 0..K {
            let i = i + b * L::N;
            let grad = read::<L, T, WHOLE>(grad_row, i, zero);
            sums[b] = if LOG {
                sums[b].add(grad)
            } else {
                read::<L, T, WHOLE>(o_row, i, zero).mul_add(grad, sums[b])
            };
        }
    }
    sums
}

/// For each column, 0 if it is nothing but minus infinity, else 1.
#[inline(always)]
fn unmasked_columns<L, T>(o: &Run<'_, T>, rows: usize, unmasked: &mut [T::Real])
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let (zero, one) = (L::splat(Real::of(0.0)), L::splat(Real::of(1.0)));
    let least = L::splat(T::Real::MINUS_INFINITY);
    for i in (0..o.len()).step_by(L::N) {
        let mut max = least;
        for r in 0..rows {
            max = max.max_nan(L::read(o.row(r), i, Real::of(0.0)));
        }
        L::select(max.le(least), zero, one).set(unmasked, i);
    }
}

/// For each column of a tile, the sum of the exponentials, for lanes with short forms; they are
/// relative to `shifts` or, without, to 0. Tells whether an element is beyond [`NEAR`]: without
/// shifts, the sums are then no good.
///
/// The rows go in chunks that stay in the first-level cache, and each chunk by blocks of columns,
/// whose sums stay in registers.
struct ShortColumnSums<'a, 'r, L, T: Element, const PART: u8> {
    x: &'a Run<'r, T>,
    rows: usize,
    shifts: &'a [T::Real],
    sums: &'a mut [T::Real],
    /// What rounding has lost of the sums.
    lost: &'a mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T, const PART: u8> simd::Task for ShortColumnSums<'_, '_, L, T, PART>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, rows, shifts, sums, lost, .. } = self;
        let zero = L::splat(Real::of(0.0));
        let whole = x.len() / L::N * L::N;
        let columns = match PART {
            WHOLE_BLOCKS => 0..whole,
            ROW_END => whole..x.len(),
            _ => 0..x.len(),
        };
        let mut noted = zero;
        for start in (0..rows).step_by(CHUNK_ROWS) {
            let chunk = start..rows.min(start + CHUNK_ROWS);
            let mut i = columns.start;
            // Two blocks of each row at once, as long as there are two.
            macro_rules! add {
                ($blocks:literal) => {{
                    let rows = ChunkOfRows { x, shifts, chunk: chunk.clone() };
                    let (found, seen) = rows.sums::<L, PART, $blocks>(i, noted);
                    noted = seen;
                    for (b, sum) in found.into_iter().enumerate() {
                        let i = i + b * L::N;
                        let mut total = Compensated { sum, lost: zero };
                        if start > 0 {
                            let so_far =
                                Compensated { sum: L::get(sums, i), lost: L::get(lost, i) };
                            total = so_far.add(sum);
                        }
                        total.sum.set(sums, i);
                        total.lost.set(lost, i);
                    }
                    i += $blocks * L::N;
                }};
            }
            while PART == WHOLE_BLOCKS && i + 2 * L::N <= columns.end {
                add!(2);
            }
            while i < columns.end {
                add!(1);
            }
        }
        for i in columns.step_by(L::N) {
            Compensated { sum: L::get(sums, i), lost: L::get(lost, i) }.value().set(sums, i);
        }
        L::is_far(noted, NEAR)
    }
}

/// A few rows of what [`ShortColumnSums`] works on.
struct ChunkOfRows<'a, 'r, T: Element> {
    x: &'a Run<'r, T>,
    shifts: &'a [T::Real],
    chunk: Range<usize>,
}

impl<T: Element> ChunkOfRows<'_, '_, T> {
    /// The sums of the exponentials of `K` blocks of columns from `i` on, and `noted` with them.
    #[inline(always)]
    fn sums<L, const PART: u8, const K: usize>(&self, i: usize, mut noted: L) -> ([L; K], L)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        let mut sums = [L::splat(Real::of(0.0)); K];
        let ahead = CHUNK_ROWS as isize * self.x.step();
        for r in self.chunk.clone() {
            let row = self.x.row(r);
            L::prefetch(row.as_ptr().wrapping_add(i).wrapping_byte_offset(ahead));
            for b in 0..K {
                let i = i + b * L::N;
                let e = if PART == WHOLE_BLOCKS {
                    let x: L = L::read_whole(row, i);
                    noted = L::note(row, i, noted);
                    x.exp_for_store::<true>()
                } else if PART == ROW_END {
                    noted = L::note(row, i, noted);
                    L::read(row, i, Real::of(0.0)).exp_for_store::<false>()
                } else {
                    let x: L = L::read(row, i, Real::of(0.0));
                    x.sub(L::get(self.shifts, i)).exp_for_store::<false>()
                };
                sums[b] = sums[b].add(e);
            }
        }
        (sums, noted)
    }
}

/// What [`ShortColumnSums`] works on: whole blocks of columns without shifts, what is left of them,
/// or all with shifts. Each is a function of its own, so that the first one's loop is small.
const WHOLE_BLOCKS: u8 = 0;
const ROW_END: u8 = 1;
const SHIFTED: u8 = 2;

/// What the exponentials of each column are relative to: 0 where all of it is near, else its
/// maximum (but 0 where that is minus infinity). So a near column does not depend on others.
struct ColumnShifts<'a, 'r, L, T: Element> {
    x: &'a Run<'r, T>,
    rows: usize,
    shifts: &'a mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T> simd::Task for ColumnShifts<'_, '_, L, T>
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let least = L::splat(T::Real::MINUS_INFINITY);
        let (zero, near) = (L::splat(Real::of(0.0)), L::splat(Real::of(f64::from(NEAR))));
        blocks!(L in 0..self.x.len(), (i, WHOLE) => {
            let (mut max, mut magnitude) = (least, zero);
            for r in 0..self.rows {
                let x: L = read::<L, T, WHOLE>(self.x.row(r), i, Real::of(0.0));
                max = max.max(x);
                magnitude = x.abs().max(magnitude);
            }
            let shift = L::select(max.le(least), zero, max);
            L::select(near.lt(magnitude), shift, zero).set(self.shifts, i);
        });
    }
}

/// Writes each column's exponentials times its scale.
struct ScaleColumns<'a, 'r, L, T: Element> {
    x: &'a Run<'r, T>,
    o: &'a mut RunMut<'r, T>,
    rows: usize,
    shifts: Option<&'a [T::Real]>,
    scales: &'a [T::Real],
    stream: bool,
    lanes: PhantomData<L>,
}

impl<L, T> simd::Task for ScaleColumns<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { x, o, rows, shifts, scales, stream, .. } = self;
        for r in 0..rows {
            let (x, o) = (x.row(r), o.row(r));
            if let Some(shifts) = shifts {
                for i in (0..x.len()).step_by(L::N) {
                    let x: L = L::read(x, i, Real::of(0.0)).sub(L::get(shifts, i));
                    let result = x.exp_for_store::<false>().mul(L::get(scales, i));
                    write_nearest::<L, T, false>(result, o, i, stream);
                }
            } else {
                write_steps!(L, T to To::Row(o, stream), o.len(), [x, scales], (i, WHOLE) => {
                    let x: L = read::<L, T, WHOLE>(x, i, Real::of(0.0));
                    let e = if WHOLE { x.exp_for_store::<true>() } else { x.exp_for_store::<false>() };
                    e.mul(L::get(scales, i))
                });
            }
        }
    }
}

/// [`forward_columns`] for lanes with short forms.
#[inline(always)]
fn short_forward_columns<L, T>(mut task: Task<'_, 1>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let room = task.width.next_multiple_of(L::N);
    let mut scratch = [room; 3].map(Scratch::<T::Real>::new);
    let [shifts, sums, lost] = &mut scratch;
    while let Some(runs) = task.part.next_run::<T>(task.n) {
        let ([x], [mut o], rows) = (runs.inputs, runs.outputs, runs.rows);
        let (x, o, lanes) = (&x, &mut o, PhantomData::<L>);
        let stream = task.stream && o.streams();
        let room = x.len().next_multiple_of(L::N);
        let (sums, lost) = (&mut sums[..room], &mut lost[..room]);
        macro_rules! sums {
            ($part:ident, $shifts:expr) => {
                L::enter(ShortColumnSums::<L, T, $part> {
                    x,
                    rows,
                    shifts: $shifts,
                    sums,
                    lost,
                    lanes,
                })
            };
        }
        let mut shift = None;
        if sums!(WHOLE_BLOCKS, &[]) | (!x.len().is_multiple_of(L::N) && sums!(ROW_END, &[])) {
            let shifts = &mut shifts[..room];
            L::enter(ColumnShifts { x, rows, shifts, lanes });
            sums!(SHIFTED, shifts);
            shift = Some(&*shifts);
        }
        invert::<L>(sums, task.options.zero_masked_rows);
        let scales = &*sums;
        L::enter(ScaleColumns { x, o, rows, shifts: shift, scales, stream, lanes });
    }
}

#[inline(always)]
pub(super) fn forward_columns<L, T, const LOG: bool>(mut task: Task<'_, 1>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    if L::HAS_SHORT && !LOG {
        return short_forward_columns::<L, T>(task);
    }
    let zero_masked = task.options.zero_masked_rows;
    let mut scratch = [task.width; 2].map(Scratch::<T::Real>::new);
    let [max, scale] = &mut scratch;
    while let Some(runs) = task.part.next_run::<T>(task.n) {
        let ([x], [mut o]) = (runs.inputs, runs.outputs);
        let room = x.len().next_multiple_of(L::N);
        let (max, scale) = (&mut max[..room], &mut scale[..room]);
        column_sums::<L, T, false>(&x, &x, 0..runs.rows, max, scale, &mut []);
        if LOG {
            for scale in scale.iter_mut() {
                *scale = logarithm(scale.to_f64(), zero_masked);
            }
        } else {
            invert::<L>(scale, zero_masked);
        }
        let stream = task.stream && o.streams();
        for r in 0..runs.rows {
            let (x, o) = (x.row(r), o.row(r));
            blocks!(L in 0..x.len(), (i, WHOLE) => {
                let x = read::<L, T, WHOLE>(x, i, Real::of(0.0)).sub(L::get(max, i));
                let scale = L::get(scale, i);
                let result = if LOG { x.sub(scale) } else { x.exp().mul(scale) };
                write_nearest::<L, T, WHOLE>(result, o, i, stream);
            });
        }
    }
}

#[inline(always)]
pub(super) fn columns_from_output<L, T, const LOG: bool>(mut task: Task<'_, 2>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let look_for_masked = LOG && task.options.zero_masked_rows;
    let mut scratch = [task.width; 3].map(Scratch::<T::Real>::new);
    let [totals, lost, unmasked] = &mut scratch;
    while let Some(runs) = task.part.next_run::<T>(task.n) {
        let ([o, grad], [mut dx], rows) = (runs.inputs, runs.outputs, runs.rows);
        let (o, grad, dx, lanes) = (&o, &grad, &mut dx, PhantomData::<L>);
        let room = o.len().next_multiple_of(L::N);
        let (totals, lost) = (&mut totals[..room], &mut lost[..room]);
        L::enter(ColumnTotals::<_, _, LOG> { o, grad, rows, totals, lost, lanes });
        let unmasked = &mut unmasked[..if look_for_masked { room } else { 0 }];
        if look_for_masked {
            unmasked_columns::<L, T>(o, rows, unmasked);
        }
        let zero_masked = !LOG && task.options.zero_masked_rows;
        let options = (zero_masked, task.stream && dx.streams());
        L::enter(ColumnGradients::<_, _, LOG> {
            o,
            grad,
            dx,
            rows,
            totals,
            unmasked,
            options,
            lanes,
        });
    }
}

/// The gradients, from [`ColumnTotals`].
struct ColumnGradients<'a, 'r, L, T: Element, const LOG: bool> {
    o: &'a Run<'r, T>,
    grad: &'a Run<'r, T>,
    dx: &'a mut RunMut<'r, T>,
    rows: usize,
    totals: &'a [T::Real],
    /// 0 for each masked column, if they are to have zeros.
    unmasked: &'a [T::Real],
    /// Whether gradients of zeros are zeros, and whether to stream.
    options: (bool, bool),
    lanes: PhantomData<L>,
}

impl<L, T, const LOG: bool> simd::Task for ColumnGradients<'_, '_, L, T, LOG>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { o, grad, dx, rows, totals, unmasked, options: (zero_masked, stream), .. } = self;
        let zero = Real::of(0.0);
        for r in 0..rows {
            let (o, grad, dx) = (o.row(r), grad.row(r), dx.row(r));
            if !unmasked.is_empty() {
                for i in (0..o.len()).step_by(L::N) {
                    let (o, grad): (L, L) = (L::read(o, i, zero), L::read(grad, i, zero));
                    let o = if LOG { o.exp() } else { o };
                    let result = pull_back::<L, LOG>(o, grad, L::get(totals, i));
                    let result = zero_where_zero(L::get(unmasked, i), result);
                    write_nearest::<L, T, false>(result, dx, i, stream);
                }
                continue;
            }
            write_steps!(L, T to To::Row(dx, stream), dx.len(), [o, grad, totals], (i, WHOLE) => {
                let o: L = read::<L, T, WHOLE>(o, i, zero);
                let grad = read::<L, T, WHOLE>(grad, i, zero);
                let o = if LOG { o.exp() } else { o };
                let result = pull_back::<L, LOG>(o, grad, L::get(totals, i));
                if zero_masked { zero_where_zero(o, result) } else { result }
            });
        }
    }
}

#[inline(always)]
pub(super) fn columns_from_input<L, T, const LOG: bool>(mut task: Task<'_, 2>)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let (zero, zero_masked) = (Real::of(0.0), task.options.zero_masked_rows);
    let mut scratch = [task.width; 4].map(Scratch::<T::Real>::new);
    let [max, scale, totals, lost] = &mut scratch;
    while let Some(runs) = task.part.next_run::<T>(task.n) {
        let ([x, grad], [mut dx]) = (runs.inputs, runs.outputs);
        let room = x.len().next_multiple_of(L::N);
        let (max, scale) = (&mut max[..room], &mut scale[..room]);
        let (totals, lost) = (&mut totals[..room], &mut lost[..room]);
        if LOG {
            column_sums::<L, T, false>(&x, &grad, 0..runs.rows, max, scale, totals);
            let lanes = PhantomData::<L>;
            let (o, grad, rows) = (&x, &grad, runs.rows);
            L::enter(ColumnTotals::<_, _, true> { o, grad, rows, totals, lost, lanes });
            invert::<L>(scale, zero_masked);
        } else {
            column_sums::<L, T, true>(&x, &grad, 0..runs.rows, max, scale, totals);
            invert::<L>(scale, zero_masked);
            for i in (0..room).step_by(L::N) {
                L::get(totals, i).mul(L::get(scale, i)).set(totals, i);
            }
        }
        let stream = task.stream && dx.streams();
        for r in 0..runs.rows {
            let (x, grad, dx) = (x.row(r), grad.row(r), dx.row(r));
            for i in (0..x.len()).step_by(L::N) {
                let (x, grad): (L, L) = (L::read(x, i, zero), L::read(grad, i, zero));
                let o = x.sub(L::get(max, i)).exp().mul(L::get(scale, i));
                let mut result = pull_back::<L, LOG>(o, grad, L::get(totals, i));
                if zero_masked {
                    result = zero_where_zero(L::get(scale, i), result);
                }
                write_nearest::<L, T, false>(result, dx, i, stream);
            }
        }
    }
}
