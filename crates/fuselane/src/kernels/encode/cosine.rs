//! Features times cosines, and times sines.

use super::{Angle, Encoding, Formula, Input, Loops, Output, Segments};
use crate::kernels::lanes::Lane;
use crate::kernels::sweep::{At, sweep};
use crate::plan::Pairs;
use crate::simd::{Simd, V};

/// One angle for each feature.
#[derive(Clone, Copy)]
pub(crate) struct Waves {
    pub(crate) features: usize,
}

impl Formula<1, 2> for Waves {
    #[inline(always)]
    fn apply<S: Simd>(self, [x]: [V<S>; 1], angle: Angle<'_>, at: At) -> [V<S>; 2] {
        let (cos, sin) = angle.at(at);
        [x * cos, x * sin]
    }
}

impl Formula<2, 1> for Waves {
    #[inline(always)]
    fn apply<S: Simd>(self, [a, b]: [V<S>; 2], angle: Angle<'_>, at: At) -> [V<S>; 1] {
        let (cos, sin) = angle.at(at);
        [a.mul_add(cos, b * sin)]
    }
}

impl Encoding for Waves {
    const OPERATOR: &'static str = "cosine";
    const OUTPUTS: usize = 2;

    fn angles(&self) -> usize {
        self.features
    }

    fn pairs(&self) -> Option<Pairs> {
        None
    }

    fn segments(&self) -> [Segments; 2] {
        let d = self.features;
        [Segments::new([d, 0, 0, 0]), Segments::new([d, d, 0, 0])]
    }

    fn angle_step(&self) -> usize {
        1
    }

    fn forward<S: Simd, X: Input<S>, O: Output<S>>(&self, loops: Loops<'_>, x: X, o: O) {
        let ([first, ..], [cosines, sines, ..]) = (x.starts(), o.starts());
        loops.encode(*self, self.features, (x, [first]), (o, [cosines, sines]));
    }

    fn backward<S: Simd, X: Input<S>, O: Output<S>>(&self, loops: Loops<'_>, grad: X, dx: O) {
        let ([cosines, sines, ..], [first, ..]) = (grad.starts(), dx.starts());
        loops.encode(*self, self.features, (grad, [cosines, sines]), (dx, [first]));
    }

    #[inline(always)]
    fn angle_gradients<S: Simd>(
        &self,
        [y, _]: [&[Lane]; 2],
        grad: &[S::Elem],
        angles: Angle<'_>,
        sums: &mut [Lane],
    ) {
        let (g_cos, g_sin) = grad.split_at(self.features);
        sweep::<S>(
            self.features,
            #[inline(always)]
            |at| {
                let (cos, sin) = angles.at(at);
                let (g_cos, g_sin) = (V::<S>::load(g_cos, at), V::load(g_sin, at));
                let turn = g_cos.neg_mul_add(sin, g_sin * cos);
                V::at(y, at).mul_add(turn, V::at(sums, at)).set_at(sums, at);
            },
        );
    }
}
