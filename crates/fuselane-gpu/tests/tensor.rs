//! Memory of a device: what is uploaded comes back, whatever its strides, and what a call does not
//! write to stays as it was.
#![cfg(feature = "runtime")]

use fuselane::{Act, Cosine, DType, Element, Normalize, Rotate, Softmax, View, ViewMut};
use fuselane_gpu::{Device, Tensor, Tuning, act, cosine, normalize, rotate, softmax};
use half::{bf16, f16};

fn device() -> Device {
    Device::open().expect("a device")
}

/// Numbers that are different from each other in every dtype, and below no power of two alike.
fn numbers<T: Element>(len: usize) -> Vec<T> {
    (0..len).map(|i| T::from_f64((i % 251) as f64 - 125.5)).collect()
}

/// The elements of a view in index order, as the device has to give them back.
fn there_and_back<T: Element + PartialEq + std::fmt::Debug>(view: View<'_>) -> Tensor {
    let there = device().upload(view).unwrap();
    assert_eq!((there.shape(), there.dtype()), (view.shape(), T::DTYPE));
    let elements: Vec<f64> = there.download::<T>().unwrap().iter().map(|e| e.to_f64()).collect();
    assert_eq!(elements, view.to_f64_vec());
    there
}

fn round_trips<T: Element + PartialEq + std::fmt::Debug>() {
    let data = numbers::<T>(2 * 3 * 5 * 7);
    let dense = View::new(&data, &[2, 3, 5, 7]).unwrap();
    there_and_back::<T>(dense);
    there_and_back::<T>(dense.permute(&[2, 0, 3, 1]).unwrap());
    there_and_back::<T>(dense.narrow(2, 1, 3).unwrap().narrow(3, 3, 2).unwrap());
    there_and_back::<T>(View::strided(&data, &[4, 5], &[37, 3], 11).unwrap());
    there_and_back::<T>(View::new(&data[..7], &[7]).unwrap().broadcast(&[3, 7]).unwrap());
    there_and_back::<T>(View::new(&data[..4], &[4, 1]).unwrap().broadcast(&[4, 6]).unwrap());
    there_and_back::<T>(View::new(&data[..1], &[]).unwrap());
    for shape in [&[0][..], &[3, 0], &[0, 5], &[2, 0, 4]] {
        let there = there_and_back::<T>(View::new::<T>(&[], shape).unwrap());
        assert!(there.is_empty());
    }

    // Views of what is there already.
    let there = there_and_back::<T>(dense);
    let views: [(Tensor, View<'_>); 4] = [
        (there.permute(&[3, 1, 0, 2]).unwrap(), dense.permute(&[3, 1, 0, 2]).unwrap()),
        (there.narrow(1, 1, 2).unwrap(), dense.narrow(1, 1, 2).unwrap()),
        (there.narrow(3, 7, 0).unwrap(), dense.narrow(3, 7, 0).unwrap()),
        (there.reshape(&[6, 35]).unwrap(), dense.reshape(&[6, 35]).unwrap()),
    ];
    for (there, here) in views {
        let elements = there.download::<T>().unwrap();
        let elements: Vec<f64> = elements.iter().map(|e| e.to_f64()).collect();
        assert_eq!((elements, there.shape()), (here.to_f64_vec(), here.shape()));
    }

    // Into strided memory, of which nothing else is written to.
    let there = there.narrow(0, 1, 1).unwrap().reshape(&[3, 5, 7]).unwrap();
    let mut to = vec![T::from_f64(1000.0); 4 * 6 * 16];
    let view = ViewMut::strided(&mut to, &[3, 5, 7], &[96, 16, 2], 3).unwrap();
    there.download_into(view).unwrap();
    let mut want = vec![T::from_f64(1000.0); 4 * 6 * 16];
    for i in 0..3 * 5 * 7 {
        want[3 + i / 35 * 96 + i / 7 % 5 * 16 + i % 7 * 2] = data[105 + i];
    }
    assert_eq!(to, want);
}

#[test]
fn what_is_uploaded_comes_back() {
    round_trips::<f32>();
    round_trips::<f16>();
    round_trips::<bf16>();
}

#[test]
fn every_bit_comes_back() {
    let data: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let there = device().upload(View::new(&data, &[data.len()]).unwrap()).unwrap();
    let back = there.download::<bf16>().unwrap();
    assert!(data.iter().zip(back).all(|(a, b)| a.to_bits() == b.to_bits()));
}

/// Calls on a part of a tensor, and on every other one of its numbers: the numbers around it and
/// between are the same bits afterwards.
fn neighbours<T: Element>(bits: impl Fn(T) -> u64, tuning: Tuning) {
    let device = device().tuned(tuning);
    if !device.supports(T::DTYPE) {
        return;
    }
    let shape = [6, 5, 9];
    let len = shape.iter().product();
    let data = numbers::<T>(len);
    let untouched: Vec<T> = (0..len).map(|i| T::from_f64(2000.0 + (i % 32) as f64)).collect();
    // Parts of a tensor: whole, odd starts, odd lengths, single numbers; and as a function of
    // that, in another order of dimensions.
    type Part = [(usize, usize); 3];
    let parts: [Part; 6] = [
        [(0, 6), (0, 5), (0, 9)],
        [(1, 4), (1, 3), (1, 7)],
        [(0, 6), (0, 5), (2, 4)],
        [(5, 1), (4, 1), (8, 1)],
        [(0, 6), (2, 1), (0, 9)],
        [(3, 2), (0, 5), (3, 5)],
    ];
    for part in parts {
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            for odd_input in [false, true] {
                let cut = |tensor: &Tensor| {
                    let mut cut = tensor.clone();
                    for (dim, &(start, len)) in part.iter().enumerate() {
                        cut = cut.narrow(dim, start, len).unwrap();
                    }
                    cut.permute(&order).unwrap()
                };
                let upload = |data: &[T]| device.upload(View::new(data, &shape).unwrap()).unwrap();
                let (x, o) = (upload(&data), upload(&untouched));
                // The input in memory of its own, without neighbours, or in the same place.
                let from = if odd_input {
                    cut(&x)
                } else {
                    let elements = cut(&x).download::<T>().unwrap();
                    let inner: Vec<usize> = part.iter().map(|part| part.1).collect();
                    let mut back = [0; 3];
                    for (i, &dim) in order.iter().enumerate() {
                        back[dim] = i;
                    }
                    let permuted: Vec<usize> = order.iter().map(|&dim| inner[dim]).collect();
                    let view = View::new(&elements, &permuted).unwrap();
                    // In the order of the output, so that the same dimension is contiguous.
                    let elements: Vec<T> = view
                        .permute(&back)
                        .unwrap()
                        .to_f64_vec()
                        .into_iter()
                        .map(T::from_f64)
                        .collect();
                    let dense = device.upload(View::new(&elements, &inner).unwrap()).unwrap();
                    dense.permute(&order).unwrap()
                };
                act::forward_into(Act::Relu, &from, &mut cut(&o)).unwrap();
                let got = o.download::<T>().unwrap();
                let got_x = x.download::<T>().unwrap();
                for i in 0..len {
                    let index = [i / 45, i / 9 % 5, i % 9];
                    let inside = index
                        .iter()
                        .zip(part)
                        .all(|(&i, (start, len))| (start..start + len).contains(&i));
                    let relu = T::from_f64(data[i].to_f64().max(0.0));
                    let want = if inside { relu } else { untouched[i] };
                    assert_eq!(bits(got[i]), bits(want), "{part:?} {order:?} {index:?}");
                    assert_eq!(bits(got_x[i]), bits(data[i]));
                }
            }
        }
    }
}

