//! What the matrix does not have of activations: gradients from outputs, the ends of f32, other
//! shapes, and that results do not depend on how many numbers are loaded at once.
#![cfg(feature = "runtime")]

use fuselane::reference::{Random, ulp};
use fuselane::{Act, DType, Element, View, ViewMut};
use fuselane_gpu::{Device, Tuning, act};
use half::{bf16, f16};

fn device() -> Device {
    Device::open().expect("a device")
}

fn drawn<T: Element>(seed: u64, len: usize) -> Vec<T> {
    Random::new(seed).normals(len).into_iter().map(|v| T::from_f64(3.0 * v)).collect()
}

/// Whether two results, each within a few ulp of f32 and a rounding of the same truth, are near
/// each other, or both infinite or NaN.
fn near<T: Element>(got: T, want: T) -> bool {
    let (got, want) = (got.to_f64(), want.to_f64());
    let most = if T::DTYPE == DType::F32 { 10.0 } else { 1.0 };
    got == want || got.is_nan() && want.is_nan() || ulp::error(T::DTYPE, got, want) <= most
}

fn from_output<T: Element>() {
    let device = device();
    if !device.supports(T::DTYPE) {
        return;
    }
    let (x, grad) = (drawn::<T>(1, 1003), drawn::<T>(2, 1003));
    let shape = [17, 59];
    for act in Act::ALL.into_iter().filter(|act| act.has_slope_from_output()) {
        let grad = View::new(&grad, &shape).unwrap();
        let o = act.forward(View::new(&x, &shape).unwrap()).unwrap();
        let want = act.backward_from_output(o.view(), grad).unwrap();
        let [o, grad] = [o.view(), grad].map(|view| device.upload(view).unwrap());
        let mut dx = device.empty(T::DTYPE, &shape).unwrap();
        act::backward_from_output_into(act, &o, &grad, &mut dx).unwrap();
        let (got, want) = (dx.download::<T>().unwrap(), want.as_slice::<T>().unwrap());
        let grad = grad.download::<T>().unwrap();
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let (got, want) = (got.to_f64(), want.to_f64());
            // 1 - o² cancels: what is left may differ by roundings of its terms.
            let most = ulp::ulp(T::DTYPE, want) + 2.0 * ulp::ulp(DType::F32, grad[i].to_f64());
            assert!((got - want).abs() <= most, "{act} [{i}]: {got:e}, on the CPU {want:e}");
        }
    }
}

#[test]
fn gradients_from_outputs() {
    from_output::<f32>();
    from_output::<f16>();
    from_output::<bf16>();
}

#[test]
fn other_functions_have_no_gradient_from_the_output() {
    let data = [1.0f32, 2.0];
    let x = device().upload(View::new(&data, &[2]).unwrap()).unwrap();
    let error = act::backward_from_output_into(Act::Silu, &x, &x, &mut x.clone()).unwrap_err();
    let view = View::new(&data, &[2]).unwrap();
    let mut dx = data;
    let core =
        Act::Silu.check_backward_from_output(view, view, ViewMut::new(&mut dx, &[2]).unwrap());
    assert_eq!(error, core.unwrap_err());
}

/// Infinities, NaN, zeros of both signs, and the largest and smallest numbers.
fn ends<T: Element>(largest: f64, smallest: f64) {
    let device = device();
    if !device.supports(T::DTYPE) {
        return;
    }
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let x = [-inf, -largest, -smallest, -0.0, 0.0, smallest, largest, inf, nan].map(T::from_f64);
    let view = View::new(&x, &[9]).unwrap();
    let there = device.upload(view).unwrap();
    for act in Act::ALL {
        let check = |got: &[T], want: &[T], what: &str| {
            for ((x, &got), &want) in x.iter().zip(got).zip(want) {
                assert!(near(got, want), "{what} of {act} at {x:?}: {got:?}, on the CPU {want:?}");
            }
        };
        let got = act::forward(act, &there).unwrap().download::<T>().unwrap();
        check(&got, act.forward(view).unwrap().as_slice().unwrap(), "o");
        // Zero keeps its sign where f(-0) is zero.
        if got[3].to_f64() == 0.0 && !matches!(act, Act::Relu | Act::ReluSquared) {
            assert!(got[3].to_f64().is_sign_negative() && got[4].to_f64().is_sign_positive());
        }
        // Gradients of 1, and those that relu cuts off.
        for grad in [1.0, nan, inf] {
            let grad = [T::from_f64(grad); 9];
            let grad = View::new(&grad, &[9]).unwrap();
            let want = act.backward(view, grad).unwrap();
            let got = act::backward(act, &there, &device.upload(grad).unwrap()).unwrap();
            check(&got.download().unwrap(), want.as_slice().unwrap(), "dx");
        }
    }
}

