//! Elementwise activations: `o = f(x)`, `dx = do * f'(x)`.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::ops::act::Act;

/// `f(x)`.
///
/// ```text
/// none          x
/// relu          max(x, 0)
/// sigmoid       1 / (1 + exp(-x))
/// silu          x * sigmoid(x)
/// tanh          tanh(x)
/// gelu          x * (1 + erf(x / sqrt 2)) / 2  =  x * erfc(-x / sqrt 2) / 2
/// gelu_tanh     x * (1 + tanh u) / 2  =  x * sigmoid(2 u),  u = sqrt(2 / pi) * (x + 0.044715 x^3)
/// softplus      ln(1 + exp(x))  =  max(x, 0) + ln(1 + exp(-|x|))
/// relu_squared  max(x, 0)^2
/// ```
///
/// Where two forms are given, they are equal, and the second keeps its digits in the tails.
/// Infinities follow IEEE arithmetic, as in PyTorch: silu and both gelus of minus infinity are NaN.
///
/// ```
/// use fuselane::{Act, reference::act};
/// assert_eq!(act::forward(Act::Relu, -2.0), 0.0);
/// assert_eq!(act::forward(Act::Softplus, 0.0), 2.0f64.ln());
/// ```
pub fn forward(act: Act, x: f64) -> f64 {
    match act {
        Act::None => x,
        Act::Relu => relu(x),
        Act::Sigmoid => sigmoid(x),
        Act::Silu => x * sigmoid(x),
        Act::Tanh => x.tanh(),
        Act::Gelu => x * normal_cdf(x),
        Act::GeluTanh => x * sigmoid(2.0 * gelu_tanh_inner(x)),
        Act::Softplus => relu(x) + (-x.abs()).exp().ln_1p(),
        Act::ReluSquared => relu(x) * relu(x),
    }
}

/// `f'(x)`.
///
/// ```text
/// none          1
/// relu          1 where x > 0, 0 where x <= 0
/// sigmoid       s (1 - s),  s = sigmoid(x)
/// silu          s + x s (1 - s)
/// tanh          1 - tanh(x)^2  =  4 y / (1 + y)^2,  y = exp(-2 |x|)
/// gelu          cdf(x) + x pdf(x)  of the standard normal distribution
/// gelu_tanh     s + x s (1 - s) 2 u',  s = sigmoid(2 u),  u' = sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
/// softplus      sigmoid(x)
/// relu_squared  2 max(x, 0)
/// ```
///
/// `1 - s` is computed as `sigmoid(-x)`, which keeps its digits.
pub fn slope(act: Act, x: f64) -> f64 {
    match act {
        Act::Silu | Act::Gelu | Act::GeluTanh => {
            let (first, second) = slope_terms(act, x);
            first + second
        }
        Act::None => 1.0,
        Act::Relu if x.is_nan() => x,
        Act::Relu => f64::from(x > 0.0),
        Act::Sigmoid => sigmoid(x) * sigmoid(-x),
        Act::Tanh => {
            let y = (-2.0 * x.abs()).exp();
            4.0 * y / ((1.0 + y) * (1.0 + y))
        }
        Act::Softplus => sigmoid(x),
        Act::ReluSquared => 2.0 * relu(x),
    }
}

/// The sum of the absolute terms of [`slope`], which is larger than the slope itself where silu
/// and the gelus turn around.
pub fn slope_magnitude(act: Act, x: f64) -> f64 {
    match act {
        Act::Silu | Act::Gelu | Act::GeluTanh => {
            let (first, second) = slope_terms(act, x);
            first.abs() + second.abs()
        }
        _ => slope(act, x).abs(),
    }
}

