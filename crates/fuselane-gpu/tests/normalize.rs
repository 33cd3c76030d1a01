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
    matrix(&["default"], 211);
}

#[test]
fn matrix_tuned() {
    matrix(&["vector 1", "planes", "no planes", "reread", "32 units"], 997);
}

/// Numbers of f32 with a mean and a deviation.
fn numbers(len: usize, seed: u64, mean: f64) -> Vec<f32> {
    Random::new(seed).normals(len).iter().map(|v| (v + mean) as f32).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

/// Asserts that numbers are near, against the largest of the truth.
fn assert_near(got: &[f32], truth: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), truth.len(), "{what}");
    let largest = truth.iter().fold(0.0f64, |largest, v| largest.max(v.abs()));
    for (i, (&got, &truth)) in got.iter().zip(truth).enumerate() {
        let error = (f64::from(got) - truth).abs();
        assert!(error <= tolerance * largest, "{what} at {i}: {got} for {truth}");
    }
}

/// Forward and backward with weight and bias, everything asked for, against the reference.
fn check(gpu: &Gpu, options: &Normalize, rows: usize, d: usize, mean: f64, tolerance: f64) {
    let what = format!("{} {rows}x{d} {options:?}", gpu.name);
    let [x, grad] = [numbers(rows * d, 1, mean), numbers(rows * d, 2, 0.0)];
    let [weight, bias] = [numbers(d, 3, 0.0), numbers(d, 4, 0.0)];
    let device = &gpu.device;
    let [x_there, grad_there] =
        [&x, &grad].map(|v| device.upload(View::new(v, &[rows, d]).unwrap()).unwrap());
    let [weight_there, bias_there] =
        [&weight, &bias].map(|v| device.upload(View::new(v, &[d]).unwrap()).unwrap());
    let statistic = || device.empty(DType::F32, &[rows, options.groups]).unwrap();
    let (mut o, mut rstd) = (device.empty(DType::F32, &[rows, d]).unwrap(), statistic());
    let mut means = options.center.then(statistic);
    normalize::forward_into(
        options,
        NormalizeForward {
            weight: Some(&weight_there),
            bias: Some(&bias_there),
            rstd: Some(&mut rstd),
            mean: means.as_mut(),
            ..NormalizeForward::new(&x_there, &mut o)
        },
    )
    .unwrap();
    let [wide_x, wide_grad, wide_weight, wide_bias] = [&x, &grad, &weight, &bias].map(|v| wide(v));
    let input = Input {
        x: &wide_x,
        weight: Some(&wide_weight),
        bias: Some(&wide_bias),
        rows,
        d,
        ..Input::default()
    };
    let truth = reference::forward(options, &input);
    assert_near(&o.download::<f32>().unwrap(), &truth.o, tolerance, &what);
    assert_near(&rstd.download::<f32>().unwrap(), &truth.rstd, tolerance, &what);
    let mut dx = device.empty(DType::F32, &[rows, d]).unwrap();
    let parameter = || device.empty(DType::F32, &[d]).unwrap();
    let (mut dweight, mut dbias) = (parameter(), parameter());
    let mut run = |all: bool, dweight: &mut Tensor| {
        normalize::backward_into(
            options,
            NormalizeBackward {
                weight: Some(&weight_there),
                mean: means.as_ref(),
                dx: Some(&mut dx),
                dweight: all.then_some(dweight),
                dbias: all.then_some(&mut dbias),
                ..NormalizeBackward::new(&grad_there, &x_there, &rstd)
            },
        )
        .unwrap();
        dx.download::<f32>().unwrap()
    };
    let got = run(true, &mut dweight);
    // The bits of dx are the same whatever else is asked for, and all bits are on the next run.
    assert_eq!(run(false, &mut dweight), got, "{what}");
    let mut again = parameter();
    run(true, &mut again);
    let dweight = dweight.download::<f32>().unwrap();
    assert_eq!(again.download::<f32>().unwrap(), dweight, "{what}");
    let truth = reference::backward(options, &input, &wide_grad, None);
    assert_near(&got, &truth.dx, tolerance, &what);
    assert_near(&dweight, &truth.dweight.unwrap(), tolerance, &what);
    assert_near(&dbias.download::<f32>().unwrap(), &truth.dbias.unwrap(), tolerance, &what);
}

