//! What only the launch layer decides: grids of two dimensions, and the width of indices.
#![cfg(feature = "runtime")]

mod support;

use fuselane::{Act, DType, FusedAct, Normalize, Rotate, Softmax, View};
use fuselane_gpu::normalize::{NormalizeBackward, NormalizeForward};
use fuselane_gpu::{Tuning, act, normalize, rotate, softmax};
use support::device;

/// More cubes than one dimension of a grid has, of one unit each.
#[test]
fn more_than_65535_cubes() {
    let device = device().tuned(Tuning { units: Some(1), vector: Some(1), ..Tuning::default() });
    let x: Vec<f32> = (0..140_002).map(|i| i as f32 - 70_000.5).collect();
    let flat = device.upload(View::new(&x, &[140_002]).unwrap()).unwrap();
    let want: Vec<f32> = x.iter().map(|v| v.max(0.0)).collect();
    assert_eq!(act::forward(Act::Relu, &flat).unwrap().download::<f32>().unwrap(), want);

    // Rows of two numbers that lie one apart: a softmax is the same for all of them.
    let rows = device.upload(View::new(&x, &[70_001, 2]).unwrap()).unwrap();
    let o = softmax::forward(&Softmax::over(-1), &rows).unwrap().download::<f32>().unwrap();
    assert!(o.chunks(2).all(|row| row == &o[..2]), "all rows are alike");
    assert!((o[0] - 0.268_941_42).abs() < 1e-6);

    let norm = Normalize::layer_norm().with_eps(0.0);
    let o = normalize::forward(&norm, &rows, None).unwrap().download::<f32>().unwrap();
    assert!(o.chunks(2).all(|row| (row[0] + 1.0).abs() < 1e-6 && (row[1] - 1.0).abs() < 1e-6));
}

/// Partial sums of parameters, of more cubes than one dimension of a grid has.
#[test]
fn partial_sums_of_more_than_65535_cubes() {
    for reread in [false, true] {
        let tuning = Tuning { units: Some(1), reread: Some(reread), ..Tuning::default() };
        let device = device().tuned(tuning);
        // 256 blocks of 16 rows, for each of 300 groups.
        let (rows, d) = (4096, 300);
        let x: Vec<f32> = (0..rows * d).map(|i| if i % 3 == 0 { -1.0 } else { 1.0 }).collect();
        let upload = |numbers: &[f32], shape: &[usize]| {
            device.upload(View::new(numbers, shape).unwrap()).unwrap()
        };
        let x_there = upload(&x, &[rows, d]);
        let grad = upload(&vec![1.0; rows * d], &[rows, d]);
        let weight = upload(&vec![1.0; d], &[d]);
        let options = Normalize { groups: d, ..Normalize::rms_norm() }.with_eps(0.0);
        let mut o = device.empty(DType::F32, &[rows, d]).unwrap();
        let mut rstd = device.empty(DType::F32, &[rows, d]).unwrap();
        let call = NormalizeForward::new(&x_there, &mut o);
        let call = NormalizeForward { rstd: Some(&mut rstd), ..call };
        normalize::forward_into(&options, call).unwrap();
        let mut dweight = device.empty(DType::F32, &[d]).unwrap();
        let mut dbias = device.empty(DType::F32, &[d]).unwrap();
        let call = NormalizeBackward {
            weight: Some(&weight),
            dweight: Some(&mut dweight),
            dbias: Some(&mut dbias),
            ..NormalizeBackward::new(&grad, &x_there, &rstd)
        };
        normalize::backward_into(&options, call).unwrap();
        let column = |c: usize| (0..rows).map(|row| x[row * d + c]).sum::<f32>();
        let want: Vec<f32> = (0..d).map(column).collect();
        assert_eq!(dweight.download::<f32>().unwrap(), want);
        assert_eq!(dbias.download::<f32>().unwrap(), vec![rows as f32; d]);
    }
}

/// The sums of a softmax over the sequence, of more columns than one dimension of a grid has cubes.
#[test]
fn sums_of_more_than_65535_columns() {
    let tuning = Tuning { units: Some(1), vector: Some(1), ..Tuning::default() };
    let device = device().tuned(tuning);
    let (n, h, d) = (3, 35_001, 2);
    let x: Vec<f32> = (0..n * h * d).map(|i| (i % 7) as f32 / 4.0).collect();
    let grad: Vec<f32> = (0..n * h * d).map(|i| (i % 5) as f32 - 2.0).collect();
    let theta = [0.3f32];
    let (x, grad) =
        (View::new(&x, &[1, n, h, d]).unwrap(), View::new(&grad, &[1, n, h, d]).unwrap());
    let theta = View::new(&theta, &[1, 1]).unwrap();
    let options = Rotate { act: FusedAct::SoftmaxSequence, ..Rotate::default() };
    let want = options.backward(Some(x), grad, theta).unwrap().to_vec::<f32>().unwrap();
    let [x, grad, theta] = [x, grad, theta].map(|view| device.upload(view).unwrap());
    let dx = rotate::backward(&options, Some(&x), &grad, &theta).unwrap();
    for (got, want) in dx.download::<f32>().unwrap().iter().zip(&want) {
        assert!((got - want).abs() < 1e-6, "{got} for {want}");
    }
}

/// Wide indices give the same results where a device has them, and an error where it has none.
#[test]
fn wide_indices() {
    let device = device().tuned(Tuning { wide_indices: Some(true), ..Tuning::default() });
    let x: Vec<f32> = (0..1000).map(|i| i as f32 - 500.0).collect();
    let there = device.upload(View::new(&x, &[1000]).unwrap()).unwrap();
    match act::forward(Act::Relu, &there) {
        Ok(o) => {
            let want: Vec<f32> = x.iter().map(|v| v.max(0.0)).collect();
            assert_eq!(o.download::<f32>().unwrap(), want);
        }
        Err(error) => {
            assert_eq!(error.operator(), "act");
            assert!(error.to_string().contains("no wider indices"), "{error}");
        }
    }
}
