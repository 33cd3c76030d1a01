//! Activations on the way: x' of a tile, into scratch.

use super::columns::Columns;
use super::segments::Segments;
use super::walk::SubTile;
use super::{FusedAct, Plan};
use crate::exec::scratch::Scratch;
use crate::kernels::act;
use crate::kernels::lanes::{Lane, to_index_order, to_lanes};
use crate::kernels::softmax::{IN_RANGE, exp_row};
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::{sweep, sweep_by};
use crate::kernels::tile::{InputTile, OutputTile, for_each_row};
use crate::ops::act::Act;
use crate::simd::{LANES, Simd, V};

/// Scratch of a task: x' and dx' of a tile, and what a row of softmax needs.
pub(super) struct RowScratch {
    pub(super) y: Scratch<Lane>,
    pub(super) g: Scratch<Lane>,
    /// Two blocks for each row of a tile.
    pub(super) sums: Scratch<Lane>,
    /// One row, in blocks of its own.
    row: Scratch<Lane>,
    numbers: Scratch<f32>,
}

impl RowScratch {
    /// `y` and `g` where they are needed.
    pub(super) fn new(plan: &Plan<'_>, y: bool, g: bool) -> Self {
        let (rows, width) = (plan.tile[0] * plan.tile[1], plan.segments.width());
        let room = |needed| Scratch::new(if needed { rows * width } else { 0 });
        let softmax = |len| if plan.act == FusedAct::SoftmaxFeatures { len } else { 0 };
        Self {
            y: room(y),
            g: room(g),
            sums: Scratch::new(softmax(2 * rows * LANES)),
            row: Scratch::new(softmax(width)),
            numbers: Scratch::new(softmax(width)),
        }
    }
}

/// Whether softmaxes are approximate: where that is enough for the element type, and rows are whole.
#[inline(always)]
pub(super) fn is_fast<S: Simd>(segments: &Segments, exact: bool) -> bool {
    V::<S>::HAS_FAST && !exact && segments.is_whole()
}

/// x' of a sub-tile, into `scratch.y`; tells whether it is approximate. Values of an elementwise activation
/// are as exact as f32 if `exact`: where they go into sums.
pub(super) fn activate<S: Simd>(
    plan: &Plan<'_>,
    x: InputTile<'_, S::Elem>,
    sub_tile: &SubTile<'_>,
    columns: &Columns,
    exact: bool,
    scratch: &mut RowScratch,
) -> bool {
    let rows = sub_tile.tile.rows;
    let fast = is_fast::<S>(&plan.segments, columns.exact);
    if plan.act == FusedAct::SoftmaxFeatures {
        row_softmax::<S>(&plan.segments, x, rows, fast, scratch);
        return fast;
    }
    // Features of several heads are as good as those of one.
    let joined = plan.joined_segments.as_ref().zip(x.joined());
    let joined =
        joined.filter(|_| columns.together(rows[1]) || plan.act != FusedAct::SoftmaxSequence);
    let (segments, x, rows, heads) = match joined {
        Some((segments, x)) => (segments, x, [rows[0], 1], rows[1]),
        None => (&plan.segments, x, rows, 1),
    };
    let y = OutputTile::dense(&mut scratch.y, rows, segments.width());
    if let FusedAct::Elementwise(act) = plan.act {
        values::<S>((act, exact), segments, x, rows, y);
        return !exact && matches!(act, Act::Sigmoid | Act::Silu);
    }
    let [_, batch, head] = sub_tile.tile.first;
    column_softmax::<S>(segments, x, rows, (columns, batch * plan.heads + head, heads), y);
    fast
}

/// An elementwise activation.
#[inline(always)]
fn values<S: Simd>(
    (act, exact): (Act, bool),
    segments: &Segments,
    x: InputTile<'_, S::Elem>,
    [tokens, heads]: [usize; 2],
    mut y: OutputTile<'_, Lane>,
) {
    let soon = Prefetch::L2(x.ahead());
    for_each_row(
        [1, tokens, heads],
        #[inline(always)]
        |[_, i, j]| {
            let (x, y) = (x.row([0, i, j]), y.row([0, i, j]));
            for segment in segments.joined() {
                let x = Source::<S>::new(&x[segment.features()], soon);
                act::values(act, exact, x, &mut y[segment.scratch()]);
            }
        },
    );
}

/// The softmax of each row.
#[inline(always)]
fn row_softmax<S: Simd>(
    segments: &Segments,
    x: InputTile<'_, S::Elem>,
    rows: [usize; 2],
    fast: bool,
    scratch: &mut RowScratch,
) {
    let RowScratch { y, sums, row: exponentials, numbers, .. } = scratch;
    let width = segments.width();
    if fast && softmax_in_range::<S>(x, rows, (y, width), sums) {
        return;
    }
    let mut y = OutputTile::dense(y, rows, width);
    S::call(
        #[inline(always)]
        move || {
            let soon = Prefetch::L2(x.ahead());
            for_each_row(
                [1, rows[0], rows[1]],
                #[inline(always)]
                |[_, i, j]| {
                    let (x, y) = (x.row([0, i, j]), y.row([0, i, j]));
                    if fast && in_range::<S>(x) {
                        return;
                    }
                    let joined = segments.joined().len() == 1;
                    let exps = if joined { &mut *y } else { &mut exponentials[..] };
                    let inverse = exp_row(Source::<S>::new(x, soon), exps);
                    if !joined {
                        // The blocks of the segments are other ones than those of the row.
                        to_index_order::<S>(exps, &mut numbers[..x.len()]);
                        for segment in segments.joined() {
                            to_lanes::<S>(&numbers[segment.features()], &mut y[segment.scratch()]);
                        }
                    }
                    let inverse = V::<S>::splat(inverse);
                    for k in (0..y.len()).step_by(LANES) {
                        (V::get(y, k) * inverse).set(y, k);
                    }
                },
            );
        },
    );
}

