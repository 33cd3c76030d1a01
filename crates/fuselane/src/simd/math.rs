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
