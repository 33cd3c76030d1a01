//! The backward: a patch of gradients is decoded, and pulled back through the activation.

use std::marker::PhantomData;

use super::activation::{Short, Sigmoid, Silu, activate, is_near_row, is_short, write_nearest};
use super::walk::{Encode, Place, Visitor, Walk, turns};
use super::{Columns, Encoding, FusedAct, Pieces};
use crate::dtype::{Element, Real};
use crate::ops::act::{Act, specialized};
use crate::ops::softmax::{self, NEAR};
use crate::rows::{Grid, GridMut, Part, Patch};
use crate::scratch::Scratch;
use crate::simd::{
    Elements, KernelIn, Lanes, MAX_LANES, Math, Memory, Registers, SHORT_LIMIT, Task,
};

/// For the backward of a softmax over the sequence: sum over tokens of x' * dx', for each column.
pub(super) struct Dots<'k, 'a, 'r, E, R: Real> {
    pub(super) walk: Walk<'k, 'a, E, R>,
    pub(super) part: Part<'r, 2, 0>,
    pub(super) columns: &'k Columns<R>,
    pub(super) sums: &'k mut [R],
}

struct DotPatches<'k, 'a, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    columns: &'k Columns<R>,
    sums: &'k mut [R],
    y: Scratch<R>,
    g: Scratch<R>,
    e: Scratch<R>,
}

impl<E: Encoding, R: Real> KernelIn<R> for Dots<'_, '_, '_, E, R> {
    #[inline(always)]
    fn run_in<L, T>(mut self)
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let Self { walk, columns, sums, .. } = self;
        let ([y, e], [g, _]) = (walk.plan.scratch(true), walk.plan.scratch(true));
        let mut patches = DotPatches { walk, columns, sums, y, g, e };
        walk.visit::<L, T, _, 2, 0>(&mut self.part, &mut patches);
    }
}

impl<E: Encoding, R: Real> Visitor<R, 2, 0> for DotPatches<'_, '_, E, R> {
    #[inline(always)]
    fn patch<L, T>(&mut self, place: Place, part: &mut Part<'_, 2, 0>, tables: &[Grid<'_, R>; 2])
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let patch = &place.patch;
        let (x, grad) = (part.input::<T>(0, patch), part.input::<T>(1, patch));
        let Walk { plan, encoding, .. } = self.walk;
        let (pieces, width, stream) = (&plan.pieces, plan.pieces.width, false);
        let columns = self.walk.columns(&self.columns.statistics, patch, 2 * width);
        let columns = (columns, self.columns.form);
        activate::<L, T>(plan.act, pieces, x, columns, &mut self.y, &mut self.e);
        let o = GridMut::dense(&mut self.g, patch.rows, width);
        type Back<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Elements<T>, Registers, true>;
        L::enter(Back::<_, L, T> { encoding, pieces, tables, x: &grad, o, stream });
        let [_, batch, head] = patch.first;
        let at = (batch * plan.heads + head) * width;
        let row = patch.rows[1] * width;
        let sums = &mut self.sums[at..at + row];
        for (y, g) in self.y.chunks_exact(row).zip(self.g.chunks_exact(row)).take(patch.rows[0]) {
            for i in (0..row).step_by(L::N) {
                L::get(y, i).mul_add(L::get(g, i), L::get(sums, i)).set(sums, i);
            }
        }
    }
}

pub(super) struct Backward<'k, 'a, 'r, E, R: Real> {
    pub(super) walk: Walk<'k, 'a, E, R>,
    pub(super) part: Part<'r, 2, 1>,
    pub(super) columns: &'k Columns<R>,
    pub(super) dots: &'k [R],
    /// Sums of the angles' gradients, if asked for.
    pub(super) sums: Option<&'k mut [R]>,
    pub(super) stream: bool,
}

struct BackwardPatches<'k, 'a, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    columns: &'k Columns<R>,
    dots: &'k [R],
    sums: Option<&'k mut [R]>,
    /// Gradients of a tile's angles, summed over the batch: by slot and head.
    angles: Scratch<R>,
    y: Scratch<R>,
    g: Scratch<R>,
    e: Scratch<R>,
    stream: bool,
}