#[test]
fn ends_are_those_of_the_cpu() {
    ends::<f32>(f32::MAX.into(), f32::from_bits(1).into());
    ends::<f16>(f16::MAX.to_f64(), f16::from_bits(1).to_f64());
    ends::<bf16>(bf16::MAX.to_f64(), bf16::from_bits(1).to_f64());
}

/// One call on a view of four dimensions in different orders, with a broadcast gradient.
fn shapes<T: Element>() {
    let device = device();
    if !device.supports(T::DTYPE) {
        return;
    }
    let shape = [3, 4, 5, 8];
    let (x, grad) = (drawn::<T>(3, 480), drawn::<T>(4, 40));
    for order in [[0, 1, 2, 3], [2, 0, 1, 3], [3, 1, 2, 0], [1, 3, 0, 2]] {
        let x = View::new(&x, &shape).unwrap().permute(&order).unwrap();
        let grad = View::new(&grad, &[5, 8]).unwrap().broadcast(&shape).unwrap();
        let grad = grad.permute(&order).unwrap();
        let mut back = [0; 4];
        for (i, &dim) in order.iter().enumerate() {
            back[dim] = i;
        }
        let mut want = vec![T::default(); 480];
        let to = ViewMut::new(&mut want, &shape).unwrap().permute(&order).unwrap();
        Act::Tanh.backward_into(x, grad, to).unwrap();
        let [x, grad] = [x, grad].map(|view| device.upload(view).unwrap());
        let dx = device.empty(T::DTYPE, &shape).unwrap();
        act::backward_into(Act::Tanh, &x, &grad, &mut dx.permute(&order).unwrap()).unwrap();
        let got = dx.download::<T>().unwrap();
        assert!(got.iter().zip(&want).all(|(&got, &want)| near(got, want)), "{order:?}");
    }
}

#[test]
fn any_order_of_dimensions() {
    shapes::<f32>();
    shapes::<f16>();
    shapes::<bf16>();
}

fn widths<T: Element>(bits: fn(T) -> u32) {
    let device = device();
    if !device.supports(T::DTYPE) {
        return;
    }
    let (x, grad) = (drawn::<T>(5, 1024), drawn::<T>(6, 1024));
    for act in Act::ALL {
        let run = |tuning: Tuning| -> Vec<u32> {
            let device = device.tuned(tuning);
            let [x, grad] =
                [&x, &grad].map(|data| device.upload(View::new(data, &[32, 32]).unwrap()).unwrap());
            let o = act::forward(act, &x).unwrap().download::<T>().unwrap();
            let dx = act::backward(act, &x, &grad).unwrap().download::<T>().unwrap();
            o.into_iter().chain(dx).map(bits).collect()
        };
        let want = run(Tuning::default());
        for tuning in [
            Tuning { vector: Some(1), ..Tuning::default() },
            Tuning { vector: Some(2), ..Tuning::default() },
            Tuning { units: Some(32), ..Tuning::default() },
        ] {
            assert!(want == run(tuning), "{act} {} {tuning:?}", T::DTYPE);
        }
    }
}

#[test]
fn results_do_not_depend_on_the_tuning() {
    widths::<f32>(f32::to_bits);
    widths::<f16>(|v| v.to_bits().into());
    widths::<bf16>(|v| v.to_bits().into());
}

/// The forward in place is the forward.
#[test]
fn in_place() {
    let device = device();
    let x = drawn::<f32>(7, 77);
    for act in Act::ALL {
        let mut there = device.upload(View::new(&x, &[7, 11]).unwrap()).unwrap();
        let o = act::forward(act, &there).unwrap().download::<f32>().unwrap();
        act::forward_in_place(act, &mut there).unwrap();
        assert_eq!(there.download::<f32>().unwrap(), o);
    }
}
