//! What only the launch layer decides: grids of two dimensions, and the width of indices.
#![cfg(feature = "runtime")]

mod support;

use fuselane::{Act, Normalize, Softmax, View};
use fuselane_gpu::{Tuning, act, normalize, softmax};
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
