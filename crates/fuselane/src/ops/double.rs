//! Calls on f64 activations, which are there for checking: the plain scalar [`reference`](crate::reference)
//! serves them, so that kernels compute in f32 alone.
//!
//! The operators check these calls like all others. Elementwise ones then go row by row; the others
//! take copies of the tensors in the order that the reference reads, and write its results back.

use crate::DType;
use crate::error::Result;
use crate::exec::rows::TaskRows;
use crate::ops::angles::{AngleSplit, Angles};
use crate::ops::encode::{self, EncodingBackward, TokenLayout};
use crate::ops::normalize::{Normalize, NormalizeBackward, NormalizeForward, Residual};
use crate::plan;
use crate::reference::{angles, normalize, softmax};
use crate::view::{View, ViewMut};

/// `o = f(inputs)`, element by element.
pub(super) fn each_element<const I: usize>(
    mut rows: TaskRows<'_, I, 1>,
    f: impl Fn([f64; I]) -> f64,
) {
    while let Some(row) = rows.next_row() {
        let [o] = row.outputs;
        for (i, o) in o.iter_mut().enumerate() {
            *o = f(row.inputs.map(|input| input[i]));
        }
    }
}

/// `x = f(x)`, element by element.
pub(super) fn each_element_in_place(mut rows: TaskRows<'_, 0, 1>, f: impl Fn(f64) -> f64) {
    while let Some(row) = rows.next_row() {
        row.outputs.into_iter().flatten().for_each(|x| *x = f(*x));
    }
}

/// A softmax along dimension `dim`: `o = f(inputs)`, of tensors in index order.
pub(super) fn along<const I: usize>(
    dim: usize,
    inputs: [View<'_>; I],
    mut o: ViewMut<'_>,
    f: impl Fn([&[f64]; I], softmax::Dims) -> Vec<f64>,
) {
    let shape = o.shape();
    let dims = [shape[..dim].iter().product(), shape[dim], shape[dim + 1..].iter().product()];
    let inputs = inputs.map(|input| input.to_f64_vec());
    if !o.is_empty() {
        o.round_from(&f(inputs.each_ref().map(Vec::as_slice), dims));
    }
}

/// A forward of `normalize` that was checked.
pub(super) fn normalize(options: &Normalize, call: NormalizeForward<'_>) {
    let NormalizeForward { x, weight, bias, gate, residual, mut o, mut rstd, mut mean } = call;
    if x.is_empty() {
        // Rows without elements have statistics, too.
        for statistic in rstd.iter_mut().chain(&mut mean) {
            statistic.round_from(&vec![f64::NAN; statistic.len()]);
        }
        return;
    }
    let added = match &residual {
        Residual::None => None,
        Residual::Add(view) | Residual::AddInto(view, _) => Some(*view),
        Residual::AddInPlace(sum) => Some(sum.as_view()),
    };
    let tensors = Tensors::new(x, [added, gate, weight, bias]);
    let output = normalize::forward(options, &tensors.input());
    o.round_from(&output.o);
    if let Residual::AddInto(_, mut sum) | Residual::AddInPlace(mut sum) = residual {
        sum.round_from(&output.residual_out);
    }
    write(rstd, &output.rstd);
    write(mean, &output.mean);
}

/// A backward of `normalize` that was checked.
pub(super) fn normalize_backward(options: &Normalize, call: NormalizeBackward<'_>) {
    let NormalizeBackward { x, residual, gate, weight, bias, mut dweight, mut dbias, .. } = call;
    if x.is_empty() {
        dweight.iter_mut().chain(&mut dbias).for_each(ViewMut::fill_zero);
        return;
    }
    let mut tensors = Tensors::new(x, [residual, gate, weight, bias]);
    if dbias.is_some() {
        // The reference gives gradients of what there is.
        tensors.bias.get_or_insert_with(|| vec![0.0; tensors.d]);
    }
    let (rstd, mean) = (call.rstd.to_f64_vec(), call.mean.map(|mean| mean.to_f64_vec()));
    let statistics = normalize::Statistics { rstd: &rstd, mean: mean.as_deref().unwrap_or(&[]) };
    let (input, grad) = (tensors.input(), call.grad.to_f64_vec());
    let grad_sum = call.grad_residual_out.map(|grad| grad.to_f64_vec());
    let grad_sum = grad_sum.as_deref();
    let gradients =
        normalize::backward_from_statistics(options, &input, &statistics, &grad, grad_sum);
    write(call.dx, &gradients.dx);
    write(call.dresidual, &gradients.dx);
    write(call.dgate, &gradients.dgate.unwrap_or_default());
    write(dweight, &gradients.dweight.unwrap_or_default());
    write(dbias, &gradients.dbias.unwrap_or_default());
}

/// What a normalization reads.
struct Tensors {
    x: Vec<f64>,
    residual: Option<Vec<f64>>,
    gate: Option<Vec<f64>>,
    weight: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
    d: usize,
}

impl Tensors {
    fn new(x: View<'_>, others: [Option<View<'_>>; 4]) -> Self {
        let d = x.shape().last().copied().unwrap_or(1);
        let [residual, gate, weight, bias] = others.map(|view| view.map(|view| view.to_f64_vec()));
        Self { x: x.to_f64_vec(), residual, gate, weight, bias, d }
    }

    fn input(&self) -> normalize::Input<'_> {
        normalize::Input {
            x: &self.x,
            residual: self.residual.as_deref(),
            gate: self.gate.as_deref(),
            weight: self.weight.as_deref(),
            bias: self.bias.as_deref(),
            rows: self.x.len() / self.d,
            d: self.d,
        }
    }
}

