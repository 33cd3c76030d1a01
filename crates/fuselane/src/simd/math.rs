//! The elementary functions, written once over lanes.

use super::{F32Lanes, Lanes, portable64::Portable64};

/// Elementary functions of a block.
pub(crate) trait Math: Lanes {
    fn exp(self) -> Self;
    /// Sine and cosine, within 1e-6 absolute for every finite argument.
    fn sin_cos(self) -> (Self, Self);
    fn sigmoid(self) -> Self;
    fn silu(self) -> Self;
    fn tanh(self) -> Self;
    fn gelu(self) -> Self;
    fn gelu_tanh(self) -> Self;
    fn softplus(self) -> Self;
    /// The function and its derivative, sharing what they have in common.
    fn sigmoid_and_slope(self) -> (Self, Self);
    fn silu_and_slope(self) -> (Self, Self);
    fn tanh_and_slope(self) -> (Self, Self);
    fn gelu_and_slope(self) -> (Self, Self);
    fn gelu_tanh_and_slope(self) -> (Self, Self);
    fn softplus_and_slope(self) -> (Self, Self);
}

// Scalar placeholders, right but slow, until the lane versions stand here.
mod scalar {
    pub(super) fn sigmoid(x: f64) -> f64 {
        if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) }
    }
    pub(super) fn silu(x: f64) -> f64 {
        x * sigmoid(x)
    }
    pub(super) fn phi(x: f64) -> f64 {
        0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
    }
    pub(super) fn gelu(x: f64) -> f64 {
        x * phi(x)
    }
    fn inner(x: f64) -> (f64, f64) {
        let k = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
        (k * (x + 0.044715 * x * x * x), k * (1.0 + 3.0 * 0.044715 * x * x))
    }
    pub(super) fn gelu_tanh(x: f64) -> f64 {
        x * sigmoid(inner(x).0)
    }
    pub(super) fn softplus(x: f64) -> f64 {
        x.max(0.0) + (-x.abs()).exp().ln_1p()
    }
    pub(super) fn d_sigmoid(x: f64) -> f64 {
        sigmoid(x) * sigmoid(-x)
    }
    pub(super) fn d_silu(x: f64) -> f64 {
        sigmoid(x) * (1.0 + x * sigmoid(-x))
    }
    pub(super) fn d_tanh(x: f64) -> f64 {
        4.0 * d_sigmoid(2.0 * x)
    }
    pub(super) fn d_gelu(x: f64) -> f64 {
        phi(x) + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
    }
    pub(super) fn d_gelu_tanh(x: f64) -> f64 {
        let (u, du) = inner(x);
        sigmoid(u) * (1.0 + x * du * sigmoid(-u))
    }
}

macro_rules! by_scalars {
    ($self:ident, $f:expr) => {
        $self.map(|x| $f(x as f64) as _)
    };
}
macro_rules! all_by_scalars {
    () => {
        fn exp(self) -> Self {
            by_scalars!(self, f64::exp)
        }
        fn sin_cos(self) -> (Self, Self) {
            (by_scalars!(self, f64::sin), by_scalars!(self, f64::cos))
        }
        fn sigmoid(self) -> Self {
            by_scalars!(self, scalar::sigmoid)
        }
        fn silu(self) -> Self {
            by_scalars!(self, scalar::silu)
        }
        fn tanh(self) -> Self {
            by_scalars!(self, f64::tanh)
        }
        fn gelu(self) -> Self {
            by_scalars!(self, scalar::gelu)
        }
        fn gelu_tanh(self) -> Self {
            by_scalars!(self, scalar::gelu_tanh)
        }
        fn softplus(self) -> Self {
            by_scalars!(self, scalar::softplus)
        }
        fn sigmoid_and_slope(self) -> (Self, Self) {
            (self.sigmoid(), by_scalars!(self, scalar::d_sigmoid))
        }
        fn silu_and_slope(self) -> (Self, Self) {
            (self.silu(), by_scalars!(self, scalar::d_silu))
        }
        fn tanh_and_slope(self) -> (Self, Self) {
            (self.tanh(), by_scalars!(self, scalar::d_tanh))
        }
        fn gelu_and_slope(self) -> (Self, Self) {
            (self.gelu(), by_scalars!(self, scalar::d_gelu))
        }
        fn gelu_tanh_and_slope(self) -> (Self, Self) {
            (self.gelu_tanh(), by_scalars!(self, scalar::d_gelu_tanh))
        }
        fn softplus_and_slope(self) -> (Self, Self) {
            (self.softplus(), by_scalars!(self, scalar::sigmoid))
        }
    };
}
impl<L: F32Lanes> Math for L {
    all_by_scalars!();
}
impl Math for Portable64 {
    all_by_scalars!();
}
