//! The operators as Python sees them: a schema in PyTorch's notation, and a function that takes its
//! arguments in that order. Both edges call these: PyTorch's dispatcher through its stable C
//! interface ([`crate::torch`]), and Python itself ([`crate::arrays`]).

mod act;
mod angles;
mod cosine;
mod normalize;
mod rotate;
mod softmax;

use fuselane::{Act, DType, View, ViewMut};

use crate::fault::Fault;
use crate::raw::{Raw, row_major};

/// Where arguments come from and outputs go to. Arguments are taken one after the other, in the
/// order of the schema, all of them before anything can fail.
pub(crate) trait Edge {
    /// The next argument, a tensor.
    fn tensor(&mut self) -> Raw;
    /// The next argument, a tensor that need not be there.
    fn optional(&mut self) -> Option<Raw>;
    /// The next argument, a number.
    fn int(&mut self) -> i64;
    /// The next argument, a number.
    fn float(&mut self) -> f64;
    /// The next argument, a flag.
    fn flag(&mut self) -> bool;
    /// The next argument, a list.
    fn ints(&mut self) -> Vec<i64>;
    /// Memory for the next result, with arbitrary content.
    fn output(&mut self, dtype: DType, shape: &[usize], strides: &[isize]) -> Result<Raw, Fault>;
}

/// What one operator is.
pub(crate) struct Op {
    /// In PyTorch's notation.
    pub(crate) schema: &'static str,
    pub(crate) run: fn(&mut dyn Edge) -> Result<(), Fault>,
}

/// What an argument has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parameter {
    Tensor,
    OptionalTensor,
    Int,
    Float,
    Flag,
    Ints,
}

impl Op {
    /// Its name: the schema up to the arguments.
    pub(crate) fn name(&self) -> &'static str {
        self.schema.split('(').next().unwrap_or_default()
    }

    /// The names of its arguments and what they have to be, as the schema says.
    pub(crate) fn parameters(&self) -> Vec<(&'static str, Parameter)> {
        let list = self.schema.split(['(', ')']).nth(1).unwrap_or_default();
        let parameter = |text: &'static str| {
            let (kind, name) = text.trim().rsplit_once(' ').unwrap_or_default();
            let kind = match kind.trim() {
                "Tensor" => Parameter::Tensor,
                "Tensor?" => Parameter::OptionalTensor,
                "float" => Parameter::Float,
                "bool" => Parameter::Flag,
                "SymInt[]" => Parameter::Ints,
                _ => Parameter::Int,
            };
            (name, kind)
        };
        list.split(',').map(parameter).collect()
    }
}

/// All of them.
pub(crate) static OPS: [Op; 11] = [
    act::FORWARD,
    act::BACKWARD,
    softmax::FORWARD,
    softmax::BACKWARD,
    normalize::FORWARD,
    normalize::FORWARD_KEEPING,
    normalize::BACKWARD,
    rotate::FORWARD,
    rotate::BACKWARD,
    cosine::FORWARD,
    cosine::BACKWARD,
];

/// The activation of a number, its place in the core's list.
fn act_of(operator: &str, name: &str, number: i64) -> Result<Act, Fault> {
    let act = usize::try_from(number).ok().and_then(|i| Act::ALL.get(i).copied());
    act.ok_or_else(|| {
        let most = Act::ALL.len() - 1;
        Fault::value(format!("{operator}: {name} is {number}, expected 0 to {most}"))
    })
}

/// Memory for a result like `tensor`, with the same order of dimensions.
fn output_like(edge: &mut dyn Edge, dtype: DType, tensor: &Raw) -> Result<Raw, Fault> {
    let strides = tensor.dense_strides();
    edge.output(dtype, tensor.shape(), &strides[..tensor.shape().len()])
}

/// Memory for a result in index order.
fn output(edge: &mut dyn Edge, dtype: DType, shape: &[usize]) -> Result<Raw, Fault> {
    edge.output(dtype, shape, &row_major(shape)[..shape.len()])
}

/// What stands for a result that was not asked for.
fn no_output(edge: &mut dyn Edge, dtype: DType) -> Result<Option<Raw>, Fault> {
    edge.output(dtype, &[0], &[1]).map(|_| None)
}

/// Memory for a result like `tensor`, if it is wanted.
fn output_if(
    edge: &mut dyn Edge,
    wanted: bool,
    dtype: DType,
    tensor: &Raw,
) -> Result<Option<Raw>, Fault> {
    if wanted { output_like(edge, dtype, tensor).map(Some) } else { no_output(edge, dtype) }
}

/// Checks dtype, rank and address of a tensor whose shape an output will have.
fn check(operator: &str, name: &str, tensor: &Raw) -> Result<DType, Fault> {
    tensor.view(operator, name).map(|view| view.dtype())
}

/// To read, if it is there.
fn view<'a>(operator: &str, name: &str, x: &'a Option<Raw>) -> Result<Option<View<'a>>, Fault> {
    x.as_ref().map(|x| x.view(operator, name)).transpose()
}

/// To write, if it was asked for.
fn view_mut<'a>(
    operator: &str,
    name: &str,
    output: &'a Option<Raw>,
) -> Result<Option<ViewMut<'a>>, Fault> {
    output.as_ref().map(|output| output.view_mut(operator, name)).transpose()
}

pub(crate) use angles::{after_fork, drop_table, keep_table};
