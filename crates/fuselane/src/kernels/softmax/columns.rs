//! Softmax over another dimension: down the columns of a tile, whose rows are read one after another.

use super::{Form, IN_RANGE, Task, logarithm, zero_where_zero};
use crate::exec::scratch::Scratch;
use crate::kernels::lanes::Lane;
use crate::kernels::rows::{InputRows, OutputRows};
use crate::kernels::sink::{RowSink, Sink};
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::{At, STEP, sweep, sweep_blocks, sweep_by};
use crate::simd::{Kernel, LANES, Simd, V};

/// Rows that are summed as they are; the sums of these chunks are compensated.
const CHUNK_ROWS: usize = 32;

/// For each column of `x`, in the order of lanes, what to subtract, and 1 / sum, so that the softmax is
/// exp(x - shift) * inverse. Both have room for whole blocks.
///
/// `inverse` is NaN for a column with a NaN or a plus infinity, and infinity for one of nothing but
/// minus infinity, whose exponentials are 0. Unless `exact`, the sums are those of [`V::exp_fast`], and columns in range have the shift
/// 0. Tells whether all have, so that [`V::exp_fast_in_range`] serves.
pub(crate) fn column_statistics<S: Simd>(
    x: &InputRows<'_, S::Elem>,
    shift: &mut [Lane],
    inverse: &mut [Lane],
    exact: bool,
) -> bool {
    let in_range = shifts_and_sums::<S>(*x, shift, inverse, exact);
    invert::<S>(inverse, false);
    in_range
}

/// Replaces each sum by its inverse; by 0 for masked columns, if `zero_masked`.
fn invert<S: Simd>(sums: &mut [Lane], zero_masked: bool) {
    S::call(
        #[inline(always)]
        move || {
            sweep_blocks(
                0..sums.len(),
                #[inline(always)]
                |at| {
                    let sum = V::<S>::at(sums, at);
                    let inverse = V::splat(1.0) / sum;
                    let inverse = if zero_masked { zero_where_zero(sum, inverse) } else { inverse };
                    inverse.set_at(sums, at);
                },
            );
        },
    );
}

/// The maximum of each column, but 0 where that is minus infinity, and where all elements are `within`
/// some distance of 0. Of any value where a column has a NaN.
fn shifts<S: Simd>(x: InputRows<'_, S::Elem>, within: Option<f32>, shift: &mut [Lane]) {
    S::call(
        #[inline(always)]
        move || {
            let (zero, least) = (V::zero(), V::splat(f32::NEG_INFINITY));
            let within = V::splat(within.unwrap_or(-1.0));
            sweep::<S>(
                x.len(),
                #[inline(always)]
                |at| {
                    let (mut max, mut magnitude) = (least, zero);
                    for r in 0..x.count() {
                        let x = V::<S>::load(x.row(r), at);
                        max = max.max(x);
                        magnitude = x.abs().max(magnitude);
                    }
                    let max = V::select(max.le(least), zero, max);
                    V::select(within.lt(magnitude), max, zero).set_at(shift, at);
                },
            );
        },
    );
}

/// What [`column_statistics`] gives, but the sums themselves.
fn shifts_and_sums<S: Simd>(
    x: InputRows<'_, S::Elem>,
    shift: &mut [Lane],
    sums: &mut [Lane],
    exact: bool,
) -> bool {
    if exact || !V::<S>::HAS_FAST {
        shifts::<S>(x, None, shift);
        shifted_sums::<S>(
            x,
            shift,
            sums,
            #[inline(always)]
            |x| x.exp(),
        );
        return false;
    }
    if sums_in_range::<S>(x, sums) {
        shift.fill(Lane::default());
        return true;
    }
    // Those of columns in range are the same as before.
    shifts::<S>(x, Some(IN_RANGE), shift);
    shifted_sums::<S>(
        x,
        shift,
        sums,
        #[inline(always)]
        |x| x.exp_fast(),
    );
    false
}

