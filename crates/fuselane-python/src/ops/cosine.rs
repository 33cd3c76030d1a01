//! Cosine encoding with a fused activation.

use fuselane::{Cosine, CosineBackward, RotateBackward};

use super::angles::{Arguments, Checked};
use super::{Edge, Op, check, no_output, output, output_if};
use crate::fault::Fault;
use crate::raw::Raw;
use crate::threads;

const NAME: &str = "cosine";

pub(super) const FORWARD: Op = Op {
    schema: "cosine(Tensor x, Tensor theta, Tensor? positions, Tensor? cu_seqlens, int table, \
             int act, SymInt offset, SymInt[] grid, SymInt extra_tokens, bool heads_first) -> \
             Tensor",
    run: forward,
};

/// Gradients of x and theta, as far as they are asked for.
pub(super) const BACKWARD: Op = Op {
    schema: "cosine_backward(Tensor grad, Tensor? x, Tensor theta, Tensor? positions, \
             Tensor? cu_seqlens, int table, int act, SymInt offset, SymInt[] grid, \
             SymInt extra_tokens, bool heads_first, bool dx, bool dtheta) -> (Tensor, Tensor)",
    run: backward,
};

fn options(call: &Checked) -> Cosine<'_> {
    Cosine {
        act: call.act,
        layout: call.layout,
        positions: call.positions(),
        extra_tokens: call.extra_tokens,
        sequences: call.sequences(),
    }
}

/// The shape of a tensor with another number of features.
fn with_features(tensor: &Raw, features: impl FnOnce(usize) -> usize) -> Result<Vec<usize>, Fault> {
    let mut shape = tensor.shape().to_vec();
    match shape.last_mut() {
        Some(last) => *last = features(*last),
        None => return Err(Fault::value(format!("{NAME}: x is a scalar, expected 4 dimensions"))),
    }
    Ok(shape)
}

fn forward(edge: &mut dyn Edge) -> Result<(), Fault> {
    let (x, arguments) = (edge.tensor(), Arguments::take(edge));
    let call = arguments.check(NAME)?;
    let dtype = check(NAME, "x", &x)?;
    let o = output(edge, dtype, &with_features(&x, |d| d.saturating_mul(2))?)?;
    threads::run(3 * x.bytes(), || {
        let (x, angles) = (x.view(NAME, "x")?, call.angles(NAME)?);
        Ok(options(&call).forward_into(x, angles, o.view_mut(NAME, "o")?)?)
    })
}

fn backward(edge: &mut dyn Edge) -> Result<(), Fault> {
    let (grad, x, arguments) = (edge.tensor(), edge.optional(), Arguments::take(edge));
    let wanted = [edge.flag(), edge.flag()];
    let call = arguments.check(NAME)?;
    let dtype = check(NAME, "grad", &grad)?;
    let theta_dtype = call.theta.dtype(NAME, "theta")?;
    let dx = match wanted[0] {
        true => Some(output(edge, dtype, &with_features(&grad, |width| width / 2)?)?),
        false => no_output(edge, dtype)?,
    };
    let dtheta = output_if(edge, wanted[1], theta_dtype, &call.theta)?;
    threads::run(2 * grad.bytes(), || {
        let operands = call.backward(NAME, (&grad, &x), (&dx, &dtheta))?;
        let RotateBackward { x, grad, angles, dx, dtheta } = operands;
        Ok(options(&call).backward_into(CosineBackward { x, grad, angles, dx, dtheta })?)
    })
}
