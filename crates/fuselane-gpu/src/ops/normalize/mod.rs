//! Normalization over the last dimension, with residual, gate, weight and bias fused in; see
//! [`fuselane::Normalize`] for the formulas.
//!
//! A team of units works on one group of one row. It reads p (the sum of x and the residual, gated
//! where the gate comes first) into registers, sums over it, and writes the output from them; rows
//! too long for registers are read again in each pass.
//!
//! | file | what it has |
//! |---|---|
//! | `inputs` | what forward and backward share |
//! | `forward`, `backward` | their kernels and launches |
//! | `gradients` | the backward of one vector |
//!
//! **Numerics.** Everything is f32, rounded once at the store. The mean is taken twice: after a
//! first one m, p - m has a small mean of its own (what rounding left over), which is subtracted
//! too, so that a mean far above the deviation costs nothing.

mod backward;
mod forward;
mod gradients;
mod inputs;

use fuselane::{DType, GatePosition, Normalize, Result, View, ViewMut};

use self::backward::Backward;
use self::forward::Forward;
use self::inputs::InputTensors;
use crate::copy::widened;
use crate::launch::{into_new, one_device, result_like};
use crate::tensor::Tensor;

const NAME: &str = "normalize";

/// What becomes of the residual.
#[derive(Debug, Default)]
pub enum Residual<'a> {
    /// There is none.
    #[default]
    None,
    /// It is added to x; the sum is not saved.
    Add(&'a Tensor),
    /// It is added to x, and the second tensor receives the sum.
    AddInto(&'a Tensor, &'a mut Tensor),
    /// It is added to x, and its own memory receives the sum.
    AddInPlace(&'a mut Tensor),
}

/// The operands of [`forward_into`]; those of [`fuselane::NormalizeForward`].
#[derive(Debug)]
pub struct NormalizeForward<'a> {
    /// What is normalized, along its last dimension.
    pub x: &'a Tensor,
    /// One weight for each element of a row, of any dtype.
    pub weight: Option<&'a Tensor>,
    /// One bias for each element of a row, of any dtype.
    pub bias: Option<&'a Tensor>,
    /// The gate, before its activation.
    pub gate: Option<&'a Tensor>,
    /// What is added to x first.
    pub residual: Residual<'a>,
    /// Receives the result.
    pub o: &'a mut Tensor,
    /// Receives 1 / sigma of each row and group, in f32: the shape of x with `groups` for its last
    /// dimension.
    pub rstd: Option<&'a mut Tensor>,
    /// Receives the mean that was subtracted, if centered; shape and dtype as for `rstd`.
    pub mean: Option<&'a mut Tensor>,
}

impl<'a> NormalizeForward<'a> {
    /// x to o, with nothing else.
    pub fn new(x: &'a Tensor, o: &'a mut Tensor) -> Self {
        let (weight, bias, gate, rstd, mean) = (None, None, None, None, None);
        Self { x, weight, bias, gate, residual: Residual::None, o, rstd, mean }
    }
}

/// The operands of [`backward_into`]; those of [`fuselane::NormalizeBackward`]. Only the gradients
/// that are asked for are computed.
#[derive(Debug)]
pub struct NormalizeBackward<'a> {
    /// The gradient that arrives at the output.
    pub grad: &'a Tensor,
    /// x of the forward; or the saved sum x + residual, with `residual` left out.
    pub x: &'a Tensor,
    /// The residual of the forward, if `x` is not the sum.
    pub residual: Option<&'a Tensor>,
    /// The gate of the forward.
    pub gate: Option<&'a Tensor>,
    /// The weight of the forward.
    pub weight: Option<&'a Tensor>,
    /// The bias of the forward; read for `dgate` of a gate in the post position only.
    pub bias: Option<&'a Tensor>,
    /// 1 / sigma, as the forward saved it.
    pub rstd: &'a Tensor,
    /// The mean, as the forward saved it; needed if centered.
    pub mean: Option<&'a Tensor>,
    /// The gradient that arrives at the sum x + residual from elsewhere.
    pub grad_residual_out: Option<&'a Tensor>,
    /// Receives the gradient of x.
    pub dx: Option<&'a mut Tensor>,
    /// Receives the gradient of the residual, which has the same values as `dx`: a caller who can
    /// use one tensor for both leaves this out.
    pub dresidual: Option<&'a mut Tensor>,
    /// Receives the gradient of the gate.
    pub dgate: Option<&'a mut Tensor>,
    /// Receives the gradient of the weight, in any dtype.
    pub dweight: Option<&'a mut Tensor>,
    /// Receives the gradient of the bias, in any dtype.
    pub dbias: Option<&'a mut Tensor>,
}