impl<E: Encoding, R: Real> KernelIn<R> for Backward<'_, '_, '_, E, R> {
    #[inline(always)]
    fn run_in<L, T>(mut self)
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let Self { walk, columns, dots, sums, stream, .. } = self;
        let plan = walk.plan;
        let tile = plan.tile[0] * plan.tile[1] * plan.angle_sums;
        let angles = Scratch::zeros(if sums.is_some() { tile } else { 0 });
        let plain = plan.act == FusedAct::default() && sums.is_none();
        let ([y, e], [g, _]) = (plan.scratch(!plain), plan.scratch(!plain));
        let mut patches = BackwardPatches { walk, columns, dots, sums, angles, y, g, e, stream };
        walk.visit::<L, T, _, 2, 1>(&mut self.part, &mut patches);
    }
}

impl<E: Encoding, R: Real> Visitor<R, 2, 1> for BackwardPatches<'_, '_, E, R> {
    #[inline(always)]
    fn patch<L, T>(&mut self, place: Place, part: &mut Part<'_, 2, 1>, tables: &[Grid<'_, R>; 2])
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let patch = &place.patch;
        let (x, grad) = (part.input::<T>(0, patch), part.input::<T>(1, patch));
        let dx = part.output::<T>(0, patch);
        let Walk { plan, encoding, .. } = self.walk;
        let stream = self.stream && dx.streams(plan.pieces.cuts::<L, Elements<T>>());
        let (pieces, width, lanes) = (&plan.pieces, plan.pieces.width, PhantomData::<L>);
        if plan.act == FusedAct::default() && self.sums.is_none() {
            type Plain<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Elements<T>, Elements<T>, true>;
            L::enter(Plain::<_, L, T> { encoding, pieces, tables, x: &grad, o: dx, stream });
            return;
        }
        assert!(patch.entries == 1); // as above
        let o = GridMut::dense(&mut self.g, patch.rows, width);
        type Back<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Elements<T>, Registers, true>;
        L::enter(Back::<_, L, T> { encoding, pieces, tables, x: &grad, o, stream: false });
        let statistics = &self.columns.statistics;
        let columns = (self.walk.columns(statistics, patch, 2 * width), self.columns.form);
        let g = Grid::dense(&self.g, patch.rows, width);
        if plan.act == FusedAct::SoftmaxFeatures && is_short::<L>(pieces, self.columns.form) {
            let (y, sums) = (&mut self.y, &mut self.e);
            pull_back_rows::<L, T>(pieces, x, g, y, sums, dx, stream);
            return;
        }
        if self.sums.is_some() || !matches!(plan.act, FusedAct::Elementwise(_)) {
            activate::<L, T>(plan.act, pieces, x, columns, &mut self.y, &mut self.e);
        }
        let y = Grid::dense(&self.y, patch.rows, width);
        if self.sums.is_some() {
            let at = place.slot * plan.tile[1] * plan.angle_sums;
            let (sums, len) = (&mut self.angles[at..], plan.angle_sums);
            L::enter(AngleGradients { encoding, pieces, tables, y, g, grad, sums, len, lanes });
        }
        if dx.len() == 0 {
            return;
        }
        match plan.act {
            FusedAct::Elementwise(Act::Sigmoid) if L::HAS_SHORT => {
                pull_back_short::<L, T, Sigmoid>(pieces, x, g, dx, stream);
            }
            FusedAct::Elementwise(Act::Silu) if L::HAS_SHORT => {
                pull_back_short::<L, T, Silu>(pieces, x, g, dx, stream);
            }
            FusedAct::Elementwise(act) => {
                L::enter(PullBack { act, pieces, x, g, dx, stream, lanes });
            }
            _ => {
                let columns = self.walk.columns(self.dots, patch, width);
                L::enter(PullBackSoftmax::<L, T> { pieces, y, g, columns, dx, stream });
            }
        }
    }

    #[inline(always)]
    fn entries<L: Lanes>(&self) -> usize {
        let plan = self.walk.plan;
        let plain = plan.act == FusedAct::default() && self.sums.is_none();
        if plain { turns::<L>(plan.batch) } else { 1 }
    }

    #[inline(always)]
    fn tokens_done(&mut self, place: Place) {
        let Some(sums) = &mut self.sums else { return };
        let (plan, encoding) = (self.walk.plan, self.walk.encoding);
        let split = &plan.angles.split;
        let Patch { first: [token, batch, head], rows, .. } = place.patch;
        for i in 0..rows[0] {
            let token = self.walk.first + token + i;
            for j in 0..rows[1] {
                let at = ((place.slot + i) * plan.tile[1] + j) * plan.angle_sums;
                let angles = &mut self.angles[at..at + plan.angle_sums];
                let row = if split.theta_heads == 1 { 0 } else { head + j };
                let sums = &mut sums[row * split.count..(row + 1) * split.count];
                let step = encoding.angle_step();
                plan.angles.add_gradients([batch, token], angles, step, sums);
                angles.fill(R::of(0.0));
            }
        }
    }
}

