//! Activations within the walk: x' of a patch, into scratch or on the way to the encoding.

use std::marker::PhantomData;

use super::walk::Encode;
use super::{Encoding, Form, FusedAct, Pieces};
use crate::dtype::{Element, Real};
use crate::ops::act::{Act, specialized};
use crate::ops::softmax::{self, NEAR};
use crate::rows::{Grid, GridMut};
use crate::simd::{Access, Lanes, MAX_LANES, Math, Memory, SHORT_LIMIT, Task};

/// Whether softmaxes are in their short form, which there is for rows of whole blocks.
#[inline(always)]
pub(super) fn is_short<L: Math>(pieces: &Pieces, form: Form) -> bool {
    L::HAS_SHORT && form != Form::Exact && pieces.whole()
}

/// x' of a patch, into scratch; tells whether it is approximate. `columns` are the statistics of its
/// columns, and the form of softmaxes; `e` is scratch for one row, or for a block for each.
#[inline(always)]
pub(super) fn activate<L, T>(
    act: FusedAct,
    pieces: &Pieces,
    x: Grid<'_, T>,
    (columns, form): (&[T::Real], Form),
    y: &mut [T::Real],
    e: &mut [T::Real],
) -> bool
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    let (lanes, short) = (PhantomData::<L>, is_short::<L>(pieces, form));
    let mut far_only = false;
    if short && act == FusedAct::SoftmaxFeatures {
        let y = GridMut::dense(y, x.rows(), pieces.width);
        far_only = true;
        if !L::enter(NearRowSoftmax { x, y, sums: e, lanes }) {
            return true;
        }
    }
    let y = GridMut::dense(y, x.rows(), pieces.width);
    match act {
        FusedAct::Elementwise(act) => {
            L::enter(Values { act, pieces, x, y, lanes });
            return false;
        }
        FusedAct::SoftmaxFeatures => L::enter(RowSoftmax { pieces, x, y, e, far_only, lanes }),
        FusedAct::SoftmaxSequence if short && form == Form::Near => {
            L::enter(NearColumnSoftmax { x, columns, y, lanes });
        }
        FusedAct::SoftmaxSequence => {
            L::enter(ColumnSoftmax { pieces, x, columns, y, short, lanes });
        }
    }
    short
}

/// An elementwise activation that has short forms.
pub(super) trait Short {
    fn value<L: Math, const NEAR: bool>(x: L) -> L;
    fn slope<L: Math, const NEAR: bool>(x: L) -> L;
}

pub(super) struct Sigmoid;
pub(super) struct Silu;

impl Short for Sigmoid {
    #[inline(always)]
    fn value<L: Math, const NEAR: bool>(x: L) -> L {
        x.sigmoid_for_store::<NEAR>()
    }
    #[inline(always)]
    fn slope<L: Math, const NEAR: bool>(x: L) -> L {
        x.sigmoid_and_slope_for_store::<NEAR>().1
    }
}

impl Short for Silu {
    #[inline(always)]
    fn value<L: Math, const NEAR: bool>(x: L) -> L {
        x.silu_for_store::<NEAR>()
    }
    #[inline(always)]
    fn slope<L: Math, const NEAR: bool>(x: L) -> L {
        x.silu_and_slope_for_store::<NEAR>().1
    }
}

/// Elements whose rounding on the way out is that of approximate results; see
/// [`Memory::nearest`].
pub(super) struct Rounded<T>(PhantomData<T>);

impl<L: Memory<T>, T: Element<Real = L::Real>> Access<L> for Rounded<T> {
    const REGISTERS: bool = false;
    type Number = T;
    #[inline(always)]
    fn read(run: &[T], i: usize) -> L {
        L::read(run, i, Real::of(0.0))
    }
    #[inline(always)]
    fn write(block: L, run: &mut [T], i: usize, stream: bool) {
        block.nearest().write_exact(run, i, stream);
    }
    #[inline(always)]
    fn write_blocks<const K: usize>(blocks: [L; K], run: &mut [T], i: usize, stream: bool) {
        write_nearest::<L, T, K>(blocks, run, i, stream);
    }
}

/// Writes the blocks from `i` on of a row, which has to hold them, rounded as approximate results are.
#[inline(always)]
pub(super) fn write_nearest<L, T, const K: usize>(
    blocks: [L; K],
    row: &mut [T],
    i: usize,
    stream: bool,
) where
    T: Element<Real = L::Real>,
    L: Memory<T>,
{
    // A loop, as a closure would not be inlined.
    let mut packed = [blocks[0].nearest().pack_exact(); K];
    for k in 1..K {
        packed[k] = blocks[k].nearest().pack_exact();
    }
    L::write_packed(packed, row, i, stream);
}

