//! Each operator again, in plain scalar f64: the truth in tests.
//!
//! The functions here are written to be checked by eye against the formula above each of them.
//! They take dense row-major slices, return new vectors, use no lanes, no threads and no `unsafe`,
//! and panic where lengths do not match. Their gradients are checked against differences of their
//! own forward.
//!
//! A result that is a sum of terms of both signs can be small where its terms are large, and no
//! arithmetic of finite precision can give it to the last bit. For such results a function named
//! `..._magnitude` gives the sum of the absolute terms, so that a test can measure an error with
//! [`ulp::error_at`] by what the arithmetic had to carry.
//!
//! ```
//! use fuselane::{Act, DType, reference};
//!
//! let truth = reference::act::forward(Act::Sigmoid, 1.0);
//! let got = 1.0f32 / (1.0 + (-1.0f32).exp());
//! assert!(reference::ulp::error(DType::F32, got.into(), truth) <= 2.0);
//! ```

pub mod act;
pub mod angles;
pub mod cosine;
pub mod fused_act;
pub mod normalize;
pub mod rotate;
pub mod softmax;
pub mod ulp;

/// A small deterministic source of test values (xorshift64*).
///
/// ```
/// use fuselane::reference::Random;
/// assert_eq!(Random::new(7).normals(4), Random::new(7).normals(4));
/// ```
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
}

impl Random {
    /// Equal seeds give equal values.
    pub fn new(seed: u64) -> Self {
        // Spreads small seeds over all bits; the state must not be zero.
        let mut random = Self { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 };
        for _ in 0..4 {
            random.bits();
        }
        random
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// An integer in `0..end`, or 0 where `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { (self.bits() % end as u64) as usize }
    }

    /// A value in `low..high`, all equally likely.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        let unit = (self.bits() >> 11) as f64 / (1u64 << 53) as f64;
        low + (high - low) * unit
    }

    /// A value of mean 0 and variance 1, nearly normal (a sum of twelve uniform ones).
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform(-0.5, 0.5)).sum()
    }

    /// `count` values in `low..high`.
    pub fn uniforms(&mut self, count: usize, low: f64, high: f64) -> Vec<f64> {
        (0..count).map(|_| self.uniform(low, high)).collect()
    }

    /// `count` nearly normal values.
    pub fn normals(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.normal()).collect()
    }
}

#[cfg(test)]
mod checks {
    use std::fmt;

    use super::Random;
    use super::angles::{Gradients, Input};
    use crate::dtype::DType;
    use crate::ops::act::Act;
    use crate::ops::angles::Positions;
    use crate::ops::encode::FusedAct;

    /// All activations of `rotate` and `cosine`.
    pub(super) fn fused_acts() -> Vec<FusedAct> {
        let elementwise = Act::ALL.into_iter().map(FusedAct::Elementwise);
        elementwise.chain([FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence]).collect()
    }

    /// Nearly normal values that keep away from 0, where relu has no derivative.
    pub(super) fn smooth_values(random: &mut Random, count: usize) -> Vec<f64> {
        let mut values = random.normals(count);
        for value in &mut values {
            if value.abs() < 0.01 {
                *value = 0.05;
            }
        }
        values
    }

    /// `sum(a * b)`: the loss whose gradient with respect to `b` is `a`.
    pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    /// The derivative of `f` at `x` by the central difference of fourth order, which is good to
    /// some 1e-11 in f64.
    pub(super) fn derivative(x: f64, f: impl Fn(f64) -> f64) -> f64 {
        let h = 1e-4;
        (8.0 * (f(x + h) - f(x - h)) - (f(x + 2.0 * h) - f(x - 2.0 * h))) / (12.0 * h)
    }

    /// Compares `gradient` with the central differences of `loss` at `at`, element by element.
    pub(super) fn check_gradient(
        what: &str,
        at: &[f64],
        gradient: &[f64],
        loss: impl Fn(&[f64]) -> f64,
    ) {
        assert_eq!(at.len(), gradient.len(), "{what}");
        for i in 0..at.len() {
            let numeric = derivative(at[i], |value| {
                let mut moved = at.to_vec();
                moved[i] = value;
                loss(&moved)
            });
            let error = (numeric - gradient[i]).abs() / (1.0 + gradient[i].abs());
            assert!(error < 1e-9, "{what}: [{i}] is {}, differences say {numeric}", gradient[i]);
        }
    }