#[test]
fn neighbours_stay_as_they_were() {
    for vector in [None, Some(1)] {
        let tuning = Tuning { vector, ..Tuning::default() };
        neighbours::<bf16>(|v| v.to_bits().into(), tuning);
        neighbours::<f16>(|v| v.to_bits().into(), tuning);
        neighbours::<f32>(|v| v.to_bits().into(), tuning);
    }
}

/// In place and backward on an odd part of bf16.
#[test]
fn odd_parts_in_place_and_backward() {
    let device = device();
    let data = numbers::<bf16>(101);
    let upload = |data: &[bf16]| device.upload(View::new(data, &[101]).unwrap()).unwrap();
    let x = upload(&data);
    act::forward_in_place(Act::Relu, &mut x.narrow(0, 3, 31).unwrap()).unwrap();
    let got = x.download::<bf16>().unwrap();
    for (i, (got, x)) in got.iter().zip(&data).enumerate() {
        let want = if (3..34).contains(&i) { x.to_f32().max(0.0) } else { x.to_f32() };
        assert_eq!(got.to_f32(), want, "{i}");
    }
    let (x, dx) = (upload(&data), upload(&data));
    let part = |tensor: &Tensor, start| tensor.narrow(0, start, 47).unwrap();
    let (mut to, grad) = (part(&dx, 51), part(&x, 2));
    act::backward_into(Act::Relu, &part(&x, 17), &grad, &mut to).unwrap();
    let got = dx.download::<bf16>().unwrap();
    for i in 0..101 {
        let want = match i {
            51..98 if data[i - 51 + 17].to_f32() > 0.0 => data[i - 51 + 2].to_f32(),
            51..98 => 0.0,
            _ => data[i].to_f32(),
        };
        assert_eq!(got[i].to_f32(), want, "{i}");
    }
}

