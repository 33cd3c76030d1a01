//! Normalization, with residual, gate, weight and bias fused in.

use fuselane::{
    GatePosition, Normalize, NormalizeBackward, NormalizeForward, Residual, WeightForm,
};

use super::{Edge, Op, act_of, check, no_output, output, output_if, output_like, view, view_mut};
use crate::fault::Fault;
use crate::raw::Raw;
use crate::threads;

const NAME: &str = "normalize";

pub(super) const FORWARD: Op = Op {
    schema: "normalize(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? gate, \
             int gate_act, bool gate_post, bool one_plus_weight, float scale, float eps, \
             bool center, int groups) -> Tensor",
    run: |edge| forward(edge, false),
};

/// With what the backward needs: the sum x + residual (if asked for), 1 / sigma, and the mean.
pub(super) const FORWARD_KEEPING: Op = Op {
    schema: "normalize_keeping(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, \
             Tensor? gate, int gate_act, bool gate_post, bool one_plus_weight, float scale, \
             float eps, bool center, int groups, bool keep_sum) -> (Tensor, Tensor, Tensor, Tensor)",
    run: |edge| forward(edge, true),
};

/// Gradients of x (and the residual), gate, weight and bias, as far as they are asked for.
pub(super) const BACKWARD: Op = Op {
    schema: "normalize_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor? weight, \
             Tensor? bias, Tensor? residual, Tensor? gate, Tensor rstd, Tensor? mean, \
             int gate_act, bool gate_post, bool one_plus_weight, float scale, float eps, \
             bool center, int groups, bool dx, bool dgate, bool dweight, bool dbias) -> \
             (Tensor, Tensor, Tensor, Tensor)",
    run: backward,
};

/// The options, which have to be checked for the activation.
fn options(edge: &mut dyn Edge) -> Result<Normalize, Fault> {
    let (act, post, one_plus) = (edge.int(), edge.flag(), edge.flag());
    let (scale, eps, center, groups) = (edge.float(), edge.float(), edge.flag(), edge.int());
    let Ok(groups) = usize::try_from(groups) else {
        return Err(Fault::value(format!("{NAME}: groups is {groups}, expected at least 1")));
    };
    Ok(Normalize {
        center,
        eps,
        scale,
        groups,
        weight_form: if one_plus { WeightForm::OnePlus } else { WeightForm::Plain },
        gate_position: if post { GatePosition::Post } else { GatePosition::Pre },
        gate_act: act_of(NAME, "gate_act", act)?,
    })
}

/// The shape of the statistics of each row and group.
fn statistics(x: &Raw, groups: usize) -> Result<Vec<usize>, Fault> {
    let mut shape = x.shape().to_vec();
    match shape.last_mut() {
        Some(last) => *last = groups,
        None => return Err(Fault::value(format!("{NAME}: x is a scalar, expected a dimension"))),
    }
    Ok(shape)
}

fn forward(edge: &mut dyn Edge, keeping: bool) -> Result<(), Fault> {
    let (x, weight, bias) = (edge.tensor(), edge.optional(), edge.optional());
    let (residual, gate) = (edge.optional(), edge.optional());
    let options = options(edge);
    let keep_sum = keeping && edge.flag();
    let options = options?;
    let dtype = check(NAME, "x", &x)?;
    let o = output_like(edge, dtype, &x)?;
    let (mut sum, mut rstd, mut mean) = (None, None, None);
    if keeping {
        let kept = statistics(&x, options.groups)?;
        sum = output_if(edge, keep_sum, dtype, &x)?;
        rstd = Some(output(edge, dtype.real(), &kept)?);
        mean = match options.center {
            true => Some(output(edge, dtype.real(), &kept)?),
            false => no_output(edge, dtype.real())?,
        };
    }
    let tensors = 2 + [&residual, &gate, &sum].iter().filter(|t| t.is_some()).count();
    threads::run(tensors * x.bytes(), || {
        let residual =
            match (view(NAME, "residual", &residual)?, view_mut(NAME, "residual_out", &sum)?) {
                (Some(residual), Some(sum)) => Residual::AddInto(residual, sum),
                (Some(residual), None) => Residual::Add(residual),
                (None, _) => Residual::None,
            };
        let x = x.view(NAME, "x")?;
        Ok(options.forward_into(NormalizeForward {
            weight: view(NAME, "weight", &weight)?,
            bias: view(NAME, "bias", &bias)?,
            gate: view(NAME, "gate", &gate)?,
            residual,
            rstd: view_mut(NAME, "rstd", &rstd)?,
            mean: view_mut(NAME, "mean", &mean)?,
            ..NormalizeForward::new(x, o.view_mut(NAME, "o")?)
        })?)
    })
}

fn backward(edge: &mut dyn Edge) -> Result<(), Fault> {
    let (grad, grad_sum, x) = (edge.tensor(), edge.optional(), edge.tensor());
    let (weight, bias, residual) = (edge.optional(), edge.optional(), edge.optional());
    let (gate, rstd, mean) = (edge.optional(), edge.tensor(), edge.optional());
    let options = options(edge);
    let wanted = [edge.flag(), edge.flag(), edge.flag(), edge.flag()];
    let options = options?;
    let dtype = check(NAME, "x", &x)?;
    let mut gradient = |wanted: bool, of: &Option<Raw>, name: &str| match of {
        Some(of) if wanted => output_like(edge, of.dtype(NAME, name)?, of).map(Some),
        _ => no_output(edge, dtype),
    };
    let dx = gradient(wanted[0], &Some(x), "x")?;
    let dgate = gradient(wanted[1], &gate, "gate")?;
    let dweight = gradient(wanted[2], &weight, "weight")?;
    let dbias = gradient(wanted[3], &bias, "bias")?;
    let tensors = [&grad_sum, &residual, &gate, &dx, &dgate];
    let tensors = 2 + tensors.iter().filter(|t| t.is_some()).count();
    threads::run(tensors * x.bytes(), || {
        Ok(options.backward_into(NormalizeBackward {
            residual: view(NAME, "residual", &residual)?,
            gate: view(NAME, "gate", &gate)?,
            weight: view(NAME, "weight", &weight)?,
            bias: view(NAME, "bias", &bias)?,
            mean: view(NAME, "mean", &mean)?,
            grad_residual_out: view(NAME, "grad_sum", &grad_sum)?,
            dx: view_mut(NAME, "dx", &dx)?,
            dgate: view_mut(NAME, "dgate", &dgate)?,
            dweight: view_mut(NAME, "dweight", &dweight)?,
            dbias: view_mut(NAME, "dbias", &dbias)?,
            ..NormalizeBackward::new(
                grad.view(NAME, "grad")?,
                x.view(NAME, "x")?,
                rstd.view(NAME, "rstd")?,
            )
        })?)
    })
}
