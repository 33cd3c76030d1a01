//! The same mathematics with one materialised tensor per primitive operation, as a framework runs
//! it that does not fuse: what a fused operator saves is the way of these tensors through memory.
//!
//! Tensors have the activations' dtype (T below), and are f32 where one of the operands is. A
//! primitive that takes two dtypes widens as it loads, so there is no cast on the way in. Buffers
//! come from the library's pool, in both regimes: after the first call nothing is allocated.
//!
//! ```text
//! act        relu, sigmoid and most others: one call of the library
//!            silu: s = sigmoid(x), x s
//!            backward: g s, g x, (g x) s (1 - s), their sum; from s
//! softmax    max, x - max, exp, sum, quotient
//!            backward: g o, its sum, g - sum, times o; from o
//! normalize  [s = x + residual] [a = act(gate)] [p = s a]
//!            sum of squares, rstd, p rstd (f32), r = T of it, [r weight] [times a]
//!            backward: [g a, g o1, dgate] [g r, dweight = its sum] [g weight]
//!            g rstd (f32), g p (f32), its sums, their factor of p, p times it (f32), the sum (f32),
//!            dp = T of it, [dp a, dp s, dgate]; from p, r, rstd, a, o1
//! rotate     act(x), angles, cos, sin (of n x heads x d/2, f32), four products, a sum and a
//!            difference of half the features (f32), both side by side (f32), T of it
//!            backward: the same with g, then that of the act; from cos and sin
//! cosine     act(x), coordinates, angles, cos, sin (of heads x n x d, f32), two products (f32),
//!            both side by side (f32), T of it
//!            backward: two products, their sum (f32), T of it, then that of the act; from cos, sin
//! ```

use std::collections::BTreeMap;

use fuselane::{Act, Buffer, DType, FusedAct, View};

use super::primitives::{
    Around, Like, Operand, add, cast, concat, div, exp, max_along, mul, rstd_backward, rstd_of_sum,
    sigmoid_backward, sub, sum_along, sum_last, sum_of_squares_last,
};
use super::tables::Tables;
use super::{Peer, sample};
use crate::case::{Gate, Mode, Operator};
use crate::protocol::{Job, Sample};
use crate::tensor::Inputs;
use crate::worker::{Call, Fault, Library, Loaded};

pub(crate) struct Unfused;

impl Peer for Unfused {
    fn name(&self) -> &'static str {
        "unfused"
    }

    fn memory_factor(&self) -> f64 {
        6.0
    }
}

impl Library for Unfused {
    fn load(&self, job: &Job) -> Result<Box<dyn Loaded>, Fault> {
        Ok(Box::new(Prepared { job: job.clone(), inputs: Inputs::read(job)? }))
    }

    fn trim(&self) {
        fuselane::pool::trim();
    }
}

struct Prepared {
    job: Job,
    inputs: Inputs,
}

impl Loaded for Prepared {
    fn call(&self) -> Result<Box<dyn Call + '_>, Fault> {
        let mut tape = Tape(None);
        if self.job.mode == Mode::Bwd {
            tape = Tape(Some(BTreeMap::new()));
            if let Some(o) = self.forward(&mut tape)? {
                tape.save("o", o);
            }
        }
        Ok(Box::new(Chain { of: self, tape, outputs: Vec::new() }))
    }
}

/// What a forward saves for its backward; nothing if there is to be none.
struct Tape(Option<BTreeMap<&'static str, Buffer>>);

impl Tape {
    fn save(&mut self, name: &'static str, tensor: Buffer) {
        if let Some(saved) = &mut self.0 {
            saved.insert(name, tensor);
        }
    }

    fn save_encoding(&mut self, tables: Tables, activated: Option<Buffer>) {
        self.save("cos", tables.cos);
        self.save("sin", tables.sin);
        if let Some(activated) = activated {
            self.save("activated", activated);
        }
    }

    fn saved(&self, name: &str) -> Result<&Buffer, Fault> {
        let saved = self.0.as_ref().and_then(|saved| saved.get(name));
        saved.ok_or_else(|| Fault::Failed(format!("the forward did not save {name}")))
    }
}

type Outputs = Vec<(&'static str, Buffer)>;

struct Chain<'a> {
    of: &'a Prepared,
    tape: Tape,
    outputs: Outputs,
}

impl Call for Chain<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        self.outputs.clear(); // the pool takes them back and hands them out again
        match self.of.job.mode {
            Mode::Fwd => {
                let o = self.of.forward(&mut self.tape)?;
                self.outputs.extend(o.map(|o| ("o", o)));
            }
            Mode::Bwd => self.outputs = self.of.backward(&self.tape)?,
        }
        Ok(())
    }

    fn sample(&self, output: &str, samples: &[Sample]) -> Result<Vec<f32>, Fault> {
        sample(&self.of.job, &self.of.inputs, &self.outputs, output, samples)
    }
}

