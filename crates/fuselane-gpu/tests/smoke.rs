//! The shortest way through the crate, on whatever device there is.
#![cfg(feature = "runtime")]

use fuselane::{Act, View};
use fuselane_gpu::{Device, Tuning, act};
use half::bf16;

#[test]
fn relu() {
    let device = Device::open().expect("a device");
    println!("{device:?} software={}", device.is_software());
    let x: Vec<f32> = (0..1001).map(|i| i as f32 - 500.0).collect();
    let want: Vec<f32> = x.iter().map(|v| v.max(0.0)).collect();
    for vector in [None, Some(1), Some(4)] {
        let device = device.tuned(Tuning { vector, ..Tuning::default() });
        let x_there = device.upload(View::new(&x, &[7, 11, 13]).unwrap()).unwrap();
        let o = act::forward(Act::Relu, &x_there).unwrap();
        assert_eq!(o.download::<f32>().unwrap(), want);
        let short: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
        let x_there = device.upload(View::new(&short, &[7, 11, 13]).unwrap()).unwrap();
        let mut o = x_there.clone();
        act::forward_in_place(Act::Relu, &mut o).unwrap();
        let want: Vec<bf16> = short.iter().map(|v| bf16::from_f32(v.to_f32().max(0.0))).collect();
        assert_eq!(o.download::<bf16>().unwrap(), want);
    }
}
