//! The hyperbolic tangent, and softplus(x) = ln(1 + e^x).

use super::exp::Power;
use super::{DOWN, Simd, UP, V, polynomial};

/// What tanh and its slope share: 2^64 (1 - z) and 2^64 (1 + z), with z = e^-2|x|.
///
/// 1 - z is -(2^n r q + (2^n - 1)), which keeps its relative accuracy as z goes to 1.
#[inline(always)]
fn tanh_parts<S: Simd>(x: V<S>) -> (V<S>, V<S>, Power<S>) {
    let a = V::splat(54.0).min(x.abs());
    let power = Power::minus(a + a, 64.0);
    let difference = (power.r * power.q).neg_mul_add(power.scale, V::splat(UP) - power.scale);
    (difference, V::splat(2.0 * UP) - difference, power)
}

/// ln(1 + z) for z within 0..=1, plus `term`.
///
/// ln(1 + z) = 2 artanh(v / 2) with v = z / (1 + z / 2), whose series has only odd powers. The
/// polynomial was fitted on 0..=2/3; its relative error is 2^-27.7.
#[inline(always)]
fn ln_1p_plus<S: Simd>(z: V<S>, term: V<S>) -> V<S> {
    let v = z / z.mul_add(V::splat(0.5), V::splat(1.0));
    let series =
        polynomial(v * v, [0.000_547_006_9, 0.002_187_736_6, 0.012_506_699, 0.083_333_02, 1.0]);
    v.mul_add(series, term)
}

/// e^-|x|, down to the last denormal number.
#[inline(always)]
fn exp_minus_abs<S: Simd>(x: V<S>) -> V<S> {
    Power::minus(V::splat(104.0).min(x.abs()), 64.0).value() * V::splat(DOWN)
}

impl<S: Simd> V<S> {
    /// tanh(x), within 3 ulp.
    #[inline(always)]
    pub(crate) fn tanh(self) -> Self {
        let (difference, sum, _) = tanh_parts(self);
        (difference / sum).copysign(self)
    }

    /// tanh and its derivative, which is within 4 ulp.
    ///
    /// With w = 4 z / (1 + z), the slope 4 z / (1 + z)² is w (1 - w / 4).
    #[inline(always)]
    pub(crate) fn tanh_and_slope(self) -> (Self, Self) {
        let (difference, sum, power) = tanh_parts(self);
        let w = power.value() / (sum * V::splat(0.25));
        let slope = w * w.neg_mul_add(V::splat(0.25), V::splat(1.0));
        ((difference / sum).copysign(self), slope)
    }

    /// ln(1 + e^x), within 4 ulp.
    #[inline(always)]
    pub(crate) fn softplus(self) -> Self {
        ln_1p_plus(exp_minus_abs(self), V::zero().max(self))
    }
}
