//! The fast forms, for results that are stored in 16 bits at once.
//!
//! Of a bf16's eight bits, a relative error of 2^-10 spoils a few in a thousand, by one unit in the
//! last place; of an f16's eleven, one of 2^-13.5 does. (The tests run all 65,536 inputs.) They need
//! about half the instructions of the exact ones.
//!
//! e^-u is 2^m 2^f, where m + f is -u / ln 2. m stands in the low bits of `rounded`, as in
//! [`Power`](super::exp::Power), and f comes out times a constant, in steps of which none waits for
//! an integer:
//!
//! ```text
//! rounded = M - u log2(e)
//! g       = (K - c rounded) - u c log2(e)       K = c M, so that g = c f
//! ```
//!
//! **For bf16**, M = 1.5 * 2^20 leaves three bits of m behind the point; 2^m comes from a table of
//! eight and a shift; K is larger by 1, and as |f| is at most 1/16, g = 1 + c f with c near ln 2 is
//! all that is needed of 2^f: 4.7e-4.
//!
//! **For f16**, m is an integer, and 2^f = (g² + h) g + b, where c is the third root of the cubic's
//! highest coefficient, which saves that multiplication: 8.1e-5. M has a half bit of slack: m is
//! rounded down by about a half, so that g is positive throughout.
//!
//! The constants of each (and the table) were searched together, so that K is a number of f32 and
//! the largest relative error is least.
//!
//! **Every argument is served**, by clamps and by the shift of 2^-64 that the exact forms have too:
//! [`MINUS_105`] is so far out that sigmoid, which is 2^-64 times a normal number there, rounds to
//! zero, and at [`PLUS_42`] it is 1. In between, the factors are powers of two away from what they
//! would be without the shift, so it changes no bit of a result.

use super::{DOWN, LOG2_E, Simd, UP, V};

/// M, c, c log2(e) and K.
struct Reduction {
    magic: f32,
    c: f32,
    c_log2_e: f32,
    k: f32,
}

/// Where sigmoid rounds to zero in f32, with a margin for the error of the fast forms.
const MINUS_105: f32 = -105.0;
/// Where 1 + e^-x is 1, and the exponent of 2^-64 e^-x is still positive.
const PLUS_42: f32 = 42.0;

/// 2^m of eighths, times what makes up for 1 + c f.
const EIGHTHS: [u32; 8] = [
    0x3F80_0F5E,
    0x3F7B_A684,
    0x3F78_4A36,
    0x3F76_12C4,
    0x3F75_1AAE,
    0x3F75_7EDD,
    0x3F77_5ED5,
    0x3F7A_DCF6,
];

/// [`EIGHTHS`] times 2^shift.
const fn eighths(shift: i32) -> [u32; 8] {
    let (mut table, mut i) = (EIGHTHS, 0);
    while i < 8 {
        table[i] = table[i].wrapping_add_signed(shift << 23);
        i += 1;
    }
    table
}

static EIGHTHS_PLAIN: [u32; 8] = EIGHTHS;
static EIGHTHS_DOWN: [u32; 8] = eighths(-64);
static EIGHTHS_UP: [u32; 8] = eighths(64);

/// A power of e, as fraction * scale.
struct Power<S: Simd> {
    fraction: V<S>,
    scale: V<S>,
}

impl<S: Simd> Power<S> {
    const BY_TABLE: bool = S::RESULT_BITS <= 8;
    const BY: Reduction = if Self::BY_TABLE {
        Reduction { magic: 1_572_864.0, c: 0.692_713_74, c_log2_e: 0.999_374_7, k: 1_089_545.5 }
    } else {
        Reduction { magic: 8_846_975.0, c: 0.380_690_46, c_log2_e: 0.549_220_2, k: 3_367_959.5 }
    };

    /// 2^-64 e^-u for u within -127..=43.
    #[inline(always)]
    fn minus_shifted(u: V<S>) -> Self {
        Self::minus_shifted_near(u, u)
    }

    /// As [`Power::minus_shifted`]; for u below -105, it is some number of at least 2^86, or infinity,
    /// of which sigmoid is zero.
    #[inline(always)]
    fn minus_shifted_or_large(u: V<S>) -> Self {
        let bounded = V::splat(MINUS_105).max(u);
        // One that is linear in f only grows further where m has reached its bound. That spares copies
        // of registers, as u stays while its bounded self is used up.
        Self::minus_shifted_near(bounded, if Self::BY_TABLE { u } else { bounded })
    }

