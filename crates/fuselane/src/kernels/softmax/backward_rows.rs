//! The backward of the softmax over the last dimension.

use super::rows::{CHUNK, TILE_ROWS, add_lanes, row_shift, tile_rows};
use super::{Form, Plain, Task, inverse, zero_where_zero};
use crate::dtype::Element;
use crate::kernels::rows::{InputRows, OutputRows};
use crate::kernels::sink::{RowSink, RowSinks, ShiftedSink, Sink, TileSink, takes_shifted};
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::{chunks, sweep, sweep_blocks, sweep_by, sweep_range};
use crate::simd::{Kernel, LANES, Line, Simd, V};

/// `dx`, from the output of the forward.
pub(crate) struct BackwardRows<'r, F: Form>(pub(crate) Task<'r, 2>, pub(crate) F);

impl<F: Form> Kernel for BackwardRows<'_, F> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Task { mut rows, n, zero_masked, non_temporal, .. } = self.0;
        let in_registers = S::PIPELINE && !F::LOG && (n == 4 * LANES || n == 8 * LANES);
        let most = if in_registers { usize::MAX } else { tile_rows(n) };
        while let Some(all) = rows.next_rows::<S::Elem>(most) {
            let ([o, grad], [mut dx]) = (all.inputs, all.outputs);
            let shifted = takes_shifted::<S>(&dx, non_temporal);
            if S::PIPELINE && in_registers && !shifted {
                match n / LANES {
                    4 => short_row_gradients::<S, 4>(o, grad, dx, non_temporal, zero_masked),
                    _ => short_row_gradients::<S, 8>(o, grad, dx, non_temporal, zero_masked),
                }
                continue;
            }
            for start in (0..all.count).step_by(tile_rows(n)) {
                let count = tile_rows(n).min(all.count - start);
                let (o, grad) = (o.slice(start, count), grad.slice(start, count));
                let totals = totals::<S, F>(o, grad);
                let dx = dx.slice(start, count);
                if <S::Line as Line>::ANY && shifted {
                    let dx = <ShiftedSink<'_, S> as TileSink<S>>::new(dx, non_temporal);
                    gradients::<S, F, _>(o, grad, totals, dx, zero_masked);
                } else {
                    let dx = RowSinks::<S>::new(dx, non_temporal);
                    gradients::<S, F, _>(o, grad, totals, dx, zero_masked);
                }
            }
        }
    }
}

/// Of each row, the sum of o * grad, or of grad alone for the logarithm.
#[inline(always)]
fn totals<S: Simd, F: Form>(
    o: InputRows<'_, S::Elem>,
    grad: InputRows<'_, S::Elem>,
) -> [f64; TILE_ROWS] {
    S::call(
        #[inline(always)]
        move || {
            let (len, ahead) = (o.len(), Prefetch::L1(o.ahead()));
            let (mut lanes, mut sums) = ([S::splat(0.0); TILE_ROWS], [0.0; TILE_ROWS]);
            for r in 0..o.count() {
                let (o, grad) = (Source::<S>::new(o.row(r), ahead), &grad.row(r)[..len]);
                let mut total = V::<S>::zero();
                for chunk in chunks(len, CHUNK) {
                    if chunk.start > 0 {
                        sums[r] += f64::from(total.sum());
                        total = V::zero();
                    }
                    sweep_range::<S>(
                        chunk,
                        #[inline(always)]
                        |at| total = F::add(total, o.load(at), V::load(grad, at)),
                    );
                }
                lanes[r] = total.block();
            }
            add_lanes::<S>(&lanes, o.count(), &mut sums);
            sums
        },
    )
}

/// The gradients of a tile, from its [`totals`], which have asked for the next o: so both passes keep
/// the memory busy.
#[inline(always)]
fn gradients<'r, S: Simd, F: Form, T: TileSink<'r, S>>(
    o: InputRows<'_, S::Elem>,
    grad: InputRows<'_, S::Elem>,
    totals: [f64; TILE_ROWS],
    mut dx: T,
    zero_masked: bool,
) {
    S::call(
        #[inline(always)]
        move || {
            let (len, ahead) = (o.len(), Prefetch::L1(grad.ahead()));
            for r in 0..o.count() {
                let (o, grad) = (o.row(r), Source::<S>::new(&grad.row(r)[..len], ahead));
                let (total, mut dx) = (V::splat(totals[r] as f32), dx.row(r, len));
                // Masked rows have no gradient, whatever arrives.
                if F::LOG && zero_masked && o.iter().all(|o| o.to_f64() == f64::NEG_INFINITY) {
                    sweep::<S>(
                        len,
                        #[inline(always)]
                        |at| dx.put(at, V::<S>::zero().truncate()),
                    );
                    continue;
                }
                sweep_by::<S>(
                    !F::LOG,
                    0..len,
                    #[inline(always)]
                    |at| {
                        let o = V::load(o, at);
                        let result = F::gradient(F::probability(o), grad.load(at), total);
                        let zeros = !F::LOG && zero_masked;
                        let result = if zeros { zero_where_zero(o, result) } else { result };
                        dx.put(at, result.round_ties_away());
                    },
                );
            }
            dx.finish();
        },
    );
}

