//! sigmoid(x) = 1 / (1 + e^-x) and silu(x) = x sigmoid(x).

use super::exp::Power;
use super::{DOWN, LOG2_E, Simd, UP, V, cut, polynomial};

/// 2^48.
pub(super) const LIFT: f32 = (1u64 << 48) as f32;

/// x sigmoid(v): what silu and the approximate GELU have in common.
///
/// `x` is clamped, `rest` as [`cut`] left it, `power` is 2^-64 e^-v. Without the shift by 2^64, the
/// divisor would overflow in the tail.
#[inline(always)]
pub(super) fn gated<S: Simd>(x: V<S>, rest: V<S>, power: &Power<S>) -> V<S> {
    (x / power.value_plus(DOWN)).mul_add(V::splat(DOWN), rest)
}

/// 2^48 sigmoid(v), for [`gated`] and its slope: so large that the tail stays normal.
#[inline(always)]
pub(super) fn lifted_sigmoid<S: Simd>(power: &Power<S>) -> V<S> {
    V::splat(LIFT * DOWN) / power.value_plus(DOWN)
}

/// As [`gated`], and the derivative, which is s (1 + x v' (1 - s)) with s = sigmoid(v): `lifted` is
/// 2^48 s, `bracket` what is in brackets, and `whole` is x before any clamp.
#[inline(always)]
pub(super) fn gated_and_slope<S: Simd>(
    (whole, x, rest): (V<S>, V<S>, V<S>),
    lifted: V<S>,
    bracket: V<S>,
) -> (V<S>, V<S>) {
    let lowered = V::splat(1.0 / LIFT);
    let value = (x * lifted).mul_add(lowered, rest);
    // The zero is NaN for an infinite argument, as the plain formula is.
    let slope = (lifted * bracket).mul_add(lowered, whole * V::zero());
    (value, slope)
}

/// x within where silu is neither x nor rounds to zero (-111..=32), the rest as [`cut`] leaves it,
/// and 2^-64 e^-x.
#[inline(always)]
fn silu_parts<S: Simd>(x: V<S>) -> (V<S>, V<S>, Power<S>) {
    let (kept, rest) = cut(x, 32.0);
    let clamped = V::splat(-111.0).max(kept);
    (clamped, rest, Power::minus(clamped, -64.0))
}

impl<S: Simd> V<S> {
    /// 1 / (1 + e^-x), within 3 ulp.
    #[inline(always)]
    pub(crate) fn sigmoid(self) -> Self {
        let power = Power::minus(self.clamp(-105.0, 32.0), -64.0);
        V::splat(DOWN) / power.value_plus(DOWN)
    }

    /// The sigmoid and its derivative, each within 3 ulp.
    ///
    /// The slope is even, so this starts from the smaller of sigmoid(x) and sigmoid(-x): their
    /// product keeps its accuracy on both sides.
    #[inline(always)]
    pub(crate) fn sigmoid_and_slope(self) -> (Self, Self) {
        let power = Power::minus(V::splat(-105.0).max(-self.abs()), -64.0);
        let small = V::splat(DOWN) / power.value_plus(DOWN);
        let large = V::splat(1.0) - small;
        (V::select(self.is_negative(), small, large), small * large)
    }

    /// x sigmoid(x), within 3 ulp.
    #[inline(always)]
    pub(crate) fn silu(self) -> Self {
        let (x, rest, power) = silu_parts(self);
        gated(x, rest, &power)
    }

    /// silu and its derivative, which is within 4 ulp of the larger of its terms s and
    /// x s (1 - s); they cancel at x = -1.278.
    ///
    /// There, the error of 1 - s is all that counts. For x < 0, where s < 1/2, the difference
    /// itself is best. For x > 0 it would cancel, and s e^-x is taken.
    #[inline(always)]
    pub(crate) fn silu_and_slope(self) -> (Self, Self) {
        let (x, rest, power) = silu_parts(self);
        let lifted = lifted_sigmoid(&power);
        let difference = lifted.neg_mul_add(V::splat(1.0 / LIFT), V::splat(1.0));
        let product = power.value() * lifted * V::splat(UP / LIFT);
        let bracket = x.mul_add(V::select(self.is_negative(), difference, product), V::splat(1.0));
        gated_and_slope((self, x, rest), lifted, bracket)
    }
}

