//! A row's result does not depend on how many others are in the call: the first entry of a batch of 1
//! has the bits of the first entry of a larger one.
#![cfg(feature = "runtime")]

mod support;

use fuselane::reference::Random;
use fuselane::{Element, FusedAct, Normalize, Rotate, Softmax, View};
use fuselane_gpu::{Device, Tensor, normalize, rotate, softmax};
use half::bf16;
use support::devices;

const BATCHES: [usize; 3] = [1, 2, 64];

/// Asserts that `run` of the first 1, 2 and 64 entries of a tensor gives the first entry the same
/// bits.
fn assert_invariant<T: Element>(
    what: &str,
    device: &Device,
    entry: &[usize],
    run: impl Fn(&Tensor) -> Tensor,
) {
    let len: usize = entry.iter().product();
    let most = BATCHES.into_iter().max().unwrap();
    let numbers: Vec<T> = Random::new(9).normals(most * len).into_iter().map(T::from_f64).collect();
    let mut first: Option<Vec<T>> = None;
    for batch in BATCHES {
        let shape = [&[batch], entry].concat();
        let x = device.upload(View::new(&numbers[..batch * len], &shape).unwrap()).unwrap();
        let o = run(&x);
        let per_entry = o.len() / batch;
        let o = o.download::<T>().unwrap()[..per_entry].to_vec();
        let want = first.get_or_insert_with(|| o.clone());
        let differing = o.iter().zip(want.iter()).filter(|(a, b)| a.to_f64() != b.to_f64()).count();
        assert_eq!(differing, 0, "{what}, {}: batch of {batch}", T::DTYPE);
    }
}

fn softmaxes<T: Element>(what: &str, device: &Device) {
    // Rows and columns that one team, several units and several segments work on.
    for (n, d) in [(3, 40), (1100, 16), (17, 1000)] {
        for dim in [-1, 1] {
            let options = Softmax::over(dim);
            let what = format!("{what}: softmax({dim}) of {n} x {d}");
            let forward = |x: &Tensor| softmax::forward(&options, x).unwrap();
            assert_invariant::<T>(&what, device, &[n, d], forward);
            let backward = |x: &Tensor| softmax::backward_from_input(&options, x, x).unwrap();
            assert_invariant::<T>(&format!("{what} backward"), device, &[n, d], backward);
        }
    }
}

fn norms<T: Element>(what: &str, device: &Device) {
    for d in [40, 1000, 20_000] {
        for (name, options) in [("rms", Normalize::rms_norm()), ("layer", Normalize::layer_norm())]
        {
            let what = format!("{what}: {name} norm of {d}");
            let forward = |x: &Tensor| normalize::forward(&options, x, None).unwrap();
            assert_invariant::<T>(&what, device, &[d], forward);
            let backward = |x: &Tensor| {
                let saved = normalize::forward_keeping(&options, x, None).unwrap();
                normalize::backward(&options, x, x, None, &saved).unwrap().dx
            };
            assert_invariant::<T>(&format!("{what} backward"), device, &[d], backward);
        }
    }
}

fn rotations<T: Element>(what: &str, device: &Device) {
    let theta = device.upload(View::new(&[0.3f32], &[1, 1]).unwrap()).unwrap();
    for act in [FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence] {
        for entry in [[5, 3, 40], [1100, 1, 8]] {
            let options = Rotate { act, ..Rotate::default() };
            let what = format!("{what}: rotate with {act} of {entry:?}");
            let forward = |x: &Tensor| rotate::forward(&options, x, &theta).unwrap();
            assert_invariant::<T>(&what, device, &entry, forward);
            let backward = |x: &Tensor| rotate::backward(&options, Some(x), x, &theta).unwrap();
            assert_invariant::<T>(&format!("{what} backward"), device, &entry, backward);
        }
    }
}

fn all_dtypes(run: [fn(&str, &Device); 2]) {
    // The ways of launching that differ in how rows are summed.
    for (what, device) in
        devices().filter(|(what, _)| ["default", "planes", "reread"].contains(what))
    {
        for run in run {
            run(what, &device);
        }
    }
}

#[test]
fn softmax_is_batch_invariant() {
    all_dtypes([softmaxes::<f32>, softmaxes::<bf16>]);
}

#[test]
fn normalize_is_batch_invariant() {
    all_dtypes([norms::<f32>, norms::<bf16>]);
}

#[test]
fn rotate_is_batch_invariant() {
    all_dtypes([rotations::<f32>, rotations::<bf16>]);
}

/// Not only the batch: a row of a single head, and one of several.
#[test]
fn dimensions_of_size_1_count() {
    let (_, device) = devices().next().unwrap();
    let x: Vec<f32> = Random::new(3).normals(2 * 33).into_iter().map(|v| v as f32).collect();
    let whole = device.upload(View::new(&x, &[2, 33]).unwrap()).unwrap();
    let rows = whole.narrow(1, 0, 32).unwrap();
    let run = |x: &Tensor| softmax::forward(&Softmax::over(-1), x).unwrap();
    let many = run(&rows).download::<f32>().unwrap();
    let one = run(&rows.narrow(0, 0, 1).unwrap()).download::<f32>().unwrap();
    assert_eq!(many[..32], one);
}
