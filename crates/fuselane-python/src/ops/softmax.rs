//! Softmax and its logarithm.

use fuselane::Softmax;

use super::{Edge, Op, check, output_like};
use crate::fault::Fault;
use crate::threads;

const NAME: &str = "softmax";

pub(super) const FORWARD: Op = Op {
    schema: "softmax(Tensor x, int dim, bool log, bool zero_masked_rows) -> Tensor",
    run: forward,
};

/// From the output of the forward.
pub(super) const BACKWARD: Op = Op {
    schema: "softmax_backward(Tensor grad, Tensor o, int dim, bool log, bool zero_masked_rows) -> \
             Tensor",
    run: backward,
};

fn options(edge: &mut dyn Edge) -> Softmax {
    let (dim, log, zero_masked_rows) = (edge.int() as isize, edge.flag(), edge.flag());
    Softmax { dim, log, zero_masked_rows }
}

fn forward(edge: &mut dyn Edge) -> Result<(), Fault> {
    let (x, softmax) = (edge.tensor(), options(edge));
    let o = output_like(edge, check(NAME, "x", &x)?, &x)?;
    threads::run(2 * x.bytes(), || {
        Ok(softmax.forward_into(x.view(NAME, "x")?, o.view_mut(NAME, "o")?)?)
    })
}

fn backward(edge: &mut dyn Edge) -> Result<(), Fault> {
    let (grad, o, softmax) = (edge.tensor(), edge.tensor(), options(edge));
    let dx = output_like(edge, check(NAME, "o", &o)?, &o)?;
    threads::run(3 * o.bytes(), || {
        let (o, grad) = (o.view(NAME, "o")?, grad.view(NAME, "grad")?);
        Ok(softmax.backward_into(o, grad, dx.view_mut(NAME, "dx")?)?)
    })
}
