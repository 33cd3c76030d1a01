//! The backward: a tile of gradients is decoded, and pulled back through the activation.

use super::activation::{RowScratch, activate, in_range, is_fast};
use super::columns::Columns;
use super::operands::{Elements, LanesMut, Output, Rounded, to_nearest_even};
use super::segments::Segments;
use super::tables::Tables;
use super::walk::{SubTile, Walk, interleaved};
use super::{Encoding, FusedAct, Plan};
use crate::exec::rows::TaskRows;
use crate::exec::scratch::{Plain, Scratch};
use crate::kernels::act;
use crate::kernels::lanes::{Lane, to_index_order};
use crate::kernels::sink::{RowSink, Sink};
use crate::kernels::softmax::{IN_RANGE, exp_row};
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::sweep;
use crate::kernels::tile::{InputTile, OutputTile, for_each_row};
use crate::ops::act::Act;
use crate::simd::{Kernel, LANES, Simd, V};

/// For the backward of a softmax over the sequence: sum over tokens of x' * dx', for each column.
pub(crate) struct Dots<'k, 'a, 'r, E> {
    pub(crate) walk: Walk<'k, 'a, E>,
    pub(crate) rows: TaskRows<'r, 2, 0>,
    pub(crate) columns: &'k Columns,
    pub(crate) sums: &'k mut [Lane],
}

impl<E: Encoding> Kernel for Dots<'_, '_, '_, E> {
    #[inline(always)]
    fn run<S: Simd>(mut self) {
        let Self { walk, columns, sums, .. } = self;
        let (plan, width) = (walk.plan, walk.plan.segments.width());
        let mut scratch = RowScratch::new(plan, true, true);
        let tables = Tables::new::<S, E>(&walk);
        walk.for_each_sub_tile(tables, &mut self.rows, 1, &mut |rows, sub_tile| {
            let tile = &sub_tile.tile;
            let (x, grad) = (rows.input::<S::Elem>(0, tile), rows.input::<S::Elem>(1, tile));
            activate::<S>(plan, x, sub_tile, columns, true, &mut scratch);
            let g = OutputTile::dense(&mut scratch.g, tile.rows, width);
            let g = LanesMut { tile: g, segments: &plan.segments };
            decode::<S, E, _>(&walk, grad, sub_tile, g);
            let [_, batch, head] = tile.first;
            let row = tile.rows[1] * width;
            let sums = &mut sums[(batch * plan.heads + head) * width..][..row];
            let rows = scratch.y.chunks_exact(row).zip(scratch.g.chunks_exact(row));
            let rows = rows.take(tile.rows[0]);
            S::call(
                #[inline(always)]
                move || {
                    for (y, g) in rows {
                        for k in (0..row).step_by(LANES) {
                            V::<S>::get(y, k).mul_add(V::get(g, k), V::get(sums, k)).set(sums, k);
                        }
                    }
                },
            );
        });
    }
}

/// `dx' = encode^T(grad)` of a sub-tile.
#[inline(always)]
fn decode<S: Simd, E: Encoding, O: Output<S>>(
    walk: &Walk<'_, '_, E>,
    grad: InputTile<'_, S::Elem>,
    sub_tile: &SubTile<'_>,
    to: O,
) {
    let grad = Elements::<S, _>::new(
        grad,
        &walk.plan.output_segments,
        #[inline(always)]
        |grad| grad,
    );
    walk.encoding.backward(sub_tile.loops, grad, to);
}

/// The gradients of x and of the angles.
pub(crate) struct Backward<'k, 'a, 'r, E> {
    pub(crate) walk: Walk<'k, 'a, E>,
    pub(crate) rows: TaskRows<'r, 2, 1>,
    pub(crate) columns: &'k Columns,
    /// The sums of [`Dots`], if there are some.
    pub(crate) dots: &'k [Lane],
    /// Sums of the angles' gradients, if asked for.
    pub(crate) sums: Option<&'k mut [f32]>,
    pub(crate) non_temporal: bool,
}