/// A tensor in f32.
fn wide(shape: &[usize]) -> Like<'_> {
    Like { dtype: DType::F32, shape }
}

/// A tensor like this one.
fn like<'a>(view: &'a View<'_>) -> Like<'a> {
    Like { dtype: view.dtype(), shape: view.shape() }
}

impl Prepared {
    /// The output, or nothing where it is the input.
    fn forward(&self, tape: &mut Tape) -> Result<Option<Buffer>, Fault> {
        let x = self.inputs.need("x")?;
        match self.job.operator {
            Operator::Act { act } => activate(act, x, tape),
            Operator::Softmax { dim } => softmax(x, self.around(dim == -1)?).map(Some),
            Operator::Normalize { .. } => self.normalize(x, tape).map(Some),
            Operator::Rotate { .. } => self.rotate(x, tape).map(Some),
            Operator::Cosine { .. } => self.cosine(x, tape).map(Some),
        }
    }

    /// The gradients, without those that are the output's.
    fn backward(&self, tape: &Tape) -> Result<Outputs, Fault> {
        let (x, grad) = (self.inputs.need("x")?, self.inputs.need("grad")?);
        let dx = match self.job.operator {
            Operator::Act { act } => activate_backward(act, x, grad, tape)?,
            Operator::Softmax { dim } => {
                let around = self.around(dim == -1)?;
                Some(softmax_backward(tape.saved("o")?.view(), grad, around)?)
            }
            Operator::Normalize { .. } => return self.normalize_backward(x, grad, tape),
            Operator::Rotate { .. } => Some(self.rotate_backward(x, grad, tape)?),
            Operator::Cosine { .. } => Some(self.cosine_backward(x, grad, tape)?),
        };
        Ok(dx.map(|dx| ("dx", dx)).into_iter().collect())
    }

    /// What a softmax runs along: the features, or the sequence.
    fn around(&self, features: bool) -> Result<Around, Fault> {
        let x = self.inputs.need("x")?;
        let &[b, second, third, d] = x.shape() else {
            return Err(Fault::Failed("x has not four dimensions".to_owned()));
        };
        Ok(match self.job.operator {
            _ if features => [b * second * third, d, 1],
            Operator::Rotate { .. } => [b, second, third * d],
            _ => [b * second, third, d],
        })
    }

    /// The activation of rotate and cosine.
    fn act(&self, x: View<'_>, tape: &mut Tape) -> Result<Option<Buffer>, Fault> {
        match self.job.operator.fused_act().unwrap_or_default() {
            FusedAct::Elementwise(act) => activate(act, x, tape),
            act => softmax(x, self.around(act == FusedAct::SoftmaxFeatures)?).map(Some),
        }
    }

    /// Its gradient, or nothing where that is `grad`.
    fn act_backward(
        &self,
        x: View<'_>,
        grad: &Buffer,
        tape: &Tape,
    ) -> Result<Option<Buffer>, Fault> {
        match self.job.operator.fused_act().unwrap_or_default() {
            FusedAct::Elementwise(act) => activate_backward(act, x, grad.view(), tape),
            act => {
                let around = self.around(act == FusedAct::SoftmaxFeatures)?;
                softmax_backward(tape.saved("activated")?.view(), grad.view(), around).map(Some)
            }
        }
    }

    /// What `encoding` makes of the activated x and the tables of its angles.
    fn encode(
        &self,
        x: View<'_>,
        tape: &mut Tape,
        encoding: impl FnOnce(View<'_>, &Tables) -> Result<Buffer, Fault>,
    ) -> Result<Buffer, Fault> {
        let activated = self.act(x, tape)?;
        let tables = Tables::new(&self.job, x.shape(), self.inputs.need("theta")?)?;
        let y = match &activated {
            Some(activated) => activated.view().reshape(x.shape())?,
            None => x,
        };
        let o = encoding(y, &tables)?;
        tape.save_encoding(tables, activated);
        Ok(o)
    }

    fn rotate(&self, x: View<'_>, tape: &mut Tape) -> Result<Buffer, Fault> {
        let o = self.encode(x, tape, |y, tables| turned(y, &tables.cos, &tables.sin, false))?;
        cast(like(&x), &o)
    }

    fn rotate_backward(&self, x: View<'_>, grad: View<'_>, tape: &Tape) -> Result<Buffer, Fault> {
        let dy = turned(grad, tape.saved("cos")?, tape.saved("sin")?, true)?;
        let dy = cast(like(&x), &dy)?;
        Ok(self.act_backward(x, &dy, tape)?.unwrap_or(dy))
    }

    fn cosine(&self, x: View<'_>, tape: &mut Tape) -> Result<Buffer, Fault> {
        let o = self.encode(x, tape, |y, tables| {
            concat(
                &mul(wide(x.shape()), y, Operand::rows(tables.cos.view(), 1))?,
                &mul(wide(x.shape()), y, Operand::rows(tables.sin.view(), 1))?,
            )
        })?;
        let mut shape = x.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last *= 2;
        }
        cast(Like { dtype: x.dtype(), shape: &shape }, &o)
    }