    /// Every magnitude is at least as large as the value it belongs to.
    pub(super) fn check_magnitude(what: &str, values: &[f64], magnitudes: &[f64]) {
        assert_eq!(values.len(), magnitudes.len(), "{what}");
        for (i, (value, magnitude)) in values.iter().zip(magnitudes).enumerate() {
            let enough = magnitude * (1.0 + 1e-12) + 1e-300;
            assert!(value.abs() <= enough, "{what}: [{i}] is {value}, magnitude {magnitude}");
        }
    }

    /// Positions of six tokens in two batch entries, with extra tokens and packed sequences.
    pub(super) const PLACEMENTS: [Placement; 11] = {
        const PACKED: Option<&[usize]> = Some(&[0, 2, 2, 6]);
        const GIVEN: [i64; 12] = [3, -1, 4, 1, 5, -9, 2, 6, 5, 3, 5, 8];
        [
            (Positions::From(2), 0, None),
            (Positions::From(2), 1, PACKED),
            (Positions::PerToken(GIVEN.split_at(6).0), 0, PACKED),
            (Positions::PerBatch(&GIVEN), 2, None),
            (Positions::Grid(&[6]), 0, None),
            (Positions::Grid(&[2, 3]), 0, None),
            (Positions::Grid(&[1, 3, 2]), 0, None),
            (Positions::Grid(&[5]), 1, None),
            (Positions::Grid(&[2, 2]), 2, None),
            (Positions::Grid(&[1, 3]), 0, Some(&[0, 3, 3, 6])),
            (Positions::Grid(&[1, 2]), 1, Some(&[0, 3, 6])),
        ]
    };

    /// Positions, extra tokens and packed sequences.
    type Placement = (Positions<'static>, usize, Option<&'static [usize]>);

    /// A forward and a backward of options `O`.
    type Forward<'f, O> = &'f dyn Fn(&O, &Input) -> Vec<f64>;
    type Backward<'f, O> = &'f dyn Fn(&O, &Input, &[f64]) -> Gradients;

    /// Every gradient of one call of `rotate` or `cosine` against the differences of its forward,
    /// and every magnitude against its value. `forward` and `backward` are each a function and its
    /// magnitudes; `features` are those of o.
    pub(super) fn check_encoding<O: fmt::Debug>(
        (options, (dims, features, theta_dims)): (&O, ([usize; 4], usize, [usize; 2])),
        random: &mut Random,
        forward: [Forward<'_, O>; 2],
        backward: [Backward<'_, O>; 2],
    ) {
        let what = &format!("{options:?} {dims:?} theta {theta_dims:?}");
        let [b, n, h, d] = dims;
        let x = smooth_values(random, b * n * h * d);
        let theta = random.uniforms(theta_dims.iter().product(), 0.1, 1.0);
        let grad = random.normals(b * n * h * features);
        let input = Input { x: &x, dims, theta: &theta, theta_dims, dtype: DType::F64 };
        let [o, o_magnitude] = forward.map(|forward| forward(options, &input));
        check_magnitude(what, &o, &o_magnitude);
        let [Gradients { dx, dtheta }, magnitude] =
            backward.map(|backward| backward(options, &input, &grad));
        let loss = |input: &Input| dot(&grad, &forward[0](options, input));
        check_gradient(what, &x, &dx, |x| loss(&Input { x, ..input }));
        check_gradient(what, &theta, &dtheta, |theta| loss(&Input { theta, ..input }));
        check_magnitude(what, &dx, &magnitude.dx);
        check_magnitude(what, &dtheta, &magnitude.dtheta);
    }

    pub(super) fn assert_close(what: &str, got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len(), "{what}");
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let error = (got - expected).abs() / (1.0 + expected.abs());
            assert!(error < 1e-12, "{what}: [{i}] is {got}, expected {expected}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_values_have_their_moments() {
        let mut random = Random::new(1);
        let count = 100_000;
        let values = random.normals(count);
        let mean = values.iter().sum::<f64>() / count as f64;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / count as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        assert!(random.uniforms(count, -2.0, 3.0).iter().all(|v| (-2.0..3.0).contains(v)));
        assert!((0..1000).all(|_| random.below(3) < 3));
        assert_eq!(random.below(0), 0);
        assert_ne!(Random::new(0).bits(), Random::new(2).bits());
    }
}
