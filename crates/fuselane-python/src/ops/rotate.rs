//! Rotary encoding with a fused activation.

use fuselane::{Pairing, Partial, Rotate};

use super::angles::{Arguments, Checked};
use super::{Edge, Op, check, output_if, output_like};
use crate::fault::Fault;
use crate::threads;

const NAME: &str = "rotate";

pub(super) const FORWARD: Op = Op {
    schema: "rotate(Tensor x, Tensor theta, Tensor? positions, Tensor? cu_seqlens, int table, \
             int act, SymInt offset, SymInt[] grid, SymInt extra_tokens, bool heads_first, \
             bool interleaved, bool rotary_dim, int pairs) -> Tensor",
    run: forward,
};

/// Gradients of x and theta, as far as they are asked for.
pub(super) const BACKWARD: Op = Op {
    schema: "rotate_backward(Tensor grad, Tensor? x, Tensor theta, Tensor? positions, \
             Tensor? cu_seqlens, int table, int act, SymInt offset, SymInt[] grid, \
             SymInt extra_tokens, bool heads_first, bool interleaved, bool rotary_dim, int pairs, \
             bool dx, bool dtheta) -> (Tensor, Tensor)",
    run: backward,
};

/// What turns, beside the arguments that cosine has too.
#[derive(Clone, Copy)]
struct Turn {
    interleaved: bool,
    rotary_dim: bool,
    pairs: i64,
}

impl Turn {
    fn take(edge: &mut dyn Edge) -> Self {
        Self { interleaved: edge.flag(), rotary_dim: edge.flag(), pairs: edge.int() }
    }

    fn options<'a>(&self, call: &'a Checked) -> Rotate<'a> {
        Rotate {
            act: call.act,
            layout: call.layout,
            positions: call.positions(),
            extra_tokens: call.extra_tokens,
            sequences: call.sequences(),
            pairing: if self.interleaved { Pairing::Interleaved } else { Pairing::Half },
            partial: if self.rotary_dim { Partial::RotaryDim } else { Partial::Pairs },
            pairs: usize::try_from(self.pairs).ok(),
        }
    }
}

fn forward(edge: &mut dyn Edge) -> Result<(), Fault> {
    let (x, arguments, turn) = (edge.tensor(), Arguments::take(edge), Turn::take(edge));
    let call = arguments.check(NAME)?;
    let o = output_like(edge, check(NAME, "x", &x)?, &x)?;
    threads::run(2 * x.bytes(), || {
        let options = turn.options(&call);
        let (x, angles) = (x.view(NAME, "x")?, call.angles(NAME)?);
        Ok(options.forward_into(x, angles, o.view_mut(NAME, "o")?)?)
    })
}

fn backward(edge: &mut dyn Edge) -> Result<(), Fault> {
    let (grad, x, arguments) = (edge.tensor(), edge.optional(), Arguments::take(edge));
    let (turn, wanted) = (Turn::take(edge), [edge.flag(), edge.flag()]);
    let call = arguments.check(NAME)?;
    let dtype = check(NAME, "grad", &grad)?;
    let theta_dtype = call.theta.dtype(NAME, "theta")?;
    let dx = output_if(edge, wanted[0], dtype, x.as_ref().unwrap_or(&grad))?;
    let dtheta = output_if(edge, wanted[1], theta_dtype, &call.theta)?;
    threads::run(3 * grad.bytes(), || {
        let operands = call.backward(NAME, (&grad, &x), (&dx, &dtheta))?;
        Ok(turn.options(&call).backward_into(operands)?)
    })
}
