//! A short cut past PyTorch's dispatcher, for calls that it would bring to our kernels anyway: plain
//! tensors on the CPU, and nothing that watches or transforms operators. A tiny call costs half as
//! much this way. From torch 2.14 on, whose stable interface knows Python's tensors.
//!
//! Everything else (subclasses, fake tensors, modes, `torch.func`, tracing) is left to the dispatcher:
//! [`torch_call`] then returns None.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use fuselane::DType;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyList, PyTuple};

use crate::fault::Fault;
use crate::ops::{Edge, OPS, Op, Parameter};
use crate::raw::Raw;
use crate::torch::{self, MOST, Tensor, Tensors};

type FromPython = unsafe extern "C" fn(*mut c_void, *mut Tensor) -> i32;
type ToPython = unsafe extern "C" fn(Tensor, *mut c_void, *mut *mut c_void) -> i32;

/// Calls with fewer bytes of operands keep Python's lock: to give it back and take it again costs more
/// than they do.
const WORTH_RELEASING: usize = 1 << 15;

struct Direct {
    /// What the arguments of each operator have to be.
    parameters: Vec<Vec<Parameter>>,
    from_python: FromPython,
    to_python: ToPython,
    watched: Watched,
}

/// What PyTorch has in Python that tells whether a call is plain.
#[derive(FromPyObject)]
pub(crate) struct Watched {
    /// `torch.Tensor` and `torch.nn.Parameter`.
    types: [Py<PyAny>; 2],
    /// `torch.Tensor.is_neg`
    is_neg: Py<PyAny>,
    /// How many modes watch operators; 0 is none.
    modes: Py<PyAny>,
    /// `torch.autograd.profiler`, which knows whether one runs.
    profiler: Py<PyAny>,
    /// `torch.autograd.forward_ad`, which knows whether tensors may carry tangents.
    forward_ad: Py<PyAny>,
    /// The level of `torch.func`, and the state of tracing; None is none.
    levels: [Py<PyAny>; 2],
}

static DIRECT: OnceLock<Direct> = OnceLock::new();

/// Prepares [`torch_call`]. Whether this PyTorch has what it needs.
#[pyfunction]
pub(crate) fn prepare_torch_call(watched: Watched) -> bool {
    let found = ["torch_tensor_from_pyobject\0", "torch_tensor_to_pyobject\0"].map(torch::optional);
    let [Some(from_python), Some(to_python)] = found else { return false };
    // SAFETY: PyTorch's headers declare the functions with these types.
    let (from_python, to_python) = unsafe {
        (
            std::mem::transmute::<*mut c_void, FromPython>(from_python),
            std::mem::transmute::<*mut c_void, ToPython>(to_python),
        )
    };
    let kinds = |op: &Op| op.parameters().into_iter().map(|(_, kind)| kind).collect();
    let parameters = OPS.iter().map(kinds).collect();
    let direct = Direct { parameters, from_python, to_python, watched };
    DIRECT.get_or_init(|| direct);
    true
}

/// The most arguments that an operator takes.
const MOST_ARGUMENTS: usize = 24;

/// An argument.
#[derive(Clone, Copy)]
enum Value {
    None,
    /// By its place among the tensors.
    Tensor(usize),
    Int(i64),
    Float(f64),
    Ints(usize),
}

/// The arguments of a call, and the tensors that it owns.
struct Arguments {
    values: [Value; MOST_ARGUMENTS],
    raws: [MaybeUninit<Raw>; MOST],
    lists: Vec<Vec<i64>>,
    count: usize,
    at: usize,
    bytes: usize,
    tensors: Tensors,
}

// SAFETY: handles of tensors, which may be used from any thread.
unsafe impl Send for Arguments {}

impl Arguments {
    fn next(&mut self) -> Value {
        let value = self.values.get(self.at).copied().unwrap_or(Value::None);
        self.at += 1;
        value
    }

    /// Takes the arguments; false if one is not plain. (It fills a structure that is there, since this
    /// one is long, and to move it would take a tenth of a tiny call.)
    fn read(
        &mut self,
        direct: &Direct,
        parameters: &[Parameter],
        arguments: &Bound<'_, PyTuple>,
    ) -> PyResult<bool> {
        if arguments.len() != parameters.len() + 1 || parameters.len() > self.values.len() {
            return Ok(false);
        }
        for (i, &parameter) in parameters.iter().enumerate() {
            let argument = arguments.get_borrowed_item(i + 1)?;
            let Some(value) = self.value(direct, parameter, &argument)? else { return Ok(false) };
            self.values[i] = value;
        }
        Ok(true)
    }

