//! The loops of `rotate` and `cosine`: an activation, then an encoding by the token's angles.
//!
//! An [`Encoding`] cuts a row of features into [`Segments`], and says by a [`Formula`] what becomes of
//! a block of each. [`Loops::encode`] applies it to the rows of a tile, from an [`Input`] to an
//! [`Output`]: a tensor's elements, through an activation or not, or scratch. [`walk`] takes tile after
//! tile, so that the sines and cosines of a token ([`tables`]), a few kilobytes, are made once and stay
//! in the first-level cache for the whole batch. Where tokens and not heads are neighbours in memory
//! (b h n d), a tile of tokens of one head takes the place of all heads of one token.

mod activation;
mod backward;
mod columns;
mod cosine;
mod forward;
mod operands;
mod rotate;
mod segments;
mod tables;
mod walk;

pub(crate) use backward::{Backward, Dots};
pub(crate) use columns::{ColumnStatistics, Columns};
pub(crate) use cosine::Waves;
pub(crate) use forward::Forward;
pub(crate) use operands::{Cut, Input, Output, OutputSegment};
pub(crate) use rotate::Rotation;
pub(crate) use segments::Segments;
pub(crate) use tables::SinCos;
pub(crate) use walk::Walk;

use super::lanes::Lane;
use super::sweep::{At, sweep_by};
use super::tile::zip_rows;
use crate::ops::act::Act;
use crate::ops::angles::{Angles, Placement};
use crate::ops::encode::FusedAct;
use crate::plan::{self, Pairs};
use crate::simd::{Simd, V};
use segments::padded;
use tables::{AnglePlan, TableRows};

/// How rows are encoded by the cosines and sines of their angles.
pub(crate) trait Encoding: Copy + Sync {
    /// The name of the operator, for errors.
    const OPERATOR: &'static str;
    /// Output features for each feature of x.
    const OUTPUTS: usize;

    /// Angles for each token and head.
    fn angles(&self) -> usize;

    /// Which features turn, where pairs do.
    fn pairs(&self) -> Option<Pairs>;

    /// How a row of x is cut, and one of o.
    fn segments(&self) -> [Segments; 2];

    /// Entries for each angle in the tables, and in the sums of `angle_gradients`.
    fn angle_step(&self) -> usize;

    /// `o = encode(x)` for the rows of a tile.
    fn forward<S: Simd, X: Input<S>, O: Output<S>>(&self, loops: Loops<'_>, x: X, o: O);

    /// `dx' = encode^T(grad)` for the rows of a tile.
    fn backward<S: Simd, X: Input<S>, O: Output<S>>(&self, loops: Loops<'_>, grad: X, dx: O);

    /// Adds the gradients of the angles of one row to `sums`, from x' and dx', which lie in scratch.
    fn angle_gradients<S: Simd>(
        &self,
        y_and_g: [&[Lane]; 2],
        grad: &[S::Elem],
        angles: Angle<'_>,
        sums: &mut [Lane],
    );
}

/// The cosines and sines of a row.
#[derive(Clone, Copy)]
pub(crate) struct Angle<'t> {
    cos: &'t [Lane],
    sin: &'t [Lane],
}

impl Angle<'_> {
    /// Those of the block at `at`.
    #[inline(always)]
    fn at<S: Simd>(self, at: At) -> (V<S>, V<S>) {
        (V::at(self.cos, at), V::at(self.sin, at))
    }
}

/// What becomes of a block of each of `I` segments: a block of each of `O` segments.
pub(crate) trait Formula<const I: usize, const O: usize>: Copy {
    /// Whether it looks at the angle; where not, there are few features mostly, and loops take no steps.
    const TABLES: bool = true;
    fn apply<S: Simd>(self, x: [V<S>; I], angle: Angle<'_>, at: At) -> [V<S>; O];
}

/// Features that pass through.
#[derive(Clone, Copy)]
struct Pass;

impl Formula<1, 1> for Pass {
    const TABLES: bool = false;
    #[inline(always)]
    fn apply<S: Simd>(self, x: [V<S>; 1], _: Angle<'_>, _: At) -> [V<S>; 1] {
        x
    }
}

/// The loops over the rows of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Loops<'t> {
    /// Tokens and heads.
    rows: [usize; 2],
    /// Batch entries, whose rows are interleaved.
    entries: usize,
    /// Cosines and sines.
    tables: TableRows<'t>,
}

