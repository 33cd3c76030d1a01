//! Copies that change the dtype: parameters on their way to f32 and gradients on their way from
//! it, and tensors of bf16 that a device without bf16 cannot address by pairs.

use cubecl::prelude::*;
use fuselane::{DType, Result, View};

use crate::kernel::storage::PlaceLaunch;
use crate::kernel::storage::{Place, bf16_bits, row_start, unit_number};
use crate::launch::{Grid, Storage, buffer, largest, launch, sequence, with_words};
use crate::tensor::Tensor;

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn widen<E: Numeric>(
    from: &[E],
    to: &mut [f32],
    from_place: &Place,
    shape: &Sequence<usize>,
    len: usize,
) {
    let i = unit_number();
    if i < len {
        to[i] = f32::cast_from(from[row_start(from_place, shape, i)]);
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn narrow<E: Numeric>(
    from: &[f32],
    to: &mut [E],
    to_place: &Place,
    shape: &Sequence<usize>,
    len: usize,
) {
    let i = unit_number();
    if i < len {
        to[row_start(to_place, shape, i)] = E::cast_from(from[i]);
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn widen_packed(
    from: &[u32],
    to: &mut [f32],
    from_place: &Place,
    shape: &Sequence<usize>,
    len: usize,
) {
    let i = unit_number();
    if i < len {
        let at = row_start(from_place, shape, i);
        let shift = u32::cast_from(at % 2usize) * 16u32;
        to[i] = f32::reinterpret((from[at / 2usize] >> shift) << 16u32);
    }
}

/// Two numbers of one word may be written by two units, so that each adds the difference of its
/// own half to the word: no carry leaves the half, and the other one stays what it is.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn narrow_packed(
    from: &[f32],
    to: &mut [Atomic<u32>],
    to_place: &Place,
    shape: &Sequence<usize>,
    len: usize,
) {
    let i = unit_number();
    if i < len {
        let at = row_start(to_place, shape, i);
        let shift = u32::cast_from(at % 2usize) * 16u32;
        let before = (to[at / 2usize].load() >> shift) & 0xffffu32;
        let difference = bf16_bits(from[i]) - before;
        to[at / 2usize].fetch_add(difference << shift);
    }
}

fn place(tensor: &Tensor) -> PlaceLaunch {
    PlaceLaunch::new(tensor.offset(), sequence(tensor.strides().iter().copied()))
}

/// A tensor in f32 and in index order: itself, where it is so.
pub(crate) fn widened(operator: &'static str, tensor: &Tensor) -> Result<Tensor> {
    if is_plain(tensor) {
        return Ok(tensor.clone());
    }
    let device = tensor.device();
    let to = device.empty(DType::F32, tensor.shape())?;
    let len = tensor.len();
    if len == 0 {
        return Ok(to);
    }
    let storage = Storage::of(device, tensor.dtype());
    let shape = sequence(tensor.shape().iter().copied());
    let grid = Grid::of_units(operator, device, len, largest([Some(tensor), Some(&to)]))?;
    let arguments = (buffer(tensor, storage), buffer(&to, Storage::F32), place(tensor), shape, len);
    let (from, into, place, shape, len) = arguments;
    if storage == Storage::PackedBf16 {
        launch!(device, widen_packed, grid, from, into, place, shape, len);
    } else {
        with_words!(storage, E => launch!(device, widen::<E>, grid, from, into, place, shape, len));
    }
    Ok(to)
}

/// Rounds a dense f32 tensor into another one of the same shape.
pub(crate) fn narrow_into(operator: &'static str, from: &Tensor, to: &Tensor) -> Result<()> {
    let (device, len) = (to.device(), to.len());
    if len == 0 {
        return Ok(());
    }
    let storage = Storage::of(device, to.dtype());
    let shape = sequence(to.shape().iter().copied());
    let grid = Grid::of_units(operator, device, len, largest([Some(from), Some(to)]))?;
    let (from, place, to) = (buffer(from, Storage::F32), place(to), buffer(to, storage));
    if storage == Storage::PackedBf16 {
        launch!(device, narrow_packed, grid, from, to, place, shape, len);
    } else {
        with_words!(storage, E => launch!(device, narrow::<E>, grid, from, to, place, shape, len));
    }
    Ok(())
}

/// Whether a tensor is of f32, in index order, and begins its buffer.
fn is_plain(tensor: &Tensor) -> bool {
    tensor.dtype() == DType::F32 && tensor.is_dense() && tensor.offset() == 0
}

/// Writes a result that `run` gives in f32 and in index order: right into `to`, where that is so.
pub(crate) fn write_f32(
    operator: &'static str,
    to: &Tensor,
    run: impl FnOnce(&Tensor) -> Result<()>,
) -> Result<()> {
    if is_plain(to) {
        return run(to);
    }
    let wide = to.device().empty(DType::F32, to.shape())?;
    run(&wide)?;
    narrow_into(operator, &wide, to)
}

/// Writes one number everywhere; for calls that have no rows.
pub(crate) fn fill(operator: &'static str, tensor: &Tensor, number: f32) -> Result<()> {
    let numbers = vec![number; tensor.len()];
    let numbers = tensor.device().upload(View::new(&numbers, tensor.shape())?)?;
    narrow_into(operator, &numbers, tensor)
}

/// Runs a call on f32 copies of its tensors: for bf16 that share words with their neighbours, on a
/// device that has no bf16.
pub(crate) fn through_f32<const I: usize, const O: usize>(
    operator: &'static str,
    inputs: [Option<&Tensor>; I],
    outputs: [Option<&Tensor>; O],
    run: impl FnOnce([Option<&Tensor>; I], [Option<&Tensor>; O]) -> Result<()>,
) -> Result<()> {
    let mut wide_inputs = [const { None }; I];
    for (wide, input) in wide_inputs.iter_mut().zip(inputs) {
        *wide = input.map(|tensor| widened(operator, tensor)).transpose()?;
    }
    let mut wide_outputs = [const { None }; O];
    for (wide, output) in wide_outputs.iter_mut().zip(outputs) {
        let empty = |tensor: &Tensor| tensor.device().empty(DType::F32, tensor.shape());
        *wide = output.map(empty).transpose()?;
    }
    run(wide_inputs.each_ref().map(Option::as_ref), wide_outputs.each_ref().map(Option::as_ref))?;
    for (wide, output) in wide_outputs.iter().zip(outputs) {
        if let (Some(wide), Some(output)) = (wide, output) {
            narrow_into(operator, wide, output)?;
        }
    }
    Ok(())
}