impl<E: Encoding> Kernel for Backward<'_, '_, '_, E> {
    #[inline(always)]
    fn run<S: Simd>(mut self) {
        let Self { walk, columns, dots, non_temporal, mut sums, .. } = self;
        let (plan, segments) = (walk.plan, &walk.plan.segments);
        let plain = plan.act == FusedAct::default() && sums.is_none();
        let mut angles = AngleSums::new(&walk, sums.is_some());
        let mut scratch = RowScratch::new(plan, !plain, !plain);
        let entries = if plain { interleaved::<S>(plan.batch) } else { 1 };
        let tables = Tables::new::<S, E>(&walk);
        walk.for_each_sub_tile(tables, &mut self.rows, entries, &mut |rows, sub_tile| {
            let tile = sub_tile.tile;
            let (x, grad) = (rows.input::<S::Elem>(0, &tile), rows.input::<S::Elem>(1, &tile));
            let dx = rows.output::<S::Elem>(0, &tile);
            let round = to_nearest_even::<S>();
            let non_temporal = non_temporal && dx.aligned_at::<S>(&segments.features());
            if plain && non_temporal {
                let dx = Rounded::<S, _, true> { tile: dx, segments, round };
                return decode(&walk, grad, sub_tile, dx);
            } else if plain {
                let dx = Rounded::<S, _, false> { tile: dx, segments, round };
                return decode(&walk, grad, sub_tile, dx);
            }
            let g = OutputTile::dense(&mut scratch.g, tile.rows, segments.width());
            decode::<S, E, _>(&walk, grad, sub_tile, LanesMut { tile: g, segments });
            let to = Gradient::<S> { x, segments, rows: tile.rows, dx, non_temporal };
            if plan.act == FusedAct::SoftmaxFeatures && is_fast::<S>(segments, columns.exact) {
                return to.row_softmax_fast(&mut scratch);
            }
            if sums.is_some() || !matches!(plan.act, FusedAct::Elementwise(_)) {
                activate::<S>(plan, x, sub_tile, columns, true, &mut scratch);
            }
            let y = InputTile::dense(&scratch.y, tile.rows, segments.width());
            let g = InputTile::dense(&scratch.g, tile.rows, segments.width());
            if let Some(sums) = &mut sums {
                angles.add::<S, E>(&walk, sub_tile, y, g, grad);
                if sub_tile.last {
                    angles.take::<S, E>(&walk, sub_tile, sums);
                }
            }
            if to.dx.len() == 0 {
                return;
            }
            if plan.act == FusedAct::SoftmaxFeatures {
                return to.softmax(y, g, None);
            }
            let to = to.joined(plan);
            let y = InputTile::dense(&scratch.y, to.rows, to.segments.width());
            let g = InputTile::dense(&scratch.g, to.rows, to.segments.width());
            match plan.act {
                FusedAct::Elementwise(act) => to.elementwise(act, g),
                _ => to.softmax(y, g, Some(walk.columns(dots, &tile))),
            }
        });
    }
}

/// Gradients of a tile's angles, summed over the batch: by token and head.
struct AngleSums {
    sums: Scratch<Lane>,
    /// Those of one token and head, in index order.
    numbers: Scratch<f32>,
}

impl AngleSums {
    fn new<E>(walk: &Walk<'_, '_, E>, needed: bool) -> Self {
        let (tile, len) = (walk.plan.tile, if needed { walk.plan.angle_sums } else { 0 });
        Self { sums: Scratch::zeros(tile[0] * tile[1] * len), numbers: Scratch::new(len) }
    }

    /// The sums of a token and head of a sub-tile.
    #[inline(always)]
    fn row<E>(
        &mut self,
        walk: &Walk<'_, '_, E>,
        sub_tile: &SubTile<'_>,
        i: usize,
        j: usize,
    ) -> &mut [Lane] {
        let len = walk.plan.angle_sums;
        &mut self.sums[((sub_tile.slot + i) * walk.plan.tile[1] + j) * len..][..len]
    }

    /// Adds those of a sub-tile.
    fn add<S: Simd, E: Encoding>(
        &mut self,
        walk: &Walk<'_, '_, E>,
        sub_tile: &SubTile<'_>,
        y: InputTile<'_, Lane>,
        g: InputTile<'_, Lane>,
        grad: InputTile<'_, S::Elem>,
    ) {
        S::call(
            #[inline(always)]
            move || {
                let [tokens, heads] = sub_tile.tile.rows;
                for_each_row(
                    [1, tokens, heads],
                    #[inline(always)]
                    |[_, i, j]| {
                        walk.encoding.angle_gradients::<S>(
                            [y.row([0, i, j]), g.row([0, i, j])],
                            grad.row([0, i, j]),
                            sub_tile.loops.angle(i, j),
                            self.row(walk, sub_tile, i, j),
                        );
                    },
                );
            },
        );
    }

