//! The activation that `rotate` and `cosine` apply to their input, x of shape (b, n, h, d).
//!
//! A softmax over the features runs over d. A softmax over the sequence runs over n, for each
//! batch entry, head and feature, and over each packed sequence by itself.

use super::{act, softmax};
use crate::ops::act::Act;
use crate::ops::encode::FusedAct;
use crate::ops::softmax::Softmax;

/// `x' = act(x)`. `sequences` are the ends of packed sequences, as in `cu_seqlens`.
///
/// # Panics
///
/// Where the length of `x` is not the product of `dims`, or `sequences` does not rise from 0 to n.
pub fn forward(act: FusedAct, x: &[f64], dims: [usize; 4], sequences: Sequences) -> Vec<f64> {
    let softmax = |[x]: [&[f64]; 1], dims| softmax::forward(&Softmax::default(), x, dims);
    apply(act, [x], dims, sequences, |act, [x]| act::forward(act, x), softmax)
}

/// What an error of [`forward`] is measured by: `|x'|`, or [`softmax::forward_magnitude`].
pub fn forward_magnitude(
    act: FusedAct,
    x: &[f64],
    dims: [usize; 4],
    sequences: Sequences,
) -> Vec<f64> {
    let softmax = |[x]: [&[f64]; 1], dims| softmax::forward_magnitude(&Softmax::default(), x, dims);
    apply(act, [x], dims, sequences, |act, [x]| act::forward(act, x).abs(), softmax)
}

/// dx from `grad`, the gradient of x'.
///
/// # Panics
///
/// Where lengths do not match, as in [`forward`].
pub fn backward(
    act: FusedAct,
    x: &[f64],
    grad: &[f64],
    dims: [usize; 4],
    sequences: Sequences,
) -> Vec<f64> {
    let elementwise = |act, [x, grad]: [f64; 2]| act::backward(act, x, grad);
    apply(act, [x, grad], dims, sequences, elementwise, |[x, grad], dims| {
        softmax::backward_from_input(&Softmax::default(), x, grad, dims)
    })
}

/// The sum of the absolute terms of [`backward`], for a gradient that is itself a sum of terms of
/// `grad_magnitude`.
pub fn backward_magnitude(
    act: FusedAct,
    x: &[f64],
    grad_magnitude: &[f64],
    dims: [usize; 4],
    sequences: Sequences,
) -> Vec<f64> {
    let elementwise = |act, [x, grad]: [f64; 2]| grad * act::slope_magnitude(act, x);
    apply(act, [x, grad_magnitude], dims, sequences, elementwise, |[x, grad], dims| {
        softmax::backward_from_input_magnitude(&Softmax::default(), x, grad, dims)
    })
}

/// The ends of packed sequences, if there are any.
type Sequences<'a> = Option<&'a [usize]>;

/// Runs `elementwise` on each element of the inputs, or `softmax` on each part of them that a
/// softmax sees as a whole, with its (outer, n, inner).
fn apply<const N: usize>(
    act: FusedAct,
    inputs: [&[f64]; N],
    [b, n, h, d]: [usize; 4],
    sequences: Sequences,
    elementwise: impl Fn(Act, [f64; N]) -> f64,
    softmax: impl Fn([&[f64]; N], softmax::Dims) -> Vec<f64>,
) -> Vec<f64> {
    let len = inputs[0].len();
    assert!(inputs.iter().all(|input| input.len() == len), "elements of x and of the gradient");
    match act {
        FusedAct::Elementwise(act) => {
            (0..len).map(|i| elementwise(act, inputs.map(|input| input[i]))).collect()
        }
        FusedAct::SoftmaxFeatures => softmax(inputs, [b * n * h, d, 1]),
        FusedAct::SoftmaxSequence => {
            let mut output = Vec::with_capacity(len);
            for batch in 0..b {
                for (start, end) in sequence_bounds(sequences, n) {
                    let token = |t: usize| (batch * n + t) * h * d;
                    let part = inputs.map(|input| &input[token(start)..token(end)]);
                    output.extend(softmax(part, [1, end - start, h * d]));
                }
            }
            output
        }
    }
}

/// The first token of each packed sequence and the one after its last; without packing, all n
/// tokens are one sequence.
///
/// # Panics
///
/// Where `sequences` does not rise from 0 to n.
///
/// ```
/// use fuselane::reference::fused_act::sequence_bounds;
/// assert_eq!(sequence_bounds(Some(&[0, 2, 5]), 5), [(0, 2), (2, 5)]);
/// assert_eq!(sequence_bounds(None, 5), [(0, 5)]);
/// ```
pub fn sequence_bounds(sequences: Option<&[usize]>, n: usize) -> Vec<(usize, usize)> {
    let Some(ends) = sequences else { return vec![(0, n)] };
    assert_eq!(ends.first(), Some(&0), "sequences start with 0");
    assert_eq!(ends.last(), Some(&n), "sequences end with n");
    assert!(ends.is_sorted(), "sequences never fall");
    ends.windows(2).map(|ends| (ends[0], ends[1])).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Random;
    use super::super::checks::{
        assert_close, check_gradient, check_magnitude, dot, fused_acts, smooth_values,
    };
    use super::*;

    #[test]
    fn gradients_are_the_differences() {
        let mut random = Random::new(3);
        let dims = [2, 5, 2, 3];
        for act in fused_acts() {
            for sequences in [None, Some(&[0, 2, 2, 5][..])] {
                let x = smooth_values(&mut random, 60);
                let grad = random.normals(60);
                let what = format!("{act:?} {sequences:?}");
                let dx = backward(act, &x, &grad, dims, sequences);
                let loss = |x: &[f64]| dot(&grad, &forward(act, x, dims, sequences));
                check_gradient(&what, &x, &dx, loss);
                let magnitude = forward_magnitude(act, &x, dims, sequences);
                check_magnitude(&what, &forward(act, &x, dims, sequences), &magnitude);
                let grad: Vec<f64> = grad.iter().map(|grad| grad.abs()).collect();
                let magnitude = backward_magnitude(act, &x, &grad, dims, sequences);
                check_magnitude(&what, &dx, &magnitude);
            }
        }
    }

    #[test]
    fn softmax_sums_to_one_where_it_should() {
        let [b, n, h, d] = [2, 4, 3, 2];
        let x = Random::new(4).normals(b * n * h * d);
        let ones = vec![1.0; x.len()];
        let o = forward(FusedAct::SoftmaxFeatures, &x, [b, n, h, d], Some(&[0, 1, 4]));
        assert_close("token and head", &[o[..d].iter().sum()], &[1.0]);
        assert!((dot(&o, &ones) - (b * n * h) as f64).abs() < 1e-12);
        let o = forward(FusedAct::SoftmaxSequence, &x, [b, n, h, d], Some(&[0, 1, 4]));
        // A sequence of one token is 1 throughout; the other sums to 1 for each feature.
        assert_eq!(o[..h * d], vec![1.0; h * d]);
        for feature in 0..h * d {
            let sum = (1..4).map(|t| o[t * h * d + feature]).sum();
            assert_close("feature", &[sum], &[1.0]);
        }
    }
}
