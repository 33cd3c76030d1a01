//! Elementwise activations; see [`fuselane::Act`].
//!
//! A unit works on one vector: it loads, computes in f32, rounds and stores.

use cubecl::prelude::*;
use fuselane::{Act, Result};

use crate::copy::all_through_f32;
use crate::kernel::math;
use crate::kernel::storage::{Operand, unit_number};
use crate::launch::{Grid, Rows, Storage, into_new, largest, launch, one_device, with_words};
use crate::tensor::Tensor;

const NAME: &str = "act";

/// The rows of a call, of whose vectors each unit has one.
#[derive(CubeType, CubeLaunch)]
struct Vectors {
    shape: Sequence<usize>,
    /// Vectors of a row, and of all rows.
    per_row: usize,
    total: usize,
}

/// The vector of a unit.
#[derive(CubeType, Clone, Copy)]
struct Place {
    row: usize,
    column: usize,
    /// Whether there is such a vector.
    exists: bool,
}

#[cube]
impl Vectors {
    fn of_unit(&self) -> Place {
        let unit = unit_number();
        Place { row: unit / self.per_row, column: unit % self.per_row, exists: unit < self.total }
    }

    /// Where the vector begins in an operand.
    fn start<E: Numeric, P: Size>(&self, operand: &Operand<E, P>, place: &Place) -> usize {
        operand.row_start(&self.shape, place.row) + place.column
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn act_forward<E: Numeric, P: Size, N: Size>(
    x: &Operand<E, P>,
    o: &mut Operand<E, P>,
    vectors: &Vectors,
    #[comptime] act: Act,
    #[comptime] short: bool,
) {
    let place = vectors.of_unit();
    if place.exists {
        let x = x.load::<N>(vectors.start::<E, P>(x, &place));
        let y = math::value::<N>(x, act, short);
        o.store::<N>(vectors.start::<E, P>(&*o, &place), y);
    }
}

/// `from_output` says that `x` is the forward's output.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn act_backward<E: Numeric, P: Size, N: Size>(
    x: &Operand<E, P>,
    grad: &Operand<E, P>,
    dx: &mut Operand<E, P>,
    vectors: &Vectors,
    #[comptime] act: Act,
    #[comptime] from_output: bool,
    #[comptime] short: bool,
) {
    let place = vectors.of_unit();
    if place.exists {
        let x = x.load::<N>(vectors.start::<E, P>(x, &place));
        let grad = grad.load::<N>(vectors.start::<E, P>(grad, &place));
        let dx_at = vectors.start::<E, P>(&*dx, &place);
        if comptime!(from_output) {
            dx.store::<N>(dx_at, math::pull_back_from_output::<N>(x, grad, act));
        } else {
            dx.store::<N>(dx_at, math::pull_back::<N>(x, grad, act, short));
        }
    }
}

/// Writes `f(x)` into `o`.
pub fn forward_into(act: Act, x: &Tensor, o: &mut Tensor) -> Result<()> {
    one_device(NAME, [("x", Some(x)), ("o", Some(o))])?;
    act.check_forward(x.view()?, o.view_mut()?)?;
    run_forward(act, x, o)
}

/// `f(x)` in a new tensor.
pub fn forward(act: Act, x: &Tensor) -> Result<Tensor> {
    into_new(NAME, "x", x, |o| forward_into(act, x, o))
}

/// Replaces x by `f(x)`. For [`Act::None`] this touches nothing.
pub fn forward_in_place(act: Act, x: &mut Tensor) -> Result<()> {
    one_device(NAME, [("x", Some(&*x))])?;
    if act == Act::None {
        return Ok(());
    }
    act.check_in_place(x.view_mut()?)?;
    run_forward(act, x, x)
}

/// Writes `dx = grad * f'(x)`, where `grad` is the gradient that arrives at the output.
pub fn backward_into(act: Act, x: &Tensor, grad: &Tensor, dx: &mut Tensor) -> Result<()> {
    one_device(NAME, [("x", Some(x)), ("grad", Some(grad)), ("dx", Some(dx))])?;
    act.check_backward(x.view()?, grad.view()?, dx.view_mut()?)?;
    run_backward(act, false, x, grad, dx)
}

/// `dx` of [`backward_into`] in a new tensor.
pub fn backward(act: Act, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    into_new(NAME, "x", x, |dx| backward_into(act, x, grad, dx))
}

/// Writes `dx` from the output `o` of the forward; see [`Act::backward_from_output_into`].
pub fn backward_from_output_into(
    act: Act,
    o: &Tensor,
    grad: &Tensor,
    dx: &mut Tensor,
) -> Result<()> {
    one_device(NAME, [("o", Some(o)), ("grad", Some(grad)), ("dx", Some(dx))])?;
    act.check_backward_from_output(o.view()?, grad.view()?, dx.view_mut()?)?;
    run_backward(act, true, o, grad, dx)
}

fn run_forward(act: Act, x: &Tensor, o: &Tensor) -> Result<()> {
    if o.is_empty() {
        return Ok(());
    }
    let ([x, o], device) = (contiguous_last([x, o])?, o.device());
    let storage = Storage::of(device, x.dtype());
    let rows = Rows::new([Some(&x), Some(&o)], *x.shape().last().unwrap_or(&1)).flattened();
    let Some(width) = rows.width(device, storage, 2, &[]) else {
        return all_through_f32(NAME, [&x], [&o], |[x], [o]| run_forward(act, x, o));
    };
    let (vectors, n) = (rows.len / width.numbers, width.numbers);
    let total = rows.count() * vectors;
    let grid = Grid::of_units(NAME, device, total, largest([Some(&x), Some(&o)]))?;
    with_words!(storage, E => launch!(
        device, act_forward::<E>, grid, width.words, n,
        rows.argument(0, storage, width), rows.argument(1, storage, width),
        VectorsLaunch::new(rows.shape(), vectors, total), act, storage.is_short(),
    ));
    Ok(())
}

fn run_backward(act: Act, from_output: bool, x: &Tensor, grad: &Tensor, dx: &Tensor) -> Result<()> {
    if dx.is_empty() {
        return Ok(());
    }
    let ([x, grad, dx], device) = (contiguous_last([x, grad, dx])?, dx.device());
    let storage = Storage::of(device, x.dtype());
    let tensors = [Some(&x), Some(&grad), Some(&dx)];
    let rows = Rows::new(tensors, *x.shape().last().unwrap_or(&1)).flattened();
    let Some(width) = rows.width(device, storage, 3, &[]) else {
        return all_through_f32(NAME, [&x, &grad], [&dx], |[x, grad], [dx]| {
            run_backward(act, from_output, x, grad, dx)
        });
    };
    let (vectors, n) = (rows.len / width.numbers, width.numbers);
    let total = rows.count() * vectors;
    let grid = Grid::of_units(NAME, device, total, largest(tensors))?;
    with_words!(storage, E => launch!(
        device, act_backward::<E>, grid, width.words, n,
        rows.argument(0, storage, width), rows.argument(1, storage, width),
        rows.argument(2, storage, width),
        VectorsLaunch::new(rows.shape(), vectors, total), act, from_output, storage.is_short(),
    ));
    Ok(())
}

/// Moves the dimension that is contiguous in the last tensor, the output, last in all of them.
pub(crate) fn contiguous_last<const K: usize>(tensors: [&Tensor; K]) -> Result<[Tensor; K]> {
    let output = tensors[K - 1];
    let rank = output.shape().len();
    let mut moved = tensors.map(Tensor::clone);
    if rank == 0 {
        for tensor in &mut moved {
            *tensor = tensor.reshape(&[1])?;
        }
        return Ok(moved);
    }
    let one = (0..rank).rev().find(|&d| output.strides()[d] == 1 && output.shape()[d] > 1);
    let last = one.unwrap_or(rank - 1);
    let order: Vec<usize> = (0..rank).filter(|&d| d != last).chain([last]).collect();
    for tensor in &mut moved {
        *tensor = tensor.permute(&order)?;
    }
    Ok(moved)
}
