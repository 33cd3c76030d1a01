//! A device as a backend of the option matrix in `fuselane-check`.

use fuselane::{
    Act, Angles, Cosine, CosineBackward, DType, Normalize, NormalizeBackward, NormalizeForward,
    Residual, Result, Rotate, RotateBackward, Softmax, View, ViewMut,
};
use fuselane_check::Backend;

use crate::ops::encode::EncodingBackward;
use crate::{AngleTable, Device, Tensor, act, cosine, normalize, rotate, softmax};

/// A device for `fuselane_check::run_on`. Each call copies its operands to the device, with their
/// strides and with what their outputs hold, runs there, and copies the results back.
#[derive(Debug, Clone)]
pub struct CheckBackend {
    device: Device,
    name: String,
}

impl CheckBackend {
    /// Under the device's own name in outcomes.
    pub fn new(device: Device) -> Self {
        let name = device.name().to_owned();
        Self { device, name }
    }

    /// Under another name: for one device that is tuned in several ways.
    pub fn named(device: Device, name: impl Into<String>) -> Self {
        Self { device, name: name.into() }
    }

    fn input(&self, view: View<'_>) -> Result<Tensor> {
        self.device.upload(view)
    }

    fn optional(&self, view: Option<View<'_>>) -> Result<Option<Tensor>> {
        view.map(|view| self.input(view)).transpose()
    }

    fn output<'a>(&self, view: ViewMut<'a>) -> Result<Output<'a>> {
        Ok(Output { tensor: self.device.upload(view.as_view())?, view })
    }

    fn optional_output<'a>(&self, view: Option<ViewMut<'a>>) -> Result<Option<Output<'a>>> {
        view.map(|view| self.output(view)).transpose()
    }

    fn angles(&self, angles: Angles<'_>) -> Result<Uploaded> {
        Ok(match angles {
            Angles::Theta(theta) => Uploaded::Theta(self.input(theta)?),
            Angles::Table(table) => {
                Uploaded::Table(Box::new(AngleTable::upload(&self.device, table)?))
            }
        })
    }

    fn encode(
        &self,
        x: View<'_>,
        angles: Angles<'_>,
        o: ViewMut<'_>,
        forward_into: impl FnOnce(&Tensor, crate::Angles<'_>, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        let (x, angles, mut o) = (self.input(x)?, self.angles(angles)?, self.output(o)?);
        forward_into(&x, angles.angles(), &mut o.tensor)?;
        o.finish()
    }

    fn encode_backward(
        &self,
        call: RotateBackward<'_>,
        backward_into: impl FnOnce(EncodingBackward<'_>) -> Result<()>,
    ) -> Result<()> {
        let (x, grad) = (self.optional(call.x)?, self.input(call.grad)?);
        let angles = self.angles(call.angles)?;
        let mut dx = self.optional_output(call.dx)?;
        let mut dtheta = self.optional_output(call.dtheta)?;
        backward_into(EncodingBackward {
            x: x.as_ref(),
            grad: &grad,
            angles: angles.angles(),
            dx: tensor(&mut dx),
            dtheta: tensor(&mut dtheta),
        })?;
        finish_all([dx, dtheta])
    }
}

/// A result on the device, and where it goes on the host.
struct Output<'a> {
    tensor: Tensor,
    view: ViewMut<'a>,
}

impl Output<'_> {
    fn finish(self) -> Result<()> {
        self.tensor.download_into(self.view)
    }
}

fn tensor<'a>(output: &'a mut Option<Output<'_>>) -> Option<&'a mut Tensor> {
    output.as_mut().map(|output| &mut output.tensor)
}

fn finish_all<const N: usize>(outputs: [Option<Output<'_>>; N]) -> Result<()> {
    outputs.into_iter().flatten().try_for_each(Output::finish)
}

/// Angles on the device.
enum Uploaded {
    Theta(Tensor),
    Table(Box<AngleTable>),
}

impl Uploaded {
    fn angles(&self) -> crate::Angles<'_> {
        match self {
            Self::Theta(theta) => crate::Angles::Theta(theta),
            Self::Table(table) => crate::Angles::Table(table),
        }
    }
}

