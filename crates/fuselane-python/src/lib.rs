//! The compiled half of the Python package `fuselane`; the other half is in `python/fuselane`.
//!
//! It holds no mathematics: it brings tensors to the operators of the core and results back, without
//! a copy. [`ops`] says what each operator takes; [`torch`] is the edge to PyTorch's dispatcher,
//! [`arrays`] the one to Python.

mod arrays;
#[cfg(unix)]
mod direct;
mod fault;
mod lock;
mod ops;
mod raw;
mod theta;
mod threads;
#[cfg(unix)]
mod torch;

use pyo3::prelude::*;

/// The compiled half of `fuselane`.
#[pymodule]
mod _native {
    use super::*;

    #[pymodule_export]
    use crate::arrays::{Block, call, describe};
    #[cfg(unix)]
    #[pymodule_export]
    use crate::direct::{prepare_torch_call, torch_call};
    #[pymodule_export]
    use crate::theta::{Table, theta};

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// The names of the activations, in the order of their numbers.
    #[pyfunction]
    fn acts() -> Vec<&'static str> {
        fuselane::Act::ALL.iter().map(|act| act.name()).collect()
    }

    /// The numbers of those whose gradient can be had from their output.
    #[pyfunction]
    fn acts_from_output() -> Vec<usize> {
        let all = fuselane::Act::ALL.iter().enumerate();
        all.filter(|(_, act)| act.has_slope_from_output()).map(|(number, _)| number).collect()
    }

    /// The schemas of all operators, in PyTorch's notation.
    #[pyfunction]
    fn schemas() -> Vec<&'static str> {
        ops::OPS.iter().map(|op| op.schema).collect()
    }

    /// Defines the operators in the PyTorch whose library this is. None, or why that cannot be.
    #[pyfunction]
    fn register_torch(library: &str) -> Option<String> {
        #[cfg(unix)]
        return torch::register(library).err();
        #[cfg(not(unix))]
        return Some(format!("not on this system: {library}"));
    }

    /// The exception for the last call of this thread that PyTorch's dispatcher has refused.
    #[pyfunction]
    fn take_error(py: Python<'_>) -> Option<Py<PyAny>> {
        fault::take().map(|fault| PyErr::from(fault).into_value(py).into_any())
    }

    #[pyfunction]
    fn num_threads() -> usize {
        threads::count()
    }

    #[pyfunction]
    fn set_num_threads(n: usize) -> PyResult<()> {
        Ok(threads::set_count(n)?)
    }

    /// Names a function that tells how many threads to use, as long as nobody has said.
    #[pyfunction]
    fn follow_num_threads(ask: Py<PyAny>) {
        threads::follow(move || {
            Python::attach(|py| ask.bind(py).call0().and_then(|n| n.extract()).unwrap_or(1))
        });
    }

    /// To be called in a forked child, with Python's lock.
    #[pyfunction]
    fn after_fork() {
        ops::after_fork();
        threads::after_fork();
    }

    /// The arguments of an operator: (name, what it has to be).
    #[pyfunction]
    fn parameters(operator: &str) -> Vec<(&'static str, &'static str)> {
        let parameters = |op: &ops::Op| {
            let named = |(name, parameter)| {
                let kind = match parameter {
                    ops::Parameter::Tensor => "tensor",
                    ops::Parameter::OptionalTensor => "optional tensor",
                    ops::Parameter::Int => "int",
                    ops::Parameter::Float => "float",
                    ops::Parameter::Flag => "flag",
                    ops::Parameter::Ints => "ints",
                };
                (name, kind)
            };
            op.parameters().into_iter().map(named).collect()
        };
        ops::OPS.iter().find(|op| op.name() == operator).map(parameters).unwrap_or_default()
    }

    #[pyfunction]
    fn pool_trim(py: Python<'_>) {
        py.detach(fuselane::pool::trim);
    }

    #[pyfunction]
    fn pool_limit() -> usize {
        fuselane::pool::limit()
    }

    #[pyfunction]
    fn pool_set_limit(py: Python<'_>, bytes: usize) {
        py.detach(|| fuselane::pool::set_limit(bytes));
    }

    /// (held_bytes, used_bytes, reused, fresh)
    #[pyfunction]
    fn pool_stats() -> (usize, usize, usize, usize) {
        let stats = fuselane::pool::stats();
        (stats.held_bytes, stats.used_bytes, stats.reused, stats.fresh)
    }

    /// The instruction set that the kernels use.
    #[pyfunction]
    fn isa() -> String {
        fuselane::isa().to_string()
    }
}