/// Adds the gradients of a patch's angles to the sums of its tile.
struct AngleGradients<'p, 's, E, L: Lanes, T: Element> {
    encoding: E,
    pieces: &'p Pieces,
    tables: &'p [Grid<'p, L::Real>; 2],
    y: Grid<'p, L::Real>,
    g: Grid<'p, L::Real>,
    grad: Grid<'p, T>,
    sums: &'s mut [L::Real],
    /// Numbers for each head in the sums.
    len: usize,
    lanes: PhantomData<L>,
}

impl<E, L, T> Task for AngleGradients<'_, '_, E, L, T>
where
    E: Encoding,
    T: Element<Real = L::Real>,
    L: Math + Memory<T> + Memory<<L as Lanes>::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let [tokens, heads] = self.grad.rows();
        for i in 0..tokens {
            for j in 0..heads {
                let (y, g) = (self.y.row(i, j), self.g.row(i, j));
                let grad = self.grad.row(i, j);
                let table = (self.tables[0].row(i, j), self.tables[1].row(i, j));
                let at = (i * heads + j) * self.len;
                let sums = &mut self.sums[at..at + self.len];
                let y_and_g = (y, g, self.pieces.starts);
                self.encoding.angle_gradients::<L, T>(y_and_g, grad, table, sums);
            }
        }
    }
}

/// `dx = dx' * f'(x)` for a patch.
struct PullBack<'p, 'o, L, T: Element> {
    act: Act,
    pieces: &'p Pieces,
    x: Grid<'p, T>,
    g: Grid<'p, T::Real>,
    dx: GridMut<'o, T>,
    stream: bool,
    lanes: PhantomData<L>,
}

impl<L, T> Task for PullBack<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.x.rows();
        for i in 0..tokens {
            for j in 0..heads {
                self.x.prefetch_next::<L>(i, j);
                let (x, g, dx) = (self.x.row(i, j), self.g.row(i, j), self.dx.row(i, j));
                for piece in self.pieces.iter() {
                    let (act, x) = (self.act, piece.of_row(x));
                    let dx = &mut dx[piece.first..piece.first + piece.len];
                    specialized!(act => for k in (0..x.len()).step_by(L::N) {
                        let (x, g) = (L::read(x, k, Real::of(0.0)), L::get(g, piece.at + k));
                        act.pull_back(x, g).write(dx, k, self.stream);
                    });
                }
            }
        }
    }
}

/// `dx = dx' * f'(x)` for a patch, with the short form of the slope.
#[inline(always)]
fn pull_back_short<L, T, G>(
    pieces: &Pieces,
    x: Grid<'_, T>,
    g: Grid<'_, T::Real>,
    mut dx: GridMut<'_, T>,
    stream: bool,
) where
    T: Element,
    G: Short,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let lanes = PhantomData::<(L, G)>;
    // The choice is made outside of the loop, which then needs no more registers than there are.
    let far = if L::MANY_REGISTERS && stream && pieces.whole() && dx.has_lines() {
        L::enter(PullBackShort::<_, _, _, true, true, 2> { pieces, x, g, dx: &mut dx, lanes })
    } else if stream && pieces.whole() && dx.is_aligned() {
        L::enter(PullBackShort::<_, _, _, true, true, 1> { pieces, x, g, dx: &mut dx, lanes })
    } else {
        L::enter(PullBackShort::<_, _, _, true, false, 1> { pieces, x, g, dx: &mut dx, lanes })
    };
    if far {
        L::enter(PullBackShort::<_, _, _, false, false, 1> { pieces, x, g, dx: &mut dx, lanes });
    }
}

/// [`pull_back_short`]; tells whether there are arguments that are not near, and only right without
/// them if `NEAR`. With `STREAM`, rows are whole and aligned, in groups of `K` blocks.
struct PullBackShort<'p, 'o, L, G, T: Element, const NEAR: bool, const STREAM: bool, const K: usize>
{
    pieces: &'p Pieces,
    x: Grid<'p, T>,
    g: Grid<'p, T::Real>,
    dx: &'p mut GridMut<'o, T>,
    lanes: PhantomData<(L, G)>,
}

impl<L, G, T, const NEAR: bool, const STREAM: bool, const K: usize> Task
    for PullBackShort<'_, '_, L, G, T, NEAR, STREAM, K>
