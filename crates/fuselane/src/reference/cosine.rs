//! Cosine encoding: features times the cosines and times the sines of position angles.

use super::angles::{Angle, Angles, Gradients, Input};
use super::fused_act;
use crate::ops::cosine::Cosine;

/// With `x' = act(x)` and d angles A for each token and head (see [`angles`](super::angles)), o of
/// shape (b, n, h, 2d) is
///
/// ```text
/// o = [ x' cos A , x' sin A ]
/// ```
///
/// ```
/// use fuselane::{Cosine, DType, reference::{angles::Input, cosine}};
/// // A third of a half turn at position 1.
/// let sixty_degrees = [std::f64::consts::FRAC_PI_3];
/// let input = Input {
///     x: &[2.0, 2.0],
///     dims: [1, 2, 1, 1],
///     theta: &sixty_degrees,
///     theta_dims: [1, 1],
///     dtype: DType::F64,
/// };
/// let o = cosine::forward(&Cosine::default(), &input);
/// assert_eq!(o[..2], [2.0, 0.0]);
/// assert!((o[2] - 1.0).abs() < 1e-15 && (o[3] - 3.0f64.sqrt()).abs() < 1e-15);
/// ```
///
/// # Panics
///
/// Where lengths do not match, or theta has too few frequencies.
pub fn forward(options: &Cosine, input: &Input) -> Vec<f64> {
    let activated = fused_act::forward(options.act, input.x, input.dims, options.sequences);
    let mut o = vec![0.0; 2 * input.x.len()];
    for_each_feature(options, input, |at, Angle { value: angle, .. }| {
        o[at.cosine] = activated[at.x] * angle.cos();
        o[at.sine] = activated[at.x] * angle.sin();
    });
    o
}

/// The gradients, from `grad`, the gradient of o.
///
/// ```text
/// dx' = do_cos cos A + do_sin sin A,               dx = act backward of dx'
/// dA = x' (-do_cos sin A + do_sin cos A),          dtheta = sum of coordinate * dA
/// ```
///
/// The sum runs over all angles that the frequency made.
///
/// # Panics
///
/// As [`forward`], and where `grad` has another length than o.
pub fn backward(options: &Cosine, input: &Input, grad: &[f64]) -> Gradients {
    assert_eq!(grad.len(), 2 * input.x.len(), "elements of the gradient");
    let activated = fused_act::forward(options.act, input.x, input.dims, options.sequences);
    let mut dactivated = vec![0.0; input.x.len()];
    let mut dtheta = vec![0.0; input.theta.len()];
    for_each_feature(options, input, |at, angle| {
        let (cos, sin) = (angle.value.cos(), angle.value.sin());
        let (do_cos, do_sin) = (grad[at.cosine], grad[at.sine]);
        dactivated[at.x] = do_cos * cos + do_sin * sin;
        let dangle = activated[at.x] * (-do_cos * sin + do_sin * cos);
        dtheta[angle.theta_index] += angle.coordinate * dangle;
    });
    let dx = fused_act::backward(options.act, input.x, &dactivated, input.dims, options.sequences);
    Gradients { dx, dtheta }
}

/// What an error of [`forward`] is measured by, with every sine and cosine counted as 1: what is
/// promised of them is an absolute error, also where they are near 0.
///
/// ```text
/// |x'|
/// ```
pub fn forward_magnitude(options: &Cosine, input: &Input) -> Vec<f64> {
    let activated =
        fused_act::forward_magnitude(options.act, input.x, input.dims, options.sequences);
    let mut o = vec![0.0; 2 * input.x.len()];
    for_each_feature(options, input, |at, _| {
        o[at.cosine] = activated[at.x];
        o[at.sine] = activated[at.x];
    });
    o
}

/// The sum of the absolute terms of [`backward`], counted in the same way.
///
/// ```text
/// |do_cos| + |do_sin|,  then as the activation's backward has it
/// sum of |coordinate x'| (|do_cos| + |do_sin|)  for theta
/// ```
pub fn backward_magnitude(options: &Cosine, input: &Input, grad: &[f64]) -> Gradients {
    let Input { x, dims, .. } = *input;
    let activated = fused_act::forward_magnitude(options.act, x, dims, options.sequences);
    let mut dactivated = vec![0.0; input.x.len()];
    let mut dtheta = vec![0.0; input.theta.len()];
    for_each_feature(options, input, |at, angle| {
        let sum = grad[at.cosine].abs() + grad[at.sine].abs();
        dactivated[at.x] = sum;
        let dangle = activated[at.x] * sum;
        dtheta[angle.theta_index] += angle.coordinate.abs() * dangle;
    });
    let dx = fused_act::backward_magnitude(options.act, x, &dactivated, dims, options.sequences);
    Gradients { dx, dtheta }
}

