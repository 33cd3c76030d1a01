//! The normalization on whatever device there is, against the f64 reference.
#![cfg(feature = "runtime")]

mod support;

use fuselane::reference::Random;
use fuselane::reference::normalize::{self as reference, Input};
use fuselane::{DType, Element, GatePosition, Normalize, View};
use fuselane_gpu::normalize::{self, NormalizeBackward, NormalizeForward};
use fuselane_gpu::{Device, Tensor};
use support::{device, devices};

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
fn check(
    (name, device): (&str, &Device),
    options: &Normalize,
    rows: usize,
    d: usize,
    mean: f64,
    tolerance: f64,
) {
    let what = format!("{name} {rows}x{d} {options:?}");
    let [x, grad] = [numbers(rows * d, 1, mean), numbers(rows * d, 2, 0.0)];
    let [weight, bias] = [numbers(d, 3, 0.0), numbers(d, 4, 0.0)];
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
    for (name, device) in devices().filter(|(name, _)| ["default", "reread"].contains(name)) {
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
            check((name, &device), &options, rows, d, 0.5, 3e-6);
        }
        check((name, &device), &Normalize::rms_norm().with_eps(0.0), 3, 514, 0.0, 3e-6);
    }
}

/// A mean far above the deviation.
#[test]
fn far_means() {
    for (name, device) in devices() {
        check((name, &device), &Normalize::layer_norm(), 3, 513, 1e4, 1e-5);
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u64> {
    values.iter().map(|v| v.to_f64().to_bits()).collect()
}

/// Permuted, narrowed and repeated tensors give what dense ones give.
#[test]
fn views() {
    let device = device();
    let (rows, heads, d) = (6, 4, 10);
    let options = Normalize::layer_norm().with_groups(2);
    let dense: Vec<half::bf16> =
        numbers(rows * heads * d, 5, 0.0).iter().map(|&v| half::bf16::from_f32(v)).collect();
    let x = device.upload(View::new(&dense, &[rows, heads, d]).unwrap()).unwrap();
    let whole = normalize::forward_keeping(&options, &x, None).unwrap();
    // Heads before rows, the first 3 heads, in the order of memory.
    let part = x.permute(&[1, 0, 2]).unwrap().narrow(0, 0, 3).unwrap();
    let to = device.empty(DType::BF16, &[rows, heads, d]).unwrap();
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
    let copy = device.upload(View::new(&copy, &[rows, heads, 5]).unwrap()).unwrap();
    let want: Vec<half::bf16> =
        normalize::forward(&options, &copy, None).unwrap().download().unwrap();
    assert_eq!(bits(&to_odd.download::<half::bf16>().unwrap()), bits(&want));
    // One row again and again.
    let row = View::new(&dense[..d], &[d]).unwrap().broadcast(&[3, d]).unwrap();
    let repeated = device.upload(row).unwrap();
    let got = normalize::forward(&options, &repeated, None).unwrap().download::<half::bf16>();
    let got = got.unwrap();
    assert_eq!(bits(&got[..d]), bits(&got[2 * d..]));
}

/// A call without rows has gradients of zero, and one without features no statistics.
#[test]
fn empty() {
    let device = device();
    let none: [f32; 0] = [];
    let x = device.upload(View::new(&none, &[0, 3]).unwrap()).unwrap();
    let weight = device.upload(View::new(&[1.0f32; 3], &[3]).unwrap()).unwrap();
    let options = Normalize { gate_position: GatePosition::Post, ..Normalize::layer_norm() };
    let saved = normalize::forward_keeping(&options, &x, Some(&weight)).unwrap();
    let gradients = normalize::backward(&options, &x, &x, Some(&weight), &saved).unwrap();
    assert_eq!(gradients.dweight.unwrap().download::<f32>().unwrap(), [0.0; 3]);
    let x = device.upload(View::new(&none, &[2, 0]).unwrap()).unwrap();
    let saved = normalize::forward_keeping(&options, &x, None).unwrap();
    assert!(saved.rstd.download::<f32>().unwrap().iter().all(|v| v.is_nan()));
}