where
    T: Element,
    G: Short,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let [tokens, heads] = self.x.rows();
        let zero = Real::of(0.0);
        let mut noted = L::splat(zero);
        for i in 0..tokens {
            for j in 0..heads {
                if STREAM {
                    let groups = self.x.groups::<K>(i, j).iter().zip(self.g.groups::<K>(i, j));
                    for ((x, g), dx) in groups.zip(self.dx.groups::<true, K>(i, j)) {
                        self.x.prefetch_block::<L>(&x[0]);
                        let mut blocks = [L::splat(zero); K];
                        for k in 0..K {
                            noted = L::note(&x[k], 0, noted);
                            let slope = G::slope::<L, NEAR>(L::read_whole(&x[k], 0));
                            blocks[k] = L::get(&g[k], 0).mul(slope);
                        }
                        write_nearest::<L, T, K>(blocks, dx.as_flattened_mut(), 0, true);
                    }
                    continue;
                }
                let (x, g, dx) = (self.x.row(i, j), self.g.row(i, j), self.dx.row(i, j));
                for piece in self.pieces.iter() {
                    let (x, x_end) = piece.of_row(x).as_chunks::<MAX_LANES>();
                    let dx = &mut dx[piece.first..piece.first + piece.len];
                    let (dx, dx_end) = dx.as_chunks_mut::<MAX_LANES>();
                    let g = g[piece.at..].as_chunks::<MAX_LANES>().0;
                    for ((x, g), dx) in x.iter().zip(g).zip(dx) {
                        self.x.prefetch_block::<L>(x);
                        noted = L::note(x, 0, noted);
                        let slope = G::slope::<L, NEAR>(L::read_whole(x, 0));
                        L::get(g, 0).mul(slope).nearest().write_exact_whole(dx, 0, false);
                    }
                    if !x_end.is_empty() {
                        let slope = G::slope::<L, false>(L::read(x_end, 0, zero));
                        let g = L::get(&g[x.len()], 0);
                        g.mul(slope).nearest().write_exact(dx_end, 0, false);
                    }
                }
            }
        }
        L::is_far(noted, SHORT_LIMIT)
    }
}

/// `dx = x' * (dx' - sum of x' * dx')` for a patch, for softmaxes of rows in their short form.
/// `y` is scratch for all rows, `sums` has room for two blocks for each.
#[inline(always)]
fn pull_back_rows<L, T>(
    pieces: &Pieces,
    x: Grid<'_, T>,
    g: Grid<'_, T::Real>,
    y: &mut [T::Real],
    sums: &mut [T::Real],
    mut dx: GridMut<'_, T>,
    stream: bool,
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    let lanes = PhantomData::<L>;
    let rows = x.rows();
    let to = GridMut::dense(y, rows, pieces.width);
    let far = if L::MANY_REGISTERS && stream && dx.has_lines() {
        L::enter(PullBackNearRows::<_, _, true, 2> { x, g, y: to, sums, dx: &mut dx, lanes })
    } else if stream && dx.is_aligned() {
        L::enter(PullBackNearRows::<_, _, true, 1> { x, g, y: to, sums, dx: &mut dx, lanes })
    } else {
        L::enter(PullBackNearRows::<_, _, false, 1> { x, g, y: to, sums, dx: &mut dx, lanes })
    };
    if !far {
        return;
    }
    for i in 0..rows[0] {
        for j in 0..rows[1] {
            let x = x.row(i, j);
            if is_near_row::<L, T>(x) {
                continue;
            }
            let (g, dx) = (g.row(i, j), dx.row(i, j));
            let inverse = L::splat(softmax::exp_row::<L, T>(x, y));
            for k in (0..x.len()).step_by(L::N) {
                L::get(y, k).mul(inverse).set(y, k);
            }
            let dot = L::splat(pieces.dot::<L>(&y[..x.len()], g));
            for k in (0..x.len()).step_by(L::N) {
                L::get(y, k).mul(L::get(g, k).sub(dot)).write(dx, k, stream);
            }
        }
    }
}

/// [`pull_back_rows`] where all elements are near 0; tells whether some are not. With `STREAM`, rows
/// are aligned, in groups of `K` blocks.
struct PullBackNearRows<'p, 'o, 'y, L, T: Element, const STREAM: bool, const K: usize> {
    x: Grid<'p, T>,
    g: Grid<'p, T::Real>,
    y: GridMut<'y, T::Real>,
    sums: &'y mut [T::Real],
    dx: &'p mut GridMut<'o, T>,
    lanes: PhantomData<L>,
}

