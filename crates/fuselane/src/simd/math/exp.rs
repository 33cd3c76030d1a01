//! The exponential.

use super::{LN2_HIGH, LN2_LOW, LOG2_E, ROUND_MAGIC, Simd, V, polynomial};

/// e^-u in pieces: (1 + r q) * scale, where e^-r = 1 + r q.
pub(super) struct Power<S: Simd> {
    pub(super) r: V<S>,
    pub(super) q: V<S>,
    /// 2^(n + shift).
    pub(super) scale: V<S>,
}

impl<S: Simd> Power<S> {
    /// e^-u * 2^`shift` for u whose n + shift stays within -126..=127.
    #[inline(always)]
    pub(super) fn minus(u: V<S>, shift: f32) -> Self {
        let (n, scale) = Self::halvings(u, shift);
        let r = n.mul_add(V::splat(LN2_LOW), n.mul_add(V::splat(LN2_HIGH), u));
        Self::reduced(r, scale)
    }

    /// As [`Power::minus`], for an argument `u + low` with |low| below an ulp or so of u. At
    /// u = 100 the rounding of u alone would be worth 60 ulp of the result.
    #[inline(always)]
    pub(super) fn minus_pair(u: V<S>, low: V<S>, shift: f32) -> Self {
        let (n, scale) = Self::halvings(u, shift);
        let r = n.mul_add(V::splat(LN2_HIGH), u) + n.mul_add(V::splat(LN2_LOW), low);
        Self::reduced(r, scale)
    }

    /// n, and 2^(n + shift).
    #[inline(always)]
    pub(super) fn halvings(u: V<S>, shift: f32) -> (V<S>, V<S>) {
        let magic = V::splat(ROUND_MAGIC + 127.0 + shift);
        let rounded = u.neg_mul_add(V::splat(LOG2_E), magic);
        (rounded - magic, V(S::exp2_of_magic(rounded.0)))
    }

    /// Fitted for the relative error of r q = e^-r - 1 on ±0.347, which is 2^-26.1; that of
    /// 1 + r q is 2^-27.6.
    #[inline(always)]
    fn reduced(r: V<S>, scale: V<S>) -> Self {
        let q = polynomial(
            r,
            [0.001_387_073_2, -0.008_366_277, 0.041_667_435, -0.166_665_46, 0.499_999_97, -1.0],
        );
        Self { r, q, scale }
    }

    /// 1 + r q, between 0.7 and 1.42.
    #[inline(always)]
    fn fraction(&self) -> V<S> {
        self.q.mul_add(self.r, V::splat(1.0))
    }

    #[inline(always)]
    pub(super) fn value(&self) -> V<S> {
        self.fraction() * self.scale
    }

    #[inline(always)]
    pub(super) fn value_plus(&self, term: f32) -> V<S> {
        self.fraction().mul_add(self.scale, V::splat(term))
    }
}

impl<S: Simd> V<S> {
    /// e^x, within 2 ulp (2.3 without fused multiply-add).
    ///
    /// Reduced by multiples of 2 ln 2, so that the power of two is a square: both its factors are
    /// the same normal number, and the second product is where overflow and denormal results
    /// happen. That costs one degree more, and spares building a second power. The polynomial was
    /// fitted on ±0.694; its relative error is 2^-26.
    #[inline(always)]
    pub(crate) fn exp(self) -> Self {
        let x = self.clamp(-104.0, 89.0);
        let magic = V::splat(ROUND_MAGIC + 127.0);
        let rounded = x.mul_add(V::splat(0.5 * LOG2_E), magic);
        let n = rounded - magic;
        let r = n.neg_mul_add(V::splat(2.0 * LN2_HIGH), x);
        let r = n.neg_mul_add(V::splat(2.0 * LN2_LOW), r);
        let fraction = polynomial(
            r,
            [
                0.000_196_305_7,
                0.001_410_553_2,
                0.008_335_964,
                0.041_661_195,
                0.166_666_16,
                0.500_000_36,
                1.0,
                1.0,
            ],
        );
        let root = V(S::exp2_of_magic(rounded.0));
        fraction * root * root
    }
}
