//! Elementwise activations.

use super::{Edge, Op, act_of, check, output_like};
use crate::fault::Fault;
use crate::threads;

const NAME: &str = "act";

pub(super) const FORWARD: Op = Op { schema: "act(Tensor x, int act) -> Tensor", run: forward };

/// From x, or from the output of the forward.
pub(super) const BACKWARD: Op = Op {
    schema: "act_backward(Tensor grad, Tensor x, int act, bool from_output) -> Tensor",
    run: backward,
};

fn forward(edge: &mut dyn Edge) -> Result<(), Fault> {
    let (x, act) = (edge.tensor(), edge.int());
    let act = act_of(NAME, "act", act)?;
    let o = output_like(edge, check(NAME, "x", &x)?, &x)?;
    threads::run(
        2 * x.bytes(),
        || Ok(act.forward_into(x.view(NAME, "x")?, o.view_mut(NAME, "o")?)?),
    )
}

fn backward(edge: &mut dyn Edge) -> Result<(), Fault> {
    let (grad, x, act, from_output) = (edge.tensor(), edge.tensor(), edge.int(), edge.flag());
    let act = act_of(NAME, "act", act)?;
    let dx = output_like(edge, check(NAME, "x", &x)?, &x)?;
    threads::run(3 * x.bytes(), || {
        let (x, grad) = (x.view(NAME, "x")?, grad.view(NAME, "grad")?);
        let dx = dx.view_mut(NAME, "dx")?;
        match from_output {
            true => act.backward_from_output_into(x, grad, dx)?,
            false => act.backward_into(x, grad, dx)?,
        }
        Ok(())
    })
}
