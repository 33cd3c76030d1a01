//! The gradient of a softmax over the sequence needs the sums of f(x) times its gradient along the
//! columns: over blocks of tokens first, then over the blocks.

use cubecl::prelude::*;
use fuselane::plan::Encoding;
use fuselane::{DType, Result};

use super::activation::{Activation, Context, activated};
use super::call::TokenRange;
use super::pairs::{Index, Inputs, Pairs, rotation_at};
use crate::kernel::storage::{Format, unit_number};
use crate::kernel::sums::sum_partials;
use crate::launch::{Grid, Storage, buffer, launch, with_words};
use crate::ops::softmax::StatisticsTensors;
use crate::tensor::Tensor;

/// Sums over blocks of tokens, one after the other.
#[derive(CubeType, CubeLaunch)]
pub(super) struct BlockSums<N: Size> {
    pub(super) partials: Box<[Vector<f32, N>]>,
    /// Blocks.
    pub(super) count: usize,
    /// Tokens of each, but the last.
    pub(super) tokens: usize,
}

/// f(x) times its gradient, for a softmax.
#[cube]
pub(super) fn product_at<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    context: &Context,
    x_from: usize,
    grad_from: usize,
    batch: usize,
    index: &Index,
) -> Pairs<N> {
    let problem = &context.problem;
    let x = problem.load_x::<E, P, N>(&inputs.x, x_from, index);
    let y = activated::<N>(&x, context, batch, index, false);
    let grad = problem.load_grad::<E, P, N>(&inputs.grad, grad_from, index);
    let rotation = rotation_at::<N>(&context.angles, batch, index);
    let dy = problem.decoded::<N>(&grad, &rotation);
    Pairs::<N> { a: y.a * dy.a, b: y.b * dy.b }
}

/// The sums of a block are a row of batch x heads x features.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn column_dots<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    sums: &mut BlockSums<N>,
    context: &Context,
) {
    let problem = &context.problem;
    let unit = unit_number();
    let columns = problem.batch * problem.heads * problem.vectors;
    if unit < columns * sums.count {
        let block = unit / columns;
        let column = unit % columns;
        let vector = column % problem.vectors;
        let rotates = vector < problem.rotated;
        let head = (column / problem.vectors) % problem.heads;
        let batch = column / problem.vectors / problem.heads;
        let mut dot =
            Pairs::<N> { a: Vector::<f32, N>::new(0.0f32), b: Vector::<f32, N>::new(0.0f32) };
        let first = block * sums.tokens;
        for i in 0..sums.tokens {
            let token = first + i;
            if token < problem.tokens {
                let at = Index { token, head, vector, rotates };
                let x_from = at.row_start(&inputs.x.layout, batch);
                let grad_from = at.row_start(&inputs.grad.layout, batch);
                let product = product_at::<E, P, N>(inputs, context, x_from, grad_from, batch, &at);
                dot.a += product.a;
                dot.b += product.b;
            }
        }
        let row = ((block * problem.batch + batch) * problem.heads + head) * problem.features;
        let at = Index { token: first, head, vector, rotates };
        let layout = comptime!(problem.form.pairs);
        problem.store::<f32, N, N>(&mut sums.partials, row, &at, &dot, layout, Format::Native);
    }
}

/// The sums of f(x) times its gradient of each column.
pub(super) fn dots(
    range: &TokenRange<'_>,
    statistics: &StatisticsTensors,
    inputs: [&Tensor; 2],
) -> Result<Tensor> {
    let TokenRange { device, storage, width, .. } = *range;
    let Encoding { batch, heads, features, .. } = range.call.encoding;
    let (operator, columns) = (range.call.operator, batch * heads * features);
    let (blocks, per_block) = range.token_blocks();
    let partials = device.empty(DType::F32, &[blocks, columns])?;
    let units = batch * heads * range.vectors() * blocks;
    let grid = Grid::of_units(operator, device, units, range.numbers.max(blocks * columns))?;
    with_words!(storage, E => launch!(
        device, column_dots::<E>, grid, width.words, width.numbers,
        range.inputs(inputs),
        BlockSumsLaunch::new(buffer(&partials, Storage::F32), blocks, per_block),
        range.context(statistics, batch, Activation::Columns),
    ));
    let dots = device.empty(DType::F32, &[columns])?;
    sum_partials(operator, &partials, &dots)?;
    Ok(dots)
}