#[test]
fn empty_calls_do_nothing() {
    let device = device();
    for shape in [&[0][..], &[4, 0], &[0, 4]] {
        let x = device.upload(View::new::<f32>(&[], shape).unwrap()).unwrap();
        assert!(act::forward(Act::Silu, &x).unwrap().download::<f32>().unwrap().is_empty());
        assert!(act::backward(Act::Silu, &x, &x).unwrap().is_empty());
    }
    let x = device.upload(View::new(&[-1.5f32], &[]).unwrap()).unwrap();
    assert_eq!(act::forward(Act::Relu, &x).unwrap().download::<f32>().unwrap(), [0.0]);
}

#[test]
fn negative_strides_are_refused() {
    let data = [1.0f32, 2.0, 3.0];
    let error = device().upload(View::strided(&data, &[3], &[-1], 2).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "tensor: strides are [-1], expected none below 0 on a GPU");
}

#[test]
fn overlaps_are_refused_as_by_the_core() {
    let device = device();
    let data = numbers::<f32>(16);
    let x = device.upload(View::new(&data, &[16]).unwrap()).unwrap();
    let mut o = x.narrow(0, 4, 8).unwrap();
    let from = x.narrow(0, 0, 8).unwrap();
    let error = act::forward_into(Act::Relu, &from, &mut o).unwrap_err();
    // The core's words for the same call, on memory of its own.
    let mut memory = numbers::<f32>(16);
    let at = memory.as_mut_ptr();
    // SAFETY: the check reads and writes no element.
    let (from, to) = unsafe {
        let from = View::from_raw(at.cast(), DType::F32, &[8], &[1]).unwrap();
        (from, ViewMut::from_raw(at.add(4).cast(), DType::F32, &[8], &[1]).unwrap())
    };
    assert_eq!(error, Act::Relu.check_forward(from, to).unwrap_err());
    assert!(error.to_string().contains("overlaps"), "{error}");
    // Neighbours in one buffer are none.
    let mut o = x.narrow(0, 8, 8).unwrap();
    act::forward_into(Act::Relu, &x.narrow(0, 0, 8).unwrap(), &mut o).unwrap();
    // Neither are other buffers.
    act::forward(Act::Relu, &x).unwrap();
}

#[test]
fn f64_is_refused_by_name() {
    let device = device();
    let error = device.empty(DType::F64, &[2]).unwrap_err().to_string();
    assert!(error.contains(&format!("{} has no f64", device.name())), "{error}");
    let x = device.upload(View::new(&[1.0f64, 2.0], &[2]).unwrap());
    let error = x.and_then(|x| act::forward_in_place(Act::Relu, &mut x.clone())).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("f64") && error.contains(device.name()), "{error}");
    // Calls that make a new tensor name the argument, not that tensor.
    let x = device.upload(View::new(&[1.0f64; 8], &[1, 2, 1, 4]).unwrap()).unwrap();
    let theta = device.upload(View::new(&[1.0f32], &[1, 1]).unwrap()).unwrap();
    let results = [
        ("act", act::forward(Act::Relu, &x)),
        ("act", act::backward(Act::Relu, &x, &x)),
        ("softmax", softmax::forward(&Softmax::default(), &x)),
        ("normalize", normalize::forward(&Normalize::rms_norm(), &x, None)),
        ("rotate", rotate::forward(&Rotate::default(), &x, &theta)),
        ("cosine", cosine::forward(&Cosine::default(), &x, &theta)),
    ];
    for (operator, result) in results {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with(&format!("{operator}: x is of f64")), "{error}");
    }
}