    /// Adds coordinate * gradient to `sums`, and begins anew.
    fn take<S: Simd, E: Encoding>(
        &mut self,
        walk: &Walk<'_, '_, E>,
        sub_tile: &SubTile<'_>,
        sums: &mut [f32],
    ) {
        let (plan, step) = (walk.plan, walk.encoding.angle_step());
        let split = &plan.angles.split;
        let ([token, batch, head], [tokens, heads]) = (sub_tile.tile.first, sub_tile.tile.rows);
        let mut numbers = std::mem::replace(&mut self.numbers, Scratch::new(0));
        for_each_row(
            [1, tokens, heads],
            #[inline(always)]
            |[_, i, j]| {
                let (angles, numbers) = (self.row(walk, sub_tile, i, j), &mut numbers[..]);
                S::call(
                    #[inline(always)]
                    || to_index_order::<S>(angles, numbers),
                );
                angles.fill(Lane::ZERO);
                let row = if split.theta_heads == 1 { 0 } else { head + j };
                let sums = &mut sums[row * split.count..][..split.count];
                plan.angles.add_gradients([batch, walk.first + token + i], numbers, step, sums);
            },
        );
        self.numbers = numbers;
    }
}

/// The sum of x' * dx' that is subtracted in the gradient of a softmax.
#[derive(Clone, Copy)]
enum Dot<'d, S: Simd> {
    OfRow(V<S>),
    OfColumns(&'d [Lane]),
}

/// `dx = act backward of dx'` for the rows of a sub-tile.
struct Gradient<'p, 'o, S: Simd> {
    x: InputTile<'p, S::Elem>,
    segments: &'p Segments,
    /// Tokens and heads.
    rows: [usize; 2],
    dx: OutputTile<'o, S::Elem>,
    /// Only where all segments of all rows are aligned.
    non_temporal: bool,
}

