//! GELU, x Φ(x), where Φ is the distribution function of the standard normal distribution; and its
//! usual approximation, x sigmoid(2 √(2/π) (x + 0.044715 x³)).

use super::exp::Power;
use super::sigmoid::{LIFT, gated, gated_and_slope, lifted_sigmoid};
use super::{DOWN, Simd, UP, V, cut, polynomial};

/// 2 √(2/π), in 21 bits and the rest, and its product with 0.044715.
const TANH_K: f32 = 1.595_768_928_527_832;
const TANH_K_LOW: f32 = 1.930_779e-7;
const TANH_KC: f32 = 0.071_354_814;
const TANH_KC_LOW: f32 = 2.398_832_5e-9;

/// The approximate GELU is x beyond 7, and rounds to zero below -11. Also gives x².
///
/// v = x (k + kc x²) reaches -112, so it has to be known to 2^-34 for e^-v to be right in
/// f32. Each product and sum on the way therefore comes with its error. k is short enough for
/// k - b to be exact.
#[inline(always)]
fn gelu_tanh_parts<S: Simd>(x: V<S>) -> (V<S>, V<S>, Power<S>, V<S>) {
    let (kept, rest) = cut(x, 7.0);
    let x = V::splat(-11.0).max(kept);
    let (k, kc) = (V::splat(TANH_K), V::splat(TANH_KC));
    let (square, square_low) = x.two_product(x);
    let (g, g_low) = square.two_product(kc);
    let b = k + g;
    let rest_of_constants = square.mul_add(V::splat(TANH_KC_LOW), V::splat(TANH_K_LOW));
    let b_low = (k - b + g) + (g_low + square_low.mul_add(kc, rest_of_constants));
    let (v, v_low) = x.two_product(b);
    let power = Power::minus_pair(v, x.mul_add(b_low, v_low), -64.0);
    (x, rest, power, square)
}

/// What GELU and its slope share: a = |x|, cut where a Φ(-a) rounds to zero; 2^64 e^(-a²/2); and P
/// and Q with Φ(-a) = e^(-a²/2) P / Q.
///
/// P / Q was fitted on 0..=14.95, to a relative error of 2^-27. All its coefficients are positive,
/// so no step of either polynomial cancels. They are grouped by h = a²/2 so that few roundings
/// follow each other where a is large, and only the last counts where it is small.
#[inline(always)]
fn gelu_parts<S: Simd>(x: V<S>) -> (V<S>, V<S>, V<S>, V<S>) {
    const P: [f32; 5] = [0.5, 0.438_481_84, 0.183_368_4, 0.040_676_687, 0.004_122_155];
    const Q: [f32; 6] = [1.0, 1.674_848_6, 1.203_068_3, 0.469_820_74, 0.101_967_685, 0.010_332_593];
    let a = V::splat(14.9).min(x.abs());
    let (h, h_low) = a.two_product(a * V::splat(0.5));
    let e = Power::minus_pair(h, h_low, 64.0).value();
    let p1 = polynomial(a, [P[2], P[1]]);
    let p3 = polynomial(a, [2.0 * P[4], 2.0 * P[3]]);
    let p = p3.mul_add(h, p1).mul_add(a, V::splat(P[0]));
    let q1 = polynomial(a, [Q[2], Q[1]]);
    let q3 = polynomial(a, [2.0 * Q[4], 2.0 * Q[3]]);
    let q = h.mul_add(V::splat(4.0 * Q[5]), q3).mul_add(h, q1).mul_add(a, V::splat(Q[0]));
    (a, e, p, q)
}

/// max(x, 0), but NaN at minus infinity, and -0 for -0.
#[inline(always)]
fn positive_part<S: Simd>(x: V<S>) -> V<S> {
    x - x.min(V::zero())
}

impl<S: Simd> V<S> {
    /// x Φ(x), within 7 ulp (8 without fused multiply-add).
    ///
    /// a Φ(-a) is found for a = |x|, where it is accurate in the tail, and taken from max(x, 0):
    /// for x > 0, x Φ(x) = x - x Φ(-x), which cancels at most one bit.
    #[inline(always)]
    pub(crate) fn gelu(self) -> Self {
        let (a, e, p, q) = gelu_parts(self);
        (a * e * p / q).neg_mul_add(V::splat(DOWN), positive_part(self))
    }

    /// GELU and its derivative, which is within 5.5 ulp of the larger of its terms Φ(x) and x φ(x);
    /// they cancel at x = -0.752.
    #[inline(always)]
    pub(crate) fn gelu_and_slope(self) -> (Self, Self) {
        const FRAC_1_SQRT_2PI: f32 = 0.398_942_28;
        let (a, e, p, q) = gelu_parts(self);
        let ratio = p / q;
        let down = V::splat(DOWN);
        let value = (a * e * ratio).neg_mul_add(down, positive_part(self));
        // The slope at -a; that at a is what it lacks to 1.
        let lifted = a.neg_mul_add(V::splat(FRAC_1_SQRT_2PI), ratio) * e;
        let positive = lifted.neg_mul_add(down, V::splat(1.0));
        let slope = V::select(self.is_negative(), lifted * down, positive);
        // The zero is NaN for an infinite argument, as the plain formula is.
        (value, self.mul_add(V::zero(), slope))
    }

    /// x sigmoid(2 √(2/π) (x + 0.044715 x³)), within 3 ulp (3.2 without fused multiply-add).
    #[inline(always)]
    pub(crate) fn gelu_tanh(self) -> Self {
        let (x, rest, power, _) = gelu_tanh_parts(self);
        gated(x, rest, &power)
    }

    /// The approximate GELU and its derivative, which is within 6.5 ulp of the larger of its terms s
    /// and x s (1 - s) v'; they cancel at x = -0.753.
    #[inline(always)]
    pub(crate) fn gelu_tanh_and_slope(self) -> (Self, Self) {
        let (x, rest, power, square) = gelu_tanh_parts(self);
        let constants = V::splat(TANH_K + TANH_K_LOW);
        let reach = square.mul_add(V::splat(3.0 * TANH_KC), constants) * x;
        let lifted = lifted_sigmoid(&power);
        // 2^-16 (1 - s), as s e^-v, which has no cancellation.
        let complement = power.value() * lifted;
        let bracket = (reach * complement).mul_add(V::splat(UP / LIFT), V::splat(1.0));
        gated_and_slope((self, x, rest), lifted, bracket)
    }
}