/// Whether a row's softmax needs no maximum. (A NaN in it is seen in the sum.)
#[inline(always)]
pub(super) fn in_range<S: Simd>(x: &[S::Elem]) -> bool {
    let mut range = V::<S>::zero();
    sweep::<S>(
        x.len(),
        #[inline(always)]
        |at| range = V::load(x, at).abs().max(range),
    );
    range.largest() <= IN_RANGE
}

/// The softmax of each row, in the fast form and without a maximum. Tells whether all are in range; if
/// not, those that are not have to be done again.
#[inline(always)]
fn softmax_in_range<S: Simd>(
    x: InputTile<'_, S::Elem>,
    [tokens, heads]: [usize; 2],
    (y, len): (&mut [Lane], usize),
    sums: &mut [Lane],
) -> bool {
    S::call(
        #[inline(always)]
        move || {
            let soon = Prefetch::L2(x.ahead());
            let (mut range, mut k) = (V::<S>::zero(), 0);
            for_each_row(
                [1, tokens, heads],
                #[inline(always)]
                |row| {
                    let (x, mut sum) = (Source::<S>::new(&x.row(row)[..len], soon), V::zero());
                    let y = &mut y[k * len..][..len];
                    sweep::<S>(
                        len,
                        #[inline(always)]
                        |at| {
                            let x = x.load(at);
                            let e = x.exp_fast_in_range();
                            range = x.abs().max(range);
                            e.set_at(y, at);
                            sum += e;
                        },
                    );
                    sum.set(sums, k * LANES);
                    k += 1;
                },
            );
            // Apart, so that no row waits for its own sum.
            for (k, y) in y.chunks_exact_mut(len).take(tokens * heads).enumerate() {
                let sum = V::<S>::get(sums, k * LANES).sum();
                let inverse = V::<S>::splat((1.0 / f64::from(sum)) as f32);
                sweep::<S>(
                    len,
                    #[inline(always)]
                    |at| (V::at(y, at) * inverse).set_at(y, at),
                );
            }
            range.largest() <= IN_RANGE
        },
    )
}

/// A softmax over the sequence, from the statistics of the columns of heads from one on, of which so many
/// are joined.
#[inline(always)]
fn column_softmax<S: Simd>(
    segments: &Segments,
    x: InputTile<'_, S::Elem>,
    rows: [usize; 2],
    (columns, first, joined): (&Columns, usize, usize),
    y: OutputTile<'_, Lane>,
) {
    let (exact, columns) = (columns.exact, (columns, first, joined));
    if !exact && columns.0.in_range {
        column_softmax_by::<S, true>(
            segments,
            x,
            rows,
            columns,
            y,
            #[inline(always)]
            |x, _| x.exp_fast_in_range(),
        );
    } else {
        // (The fast form has the same bits of a column in range.)
        column_softmax_by::<S, false>(
            segments,
            x,
            rows,
            columns,
            y,
            #[inline(always)]
            move |x, shift| if exact { (x - shift).exp() } else { (x - shift).exp_fast() },
        );
    }
}

/// The same, with e^(x - shift) by `exp`, in steps or not.
#[inline(always)]
fn column_softmax_by<S: Simd, const STEPS: bool>(
    segments: &Segments,
    x: InputTile<'_, S::Elem>,
    [tokens, heads]: [usize; 2],
    (columns, first, joined): (&Columns, usize, usize),
    mut y: OutputTile<'_, Lane>,
    exp: impl Fn(V<S>, V<S>) -> V<S>,
) {
    S::call(
        #[inline(always)]
        move || {
            let soon = Prefetch::L2(x.ahead());
            columns.for_each_row(
                first,
                joined,
                heads,
                #[inline(always)]
                |j, head| {
                    for i in 0..tokens {
                        let (x, y) = (x.row([0, i, j]), y.row([0, i, j]));
                        for segment in segments.joined() {
                            let x = Source::<S>::new(&x[segment.features()], soon);
                            let shift = &head.shift[segment.scratch()];
                            let inverse = &head.inverse[segment.scratch()];
                            let y = &mut y[segment.scratch()];
                            sweep_by::<S>(
                                STEPS,
                                0..segment.len,
                                #[inline(always)]
                                |at| {
                                    let e = exp(x.load(at), V::at(shift, at));
                                    (e * V::at(inverse, at)).set_at(y, at);
                                },
                            );
                        }
                    }
                },
            );
        },
    );
}
