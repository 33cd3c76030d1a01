//! The cosines and sines of a position encoding's angles as tensors in the layout of x, without
//! its batch: made of primitives, for providers that multiply with them.

use fuselane::{Buffer, DType, View};

use super::primitives::{Like, Operand, coordinates, cos, mul, positions, repeat_columns, sin};
use crate::case::Operator;
use crate::protocol::Job;
use crate::worker::Fault;

/// In f32.
pub(super) struct Tables {
    pub(super) cos: Buffer,
    pub(super) sin: Buffer,
}

impl Tables {
    /// Of (n, heads, d / 2) for rotate, of (heads, tokens, d) for cosine. `shape` is that of x.
    pub(super) fn new(job: &Job, shape: &[usize], theta: View<'_>) -> Result<Self, Fault> {
        match (job.operator, shape) {
            (Operator::Rotate { .. }, &[_, n, heads, d]) => {
                let positions = positions(n)?;
                let tokens = Operand::numbers(positions.view(), heads);
                Self::of_product(&[n, heads, d / 2], tokens, Operand::rows(theta, 1))
            }
            (Operator::Cosine { axes, extra, .. }, &[_, heads, tokens, d]) => {
                let (grid, per_axis) = (vec![job.n; axes as usize], theta.shape()[1]);
                let coordinates = coordinates(&grid, extra, per_axis, d)?;
                let theta = repeat_columns(theta, d)?;
                let coordinates = Operand::rows(coordinates.view(), 1);
                let theta = Operand::rows(theta.view(), tokens);
                Self::of_product(&[heads, tokens, d], coordinates, theta)
            }
            _ => Err(Fault::Failed("not an encoding of four dimensions".to_owned())),
        }
    }

    fn of_product(shape: &[usize], a: Operand<'_>, b: Operand<'_>) -> Result<Self, Fault> {
        let like = Like { dtype: DType::F32, shape };
        let angles = mul(like, a, b)?;
        Ok(Self { cos: cos(like, &angles)?, sin: sin(like, &angles)? })
    }
}
