//! Rotary position encoding with a fused activation.

use super::angles::{Angle, Angles, Gradients, Input, axes};
use super::fused_act;
use crate::ops::rotate::{Pairing, Partial, Rotate};

/// With `x' = act(x)` and the angle A_k of pair k (see [`angles`](super::angles)):
///
/// ```text
/// o1 = x'1 cos A - x'2 sin A
/// o2 = x'1 sin A + x'2 cos A
/// ```
///
/// Features outside the rotated pairs are x'.
///
/// ```
/// use fuselane::{DType, Rotate, reference::{angles::Input, rotate}};
/// // One token at position 1 by a quarter turn: (3, 4) becomes (-4, 3).
/// let quarter = [std::f64::consts::FRAC_PI_2];
/// let input = Input {
///     x: &[0.0, 0.0, 3.0, 4.0],
///     dims: [1, 2, 1, 2],
///     theta: &quarter,
///     theta_dims: [1, 1],
///     dtype: DType::F64,
/// };
/// let o = rotate::forward(&Rotate::default(), &input);
/// assert!((o[2] + 4.0).abs() < 1e-15 && (o[3] - 3.0).abs() < 1e-15);
/// ```
///
/// # Panics
///
/// Where lengths do not match, or more pairs are asked for than x has or theta has frequencies for.
pub fn forward(options: &Rotate, input: &Input) -> Vec<f64> {
    let activated = fused_act::forward(options.act, input.x, input.dims, options.sequences);
    let mut o = activated.clone();
    for_each_pair(options, input, |[first, second], Angle { value: angle, .. }| {
        let (x1, x2) = (activated[first], activated[second]);
        o[first] = x1 * angle.cos() - x2 * angle.sin();
        o[second] = x1 * angle.sin() + x2 * angle.cos();
    });
    o
}

/// The gradients, from `grad`, the gradient of o. The rotation by -A takes it to x':
///
/// ```text
/// dx'1 =  do1 cos A + do2 sin A
/// dx'2 = -do1 sin A + do2 cos A,          dx = act backward of dx'
/// dA = -do1 o2 + do2 o1,                  dtheta = sum of coordinate * dA
/// ```
///
/// The sum runs over all angles that the frequency made: over batch and tokens, over heads if they
/// share theta, over axes and over pairs if they share the frequency.
///
/// # Panics
///
/// As [`forward`], and where `grad` has another length than x.
pub fn backward(options: &Rotate, input: &Input, grad: &[f64]) -> Gradients {
    assert_eq!(grad.len(), input.x.len(), "elements of the gradient");
    let o = forward(options, input);
    let mut dactivated = grad.to_vec();
    let mut dtheta = vec![0.0; input.theta.len()];
    for_each_pair(options, input, |[first, second], angle| {
        let (cos, sin) = (angle.value.cos(), angle.value.sin());
        let (do1, do2) = (grad[first], grad[second]);
        let (o1, o2) = (o[first], o[second]);
        dactivated[first] = do1 * cos + do2 * sin;
        dactivated[second] = -do1 * sin + do2 * cos;
        dtheta[angle.theta_index] += angle.coordinate * (-do1 * o2 + do2 * o1);
    });
    let dx = fused_act::backward(options.act, input.x, &dactivated, input.dims, options.sequences);
    Gradients { dx, dtheta }
}

/// The sum of the absolute terms of [`forward`], with every sine and cosine counted as 1: what is
/// promised of them is an absolute error, also where they are near 0.
///
/// ```text
/// |x'1| + |x'2|  for both of a pair
/// ```
pub fn forward_magnitude(options: &Rotate, input: &Input) -> Vec<f64> {
    let activated =
        fused_act::forward_magnitude(options.act, input.x, input.dims, options.sequences);
    let mut o = activated.clone();
    for_each_pair(options, input, |[first, second], _| {
        let sum = activated[first] + activated[second];
        o[first] = sum;
        o[second] = sum;
    });
    o
}

/// The sum of the absolute terms of [`backward`], counted in the same way.
///
/// ```text
/// |do1| + |do2|  for both of a pair, then as the activation's backward has it
/// sum of |coordinate| (|do1| + |do2|) (|x'1| + |x'2|)  for theta
/// ```
pub fn backward_magnitude(options: &Rotate, input: &Input, grad: &[f64]) -> Gradients {
    let Input { x, dims, .. } = *input;
    let o = forward_magnitude(options, input);
    let mut dactivated: Vec<f64> = grad.iter().map(|grad| grad.abs()).collect();
    let mut dtheta = vec![0.0; input.theta.len()];
    for_each_pair(options, input, |[first, second], angle| {
        let sum = grad[first].abs() + grad[second].abs();
        dactivated[first] = sum;
        dactivated[second] = sum;
        dtheta[angle.theta_index] += angle.coordinate.abs() * sum * o[first];
    });
    let dx = fused_act::backward_magnitude(options.act, x, &dactivated, dims, options.sequences);
    Gradients { dx, dtheta }
}

