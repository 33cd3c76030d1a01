//! The normalization on whatever device there is, against the f64 reference.
#![cfg(any(feature = "wgpu", feature = "vulkan", feature = "cuda", feature = "rocm"))]

use fuselane::reference::Random;
use fuselane::reference::normalize::{self as reference, Input};
use fuselane::{
    Act, Angles, Cosine, CosineBackward, DType, Element, GatePosition, Normalize,
    Residual as HostResidual, Result, Rotate, RotateBackward, Softmax, View, ViewMut,
};
use fuselane_check::{Backend, Effort, Operator, Selection, run_on};
use fuselane_gpu::normalize::{self, NormalizeBackward, NormalizeForward, Residual};
use fuselane_gpu::{Device, Tensor, Tuning};

/// A device with a tuning of its own, as the matrix knows backends.
struct Gpu {
    name: String,
    device: Device,
}

fn tunings() -> Vec<(&'static str, Tuning)> {
    let default = Tuning::default();
    vec![
        ("default", default),
        ("vector 1", Tuning { vector: Some(1), ..default }),
        ("planes", Tuning { planes: Some(true), ..default }),
        ("no planes", Tuning { planes: Some(false), ..default }),
        ("reread", Tuning { reread: Some(true), ..default }),
        ("32 units", Tuning { units: Some(32), ..default }),
    ]
}

fn devices() -> Vec<Gpu> {
    let device = Device::open().expect("a device");
    let tuned = |(name, tuning)| Gpu { name: String::from(name), device: device.tuned(tuning) };
    tunings().into_iter().map(tuned).collect()
}

impl Gpu {
    fn upload(&self, view: Option<View<'_>>) -> Result<Option<Tensor>> {
        view.map(|view| self.device.upload(view)).transpose()
    }

    fn empty(&self, view: Option<&ViewMut<'_>>) -> Result<Option<Tensor>> {
        view.map(|view| self.device.empty(view.dtype(), view.shape())).transpose()
    }
}

fn download(tensor: Option<&Tensor>, view: Option<ViewMut<'_>>) -> Result<()> {
    match (tensor, view) {
        (Some(tensor), Some(view)) => tensor.download_into(view),
        _ => Ok(()),
    }
}

impl Backend for Gpu {
    fn name(&self) -> &str {
        &self.name
    }

    fn supports(&self, dtype: DType) -> bool {
        self.device.supports(dtype)
    }

    fn normalize_forward(
        &self,
        options: &Normalize,
        call: fuselane::NormalizeForward<'_>,
    ) -> Result<()> {
        let x = self.device.upload(call.x)?;
        let [weight, bias, gate] =
            [self.upload(call.weight)?, self.upload(call.bias)?, self.upload(call.gate)?];
        let mut o = self.device.empty(call.o.dtype(), call.o.shape())?;
        let mut rstd = self.empty(call.rstd.as_ref())?;
        let mut mean = self.empty(call.mean.as_ref())?;
        let (mut residual, mut sum) = (None, None);
        match &call.residual {
            HostResidual::None => {}
            HostResidual::Add(view) => residual = Some(self.device.upload(*view)?),
            HostResidual::AddInto(view, to) => {
                residual = Some(self.device.upload(*view)?);
                sum = self.empty(Some(to))?;
            }
            HostResidual::AddInPlace(view) => residual = Some(self.device.upload(view.as_view())?),
        }
        let in_place = matches!(call.residual, HostResidual::AddInPlace(_));
        normalize::forward_into(
            options,
            NormalizeForward {
                x: &x,
                weight: weight.as_ref(),
                bias: bias.as_ref(),
                gate: gate.as_ref(),
                residual: match (&mut residual, &mut sum) {
                    (None, _) => Residual::None,
                    (Some(residual), _) if in_place => Residual::AddInPlace(residual),
                    (Some(residual), None) => Residual::Add(residual),
                    (Some(residual), Some(sum)) => Residual::AddInto(residual, sum),
                },
                o: &mut o,
                rstd: rstd.as_mut(),
                mean: mean.as_mut(),
            },
        )?;
        o.download_into(call.o)?;
        download(rstd.as_ref(), call.rstd)?;
        download(mean.as_ref(), call.mean)?;
        match call.residual {
            HostResidual::None | HostResidual::Add(_) => Ok(()),
            HostResidual::AddInto(_, view) => download(sum.as_ref(), Some(view)),
            HostResidual::AddInPlace(view) => download(residual.as_ref(), Some(view)),
        }
    }