impl<'t> Loops<'t> {
    /// The cosines and sines of a row.
    #[inline(always)]
    fn angle(&self, i: usize, j: usize) -> Angle<'t> {
        self.tables.row(i, j)
    }

    /// Applies a formula to segments of `len` features. `x` and `o` come with the segments' beginnings;
    /// `o` goes back, for others.
    #[inline(always)]
    fn encode<S, F, X, O, const I: usize, const K: usize>(
        self,
        formula: F,
        len: usize,
        (x, from): (X, [usize; I]),
        (mut o, to): (O, [usize; K]),
    ) -> O
    where
        S: Simd,
        F: Formula<I, K>,
        X: Input<S>,
        O: Output<S>,
    {
        const { assert!(1 <= I && I <= 2 && 1 <= K && K <= 2) };
        if len == 0 {
            return o;
        }
        S::call(
            #[inline(always)]
            move || {
                let Self { rows: [tokens, heads], entries, mut tables } = self;
                assert!(S::PIPELINE || entries == 1); // so that the compiler knows it
                let counts = [entries, tokens, heads];
                tables.width = if F::TABLES { padded(len) } else { 0 };
                let second = if K == 2 { Some(to[K - 1]) } else { None };
                let cut = Cut { len, first: to[0], second };
                let round = o.round();
                zip_rows(
                    counts,
                    (x.tile(), tables.rows, o.tile()),
                    #[inline(always)]
                    |row, angles, to| {
                        let a = &row[from[0]..][..X::numbers(len)];
                        let b = &row[from[I - 1]..][..X::numbers(len)];
                        let angle = tables.angle(angles);
                        let (mut c, mut d) = O::segments(to, cut, round);
                        sweep_by::<S>(
                            F::TABLES,
                            0..len,
                            #[inline(always)]
                            |at| {
                                let mut blocks = [x.load(a, at); I];
                                if I == 2 {
                                    blocks[I - 1] = x.load(b, at);
                                }
                                let blocks = formula.apply(blocks, angle, at);
                                c.put(at, blocks[0]);
                                if let Some(d) = &mut d {
                                    d.put(at, blocks[K - 1]);
                                }
                            },
                        );
                    },
                );
                o
            },
        )
    }
}

/// A checked call, as kernels need it.
pub(crate) struct Plan<'a> {
    pub(crate) act: FusedAct,
    pub(crate) angles: AnglePlan<'a>,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    /// How a row of x is cut, and one of o.
    pub(crate) segments: Segments,
    output_segments: Segments,
    /// How the rows of a tile's heads are cut that are joined into one, if they can be.
    joined_segments: Option<Segments>,
    /// Room for the sums of one head's angles.
    angle_sums: usize,
    /// Tokens and heads whose angles are held at once.
    tile: [usize; 2],
}

/// What a call asks for.
#[derive(Clone, Copy)]
pub(crate) struct Passes {
    pub(crate) backward: bool,
    pub(crate) dtheta: bool,
}

impl Passes {
    /// How many rows of scratch a row takes.
    fn scratch(self, act: FusedAct) -> usize {
        match (act, self.backward) {
            (_, true) if self.dtheta => 2,
            (FusedAct::Elementwise(act), backward) => usize::from(backward && act != Act::None),
            (_, backward) => 1 + usize::from(backward),
        }
    }
}

/// How many tokens are worked on with one set of angles, for one batch entry after the other, where
/// each takes `row_bytes` of x and `kept_bytes` of tables and scratch. The more there are, the better
/// memory streams, as each entry of the batch is another span of it; but what is kept has to stay in
/// the first-level cache, of which it may have half. Rows of x have as much, where little is kept.
///
/// Measured on a Zen 4 (32 KiB), of the copy, bf16, two threads, batch 12, 12 heads of 128 features. A
/// token of rotate keeps 6 KiB of tables, and one of cosine 1 KiB for the head at hand:
///
/// | tables, KiB | 6 | 8 | 12 | 16 | 18 | 24 | 32 |
/// |---|---|---|---|---|---|---|---|
/// | rotate, forward / backward | 0.87 / 0.84 | | 0.95 / 0.92 | | 0.98 / 0.96 | 0.94 / 0.91 | |
/// | cosine, forward / backward | | 0.75 / 0.84 | | 0.77 / 0.86 | | 0.76 / 0.82 | 0.76 / 0.79 |
///
/// With softmax over features, whose backward keeps 18 KiB for a token, one at a time is best: 28 GB/s
/// where two have 26 and three 24.
fn tile_tokens(row_bytes: usize, kept_bytes: usize) -> usize {
    let half = crate::machine::first_level_cache_bytes() / 2;
    (half / row_bytes.max(kept_bytes).max(1)).max(1)
}

impl<'a> Plan<'a> {
    /// The plan of a checked call that is not empty; `size` is that of an element, and `strides` are those
    /// of tokens and heads. Reads theta.
    pub(crate) fn new<E: Encoding>(
        encoding: E,
        act: FusedAct,
        (angles, placement): (Angles<'a>, Placement<'a>),
        checked: plan::Encoding,
        (size, [token_stride, head_stride]): (usize, [usize; 2]),
        passes: Passes,
    ) -> Self {
        let plan::Encoding { batch, tokens, heads, features, split, .. } = checked;
        let angles = AnglePlan::new(angles, placement, split, tokens);
        // Neighbours in memory are worked on together. Sums of dtheta are over tokens, then heads.
        let together = head_stride <= token_stride || heads == 1 || passes.dtheta;
        let tile_heads = if together { heads } else { 1 };
        let [segments, output_segments] = encoding.segments();
        let angle_sums = padded(split.count * encoding.angle_step());
        let table_heads = if angles.shared { 1 } else { tile_heads };
        let kept =
            2 * table_heads * angle_sums + passes.scratch(act) * tile_heads * segments.width();
        let tile =
            [tile_tokens(tile_heads * features * size, kept * size_of::<Lane>()), tile_heads];
        let joined_segments =
            segments.is_whole().then(|| Segments::new([tile_heads * segments.width(), 0, 0, 0]));
        Self {
            act,
            angles,
            batch,
            heads,
            segments,
            output_segments,
            joined_segments,
            angle_sums,
            tile,
        }
    }
}