impl Backend for CheckBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn supports(&self, dtype: DType) -> bool {
        self.device.supports(dtype)
    }

    fn act_forward(&self, act: Act, x: View<'_>, o: ViewMut<'_>) -> Result<()> {
        let (x, mut o) = (self.input(x)?, self.output(o)?);
        act::forward_into(act, &x, &mut o.tensor)?;
        o.finish()
    }

    fn act_in_place(&self, act: Act, x: ViewMut<'_>) -> Result<()> {
        let mut x = self.output(x)?;
        act::forward_in_place(act, &mut x.tensor)?;
        x.finish()
    }

    fn act_backward(&self, act: Act, x: View<'_>, grad: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let (x, grad, mut dx) = (self.input(x)?, self.input(grad)?, self.output(dx)?);
        act::backward_into(act, &x, &grad, &mut dx.tensor)?;
        dx.finish()
    }

    fn softmax_forward(&self, options: &Softmax, x: View<'_>, o: ViewMut<'_>) -> Result<()> {
        let (x, mut o) = (self.input(x)?, self.output(o)?);
        softmax::forward_into(options, &x, &mut o.tensor)?;
        o.finish()
    }

    fn softmax_backward(
        &self,
        options: &Softmax,
        o: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let (o, grad, mut dx) = (self.input(o)?, self.input(grad)?, self.output(dx)?);
        softmax::backward_into(options, &o, &grad, &mut dx.tensor)?;
        dx.finish()
    }

    fn softmax_backward_from_input(
        &self,
        options: &Softmax,
        x: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let (x, grad, mut dx) = (self.input(x)?, self.input(grad)?, self.output(dx)?);
        softmax::backward_from_input_into(options, &x, &grad, &mut dx.tensor)?;
        dx.finish()
    }

    fn normalize_forward(&self, options: &Normalize, call: NormalizeForward<'_>) -> Result<()> {
        let x = self.input(call.x)?;
        let weight = self.optional(call.weight)?;
        let bias = self.optional(call.bias)?;
        let gate = self.optional(call.gate)?;
        let mut o = self.output(call.o)?;
        let mut rstd = self.optional_output(call.rstd)?;
        let mut mean = self.optional_output(call.mean)?;
        let (mut added, mut sum) = (None, None);
        let residual = match call.residual {
            Residual::None => normalize::Residual::None,
            Residual::Add(residual) => {
                normalize::Residual::Add(added.insert(self.input(residual)?))
            }
            Residual::AddInto(residual, into) => normalize::Residual::AddInto(
                added.insert(self.input(residual)?),
                &mut sum.insert(self.output(into)?).tensor,
            ),
            Residual::AddInPlace(residual) => {
                normalize::Residual::AddInPlace(&mut sum.insert(self.output(residual)?).tensor)
            }
        };
        normalize::forward_into(
            options,
            normalize::NormalizeForward {
                x: &x,
                weight: weight.as_ref(),
                bias: bias.as_ref(),
                gate: gate.as_ref(),
                residual,
                o: &mut o.tensor,
                rstd: tensor(&mut rstd),
                mean: tensor(&mut mean),
            },
        )?;
        finish_all([Some(o), rstd, mean, sum])
    }

    fn normalize_backward(&self, options: &Normalize, call: NormalizeBackward<'_>) -> Result<()> {
        let [grad, x, rstd] = [self.input(call.grad)?, self.input(call.x)?, self.input(call.rstd)?];
        let residual = self.optional(call.residual)?;
        let gate = self.optional(call.gate)?;
        let weight = self.optional(call.weight)?;
        let bias = self.optional(call.bias)?;
        let mean = self.optional(call.mean)?;
        let grad_residual_out = self.optional(call.grad_residual_out)?;
        let mut dx = self.optional_output(call.dx)?;
        let mut dresidual = self.optional_output(call.dresidual)?;
        let mut dgate = self.optional_output(call.dgate)?;
        let mut dweight = self.optional_output(call.dweight)?;
        let mut dbias = self.optional_output(call.dbias)?;
        normalize::backward_into(
            options,
            normalize::NormalizeBackward {
                grad: &grad,
                x: &x,
                residual: residual.as_ref(),
                gate: gate.as_ref(),
                weight: weight.as_ref(),
                bias: bias.as_ref(),
                rstd: &rstd,
                mean: mean.as_ref(),
                grad_residual_out: grad_residual_out.as_ref(),
                dx: tensor(&mut dx),
                dresidual: tensor(&mut dresidual),
                dgate: tensor(&mut dgate),
                dweight: tensor(&mut dweight),
                dbias: tensor(&mut dbias),
            },
        )?;
        finish_all([dx, dresidual, dgate, dweight, dbias])
    }

    fn rotate_forward(
        &self,
        options: &Rotate<'_>,
        x: View<'_>,
        angles: Angles<'_>,
        o: ViewMut<'_>,
    ) -> Result<()> {
        self.encode(x, angles, o, |x, angles, o| rotate::forward_into(options, x, angles, o))
    }

    fn rotate_backward(&self, options: &Rotate<'_>, call: RotateBackward<'_>) -> Result<()> {
        self.encode_backward(call, |call| rotate::backward_into(options, call))
    }

    fn cosine_forward(
        &self,
        options: &Cosine<'_>,
        x: View<'_>,
        angles: Angles<'_>,
        o: ViewMut<'_>,
    ) -> Result<()> {
        self.encode(x, angles, o, |x, angles, o| cosine::forward_into(options, x, angles, o))
    }

    fn cosine_backward(&self, options: &Cosine<'_>, call: CosineBackward<'_>) -> Result<()> {
        let CosineBackward { x, grad, angles, dx, dtheta } = call;
        let call = RotateBackward { x, grad, angles, dx, dtheta };
        self.encode_backward(call, |call| cosine::backward_into(options, call))
    }
}
