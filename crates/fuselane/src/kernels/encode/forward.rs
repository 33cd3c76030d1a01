//! The forward: a tile is activated and encoded, in one step where the activation has a fast form.

use super::activation::{RowScratch, activate};
use super::columns::Columns;
use super::operands::{Elements, Input, Lanes, Rounded, to_nearest_even};
use super::segments::Segments;
use super::tables::Tables;
use super::walk::{Walk, interleaved};
use super::{Encoding, FusedAct, Loops};
use crate::dtype::Element;
use crate::exec::rows::TaskRows;
use crate::kernels::act::IN_RANGE;
use crate::kernels::sweep::STEP;
use crate::kernels::tile::{InputTile, OutputTile, Tile, for_each_row};
use crate::ops::act::Act;
use crate::simd::{Kernel, Simd, V};

/// `o = encode(act(x))`.
pub(crate) struct Forward<'k, 'a, 'r, E> {
    pub(crate) walk: Walk<'k, 'a, E>,
    pub(crate) rows: TaskRows<'r, 1, 1>,
    pub(crate) columns: &'k Columns,
    pub(crate) non_temporal: bool,
}

impl<E: Encoding> Kernel for Forward<'_, '_, '_, E> {
    #[inline(always)]
    fn run<S: Simd>(mut self) {
        let Self { walk, columns, non_temporal, .. } = self;
        let (plan, encoding) = (walk.plan, walk.encoding);
        let plain = plan.act == FusedAct::default();
        let mut scratch = RowScratch::new(plan, !plain, false);
        let entries = if plain { interleaved::<S>(plan.batch) } else { 1 };
        let (segments, output) = (&plan.segments, &plan.output_segments);
        let tables = Tables::new::<S, E>(&walk);
        walk.for_each_sub_tile(tables, &mut self.rows, entries, &mut |rows, sub_tile| {
            let (tile, loops) = (&sub_tile.tile, sub_tile.loops);
            let (x, o) = (rows.input::<S::Elem>(0, tile), rows.output::<S::Elem>(0, tile));
            let o = (o, output, non_temporal);
            match plan.act {
                FusedAct::Elementwise(Act::None) => {
                    let x = Elements::<S, _>::new(
                        x,
                        segments,
                        #[inline(always)]
                        |x| x,
                    );
                    encode(encoding, loops, x, o, to_nearest_even::<S>());
                }
                FusedAct::Elementwise(Act::Silu) if silu_in_range::<S>(x, tile) => {
                    let x = Elements::<S, _>::new(
                        x,
                        segments,
                        #[inline(always)]
                        |x| {
                            if checks_range::<S>() { x.silu_fast_in_range() } else { x.silu_fast() }
                        },
                    );
                    encode(
                        encoding,
                        loops,
                        x,
                        o,
                        #[inline(always)]
                        |value: V<S>| value.round_ties_away(),
                    );
                }
                _ => {
                    let fast = activate::<S>(plan, x, sub_tile, columns, false, &mut scratch);
                    let y = InputTile::dense(&scratch.y, tile.rows, segments.width());
                    let y = Lanes { tile: y, segments };
                    if fast {
                        // Where x' is approximate, ties are chance.
                        encode(
                            encoding,
                            loops,
                            y,
                            o,
                            #[inline(always)]
                            |value: V<S>| value.round_ties_away(),
                        );
                    } else {
                        encode(encoding, loops, y, o, to_nearest_even::<S>());
                    }
                }
            }
        });
    }
}

/// An output, its segments, and whether stores should be non-temporal.
type To<'t, S> = (OutputTile<'t, <S as Simd>::Elem>, &'t Segments, bool);

/// Encodes the rows of a tile, and rounds by `round`.
fn encode<S: Simd, E: Encoding, X: Input<S>>(
    encoding: E,
    loops: Loops<'_>,
    x: X,
    (tile, segments, non_temporal): To<'_, S>,
    round: impl Fn(V<S>) -> S::Packed + Copy,
) {
    if non_temporal && tile.aligned_at::<S>(&segments.features()) {
        encoding.forward(loops, x, Rounded::<S, _, true> { tile, segments, round });
    } else {
        encoding.forward(loops, x, Rounded::<S, _, false> { tile, segments, round });
    }
}

/// Whether a tile is looked through before it is activated, as silu then needs no clamps. Where all arithmetic of
/// the loop has to wait for few and narrow registers (AVX2), that takes 0.86 of the time; with those of
/// [`Simd::PIPELINE`], it gains nothing.
const fn checks_range<S: Simd>() -> bool {
    V::<S>::HAS_FAST && !S::PIPELINE
}

/// Whether the forms that take the least work serve a tile.
fn silu_in_range<S: Simd>(x: InputTile<'_, S::Elem>, tile: &Tile) -> bool {
    if !checks_range::<S>() {
        return true;
    }
    S::call(
        #[inline(always)]
        move || {
            let limit = S::Elem::from_real(IN_RANGE).magnitude();
            let mut largest = [Default::default(); STEP];
            for_each_row(
                [tile.entries, tile.rows[0], tile.rows[1]],
                #[inline(always)]
                |index| {
                    let (steps, rest) = x.row(index).as_chunks::<STEP>();
                    // By places of a step, which the compiler makes registers.
                    let mut of_row = [Default::default(); STEP];
                    for step in steps {
                        for k in 0..STEP {
                            of_row[k] = step[k].magnitude().max(of_row[k]);
                        }
                    }
                    for x in rest {
                        of_row[0] = x.magnitude().max(of_row[0]);
                    }
                    for k in 0..STEP {
                        largest[k] = of_row[k].max(largest[k]);
                    }
                },
            );
            largest.iter().all(|largest| *largest <= limit)
        },
    )
}