    /// As [`Power::minus_shifted`], where m is that of `near`, and f makes up for the difference.
    #[inline(always)]
    fn minus_shifted_near(near: V<S>, u: V<S>) -> Self {
        let rounded = near.neg_mul_add(V::splat(LOG2_E), V::splat(Self::BY.magic));
        let g = rounded.neg_mul_add(V::splat(Self::BY.c), V::splat(Self::BY.k));
        let g = u.neg_mul_add(V::splat(Self::BY.c_log2_e), g);
        Self { fraction: Self::fraction(g), scale: Self::scale(rounded, &EIGHTHS_DOWN, -64.0) }
    }

    /// e^-u for |u| up to 80.
    #[inline(always)]
    fn minus_in_range(u: V<S>) -> Self {
        let rounded = u.neg_mul_add(V::splat(LOG2_E), V::splat(Self::BY.magic));
        let g = rounded.neg_mul_add(V::splat(Self::BY.c), V::splat(Self::BY.k));
        let g = u.neg_mul_add(V::splat(Self::BY.c_log2_e), g);
        Self { fraction: Self::fraction(g), scale: Self::scale(rounded, &EIGHTHS_PLAIN, 0.0) }
    }

    /// `rounded` and the fraction, of e^x.
    #[inline(always)]
    fn reduced(x: V<S>) -> (V<S>, V<S>) {
        let rounded = x.mul_add(V::splat(LOG2_E), V::splat(Self::BY.magic));
        let g = rounded.neg_mul_add(V::splat(Self::BY.c), V::splat(Self::BY.k));
        (rounded, Self::fraction(x.mul_add(V::splat(Self::BY.c_log2_e), g)))
    }

    #[inline(always)]
    fn fraction(g: V<S>) -> V<S> {
        if Self::BY_TABLE {
            return g;
        }
        g.mul_add(g, V::splat(0.886_927)).mul_add(g, V::splat(0.331_258_4))
    }

    /// 2^m, shifted; the table has the shift already.
    #[inline(always)]
    fn scale(rounded: V<S>, table: &[u32; 8], shift: f32) -> V<S> {
        if Self::BY_TABLE {
            return V(S::exp2_of_eighths(rounded.0, table));
        }
        // Not part of M, since K would not be a number of f32 then.
        let rounded = if shift == 0.0 { rounded } else { rounded + V::splat(shift) };
        V(S::exp2_of_magic(rounded.0))
    }

    #[inline(always)]
    fn value(&self) -> V<S> {
        self.fraction * self.scale
    }

    /// 2^64 sigmoid, where this is 2^-64 e^-x.
    #[inline(always)]
    fn lifted_sigmoid(&self) -> V<S> {
        self.fraction.mul_add(self.scale, V::splat(DOWN)).reciprocal_fast()
    }
}

impl<S: Simd> V<S> {
    /// Whether there are fast forms: whether they differ from the exact ones.
    pub(crate) const HAS_FAST: bool = S::RESULT_BITS < 24;

    /// e^x: right to 2^-11 where 8 bits are stored, to 2^-13.5 where 11 are, and [`V::exp`]
    /// elsewhere.
    #[inline(always)]
    pub(crate) fn exp_fast(self) -> Self {
        if !Self::HAS_FAST {
            return self.exp();
        }
        // From 2^-150 to 2^129, which one factor cannot be: shifted towards 1, and back.
        let x = self.clamp(-104.0, 89.0);
        let (rounded, fraction) = Power::reduced(x);
        let up = Power::scale(rounded, &EIGHTHS_UP, 64.0);
        let down = Power::scale(rounded, &EIGHTHS_DOWN, -64.0);
        let scale = V::select(x.is_negative(), up, down);
        fraction * scale * V::select(x.is_negative(), V::splat(DOWN), V::splat(UP))
    }

    /// [`V::exp_fast`] of arguments up to 80 in magnitude, with the same bits and less work.
    #[inline(always)]
    pub(crate) fn exp_fast_in_range(self) -> Self {
        if !Self::HAS_FAST {
            return self.exp();
        }
        let (rounded, fraction) = Power::reduced(self);
        fraction * Power::scale(rounded, &EIGHTHS_PLAIN, 0.0)
    }