    fn cosine_backward(&self, x: View<'_>, grad: View<'_>, tape: &Tape) -> Result<Buffer, Fault> {
        let (cos, sin) = (tape.saved("cos")?.view(), tape.saved("sin")?.view());
        let dy = add(
            wide(x.shape()),
            &mul(wide(x.shape()), Operand::part(grad, 0, 2), Operand::rows(cos, 1))?,
            &mul(wide(x.shape()), Operand::part(grad, 1, 2), Operand::rows(sin, 1))?,
        )?;
        let dy = cast(like(&x), &dy)?;
        Ok(self.act_backward(x, &dy, tape)?.unwrap_or(dy))
    }

    fn normalize(&self, x: View<'_>, tape: &mut Tape) -> Result<Buffer, Fault> {
        let Operator::Normalize { gate: position, gate_act, eps, .. } = self.job.operator else {
            return Err(Fault::Failed("not a norm".to_owned()));
        };
        let shape = x.shape().to_vec();
        let like = Like { dtype: x.dtype(), shape: &shape };
        let d = shape.last().copied().unwrap_or(1);
        let summed = match self.inputs.get("residual") {
            Some(residual) => Some(add(like, x, residual)?),
            None => None,
        };
        let s = summed.as_ref().map_or(x, Buffer::view);
        let gate = self.inputs.get("gate");
        let opened = match gate {
            Some(gate) => activate(gate_act, gate, tape)?,
            None => None,
        };
        let a = opened.as_ref().map(Buffer::view).or(gate);
        let gated = match (position, a) {
            (Some(Gate::Pre), Some(a)) => Some(mul(like, s, a)?),
            _ => None,
        };
        let p = gated.as_ref().map_or(s, Buffer::view);
        let rstd = rstd_of_sum(&sum_of_squares_last(p)?, d, eps)?;
        let r = mul(wide(&shape), p, Operand::numbers(rstd.view(), 1))?;
        let mut o = cast(like, &r)?;
        drop(r);
        if let Some(weight) = self.inputs.get("weight") {
            let o1 = mul(like, &o, Operand::rows(weight, 1))?;
            tape.save("r", std::mem::replace(&mut o, o1));
        }
        if let (Some(Gate::Post), Some(a)) = (position, a) {
            let gated = mul(like, &o, a)?;
            tape.save("o1", std::mem::replace(&mut o, gated));
        }
        tape.save("rstd", rstd);
        for (name, tensor) in [("s", summed), ("a", opened), ("p", gated)] {
            if let Some(tensor) = tensor {
                tape.save(name, tensor);
            }
        }
        Ok(o)
    }

    fn normalize_backward(
        &self,
        x: View<'_>,
        grad: View<'_>,
        tape: &Tape,
    ) -> Result<Outputs, Fault> {
        let Operator::Normalize { gate: position, gate_act, .. } = self.job.operator else {
            return Err(Fault::Failed("not a norm".to_owned()));
        };
        let shape = x.shape().to_vec();
        let like = Like { dtype: x.dtype(), shape: &shape };
        let d = shape.last().copied().unwrap_or(1);
        let rows = x.len() / d.max(1);
        let s = tape.saved("s").map_or(x, Buffer::view);
        let p = tape.saved("p").map_or(s, Buffer::view);
        let gate = self.inputs.get("gate");
        let a = tape.saved("a").ok().map(Buffer::view).or(gate);
        let rstd = tape.saved("rstd")?;
        let mut outputs = Vec::new();
        // The gradient of what the gate was multiplied with becomes that of the gate.
        let gate_backward = |outputs: &mut Outputs, da: Buffer| -> Result<(), Fault> {
            if let Some(gate) = gate {
                let dgate = activate_backward(gate_act, gate, da.view(), tape)?;
                outputs.push(("dgate", dgate.unwrap_or(da)));
            }
            Ok(())
        };

        let mut g: Option<Buffer> = None;
        if let (Some(Gate::Post), Some(a)) = (position, a) {
            gate_backward(&mut outputs, mul(like, grad, tape.saved("o1")?)?)?;
            g = Some(mul(like, grad, a)?);
        }
        if let Some(weight) = self.inputs.get("weight") {
            let do1 = g.as_ref().map_or(grad, Buffer::view);
            let sum = sum_along(mul(like, do1, tape.saved("r")?)?.view(), [1, rows, d])?;
            outputs.push(("dweight", cast(Like { shape: &[d], ..like }, &sum)?));
            g = Some(mul(like, do1, Operand::rows(weight, 1))?);
        }
        let dr = g.as_ref().map_or(grad, Buffer::view);
        let factor = {
            let drstd = sum_last(mul(wide(&shape), dr, p)?.view())?;
            rstd_backward(rstd, &drstd, d)?
        };
        let direct = mul(wide(&shape), dr, Operand::numbers(rstd.view(), 1))?;
        drop(g);
        let through = mul(wide(&shape), p, Operand::numbers(factor.view(), 1))?;
        let dp = add(wide(&shape), &direct, &through)?;
        drop((direct, through));
        let mut dx = cast(like, &dp)?;
        drop(dp);
        if let (Some(Gate::Pre), Some(a)) = (position, a) {
            gate_backward(&mut outputs, mul(like, &dx, s)?)?;
            dx = mul(like, &dx, a)?;
        }
        outputs.push(("dx", dx));
        Ok(outputs)
    }
}