/// The sums of e^x; no good if not all columns are in range, which it tells.
fn sums_in_range<S: Simd>(x: InputRows<'_, S::Elem>, sums: &mut [Lane]) -> bool {
    S::call(
        #[inline(always)]
        move || {
            let soon = soon(&x);
            let range = sum_columns::<S, 1, 2>(
                x.count(),
                x.len(),
                [sums],
                #[inline(always)]
                |r, at, [sum], range| {
                    let x = Source::<S>::new(x.row(r), soon).load(at);
                    ([sum + x.exp_fast_in_range()], x.abs().max(range))
                },
            );
            range.largest() <= IN_RANGE
        },
    )
}

/// The sums of e^(x - shift), by `exp`.
#[inline(always)]
fn shifted_sums<S: Simd>(
    x: InputRows<'_, S::Elem>,
    shift: &[Lane],
    sums: &mut [Lane],
    exp: impl Fn(V<S>) -> V<S>,
) {
    S::call(
        #[inline(always)]
        move || {
            sum_columns::<S, 1, 2>(
                x.count(),
                x.len(),
                [sums],
                #[inline(always)]
                |r, at, [sum], range| {
                    ([sum + exp(V::load(x.row(r), at) - V::at(shift, at))], range)
                },
            );
        },
    );
}

/// Asks for the next chunk of rows.
#[inline(always)]
fn soon<T: crate::Element>(rows: &InputRows<'_, T>) -> Prefetch {
    Prefetch::L1(CHUNK_ROWS as isize * rows.step())
}

/// A sum by lanes and what its roundings have lost.
struct Compensated<S: Simd> {
    sum: V<S>,
    lost: V<S>,
}

impl<S: Simd> Compensated<S> {
    /// Knuth's two-sum, for terms of any size.
    #[inline(always)]
    fn add(self, term: V<S>) -> Self {
        let sum = self.sum + term;
        let term_part = sum - self.sum;
        let sum_part = sum - term_part;
        let lost = (self.sum - sum_part) + (term - term_part);
        Self { sum, lost: self.lost + lost }
    }
    /// An infinite sum has lost nothing, though the difference of infinities says NaN.
    #[inline(always)]
    fn value(self) -> V<S> {
        V::select(self.lost.is_nan(), self.sum, self.sum + self.lost)
    }
}

/// `N` sums down each column, and a maximum over all, from 0 on: `add` adds what a block of some row
/// brings. `K` blocks of columns go together, down the rows of a chunk, while their sums stay in registers.
#[inline(always)]
fn sum_columns<S: Simd, const N: usize, const K: usize>(
    rows: usize,
    len: usize,
    mut totals: [&mut [Lane]; N],
    add: impl Fn(usize, At, [V<S>; N], V<S>) -> ([V<S>; N], V<S>),
) -> V<S> {
    let mut maximum = V::zero();
    let room = len.next_multiple_of(LANES);
    let mut lost = Scratch::<Lane>::zeros(N * room);
    for total in &mut totals {
        total[..room].fill(Lane::default());
    }
    for start in (0..rows).step_by(CHUNK_ROWS) {
        let end = rows.min(start + CHUNK_ROWS);
        let (mut i, all) = (0, K * LANES);
        while i < len {
            let mut sums = [[V::zero(); N]; K];
            let many = S::STEPS && i + all <= len;
            // Of its own for a chunk, so that it is in a register: a call at the tail would have the loops
            // keep that of all rows in memory.
            let mut range = V::zero();
            if many {
                for r in start..end {
                    for (slot, sums) in sums.iter_mut().enumerate() {
                        let at = At { i: i + slot * LANES, n: LANES, slot, in_step: all == STEP };
                        (*sums, range) = add(r, at, *sums, range);
                    }
                }
            } else {
                let at = At { i, n: LANES.min(len - i), slot: 0, in_step: false };
                for r in start..end {
                    (sums[0], range) = add(r, at, sums[0], range);
                }
            }
            maximum = maximum.max(range);
            for sums in &sums[..if many { K } else { 1 }] {
                for (k, &term) in sums.iter().enumerate() {
                    let (total, lost) = (&mut *totals[k], &mut lost[k * room..]);
                    let so_far = Compensated { sum: V::get(total, i), lost: V::get(lost, i) };
                    let so_far = so_far.add(term);
                    so_far.sum.set(total, i);
                    so_far.lost.set(lost, i);
                }
                i += LANES;
            }
        }
    }
    for (k, total) in totals.iter_mut().enumerate() {
        for i in (0..room).step_by(LANES) {
            let lost = V::<S>::get(&lost, k * room + i);
            Compensated { sum: V::get(total, i), lost }.value().set(total, i);
        }
    }
    maximum
}

