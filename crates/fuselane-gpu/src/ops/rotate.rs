//! Rotary position encoding with a fused activation; see [`fuselane::Rotate`].

use fuselane::{Result, Rotate};

use super::tokens::{self, Call, Gradients};
use crate::angles::Angles;
use crate::launch::{one_device, result_like};
use crate::tensor::Tensor;

const NAME: &str = "rotate";

/// The tensors of a backward call. Outputs that are `None` are not computed.
#[derive(Debug)]
pub struct RotateBackward<'a> {
    /// What the forward got; needed where there is an activation, and for `dtheta`.
    pub x: Option<&'a Tensor>,
    /// The gradient that arrives at the output.
    pub grad: &'a Tensor,
    /// The frequencies or the table that the forward used.
    pub angles: Angles<'a>,
    /// The gradient of x.
    pub dx: Option<&'a mut Tensor>,
    /// The gradient of theta, in theta's shape.
    pub dtheta: Option<&'a mut Tensor>,
}

/// Writes the rotated `x` into `o`.
pub fn forward_into<'a>(
    options: &Rotate<'_>,
    x: &Tensor,
    angles: impl Into<Angles<'a>>,
    o: &mut Tensor,
) -> Result<()> {
    let angles = angles.into();
    one_device(NAME, [("x", Some(x)), angles.tensor(), ("o", Some(o))])?;
    let encoding = options.check_forward(x.view()?, angles.checked()?, o.view_mut()?)?;
    tokens::forward(&call(options, encoding, angles), x, o)
}

/// The rotated `x` in a new tensor.
pub fn forward<'a>(
    options: &Rotate<'_>,
    x: &Tensor,
    angles: impl Into<Angles<'a>>,
) -> Result<Tensor> {
    let mut o = result_like(NAME, "x", x, x.shape())?;
    forward_into(options, x, angles, &mut o)?;
    Ok(o)
}

/// Writes the gradients that are asked for.
pub fn backward_into(options: &Rotate<'_>, backward: RotateBackward<'_>) -> Result<()> {
    let RotateBackward { x, grad, angles, dx, dtheta } = backward;
    let (dx, dtheta) = (dx.as_deref(), dtheta.as_deref());
    one_device(
        NAME,
        [("grad", Some(grad)), ("x", x), angles.tensor(), ("dx", dx), ("dtheta", dtheta)],
    )?;
    let encoding = options.check_backward(fuselane::RotateBackward {
        x: x.map(Tensor::view).transpose()?,
        grad: grad.view()?,
        angles: angles.checked()?,
        dx: dx.map(Tensor::view_mut).transpose()?,
        dtheta: dtheta.map(Tensor::view_mut).transpose()?,
    })?;
    tokens::backward(&call(options, encoding, angles), Gradients { x, grad, dx, dtheta })
}

/// `dx` of [`backward_into`] in a new tensor.
pub fn backward<'a>(
    options: &Rotate<'_>,
    x: Option<&'a Tensor>,
    grad: &'a Tensor,
    angles: impl Into<Angles<'a>>,
) -> Result<Tensor> {
    let mut dx = result_like(NAME, "grad", grad, grad.shape())?;
    let angles = angles.into();
    backward_into(options, RotateBackward { x, grad, angles, dx: Some(&mut dx), dtheta: None })?;
    Ok(dx)
}

fn call<'a>(
    options: &Rotate<'a>,
    encoding: fuselane::plan::Encoding,
    angles: Angles<'a>,
) -> Call<'a> {
    let Rotate { act, layout, positions, extra_tokens, sequences, .. } = *options;
    Call { operator: NAME, encoding, act, layout, positions, extra_tokens, sequences, angles }
}