/// Each pair of halves turned by its angle, or back, in f32.
fn turned(y: View<'_>, cos: &Buffer, sin: &Buffer, back: bool) -> Result<Buffer, Fault> {
    let mut half = y.shape().to_vec();
    if let Some(last) = half.last_mut() {
        *last /= 2;
    }
    let product = |part, table: &Buffer| {
        mul(wide(&half), Operand::part(y, part, 2), Operand::rows(table.view(), 1))
    };
    let (first, second) = (if back { add } else { sub }, if back { sub } else { add });
    concat(
        &first(wide(&half), &product(0, cos)?, &product(1, sin)?)?,
        &second(wide(&half), &product(1, cos)?, &product(0, sin)?)?,
    )
}

/// `act(x)`, or nothing for the identity.
fn activate(act: Act, x: View<'_>, tape: &mut Tape) -> Result<Option<Buffer>, Fault> {
    match act {
        Act::None => Ok(None),
        Act::Silu => {
            let s = Act::Sigmoid.forward(x)?;
            let o = mul(like(&x), x, &s)?;
            tape.save("sigmoid", s);
            Ok(Some(o))
        }
        act => Ok(Some(act.forward(x)?)),
    }
}

/// The gradient of x, or nothing where that is `grad`.
fn activate_backward(
    act: Act,
    x: View<'_>,
    grad: View<'_>,
    tape: &Tape,
) -> Result<Option<Buffer>, Fault> {
    match act {
        Act::None => Ok(None),
        Act::Silu => {
            let s = tape.saved("sigmoid")?;
            let through = sigmoid_backward(like(&x), &mul(like(&x), grad, x)?, s)?;
            Ok(Some(add(like(&x), &mul(like(&x), grad, s)?, &through)?))
        }
        act => Ok(Some(act.backward(x, grad)?)),
    }
}

/// What belongs to each element of a tensor, of what was folded along a dimension of it.
fn folded(fold: &Buffer, [_, n, inner]: Around) -> Operand<'_> {
    match inner {
        1 => Operand::numbers(fold.view(), 1),
        _ => Operand::rows(fold.view(), n),
    }
}

/// The shape in which rows meet what was folded along a dimension.
fn around_shape([outer, n, inner]: Around) -> Vec<usize> {
    if inner == 1 { vec![outer, n] } else { vec![outer * n, inner] }
}

fn softmax(x: View<'_>, around: Around) -> Result<Buffer, Fault> {
    let shape = around_shape(around);
    let like = Like { dtype: x.dtype(), shape: &shape };
    let e = {
        let max = max_along(x, around)?;
        let moved = sub(like, x, folded(&max, around))?;
        exp(like, &moved)?
    };
    let sum = sum_along(e.view(), around)?;
    div(like, &e, folded(&sum, around))
}

fn softmax_backward(o: View<'_>, grad: View<'_>, around: Around) -> Result<Buffer, Fault> {
    let shape = around_shape(around);
    let like = Like { dtype: grad.dtype(), shape: &shape };
    let sum = sum_along(mul(like, grad, o)?.view(), around)?;
    let centered = sub(like, grad, folded(&sum, around))?;
    mul(like, &centered, o)
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;

    #[test]
    fn right_to_what_materialised_tensors_allow() {
        let bound = |dtype| if dtype == DType::F32 { 16.0 } else { 6.0 };
        testing::check(&Unfused, |_| true, bound, |_, _| false);
    }
}