/// Elements that go through the short form of an activation on the way in.
pub(super) struct Through<T, G, const NEAR: bool>(PhantomData<(T, G)>);

impl<L, T, G, const NEAR: bool> Access<L> for Through<T, G, NEAR>
where
    T: Element<Real = L::Real>,
    G: Short,
    L: Math + Memory<T>,
{
    const REGISTERS: bool = false;
    type Number = T;
    #[inline(always)]
    fn read(run: &[T], i: usize) -> L {
        G::value::<L, NEAR>(L::read(run, i, Real::of(0.0)))
    }
    #[inline(always)]
    fn write(block: L, run: &mut [T], i: usize, stream: bool) {
        block.nearest().write_exact(run, i, stream);
    }
    #[inline(always)]
    fn write_blocks<const K: usize>(blocks: [L; K], run: &mut [T], i: usize, stream: bool) {
        write_nearest::<L, T, K>(blocks, run, i, stream);
    }
    #[inline(always)]
    fn note(run: &[T], i: usize, so_far: L) -> L {
        if NEAR { <L as Memory<T>>::note(run, i, so_far) } else { so_far }
    }
}

/// `o = encode(act(x))` for a patch, with the short form of the activation.
#[inline(always)]
pub(super) fn through<E, L, T, G>(
    encoding: E,
    pieces: &Pieces,
    tables: &[Grid<'_, L::Real>; 2],
    x: &Grid<'_, T>,
    mut o: GridMut<'_, T>,
    stream: bool,
) where
    E: Encoding,
    T: Element<Real = L::Real>,
    G: Short,
    L: Math + Memory<T>,
{
    type Activated<'p, 'o, E, L, T, G, const NEAR: bool> =
        Encode<'p, 'o, E, L, Through<T, G, NEAR>, Rounded<T>, false>;
    let near = o.reborrow();
    let noted =
        L::enter(Activated::<_, L, T, G, true> { encoding, pieces, tables, x, o: near, stream });
    // Once more, if some arguments are beyond the short form. That is rare, and to look at all of them
    // first took 4 % longer.
    if L::is_far(noted, SHORT_LIMIT) {
        L::enter(Activated::<_, L, T, G, false> { encoding, pieces, tables, x, o, stream });
    }
}

/// [`Memory::note`] for a row.
#[inline(always)]
pub(super) fn note_row<L, T>(row: &[T], mut noted: L) -> L
where
    T: Element<Real = L::Real>,
    L: Lanes + Memory<T>,
{
    let (blocks, rest) = row.as_chunks::<MAX_LANES>();
    for block in blocks {
        noted = L::note(block, 0, noted);
    }
    if rest.is_empty() { noted } else { L::note(rest, 0, noted) }
}

/// An elementwise activation of a patch.
struct Values<'p, 'y, L, T: Element> {
    act: Act,
    pieces: &'p Pieces,
    x: Grid<'p, T>,
    y: GridMut<'y, T::Real>,
    lanes: PhantomData<L>,
}

impl<L, T> Task for Values<'_, '_, L, T>
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
                let (x, y) = (self.x.row(i, j), self.y.row(i, j));
                for piece in self.pieces.iter() {
                    let (act, x) = (self.act, piece.of_row(x));
                    specialized!(act => for k in (0..x.len()).step_by(L::N) {
                        act.value(L::read(x, k, Real::of(0.0))).set(y, piece.at + k);
                    });
                }
            }
        }
    }
}

/// The softmax of each row of a patch.
struct RowSoftmax<'p, 'y, L, T: Element> {
    pieces: &'p Pieces,
    x: Grid<'p, T>,
    y: GridMut<'y, T::Real>,
    e: &'y mut [T::Real],
    /// Whether only rows with elements that are not near 0 are wanted.
    far_only: bool,
    lanes: PhantomData<L>,
}

impl<L, T> Task for RowSoftmax<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.x.rows();
        for i in 0..tokens {
            for j in 0..heads {
                self.x.prefetch_next::<L>(i, j);
                let (x, y) = (self.x.row(i, j), self.y.row(i, j));
                if self.far_only && is_near_row::<L, T>(x) {
                    continue;
                }
                let inverse = L::splat(softmax::exp_row::<L, T>(x, self.e));
                let blocks = x.len().next_multiple_of(L::N);
                let from = self.e[..blocks].chunks_exact(L::N);
                if self.pieces.count == 1 {
                    for (e, y) in from.zip(y[..blocks].chunks_exact_mut(L::N)) {
                        L::get(e, 0).mul(inverse).set(y, 0);
                    }
                    continue;
                }
                // The blocks of the pieces are other ones than those of the row.
                for i in (0..blocks).step_by(L::N) {
                    let e = L::get(self.e, i).mul(inverse);
                    e.write(self.e, i, false);
                }
                self.pieces.gather::<L>(self.e, y);
            }
        }
    }
}

