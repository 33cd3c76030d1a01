//! The forward: a patch is activated and encoded, in one step where both have short forms.

use super::activation::{Rounded, Sigmoid, Silu, activate, through};
use super::walk::{Encode, Place, Visitor, Walk, turns};
use super::{Columns, Encoding, FusedAct};
use crate::dtype::{Element, Real};
use crate::ops::act::Act;
use crate::rows::{Grid, Part};
use crate::scratch::Scratch;
use crate::simd::{Elements, KernelIn, Lanes, Math, Memory, Registers};

pub(super) struct Forward<'k, 'a, 'r, E, R: Real> {
    pub(super) walk: Walk<'k, 'a, E, R>,
    pub(super) part: Part<'r, 1, 1>,
    pub(super) columns: &'k Columns<R>,
    pub(super) stream: bool,
}

struct ForwardPatches<'k, 'a, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    columns: &'k Columns<R>,
    y: Scratch<R>,
    e: Scratch<R>,
    stream: bool,
}

impl<E: Encoding, R: Real> KernelIn<R> for Forward<'_, '_, '_, E, R> {
    #[inline(always)]
    fn run_in<L, T>(mut self)
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let Self { walk, columns, stream, .. } = self;
        let plain = walk.plan.act == FusedAct::default();
        let [y, e] = walk.plan.scratch(!plain);
        let mut patches = ForwardPatches { walk, columns, y, e, stream };
        walk.visit::<L, T, _, 1, 1>(&mut self.part, &mut patches);
    }
}

impl<E: Encoding, R: Real> Visitor<R, 1, 1> for ForwardPatches<'_, '_, E, R> {
    #[inline(always)]
    fn patch<L, T>(&mut self, place: Place, part: &mut Part<'_, 1, 1>, tables: &[Grid<'_, R>; 2])
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let patch = &place.patch;
        let x = part.input::<T>(0, patch);
        let o = part.output::<T>(0, patch);
        let Walk { plan, encoding, .. } = self.walk;
        let (pieces, stream) = (&plan.pieces, self.stream && o.streams(encoding.output_cuts()));
        if plan.act == FusedAct::default() {
            type Plain<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Elements<T>, Elements<T>, false>;
            L::enter(Plain::<_, L, T> { encoding, pieces, tables, x: &x, o, stream });
            return;
        }
        assert!(patch.entries == 1); // what follows knows of one only
        if L::HAS_SHORT {
            match plan.act {
                FusedAct::Elementwise(Act::Sigmoid) => {
                    return through::<_, L, T, Sigmoid>(encoding, pieces, tables, &x, o, stream);
                }
                FusedAct::Elementwise(Act::Silu) => {
                    return through::<_, L, T, Silu>(encoding, pieces, tables, &x, o, stream);
                }
                _ => {}
            }
        }
        let columns = self.walk.columns(&self.columns.statistics, patch, 2 * pieces.width);
        let columns = (columns, self.columns.form);
        let short = activate::<L, T>(plan.act, pieces, x, columns, &mut self.y, &mut self.e);
        let x = &Grid::dense(&self.y, patch.rows, pieces.width);
        if short {
            type Short<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Registers, Rounded<T>, false>;
            L::enter(Short::<_, L, T> { encoding, pieces, tables, x, o, stream });
            return;
        }
        type Activated<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Registers, Elements<T>, false>;
        L::enter(Activated::<_, L, T> { encoding, pieces, tables, x, o, stream });
    }

    #[inline(always)]
    fn entries<L: Lanes>(&self) -> usize {
        let plan = self.walk.plan;
        if plan.act == FusedAct::default() { turns::<L>(plan.batch) } else { 1 }
    }
}
