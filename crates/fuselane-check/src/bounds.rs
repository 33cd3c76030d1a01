//! What is promised of each output of each operator, as the operators' pages state it.

use std::fmt;

use fuselane::DType;

/// K of one output: `|got - truth| <= 1/2 ulp of the output + K ulp of the arithmetic`, as the
/// head of this crate has it.
///
/// Its `Display` is its row in the operator's page.
///
/// ```
/// let bound = fuselane_check::Bound { output: "dx", f32: 2.5, f16: 2.5, bf16: 2.5, f64: 4.0 };
/// assert_eq!(bound.to_string(), "| `dx` | 2.5 | 2.5 | 2.5 | 4 |");
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// The output it is for.
    pub output: &'static str,
    /// K for f32 activations, in ulp of f32.
    pub f32: f64,
    /// K for f16 activations, in ulp of f32, of which 8,192 are one of f16: short forms of some
    /// functions are exact enough for it.
    pub f16: f64,
    /// K for bf16 activations, in ulp of f32, of which 65,536 are one of bf16.
    pub bf16: f64,
    /// K for f64 activations, in ulp of f64; it covers the error of the reference too.
    pub f64: f64,
}

impl Bound {
    pub(crate) fn k(&self, dtype: DType) -> f64 {
        match dtype {
            DType::F64 => self.f64,
            DType::F16 => self.f16,
            DType::BF16 => self.bf16,
            _ => self.f32,
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { output, f32, f16, bf16, f64 } = self;
        write!(f, "| `{output}` | {f32} | {f16} | {bf16} | {f64} |")
    }
}

/// What is promised of each activation and of its gradient, in the order of
/// [`Act::ALL`](fuselane::Act::ALL). The terms of a gradient are those of the slope: silu and both
/// gelus have two of them, which cancel where the function turns around.
///
/// The gradient of `relu_squared` is doubled after its product was rounded, which counts below the
/// smallest normal number only.
///
/// In f64, `gelu_tanh` has the exponential of a large rounded number in its tails, here as in the
/// reference.
pub const ACT: [Bound; 18] = [
    Bound { output: "o of none", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "dx of none", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "o of relu", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "dx of relu", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "o of sigmoid", f32: 2.5, f16: 2000.0, bf16: 10000.0, f64: 1.0 },
    Bound { output: "dx of sigmoid", f32: 3.5, f16: 2000.0, bf16: 13000.0, f64: 1.0 },
    Bound { output: "o of silu", f32: 2.5, f16: 2000.0, bf16: 10000.0, f64: 1.0 },
    Bound { output: "dx of silu", f32: 4.5, f16: 2000.0, bf16: 12000.0, f64: 3.5 },
    Bound { output: "o of tanh", f32: 2.5, f16: 2.5, bf16: 2.5, f64: 1.0 },
    Bound { output: "dx of tanh", f32: 4.5, f16: 4.5, bf16: 4.5, f64: 4.5 },
    Bound { output: "o of gelu", f32: 7.0, f16: 7.0, bf16: 7.0, f64: 1.0 },
    Bound { output: "dx of gelu", f32: 5.0, f16: 5.0, bf16: 5.0, f64: 650.0 },
    Bound { output: "o of gelu_tanh", f32: 2.5, f16: 2.5, bf16: 2.5, f64: 2500.0 },
    Bound { output: "dx of gelu_tanh", f32: 6.0, f16: 6.0, bf16: 6.0, f64: 4000.0 },
    Bound { output: "o of softplus", f32: 3.5, f16: 3.5, bf16: 3.5, f64: 1.0 },
    Bound { output: "dx of softplus", f32: 3.0, f16: 3.0, bf16: 3.0, f64: 1.0 },
    Bound { output: "o of relu_squared", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "dx of relu_squared", f32: 0.5, f16: 0.5, bf16: 0.5, f64: 0.5 },
];

/// What is promised of both forms, checked for rows of up to 2,100 elements; sums run in chunks,
/// so that K should not grow much beyond. The terms of `o` are o (1 + |x - max|), since the rounding of x - max passes through the
/// exponential, and |o| + 1 for the logarithm. Those of the gradients are both terms of their
/// formula; `dx from x` counts o as `o` does.
pub const SOFTMAX: [Bound; 3] = [
    Bound { output: "o", f32: 4.5, f16: 1500.0, bf16: 7500.0, f64: 18.0 },
    Bound { output: "dx from o", f32: 3.0, f16: 3.0, bf16: 3.0, f64: 4.5 },
    Bound { output: "dx from x", f32: 4.0, f16: 4.0, bf16: 4.0, f64: 5.0 },
];

/// What is promised of the normalization, checked for groups of up to 1,100 features; sums run in
/// chunks, so that K should not grow much beyond. The terms of the centered p are |p| and mean |p|, those of 1 + weight 1 and
/// |weight|; those of rstd are what an error of p does to it; all others are those of the formulas. `residual_out` is exact but for its rounding.
///
/// Sigmoid and silu of a bf16 gate are short forms, right to 2^-10; what comes of them has names of
/// its own here.
pub const NORMALIZE: [Bound; 17] = [
    Bound { output: "o", f32: 7.5, f16: 7.5, bf16: 7.5, f64: 80.0 },
    Bound { output: "residual_out", f32: 0.0, f16: 0.0, bf16: 0.0, f64: 0.0 },
    Bound { output: "rstd", f32: 2.0, f16: 2.0, bf16: 2.0, f64: 25.0 },
    Bound { output: "mean", f32: 4.5, f16: 4.5, bf16: 4.5, f64: 20.0 },
    Bound { output: "dx", f32: 8.5, f16: 8.5, bf16: 8.5, f64: 48.0 },
    Bound { output: "dresidual", f32: 8.5, f16: 8.5, bf16: 8.5, f64: 48.0 },
    Bound { output: "dgate", f32: 8.5, f16: 8.5, bf16: 8.5, f64: 48.0 },
    Bound { output: "dweight", f32: 6.5, f16: 6.5, bf16: 6.5, f64: 20.0 },
    Bound { output: "dbias", f32: 4.5, f16: 4.5, bf16: 4.5, f64: 5.0 },
    Bound { output: "o of sigmoid, silu", f32: 7.5, f16: 2500.0, bf16: 11000.0, f64: 80.0 },
    Bound { output: "rstd of sigmoid, silu", f32: 2.0, f16: 2500.0, bf16: 5000.0, f64: 25.0 },
    Bound { output: "mean of sigmoid, silu", f32: 4.5, f16: 2500.0, bf16: 12000.0, f64: 20.0 },
    Bound { output: "dx of sigmoid, silu", f32: 8.5, f16: 2500.0, bf16: 11000.0, f64: 48.0 },
    Bound { output: "dresidual of sigmoid, silu", f32: 8.5, f16: 2500.0, bf16: 11000.0, f64: 48.0 },
    Bound { output: "dgate of sigmoid, silu", f32: 8.5, f16: 2500.0, bf16: 14000.0, f64: 48.0 },
    Bound { output: "dweight of sigmoid, silu", f32: 6.5, f16: 2500.0, bf16: 8500.0, f64: 20.0 },
    Bound { output: "dbias of sigmoid, silu", f32: 4.5, f16: 2500.0, bf16: 8500.0, f64: 5.0 },
];

/// What is promised of the rotation. The terms of o and dx are both elements of their pair, each
/// times 1 for the sine or the cosine, after the terms of the activation; those of dtheta are the
/// products of the coordinate, both gradients and both elements of a pair. Activations with short
/// forms (`encoding::has_short_forms`) have bounds of their own.
pub const ROTATE: [Bound; 5] = [
    Bound { output: "o", f32: 7.5, f16: 7.5, bf16: 7.5, f64: 25.0 },
    Bound { output: "dx", f32: 5.5, f16: 5.5, bf16: 5.5, f64: 20.0 },
    Bound { output: "o of short forms", f32: 7.5, f16: 2500.0, bf16: 9000.0, f64: 25.0 },
    Bound { output: "dx of short forms", f32: 5.5, f16: 2500.0, bf16: 14000.0, f64: 20.0 },
    Bound { output: "dtheta", f32: 3.5, f16: 3.5, bf16: 3.5, f64: 4.0 },
];

/// What is promised of the encoding. The terms of o are the element times 1 for the sine or the
/// cosine, after the terms of the activation; those of dx both gradients of the element, those of
/// dtheta the products of the coordinate, the element and both its gradients. Activations with short
/// forms (`encoding::has_short_forms`) have bounds of their own.
pub const COSINE: [Bound; 5] = [
    Bound { output: "o", f32: 6.5, f16: 6.5, bf16: 6.5, f64: 20.0 },
    Bound { output: "dx", f32: 4.5, f16: 4.5, bf16: 4.5, f64: 14.0 },
    Bound { output: "o of short forms", f32: 6.5, f16: 2500.0, bf16: 9000.0, f64: 20.0 },
    Bound { output: "dx of short forms", f32: 4.5, f16: 2500.0, bf16: 10000.0, f64: 14.0 },
    Bound { output: "dtheta", f32: 3.5, f16: 3.5, bf16: 3.5, f64: 3.0 },
];
