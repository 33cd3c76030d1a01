//! The gradient of theta: a sum for each angle, over the batch and blocks of tokens, then over the
//! blocks; then sums of the angles that share a frequency.

use cubecl::prelude::*;
use fuselane::plan::Encoding;
use fuselane::{DType, Result};

use super::activation::{Activation, Context, activated};
use super::call::{Call, TokenRange};
use super::pairs::{Index, Inputs, rotate_entry, rotation_at};
use super::softmax_sequence::{BlockSums, BlockSumsLaunch};
use crate::copy::{narrow_into, write_f32};
use crate::device::Device;
use crate::kernel::storage::{Format, store, unit_number};
use crate::kernel::sums::sum_partials;
use crate::launch::{Grid, Storage, buffer, launch, with_words};
use crate::ops::softmax::StatisticsTensors;
use crate::tensor::Tensor;

/// Gradients of the angles times their coordinates, summed over the batch and blocks of tokens. The
/// sums of a block are heads x angles.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn angle_gradients<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    sums: &mut BlockSums<N>,
    context: &Context,
) {
    let (problem, angles) = (&context.problem, &context.angles);
    let unit = unit_number();
    let columns = problem.heads * problem.rotated;
    if unit < columns * sums.count {
        let block = unit / columns;
        let vector = unit % problem.rotated;
        let head = (unit % columns) / problem.rotated;
        let mut total = Vector::<f32, N>::new(0.0f32);
        let first = block * sums.tokens;
        for i in 0..sums.tokens {
            let token = first + i;
            if token < problem.tokens {
                // All of these vectors rotate.
                let at = Index { token, head, vector, rotates: true };
                let mut rotation = rotation_at::<N>(angles, 0usize, &at);
                let mut coordinate = angles.coordinates::<N>(0usize, token, vector);
                for batch in 0..problem.batch {
                    rotate_entry::<N>(&mut rotation, angles, batch, &at);
                    if comptime!(angles.form.is_per_batch()) {
                        coordinate = angles.coordinates::<N>(batch, token, vector);
                    }
                    let x_from = at.row_start(&inputs.x.layout, batch);
                    let x = problem.load_x::<E, P, N>(&inputs.x, x_from, &at);
                    let y = activated::<N>(&x, context, batch, &at, false);
                    let grad_from = at.row_start(&inputs.grad.layout, batch);
                    let grad = problem.load_grad::<E, P, N>(&inputs.grad, grad_from, &at);
                    if comptime!(problem.form.is_rotate()) {
                        let dy = problem.decoded::<N>(&grad, &rotation);
                        total += coordinate * (y.a * dy.b - y.b * dy.a);
                    } else {
                        total +=
                            coordinate * (y.a * (grad.b * rotation.cos - grad.a * rotation.sin));
                    }
                }
            }
        }
        let at = (block * problem.heads + head) * problem.rotated + vector;
        store::<f32, N, N>(&mut sums.partials, at, total, Format::Native);
    }
}

/// Sums of angles that come from one frequency.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn gather(
    angles: &[f32],
    dtheta: &mut [f32],
    count: usize,
    columns: usize,
    per_axis: usize,
    len: usize,
    #[comptime] single: bool,
) {
    let unit = unit_number();
    if unit < len {
        let row = (unit / columns) * count;
        let mut angle = unit % columns;
        let mut sum = 0.0f32;
        let mut step = per_axis;
        if comptime!(single) {
            step = 1usize.runtime();
        }
        // A column that no angle of the first axis uses is used by none.
        if comptime!(single) || angle < per_axis {
            while angle < count {
                sum += angles[row + angle];
                angle += step;
            }
        }
        dtheta[unit] = sum;
    }
}

/// The sums of the angles' gradients over blocks of tokens.
pub(super) fn partial_sums(
    range: &TokenRange<'_>,
    act: Activation,
    statistics: &StatisticsTensors,
    inputs: [&Tensor; 2],
) -> Result<Tensor> {
    let TokenRange { device, storage, width, .. } = *range;
    let Encoding { batch, heads, split, .. } = range.call.encoding;
    let (blocks, per_block) = range.token_blocks();
    let partials = device.empty(DType::F32, &[blocks * heads * split.count])?;
    let units = blocks * heads * split.count / width.numbers;
    let grid = Grid::of_full_units(range.call.operator, device, units, range.numbers)?;
    with_words!(storage, E => launch!(
        device, angle_gradients::<E>, grid, width.words, width.numbers,
        range.inputs(inputs),
        BlockSumsLaunch::new(buffer(&partials, Storage::F32), blocks, per_block),
        range.context(statistics, batch, act),
    ));
    Ok(partials)
}

/// Writes the gradient of theta from the partial sums of each range of tokens.
pub(super) fn gradient(
    call: &Call<'_>,
    device: &Device,
    partials: &[Tensor],
    dtheta: &Tensor,
) -> Result<()> {
    let (operator, split) = (call.operator, call.encoding.split);
    let sums = sum_of_ranges(call, device, partials)?;
    let len = dtheta.len();
    let grid = Grid::of_units(operator, device, len, len)?;
    write_f32(operator, dtheta, |gathered| {
        launch!(
            device,
            gather,
            grid,
            buffer(&sums, Storage::F32),
            buffer(gathered, Storage::F32),
            split.count,
            split.theta_columns,
            split.per_axis,
            len,
            split.theta_columns == 1,
        );
        Ok(())
    })
}

/// The sums of the angles' gradients: over the blocks of each range, and over the ranges, in their
/// order.
fn sum_of_ranges(call: &Call<'_>, device: &Device, partials: &[Tensor]) -> Result<Tensor> {
    let (operator, split) = (call.operator, call.encoding.split);
    let columns = split.theta_heads * split.count;
    let sum = |partials: &Tensor| {
        let sums = device.empty(DType::F32, &[columns])?;
        let rows = partials.len() / columns.max(1);
        sum_partials(operator, &partials.reshape(&[rows, columns])?, &sums)?;
        Ok(sums)
    };
    if let [only] = partials {
        return sum(only);
    }
    let all = device.empty(DType::F32, &[partials.len(), columns])?;
    for (i, of_range) in partials.iter().enumerate() {
        narrow_into(operator, &sum(of_range)?, &all.narrow(0, i, 1)?.reshape(&[columns])?)?;
    }
    sum(&all)
}