impl<'a> NormalizeBackward<'a> {
    /// The operands that are always needed; no gradient is asked for yet.
    pub fn new(grad: &'a Tensor, x: &'a Tensor, rstd: &'a Tensor) -> Self {
        Self {
            grad,
            x,
            residual: None,
            gate: None,
            weight: None,
            bias: None,
            rstd,
            mean: None,
            grad_residual_out: None,
            dx: None,
            dresidual: None,
            dgate: None,
            dweight: None,
            dbias: None,
        }
    }
}

/// Gradients, from [`backward`].
#[derive(Debug)]
pub struct NormalizeGradients {
    /// The gradient of x.
    pub dx: Tensor,
    /// The gradient of the weight, if there was one.
    pub dweight: Option<Tensor>,
}

/// A result with what its backward needs, from [`forward_keeping`].
#[derive(Debug)]
pub struct Normalized {
    /// The result.
    pub o: Tensor,
    /// 1 / sigma of each row and group.
    pub rstd: Tensor,
    /// The mean of each row and group, if centered.
    pub mean: Option<Tensor>,
}

fn view(tensor: Option<&Tensor>) -> Result<Option<View<'_>>> {
    tensor.map(Tensor::view).transpose()
}

fn view_mut(tensor: Option<&Tensor>) -> Result<Option<ViewMut<'_>>> {
    tensor.map(Tensor::view_mut).transpose()
}

/// A parameter as kernels take it.
fn widen(parameter: Option<&Tensor>) -> Result<Option<Tensor>> {
    parameter.map(|parameter| widened(NAME, parameter)).transpose()
}

/// Normalizes into the caller's tensors; see [`Normalize::forward_into`].
pub fn forward_into(options: &Normalize, call: NormalizeForward<'_>) -> Result<()> {
    let NormalizeForward { x, weight, bias, gate, residual, o, rstd, mean } = call;
    let (residual, sum, sum_name) = match &residual {
        Residual::None => (None, None, "residual_out"),
        Residual::Add(residual) => (Some(*residual), None, "residual_out"),
        Residual::AddInto(residual, sum) => (Some(*residual), Some(&**sum), "residual_out"),
        Residual::AddInPlace(residual) => (Some(&**residual), Some(&**residual), "residual"),
    };
    let in_place = sum_name == "residual";
    let (o, rstd, mean) = (&*o, rstd.as_deref(), mean.as_deref());
    one_device(
        NAME,
        [
            ("x", Some(x)),
            ("weight", weight),
            ("bias", bias),
            ("residual", residual),
            ("gate", gate),
            ("o", Some(o)),
            (sum_name, sum),
            ("rstd", rstd),
            ("mean", mean),
        ],
    )?;
    options.check_forward(fuselane::NormalizeForward {
        x: x.view()?,
        weight: view(weight)?,
        bias: view(bias)?,
        gate: view(gate)?,
        residual: match (residual, sum) {
            (Some(residual), _) if in_place => fuselane::Residual::AddInPlace(residual.view_mut()?),
            (Some(residual), Some(sum)) => {
                fuselane::Residual::AddInto(residual.view()?, sum.view_mut()?)
            }
            (Some(residual), None) => fuselane::Residual::Add(residual.view()?),
            (None, _) => fuselane::Residual::None,
        },
        o: o.view_mut()?,
        rstd: view_mut(rstd)?,
        mean: view_mut(mean)?,
    })?;
    let (weight, bias) = (widen(weight)?, widen(bias)?);
    let inputs = InputTensors { x, residual, gate, weight: weight.as_ref(), bias: bias.as_ref() };
    forward::run(options, Forward { inputs, o, sum, rstd, mean })
}