#[test]
fn types_and_shapes_of_downloads_are_checked() {
    let x = device().upload(View::new(&[1.0f32, 2.0], &[2]).unwrap()).unwrap();
    assert!(x.download::<bf16>().unwrap_err().to_string().contains("expected f32"));
    let mut to = [0.0f32; 3];
    let error = x.download_into(ViewMut::new(&mut to, &[3]).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "tensor: view is f32 [3], expected f32 [2]");
    let o = device().upload(View::new(&[0.0f32; 3], &[3]).unwrap()).unwrap();
    let error = act::forward_into(Act::Relu, &x, &mut o.clone()).unwrap_err().to_string();
    assert_eq!(error, "act: o has shape [3], expected [2] (from x [2])");
}

/// The same software device through two handles of the runtime counts as two.
#[cfg(feature = "wgpu")]
#[test]
fn tensors_of_two_devices_do_not_mix() {
    use cubecl::device::WgpuDeviceKind;
    let Ok(other) = cubecl::Device::vulkan(WgpuDeviceKind::Cpu) else { return };
    let (device, other) = (device(), Device::of_client(other.client()));
    let data = [1.0f32, 2.0];
    let [x, mut o] =
        [&device, &other].map(|device| device.upload(View::new(&data, &[2]).unwrap()).unwrap());
    let error = act::forward_into(Act::Relu, &x, &mut o).unwrap_err().to_string();
    let (here, there) = (device.name(), other.name());
    assert_eq!(error, format!("act: o is on {there}, expected {here} (device of the others)"));
}

/// A buffer of someone else comes in and goes out without a copy.
#[test]
fn buffers_of_others() {
    let device = device();
    let client = device.client().unwrap();
    let numbers: Vec<f32> = (0..64).map(|i| i as f32 - 32.0).collect();
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
    let handle = client.create_from_slice(&bytes);
    let open = |dtype, shape: &[usize], strides: &[usize], offset| {
        // SAFETY: the buffer is of f32, which a bf16 is not harmed by; nothing writes to it.
        unsafe { Tensor::from_handle(&device, handle.clone(), dtype, shape, strides, offset) }
    };
    // Every second row of 8, from the second number of the buffer on.
    let x = open(DType::F32, &[3, 8], &[16, 1], 2).unwrap();
    assert_eq!((x.shape(), x.strides(), x.offset()), (&[3, 8][..], &[16, 1][..], 2));
    let want: Vec<f32> = (0..24).map(|i| numbers[2 + i / 8 * 16 + i % 8]).collect();
    assert_eq!(x.download::<f32>().unwrap(), want);
    let o = act::forward(Act::Relu, &x).unwrap();
    let relu: Vec<u8> = want.iter().flat_map(|number| number.max(0.0).to_ne_bytes()).collect();
    assert_eq!(client.read_one(o.handle().clone()).unwrap()[..relu.len()], relu);

    for (dtype, shape, strides, offset, fault) in [
        (DType::F32, &[3, 8][..], &[16, 1][..], 25, "tensor: handle has 64 elements of f32"),
        (DType::F32, &[usize::MAX, 2], &[usize::MAX, 1], 0, "tensor: handle has 64"),
        (DType::F32, &[3, 8], &[1], 0, "tensor: strides are [1], expected 2 of them"),
        (DType::F64, &[3], &[1], 0, "tensor: dtype is of f64"),
    ] {
        let error = open(dtype, shape, strides, offset).unwrap_err().to_string();
        assert!(error.starts_with(fault), "{error}");
    }
    let shifted = handle.clone().offset_start(4);
    // SAFETY: as above.
    let shifted = unsafe { Tensor::from_handle(&device, shifted, DType::F32, &[1], &[1], 0) };
    let error = shifted.unwrap_err().to_string();
    assert!(error.contains("begins at byte 4"), "{error}");
}
