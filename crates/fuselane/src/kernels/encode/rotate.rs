//! Rotations of pairs of features.

use super::{Angle, Encoding, Formula, Input, Loops, Output, Pass, Segments};
use crate::kernels::lanes::Lane;
use crate::kernels::sweep::{At, sweep};
use crate::plan::Pairs;
use crate::simd::{Simd, V};

/// Which features turn: pair k is (k, k + second), or (2k, 2k + 1) where `second` is `None`.
#[derive(Clone, Copy)]
pub(crate) struct Rotation {
    pub(crate) features: usize,
    pub(crate) pairs: usize,
    pub(crate) second: Option<usize>,
}

/// Pairs whose first and second features are in two segments, turned or turned back.
#[derive(Clone, Copy)]
struct Halves<const BACK: bool>;

impl<const BACK: bool> Formula<2, 2> for Halves<BACK> {
    #[inline(always)]
    fn apply<S: Simd>(self, [x1, x2]: [V<S>; 2], angle: Angle<'_>, at: At) -> [V<S>; 2] {
        let (cos, sin) = angle.at(at);
        if BACK {
            [x1.mul_add(cos, x2 * sin), x1.neg_mul_add(sin, x2 * cos)]
        } else {
            [x2.neg_mul_add(sin, x1 * cos), x1.mul_add(sin, x2 * cos)]
        }
    }
}

/// Pairs of neighbours: each cosine stands twice, and each sine once negated.
#[derive(Clone, Copy)]
struct Interleaved<const BACK: bool>;

impl<const BACK: bool> Formula<1, 1> for Interleaved<BACK> {
    #[inline(always)]
    fn apply<S: Simd>(self, [x]: [V<S>; 1], angle: Angle<'_>, at: At) -> [V<S>; 1] {
        let ((cos, sin), across) = (angle.at(at), x.swap_pairs());
        [if BACK { across.neg_mul_add(sin, x * cos) } else { across.mul_add(sin, x * cos) }]
    }
}

impl Rotation {
    /// Turns the rows of a tile by their angles, or back.
    fn turn<S: Simd, X: Input<S>, O: Output<S>, const BACK: bool>(
        &self,
        loops: Loops<'_>,
        x: X,
        o: O,
    ) {
        let [first, between, _, behind] = self.lengths();
        let ([x1, x_between, x2, x_behind], [o1, o_between, o2, o_behind]) =
            (x.starts(), o.starts());
        let mut o = if self.second.is_some() {
            loops.encode(Halves::<BACK>, first, (x, [x1, x2]), (o, [o1, o2]))
        } else {
            loops.encode(Interleaved::<BACK>, first, (x, [x1]), (o, [o1]))
        };
        for (len, from, to) in [(between, x_between, o_between), (behind, x_behind, o_behind)] {
            // (There are none mostly, and to hand `o` on takes time.)
            if len > 0 {
                o = loops.encode(Pass, len, (x, [from]), (o, [to]));
            }
        }
    }

    /// The features of each segment of a row. With halves these are the first ones of the pairs, the
    /// features in between, the second ones and the features behind; else the pairs and, last, the
    /// features behind.
    fn lengths(&self) -> [usize; 4] {
        let Self { features, pairs, second } = *self;
        match second {
            Some(second) => [pairs, second - pairs, pairs, features - second - pairs],
            None => [2 * pairs, 0, 0, features - 2 * pairs],
        }
    }
}

impl Encoding for Rotation {
    const OPERATOR: &'static str = "rotate";
    const OUTPUTS: usize = 1;

    fn angles(&self) -> usize {
        self.pairs
    }

    fn pairs(&self) -> Option<Pairs> {
        Some(Pairs { count: self.pairs, second: self.second })
    }

    fn segments(&self) -> [Segments; 2] {
        [Segments::new(self.lengths()); 2]
    }

    fn angle_step(&self) -> usize {
        if self.second.is_none() { 2 } else { 1 }
    }

    #[inline(always)]
    fn forward<S: Simd, X: Input<S>, O: Output<S>>(&self, loops: Loops<'_>, x: X, o: O) {
        self.turn::<S, X, O, false>(loops, x, o);
    }

    #[inline(always)]
    fn backward<S: Simd, X: Input<S>, O: Output<S>>(&self, loops: Loops<'_>, grad: X, dx: O) {
        self.turn::<S, X, O, true>(loops, grad, dx);
    }

    /// da = x'1 dx'2 - x'2 dx'1; for interleaved pairs at the even index, and negated at the odd one,
    /// which nobody reads.
    #[inline(always)]
    fn angle_gradients<S: Simd>(
        &self,
        [y, g]: [&[Lane]; 2],
        _grad: &[S::Elem],
        _angles: Angle<'_>,
        sums: &mut [Lane],
    ) {
        let [segments, _] = self.segments();
        let second = segments.scratch()[2];
        let ([y1, y2], [g1, g2]) = ([y, &y[second..]], [g, &g[second..]]);
        let interleaved = self.second.is_none();
        sweep::<S>(
            segments.features()[1],
            #[inline(always)]
            |at| {
                let (y1, g1) = (V::<S>::at(y1, at), V::at(g1, at));
                let turn = if interleaved {
                    let cross = y1 * g1.swap_pairs();
                    cross - cross.swap_pairs()
                } else {
                    V::at(y2, at).neg_mul_add(g1, y1 * V::at(g2, at))
                };
                (V::at(sums, at) + turn).set_at(sums, at);
            },
        );
    }
}