/// [`totals`] and [`gradients`] of rows of `K` blocks, which stay in registers between the two: a row is
/// written while the next ones are read. (Emerald Rapids, rows of 128 from memory: 13.6 cycles for 16
/// elements instead of 15.2.)
#[inline(always)]
fn short_row_gradients<S: Simd, const K: usize>(
    o: InputRows<'_, S::Elem>,
    grad: InputRows<'_, S::Elem>,
    dx: OutputRows<'_, S::Elem>,
    non_temporal: bool,
    zero_masked: bool,
) {
    S::call(
        #[inline(always)]
        move || {
            let mut dx = RowSinks::<S>::new(dx, non_temporal);
            let (o_ahead, grad_ahead) = (Prefetch::L1(o.ahead()), Prefetch::L1(grad.ahead()));
            for r in 0..o.count() {
                let o = Source::<S>::new(o.row(r), o_ahead);
                let grad = Source::<S>::new(grad.row(r), grad_ahead);
                let (mut os, mut grads) = ([V::zero(); K], [V::zero(); K]);
                let mut total = V::zero();
                sweep::<S>(
                    K * LANES,
                    #[inline(always)]
                    |at| {
                        let k = at.i / LANES;
                        (os[k], grads[k]) = (o.load(at), grad.load(at));
                        total = Plain::add(total, os[k], grads[k]);
                    },
                );
                let (total, mut dx) = (V::splat(total.sum()), dx.row(r, K * LANES));
                sweep::<S>(
                    K * LANES,
                    #[inline(always)]
                    |at| {
                        let (o, grad) = (os[at.i / LANES], grads[at.i / LANES]);
                        let result = Plain::gradient(o, grad, total);
                        let result = if zero_masked { zero_where_zero(o, result) } else { result };
                        dx.put(at, result.round_ties_away());
                    },
                );
            }
        },
    );
}

/// `dx`, from the input of the forward. Exponentials are computed again rather than kept: the row is
/// still in the cache.
pub(crate) struct BackwardRowsFromInput<'r, F: Form>(pub(crate) Task<'r, 2>, pub(crate) F);

impl<F: Form> Kernel for BackwardRowsFromInput<'_, F> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Task { mut rows, n, zero_masked, non_temporal, .. } = self.0;
        while let Some(tile) = rows.next_rows::<S::Elem>(tile_rows(n)) {
            let ([x, grad], [dx]) = (tile.inputs, tile.outputs);
            gradients_from_input::<S, F>(x, grad, dx, non_temporal, zero_masked);
        }
    }
}

#[inline(always)]
fn gradients_from_input<S: Simd, F: Form>(
    x: InputRows<'_, S::Elem>,
    grad: InputRows<'_, S::Elem>,
    mut dx: OutputRows<'_, S::Elem>,
    non_temporal: bool,
    zero_masked: bool,
) {
    S::call(
        #[inline(always)]
        move || {
            let (len, mut shifts) = (x.len(), [0.0; TILE_ROWS]);
            let ahead = Prefetch::L1(x.ahead());
            for (r, shift) in shifts[..x.count()].iter_mut().enumerate() {
                *shift = row_shift(Source::<S>::new(x.row(r), ahead));
            }
            let (mut scales, mut totals) = ([0.0; TILE_ROWS], [0.0; TILE_ROWS]);
            for r in 0..x.count() {
                let (x, grad, shift) = (x.row(r), grad.row(r), V::splat(shifts[r]));
                let (mut sum, mut total) = (0.0, 0.0);
                for chunk in chunks(len, CHUNK) {
                    let (mut chunk_sum, mut chunk_total) = (V::<S>::zero(), V::<S>::zero());
                    sweep_blocks(
                        chunk,
                        #[inline(always)]
                        |at| {
                            let e = (V::load(x, at) - shift).exp().up_to(at, 0.0);
                            chunk_sum += e;
                            chunk_total = F::add(chunk_total, e, V::load(grad, at));
                        },
                    );
                    sum += f64::from(chunk_sum.sum());
                    total += f64::from(chunk_total.sum());
                }
                scales[r] = inverse(sum, zero_masked);
                totals[r] = (if F::LOG { total } else { total / sum }) as f32;
            }
            for r in 0..x.count() {
                let (x, grad) = (x.row(r), grad.row(r));
                let (shift, scale) = (V::<S>::splat(shifts[r]), V::splat(scales[r]));
                let (total, masked) = (V::splat(totals[r]), scales[r] == 0.0);
                let mut dx = RowSink::<S>::new(dx.row(r), non_temporal);
                sweep_blocks(
                    0..len,
                    #[inline(always)]
                    |at| {
                        let p = (V::load(x, at) - shift).exp() * scale;
                        let result = F::gradient(p, V::load(grad, at), total);
                        let result = if masked { V::zero() } else { result };
                        dx.put(at, result.round_ties_away());
                    },
                );
            }
        },
    );
}
