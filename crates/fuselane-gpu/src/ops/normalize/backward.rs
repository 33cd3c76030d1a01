//! The backward: sums over a row of the gradient times the weight, then the gradients of the
//! inputs; and partial sums of those of the weight and the bias.

use cubecl::prelude::*;
use fuselane::{Normalize, Result};

use super::NAME;
use super::gradients::{
    BackwardForm, GradientMoments, Gradients, GradientsLaunch, RowSums, VectorArray,
    add_to_partial, load, store_partial,
};
use super::inputs::{
    CHUNK, InputForm, InputTensors, Inputs, InputsLaunch, Parameters, ParametersLaunch, RowMoments,
    Sizes, SizesLaunch, Statistic, StatisticLaunch, over_row,
};
use crate::copy::{fill, through_f32, write_f32};
use crate::kernel::reduce::Team;
use crate::kernel::sums::sum_partials;
use crate::launch::{
    Grid, Rows, Storage, buffer, check_buffers, full_cube, largest, launch, team, unused,
    with_words,
};
use crate::tensor::Tensor;

/// A cube works on `steps` times as many rows as its team has, of one group: on all of them, so
/// that the gradients of the parameters can be summed in registers. The partial sums of a cube are
/// a row of `dparameters`; where rows are read again, those of each row of its team are.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn normalize_backward<E: Numeric, P: Size, N: Size>(
    gradients: &mut Gradients<E, P>,
    inputs: &Inputs<E, P>,
    parameters: &Parameters<N>,
    rstd: &Statistic,
    mean: &Statistic,
    dparameters: &mut Parameters<N>,
    sizes: &Sizes,
    blocks: usize,
    steps: usize,
    scale: f32,
    #[comptime] form: BackwardForm,
) {
    let team = comptime!(form.team);
    let per_unit = comptime!(form.per_unit);
    let units = comptime!(form.team.units as usize);
    let team_rows = comptime!(form.team.rows as usize);
    let center = comptime!(inputs.form.center);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(form.team.shared()));
    let unit = UNIT_POS_X as usize;
    let (block, group) = (CUBE_POS / sizes.groups, CUBE_POS % sizes.groups);
    // A grid of two dimensions has cubes beyond the last block. They have no rows, and there is no
    // memory for their partial sums.
    let partial_end = select(block < blocks, sizes.vectors, 0usize);
    let first = group * sizes.vectors;
    let zero = Vector::<f32, N>::new(0.0f32);
    let mut row_in_registers = VectorArray::<N>::new(comptime!(form.per_unit.max(1)));
    let mut dweights = Array::<Vector<f32, N>>::new(comptime!(form.per_unit.max(1)));
    let mut dbiases = Array::<Vector<f32, N>>::new(comptime!(form.per_unit.max(1)));
    #[unroll]
    for i in 0..per_unit {
        dweights[i] = zero;
        dbiases[i] = zero;
    }

    for step in 0..steps {
        let number = (block * steps + step) * team_rows + UNIT_POS_Y as usize;
        // Units beyond the last row sum zeros.
        let end = select(number < sizes.rows, sizes.vectors, 0usize);
        let row = select(number < sizes.rows, number, 0usize);
        let grad_start = gradients.grad.row_start(&sizes.shape, row) + first;
        let starts = inputs.starts(&sizes.shape, row, first);
        let inverse = rstd.get(&sizes.shape, row, group);
        let mut mean_hi = 0.0f32;
        if comptime!(center) {
            mean_hi = mean.get(&sizes.shape, row, group);
        }

        let mut sums = RowSums::<N>::zero();
        if comptime!(per_unit > 0) {
            #[unroll]
            for i in 0..per_unit {
                let column = unit + comptime!(i * units);
                if column < end {
                    let vectors =
                        load::<E, P, N>(&gradients.grad, inputs, grad_start, &starts, column);
                    row_in_registers.set(i, &vectors);
                    if comptime!(form.needs_sums()) {
                        let weight = parameters.scaled_weight(first + column, scale, inputs.form);
                        sums.add(&vectors, weight, mean_hi, inputs.form);
                    }
                }
            }
        } else if comptime!(form.needs_sums()) {
            let mut column = unit;
            while column < end {
                let mut chunk = RowSums::<N>::zero();
                let chunk_end = end.min(column + CHUNK * units);
                while column < chunk_end {
                    let vectors =
                        load::<E, P, N>(&gradients.grad, inputs, grad_start, &starts, column);
                    let weight = parameters.scaled_weight(first + column, scale, inputs.form);
                    chunk.add(&vectors, weight, mean_hi, inputs.form);
                    column += units;
                }
                sums.add_chunk(&chunk, inputs.form);
            }
        }
        let mut mean_lo = 0.0f32;
        let mut sum_dr = 0.0f32;
        let mut mean_rdr = 0.0f32;
        if comptime!(center) {
            mean_lo = over_row::<N>(sums.q, &mut shared, team) / sizes.len;
            sum_dr = over_row::<N>(sums.dr, &mut shared, team);
        }
        if comptime!(form.needs_sums()) {
            let product = over_row::<N>(sums.product, &mut shared, team);
            mean_rdr = (product - mean_lo * sum_dr) * inverse / sizes.len;
        }
        let mean_dr = sum_dr / sizes.len;
        let row_moments = RowMoments { mean_hi, mean_lo, rstd: inverse };
        let moments = GradientMoments { row: row_moments, mean_dr, mean_rdr, scale };
        let to = gradients.starts(&sizes.shape, row, first, form);

        if comptime!(per_unit > 0) {
            #[unroll]
            for i in 0..per_unit {
                let column = unit + comptime!(i * units);
                if column < end {
                    let vectors = row_in_registers.get(i);
                    let terms =
                        gradients.write::<N>(&vectors, &moments, parameters, &to, column, form);
                    if comptime!(form.dweight) {
                        dweights[i] += terms.weight;
                    }
                    if comptime!(form.dbias) {
                        dbiases[i] += terms.bias;
                    }
                }
            }
        } else {
            // Sums that no register holds stay in memory of their own.
            let own =
                ((block * team_rows + UNIT_POS_Y as usize) * sizes.groups + group) * sizes.vectors;
            let mut column = unit;
            while column < partial_end {
                let mut dweight = zero;
                let mut dbias = zero;
                if column < end {
                    let vectors =
                        load::<E, P, N>(&gradients.grad, inputs, grad_start, &starts, column);
                    let terms =
                        gradients.write::<N>(&vectors, &moments, parameters, &to, column, form);
                    dweight = terms.weight;
                    dbias = terms.bias;
                }
                if comptime!(form.dweight) {
                    add_to_partial::<N>(&mut dparameters.weight, own + column, dweight, step);
                }
                if comptime!(form.dbias) {
                    add_to_partial::<N>(&mut dparameters.bias, own + column, dbias, step);
                }
                column += units;
            }
        }
    }

    if comptime!(per_unit > 0 && form.needs_parameters()) {
        let shared_len = comptime!(if team.rows == 1 { 1 } else { units * team_rows });
        let mut shared = Shared::<[Vector<f32, N>]>::new_slice(shared_len);
        let own = (block * sizes.groups + group) * sizes.vectors;
        #[unroll]
        for i in 0..per_unit {
            let column = unit + comptime!(i * units);
            let (at, inside) = (own + column, column < partial_end);
            if comptime!(form.dweight) {
                let partials = &mut dparameters.weight;
                store_partial::<N>(partials, at, inside, dweights[i], &mut shared, team);
            }
            if comptime!(form.dbias) {
                let partials = &mut dparameters.bias;
                store_partial::<N>(partials, at, inside, dbiases[i], &mut shared, team);
            }
        }
    }
}

