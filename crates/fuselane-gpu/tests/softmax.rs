//! Softmax and its gradients against the reference, in every way that the launch layer has.
#![cfg(feature = "runtime")]

mod support;

use fuselane::reference::ulp::ulp;
use fuselane::reference::{self, Random};
use fuselane::{DType, Element, Result, Softmax, View};
use fuselane_gpu::{Device, Tensor, softmax};
use half::{bf16, f16};
use support::{device, devices};

/// Which of the three calls.
#[derive(Debug, Clone, Copy)]
enum Call {
    Forward,
    FromOutput,
    FromInput,
}

const CALLS: [Call; 3] = [Call::Forward, Call::FromOutput, Call::FromInput];

impl Call {
    fn run(self, options: &Softmax, x: &Tensor, grad: &Tensor, o: &mut Tensor) -> Result<()> {
        match self {
            Self::Forward => softmax::forward_into(options, x, o),
            Self::FromOutput => softmax::backward_into(options, x, grad, o),
            Self::FromInput => softmax::backward_from_input_into(options, x, grad, o),
        }
    }

    fn truth(self, options: &Softmax, x: &[f64], grad: &[f64], dims: [usize; 3]) -> Vec<f64> {
        use reference::softmax::{backward_from_input, backward_from_output, forward};
        match self {
            Self::Forward => forward(options, x, dims),
            Self::FromOutput => backward_from_output(options, x, grad, dims),
            Self::FromInput => backward_from_input(options, x, grad, dims),
        }
    }

    fn magnitude(self, options: &Softmax, x: &[f64], grad: &[f64], dims: [usize; 3]) -> Vec<f64> {
        use reference::softmax::{
            backward_from_input_magnitude, backward_from_output_magnitude, forward_magnitude,
        };
        match self {
            Self::Forward => forward_magnitude(options, x, dims),
            Self::FromOutput => backward_from_output_magnitude(options, x, grad, dims),
            Self::FromInput => backward_from_input_magnitude(options, x, grad, dims),
        }
    }

    /// K in f32.
    fn bound(self) -> f64 {
        fuselane_check::softmax::BOUNDS[self as usize].f32
    }
}

/// Runs all calls on f32 in memory order `shape`, permuted to `order`, cut by `cut` elements at the
/// start of each dimension; over dimension `dim` of what that gives. Each has to be right, and the
/// same bits a second time.
fn check(device: &Device, shape: &[usize], order: &[usize], cut: &[usize], dim: usize, k: f64) {
    let count = shape.iter().product();
    let mut random = Random::new(count as u64 + dim as u64);
    let rounded = |values: Vec<f64>| values.iter().map(|v| *v as f32).collect::<Vec<f32>>();
    let [x, grad] = [rounded(random.normals(count)), rounded(random.normals(count))];
    let view = |tensor: &Tensor| {
        let mut view = tensor.permute(order).unwrap();
        for (d, &cut) in cut.iter().enumerate() {
            view = view.narrow(d, cut, view.shape()[d] - cut).unwrap();
        }
        view
    };
    let [x, grad] = [&x, &grad].map(|t| device.upload(View::new(t, shape).unwrap()).unwrap());
    let [x, grad] = [view(&x), view(&grad)];
    let dims =
        [x.shape()[..dim].iter().product(), x.shape()[dim], x.shape()[dim + 1..].iter().product()];
    for log in [false, true] {
        let options = Softmax { dim: dim as isize, log, zero_masked_rows: false };
        let output = view(&device.empty(DType::F32, shape).unwrap());
        Call::Forward.run(&options, &x, &grad, &mut output.clone()).unwrap();
        for call in CALLS {
            let x = if matches!(call, Call::FromOutput) { &output } else { &x };
            let mut o = view(&device.empty(DType::F32, shape).unwrap());
            call.run(&options, x, &grad, &mut o).unwrap();
            let got: Vec<f32> = o.download().unwrap();
            let mut again = view(&device.empty(DType::F32, shape).unwrap());
            call.run(&options, x, &grad, &mut again).unwrap();
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(&got) == bits(&again.download::<f32>().unwrap()), "{call:?} {shape:?}");
            let f64s = |t: &Tensor| -> Vec<f64> {
                t.download::<f32>().unwrap().iter().map(|&v| f64::from(v)).collect()
            };
            let (x, grad) = (f64s(x), f64s(&grad));
            let truth = call.truth(&options, &x, &grad, dims);
            let magnitude = call.magnitude(&options, &x, &grad, dims);
            let mut worst = f64::MIN;
            for ((&got, &truth), &magnitude) in got.iter().zip(&truth).zip(&magnitude) {
                let error = (f64::from(got) - truth).abs();
                let half = 0.5 * ulp(DType::F32, truth);
                worst = worst.max((error - half) / ulp(DType::F32, magnitude));
            }
            let bound = call.bound() * k;
            println!("{call:?} log={log} {shape:?} {order:?} dim={dim}: needs {worst:.2}");
            assert!(worst <= bound, "{call:?} log={log} {shape:?} dim={dim}: {worst} > {bound}");
        }
    }
}

