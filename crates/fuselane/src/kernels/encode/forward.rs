//! The forward: a tile is activated and encoded, in one step where the activation has a fast form.

use super::activation::{RowScratch, activate};
use super::columns::Columns;
use super::operands::{Elements, Input, Lanes, Rounded, to_nearest_even};
use super::segments::Segments;
use super::walk::{Walk, interleaved};
use super::{Encoding, FusedAct, Loops};
use crate::exec::rows::TaskRows;
use crate::kernels::tile::{InputTile, OutputTile};
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
        walk.for_each_sub_tile::<S, 1, 1>(&mut self.rows, entries, &mut |rows, sub_tile| {
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
                FusedAct::Elementwise(Act::Silu) => {
                    let x = Elements::<S, _>::new(
                        x,
                        segments,
                        #[inline(always)]
                        |x| x.silu_fast(),
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
                    encode(
                        encoding,
                        loops,
                        Lanes { tile: y, segments },
                        o,
                        // Where x' is approximate, ties are chance.
                        #[inline(always)]
                        move |value: V<S>| match fast {
                            true => value.round_ties_away(),
                            false => value.round(),
                        },
                    );
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
    if non_temporal && tile.aligned_at(&segments.features()) {
        encoding.forward(loops, x, Rounded::<S, _, true> { tile, segments, round });
    } else {
        encoding.forward(loops, x, Rounded::<S, _, false> { tile, segments, round });
    }
}