/// Writes an output, if it was asked for.
fn write(output: Option<ViewMut<'_>>, values: &[f64]) {
    if let Some(mut output) = output {
        output.round_from(values);
    }
}

/// A forward of `rotate` or `cosine` that was checked and is not empty.
pub(super) fn encode<O: encode::Options>(
    options: &O,
    plan: &plan::Encoding,
    x: View<'_>,
    angles: Angles<'_>,
    o: ViewMut<'_>,
) -> Result<()> {
    let order = heads_last(options.common().layout);
    let x = x.permute(&order)?.to_f64_vec();
    let theta = theta(angles, &plan.split)?;
    let values = options.reference_forward(plan, &input(plan, &x, &theta));
    o.permute(&order)?.round_from(&values);
    Ok(())
}

/// A backward of `rotate` or `cosine` that was checked and is not empty.
pub(super) fn encode_backward<O: encode::Options>(
    options: &O,
    plan: &plan::Encoding,
    call: EncodingBackward<'_>,
) -> Result<()> {
    let EncodingBackward { x, grad, angles, dx, dtheta } = call;
    let split = plan.split;
    let order = heads_last(options.common().layout);
    // Where the check lets x be left out, its values do not matter.
    let x = match x {
        Some(x) => x.permute(&order)?.to_f64_vec(),
        None => vec![0.0; plan.batch * plan.tokens * plan.heads * plan.features],
    };
    let grad = grad.permute(&order)?.to_f64_vec();
    let theta = theta(angles, &split)?;
    let gradients = options.reference_backward(plan, &input(plan, &x, &theta), &grad);
    if let Some(dx) = dx {
        dx.permute(&order)?.round_from(&gradients.dx);
    }
    if let Some(mut dtheta) = dtheta {
        // Columns that no angle uses have no gradient.
        dtheta.fill_zero();
        dtheta.narrow(1, 0, split.used_columns())?.round_from(&gradients.dtheta);
    }
    Ok(())
}

fn input<'a>(plan: &plan::Encoding, x: &'a [f64], theta: &'a [f64]) -> angles::Input<'a> {
    let dims = [plan.batch, plan.tokens, plan.heads, plan.features];
    let theta_dims = [plan.split.theta_heads, plan.split.used_columns()];
    angles::Input { x, dims, theta, theta_dims, dtype: DType::F64 }
}

/// The columns of theta that are in use.
fn theta(angles: Angles<'_>, split: &AngleSplit) -> Result<Vec<f64>> {
    Ok(match angles {
        Angles::Theta(theta) => split.used(theta)?.to_f64_vec(),
        Angles::Table(table) => table.theta_f64().to_vec(),
    })
}

/// The order of dimensions that makes (batch, tokens, heads, features) of a layout.
fn heads_last(layout: TokenLayout) -> [usize; 4] {
    match layout {
        TokenLayout::TokensHeads => [0, 1, 2, 3],
        TokenLayout::HeadsTokens => [0, 2, 1, 3],
    }
}
