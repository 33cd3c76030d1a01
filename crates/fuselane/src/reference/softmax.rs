//! Softmax and log-softmax over the middle dimension of (outer, n, inner).
//!
//! A row is the n elements that share their outer and inner index. `Softmax::dim` plays no part
//! here: the caller has folded the dimensions around it into outer and inner.
//!
//! A row with a NaN or with plus infinity is NaN throughout, as IEEE arithmetic has it. So is a row
//! of nothing but minus infinity, unless `zero_masked_rows` is set: then it gives zeros (minus
//! infinities for the logarithm) and zero gradients, whatever the gradient that arrives.

use crate::ops::softmax::Softmax;

/// The shape (outer, n, inner).
pub type Dims = [usize; 3];

/// ```text
/// softmax      o_s = exp(x_s - max) / sum_t exp(x_t - max)
/// log-softmax  o_s = x_s - max - ln(sum_t exp(x_t - max))
/// ```
///
/// ```
/// use fuselane::{Softmax, reference::softmax};
/// let x = [0.0, 3.0f64.ln()];
/// let o = softmax::forward(&Softmax::default(), &x, [1, 2, 1]);
/// assert!((o[0] - 0.25).abs() < 1e-15 && (o[1] - 0.75).abs() < 1e-15);
/// ```
///
/// # Panics
///
/// Where the length of `x` is not the product of `dims`.
pub fn forward(options: &Softmax, x: &[f64], dims: Dims) -> Vec<f64> {
    map_rows(dims, [x], |[x]| {
        if options.zero_masked_rows && is_masked(&x) {
            return vec![if options.log { f64::NEG_INFINITY } else { 0.0 }; x.len()];
        }
        let max = maximum(&x);
        let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
        match options.log {
            false => x.iter().map(|x| (x - max).exp() / sum).collect(),
            true => x.iter().map(|x| x - max - sum.ln()).collect(),
        }
    })
}

/// What an error of [`forward`] is measured by: `o (1 + |x - max|)` for the softmax, because
/// the rounding of `x - max` passes through the exponential, and `|o| + 1` for its logarithm,
/// because the rounding of the sum, relative to it, is absolute in its logarithm.
pub fn forward_magnitude(options: &Softmax, x: &[f64], dims: Dims) -> Vec<f64> {
    let o = forward(options, x, dims);
    map_rows(dims, [x, &o], |[x, o]| {
        let max = maximum(&x);
        let magnitude = |x: f64, o: f64| match options.log {
            false if o == 0.0 => 0.0,
            false => o * (1.0 + (x - max).abs()),
            true => o.abs() + 1.0,
        };
        x.iter().zip(&o).map(|(&x, &o)| magnitude(x, o)).collect()
    })
}

/// ```text
/// softmax      dx = o * (do - sum(o * do))
/// log-softmax  dx = do - exp(o) * sum(do)
/// ```
///
/// `o` is what [`forward`] gave.
///
/// # Panics
///
/// Where the length of `o` or `grad` is not the product of `dims`.
pub fn backward_from_output(options: &Softmax, o: &[f64], grad: &[f64], dims: Dims) -> Vec<f64> {
    map_rows(dims, [o, grad], |[o, grad]| {
        let masked = if options.log { f64::NEG_INFINITY } else { 0.0 };
        if options.zero_masked_rows && o.iter().all(|&o| o == masked) {
            return vec![0.0; o.len()];
        }
        let pairs = || o.iter().zip(&grad);
        match options.log {
            false => {
                let sum: f64 = pairs().map(|(o, grad)| o * grad).sum();
                pairs().map(|(o, grad)| o * (grad - sum)).collect()
            }
            true => {
                let sum: f64 = grad.iter().sum();
                pairs().map(|(o, grad)| grad - o.exp() * sum).collect()
            }
        }
    })
}