/// Rows of every length, short and long, odd and even; few rows and many.
#[test]
fn lengths() {
    for gpu in devices().iter().filter(|gpu| ["default", "reread"].contains(&gpu.name.as_str())) {
        for (rows, d, groups) in [
            (1, 1, 1),
            (1, 127, 1),
            (5, 129, 3),
            (3, 2049, 1),
            (2, 40001, 1),
            (2, 40000, 2),
            (9000, 8, 2),
            (67, 1024, 1),
        ] {
            let options = Normalize::layer_norm().with_groups(groups).with_eps(0.1);
            check(gpu, &options, rows, d, 0.5, 3e-6);
        }
        check(gpu, &Normalize::rms_norm().with_eps(0.0), 3, 514, 0.0, 3e-6);
    }
}

/// A mean far above the deviation.
#[test]
fn far_means() {
    for gpu in devices() {
        check(&gpu, &Normalize::layer_norm(), 3, 513, 1e4, 1e-5);
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u64> {
    values.iter().map(|v| v.to_f64().to_bits()).collect()
}

/// Permuted, narrowed and repeated tensors give what dense ones give.
#[test]
fn views() {
    let gpu = &devices()[0];
    let (rows, heads, d) = (6, 4, 10);
    let options = Normalize::layer_norm().with_groups(2);
    let dense: Vec<half::bf16> =
        numbers(rows * heads * d, 5, 0.0).iter().map(|&v| half::bf16::from_f32(v)).collect();
    let x = gpu.device.upload(View::new(&dense, &[rows, heads, d]).unwrap()).unwrap();
    let whole = normalize::forward_keeping(&options, &x, None).unwrap();
    // Heads before rows, the first 3 heads, in the order of memory.
    let part = x.permute(&[1, 0, 2]).unwrap().narrow(0, 0, 3).unwrap();
    let to = gpu.device.empty(DType::BF16, &[rows, heads, d]).unwrap();
    let mut to_part = to.permute(&[1, 0, 2]).unwrap().narrow(0, 0, 3).unwrap();
    normalize::forward_into(&options, NormalizeForward::new(&part, &mut to_part)).unwrap();
    let want = whole.o.permute(&[1, 0, 2]).unwrap().narrow(0, 0, 3).unwrap();
    let want = want.download::<half::bf16>().unwrap();
    assert_eq!(bits(&to_part.download::<half::bf16>().unwrap()), bits(&want));
    // An odd part of a row, which shares words with its neighbours.
    let odd = x.narrow(2, 1, 5).unwrap();
    let mut to_odd = to.narrow(2, 1, 5).unwrap();
    let options = Normalize::rms_norm();
    normalize::forward_into(&options, NormalizeForward::new(&odd, &mut to_odd)).unwrap();
    let copy: Vec<half::bf16> = odd.download().unwrap();
    let copy = gpu.device.upload(View::new(&copy, &[rows, heads, 5]).unwrap()).unwrap();
    let want: Vec<half::bf16> =
        normalize::forward(&options, &copy, None).unwrap().download().unwrap();
    assert_eq!(bits(&to_odd.download::<half::bf16>().unwrap()), bits(&want));
    // One row again and again.
    let row = View::new(&dense[..d], &[d]).unwrap().broadcast(&[3, d]).unwrap();
    let repeated = gpu.device.upload(row).unwrap();
    let got = normalize::forward(&options, &repeated, None).unwrap().download::<half::bf16>();
    let got = got.unwrap();
    assert_eq!(bits(&got[..d]), bits(&got[2 * d..]));
}

/// A call without rows has gradients of zero, and one without features no statistics.
#[test]
fn empty() {
    let gpu = &devices()[0];
    let none: [f32; 0] = [];
    let x = gpu.device.upload(View::new(&none, &[0, 3]).unwrap()).unwrap();
    let weight = gpu.device.upload(View::new(&[1.0f32; 3], &[3]).unwrap()).unwrap();
    let options = Normalize { gate_position: GatePosition::Post, ..Normalize::layer_norm() };
    let kept = normalize::forward_keeping(&options, &x, Some(&weight)).unwrap();
    let gradients = normalize::backward(&options, &x, &x, Some(&weight), &kept).unwrap();
    assert_eq!(gradients.dweight.unwrap().download::<f32>().unwrap(), [0.0; 3]);
    let x = gpu.device.upload(View::new(&none, &[2, 0]).unwrap()).unwrap();
    let kept = normalize::forward_keeping(&options, &x, None).unwrap();
    assert!(kept.rstd.download::<f32>().unwrap().iter().all(|v| v.is_nan()));
}