#[test]
fn long_rows() {
    for (_, device) in devices() {
        for n in [100_003, 50_000, 9_999] {
            check(&device, &[2, n], &[0, 1], &[0, 0], 1, 1.0);
        }
    }
}

#[test]
fn long_columns() {
    for (_, device) in devices() {
        check(&device, &[5000, 3], &[0, 1], &[0, 0], 0, 1.0);
        check(&device, &[2, 8192, 12], &[0, 1, 2], &[0, 0, 0], 1, 1.0);
        check(&device, &[20_011, 1], &[0, 1], &[0, 0], 0, 1.0);
    }
}

#[test]
fn views() {
    for (_, device) in devices() {
        // Transposed: the contiguous dimension is not the last.
        for dim in 0..3 {
            check(&device, &[4, 12, 20], &[0, 2, 1], &[0, 0, 0], dim, 1.0);
            check(&device, &[5, 9, 7], &[2, 0, 1], &[0, 0, 0], dim, 1.0);
            // Slices, of which some are aligned to vectors.
            check(&device, &[6, 13, 24], &[0, 1, 2], &[2, 1, 8], dim, 1.0);
            check(&device, &[6, 13, 24], &[1, 2, 0], &[1, 3, 1], dim, 1.0);
        }
    }
}

const INF: f32 = f32::INFINITY;

/// NaN, infinities and masks, in rows and in columns.
#[test]
fn special_values() {
    fn all<T: Element>(device: &Device) {
        // Each of these is a row.
        let rows: [[f32; 6]; 6] = [
            [0.0, f32::NAN, 1.0, 2.0, 3.0, -1.0],
            [0.0, INF, 1.0, 2.0, 3.0, -1.0],
            [-INF, 2.0, -INF, -INF, -INF, -INF],
            [-INF; 6],
            [1e4, 1e4, -1e4, -INF, 0.0, 1.0],
            [f32::NAN, -INF, -INF, -INF, -INF, -INF],
        ];
        let grads: [[f32; 6]; 6] = [
            [1.0; 6],
            [1.0; 6],
            [1.0, 2.0, -1.0, 0.5, 0.25, 3.0],
            [f32::NAN, INF, 1.0, -1.0, 0.0, 2.0],
            [1.0, -1.0, 0.5, 2.0, 3.0, 4.0],
            [1.0; 6],
        ];
        let turned = |m: &[[f32; 6]; 6]| -> Vec<T> {
            (0..36).map(|i| T::from_f64(f64::from(m[i % 6][i / 6]))).collect()
        };
        let plain = |m: &[[f32; 6]; 6]| -> Vec<T> {
            m.as_flattened().iter().map(|&v| T::from_f64(f64::from(v))).collect()
        };
        let both = [
            (1, [6, 6, 1], plain(&rows), plain(&grads)),
            (0, [1, 6, 6], turned(&rows), turned(&grads)),
        ];
        for (dim, dims, x, grad) in both {
            for (log, zero_masked_rows) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let options = Softmax { dim, log, zero_masked_rows };
                let f64s = |v: &[T]| v.iter().map(|v| v.to_f64()).collect::<Vec<f64>>();
                for call in CALLS {
                    let mut x = x.clone();
                    if matches!(call, Call::FromOutput) {
                        let o = reference::softmax::forward(&options, &f64s(&x), dims);
                        x = o.into_iter().map(T::from_f64).collect();
                    }
                    let truth = call.truth(&options, &f64s(&x), &f64s(&grad), dims);
                    let [x, grad] =
                        [&x, &grad].map(|t| device.upload(View::new(t, &[6, 6]).unwrap()).unwrap());
                    let mut o = device.empty(T::DTYPE, &[6, 6]).unwrap();
                    call.run(&options, &x, &grad, &mut o).unwrap();
                    let got = f64s(&o.download::<T>().unwrap());
                    let what = format!("{call:?} {options:?} {}", T::DTYPE);
                    for (i, (&got, &truth)) in got.iter().zip(&truth).enumerate() {
                        let close = got == truth
                            || (got.is_nan() && truth.is_nan())
                            || (got - truth).abs() <= 1e-2 * truth.abs().max(1e-3);
                        assert!(close, "{what} at {i}: {got}, expected {truth}");
                    }
                }
            }
        }
    }
    for (_, device) in devices() {
        all::<f32>(&device);
        all::<bf16>(&device);
        if device.supports(DType::F16) {
            all::<f16>(&device);
        }
    }
}

#[test]
fn empty_and_wrong_calls() {
    let device = device();
    let x = device.empty(DType::F32, &[0, 3]).unwrap();
    assert!(softmax::forward(&Softmax::over(-1), &x).unwrap().is_empty());
    assert!(softmax::forward(&Softmax::over(0), &x).unwrap().is_empty());
    let error = softmax::forward(&Softmax::over(2), &x).unwrap_err().to_string();
    assert!(error.contains("dim"), "{error}");
}