impl<'p, S: Simd> Gradient<'p, '_, S> {
    /// With the heads of a token as one row, if they can be.
    #[inline(always)]
    fn joined(self, plan: &'p Plan<'_>) -> Self {
        let Some((segments, x)) = plan.joined_segments.as_ref().zip(self.x.joined()) else {
            return self;
        };
        match self.dx.joined() {
            Ok(dx) => Self { x, segments, rows: [self.rows[0], 1], dx, ..self },
            Err(dx) => Self { dx, ..self },
        }
    }

    /// dx = dx' * f'(x)
    fn elementwise(mut self, act: Act, g: InputTile<'_, Lane>) {
        let ahead = self.x.ahead();
        let Self { x, segments, rows: [tokens, heads], ref mut dx, non_temporal } = self;
        for_each_row(
            [1, tokens, heads],
            #[inline(always)]
            |[_, i, j]| {
                let (x, g, dx) = (x.row([0, i, j]), g.row([0, i, j]), dx.row([0, i, j]));
                for segment in segments.joined() {
                    let x = (&x[segment.features()], ahead);
                    let dx = (&mut dx[segment.features()], non_temporal);
                    act::gradients::<S>(act, x, &g[segment.scratch()], dx);
                }
            },
        );
    }

    /// dx = x' * (dx' - sum of x' * dx'), by rows, or by columns, whose sums are `dots`.
    #[inline(always)]
    fn softmax(mut self, y: InputTile<'_, Lane>, g: InputTile<'_, Lane>, dots: Option<&[Lane]>) {
        let width = self.segments.width();
        S::call(
            #[inline(always)]
            move || {
                for_each_row(
                    [1, self.rows[0], self.rows[1]],
                    #[inline(always)]
                    |row| {
                        let (y, g, [_, i, j]) = (y.row(row), g.row(row), row);
                        let dot = match dots {
                            None => Dot::OfRow(V::splat(self.segments.dot::<S>(y, g))),
                            Some(dots) => Dot::OfColumns(&dots[j * width..][..width]),
                        };
                        self.softmax_row([i, j], [y, g], dot);
                    },
                );
            },
        );
    }

    /// dx = x' * (dx' - dot) of one row.
    #[inline(always)]
    fn softmax_row(&mut self, [i, j]: [usize; 2], [y, g]: [&[Lane]; 2], dot: Dot<'_, S>) {
        let dx = self.dx.row([0, i, j]);
        for segment in self.segments.joined() {
            let (y, g) = (&y[segment.scratch()], &g[segment.scratch()]);
            let dot = match dot {
                Dot::OfRow(dot) => Dot::OfRow(dot),
                Dot::OfColumns(dots) => Dot::OfColumns(&dots[segment.scratch()]),
            };
            let mut dx = RowSink::<S>::new(&mut dx[segment.features()], self.non_temporal);
            sweep::<S>(
                segment.len,
                #[inline(always)]
                |at| {
                    let dot = match dot {
                        Dot::OfRow(dot) => dot,
                        Dot::OfColumns(dots) => V::at(dots, at),
                    };
                    dx.put(at, (V::at(y, at) * (V::at(g, at) - dot)).round());
                },
            );
        }
    }

    /// [`Gradient::softmax`] of whole rows from x, in the fast form and without a maximum; rows that
    /// are not in range are done again.
    #[inline(always)]
    fn row_softmax_fast(mut self, scratch: &mut RowScratch) {
        let ([tokens, heads], width) = (self.rows, self.segments.width());
        let RowScratch { y, g, sums, .. } = scratch;
        if self.row_softmax_in_range(y, g, sums) {
            return;
        }
        let g = InputTile::dense(&scratch.g, self.rows, width);
        let y = &mut scratch.y[..width];
        S::call(
            #[inline(always)]
            move || {
                for_each_row(
                    [1, tokens, heads],
                    #[inline(always)]
                    |[_, i, j]| {
                        let (x, g) = (self.x.row([0, i, j]), g.row([0, i, j]));
                        if in_range::<S>(x) {
                            return;
                        }
                        let inverse =
                            V::<S>::splat(exp_row(Source::<S>::new(x, Prefetch::None), y));
                        for k in (0..width).step_by(LANES) {
                            (V::get(y, k) * inverse).set(y, k);
                        }
                        let dot = Dot::OfRow(V::splat(self.segments.dot::<S>(y, g)));
                        self.softmax_row([i, j], [y, g], dot);
                    },
                );
            },
        );
    }

    /// Tells whether all rows are in range.
    #[inline(always)]
    fn row_softmax_in_range(&mut self, y: &mut [Lane], g: &[Lane], sums: &mut [Lane]) -> bool {
        let (x, [tokens, heads], non_temporal) = (self.x, self.rows, self.non_temporal);
        let (dx, len) = (&mut self.dx, self.segments.width());
        S::call(
            #[inline(always)]
            move || {
                let soon = Prefetch::L2(x.ahead());
                let (mut range, mut k) = (V::<S>::zero(), 0);
                for_each_row(
                    [1, tokens, heads],
                    #[inline(always)]
                    |row| {
                        let x = Source::<S>::new(&x.row(row)[..len], soon);
                        let (y, g) = (&mut y[k * len..][..len], &g[k * len..][..len]);
                        let (mut sum, mut dot) = (V::zero(), V::zero());
                        sweep::<S>(
                            len,
                            #[inline(always)]
                            |at| {
                                let x = x.load(at);
                                let e = x.exp_fast_in_range();
                                range = x.abs().max(range);
                                e.set_at(y, at);
                                sum += e;
                                dot = e.mul_add(V::at(g, at), dot);
                            },
                        );
                        sum.set(sums, 2 * k * LANES);
                        dot.set(sums, (2 * k + 1) * LANES);
                        k += 1;
                    },
                );
                // Apart, so that no row waits for its own sums.
                let mut k = 0;
                for_each_row(
                    [1, tokens, heads],
                    #[inline(always)]
                    |row| {
                        let inverse = 1.0 / f64::from(V::<S>::get(sums, 2 * k * LANES).sum());
                        let dot = V::<S>::get(sums, (2 * k + 1) * LANES).sum();
                        let dot = f64::from(dot) * inverse;
                        let (inverse, dot) = (V::<S>::splat(inverse as f32), V::splat(dot as f32));
                        let (y, g) = (&y[k * len..][..len], &g[k * len..][..len]);
                        let mut dx = RowSink::<S>::new(&mut dx.row(row)[..len], non_temporal);
                        k += 1;
                        sweep::<S>(
                            len,
                            #[inline(always)]
                            |at| {
                                let difference = V::at(g, at) - dot;
                                let gradient = V::at(y, at) * inverse * difference;
                                dx.put(at, gradient.round_ties_away());
                            },
                        );
                    },
                );
                range.largest() <= IN_RANGE
            },
        )
    }
}