impl<L, T, const STREAM: bool, const K: usize> Task
    for PullBackNearRows<'_, '_, '_, L, T, STREAM, K>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(mut self) -> bool {
        let [tokens, heads] = self.x.rows();
        let zero = L::splat(Real::of(0.0));
        let mut noted = zero;
        for i in 0..tokens {
            for j in 0..heads {
                let (mut sum, mut dot) = (zero, zero);
                let blocks = self.x.blocks(i, j).iter().zip(self.g.blocks(i, j));
                for ((x, g), y) in blocks.zip(self.y.blocks(i, j)) {
                    self.x.prefetch_block::<L>(x);
                    let e = L::read_whole(x, 0).exp_for_store::<true>();
                    noted = L::note(x, 0, noted);
                    e.set(y, 0);
                    sum = sum.add(e);
                    dot = e.mul_add(L::get(g, 0), dot);
                }
                let at = 2 * (i * heads + j) * L::N;
                sum.set(self.sums, at);
                dot.set(self.sums, at + L::N);
            }
        }
        // Apart, so that no row waits for its own sums.
        for i in 0..tokens {
            for j in 0..heads {
                let at = 2 * (i * heads + j) * L::N;
                let inverse = 1.0 / L::get(self.sums, at).reduce_add().to_f64();
                let dot = L::get(self.sums, at + L::N).reduce_add().to_f64() * inverse;
                let (inverse, dot) = (L::splat(Real::of(inverse)), L::splat(Real::of(dot)));
                let (y, g) = (self.y.groups::<false, K>(i, j), self.g.groups::<K>(i, j));
                for ((y, g), dx) in y.iter().zip(g).zip(self.dx.groups::<STREAM, K>(i, j)) {
                    let mut blocks = [zero; K];
                    for k in 0..K {
                        let difference = L::get(&g[k], 0).sub(dot);
                        blocks[k] = L::get(&y[k], 0).mul(inverse).mul(difference);
                    }
                    write_nearest::<L, T, K>(blocks, dx.as_flattened_mut(), 0, STREAM);
                }
            }
        }
        L::is_far(noted, NEAR)
    }
}

/// `dx = x' * (dx' - sum of x' * dx')` for a patch; with the sums of `columns`, if there are some,
/// else with those of rows.
struct PullBackSoftmax<'p, 'o, L: Lanes, T: Element> {
    pieces: &'p Pieces,
    y: Grid<'p, L::Real>,
    g: Grid<'p, L::Real>,
    columns: &'p [L::Real],
    dx: GridMut<'o, T>,
    stream: bool,
}

impl<L, T> Task for PullBackSoftmax<'_, '_, L, T>
where
    T: Element<Real = L::Real>,
    L: Math + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.y.rows();
        let width = self.pieces.width;
        // Loops that only stream, where they can: see [`GridMut::aligned_blocks`].
        let aligned = self.stream && self.pieces.whole() && self.dx.is_aligned();
        if L::N == MAX_LANES && aligned && !self.columns.is_empty() {
            let (dots, _) = self.columns.as_chunks::<MAX_LANES>();
            for i in 0..tokens {
                for j in 0..heads {
                    let dots = &dots[j * width / MAX_LANES..][..width / MAX_LANES];
                    let blocks = self.y.blocks(i, j).iter().zip(self.g.blocks(i, j)).zip(dots);
                    for (((y, g), dot), dx) in blocks.zip(self.dx.aligned_blocks(i, j)) {
                        let difference = L::get(g, 0).sub(L::get(dot, 0));
                        L::get(y, 0).mul(difference).write_whole(dx, 0, true);
                    }
                }
            }
            return;
        }
        for i in 0..tokens {
            for j in 0..heads {
                let (y, g, dx) = (self.y.row(i, j), self.g.row(i, j), self.dx.row(i, j));
                let rows = self.columns.is_empty();
                let dots = if rows { y } else { &self.columns[j * width..][..width] };
                let dot = if rows { self.pieces.dot::<L>(y, g) } else { Real::of(0.0) };
                for piece in self.pieces.iter() {
                    let dx = &mut dx[piece.first..piece.first + piece.len];
                    for k in (0..piece.len).step_by(L::N) {
                        let at = piece.at + k;
                        let dot = if rows { L::splat(dot) } else { L::get(dots, at) };
                        L::get(y, at).mul(L::get(g, at).sub(dot)).write(dx, k, self.stream);
                    }
                }
            }
        }
    }
}