    /// 1 / x, as exact as [`V::exp_fast`]: the CPU's estimate (2^-11.5) for bf16, and one step of
    /// Newton's from it for f16. |x| is within 2^-126..=2^125.
    #[inline(always)]
    pub(crate) fn reciprocal_fast(self) -> Self {
        if !Self::HAS_FAST {
            return Self::splat(1.0) / self;
        }
        let estimate = Self(S::reciprocal_estimate(self.0));
        if Power::<S>::BY_TABLE {
            return estimate;
        }
        estimate * self.neg_mul_add(estimate, Self::splat(2.0))
    }

    /// 1 / (1 + e^-x), as exact as [`V::exp_fast`], as are the following.
    #[inline(always)]
    pub(crate) fn sigmoid_fast(self) -> Self {
        if !Self::HAS_FAST {
            return self.sigmoid();
        }
        let power = Power::minus_shifted_or_large(Self::splat(PLUS_42).min(self));
        power.lifted_sigmoid() * Self::splat(DOWN)
    }

    /// x sigmoid(x).
    #[inline(always)]
    pub(crate) fn silu_fast(self) -> Self {
        if !Self::HAS_FAST {
            return self.silu();
        }
        self * self.sigmoid_fast()
    }

    /// sigmoid and its derivative.
    #[inline(always)]
    pub(crate) fn sigmoid_and_slope_fast(self) -> (Self, Self) {
        if !Self::HAS_FAST {
            return self.sigmoid_and_slope();
        }
        // The slope is even: both start from the smaller of sigmoid(x) and sigmoid(-x).
        let power = Power::minus_shifted_or_large(-self.abs());
        let lifted = (power.value() + Self::splat(DOWN)).reciprocal_fast();
        let small = lifted * Self::splat(DOWN);
        let large = lifted.neg_mul_add(Self::splat(DOWN), Self::splat(1.0));
        (Self::select(self.is_negative(), small, large), small * large)
    }

    /// silu and its derivative, s (1 + x (1 - s)), which is (1 + e + x e) s²: nothing cancels but what
    /// cancels in the result.
    #[inline(always)]
    pub(crate) fn silu_and_slope_fast(self) -> (Self, Self) {
        if !Self::HAS_FAST {
            return self.silu_and_slope();
        }
        let bounded = self.clamp(MINUS_105, PLUS_42);
        let e = Power::minus_shifted(bounded).value();
        let divisor = e + Self::splat(DOWN);
        let lifted = divisor.reciprocal_fast();
        let s = lifted * Self::splat(DOWN);
        let bracket = bounded.mul_add(e, divisor);
        // The difference is zero, but NaN for an infinite argument, as the plain formula is.
        (self * s, (bracket * lifted).mul_add(s, self * V::zero()))
    }

    /// [`V::sigmoid_fast`] of arguments up to 80 in magnitude, with the same bits and less work.
    #[inline(always)]
    pub(crate) fn sigmoid_fast_in_range(self) -> Self {
        let power = Power::minus_in_range(self);
        power.fraction.mul_add(power.scale, Self::splat(1.0)).reciprocal_fast()
    }

    /// [`V::silu_fast`] of arguments up to 80 in magnitude, with the same bits and less work.
    #[inline(always)]
    pub(crate) fn silu_fast_in_range(self) -> Self {
        self * self.sigmoid_fast_in_range()
    }

    /// The slope of [`V::sigmoid_and_slope_fast`] for arguments up to 80 in magnitude, with the same bits
    /// and less work.
    #[inline(always)]
    pub(crate) fn sigmoid_slope_fast_in_range(self) -> Self {
        let e = Power::minus_in_range(-self.abs()).value();
        let small = (e + Self::splat(1.0)).reciprocal_fast();
        small * (Self::splat(1.0) - small)
    }

    /// The slope of [`V::silu_and_slope_fast`] for arguments up to 80 in magnitude, with the same bits and
    /// less work.
    #[inline(always)]
    pub(crate) fn silu_slope_fast_in_range(self) -> Self {
        let e = Power::minus_in_range(self).value();
        let divisor = e + Self::splat(1.0);
        let s = divisor.reciprocal_fast();
        self.mul_add(e, divisor) * s * s
    }
}
