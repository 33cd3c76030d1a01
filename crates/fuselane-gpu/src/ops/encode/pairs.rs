//! Pairs of features: where they lie in memory, and how they are rotated.

use cubecl::prelude::*;

use super::activation::Activation;
use crate::kernel::angles::{AngleSource, Rotation};
use crate::kernel::storage::{Format, Operand, RowLayout, store};

/// How the features of a vector of angles lie in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum PairLayout {
    /// k and k + `second`.
    Split,
    /// 2k and 2k + 1.
    Interleaved,
    /// One feature for each angle.
    Single,
}

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    /// How x and dx lie.
    pub(super) pairs: PairLayout,
    pub(super) act: Activation,
    /// Whether heads, not tokens, are neighbours in memory.
    pub(super) heads_inside: bool,
    /// Whether results are stored in 16 bits.
    pub(super) short: bool,
    /// Whether the device's own exponential serves a softmax. Of bf16 it does not: that has results
    /// as small as f32, which a device may round to 0.
    pub(super) short_exp: bool,
}

impl Form {
    /// How o and its gradient lie: those of `cosine` are split, those of `rotate` lie as x does.
    fn output(self) -> PairLayout {
        if self.pairs == PairLayout::Single { PairLayout::Split } else { self.pairs }
    }

    pub(super) fn is_rotate(self) -> bool {
        self.pairs != PairLayout::Single
    }
}

/// The sizes of a launch, in vectors where features are meant, and its form.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Problem {
    pub(super) batch: usize,
    /// Entries of the batch that a unit walks over.
    pub(super) chunk: usize,
    pub(super) tokens: usize,
    pub(super) heads: usize,
    /// Vectors of pairs of a token and head, and those of them that rotate, which come first.
    pub(super) vectors: usize,
    pub(super) rotated: usize,
    /// Vectors of a row of x.
    pub(super) features: usize,
    /// The distance of the two features of a pair, and of the cosines and the sines.
    pub(super) second: usize,
    #[cube(comptime)]
    pub(super) form: Form,
}

/// The features of a vector of angles.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Pairs<N: Size> {
    pub(super) a: Vector<f32, N>,
    pub(super) b: Vector<f32, N>,
}

/// What a backward reads.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Inputs<E: Numeric, P: Size> {
    pub(super) x: Operand<E, P>,
    pub(super) grad: Operand<E, P>,
}

/// Which vector of pairs a unit has.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Index {
    pub(super) token: usize,
    pub(super) head: usize,
    pub(super) vector: usize,
    /// Whether the vector rotates. Where a kernel has asked before, this is a constant, and what a
    /// vector of the other kind needs takes no registers.
    pub(super) rotates: bool,
}

/// Entries of the batch: from `first` to before `end`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Entries {
    pub(super) first: usize,
    pub(super) end: usize,
}

#[cube]
impl Index {
    /// The same index, where it is known whether it rotates.
    pub(super) fn known(&self, #[comptime] rotates: bool) -> Index {
        let rotates = rotates.runtime();
        Index { token: self.token, head: self.head, vector: self.vector, rotates }
    }

    /// Where its row begins.
    pub(super) fn row_start(&self, layout: &RowLayout, batch: usize) -> usize {
        layout.offset
            + batch * *layout.strides.index(0usize)
            + self.token * *layout.strides.index(1usize)
            + self.head * *layout.strides.index(2usize)
    }
}

#[cube]
impl Problem {
    /// The index of a vector of row number `row`, of rows counted over chunks of the batch, too.
    pub(super) fn index(&self, row: usize, vector: usize) -> Index {
        let row = row % (self.tokens * self.heads);
        let rotates = vector < self.rotated;
        if comptime!(self.form.heads_inside) {
            Index { token: row / self.heads, head: row % self.heads, vector, rotates }
        } else {
            Index { token: row % self.tokens, head: row / self.tokens, vector, rotates }
        }
    }

    /// Another vector of the same token and head.
    pub(super) fn with_vector(&self, index: &Index, vector: usize) -> Index {
        let rotates = vector < self.rotated;
        Index { token: index.token, head: index.head, vector, rotates }
    }

