//! The walk over the rows of a call, by tiles of tokens and heads.

use super::tables::Tables;
use super::{Encoding, Loops, Plan};
use crate::exec::rows::TaskRows;
use crate::kernels::lanes::Lane;
use crate::kernels::tile::Tile;
use crate::simd::Simd;

/// A walk over the rows of a call.
pub(crate) struct Walk<'k, 'a, E> {
    pub(crate) plan: &'k Plan<'a>,
    pub(crate) encoding: E,
    /// The token that row 0 of the operands stands for.
    pub(crate) first: usize,
}

impl<E: Copy> Clone for Walk<'_, '_, E> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E: Copy> Copy for Walk<'_, '_, E> {}

/// The rows of a tile's tokens that are of one batch entry or a few.
#[derive(Clone, Copy)]
pub(super) struct SubTile<'t> {
    pub(super) tile: Tile,
    /// Where its first token is among those of the tables.
    pub(super) slot: usize,
    /// Whether it is the last of these tokens and heads.
    pub(super) last: bool,
    pub(super) loops: Loops<'t>,
}

/// Batch entries whose rows are interleaved, where there is little arithmetic: so memory is read and written
/// at two places at once, which keeps more of it busy. (Rotate from memory, time over that of one by one: two
/// 0.90 and four 0.86 on an Emerald Rapids, loops in C; two 0.98 and four 1.4 on a Zen 5.)
const INTERLEAVED: usize = 2;

/// How many of `batch` entries are interleaved: at most [`INTERLEAVED`], and about as many each time.
#[inline(always)]
pub(super) fn interleaved<S: Simd>(batch: usize) -> usize {
    if S::PIPELINE { batch.div_ceil(batch.div_ceil(INTERLEAVED)) } else { 1 }
}

impl<E: Encoding> Walk<'_, '_, E> {
    /// Calls `work` with all rows of a task, tile by tile, the batch inside, `entries` at once. It is the same
    /// code for all instruction sets.
    pub(super) fn for_each_sub_tile<const I: usize, const O: usize>(
        &self,
        mut tables: Tables,
        rows: &mut TaskRows<'_, I, O>,
        entries: usize,
        work: &mut dyn FnMut(&mut TaskRows<'_, I, O>, &SubTile<'_>),
    ) {
        let plan = self.plan;
        let angles = &plan.angles;
        let (range, per_token) = (rows.range(), plan.batch * plan.heads);
        let (first, end) = (range.start / per_token, range.end.div_ceil(per_token));
        let (per_batch, [tile_tokens, tile_heads]) = (angles.per_batch(), plan.tile);
        let most = if per_batch { 1 } else { entries };
        for t0 in (first..end).step_by(tile_tokens) {
            let t1 = (t0 + tile_tokens).min(end);
            let tokens = self.first + t0..self.first + t1;
            for h0 in (0..plan.heads).step_by(tile_heads) {
                let h1 = (h0 + tile_heads).min(plan.heads);
                if !per_batch && (h0 == 0 || !angles.shared) {
                    tables.keep_off(angles, rows.output_address([t0, 0, h0]));
                    (tables.fill)(&mut tables, angles, 0, tokens.clone(), h0..h1);
                }
                let mut batch = 0;
                while batch < plan.batch {
                    // The first and the last token of a task may be shared with others, between batch
                    // entries.
                    let begins = |b: usize| (t0 * plan.batch + b) * plan.heads >= range.start;
                    let ends = |b: usize| ((t1 - 1) * plan.batch + b) * plan.heads < range.end;
                    let (whole_first, whole_last) = (begins(batch), ends(batch));
                    let (from, to) =
                        (t0 + usize::from(!whole_first), t1 - usize::from(!whole_last));
                    let entry = batch;
                    batch += 1;
                    while batch < plan.batch.min(entry + most)
                        && begins(batch) == whole_first
                        && ends(batch) == whole_last
                    {
                        batch += 1;
                    }
                    if from >= to {
                        continue;
                    }
                    if per_batch {
                        (tables.fill)(&mut tables, angles, entry, tokens.clone(), h0..h1);
                    }
                    // One sub-tile ahead is enough: two to four were no faster.
                    let next = if batch < plan.batch {
                        [from, batch, h0]
                    } else if h1 < plan.heads {
                        [t0, 0, h1]
                    } else {
                        [t1, 0, 0]
                    };
                    let (first, entries, slot) = ([from, entry, h0], batch - entry, from - t0);
                    let tile = Tile { first, rows: [to - from, h1 - h0], entries, next };
                    let tables = tables.rows(angles, slot, tile.rows);
                    let loops = Loops { rows: tile.rows, entries, tables };
                    let last = per_batch || batch == plan.batch;
                    work(rows, &SubTile { tile, slot, last, loops });
                }
            }
        }
    }

    /// The numbers that were saved for the columns of a sub-tile, one for each number of scratch, from its
    /// first head on; none where there are none.
    #[inline(always)]
    pub(super) fn columns<'c>(&self, all: &'c [Lane], tile: &Tile) -> &'c [Lane] {
        let ([_, batch, head], width) = (tile.first, self.plan.segments.width());
        let at = (batch * self.plan.heads + head) * width;
        all.get(at..at + tile.rows[1] * width).unwrap_or_default()
    }
}