/// [`backward_from_output`], with o computed from x again.
///
/// # Panics
///
/// Where the length of `x` or `grad` is not the product of `dims`.
pub fn backward_from_input(options: &Softmax, x: &[f64], grad: &[f64], dims: Dims) -> Vec<f64> {
    backward_from_output(options, &forward(options, x, dims), grad, dims)
}

/// The sum of the absolute terms of [`backward_from_output`]: `o (|do| + sum(o |do|))`, and
/// `|do| + exp(o) sum |do|` for the logarithm.
pub fn backward_from_output_magnitude(
    options: &Softmax,
    o: &[f64],
    grad: &[f64],
    dims: Dims,
) -> Vec<f64> {
    map_rows(dims, [o, grad], |[o, grad]| {
        let o: Vec<f64> = o.iter().map(|o| if options.log { o.exp() } else { *o }).collect();
        backward_row_magnitude(options, &o, &o, &grad)
    })
}

/// The same for [`backward_from_input`], where o carries the error of being computed again.
pub fn backward_from_input_magnitude(
    options: &Softmax,
    x: &[f64],
    grad: &[f64],
    dims: Dims,
) -> Vec<f64> {
    let plain = Softmax { log: false, ..*options };
    let o = forward(&plain, x, dims);
    let o_magnitude = forward_magnitude(&plain, x, dims);
    map_rows(dims, [&o, &o_magnitude, grad], |[o, o_magnitude, grad]| {
        backward_row_magnitude(options, &o, &o_magnitude, &grad)
    })
}

/// The absolute terms of one row's backward, for a softmax `o` that is known to within a few ulp of
/// `o_magnitude`.
fn backward_row_magnitude(
    options: &Softmax,
    o: &[f64],
    o_magnitude: &[f64],
    grad: &[f64],
) -> Vec<f64> {
    let sum_of = |o: &[f64]| o.iter().zip(grad).map(|(o, grad)| o * grad.abs()).sum::<f64>();
    let (sum, sum_magnitude) = match options.log {
        false => (sum_of(o), sum_of(o_magnitude)),
        true => {
            let sum = grad.iter().map(|grad| grad.abs()).sum();
            (sum, sum)
        }
    };
    (0..o.len())
        .map(|s| match options.log {
            false => o_magnitude[s] * (grad[s].abs() + sum) + o[s] * (sum_magnitude - sum),
            true => grad[s].abs() + o_magnitude[s] * sum,
        })
        .collect()
}

/// Nothing but minus infinity.
fn is_masked(row: &[f64]) -> bool {
    row.iter().all(|&x| x == f64::NEG_INFINITY)
}