    /// The rows of all chunks of the batch.
    pub(super) fn rows(&self) -> usize {
        let chunks = (self.batch + self.chunk - 1usize) / self.chunk;
        chunks * self.tokens * self.heads
    }

    /// The entries of the batch that go with row number `row`.
    pub(super) fn entries(&self, row: usize) -> Entries {
        let first = row / (self.tokens * self.heads) * self.chunk;
        Entries { first, end: self.batch.min(first + self.chunk) }
    }

    /// Number of (batch, token, head).
    pub(super) fn row_number(&self, batch: usize, index: &Index) -> usize {
        (batch * self.tokens + index.token) * self.heads + index.head
    }

    /// Where features lie that pass through.
    pub(super) fn pass_through(&self, vector: usize) -> usize {
        match comptime!(self.form.pairs) {
            PairLayout::Split => {
                // Between the first and the second features of the pairs, and behind them.
                select(vector < self.second, vector, vector + self.rotated)
            }
            PairLayout::Interleaved => vector + self.rotated,
            PairLayout::Single => vector,
        }
    }

    /// Pairs of x, from the row that begins at `start`.
    pub(super) fn load_x<E: Numeric, P: Size, N: Size>(
        &self,
        x: &Operand<E, P>,
        start: usize,
        index: &Index,
    ) -> Pairs<N> {
        self.load::<E, P, N>(x, start, index, self.form.pairs)
    }

    /// Pairs of the gradient of o.
    pub(super) fn load_grad<E: Numeric, P: Size, N: Size>(
        &self,
        grad: &Operand<E, P>,
        start: usize,
        index: &Index,
    ) -> Pairs<N> {
        self.load::<E, P, N>(grad, start, index, comptime!(self.form.output()))
    }

    fn load<E: Numeric, P: Size, N: Size>(
        &self,
        operand: &Operand<E, P>,
        start: usize,
        index: &Index,
        #[comptime] layout: PairLayout,
    ) -> Pairs<N> {
        let vector = index.vector;
        let mut a = Vector::<f32, N>::new(0.0f32);
        let mut b = Vector::<f32, N>::new(0.0f32);
        if index.rotates {
            match comptime!(layout) {
                PairLayout::Split => {
                    a = operand.load::<N>(start + vector);
                    b = operand.load::<N>(start + self.second + vector);
                }
                PairLayout::Interleaved => {
                    let first = operand.load::<N>(start + 2usize * vector);
                    let second = operand.load::<N>(start + 2usize * vector + 1usize);
                    #[unroll]
                    for i in 0..N::value() {
                        a.insert(i, of_two::<N>(first, second, comptime!(2 * i)));
                        b.insert(i, of_two::<N>(first, second, comptime!(2 * i + 1)));
                    }
                }
                PairLayout::Single => a = operand.load::<N>(start + vector),
            }
        } else {
            a = operand.load::<N>(start + self.pass_through(vector));
        }
        Pairs::<N> { a, b }
    }

    /// Writes pairs of o.
    pub(super) fn store_o<E: Numeric, P: Size, N: Size>(
        &self,
        o: &mut Operand<E, P>,
        start: usize,
        index: &Index,
        pairs: &Pairs<N>,
    ) {
        let layout = comptime!(self.form.output());
        self.store::<E, P, N>(&mut o.buffer, start, index, pairs, layout, o.format);
    }

    /// Writes pairs of dx.
    pub(super) fn store_dx<E: Numeric, P: Size, N: Size>(
        &self,
        dx: &mut Operand<E, P>,
        start: usize,
        index: &Index,
        pairs: &Pairs<N>,
    ) {
        self.store::<E, P, N>(&mut dx.buffer, start, index, pairs, self.form.pairs, dx.format);
    }

