//! The forward: a tile is activated and encoded, in one step where the activation has a fast form.

use super::activation::{RowScratch, activate};
use super::columns::Columns;
use super::operands::{Elements, Input, Lanes, Rounded};
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
        walk.for_each_sub_tile::<S, 1, 1>(
            &mut self.rows,
            entries,
            #[inline(always)]
            |rows, sub_tile| {
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
                        encode::<S, _, _, false>(encoding, loops, x, o);
                    }
                    FusedAct::Elementwise(Act::Sigmoid) => {
                        let x = Elements::<S, _>::new(
                            x,
                            segments,
                            #[inline(always)]
                            |x| x.sigmoid_fast(),
                        );
                        encode::<S, _, _, true>(encoding, loops, x, o);
                    }
                    FusedAct::Elementwise(Act::Silu) => {
                        let x = Elements::<S, _>::new(
                            x,
                            segments,
                            #[inline(always)]
                            |x| x.silu_fast(),
                        );
                        encode::<S, _, _, true>(encoding, loops, x, o);
                    }
                    _ => {
                        let fast = activate::<S>(plan, x, &sub_tile, columns, &mut scratch);
                        let y = InputTile::dense(&scratch.y, tile.rows, segments.width());
                        let y = Lanes { tile: y, segments };
                        if fast {
                            encode::<S, _, _, true>(encoding, loops, y, o);
                        } else {
                            encode::<S, _, _, false>(encoding, loops, y, o);
                        }
                    }
                }
            },
        );
    }
}

/// An output, its segments, and whether stores should be non-temporal.
type To<'t, S> = (OutputTile<'t, <S as Simd>::Elem>, &'t Segments, bool);

/// Encodes, and rounds to nearest even; unless x is approximate, so that ties are chance.
#[inline(always)]
fn encode<S: Simd, E: Encoding, X: Input<S>, const APPROXIMATE: bool>(
    encoding: E,
    loops: Loops<'_>,
    x: X,
    o: To<'_, S>,
) {
    if APPROXIMATE {
        encode_by(
            (encoding, loops),
            x,
            o,
            #[inline(always)]
            |value| value.round_ties_away(),
        );
    } else {
        encode_by(
            (encoding, loops),
            x,
            o,
            #[inline(always)]
            |value| value.round(),
        );
    }
}

/// Encodes the rows of a tile, and rounds by `round`.
#[inline(always)]
fn encode_by<S: Simd, E: Encoding, X: Input<S>>(
    (encoding, loops): (E, Loops<'_>),
    x: X,
    (o, segments, non_temporal): To<'_, S>,
    round: impl Fn(V<S>) -> S::Packed + Copy,
) {
    if non_temporal && o.aligned_at(&segments.features()) {
        encoding.forward(loops, x, Rounded::<S, _, true>::new(o, segments, round));
    } else {
        encoding.forward(loops, x, Rounded::<S, _, false>::new(o, segments, round));
    }
}