/// A checked backward.
#[derive(Clone, Copy)]
pub(super) struct Backward<'a> {
    pub(super) grad: &'a Tensor,
    pub(super) inputs: InputTensors<'a>,
    pub(super) grad_sum: Option<&'a Tensor>,
    pub(super) rstd: &'a Tensor,
    pub(super) mean: Option<&'a Tensor>,
    pub(super) dx: Option<&'a Tensor>,
    pub(super) dresidual: Option<&'a Tensor>,
    pub(super) dgate: Option<&'a Tensor>,
    pub(super) dweight: Option<&'a Tensor>,
    pub(super) dbias: Option<&'a Tensor>,
}

/// How many times a team walks on to other rows, where the gradients of parameters are summed.
///
/// There are so many cubes that they fill a device, of units that are few in a `full` cube; and so few
/// that partial sums are few: those of 2,048 blocks, of rows of 256, take 2 MiB. A register sums so
/// few rows that its error stays small; where there are very many, blocks are more.
fn steps(rows: usize, team: Team, full: u32) -> usize {
    const ROWS: usize = 16;
    const STEPS: usize = 128;
    let most = if team.units * team.rows <= full { 2048 } else { 512 };
    let blocks = (rows / ROWS).clamp(1, most);
    rows.div_ceil(blocks * team.rows as usize).clamp(1, STEPS)
}

