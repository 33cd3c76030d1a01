//! Copies that change the dtype: parameters on their way to f32 and gradients on their way from
//! it, and tensors of bf16 that a device without bf16 cannot address by pairs.

use cubecl::prelude::*;
use fuselane::{DType, Result, View};

use crate::kernel::storage::{RowLayout, RowLayoutLaunch, bf16_bits, unit_number};
use crate::launch::{Grid, Storage, buffer, largest, launch, sequence, with_words};
use crate::tensor::Tensor;

/// The numbers of a tensor, counted over its shape.
#[derive(CubeType, CubeLaunch)]
struct Elements {
    layout: RowLayout,
    shape: Sequence<usize>,
    len: usize,
}

impl<'a> From<&'a Tensor> for ElementsLaunch {
    fn from(tensor: &'a Tensor) -> Self {
        let [shape, strides] = [tensor.shape(), tensor.strides()].map(|s| sequence(s.to_vec()));
        Self::new(RowLayoutLaunch::new(tensor.offset(), strides), shape, tensor.len())
    }
}

#[cube]
impl Elements {
    /// Where number `i` lies.
    fn start(&self, i: usize) -> usize {
        self.layout.row_start(&self.shape, i)
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn widen<E: Numeric>(from: &[E], to: &mut [f32], elements: &Elements) {
    let i = unit_number();
    if i < elements.len {
        to[i] = f32::cast_from(from[elements.start(i)]);
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn narrow<E: Numeric>(from: &[f32], to: &mut [E], elements: &Elements) {
    let i = unit_number();
    if i < elements.len {
        to[elements.start(i)] = E::cast_from(from[i]);
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn widen_packed(from: &[u32], to: &mut [f32], elements: &Elements) {
    let i = unit_number();
    if i < elements.len {
        let at = elements.start(i);
        let shift = u32::cast_from(at % 2usize) * 16u32;
        to[i] = f32::reinterpret((from[at / 2usize] >> shift) << 16u32);
    }
}

/// Two numbers of one word may be written by two units, so that each adds the difference of its
/// own half to the word: no carry leaves the half, and the other one stays what it is.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn narrow_packed(from: &[f32], to: &mut [Atomic<u32>], elements: &Elements) {
    let i = unit_number();
    if i < elements.len {
        let at = elements.start(i);
        let shift = u32::cast_from(at % 2usize) * 16u32;
        let before = (to[at / 2usize].load() >> shift) & 0xffffu32;
        let difference = bf16_bits(from[i]) - before;
        to[at / 2usize].fetch_add(difference << shift);
    }
}

/// A tensor in f32 and in index order: itself, where it is so.
pub(crate) fn widened(operator: &'static str, tensor: &Tensor) -> Result<Tensor> {
    if is_plain(tensor) {
        return Ok(tensor.clone());
    }
    let device = tensor.device();
    let to = device.empty(DType::F32, tensor.shape())?;
    if tensor.is_empty() {
        return Ok(to);
    }
    let storage = Storage::of(device, tensor.dtype());
    let grid = Grid::of_units(operator, device, tensor.len(), largest([Some(tensor), Some(&to)]))?;
    let (from, into) = (buffer(tensor, storage), buffer(&to, Storage::F32));
    if storage == Storage::PackedBf16 {
        launch!(device, widen_packed, grid, from, into, tensor.into());
    } else {
        with_words!(storage, E => launch!(device, widen::<E>, grid, from, into, tensor.into()));
    }
    Ok(to)
}

/// Rounds a dense f32 tensor into another one of the same shape.
pub(crate) fn narrow_into(operator: &'static str, from: &Tensor, to: &Tensor) -> Result<()> {
    if to.is_empty() {
        return Ok(());
    }
    let (device, storage) = (to.device(), Storage::of(to.device(), to.dtype()));
    let grid = Grid::of_units(operator, device, to.len(), largest([Some(from), Some(to)]))?;
    let (from, into) = (buffer(from, Storage::F32), buffer(to, storage));
    if storage == Storage::PackedBf16 {
        launch!(device, narrow_packed, grid, from, into, to.into());
    } else {
        with_words!(storage, E => launch!(device, narrow::<E>, grid, from, into, to.into()));
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

/// [`through_f32`] of a call whose tensors are all given.
pub(crate) fn all_through_f32<const I: usize, const O: usize>(
    operator: &'static str,
    inputs: [&Tensor; I],
    outputs: [&Tensor; O],
    run: impl FnOnce([&Tensor; I], [&Tensor; O]) -> Result<()>,
) -> Result<()> {
    fn given(copy: Option<&Tensor>) -> &Tensor {
        copy.expect("a given tensor has a copy")
    }
    let run = |inputs: [Option<&Tensor>; I], outputs: [Option<&Tensor>; O]| {
        run(inputs.map(given), outputs.map(given))
    };
    through_f32(operator, inputs.map(Some), outputs.map(Some), run)
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