/// `dx = do * f'(x)`.
///
/// Relu and its square select rather than multiply, as PyTorch does: where x <= 0 the result is 0
/// even for a gradient that is NaN or infinite; where x is NaN, relu passes the gradient on.
///
/// ```
/// use fuselane::{Act, reference::act};
/// assert_eq!(act::backward(Act::Relu, 0.0, f64::NAN), 0.0);
/// assert_eq!(act::backward(Act::Tanh, 0.0, 3.0), 3.0);
/// ```
pub fn backward(act: Act, x: f64, grad: f64) -> f64 {
    match act {
        Act::Relu | Act::ReluSquared if x <= 0.0 => 0.0,
        Act::None | Act::Relu => grad,
        _ => grad * slope(act, x),
    }
}

/// `dx` from the output `o` of the forward, for those that can do without x:
///
/// ```text
/// none     do
/// relu     do where o > 0, 0 where o <= 0
/// sigmoid  do (o - o^2)
/// tanh     do (1 - o^2)
/// ```
///
/// # Panics
///
/// For all others.
pub fn backward_from_output(act: Act, o: f64, grad: f64) -> f64 {
    match act {
        Act::None | Act::Relu => backward(act, o, grad),
        Act::Sigmoid => grad * (o - o * o),
        Act::Tanh => grad * (1.0 - o * o),
        _ => panic!("the backward of {act} needs x"),
    }
}

/// The two terms of the slopes that can cancel.
fn slope_terms(act: Act, x: f64) -> (f64, f64) {
    match act {
        Act::Silu => (sigmoid(x), x * sigmoid(x) * sigmoid(-x)),
        Act::Gelu => (normal_cdf(x), x * (-x * x / 2.0).exp() / (2.0 * PI).sqrt()),
        Act::GeluTanh => {
            // The second term is 0 long before x^2 overflows.
            let x = if x.is_finite() { x.clamp(-64.0, 64.0) } else { x };
            let u = gelu_tanh_inner(x);
            let du = (2.0 / PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
            (sigmoid(2.0 * u), x * sigmoid(2.0 * u) * sigmoid(-2.0 * u) * 2.0 * du)
        }
        _ => unreachable!("{act} has a slope of one term"),
    }
}

/// max(x, 0), and NaN for NaN.
fn relu(x: f64) -> f64 {
    if x <= 0.0 { 0.0 } else { x }
}

/// 1 / (1 + exp(-x)), by the exponential that does not overflow.
fn sigmoid(x: f64) -> f64 {
    let y = (-x.abs()).exp();
    if x >= 0.0 { 1.0 / (1.0 + y) } else { y / (1.0 + y) }
}

/// (1 + erf(x / sqrt 2)) / 2
fn normal_cdf(x: f64) -> f64 {
    libm::erfc(-x * FRAC_1_SQRT_2) / 2.0
}

/// sqrt(2 / pi) * (x + 0.044715 x^3)
fn gelu_tanh_inner(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)
}

#[cfg(test)]
mod tests {
    use super::super::Random;
    use super::super::checks::{check_gradient, derivative, smooth_values};
    use super::*;

    const INF: f64 = f64::INFINITY;

    fn assert_near(got: f64, expected: f64) {
        let error = (got - expected).abs() / expected.abs().max(f64::MIN_POSITIVE);
        assert!(error < 1e-13, "{got} is not {expected}");
    }

    #[test]
    fn slopes_are_the_differences() {
        let mut random = Random::new(1);
        for act in Act::ALL {
            let x = smooth_values(&mut random, 200);
            for &x in &x {
                let numeric = derivative(2.0 * x, |x| forward(act, x));
                assert!((slope(act, 2.0 * x) - numeric).abs() < 1e-9, "{act} {x}");
                assert_eq!(backward(act, x, 1.5), 1.5 * slope(act, x), "{act} {x}");
                assert!(slope_magnitude(act, x) >= slope(act, x).abs());
            }
            let gradient: Vec<f64> = x.iter().map(|&x| backward(act, x, 0.7)).collect();
            check_gradient(act.name(), &x, &gradient, |x| {
                x.iter().map(|&x| 0.7 * forward(act, x)).sum()
            });
        }
    }

