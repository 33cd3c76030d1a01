//! Sine and cosine.

use super::{ROUND_MAGIC, Simd, V, polynomial};
use crate::simd::LANES;

/// Where [`V::sin_cos`] stops reducing in f32. The split of π/2 that serves without fused
/// multiply-add has room for 15 bits of n.
const fn limit<S: Simd>() -> f32 {
    if S::FUSED { 1_048_576.0 } else { 32_768.0 }
}

/// Sine and cosine through f64, for arguments of any size.
#[cold]
#[inline(never)]
fn sin_cos_of_large(x: &mut [f32; LANES], cosines: &mut [f32; LANES]) {
    for (x, cosine) in x.iter_mut().zip(cosines) {
        let (s, c) = f64::from(*x).sin_cos();
        (*x, *cosine) = (s as f32, c as f32);
    }
}

impl<S: Simd> V<S> {
    /// Sine and cosine, within 1e-7 absolute for every finite argument; where |x| < 0.7, sine is
    /// within 0.7 ulp.
    ///
    /// The nearest multiple of π/2 is taken away, in two parts where a product and a
    /// difference round once together (the first such step is then exact), and otherwise in three,
    /// of which two are so short that their products are exact. Polynomials of degree 7 and 8
    /// follow, fitted on 0.001..=0.82, to relative errors of 2^-27.4 and 2^-32. Arguments beyond
    /// [`limit`] go through f64.
    #[inline(always)]
    pub(crate) fn sin_cos(self) -> (Self, Self) {
        let magic = V::splat(ROUND_MAGIC);
        let rounded = self.mul_add(V::splat(std::f32::consts::FRAC_2_PI), magic);
        let n = rounded - magic;
        let r = if S::FUSED {
            let r = n.neg_mul_add(V::splat(std::f32::consts::FRAC_PI_2), self);
            n.neg_mul_add(V::splat(-4.371_139e-8), r)
        } else {
            let r = n.neg_mul_add(V::splat(402.0 / 256.0), self);
            let r = n.neg_mul_add(V::splat(63.0 / 131_072.0), r);
            n.neg_mul_add(V::splat(3.174_939_4e-6), r)
        };
        let square = r * r;
        let sine = polynomial(square, [-0.000_194_841_46, 0.008_331_925, -0.166_666_51]);
        let sine = (r * square).mul_add(sine, r);
        let cosine = polynomial(square, [2.439_365e-5, -0.001_388_695_9, 0.041_666_638, -0.5, 1.0]);
        // A quarter turn swaps the two; half a turn changes the sign.
        let (swap, minus_sine) = S::low_bits_of_magic(rounded.0);
        let (_, minus_cosine) = S::low_bits_of_magic((rounded + V::splat(1.0)).0);
        let (sine, cosine) = (V::select(swap, cosine, sine), V::select(swap, sine, cosine));
        let sine = V::select(minus_sine, -sine, sine);
        let cosine = V::select(minus_cosine, -cosine, cosine);
        let large = V::splat(limit::<S>()).lt(self.abs());
        if !S::any(large) {
            return (sine, cosine);
        }
        let (mut sines, mut cosines) = ([0.0; LANES], [0.0; LANES]);
        // SAFETY: each array holds a block.
        let (large_sine, large_cosine) = unsafe {
            S::store_lanes(self.0, sines.as_mut_ptr());
            sin_cos_of_large(&mut sines, &mut cosines);
            (V(S::load_lanes(sines.as_ptr())), V(S::load_lanes(cosines.as_ptr())))
        };
        // Lane by lane, so that no result depends on its neighbours.
        (V::select(large, large_sine, sine), V::select(large, large_cosine, cosine))
    }
}
