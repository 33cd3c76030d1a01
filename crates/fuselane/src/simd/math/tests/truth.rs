//! The truth: the same functions for one f64, by formulas without cancellation.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI, PI};

pub(super) fn sigmoid(x: f64) -> f64 {
    let z = (-x.abs()).exp();
    (if x < 0.0 { z } else { 1.0 }) / (1.0 + z)
}
pub(super) fn sigmoid_slope(x: f64) -> f64 {
    sigmoid(x) * sigmoid(-x)
}
pub(super) fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}
pub(super) fn silu_slope(x: f64) -> f64 {
    sigmoid(x) * (1.0 + x * sigmoid(-x))
}
pub(super) fn tanh_slope(x: f64) -> f64 {
    4.0 * sigmoid_slope(2.0 * x)
}
pub(super) fn softplus(x: f64) -> f64 {
    // A comparison, since `f64::max` drops a NaN.
    (if x < 0.0 { 0.0 } else { x }) + (-x.abs()).exp().ln_1p()
}

pub(super) fn distribution(x: f64) -> f64 {
    0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
}
pub(super) fn density(x: f64) -> f64 {
    // The square of the upper bits is exact, so the exponential sees no rounding of it.
    let upper = f64::from_bits(x.to_bits() & !0x7FF_FFFF);
    let rest = if upper == x { 0.0 } else { (x - upper) * (x + upper) };
    (-0.5 * upper * upper).exp() * (-0.5 * rest).exp() / (2.0 * PI).sqrt()
}
pub(super) fn gelu(x: f64) -> f64 {
    x * distribution(x)
}
pub(super) fn gelu_slope(x: f64) -> f64 {
    distribution(x) + x * density(x)
}

/// v of `gelu_tanh`, and x dv/dx.
pub(super) fn gelu_tanh_inner(x: f64) -> (f64, f64) {
    let k = 2.0 * FRAC_2_PI.sqrt();
    let cubic = 0.044715 * x * x;
    (k * x * (1.0 + cubic), k * x * (1.0 + 3.0 * cubic))
}
pub(super) fn gelu_tanh(x: f64) -> f64 {
    x * sigmoid(gelu_tanh_inner(x).0)
}
pub(super) fn gelu_tanh_slope(x: f64) -> f64 {
    // Finite arguments beyond 64 would have x² overflow before the sigmoid is zero.
    let bounded = if x.is_finite() { x.clamp(-64.0, 64.0) } else { x };
    let (v, reach) = gelu_tanh_inner(bounded);
    sigmoid(v) * (1.0 + reach * sigmoid(-v))
}

/// The f64 formulas themselves, against values from mpmath with 40 digits.
#[test]
fn f64_formulas_are_accurate() {
    type Formula = fn(f64) -> f64;
    let table: [(Formula, f64, f64); 30] = [
        (sigmoid, -100.3, 2.75590006535656847e-44),
        (sigmoid, -1.7, 0.15446526508353471),
        (sigmoid, 2.4, 0.916827303506077623),
        (silu, -100.3, -2.7641677655526381e-42),
        (silu, -1.7, -0.262590950642009),
        (silu, 2.4, 2.20038552841458621),
        (sigmoid_slope, -100.3, 2.75590006535656847e-44),
        (sigmoid_slope, -1.7, 0.130605746966208063),
        (sigmoid_slope, 2.4, 0.0762549990518522497),
        (silu_slope, -100.3, -2.73660876489907241e-42),
        (silu_slope, -1.7, -0.0675645047590189909),
        (silu_slope, 2.4, 1.09983930123052302),
        (tanh_slope, -100.3, 3.03799406809293535e-87),
        (tanh_slope, -1.7, 0.125009870633446597),
        (tanh_slope, 2.4, 0.0323837743413179941),
        (softplus, -100.3, 2.75590006535656847e-44),
        (softplus, -1.7, 0.167786029386265924),
        (softplus, 2.4, 2.4868361521539496),
        (gelu, -12.3, -5.57030955607530544e-34),
        (gelu, -1.7, -0.0757612866895231722),
        (gelu, 2.4, 2.3803259137809692),
        (gelu_slope, -12.3, -6.85090094979213631e-33),
        (gelu_slope, -1.7, -0.115317968782164734),
        (gelu_slope, 2.4, 1.04554933678302683),
        (gelu_tanh, -9.7, -9.58337118936905799e-35),
        (gelu_tanh, -1.7, -0.0758941044488438414),
        (gelu_tanh, 2.4, 2.38072315384439819),
        (gelu_tanh_slope, -9.7, -2.07326655448093935e-33),
        (gelu_tanh_slope, -1.7, -0.115914631452604996),
        (gelu_tanh_slope, 2.4, 1.04605995860572833),
    ];
    for (f, x, wanted) in table {
        let relative = (f(x) - wanted).abs() / wanted.abs();
        assert!(relative < 4e-14, "{x}: {:e} {wanted:e}", f(x));
    }
}