/// Whether a row's softmax needs no maximum.
#[inline(always)]
pub(super) fn is_near_row<L, T>(x: &[T]) -> bool
where
    T: Element<Real = L::Real>,
    L: Lanes + Memory<T>,
{
    !L::is_far(note_row::<L, T>(x, L::splat(Real::of(0.0))), NEAR)
}

/// The softmax of each row of a patch, by the short form and without a maximum. Tells whether some
/// rows have elements that are not near 0, and are to be done again.
struct NearRowSoftmax<'p, 'y, L, T: Element> {
    x: Grid<'p, T>,
    y: GridMut<'y, T::Real>,
    /// Room for a block for each row.
    sums: &'y mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T> Task for NearRowSoftmax<'_, '_, L, T>
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
                let mut sum = zero;
                for (x, y) in self.x.blocks(i, j).iter().zip(self.y.blocks(i, j)) {
                    self.x.prefetch_block::<L>(x);
                    let e = L::read_whole(x, 0).exp_for_store::<true>();
                    noted = L::note(x, 0, noted);
                    e.set(y, 0);
                    sum = sum.add(e);
                }
                sum.set(self.sums, (i * heads + j) * L::N);
            }
        }
        // Apart, so that no row waits for its own sum.
        for i in 0..tokens {
            for j in 0..heads {
                let sum = L::get(self.sums, (i * heads + j) * L::N).reduce_add();
                let inverse = L::splat(Real::of(1.0 / sum.to_f64()));
                for y in self.y.blocks(i, j) {
                    L::get(y, 0).mul(inverse).set(y, 0);
                }
            }
        }
        L::is_far(noted, NEAR)
    }
}

/// A softmax over the sequence by the short form, from the reciprocal sums of the columns, all of
/// which are near 0.
struct NearColumnSoftmax<'p, 'y, L, T: Element> {
    x: Grid<'p, T>,
    columns: &'p [T::Real],
    y: GridMut<'y, T::Real>,
    lanes: PhantomData<L>,
}

impl<L, T> Task for NearColumnSoftmax<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.x.rows();
        let d = self.x.len();
        for i in 0..tokens {
            for j in 0..heads {
                let inverse = &self.columns[(2 * j + 1) * d..][..d];
                let (x, y) = (self.x.blocks(i, j), self.y.blocks(i, j));
                let blocks = x.iter().zip(inverse.as_chunks::<MAX_LANES>().0).zip(y);
                for ((x, inverse), y) in blocks {
                    self.x.prefetch_block::<L>(x);
                    let e = L::read_whole(x, 0).exp_for_store::<true>();
                    e.mul(L::get(inverse, 0)).set(y, 0);
                }
            }
        }
    }
}

/// A softmax over the sequence, from the maxima and reciprocal sums of the columns.
struct ColumnSoftmax<'p, 'y, L, T: Element> {
    pieces: &'p Pieces,
    x: Grid<'p, T>,
    columns: &'p [T::Real],
    y: GridMut<'y, T::Real>,
    short: bool,
    lanes: PhantomData<L>,
}

impl<L, T> Task for ColumnSoftmax<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.x.rows();
        let width = self.pieces.width;
        for i in 0..tokens {
            for j in 0..heads {
                self.x.prefetch_next::<L>(i, j);
                let (x, y) = (self.x.row(i, j), self.y.row(i, j));
                let (max, inverse) = self.columns[2 * width * j..][..2 * width].split_at(width);
                for piece in self.pieces.iter() {
                    let x = piece.of_row(x);
                    for i in (0..x.len()).step_by(L::N) {
                        let at = piece.at + i;
                        let max: L = L::get(max, at);
                        let x = L::read(x, i, Real::of(0.0)).sub(max);
                        let mut e = x.exp();
                        if self.short {
                            // As the sums are: exact for columns that are not near.
                            let far = L::splat(Real::of(0.0)).lt(max.abs());
                            e = L::select(far, e, x.exp_for_store::<false>());
                        }
                        e.mul(L::get(inverse, at)).set(y, at);
                    }
                }
            }
        }
    }
}
