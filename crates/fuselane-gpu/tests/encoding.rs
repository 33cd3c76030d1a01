//! Rotate and cosine beside the matrix: many tokens, far positions, sums that repeat, refusals.
#![cfg(feature = "runtime")]

mod support;

use fuselane::reference::Random;
use fuselane::{Act, Cosine, DType, FusedAct, Pairing, Positions, Rotate, View, ViewMut};
use fuselane_gpu::rotate::{self, RotateBackward};
use fuselane_gpu::{AngleTable, Angles, Tensor, cosine};
use support::{device, devices};

fn numbers(len: usize, seed: u64) -> Vec<f32> {
    Random::new(seed).normals(len).iter().map(|&v| v as f32).collect()
}

/// Asserts that all numbers are within `tolerance` of what the CPU gives.
fn assert_near(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= tolerance, "{what} at {i}: {got} for {want}");
    }
}

/// The operands of a backward that asks for both gradients; those of `rotate` and `cosine` are one type.
fn all_gradients<'a>(
    x: &'a Tensor,
    grad: &'a Tensor,
    theta: &'a Tensor,
    dx: &'a mut Tensor,
    dtheta: &'a mut Tensor,
) -> RotateBackward<'a> {
    let (dx, dtheta) = (Some(dx), Some(dtheta));
    RotateBackward { x: Some(x), grad, angles: Angles::Theta(theta), dx, dtheta }
}

/// More tokens than blocks of sums, with every kind of activation, in every way of launching.
#[test]
fn many_tokens() {
    let (b, n, h, d) = (2, 1500, 2, 24);
    let (x, grad) = (numbers(b * n * h * d, 1), numbers(b * n * h * d, 2));
    let theta: Vec<f32> = (0..d / 2).map(|k| 10f32.powf(-(k as f32) / 6.0) / 100.0).collect();
    let shape = [b, n, h, d];
    let acts = [Act::Silu.into(), FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence];
    for act in acts {
        let options = Rotate { act, positions: Positions::From(3), ..Rotate::default() };
        let (x_view, theta_view) =
            (View::new(&x, &shape).unwrap(), View::new(&theta, &[1, d / 2]).unwrap());
        let grad_view = View::new(&grad, &shape).unwrap();
        let want = options.forward(x_view, theta_view).unwrap().to_vec::<f32>().unwrap();
        let dwant = options.backward(Some(x_view), grad_view, theta_view).unwrap();
        let dwant = dwant.to_vec::<f32>().unwrap();
        let mut dtheta_want = vec![0.0f32; d / 2];
        options
            .backward_into(fuselane::RotateBackward {
                x: Some(x_view),
                grad: grad_view,
                angles: theta_view.into(),
                dx: None,
                dtheta: Some(ViewMut::new(&mut dtheta_want, &[1, d / 2]).unwrap()),
            })
            .unwrap();
        // Sums of thousands of terms, with coordinates of up to 1500: against the largest.
        let largest = dtheta_want.iter().fold(0.0f32, |largest, v| largest.max(v.abs()));
        for (name, device) in devices() {
            let what = format!("{name} {act}");
            let [x, grad] = [x_view, grad_view].map(|view| device.upload(view).unwrap());
            let theta = device.upload(theta_view).unwrap();
            let o = rotate::forward(&options, &x, &theta).unwrap();
            assert_near(&o.download::<f32>().unwrap(), &want, 2e-6, &what);
            let mut sums = Vec::new();
            for _ in 0..2 {
                let mut dx = device.empty(DType::F32, &shape).unwrap();
                let mut dtheta = device.empty(DType::F32, &[1, d / 2]).unwrap();
                let call = all_gradients(&x, &grad, &theta, &mut dx, &mut dtheta);
                rotate::backward_into(&options, call).unwrap();
                assert_near(&dx.download::<f32>().unwrap(), &dwant, 4e-6, &what);
                let dtheta = dtheta.download::<f32>().unwrap();
                assert_near(&dtheta, &dtheta_want, 2e-6 * largest, &format!("{what}: dtheta"));
                sums.push(dtheta.into_iter().map(f32::to_bits).collect());
            }
            let [first, second]: [Vec<u32>; 2] = sums.try_into().expect("two runs");
            assert_eq!(first, second, "{what}: dtheta repeats");
        }
    }
}

