//! The walk over the rows of a call, and the encoding of what it comes to.

use super::{Encoding, Pieces, Plan};
use crate::dtype::{Element, Real};
use crate::ops::angles::Tables;
use crate::rows::{Grid, GridMut, Part, Patch};
use crate::simd::{Access, Lanes, Math, Memory, Task};

/// A walk over the rows of a call, by tiles of tokens and heads.
pub(super) struct Walk<'k, 'a, E, R: Real> {
    pub(super) plan: &'k Plan<'a, R>,
    pub(super) encoding: E,
    /// The token that row 0 of the operands stands for.
    pub(super) first: usize,
}

impl<E: Copy, R: Real> Clone for Walk<'_, '_, E, R> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E: Copy, R: Real> Copy for Walk<'_, '_, E, R> {}

/// A patch: its rows, and its first token's slot in the tile.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) patch: Patch,
    pub(super) slot: usize,
}

/// What a kernel does with the rows of a tile that are of one batch entry or a few, and with the tokens of
/// a tile when all their rows are done.
pub(super) trait Visitor<R: Real, const I: usize, const O: usize> {
    fn patch<L, T>(&mut self, place: Place, part: &mut Part<'_, I, O>, tables: &[Grid<'_, R>; 2])
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>;

    #[inline(always)]
    fn tokens_done(&mut self, _place: Place) {}

    /// How many batch entries a patch may have.
    #[inline(always)]
    fn entries<L: Lanes>(&self) -> usize {
        1
    }
}

/// Batch entries whose rows take turns, where there is little arithmetic: so memory is read and written at
/// several places at once, which keeps more of it busy. (Emerald Rapids, loops in C, from memory, cycles for
/// 16 elements: rotate 9.1 one by one, 8.2 with two, 7.8 with four. A Zen 4 is faster straight on, and does
/// not have these lanes. CPUs of AMD's that have them were not measured.)
const TURNS: usize = 4;

/// How many of `batch` entries take turns: at most [`TURNS`], and about as many each time.
#[inline(always)]
pub(super) fn turns<L: Lanes>(batch: usize) -> usize {
    if L::MANY_REGISTERS { batch.div_ceil(batch.div_ceil(TURNS)) } else { 1 }
}

impl<E: Encoding, R: Real> Walk<'_, '_, E, R> {
    /// Shows every row of a part to a visitor, tile by tile, the batch inside.
    #[inline(always)]
    pub(super) fn visit<L, T, V, const I: usize, const O: usize>(
        &self,
        part: &mut Part<'_, I, O>,
        visitor: &mut V,
    ) where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
        V: Visitor<R, I, O>,
    {
        let plan = self.plan;
        let angles = &plan.angles;
        let mut tables = Tables::new::<L>(angles, self.encoding.angle_step(), plan.tile);
        let (range, per_token) = (part.range(), plan.batch * plan.heads);
        let (first, end) = (range.start / per_token, range.end.div_ceil(per_token));
        let (per_batch, shared) = (angles.per_batch(), angles.shared);
        let [tile_tokens, tile_heads] = plan.tile;
        for t0 in (first..end).step_by(tile_tokens) {
            let t1 = (t0 + tile_tokens).min(end);
            let tokens = self.first + t0..self.first + t1;
            for h0 in (0..plan.heads).step_by(tile_heads) {
                let h1 = (h0 + tile_heads).min(plan.heads);
                if !per_batch && (h0 == 0 || !shared) {
                    tables.keep_off(angles, part.output_address([t0, 0, h0]));
                    tables.fill::<L>(angles, 0, tokens.clone(), h0..h1);
                }
                let most = if per_batch { 1 } else { visitor.entries::<L>() };
                let mut batch = 0;
                while batch < plan.batch {
                    // The first and the last token of a part may be shared with others, between
                    // batch entries.
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
                    let entries = batch - entry;
                    if from >= to {
                        continue;
                    }
                    if per_batch {
                        tables.fill::<L>(angles, entry, tokens.clone(), h0..h1);
                    }
                    // One patch ahead is enough: two to four were no faster.
                    let next = if batch < plan.batch {
                        [from, batch, h0]
                    } else if h1 < plan.heads {
                        [t0, 0, h1]
                    } else {
                        [t1, 0, 0]
                    };
                    let (rows, slot) = ([to - from, h1 - h0], from - t0);
                    let patch = Patch { first: [from, entry, h0], rows, entries, next };
                    let place = Place { patch, slot };
                    visitor.patch::<L, T>(place, part, &tables.rows(angles, slot, rows));
                    if per_batch {
                        visitor.tokens_done(place);
                    }
                }
                if !per_batch {
                    let rows = [t1 - t0, h1 - h0];
                    let first = [t0, 0, h0];
                    let patch = Patch { first, rows, entries: 1, next: first };
                    visitor.tokens_done(Place { patch, slot: 0 });
                }
            }
        }
    }

    /// The numbers that were kept for the columns of a patch, `len` for each batch entry and head,
    /// from the patch's first head on; none where there are none.
    #[inline(always)]
    pub(super) fn columns<'c>(&self, all: &'c [R], patch: &Patch, len: usize) -> &'c [R] {
        let [_, batch, head] = patch.first;
        let at = (batch * self.plan.heads + head) * len;
        all.get(at..at + patch.rows[1] * len).unwrap_or_default()
    }
}

/// `o = encode(x)` for a patch, or back with `BACK`. Gives what [`Access::note`] noted of x, forward.
pub(super) struct Encode<'p, 'o, E, L: Lanes, S: Access<L>, D: Access<L>, const BACK: bool> {
    pub(super) encoding: E,
    pub(super) pieces: &'p Pieces,
    pub(super) tables: &'p [Grid<'p, L::Real>; 2],
    pub(super) x: &'p Grid<'p, S::Number>,
    pub(super) o: GridMut<'o, D::Number>,
    pub(super) stream: bool,
}

impl<E, L, S, D, const BACK: bool> Task for Encode<'_, '_, E, L, S, D, BACK>
where
    E: Encoding,
    S: Access<L>,
    D: Access<L>,
    L: Math,
{
    type Output = L;
    #[inline(always)]
    fn run(self) -> L {
        let Self { encoding, pieces, tables: &tables, x: &x, o, stream } = self;
        let output = encoding.output_cuts();
        if BACK {
            let (x, o) = (x.cut(output), o.cut(pieces.cuts::<L, D>()));
            encoding.backward::<L, S, D>(x, tables, o, stream);
            L::splat(Real::of(0.0))
        } else {
            let (x, o) = (x.cut(pieces.cuts::<L, S>()), o.cut(output));
            encoding.forward::<L, S, D>(x, tables, o, stream)
        }
    }
}