    fn normalize_backward(
        &self,
        options: &Normalize,
        call: fuselane::NormalizeBackward<'_>,
    ) -> Result<()> {
        let [grad, x, rstd] = [
            self.device.upload(call.grad)?,
            self.device.upload(call.x)?,
            self.device.upload(call.rstd)?,
        ];
        let [residual, gate, weight, bias, mean, grad_sum] = [
            self.upload(call.residual)?,
            self.upload(call.gate)?,
            self.upload(call.weight)?,
            self.upload(call.bias)?,
            self.upload(call.mean)?,
            self.upload(call.grad_residual_out)?,
        ];
        let mut dx = self.empty(call.dx.as_ref())?;
        let mut dresidual = self.empty(call.dresidual.as_ref())?;
        let mut dgate = self.empty(call.dgate.as_ref())?;
        let mut dweight = self.empty(call.dweight.as_ref())?;
        let mut dbias = self.empty(call.dbias.as_ref())?;
        normalize::backward_into(
            options,
            NormalizeBackward {
                residual: residual.as_ref(),
                gate: gate.as_ref(),
                weight: weight.as_ref(),
                bias: bias.as_ref(),
                mean: mean.as_ref(),
                grad_residual_out: grad_sum.as_ref(),
                dx: dx.as_mut(),
                dresidual: dresidual.as_mut(),
                dgate: dgate.as_mut(),
                dweight: dweight.as_mut(),
                dbias: dbias.as_mut(),
                ..NormalizeBackward::new(&grad, &x, &rstd)
            },
        )?;
        download(dx.as_ref(), call.dx)?;
        download(dresidual.as_ref(), call.dresidual)?;
        download(dgate.as_ref(), call.dgate)?;
        download(dweight.as_ref(), call.dweight)?;
        download(dbias.as_ref(), call.dbias)
    }

    fn act_forward(&self, _: Act, _: View<'_>, _: ViewMut<'_>) -> Result<()> {
        unreachable!("only the normalization runs")
    }

    fn act_in_place(&self, _: Act, _: ViewMut<'_>) -> Result<()> {
        unreachable!("only the normalization runs")
    }

    fn act_backward(&self, _: Act, _: View<'_>, _: View<'_>, _: ViewMut<'_>) -> Result<()> {
        unreachable!("only the normalization runs")
    }

    fn softmax_forward(&self, _: &Softmax, _: View<'_>, _: ViewMut<'_>) -> Result<()> {
        unreachable!("only the normalization runs")
    }

    fn softmax_backward(
        &self,
        _: &Softmax,
        _: View<'_>,
        _: View<'_>,
        _: ViewMut<'_>,
    ) -> Result<()> {
        unreachable!("only the normalization runs")
    }

    fn softmax_backward_from_input(
        &self,
        _: &Softmax,
        _: View<'_>,
        _: View<'_>,
        _: ViewMut<'_>,
    ) -> Result<()> {
        unreachable!("only the normalization runs")
    }

    fn rotate_forward(
        &self,
        _: &Rotate<'_>,
        _: View<'_>,
        _: Angles<'_>,
        _: ViewMut<'_>,
    ) -> Result<()> {
        unreachable!("only the normalization runs")
    }

    fn rotate_backward(&self, _: &Rotate<'_>, _: RotateBackward<'_>) -> Result<()> {
        unreachable!("only the normalization runs")
    }

    fn cosine_forward(
        &self,
        _: &Cosine<'_>,
        _: View<'_>,
        _: Angles<'_>,
        _: ViewMut<'_>,
    ) -> Result<()> {
        unreachable!("only the normalization runs")
    }

    fn cosine_backward(&self, _: &Cosine<'_>, _: CosineBackward<'_>) -> Result<()> {
        unreachable!("only the normalization runs")
    }
}

/// The bounds of the CPU hold on one of so many cases of the matrix (a prime, see
/// [`Effort::Every`]).
fn matrix(tuned: &[&str], every: usize) {
    let devices: Vec<Gpu> =
        devices().into_iter().filter(|gpu| tuned.contains(&gpu.name.as_str())).collect();
    let backends: Vec<&dyn Backend> = devices.iter().map(|gpu| gpu as &dyn Backend).collect();
    let selection = Selection {
        operators: vec![Operator::Normalize],
        dtypes: vec![DType::F32, DType::F16, DType::BF16],
        effort: Effort::Every(every),
        ..Selection::default()
    };
    let outcomes = run_on(&selection, &backends, &mut |_| {});
    assert!(!outcomes.is_empty());
    let mut broken = 0;
    for outcome in &outcomes {
        let fuselane_check::Outcome { backend, output, dtype, needed, k, case, fault, .. } =
            outcome;
        println!("{backend} {dtype} {output}: {needed:.2} of {k} ({case}) {fault:?}");
        broken += usize::from(!outcome.ok());
    }
    assert_eq!(broken, 0, "of {} outcomes", outcomes.len());
}

#[test]
fn matrix_by_default() {
    matrix(&["default"], 997);
}

#[test]
fn matrix_tuned() {
    matrix(&["vector 1", "planes", "no planes", "reread", "32 units"], 997);
}