/// Writes the rows of a tile, in steps or not.
#[inline(always)]
fn write<S: Simd, const STEPS: bool>(
    mut o: OutputRows<'_, S::Elem>,
    non_temporal: bool,
    rows: usize,
    value: impl Fn(usize, At) -> V<S>,
) {
    let non_temporal = non_temporal && o.aligned::<S>();
    S::call(
        #[inline(always)]
        move || {
            let len = o.len();
            for r in 0..rows {
                let mut o = RowSink::<S>::new(o.row(r), non_temporal);
                sweep_by::<S>(
                    STEPS,
                    0..len,
                    #[inline(always)]
                    |at| o.put(at, value(r, at).round_ties_away()),
                );
            }
        },
    );
}

/// `o = softmax(x)`, or its logarithm.
pub(crate) struct ForwardColumns<'r, F: Form>(pub(crate) Task<'r, 1>, pub(crate) F);

impl<F: Form> Kernel for ForwardColumns<'_, F> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Task { mut rows, n, width, zero_masked, non_temporal } = self.0;
        let mut scratch = [width; 2].map(Scratch::<Lane>::new);
        let [shift, scale] = &mut scratch;
        while let Some(tile) = rows.next_rows::<S::Elem>(n) {
            let ([x], [o]) = (tile.inputs, tile.outputs);
            let room = x.len().next_multiple_of(LANES);
            let (shift, scale) = (&mut shift[..room], &mut scale[..room]);
            if F::LOG {
                shifts_and_sums::<S>(x, shift, scale, true);
                for sum in scale.iter_mut() {
                    sum.replace(|sum| logarithm(f64::from(sum), zero_masked));
                }
                let (shift, scale) = (&*shift, &*scale);
                write::<S, true>(
                    o,
                    non_temporal,
                    tile.count,
                    #[inline(always)]
                    move |r, at| V::load(x.row(r), at) - V::at(shift, at) - V::at(scale, at),
                );
                continue;
            }
            let in_range = shifts_and_sums::<S>(x, shift, scale, false);
            invert::<S>(scale, zero_masked);
            let (shift, scale) = (&*shift, &*scale);
            if in_range {
                write::<S, true>(
                    o,
                    non_temporal,
                    tile.count,
                    #[inline(always)]
                    move |r, at| V::load(x.row(r), at).exp_fast_in_range() * V::at(scale, at),
                );
            } else {
                write::<S, false>(
                    o,
                    non_temporal,
                    tile.count,
                    #[inline(always)]
                    move |r, at| {
                        (V::load(x.row(r), at) - V::at(shift, at)).exp_fast() * V::at(scale, at)
                    },
                );
            }
        }
    }
}

/// `dx`, from the output of the forward.
pub(crate) struct BackwardColumns<'r, F: Form>(pub(crate) Task<'r, 2>, pub(crate) F);