/// The result in a new tensor, for the plain case.
pub fn forward(options: &Normalize, x: &Tensor, weight: Option<&Tensor>) -> Result<Tensor> {
    into_new(NAME, "x", x, |o| {
        forward_into(options, NormalizeForward { weight, ..NormalizeForward::new(x, o) })
    })
}

/// The result and the statistics in new tensors, for the backward.
pub fn forward_keeping(
    options: &Normalize,
    x: &Tensor,
    weight: Option<&Tensor>,
) -> Result<Normalized> {
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = options.groups;
    }
    let statistic = || x.device().empty(DType::F32, &shape);
    let (mut o, mut rstd) = (result_like(NAME, "x", x, x.shape())?, statistic()?);
    let mut mean = if options.center { Some(statistic()?) } else { None };
    forward_into(
        options,
        NormalizeForward {
            weight,
            rstd: Some(&mut rstd),
            mean: mean.as_mut(),
            ..NormalizeForward::new(x, &mut o)
        },
    )?;
    Ok(Normalized { o, rstd, mean })
}

/// Writes the gradients that are asked for; see [`Normalize::backward_into`].
pub fn backward_into(options: &Normalize, call: NormalizeBackward<'_>) -> Result<()> {
    let NormalizeBackward { grad, x, residual, gate, weight, bias, rstd, mean, .. } = call;
    let grad_sum = call.grad_residual_out;
    let (dx, dresidual) = (call.dx.as_deref(), call.dresidual.as_deref());
    let (dgate, dweight, dbias) =
        (call.dgate.as_deref(), call.dweight.as_deref(), call.dbias.as_deref());
    one_device(
        NAME,
        [
            ("x", Some(x)),
            ("grad", Some(grad)),
            ("residual", residual),
            ("gate", gate),
            ("weight", weight),
            ("bias", bias),
            ("rstd", Some(rstd)),
            ("mean", mean),
            ("grad_residual_out", grad_sum),
            ("dx", dx),
            ("dresidual", dresidual),
            ("dgate", dgate),
            ("dweight", dweight),
            ("dbias", dbias),
        ],
    )?;
    options.check_backward(fuselane::NormalizeBackward {
        grad: grad.view()?,
        x: x.view()?,
        residual: view(residual)?,
        gate: view(gate)?,
        weight: view(weight)?,
        bias: view(bias)?,
        rstd: rstd.view()?,
        mean: view(mean)?,
        grad_residual_out: view(grad_sum)?,
        dx: view_mut(dx)?,
        dresidual: view_mut(dresidual)?,
        dgate: view_mut(dgate)?,
        dweight: view_mut(dweight)?,
        dbias: view_mut(dbias)?,
    })?;
    // The bias matters to the gradient of a gate after it only.
    let bias = bias.filter(|_| dgate.is_some() && options.gate_position == GatePosition::Post);
    let (weight, bias) = (widen(weight)?, widen(bias)?);
    let inputs = InputTensors { x, residual, gate, weight: weight.as_ref(), bias: bias.as_ref() };
    backward::run(
        options,
        Backward { grad, inputs, grad_sum, rstd, mean, dx, dresidual, dgate, dweight, dbias },
        &|shape| x.device().empty(DType::F32, shape),
    )
}

/// The gradients of x and, if there is one, of the weight (in its dtype) in new tensors, for the
/// plain case. `saved` comes from [`forward_keeping`].
pub fn backward(
    options: &Normalize,
    grad: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    saved: &Normalized,
) -> Result<NormalizeGradients> {
    let mut dx = result_like(NAME, "x", x, x.shape())?;
    let like = |weight: &Tensor| result_like(NAME, "weight", weight, weight.shape());
    let mut dweight = weight.map(like).transpose()?;
    backward_into(
        options,
        NormalizeBackward {
            weight,
            mean: saved.mean.as_ref(),
            dx: Some(&mut dx),
            dweight: dweight.as_mut(),
            ..NormalizeBackward::new(grad, x, &saved.rstd)
        },
    )?;
    Ok(NormalizeGradients { dx, dweight })
}