    /// An argument that is just what the operator takes. All others are the dispatcher's, to convert or
    /// to refuse.
    fn value(
        &mut self,
        direct: &Direct,
        parameter: Parameter,
        object: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Value>> {
        match parameter {
            Parameter::OptionalTensor if object.is_none() => Ok(Some(Value::None)),
            Parameter::Tensor | Parameter::OptionalTensor => {
                // SAFETY: an object has a type.
                let kind = unsafe { ffi::Py_TYPE(object.as_ptr()) }.cast();
                match direct.watched.types.iter().any(|plain| plain.as_ptr() == kind) {
                    true => self.tensor(direct, object),
                    false => Ok(None),
                }
            }
            Parameter::Float if object.is_exact_instance_of::<PyFloat>() => {
                object.extract().map(|number| Some(Value::Float(number)))
            }
            Parameter::Int | Parameter::Float if object.is_exact_instance_of::<PyInt>() => {
                Ok(object.extract().ok().map(Value::Int)) // None, if it is too large
            }
            Parameter::Flag if object.is_exact_instance_of::<PyBool>() => {
                object.extract().map(|flag: bool| Some(Value::Int(flag.into())))
            }
            Parameter::Ints if object.is_exact_instance_of::<PyList>() => {
                let Ok(list) = object.extract() else { return Ok(None) };
                self.lists.push(list);
                Ok(Some(Value::Ints(self.lists.len() - 1)))
            }
            _ => Ok(None),
        }
    }

    fn tensor(&mut self, direct: &Direct, object: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
        if self.tensors.inputs_are_full() {
            return Ok(None);
        }
        let mut tensor = std::ptr::null_mut();
        // SAFETY: a tensor of Python's, whose lock is held.
        if unsafe { (direct.from_python)(object.as_ptr().cast(), &mut tensor) } != 0 {
            return Ok(None);
        }
        let Some(raw) = self.tensors.own_plain(tensor) else { return Ok(None) };
        // A view that stands for the negative of its memory.
        if direct.watched.is_neg.bind(object.py()).call1((object,))?.is_truthy()? {
            return Ok(None);
        }
        self.bytes += raw.bytes();
        self.raws[self.count].write(raw);
        self.count += 1;
        Ok(Some(Value::Tensor(self.count - 1)))
    }
}

impl Edge for Arguments {
    fn tensor(&mut self) -> Raw {
        self.optional().unwrap_or_else(Raw::nothing)
    }

    fn optional(&mut self) -> Option<Raw> {
        match self.next() {
            // SAFETY: `tensor` has written it before it gave its place away.
            Value::Tensor(i) => Some(unsafe { self.raws[i].assume_init() }),
            _ => None,
        }
    }

    fn int(&mut self) -> i64 {
        match self.next() {
            Value::Int(number) => number,
            _ => i64::MIN,
        }
    }

    fn float(&mut self) -> f64 {
        match self.next() {
            Value::Float(number) => number,
            Value::Int(number) => number as f64,
            _ => f64::NAN,
        }
    }

    fn flag(&mut self) -> bool {
        matches!(self.next(), Value::Int(number) if number != 0)
    }

    fn ints(&mut self) -> Vec<i64> {
        match self.next() {
            Value::Ints(list) => self.lists[list].clone(),
            _ => Vec::new(),
        }
    }

    fn output(&mut self, dtype: DType, shape: &[usize], strides: &[isize]) -> Result<Raw, Fault> {
        self.tensors.output(dtype, shape, strides)
    }
}

/// Runs an operator by its number (the first argument) on the others; None where the dispatcher has
/// to.
#[pyfunction]
#[pyo3(signature = (*arguments))]
pub(crate) fn torch_call<'py>(
    py: Python<'py>,
    arguments: &Bound<'py, PyTuple>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some(direct) = DIRECT.get() else { return Ok(None) };
    let number: usize = arguments.get_borrowed_item(0)?.extract()?;
    let (Some(op), Some(parameters)) = (OPS.get(number), direct.parameters.get(number)) else {
        return Err(PyValueError::new_err(format!("there is no operator {number}")));
    };
    let watched = &direct.watched;
    if watched.modes.bind(py).call0()?.is_truthy()?
        || watched.profiler.bind(py).getattr(intern!(py, "_is_profiler_enabled"))?.is_truthy()?
        || watched.forward_ad.bind(py).getattr(intern!(py, "_current_level"))?.extract::<i64>()?
            >= 0
    {
        return Ok(None);
    }
    for level in &watched.levels {
        if !level.bind(py).call0()?.is_none() {
            return Ok(None);
        }
    }
    let Some(tensors) = Tensors::new() else { return Ok(None) };
    let mut call = Arguments {
        values: [Value::None; MOST_ARGUMENTS],
        raws: [const { MaybeUninit::uninit() }; MOST],
        lists: Vec::new(),
        count: 0,
        at: 0,
        bytes: 0,
        tensors,
    };
    if !call.read(direct, parameters, arguments)? {
        return Ok(None);
    }
    let bytes = call.bytes;
    let mut run = || {
        let ran = catch_unwind(AssertUnwindSafe(|| (op.run)(&mut call)));
        ran.unwrap_or_else(|_| Err(Fault::bug(op.name())))
    };
    if bytes < WORTH_RELEASING {
        run()?;
    } else {
        py.detach(run)?;
    }
    let results = call.tensors.take_outputs();
    drop(call);
    let wrap = |tensor: Tensor| {
        let mut object = std::ptr::null_mut();
        // SAFETY: a tensor that we own, and Python's lock is held.
        unsafe {
            let failed = (direct.to_python)(tensor, std::ptr::null_mut(), &mut object);
            torch::delete(tensor);
            if failed != 0 {
                let message = "PyTorch does not wrap a result";
                return Err(pyo3::exceptions::PyRuntimeError::new_err(message));
            }
            Bound::from_owned_ptr_or_err(py, object.cast())
        }
    };
    let (first, rest) = (results.0[0], &results.0[1..results.1]);
    if rest.is_empty() {
        return wrap(first).map(Some);
    }
    let mut wrapped = Vec::with_capacity(MOST);
    for &tensor in &results.0[..results.1] {
        wrapped.push(wrap(tensor)?);
    }
    Ok(Some(PyTuple::new(py, wrapped)?.into_any()))
}