/// The number of rotated pairs for features of length `d` and a theta of `frequencies` columns.
///
/// ```
/// use fuselane::{Rotate, reference::rotate::pairs};
/// assert_eq!(pairs(&Rotate::default(), 64, 16), 16);
/// assert_eq!(pairs(&Rotate::default(), 64, 1), 32);
/// ```
pub fn pairs(options: &Rotate, d: usize, frequencies: usize) -> usize {
    let all = d / 2;
    let by_default = match frequencies {
        1 => all,
        _ => all.min(frequencies * axes(&options.positions)),
    };
    let pairs = options.pairs.unwrap_or(by_default);
    assert!(pairs <= all, "{pairs} pairs of {d} features");
    pairs
}

/// The two features of pair `k`.
fn features_of_pair(options: &Rotate, d: usize, pairs: usize, k: usize) -> [usize; 2] {
    match (options.pairing, options.partial) {
        (Pairing::Half, Partial::Pairs) => [k, k + d / 2],
        (Pairing::Half, Partial::RotaryDim) => [k, k + pairs],
        (Pairing::Interleaved, _) => [2 * k, 2 * k + 1],
    }
}

/// Calls `f` for each pair with where its two features are, in x and in o, and with its angle.
fn for_each_pair(options: &Rotate, input: &Input, mut f: impl FnMut([usize; 2], Angle)) {
    let &Rotate { ref positions, extra_tokens, sequences, .. } = options;
    let ([.., d], [_, frequencies]) = (input.dims, input.theta_dims);
    let pairs = pairs(options, d, frequencies);
    Angles::new(input, pairs, positions, extra_tokens, sequences).for_each(|angle| {
        let [row, k] = angle.at;
        let features = features_of_pair(options, d, pairs, k);
        f(features.map(|feature| row * d + feature), angle);
    });
}

#[cfg(test)]
mod tests {
    use std::f64::consts::FRAC_PI_2;

    use super::super::Random;
    use super::super::checks::{PLACEMENTS, assert_close, check_encoding, fused_acts};
    use super::*;
    use crate::dtype::DType;
    use crate::ops::act::Act;
    use crate::{FusedAct, Positions};

    /// Every gradient of one call against the differences of its forward.
    fn check(options: &Rotate, dims: [usize; 4], theta_dims: [usize; 2], random: &mut Random) {
        let dims = (dims, dims[3], theta_dims);
        check_encoding(
            (options, dims),
            random,
            [&forward, &forward_magnitude],
            [&backward, &backward_magnitude],
        );
    }

    #[test]
    fn gradients_of_all_pairings_and_positions() {
        let mut random = Random::new(5);
        let acts = [FusedAct::default(), FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence];
        for (round, (positions, extra_tokens, sequences)) in PLACEMENTS.into_iter().enumerate() {
            for pairing in [Pairing::Half, Pairing::Interleaved] {
                for partial in [Partial::Pairs, Partial::RotaryDim] {
                    for (i, theta_dims) in
                        [[1, 1], [2, 1], [1, 2], [2, 2], [1, 3], [2, 3]].into_iter().enumerate()
                    {
                        let act = acts[(round + i) % 3];
                        let pairs = [None, Some(2), Some(1)][(round + i / 2) % 3];
                        let options = Rotate {
                            layout: crate::TokenLayout::TokensHeads,
                            act,
                            positions,
                            extra_tokens,
                            sequences,
                            pairing,
                            partial,
                            pairs,
                        };
                        let d = 6 + i % 2;
                        check(&options, [2, 6, 2, d], theta_dims, &mut random);
                    }
                }
            }
        }
    }

    #[test]
    fn gradients_of_all_acts() {
        let mut random = Random::new(6);
        for act in fused_acts() {
            for sequences in [None, Some(&[0, 1, 4][..])] {
                let options = Rotate { act, sequences, ..Rotate::default() };
                check(&options, [2, 4, 2, 5], [1, 2], &mut random);
                check(&options, [1, 4, 1, 4], [1, 1], &mut random);
            }
        }
    }