/// Where a feature is in x, and where its two products are in o.
struct Places {
    x: usize,
    cosine: usize,
    sine: usize,
}

/// Calls `f` for each feature with its places and its angle.
fn for_each_feature(options: &Cosine, input: &Input, mut f: impl FnMut(Places, Angle)) {
    let &Cosine { ref positions, extra_tokens, sequences, .. } = options;
    let [.., d] = input.dims;
    Angles::new(input, d, positions, extra_tokens, sequences).for_each(|angle| {
        let Angle { at: [row, j], .. } = angle;
        let (x, cosine, sine) = (row * d + j, row * 2 * d + j, row * 2 * d + d + j);
        f(Places { x, cosine, sine }, angle);
    });
}

#[cfg(test)]
mod tests {
    use std::f64::consts::FRAC_PI_2;

    use super::super::Random;
    use super::super::checks::{PLACEMENTS, assert_close, check_encoding, fused_acts};
    use super::*;
    use crate::dtype::DType;
    use crate::ops::angles::Positions;

    /// Every gradient of one call against the differences of its forward.
    fn check(options: &Cosine, dims: [usize; 4], theta_dims: [usize; 2], random: &mut Random) {
        let dims = (dims, 2 * dims[3], theta_dims);
        check_encoding(
            (options, dims),
            random,
            [&forward, &forward_magnitude],
            [&backward, &backward_magnitude],
        );
    }

    #[test]
    fn gradients_are_the_differences() {
        let mut random = Random::new(9);
        for act in fused_acts() {
            for (positions, extra_tokens, sequences) in PLACEMENTS {
                let options =
                    Cosine { act, positions, extra_tokens, sequences, ..Cosine::default() };
                let e = 3usize.div_ceil(super::super::angles::axes(&positions));
                for theta_dims in [[1, 1], [2, 1], [1, e], [2, e], [1, 3]] {
                    check(&options, [2, 6, 2, 3], theta_dims, &mut random);
                }
            }
        }
        for dims in [[0, 3, 2, 4], [1, 0, 2, 4], [1, 3, 0, 4], [1, 3, 2, 0]] {
            check(&Cosine::default(), dims, [1, 4], &mut random);
        }
    }

    #[test]
    fn known_answers_on_a_grid() {
        // A class token, then a 2 x 2 grid; 3 features from 2 frequencies, a quarter and a half
        // turn: the third feature turns by a quarter along the second axis.
        let input = Input {
            x: &[1.0, 2.0, 3.0].repeat(5),
            dims: [1, 5, 1, 3],
            theta: &[FRAC_PI_2, 2.0 * FRAC_PI_2],
            theta_dims: [1, 2],
            dtype: DType::F64,
        };
        let options =
            Cosine { positions: Positions::Grid(&[2, 2]), extra_tokens: 1, ..Cosine::default() };
        let expected = [
            [1., 2., 3., 0., 0., 0.],
            [1., 2., 3., 0., 0., 0.],
            [1., 2., 0., 0., 0., 3.],
            [0., -2., 3., 1., 0., 0.],
            [0., -2., 0., 1., 0., 3.],
        ];
        assert_close("o", &forward(&options, &input), expected.as_flattened());
    }

    #[test]
    fn known_gradients() {
        // x = 2 at position 3 and angle pi / 2: o = (0, 2).
        let input = Input {
            x: &[2.0],
            dims: [1, 1, 1, 1],
            theta: &[FRAC_PI_2 / 3.0],
            theta_dims: [1, 1],
            dtype: DType::F64,
        };
        let options = Cosine { positions: Positions::From(3), ..Cosine::default() };
        let Gradients { dx, dtheta } = backward(&options, &input, &[5.0, 7.0]);
        assert_close("dx", &dx, &[7.0]);
        assert_close("dtheta", &dtheta, &[3.0 * 2.0 * -5.0]);
    }
}