/// `memory` gives that of the partial sums of parameters.
pub(super) fn run(
    options: &Normalize,
    call: Backward<'_>,
    memory: &dyn Fn(&[usize]) -> Result<Tensor>,
) -> Result<()> {
    let Backward { grad, inputs, grad_sum, rstd, mean, dx, dresidual, dgate, dweight, dbias } =
        call;
    let InputTensors { x, residual, gate, weight, bias } = inputs;
    let (device, storage) = (x.device(), Storage::of(x.device(), x.dtype()));
    let d = x.shape().last().copied().unwrap_or(1);
    if x.is_empty() {
        for gradient in dweight.into_iter().chain(dbias) {
            fill(NAME, gradient, 0.0)?;
        }
        return Ok(());
    }
    if [dx, dresidual, dgate, dweight, dbias].iter().all(Option::is_none) {
        return Ok(());
    }
    check_buffers(NAME, device, 14)?;
    let tensors =
        [Some(grad), Some(x), residual, gate, grad_sum, dx, dresidual, dgate, Some(rstd), mean];
    let rows = Rows::new(tensors, d);
    let (groups, e) = (options.groups, d / options.groups);
    let Some(width) = rows.width(device, storage, 8, &[e]) else {
        let read = [Some(grad), Some(x), residual, gate, grad_sum];
        let run_wide = |read: [Option<&Tensor>; 5], written: [Option<&Tensor>; 3]| {
            let ([grad, x, residual, gate, grad_sum], [dx, dresidual, dgate]) = (read, written);
            let (Some(grad), Some(x)) = (grad, x) else { return Ok(()) };
            let inputs = InputTensors { x, residual, gate, ..inputs };
            let call = Backward { grad, inputs, grad_sum, dx, dresidual, dgate, ..call };
            run(options, call, memory)
        };
        return through_f32(NAME, read, [dx, dresidual, dgate], run_wide);
    };
    let (vectors, n) = (e / width.numbers, width.numbers);
    // What a unit holds of each vector, all in f32: the sum and the gradient; the gate; what dweight
    // adds up to, where there is a weight; what dbias does, where a mean is subtracted, as then there
    // mostly is a bias. Which gradients are asked for does not matter, so that the bits of none
    // depend on that. Rows for which this is too much are read a second time for the results.
    let held = 2 + [gate.is_some(), weight.is_some(), options.center]
        .map(usize::from)
        .iter()
        .sum::<usize>();
    let (mut team, per_unit) = team(device, vectors, n * held);
    let full = full_cube(device);
    if team.units <= full && (dweight.is_some() || dbias.is_some()) {
        team.rows = full / team.units;
    }
    let inputs = InputForm::new(options, storage, inputs);
    let form = BackwardForm {
        inputs,
        grad_sum: grad_sum.is_some(),
        dx: dx.is_some(),
        dresidual: dresidual.is_some(),
        dgate: dgate.is_some(),
        dweight: dweight.is_some(),
        dbias: dbias.is_some(),
        team,
        per_unit,
    };
    let count = rows.count();
    let steps = if form.needs_parameters() { steps(count, team, full) } else { 1 };
    let blocks = count.div_ceil(steps * team.rows as usize);
    let partial_rows = if per_unit > 0 { blocks } else { blocks * team.rows as usize };
    let partials = |asked: Option<&Tensor>| asked.map(|_| memory(&[partial_rows, d])).transpose();
    let (dweights, dbiases) = (partials(dweight)?, partials(dbias)?);
    let numbers = largest(tensors).max(largest([dweights.as_ref(), dbiases.as_ref()]));
    let dim = CubeDim::new_2d(team.units, team.rows);
    let grid = Grid::new(NAME, device, blocks * groups, dim, numbers)?;
    let unused = unused(device)?;
    let wide = |tensor: Option<&Tensor>| buffer(tensor.unwrap_or(&unused), Storage::F32);
    let statistic = |tensor, i| StatisticLaunch::new(wide(tensor), rows.layout(i, 1));
    with_words!(storage, E => launch!(
        device, normalize_backward::<E>, grid, width.words, n,
        GradientsLaunch::new(
            rows.argument(0, storage, width), rows.argument(4, storage, width),
            rows.output(5, &unused, storage, width), rows.output(6, &unused, storage, width),
            rows.output(7, &unused, storage, width),
        ),
        InputsLaunch::new(
            rows.argument(1, storage, width), rows.argument(2, storage, width),
            rows.argument(3, storage, width), inputs,
        ),
        ParametersLaunch::new(wide(weight), wide(bias)),
        statistic(Some(rstd), 8), statistic(mean, 9),
        ParametersLaunch::new(wide(dweights.as_ref()), wide(dbiases.as_ref())),
        SizesLaunch::new(rows.shape(), groups, vectors, count, e as f32),
        blocks, steps, options.scale as f32, form,
    ));
    for (gradient, partials) in [(dweight, dweights), (dbias, dbiases)] {
        if let (Some(gradient), Some(partials)) = (gradient, partials) {
            write_f32(NAME, gradient, |sum| sum_partials(NAME, &partials, sum))?;
        }
    }
    Ok(())
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::{Device, Tuning};
    use fuselane::View;
    use std::cell::RefCell;

    /// More cubes than one dimension of a grid has: those that are too many write nothing.
    #[test]
    fn nothing_is_written_beyond_the_partial_sums() {
        for reread in [false, true] {
            let tuning = Tuning { units: Some(1), reread: Some(reread), ..Tuning::default() };
            let device = Device::open().expect("a device").tuned(tuning);
            let upload = |numbers: &[f32], shape: &[usize]| {
                device.upload(View::new(numbers, shape).expect("dense")).expect("memory")
            };
            // 256 blocks of 16 rows, for each of 300 groups.
            let (rows, d) = (4096, 300);
            let ones = upload(&vec![1.0; rows * d], &[rows, d]);
            let gradients = [upload(&vec![0.0; d], &[d]), upload(&vec![0.0; d], &[d])];
            let call = Backward {
                grad: &ones,
                inputs: InputTensors {
                    x: &ones,
                    residual: None,
                    gate: None,
                    weight: None,
                    bias: None,
                },
                grad_sum: None,
                rstd: &ones,
                mean: None,
                dx: None,
                dresidual: None,
                dgate: None,
                dweight: Some(&gradients[0]),
                dbias: Some(&gradients[1]),
            };
            let options = Normalize { groups: d, ..Normalize::rms_norm() };
            let given = RefCell::new(Vec::new());
            // Twice as much as is asked for, of which the second half is to stay.
            let memory = |shape: &[usize]| {
                let numbers = vec![7.0; 2 * shape[0] * shape[1]];
                let all = upload(&numbers, &[2 * shape[0], shape[1]]);
                given.borrow_mut().push(all.clone());
                all.narrow(0, 0, shape[0])
            };
            run(&options, call, &memory).expect("gradients");
            // So many partial sums that the cubes do not fit one dimension.
            let blocks = given.borrow()[0].shape()[0] / 2;
            assert!(blocks * d > 65_535, "{blocks} blocks of {d} groups");
            for gradient in &gradients {
                let numbers = gradient.download::<f32>().expect("a gradient");
                assert!(numbers.iter().all(|&number| number == rows as f32));
            }
            for all in given.into_inner() {
                let numbers = all.download::<f32>().expect("partial sums");
                let rest = &numbers[numbers.len() / 2..];
                assert!(rest.iter().all(|&number| number == 7.0), "reread: {reread}");
            }
        }
    }
}
