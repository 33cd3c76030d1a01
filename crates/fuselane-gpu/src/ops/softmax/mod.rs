//! Softmax and log-softmax over one dimension; see [`fuselane::Softmax`] for the formulas.
//!
//! **Rows** (`rows`): the dimension is the one that is contiguous in memory. A team of units works
//! on a row and has it in registers: maximum, sum, result. A row that is too long for that is read
//! once for its statistics and once more for the result.
//!
//! **Columns** (`columns`): the dimension is another one. Units run along the contiguous
//! dimension, so that neighbours load neighbours, and each of them walks down its columns. A cube
//! is a tile: some vectors of columns wide (x), and as many units (y) share the rows of each. All
//! rows are read for the statistics, then again for the result, and nothing is transposed. Long
//! columns are cut into segments as well: one launch writes the statistics of each segment, the
//! next one merges them and writes the result.
//!
//! Both are made of the same parts (`sums`). `sweep` goes over some vectors and gives their
//! `Sums`, lane by lane; those of units and segments are merged in a fixed order; `scales` makes
//! of them what `result` needs for each vector. `column_statistics` serves operators that have a
//! softmax over the sequence inside.
//!
//! The maximum starts at the least finite number, not at minus infinity, which shaders cannot
//! write. A row of nothing but minus infinity has that for its maximum and 0 for its sum, and no
//! other row has this sum. A NaN, or a plus infinity, makes the sum NaN.

mod columns;
mod rows;
mod sums;

use cubecl::prelude::*;
use fuselane::{Result, Softmax};

pub(crate) use self::columns::{StatisticsTensors, column_statistics};
use crate::copy::all_through_f32;
use crate::kernel::storage::Operand;
use crate::launch::{Storage, into_new, one_device};
use crate::tensor::Tensor;

const NAME: &str = "softmax";

/// What is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Pass {
    Forward,
    /// The gradient, where `x` is the forward's output.
    FromOutput,
    /// The gradient, where `x` is the forward's input.
    FromInput,
}

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    pass: Pass,
    log: bool,
    zero_masked: bool,
    /// Whether the device's own exponential serves.
    short: bool,
}

impl Plan {
    fn new(options: &Softmax, pass: Pass, storage: Storage) -> Self {
        let Softmax { log, zero_masked_rows: zero_masked, .. } = *options;
        // The logarithm of a sum needs it exact, and so do gradients, in which terms cancel; and
        // bf16, which reaches as low as f32, where the device's own exponential was seen to fail.
        let short = storage == Storage::F16 && pass == Pass::Forward && !log;
        Self { pass, log, zero_masked, short }
    }

    fn needs_exponentials(self) -> bool {
        self.pass != Pass::FromOutput
    }

    fn needs_grad(self) -> bool {
        self.pass != Pass::Forward
    }

    /// Whether the sums count the outputs that are not masked.
    fn counts(self) -> bool {
        self.pass == Pass::FromOutput && self.log && self.zero_masked
    }

    fn needs_sum(self) -> bool {
        self.needs_exponentials() || self.counts()
    }
}

/// What is read: x, or the forward's output; and the gradient, where one is needed.
#[derive(CubeType, CubeLaunch)]
struct Inputs<E: Numeric, P: Size> {
    x: Operand<E, P>,
    grad: Operand<E, P>,
    #[cube(comptime)]
    plan: Plan,
}

/// Writes the softmax of `x` into `o`; see [`Softmax::forward_into`].
pub fn forward_into(options: &Softmax, x: &Tensor, o: &mut Tensor) -> Result<()> {
    one_device(NAME, [("x", Some(x)), ("o", Some(o))])?;
    let dim = options.check_forward(x.view()?, o.view_mut()?)?;
    run(options, Pass::Forward, dim, [x, x, o])
}

/// The softmax of `x` in a new tensor.
pub fn forward(options: &Softmax, x: &Tensor) -> Result<Tensor> {
    into_new(NAME, "x", x, |o| forward_into(options, x, o))
}

/// Writes `dx` from the output `o` of the forward and the gradient that arrives at it; see
/// [`Softmax::backward_into`].
pub fn backward_into(options: &Softmax, o: &Tensor, grad: &Tensor, dx: &mut Tensor) -> Result<()> {
    one_device(NAME, [("o", Some(o)), ("grad", Some(grad)), ("dx", Some(dx))])?;
    let dim = options.check_backward(o.view()?, grad.view()?, dx.view_mut()?)?;
    run(options, Pass::FromOutput, dim, [o, grad, dx])
}

/// `dx` of [`backward_into`] in a new tensor.
pub fn backward(options: &Softmax, o: &Tensor, grad: &Tensor) -> Result<Tensor> {
    into_new(NAME, "o", o, |dx| backward_into(options, o, grad, dx))
}

/// Writes `dx` from the input `x` of the forward; see [`Softmax::backward_from_input_into`].
pub fn backward_from_input_into(
    options: &Softmax,
    x: &Tensor,
    grad: &Tensor,
    dx: &mut Tensor,
) -> Result<()> {
    one_device(NAME, [("x", Some(x)), ("grad", Some(grad)), ("dx", Some(dx))])?;
    let dim = options.check_backward_from_input(x.view()?, grad.view()?, dx.view_mut()?)?;
    run(options, Pass::FromInput, dim, [x, grad, dx])
}

/// `dx` of [`backward_from_input_into`] in a new tensor.
pub fn backward_from_input(options: &Softmax, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    into_new(NAME, "x", x, |dx| backward_from_input_into(options, x, grad, dx))
}

/// `tensors` are x, the gradient (or x again, where none is needed), and the result.
fn run(options: &Softmax, pass: Pass, dim: usize, tensors: [&Tensor; 3]) -> Result<()> {
    let [x, grad, o] = tensors;
    if o.is_empty() {
        return Ok(());
    }
    let (order, dim) = order(o, dim);
    let (x, grad, o) = (&x.permute(&order)?, &grad.permute(&order)?, &o.permute(&order)?);
    let storage = Storage::of(o.device(), o.dtype());
    let plan = Plan::new(options, pass, storage);
    let done = if dim + 1 == order.len() {
        rows::run([x, grad, o], storage, plan)?
    } else {
        columns::run([x, grad, o], dim, storage, plan)?
    };
    if done {
        return Ok(());
    }
    all_through_f32(NAME, [x, grad], [o], |[x, grad], [o]| run(options, pass, dim, [x, grad, o]))
}

/// The order of dimensions that moves the contiguous one of `output` last, and where `dim` is then.
///
/// A last dimension of size 1 stays where it is, unless the softmax runs along it: a single column
/// is summed in the same order as one of many.
fn order(output: &Tensor, dim: usize) -> (Vec<usize>, usize) {
    let (shape, strides) = (output.shape(), output.strides());
    let rank = shape.len();
    let one = (0..rank).rev().find(|&d| strides[d] == 1 && shape[d] > 1);
    let stays = shape[rank - 1] == 1 && dim + 1 < rank;
    let last = one.filter(|_| !stays).unwrap_or(rank - 1);
    let order = (0..rank).filter(|&d| d != last).chain([last]).collect();
    let dim = if dim == last { rank - 1 } else { dim - usize::from(dim > last) };
    (order, dim)
}