    #[test]
    fn empty_shapes() {
        let mut random = Random::new(7);
        for dims in [[0, 3, 2, 4], [1, 0, 2, 4], [1, 3, 0, 4], [1, 3, 2, 0], [1, 3, 2, 1]] {
            check(&Rotate::default(), dims, [1, 1], &mut random);
        }
        check(&Rotate::default(), [1, 3, 1, 4], [1, 0], &mut random);
    }

    /// Which feature each feature of a token at a quarter turn comes from, and with which sign.
    fn quarter_turn(options: &Rotate, d: usize, theta: usize) -> Vec<f64> {
        let x: Vec<f64> = (1..=d).map(|i| i as f64).collect();
        let options = Rotate { positions: Positions::From(1), ..*options };
        let input = Input {
            x: &x,
            dims: [1, 1, 1, d],
            theta: &vec![FRAC_PI_2; theta],
            theta_dims: [1, theta],
            dtype: DType::F64,
        };
        forward(&options, &input)
    }

    #[test]
    fn known_pairs() {
        let rotate =
            |pairing, partial, pairs| Rotate { pairing, partial, pairs, ..Rotate::default() };
        use Pairing::{Half, Interleaved};
        use Partial::{Pairs, RotaryDim};
        for (options, d, theta, expected) in [
            (rotate(Half, Pairs, None), 4, 2, vec![-3., -4., 1., 2.]),
            (rotate(Interleaved, Pairs, None), 4, 2, vec![-2., 1., -4., 3.]),
            (rotate(Half, Pairs, None), 4, 1, vec![-3., -4., 1., 2.]),
            (rotate(Half, Pairs, None), 5, 2, vec![-3., -4., 1., 2., 5.]),
            (rotate(Interleaved, RotaryDim, None), 5, 2, vec![-2., 1., -4., 3., 5.]),
            (rotate(Half, Pairs, None), 6, 2, vec![-4., -5., 3., 1., 2., 6.]),
            (rotate(Half, RotaryDim, None), 6, 2, vec![-3., -4., 1., 2., 5., 6.]),
            (rotate(Interleaved, Pairs, None), 6, 2, vec![-2., 1., -4., 3., 5., 6.]),
            (rotate(Half, Pairs, Some(1)), 4, 2, vec![-3., 2., 1., 4.]),
            (rotate(Half, RotaryDim, Some(1)), 4, 1, vec![-2., 1., 3., 4.]),
            (rotate(Half, Pairs, Some(0)), 4, 1, vec![1., 2., 3., 4.]),
            (rotate(Half, Pairs, None), 4, 3, vec![-3., -4., 1., 2.]),
        ] {
            assert_close(&format!("{options:?}"), &quarter_turn(&options, d, theta), &expected);
        }
    }

    #[test]
    fn known_gradients() {
        // One token at position 2, theta pi/4, x = (1, 0): o = (0, 1).
        let input = Input {
            x: &[1.0, 0.0],
            dims: [1, 1, 1, 2],
            theta: &[FRAC_PI_2 / 2.0],
            theta_dims: [1, 1],
            dtype: DType::F64,
        };
        let options = Rotate { positions: Positions::From(2), ..Rotate::default() };
        let Gradients { dx, dtheta } = backward(&options, &input, &[3.0, 5.0]);
        assert_close("dx", &dx, &[5.0, -3.0]);
        assert_close("dtheta", &dtheta, &[2.0 * -3.0]);
    }

    #[test]
    fn an_unrotated_feature_is_activated_too() {
        let options =
            Rotate { act: FusedAct::Elementwise(Act::Relu), pairs: Some(1), ..Rotate::default() };
        let input = Input {
            x: &[-1.0, -2.0, 3.0, 4.0],
            dims: [1, 1, 1, 4],
            theta: &[1.0, 1.0],
            theta_dims: [1, 2],
            dtype: DType::F64,
        };
        assert_eq!(forward(&options, &input), [0.0, 0.0, 3.0, 4.0]);
    }

    #[test]
    fn packed_sequences_are_as_if_alone() {
        let mut random = Random::new(8);
        let (x, theta) = (random.normals(5 * 4), [0.3, 0.7]);
        let input = |x, n| Input {
            x,
            dims: [1, n, 1, 4],
            theta: &theta,
            theta_dims: [1, 2],
            dtype: DType::F32,
        };
        let alone = Rotate {
            act: FusedAct::SoftmaxSequence,
            positions: Positions::From(3),
            extra_tokens: 1,
            ..Rotate::default()
        };
        let packed = Rotate { sequences: Some(&[0, 2, 5]), ..alone };
        let parts = [forward(&alone, &input(&x[..8], 2)), forward(&alone, &input(&x[8..], 3))];
        assert_eq!(forward(&packed, &input(&x, 5)), parts.concat());
    }
}