    #[test]
    fn known_answers() {
        // To twenty digits by arbitrary precision arithmetic.
        assert_near(forward(Act::Sigmoid, 1.0), 0.73105857863000487925);
        assert_near(forward(Act::Silu, 1.0), 0.73105857863000487925);
        assert_near(forward(Act::Tanh, 0.5), 0.46211715726000975850);
        assert_near(forward(Act::Gelu, 1.0), 0.84134474606854294859);
        assert_near(forward(Act::Gelu, -2.0), -0.045500263896358414401);
        assert_near(forward(Act::Softplus, 1.0), 1.3132616875182228340);
        assert_near(forward(Act::ReluSquared, 3.0), 9.0);
        assert_eq!(forward(Act::Relu, -3.0), 0.0);
        assert_eq!(forward(Act::None, -3.0), -3.0);
        assert_near(slope(Act::Sigmoid, 0.0), 0.25);
        assert_near(slope(Act::Silu, 0.0), 0.5);
        assert_near(slope(Act::Gelu, 0.0), 0.5);
        assert_near(slope(Act::GeluTanh, 0.0), 0.5);
        assert_near(slope(Act::Tanh, 0.0), 1.0);
        assert_eq!(slope(Act::Relu, 0.0), 0.0);
        // gelu_tanh is within 5e-4 of gelu.
        for i in -100..=100 {
            let x = f64::from(i) / 20.0;
            assert!((forward(Act::Gelu, x) - forward(Act::GeluTanh, x)).abs() < 5e-4);
        }
    }

    #[test]
    fn tails_keep_their_digits() {
        // sigmoid(x) -> exp(x) and softplus(x) -> exp(x) as x falls.
        assert_near(forward(Act::Sigmoid, -100.0), (-100.0f64).exp());
        assert_near(forward(Act::Softplus, -100.0), (-100.0f64).exp());
        assert_near(slope(Act::Sigmoid, 100.0), (-100.0f64).exp());
        assert_near(slope(Act::Tanh, 50.0), 4.0 * (-100.0f64).exp());
        assert_near(forward(Act::Silu, -100.0), -100.0 * (-100.0f64).exp());
        // The standard normal distribution at -10 is 7.6198530241605260660e-24.
        assert_near(forward(Act::Gelu, -10.0), -7.6198530241605260660e-23);
        assert_eq!(forward(Act::Softplus, 1e30), 1e30);
        assert_eq!(forward(Act::Gelu, 1e30), 1e30);
        assert_eq!(forward(Act::GeluTanh, -1e30), 0.0);
        assert_eq!(slope(Act::GeluTanh, 1e30), 1.0);
    }

    #[test]
    fn infinities_and_nan() {
        for act in Act::ALL {
            assert!(forward(act, f64::NAN).is_nan(), "{act}");
            if act != Act::None {
                assert!(slope(act, f64::NAN).is_nan(), "{act}");
            }
        }
        for act in [Act::Silu, Act::Gelu, Act::GeluTanh] {
            assert!(forward(act, -INF).is_nan());
            assert_eq!(forward(act, INF), INF);
        }
        for (act, low, high) in [
            (Act::None, -INF, INF),
            (Act::Relu, 0.0, INF),
            (Act::Sigmoid, 0.0, 1.0),
            (Act::Tanh, -1.0, 1.0),
            (Act::Softplus, 0.0, INF),
            (Act::ReluSquared, 0.0, INF),
        ] {
            assert_eq!((forward(act, -INF), forward(act, INF)), (low, high), "{act}");
        }
        for act in [Act::Relu, Act::ReluSquared] {
            assert_eq!(backward(act, 0.0, f64::NAN), 0.0);
            assert_eq!(backward(act, -1.0, INF), 0.0);
            assert!(backward(act, 1.0, f64::NAN).is_nan());
        }
        assert_eq!(backward(Act::Relu, f64::NAN, 2.0), 2.0);
        assert_eq!(backward(Act::None, f64::NAN, 2.0), 2.0);
        assert!(backward(Act::ReluSquared, f64::NAN, 2.0).is_nan());
    }
}