impl<F: Form> Kernel for BackwardColumns<'_, F> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Task { mut rows, n, width, zero_masked, non_temporal } = self.0;
        let mut scratch = [width; 3].map(Scratch::<Lane>::new);
        let [total, zeros, probabilities] = &mut scratch;
        zeros.fill(Lane::default());
        while let Some(tile) = rows.next_rows::<S::Elem>(n) {
            let ([o, grad], [dx]) = (tile.inputs, tile.outputs);
            let room = o.len().next_multiple_of(LANES);
            let (total, sums) = (&mut total[..room], &mut probabilities[..room]);
            totals::<S, F>(o, grad, total);
            if F::LOG && zero_masked {
                // 0 for a masked column, else 1.
                shifted_sums::<S>(
                    o,
                    zeros,
                    sums,
                    #[inline(always)]
                    |o| o.exp(),
                );
            }
            let (total, sums) = (&*total, &*sums);
            write::<S, true>(
                dx,
                non_temporal,
                tile.count,
                #[inline(always)]
                move |r, at| {
                    let (o, grad) = (V::load(o.row(r), at), V::load(grad.row(r), at));
                    let result = F::gradient(F::probability(o), grad, V::at(total, at));
                    if zero_masked {
                        // Whatever arrives.
                        zero_where_zero(if F::LOG { V::at(sums, at) } else { o }, result)
                    } else {
                        result
                    }
                },
            );
        }
    }
}

/// The sums of o * grad, or of grad alone for the logarithm.
fn totals<S: Simd, F: Form>(
    o: InputRows<'_, S::Elem>,
    grad: InputRows<'_, S::Elem>,
    totals: &mut [Lane],
) {
    S::call(
        #[inline(always)]
        move || {
            let (o_soon, grad_soon) = (soon(&o), soon(&grad));
            sum_columns::<S, 1, 4>(
                grad.count(),
                grad.len(),
                [totals],
                #[inline(always)]
                |r, at, [total], range| {
                    let o = Source::<S>::new(o.row(r), o_soon).load(at);
                    ([F::add(total, o, Source::new(grad.row(r), grad_soon).load(at))], range)
                },
            );
        },
    );
}

/// `dx`, from the input of the forward.
pub(crate) struct BackwardColumnsFromInput<'r, F: Form>(pub(crate) Task<'r, 2>, pub(crate) F);

impl<F: Form> Kernel for BackwardColumnsFromInput<'_, F> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Task { mut rows, n, width, zero_masked, non_temporal } = self.0;
        let mut scratch = [width; 3].map(Scratch::<Lane>::new);
        let [shift, scale, total] = &mut scratch;
        while let Some(tile) = rows.next_rows::<S::Elem>(n) {
            let ([x, grad], [dx]) = (tile.inputs, tile.outputs);
            let room = x.len().next_multiple_of(LANES);
            let (shift, scale) = (&mut shift[..room], &mut scale[..room]);
            let total = &mut total[..room];
            shifts::<S>(x, None, shift);
            let shift = &*shift;
            sums_and_totals::<S, F>(x, grad, shift, [scale, total]);
            invert::<S>(scale, zero_masked);
            if !F::LOG {
                sweep::<S>(
                    room,
                    #[inline(always)]
                    |at| (V::<S>::at(total, at) * V::at(scale, at)).set_at(total, at),
                );
            }
            let (scale, total) = (&*scale, &*total);
            write::<S, false>(
                dx,
                non_temporal,
                tile.count,
                #[inline(always)]
                move |r, at| {
                    let (x, grad) = (V::load(x.row(r), at), V::load(grad.row(r), at));
                    let scale = V::at(scale, at);
                    let p = (x - V::at(shift, at)).exp() * scale;
                    let result = F::gradient(p, grad, V::at(total, at));
                    if zero_masked { zero_where_zero(scale, result) } else { result }
                },
            );
        }
    }
}

/// The sums of exp(x - shift), and those of its products with grad (for the logarithm, of grad).
fn sums_and_totals<S: Simd, F: Form>(
    x: InputRows<'_, S::Elem>,
    grad: InputRows<'_, S::Elem>,
    shift: &[Lane],
    sums: [&mut [Lane]; 2],
) {
    S::call(
        #[inline(always)]
        move || {
            sum_columns::<S, 2, 1>(
                x.count(),
                x.len(),
                sums,
                #[inline(always)]
                |r, at, [sum, total], range| {
                    let e = (V::load(x.row(r), at) - V::at(shift, at)).exp();
                    ([sum + e, F::add(total, e, V::load(grad.row(r), at))], range)
                },
            );
        },
    );
}
