//! Calls on f64 activations, which are there for checking: the plain scalar [`reference`] serves
//! them, so that kernels compute in f32 alone.
//!
//! Each function here is a whole call: the operator's own check, then copies of the tensors in the
//! order that the reference reads, the formula, and results written back, whatever the strides.
//! All of it runs on the calling thread.

use crate::DType;
use crate::error::Result;
use crate::ops::act::Act;
use crate::ops::angles::{AngleSplit, Angles};
use crate::ops::encode::{self, EncodingBackward, TokenLayout};
use crate::ops::normalize::{Normalize, NormalizeBackward, NormalizeForward, Residual};
use crate::ops::softmax::Softmax;
use crate::plan;
use crate::reference::{self, angles, normalize};
use crate::view::{View, ViewMut};

/// `o = f(inputs)`, element by element, for inputs of the shape of `o`.
fn map<const I: usize>(inputs: [View<'_>; I], mut o: ViewMut<'_>, f: impl Fn([f64; I]) -> f64) {
    let inputs = inputs.map(|input| input.to_f64_vec());
    let at = |i: usize| f(std::array::from_fn(|k| inputs[k][i]));
    let values: Vec<f64> = (0..o.len()).map(at).collect();
    o.round_from(&values);
}

impl Act {
    /// [`Act::forward_into`]
    pub(super) fn forward_double(self, x: View<'_>, mut o: ViewMut<'_>) -> Result<()> {
        self.check_forward(x, o.reborrow())?;
        map([x], o, |[x]| reference::act::forward(self, x));
        Ok(())
    }

    /// [`Act::forward_in_place`]
    pub(super) fn forward_double_in_place(self, mut x: ViewMut<'_>) -> Result<()> {
        self.check_in_place(x.reborrow())?;
        let mut values = x.as_view().to_f64_vec();
        for value in &mut values {
            *value = reference::act::forward(self, *value);
        }
        x.round_from(&values);
        Ok(())
    }

    /// [`Act::backward_into`]
    pub(super) fn backward_double(
        self,
        x: View<'_>,
        grad: View<'_>,
        mut dx: ViewMut<'_>,
    ) -> Result<()> {
        self.check_backward(x, grad, dx.reborrow())?;
        map([x, grad], dx, |[x, grad]| reference::act::backward(self, x, grad));
        Ok(())
    }

    /// [`Act::backward_from_output_into`]
    pub(super) fn backward_double_from_output(
        self,
        o: View<'_>,
        grad: View<'_>,
        mut dx: ViewMut<'_>,
    ) -> Result<()> {
        self.check_backward_from_output(o, grad, dx.reborrow())?;
        map([o, grad], dx, |[o, grad]| reference::act::backward_from_output(self, o, grad));
        Ok(())
    }
}

impl Softmax {
    /// [`Softmax::forward_into`]
    pub(super) fn forward_double(&self, x: View<'_>, mut o: ViewMut<'_>) -> Result<()> {
        let dims = around(x, self.check_forward(x, o.reborrow())?);
        if !x.is_empty() {
            o.round_from(&reference::softmax::forward(self, &x.to_f64_vec(), dims));
        }
        Ok(())
    }

    /// [`Softmax::backward_into`]
    pub(super) fn backward_double(
        &self,
        o: View<'_>,
        grad: View<'_>,
        mut dx: ViewMut<'_>,
    ) -> Result<()> {
        let dims = around(o, self.check_backward(o, grad, dx.reborrow())?);
        self.pull_back([o, grad], dx, dims, reference::softmax::backward_from_output)
    }

    /// [`Softmax::backward_from_input_into`]
    pub(super) fn backward_double_from_input(
        &self,
        x: View<'_>,
        grad: View<'_>,
        mut dx: ViewMut<'_>,
    ) -> Result<()> {
        let dims = around(x, self.check_backward_from_input(x, grad, dx.reborrow())?);
        self.pull_back([x, grad], dx, dims, reference::softmax::backward_from_input)
    }

    /// `dx`, by a formula of the reference, of a call that was checked.
    fn pull_back(
        &self,
        inputs: [View<'_>; 2],
        mut dx: ViewMut<'_>,
        dims: reference::softmax::Dims,
        formula: impl Fn(&Self, &[f64], &[f64], reference::softmax::Dims) -> Vec<f64>,
    ) -> Result<()> {
        let [at, grad] = inputs.map(|input| input.to_f64_vec());
        if !at.is_empty() {
            dx.round_from(&formula(self, &at, &grad, dims));
        }
        Ok(())
    }
}

/// The elements before, along and behind a dimension.
fn around(view: View<'_>, dim: usize) -> [usize; 3] {
    let shape = view.shape();
    [shape[..dim].iter().product(), shape[dim], shape[dim + 1..].iter().product()]
}

impl Normalize {
    /// [`Normalize::forward_into`]
    pub(super) fn forward_double(&self, call: NormalizeForward<'_>) -> Result<()> {
        let NormalizeForward { x, weight, bias, gate, mut residual, mut o, mut rstd, mut mean } =
            call;
        self.check_forward(NormalizeForward {
            x,
            weight,
            bias,
            gate,
            residual: match &mut residual {
                Residual::None => Residual::None,
                Residual::Add(view) => Residual::Add(*view),
                Residual::AddInto(view, sum) => Residual::AddInto(*view, sum.reborrow()),
                Residual::AddInPlace(sum) => Residual::AddInPlace(sum.reborrow()),
            },
            o: o.reborrow(),
            rstd: rstd.as_mut().map(ViewMut::reborrow),
            mean: mean.as_mut().map(ViewMut::reborrow),
        })?;
        if x.is_empty() {
            // Rows without elements have statistics, too.
            for mut statistic in rstd.into_iter().chain(mean) {
                statistic.round_from(&vec![f64::NAN; statistic.len()]);
            }
            return Ok(());
        }
        let added = match &residual {
            Residual::None => None,
            Residual::Add(view) | Residual::AddInto(view, _) => Some(*view),
            Residual::AddInPlace(sum) => Some(sum.as_view()),
        };
        let operands = Operands::new(x, added, gate, weight, bias);
        let output = normalize::forward(self, &operands.input());
        o.round_from(&output.o);
        if let Residual::AddInto(_, mut sum) | Residual::AddInPlace(mut sum) = residual {
            sum.round_from(&output.residual_out);
        }
        write(rstd, &output.rstd);
        write(mean, &output.mean);
        Ok(())
    }

    /// [`Normalize::backward_into`]
    pub(super) fn backward_double(&self, call: NormalizeBackward<'_>) -> Result<()> {
        let NormalizeBackward { grad, x, residual, gate, weight, bias, .. } = call;
        let NormalizeBackward { rstd, mean, grad_residual_out, .. } = call;
        let NormalizeBackward { mut dx, mut dresidual, mut dgate, .. } = call;
        let NormalizeBackward { mut dweight, mut dbias, .. } = call;
        self.check_backward(NormalizeBackward {
            grad,
            x,
            residual,
            gate,
            weight,
            bias,
            rstd,
            mean,
            grad_residual_out,
            dx: dx.as_mut().map(ViewMut::reborrow),
            dresidual: dresidual.as_mut().map(ViewMut::reborrow),
            dgate: dgate.as_mut().map(ViewMut::reborrow),
            dweight: dweight.as_mut().map(ViewMut::reborrow),
            dbias: dbias.as_mut().map(ViewMut::reborrow),
        })?;
        if x.is_empty() {
            for mut gradient in dweight.into_iter().chain(dbias) {
                gradient.fill_zero();
            }
            return Ok(());
        }
        let mut operands = Operands::new(x, residual, gate, weight, bias);
        if dbias.is_some() {
            // The reference gives gradients of what there is.
            operands.bias.get_or_insert_with(|| vec![0.0; operands.d]);
        }
        let (rstd, mean) = (rstd.to_f64_vec(), mean.map(|mean| mean.to_f64_vec()));
        let statistics =
            normalize::Statistics { rstd: &rstd, mean: mean.as_deref().unwrap_or(&[]) };
        let (grad, grad_sum) = (grad.to_f64_vec(), grad_residual_out.map(|g| g.to_f64_vec()));
        let gradients = normalize::backward_from_statistics(
            self,
            &operands.input(),
            &statistics,
            &grad,
            grad_sum.as_deref(),
        );
        write(dx, &gradients.dx);
        write(dresidual, &gradients.dx);
        write(dgate, &gradients.dgate.unwrap_or_default());
        write(dweight, &gradients.dweight.unwrap_or_default());
        write(dbias, &gradients.dbias.unwrap_or_default());
        Ok(())
    }
}

/// What a normalization reads.
struct Operands {
    x: Vec<f64>,
    residual: Option<Vec<f64>>,
    gate: Option<Vec<f64>>,
    weight: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
    d: usize,
}

impl Operands {
    fn new(
        x: View<'_>,
        residual: Option<View<'_>>,
        gate: Option<View<'_>>,
        weight: Option<View<'_>>,
        bias: Option<View<'_>>,
    ) -> Self {
        let [residual, gate, weight, bias] =
            [residual, gate, weight, bias].map(|view| view.map(|view| view.to_f64_vec()));
        let d = x.shape().last().copied().unwrap_or(1);
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

/// `rotate` or `cosine`.
pub(super) fn encode<O: encode::Options>(
    options: &O,
    x: View<'_>,
    angles: Angles<'_>,
    mut o: ViewMut<'_>,
) -> Result<()> {
    let plan = encode::check_forward(options, x, angles, &mut o)?;
    if plan.is_empty() {
        return Ok(());
    }
    let order = heads_last(options.common().layout);
    let x = x.permute(&order)?.to_f64_vec();
    let (theta, theta_dims) = theta(angles, &plan.split)?;
    let values = options.reference_forward(&plan, &input(&plan, &x, &theta, theta_dims));
    o.permute(&order)?.round_from(&values);
    Ok(())
}

/// The backward of `rotate` or `cosine`.
pub(super) fn encode_backward<O: encode::Options>(
    options: &O,
    mut call: EncodingBackward<'_>,
) -> Result<()> {
    let plan = encode::check_backward(options, &mut call)?;
    let EncodingBackward { x, grad, angles, dx, dtheta } = call;
    let plan::Encoding { batch, tokens, heads, features, split, .. } = plan;
    if plan.is_empty() {
        dtheta.into_iter().for_each(|mut dtheta| dtheta.fill_zero());
        return Ok(());
    }
    let order = heads_last(options.common().layout);
    // Where the check lets x be left out, its values do not matter.
    let x = match x {
        Some(x) => x.permute(&order)?.to_f64_vec(),
        None => vec![0.0; batch * tokens * heads * features],
    };
    let grad = grad.permute(&order)?.to_f64_vec();
    let (theta, theta_dims) = theta(angles, &split)?;
    let input = input(&plan, &x, &theta, theta_dims);
    let gradients = options.reference_backward(&plan, &input, &grad);
    if let Some(dx) = dx {
        dx.permute(&order)?.round_from(&gradients.dx);
    }
    if let Some(mut dtheta) = dtheta {
        // Columns that no angle uses have no gradient.
        let mut all = vec![0.0; split.theta_heads * split.theta_columns];
        let [_, used] = theta_dims;
        for row in 0..split.theta_heads {
            let of_row = &gradients.dtheta[row * used..(row + 1) * used];
            all[row * split.theta_columns..][..used].copy_from_slice(of_row);
        }
        dtheta.round_from(&all);
    }
    Ok(())
}

fn input<'a>(
    plan: &plan::Encoding,
    x: &'a [f64],
    theta: &'a [f64],
    theta_dims: [usize; 2],
) -> angles::Input<'a> {
    let dims = [plan.batch, plan.tokens, plan.heads, plan.features];
    angles::Input { x, dims, theta, theta_dims, dtype: DType::F64 }
}

/// The columns of theta that are in use, and their dimensions.
fn theta(angles: Angles<'_>, split: &AngleSplit) -> Result<(Vec<f64>, [usize; 2])> {
    let theta = match angles {
        Angles::Theta(theta) => split.used(theta)?.to_f64_vec(),
        Angles::Table(table) => table.theta_f64().to_vec(),
    };
    Ok((theta, [split.theta_heads, split.used_columns()]))
}

/// The order of dimensions that makes (batch, tokens, heads, features) of a layout.
fn heads_last(layout: TokenLayout) -> [usize; 4] {
    match layout {
        TokenLayout::TokensHeads => [0, 1, 2, 3],
        TokenLayout::HeadsTokens => [0, 2, 1, 3],
    }
}