    pub(super) fn store<E: Numeric, P: Size, N: Size>(
        &self,
        buffer: &mut [Vector<E, P>],
        start: usize,
        index: &Index,
        pairs: &Pairs<N>,
        #[comptime] layout: PairLayout,
        #[comptime] format: Format,
    ) {
        let vector = index.vector;
        if index.rotates {
            match comptime!(layout) {
                PairLayout::Split => {
                    store::<E, P, N>(buffer, start + vector, pairs.a, format);
                    store::<E, P, N>(buffer, start + self.second + vector, pairs.b, format);
                }
                PairLayout::Interleaved => {
                    let mut first = Vector::<f32, N>::new(0.0f32);
                    let mut second = Vector::<f32, N>::new(0.0f32);
                    let n = N::value();
                    #[unroll]
                    for i in 0..n {
                        first.insert(i, of_pairs::<N>(pairs, i));
                        second.insert(i, of_pairs::<N>(pairs, comptime!(n + i)));
                    }
                    store::<E, P, N>(buffer, start + 2usize * vector, first, format);
                    store::<E, P, N>(buffer, start + 2usize * vector + 1usize, second, format);
                }
                PairLayout::Single => store::<E, P, N>(buffer, start + vector, pairs.a, format),
            }
        } else {
            store::<E, P, N>(buffer, start + self.pass_through(vector), pairs.a, format);
        }
    }

    /// o of the activated x. Features that pass through have no second ones, and stay as they are.
    pub(super) fn encoded<N: Size>(&self, y: &Pairs<N>, rotation: &Rotation<N>) -> Pairs<N> {
        let (cos, sin) = (rotation.cos, rotation.sin);
        if comptime!(self.form.is_rotate()) {
            Pairs::<N> { a: y.a * cos - y.b * sin, b: y.a * sin + y.b * cos }
        } else {
            Pairs::<N> { a: y.a * cos, b: y.a * sin }
        }
    }

    /// The gradient of the activated x, from that of o.
    pub(super) fn decoded<N: Size>(&self, grad: &Pairs<N>, rotation: &Rotation<N>) -> Pairs<N> {
        let (cos, sin) = (rotation.cos, rotation.sin);
        if comptime!(self.form.is_rotate()) {
            Pairs::<N> { a: grad.a * cos + grad.b * sin, b: grad.b * cos - grad.a * sin }
        } else {
            Pairs::<N> { a: grad.a * cos + grad.b * sin, b: Vector::<f32, N>::new(0.0f32) }
        }
    }
}

/// Number `i` of two vectors in a row.
#[cube]
fn of_two<N: Size>(first: Vector<f32, N>, second: Vector<f32, N>, #[comptime] i: usize) -> f32 {
    let n = N::value();
    if comptime!(i < n) { first.extract(i) } else { second.extract(comptime!(i - n)) }
}

/// Number `i` of pairs that lie one after the other.
#[cube]
fn of_pairs<N: Size>(pairs: &Pairs<N>, #[comptime] i: usize) -> f32 {
    if comptime!(i % 2 == 0) {
        pairs.a.extract(comptime!(i / 2))
    } else {
        pairs.b.extract(comptime!(i / 2))
    }
}

/// Cosines and sines at an index; where features pass through, 1 and 0.
#[cube]
pub(super) fn rotation_at<N: Size>(
    angles: &AngleSource,
    batch: usize,
    index: &Index,
) -> Rotation<N> {
    let mut cos = Vector::<f32, N>::new(1.0f32);
    let mut sin = Vector::<f32, N>::new(0.0f32);
    if index.rotates {
        let rotation = angles.rotation::<N>(batch, index.token, index.head, index.vector);
        cos = rotation.cos;
        sin = rotation.sin;
    }
    Rotation::<N> { cos, sin }
}

/// Makes a rotation anew, where coordinates differ from entry to entry.
#[cube]
pub(super) fn rotate_entry<N: Size>(
    rotation: &mut Rotation<N>,
    angles: &AngleSource,
    batch: usize,
    index: &Index,
) {
    if comptime!(angles.form.is_per_batch()) {
        let of_entry = rotation_at::<N>(angles, batch, index);
        rotation.cos = of_entry.cos;
        rotation.sin = of_entry.sin;
    }
}
