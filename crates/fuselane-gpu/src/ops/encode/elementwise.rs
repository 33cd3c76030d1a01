//! Each unit has one vector of pairs: forward and backward of the encoding, with the activation
//! element by element. The statistics of a softmax come from launches before.

use cubecl::prelude::*;
use fuselane::{Act, Result};

use super::activation::{Activation, Context, activated, statistic};
use super::call::TokenRange;
use super::pairs::{Entries, Index, Inputs, rotate_entry, rotation_at};
use crate::kernel::math;
use crate::kernel::storage::{Operand, unit_number};
use crate::launch::{Grid, Storage, buffer, launch, with_words};
use crate::ops::softmax::StatisticsTensors;
use crate::tensor::Tensor;

/// o at an index, of some entries of the batch.
#[cube]
fn encode_vector<E: Numeric, P: Size, N: Size>(
    x: &Operand<E, P>,
    o: &mut Operand<E, P>,
    context: &Context,
    entries: &Entries,
    index: &Index,
) {
    let problem = &context.problem;
    let mut rotation = rotation_at::<N>(&context.angles, 0usize, index);
    for batch in entries.first..entries.end {
        rotate_entry::<N>(&mut rotation, &context.angles, batch, index);
        let from = index.row_start(&x.layout, batch);
        let x = problem.load_x::<E, P, N>(x, from, index);
        let y = activated::<N>(&x, context, batch, index, problem.form.short);
        let to = index.row_start(&o.layout, batch);
        problem.store_o::<E, P, N>(o, to, index, &problem.encoded::<N>(&y, &rotation));
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn encode<E: Numeric, P: Size, N: Size>(
    x: &Operand<E, P>,
    o: &mut Operand<E, P>,
    context: &Context,
) {
    let problem = &context.problem;
    let unit = unit_number();
    let row = unit / problem.vectors;
    if row < problem.rows() {
        let index = problem.index(row, unit % problem.vectors);
        let entries = problem.entries(row);
        if index.rotates {
            let index = index.known(true);
            encode_vector::<E, P, N>(x, o, context, &entries, &index);
        } else {
            let index = index.known(false);
            encode_vector::<E, P, N>(x, o, context, &entries, &index);
        }
    }
}

/// dx at an index, of some entries of the batch.
#[cube]
fn encode_vector_backward<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    dx: &mut Operand<E, P>,
    dots: &[f32],
    context: &Context,
    entries: &Entries,
    index: &Index,
) {
    let problem = &context.problem;
    let mut rotation = rotation_at::<N>(&context.angles, 0usize, index);
    for batch in entries.first..entries.end {
        rotate_entry::<N>(&mut rotation, &context.angles, batch, index);
        let from = index.row_start(&inputs.grad.layout, batch);
        let grad = problem.load_grad::<E, P, N>(&inputs.grad, from, index);
        let mut dy = problem.decoded::<N>(&grad, &rotation);
        if comptime!(problem.form.act != Activation::Elementwise(Act::None)) {
            let from = index.row_start(&inputs.x.layout, batch);
            let x = problem.load_x::<E, P, N>(&inputs.x, from, index);
            match comptime!(problem.form.act) {
                Activation::Elementwise(act) => {
                    dy.a = math::pull_back::<N>(x.a, dy.a, act, problem.form.short);
                    dy.b = math::pull_back::<N>(x.b, dy.b, act, problem.form.short);
                }
                _ => {
                    let y = activated::<N>(&x, context, batch, index, false);
                    let dot = statistic::<N>(dots, problem, batch, index);
                    dy.a = y.a * (dy.a - dot.a);
                    dy.b = y.b * (dy.b - dot.b);
                }
            }
        }
        let to = index.row_start(&dx.layout, batch);
        problem.store_dx::<E, P, N>(dx, to, index, &dy);
    }
}

/// dx, with the sums of f(x) times its gradient in `dots` where there is a softmax.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn encode_backward<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    dx: &mut Operand<E, P>,
    dots: &[f32],
    context: &Context,
) {
    let problem = &context.problem;
    let unit = unit_number();
    let row = unit / problem.vectors;
    if row < problem.rows() {
        let index = problem.index(row, unit % problem.vectors);
        let entries = problem.entries(row);
        if index.rotates {
            let index = index.known(true);
            encode_vector_backward::<E, P, N>(inputs, dx, dots, context, &entries, &index);
        } else {
            let index = index.known(false);
            encode_vector_backward::<E, P, N>(inputs, dx, dots, context, &entries, &index);
        }
    }
}

/// The units of a launch, and how many entries of the batch each of them walks over.
fn grid(range: &TokenRange<'_>) -> Result<(Grid, usize)> {
    let units = range.rows() * range.vectors();
    let chunk = range.call.chunk(units);
    let units = units * range.batch().div_ceil(chunk);
    Ok((Grid::of_units(range.call.operator, range.device, units, range.numbers)?, chunk))
}

pub(super) fn forward(
    range: &TokenRange<'_>,
    act: Activation,
    statistics: &StatisticsTensors,
    x: &Tensor,
    o: &Tensor,
) -> Result<()> {
    let TokenRange { device, storage, width, .. } = *range;
    let (grid, chunk) = grid(range)?;
    with_words!(storage, E => launch!(
        device, encode::<E>, grid, width.words, width.numbers,
        range.operand(x), range.operand(o), range.context(statistics, chunk, act),
    ));
    Ok(())
}

pub(super) fn backward(
    range: &TokenRange<'_>,
    act: Activation,
    statistics: &StatisticsTensors,
    dots: &Tensor,
    [x, grad, dx]: [&Tensor; 3],
) -> Result<()> {
    let TokenRange { device, storage, width, .. } = *range;
    let (grid, chunk) = grid(range)?;
    with_words!(storage, E => launch!(
        device, encode_backward::<E>, grid, width.words, width.numbers,
        range.inputs([x, grad]), range.operand(dx),
        buffer(dots, Storage::F32), range.context(statistics, chunk, act),
    ));
    Ok(())
}