/// Features that no angle turns, in rows whose numbers are all far below 0.
#[test]
fn features_that_pass_through() {
    let (n, d) = (3, 8);
    let shape = [1, n, 1, d];
    let (x, grad) = (vec![-100.0f32; n * d], numbers(n * d, 7));
    let (x_view, grad_view) = (View::new(&x, &shape).unwrap(), View::new(&grad, &shape).unwrap());
    let theta_view = View::new(&[0.5f32], &[1, 1]).unwrap();
    for act in [FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence] {
        for pairing in [Pairing::Half, Pairing::Interleaved] {
            let options = Rotate { act, pairing, pairs: Some(1), ..Rotate::default() };
            let want = options.forward(x_view, theta_view).unwrap().to_vec::<f32>().unwrap();
            let dwant = options.backward(Some(x_view), grad_view, theta_view).unwrap();
            let dwant = dwant.to_vec::<f32>().unwrap();
            for (name, device) in devices() {
                let what = format!("{name} {act} {pairing:?}");
                let [x, grad, theta] =
                    [x_view, grad_view, theta_view].map(|view| device.upload(view).unwrap());
                let o = rotate::forward(&options, &x, &theta).unwrap();
                assert_near(&o.download::<f32>().unwrap(), &want, 1e-6, &what);
                let dx = rotate::backward(&options, Some(&x), &grad, &theta).unwrap();
                assert_near(&dx.download::<f32>().unwrap(), &dwant, 1e-6, &what);
            }
        }
    }
}

/// Positions that f32 cannot count to one by one, and whose angles are many turns.
#[test]
fn far_positions() {
    let device = device();
    let (n, d) = (40, 16);
    let (x, theta) = (numbers(n * d, 3), [0.7f32]);
    let (x_view, theta_view) =
        (View::new(&x, &[1, n, 1, d]).unwrap(), View::new(&theta, &[1, 1]).unwrap());
    let listed: Vec<i64> = (0..n as i64).map(|t| t * t * 1_000_003).collect();
    for positions in
        [Positions::From(1 << 30), Positions::From(-(1 << 40)), Positions::PerToken(&listed)]
    {
        let options = Rotate { positions, ..Rotate::default() };
        let want = options.forward(x_view, theta_view).unwrap().to_vec::<f32>().unwrap();
        let [x, theta] = [x_view, theta_view].map(|view| device.upload(view).unwrap());
        let o = rotate::forward(&options, &x, &theta).unwrap().download::<f32>().unwrap();
        assert_near(&o, &want, 2e-6, &format!("{positions:?}"));
    }
}

/// A table gives what its frequencies give, on a grid with extra tokens.
#[test]
fn tables() {
    let device = device();
    let (x, theta) = (numbers(2 * 13 * 9, 4), numbers(3, 5));
    let x_view = View::new(&x, &[2, 1, 13, 9]).unwrap();
    let theta_view = View::new(&theta, &[1, 3]).unwrap();
    let positions = Positions::Grid(&[2, 2, 3]);
    let options = Cosine { positions, extra_tokens: 1, ..Cosine::default() };
    let table = fuselane::AngleTable::for_grid(theta_view, 9, &[2, 2, 3], DType::F32).unwrap();
    let table = AngleTable::upload(&device, &table).unwrap();
    let [x, theta] = [x_view, theta_view].map(|view| device.upload(view).unwrap());
    let by_theta = cosine::forward(&options, &x, &theta).unwrap().download::<f32>().unwrap();
    let by_table = cosine::forward(&options, &x, &table).unwrap().download::<f32>().unwrap();
    assert_near(&by_table, &by_theta, 1e-6, "table");
}

/// Refusals are the core's, and an empty call has gradients of 0.
#[test]
fn refusals_and_empty_calls() {
    let device = device();
    let x = device.upload(View::new(&[1.0f32; 8], &[1, 2, 1, 4]).unwrap()).unwrap();
    let theta = device.upload(View::new(&[1.0f32; 3], &[1, 3]).unwrap()).unwrap();
    let error = rotate::forward(&Rotate::default(), &x, &theta).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rotate: theta has 3 frequencies, expected at most 2 (pairs of 4 features)"
    );
    let none: [f32; 0] = [];
    let x = device.upload(View::new(&none, &[1, 0, 1, 4]).unwrap()).unwrap();
    let grad = device.upload(View::new(&none, &[1, 0, 1, 8]).unwrap()).unwrap();
    let theta = device.upload(View::new(&[1.0f32; 4], &[1, 4]).unwrap()).unwrap();
    let mut dtheta = device.upload(View::new(&[f32::NAN; 4], &[1, 4]).unwrap()).unwrap();
    let mut dx = x.clone();
    cosine::backward_into(
        &Cosine { layout: fuselane::TokenLayout::TokensHeads, ..Cosine::default() },
        all_gradients(&x, &grad, &theta, &mut dx, &mut dtheta),
    )
    .unwrap();
    assert_eq!(dtheta.download::<f32>().unwrap(), [0.0; 4]);
}