/// Where f32 have three bits behind the point.
const EIGHTHS_MAGIC: f32 = 1_572_864.0;

/// 2^-64 times 2^(k/8), less k units of 2^20, for [`Simd::exp2_of_eighths`].
static EIGHTHS_DOWN: [u32; 8] = {
    const PLAIN: [u32; 8] = [
        0x3F80_0000,
        0x3F7B_95C2,
        0x3F78_37F0,
        0x3F75_FED7,
        0x3F75_04F3,
        0x3F75_672A,
        0x3F77_44FD,
        0x3F7A_C0C7,
    ];
    let (mut table, mut k) = (PLAIN, 0);
    while k < 8 {
        table[k] -= 64 << 23;
        k += 1;
    }
    table
};

/// 2^-64 (1 + e^-u) for u within -105..=42, right to 2^-18, and to 2^-25 in the mean. (It is divided by, as
/// an estimate of the reciprocal would need a step of Newton's: as many bits take 1.06 to 1.1 times as long so
/// on a Zen 5.)
#[inline(always)]
fn one_plus_power<S: Simd>(u: V<S>) -> V<S> {
    let magic = V::splat(EIGHTHS_MAGIC);
    let rounded = u.neg_mul_add(V::splat(LOG2_E), magic);
    let scale = V(S::exp2_of_eighths(rounded.0, &EIGHTHS_DOWN));
    let r = (rounded - magic).mul_add(V::splat(std::f32::consts::LN_2), u);
    // e^-r on ±0.0433, to 3.5e-6, and 2e-8 in the mean.
    let fraction = polynomial(r, [0.500_058_7, -1.000_234_8, 1.0]);
    fraction.mul_add(scale, V::splat(DOWN))
}

impl<S: Simd> V<S> {
    /// 1 / (1 + e^-x) for sums over a row or a column, to which what is off in all of their terms would come
    /// as it is: of 16 bits right to 2^-18, and to 2^-25 in the mean, where [`V::sigmoid_fast`] is to 2^-11.
    #[inline(always)]
    pub(crate) fn sigmoid_for_sums(self) -> Self {
        if !Self::HAS_FAST {
            return self.sigmoid();
        }
        V::splat(DOWN) / one_plus_power(self.clamp(-105.0, 42.0))
    }
}

/// -sigmoid(x) for x < 0, and 1 - sigmoid(x) otherwise: a number to keep, of at most 1/2 in magnitude and with
/// the sign of x, of which are made sigmoid(x), silu(x) and their slopes, without another exponential or
/// division. So nothing cancels in 1 - sigmoid(x).
///
/// Of f32 it is as exact as [`V::sigmoid`]; of 16 bits, it is right to 2^-18 (and to 2^-25 in the mean),
/// which is enough for the long sums in f32 that it goes into, and takes less work.
#[derive(Clone, Copy)]
pub(crate) struct FoldedSigmoid<S: Simd>(pub(crate) V<S>);

impl<S: Simd> FoldedSigmoid<S> {
    #[inline(always)]
    pub(crate) fn of(x: V<S>) -> Self {
        let u = V::splat(-105.0).max(-x.abs());
        if !V::<S>::HAS_FAST {
            let power = Power::minus(u, -64.0);
            return Self((V::splat(DOWN) / power.value_plus(DOWN)).copysign(x));
        }
        Self((V::splat(DOWN) / one_plus_power(u)).copysign(x))
    }

    /// What the number that is kept is subtracted from: 0 for x < 0, and 1 otherwise.
    #[inline(always)]
    fn step(self) -> V<S> {
        V::select(self.0.is_negative(), V::zero(), V::splat(1.0))
    }

    /// sigmoid(x) and its derivative.
    #[inline(always)]
    pub(crate) fn sigmoid_and_slope(self) -> (V<S>, V<S>) {
        (self.step() - self.0, self.0.neg_mul_add(self.0, self.0.abs()))
    }

    /// silu(x) and its derivative.
    #[inline(always)]
    pub(crate) fn silu_and_slope(self, x: V<S>) -> (V<S>, V<S>) {
        let step = self.step();
        let (s, other) = (step - self.0, (V::splat(1.0) - step) + self.0);
        (x * s, x.mul_add(other, V::splat(1.0)) * s)
    }
}
