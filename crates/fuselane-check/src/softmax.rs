//! `softmax` and `log_softmax`: every dimension of tensors of rank 1 to 4, with and without
//! `zero_masked_rows`, for plain, wide, huge and masked values; both backward forms.

use std::fmt;

use fuselane::reference::{self, Random};
use fuselane::{DType, Softmax};

use crate::Case;
use crate::backend::Runner;
pub use crate::bounds::SOFTMAX as BOUNDS;
use crate::outcome::{Expected, Outcomes};
use crate::tensor::Tensor;

/// Shapes with a dimension each around the widths of lanes (4, 8, 16) and of the chunks that sums
/// run in (32 and 1024).
const SHAPES: [&[usize]; 22] = [
    &[1],
    &[3],
    &[17],
    &[1025],
    &[4, 5],
    &[7, 1],
    &[1, 9],
    &[5, 8],
    &[3, 15],
    &[33, 16],
    &[2, 100],
    &[65, 3],
    &[2, 2100],
    &[1100, 3],
    &[3, 4, 7],
    &[2, 9, 16],
    &[2, 17, 3],
    &[3, 1, 33],
    &[2, 40, 31],
    &[2, 3, 5, 7],
    &[2, 1, 8, 15],
    &[1, 4, 17, 8],
];

/// What the elements are drawn from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Values {
    /// Normal.
    Plain,
    /// Normal times 30: most exponentials are tiny or underflow.
    Wide,
    /// Normal, around a value whose exponential overflows.
    Huge,
    /// Normal, every third minus infinity, and all of some rows.
    Masked,
}

struct Rows {
    options: Softmax,
    shape: &'static [usize],
    /// The dimension, counted from the first; `options` may count from the last.
    dim: usize,
    values: Values,
    seed: u64,
}

pub(crate) fn cases() -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for log in [false, true] {
        for zero_masked_rows in [false, true] {
            for values in [Values::Plain, Values::Wide, Values::Huge, Values::Masked] {
                for shape in SHAPES {
                    for dim in 0..shape.len() {
                        let seed = cases.len() as u64;
                        let from_last = dim as isize - shape.len() as isize;
                        let signed = if seed.is_multiple_of(2) { dim as isize } else { from_last };
                        let options = Softmax { dim: signed, log, zero_masked_rows };
                        cases.push(Box::new(Rows { options, shape, dim, values, seed }));
                    }
                }
            }
        }
    }
    cases
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { options: Softmax { dim, log, zero_masked_rows }, shape, values, .. } = self;
        let name = if *log { "log_softmax" } else { "softmax" };
        write!(f, "{name} dim={dim} shape={shape:?} zero_masked_rows={zero_masked_rows} {values:?}")
    }
}

impl Rows {
    /// (outer, n, inner)
    fn dims(&self) -> [usize; 3] {
        let (outer, inner) = (&self.shape[..self.dim], &self.shape[self.dim + 1..]);
        [outer.iter().product(), self.shape[self.dim], inner.iter().product()]
    }

    fn draw(&self, random: &mut Random) -> Vec<f64> {
        let [outer, n, inner] = self.dims();
        let mut x = random.normals(outer * n * inner);
        for (i, x) in x.iter_mut().enumerate() {
            let row = (i / (n * inner)) * inner + i % inner;
            match self.values {
                Values::Plain => {}
                Values::Wide => *x *= 30.0,
                Values::Huge => *x += 20000.0,
                Values::Masked if i % 3 == 0 || row % 4 == 1 => *x = f64::NEG_INFINITY,
                Values::Masked => {}
            }
        }
        x
    }
}

impl Case for Rows {
    fn parameter_dtypes(&self) -> Vec<DType> {
        Vec::new()
    }

    fn run(&self, dtype: DType, runners: &[Runner<'_>], outcomes: &mut Outcomes) {
        use reference::softmax::{
            backward_from_input, backward_from_input_magnitude, backward_from_output,
            backward_from_output_magnitude, forward, forward_magnitude,
        };
        let Self { options, shape, .. } = self;
        let dims = self.dims();
        let mut random = Random::new(self.seed);
        let x = Tensor::rounded(dtype, &self.draw(&mut random), shape);
        let grad = Tensor::rounded(dtype, &random.normals(dims.iter().product()), shape);
        let (x_values, grad_values) = (x.values(), grad.values());
        let truth = forward(options, &x_values, dims);
        let magnitude = forward_magnitude(options, &x_values, dims);
        let dx_truth = backward_from_input(options, &x_values, &grad_values, dims);
        let dx_magnitude = backward_from_input_magnitude(options, &x_values, &grad_values, dims);
        outcomes.run((self, &BOUNDS, dtype), "o", runners, |outcomes, call| {
            let backend = call.runner.backend;
            let mut o = Tensor::unwritten(dtype, shape);
            backend.softmax_forward(options, x.view(), o.view_mut())?;
            let expected = Expected { truth: &truth, magnitude: &magnitude };
            outcomes.compare(call, "o", &o, expected);

            let mut dx = Tensor::unwritten(dtype, shape);
            let (x, grad) = (x.view(), grad.view());
            backend.softmax_backward_from_input(options, x, grad, dx.view_mut())?;
            let expected = Expected { truth: &dx_truth, magnitude: &dx_magnitude };
            outcomes.compare(call, "dx from x", &dx, expected);

            // From the output as the forward rounded it.
            let saved = o.values();
            let truth = backward_from_output(options, &saved, &grad_values, dims);
            let magnitude = backward_from_output_magnitude(options, &saved, &grad_values, dims);
            let mut dx = Tensor::unwritten(dtype, shape);
            backend.softmax_backward(options, o.view(), grad, dx.view_mut())?;
            let expected = Expected { truth: &truth, magnitude: &magnitude };
            outcomes.compare(call, "dx from o", &dx, expected);
            Ok(())
        });
    }
}