/// The largest element; a NaN is passed over here and enters by the sum.
fn maximum(row: &[f64]) -> f64 {
    row.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// Runs `f` on every row of the inputs and puts what it gives in the same place.
fn map_rows<const N: usize>(
    [outer, n, inner]: Dims,
    inputs: [&[f64]; N],
    f: impl Fn([Vec<f64>; N]) -> Vec<f64>,
) -> Vec<f64> {
    for input in inputs {
        assert_eq!(input.len(), outer * n * inner, "elements, expected {outer} * {n} * {inner}");
    }
    let mut output = vec![0.0; outer * n * inner];
    for a in 0..outer {
        for c in 0..inner {
            let at = |s: usize| (a * n + s) * inner + c;
            let rows = inputs.map(|input| (0..n).map(|s| input[at(s)]).collect());
            for (s, value) in f(rows).into_iter().enumerate() {
                output[at(s)] = value;
            }
        }
    }
    output
}

#[cfg(test)]
mod tests {
    use super::super::Random;
    use super::super::checks::{assert_close, check_gradient, check_magnitude, dot};
    use super::*;

    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;
    const PLAIN: Softmax = Softmax { dim: -1, log: false, zero_masked_rows: false };
    const LOG: Softmax = Softmax { log: true, ..PLAIN };

    #[test]
    fn gradients_are_the_differences() {
        let mut random = Random::new(2);
        for (log, zero_masked_rows) in [(false, false), (false, true), (true, false), (true, true)]
        {
            let options = Softmax { dim: -1, log, zero_masked_rows };
            for dims in [[1, 1, 1], [3, 5, 1], [1, 4, 3], [2, 3, 4], [2, 0, 3], [0, 4, 1]] {
                let count = dims.iter().product();
                let (x, grad) = (random.normals(count), random.normals(count));
                let o = forward(&options, &x, dims);
                let dx = backward_from_input(&options, &x, &grad, dims);
                let what = format!("{options:?} {dims:?}");
                assert_eq!(dx, backward_from_output(&options, &o, &grad, dims), "{what}");
                check_gradient(&what, &x, &dx, |x| dot(&grad, &forward(&options, x, dims)));
                check_magnitude(&what, &o, &forward_magnitude(&options, &x, dims));
                let from_output = backward_from_output_magnitude(&options, &o, &grad, dims);
                let from_input = backward_from_input_magnitude(&options, &x, &grad, dims);
                check_magnitude(&what, &dx, &from_output);
                check_magnitude(&what, &from_output, &from_input);
            }
        }
    }

    #[test]
    fn known_answers() {
        // exp(x) = 1, 2, 5 over the middle dimension, with a second row beside it.
        let x = [0.0, 7.0, 2f64.ln(), 7.0, 5f64.ln(), 7.0];
        let third = 1.0 / 3.0;
        let o = forward(&PLAIN, &x, [1, 3, 2]);
        assert_close("o", &o, &[0.125, third, 0.25, third, 0.625, third]);
        let log: Vec<f64> = o.iter().map(|o| o.ln()).collect();
        assert_close("log", &forward(&LOG, &x, [1, 3, 2]), &log);
        // do = 8, 0, 0: sum(o do) = 1, dx = o (do - 1).
        let dx = backward_from_output(&PLAIN, &[0.125, 0.25, 0.625], &[8.0, 0.0, 0.0], [1, 3, 1]);
        assert_close("dx", &dx, &[0.875, -0.25, -0.625]);
        let dx = backward_from_output(&LOG, &log[..1], &[5.0], [1, 1, 1]);
        assert_close("dx of the logarithm", &dx, &[5.0 - 0.125 * 5.0]);
        // Large values do not overflow.
        assert_close("large", &forward(&PLAIN, &[1e4, 1e4], [1, 2, 1]), &[0.5, 0.5]);
    }

    #[test]
    fn masks_infinities_and_nan() {
        let all = |values: &[f64], is: fn(f64) -> bool| values.iter().all(|&v| is(v));
        for log in [false, true] {
            let (open, zero) =
                (Softmax { log, ..PLAIN }, Softmax { log, zero_masked_rows: true, ..PLAIN });
            for options in [open, zero] {
                assert!(all(&forward(&options, &[0.0, NAN, 1.0], [1, 3, 1]), f64::is_nan));
                assert!(all(&forward(&options, &[0.0, INF, 1.0], [1, 3, 1]), f64::is_nan));
                assert!(all(&forward(&options, &[NAN, -INF], [1, 2, 1]), f64::is_nan));
                let partly = forward(&options, &[-INF, 2.0], [1, 2, 1]);
                assert_eq!(partly, if log { [-INF, 0.0] } else { [0.0, 1.0] });
            }
            assert!(all(&forward(&open, &[-INF; 2], [1, 2, 1]), f64::is_nan));
            let o = forward(&zero, &[-INF; 2], [1, 2, 1]);
            assert_eq!(o, [if log { -INF } else { 0.0 }; 2]);
            let grad = [NAN, INF];
            assert_eq!(backward_from_output(&zero, &o, &grad, [1, 2, 1]), [0.0; 2]);
            assert_eq!(backward_from_input(&zero, &[-INF; 2], &grad, [1, 2, 1]), [0.0; 2]);
        }
    }
}
