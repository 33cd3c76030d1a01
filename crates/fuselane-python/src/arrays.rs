//! Python's own edge, for all that is not a tensor of PyTorch's dispatcher: arguments are tuples that
//! describe arrays, and results are [`Block`]s of pooled memory that array libraries take over
//! without a copy.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use fuselane::{Buffer, DType};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::fault::Fault;
use crate::ops::{Edge, OPS};
use crate::raw::{Kind, Raw, row_major};

/// The names of element types: those of NumPy and PyTorch.
const NAMES: [(&str, DType); 4] = [
    ("float32", DType::F32),
    ("float16", DType::F16),
    ("bfloat16", DType::BF16),
    ("float64", DType::F64),
];

fn kind_of(name: &str) -> Kind {
    match (name, NAMES.iter().find(|(other, _)| *other == name)) {
        (_, Some(&(_, dtype))) => Kind::Float(dtype),
        ("int32", _) => Kind::Int32,
        ("int64", _) => Kind::Int64,
        _ => {
            let others = ["int8", "int16", "uint8", "uint16", "uint32", "uint64", "bool"];
            let others = others.iter().chain(&["complex64", "complex128", "object"]);
            Kind::Other(others.copied().find(|other| *other == name).unwrap_or("of another kind"))
        }
    }
}

fn name_of(dtype: DType) -> &'static str {
    NAMES.iter().find(|(_, other)| *other == dtype).map_or("", |(name, _)| name)
}

/// An argument.
pub(crate) enum Value {
    None,
    Tensor(Raw),
    Number(f64, i64),
    Ints(Vec<i64>),
}

impl<'py> FromPyObject<'_, 'py> for Value {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if object.is_none() {
            return Ok(Self::None);
        }
        if object.is_instance_of::<PyTuple>() {
            let (address, dtype, shape, strides): (usize, String, Vec<usize>, Vec<isize>) =
                object.extract()?;
            if shape.len() != strides.len() {
                return Err(PyValueError::new_err("shape and strides of different lengths"));
            }
            let pointer = std::ptr::with_exposed_provenance_mut(address);
            let (shape, strides) = (shape.into_iter(), strides.into_iter());
            return Ok(Self::Tensor(Raw::new(pointer, kind_of(&dtype), shape, strides)));
        }
        if let Ok(number) = object.extract::<i64>() {
            return Ok(Self::Number(number as f64, number));
        }
        match object.extract::<f64>() {
            Ok(number) => Ok(Self::Number(number, number as i64)),
            Err(_) => object.extract().map(Self::Ints),
        }
    }
}

/// Arguments and results of a call.
struct Values {
    arguments: std::vec::IntoIter<Value>,
    results: Vec<Block>,
}

impl Values {
    fn number(&mut self) -> (f64, i64) {
        match self.arguments.next() {
            Some(Value::Number(float, int)) => (float, int),
            _ => (f64::NAN, i64::MIN),
        }
    }
}

impl Edge for Values {
    fn tensor(&mut self) -> Raw {
        self.optional().unwrap_or_else(Raw::nothing)
    }

    fn optional(&mut self) -> Option<Raw> {
        match self.arguments.next() {
            Some(Value::Tensor(raw)) => Some(raw),
            _ => None,
        }
    }

    fn int(&mut self) -> i64 {
        self.number().1
    }

    fn float(&mut self) -> f64 {
        self.number().0
    }

    fn flag(&mut self) -> bool {
        self.number().1 == 1
    }

    fn ints(&mut self) -> Vec<i64> {
        match self.arguments.next() {
            Some(Value::Ints(values)) => values,
            _ => Vec::new(),
        }
    }

    fn output(&mut self, dtype: DType, shape: &[usize], strides: &[isize]) -> Result<Raw, Fault> {
        let len = shape.iter().fold(1usize, |len, &size| len.saturating_mul(size));
        let buffer = Buffer::unfilled(dtype, &[len])?;
        let raw = Raw::new(
            buffer.view().as_ptr().cast_mut(),
            Kind::Float(dtype),
            shape.iter().copied(),
            strides.iter().copied(),
        );
        let (shape, strides) = (shape.to_vec(), strides.to_vec());
        self.results.push(Block(Arc::new(Memory { buffer, shape, strides })));
        Ok(raw)
    }
}

/// Runs an operator. Arrays are tuples (address, dtype, shape, strides in elements), whose memory the
/// caller keeps alive.
#[pyfunction]
pub(crate) fn call(py: Python<'_>, name: &str, arguments: Vec<Value>) -> PyResult<Vec<Block>> {
    let op = OPS.iter().find(|op| op.name() == name);
    let op = op.ok_or_else(|| PyValueError::new_err(format!("there is no operator {name}")))?;
    let mut values = Values { arguments: arguments.into_iter(), results: Vec::new() };
    py.detach(|| (op.run)(&mut values)).map_err(|fault| {
        // What a tensor of PyTorch has, an array need not have.
        Fault { message: fault.message.replace("call .contiguous() on", "copy"), ..fault }
    })?;
    Ok(values.results)
}

struct Memory {
    buffer: Buffer,
    shape: Vec<usize>,
    strides: Vec<isize>,
}

/// A result: memory of the pool, which goes back there when the last array on it is gone.
#[pyclass(frozen, module = "fuselane._native")]
pub(crate) struct Block(Arc<Memory>);

// SAFETY: memory that is written before a `Block` is made of it, and not by us after that.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

#[pymethods]
impl Block {
    #[getter]
    fn dtype(&self) -> &'static str {
        name_of(self.0.buffer.dtype())
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.shape)
    }

    /// For NumPy, which keeps this object for as long as its array. It knows no bfloat16: that comes
    /// as unsigned integers, for a view of the right type.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let memory = &self.0;
        let dtype = memory.buffer.dtype();
        let end = if cfg!(target_endian = "little") { '<' } else { '>' };
        let letter = if dtype == DType::BF16 { 'u' } else { 'f' };
        let interface = pyo3::types::PyDict::new(py);
        let address = memory.buffer.view().as_ptr() as usize;
        let step = |&stride: &isize| stride * dtype.size() as isize;
        let steps: Vec<isize> = memory.strides.iter().map(step).collect();
        interface.set_item("version", 3)?;
        interface.set_item("data", (address, false))?;
        interface.set_item("typestr", format!("{end}{letter}{}", dtype.size()))?;
        interface.set_item("shape", PyTuple::new(py, &memory.shape)?)?;
        interface.set_item("strides", PyTuple::new(py, steps)?)?;
        Ok(interface.into_any())
    }

    /// The CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (dlpack::CPU, 0)
    }

    /// Shares the memory with another library.
    #[pyo3(signature = (**_options))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        _options: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        dlpack::share(py, Arc::clone(&self.0))
    }
}

/// What an array says of itself through DLPack: (address, dtype, shape, strides in elements). The
/// caller keeps the capsule until the call ends.
#[pyfunction]
pub(crate) fn describe(
    capsule: &Bound<'_, PyCapsule>,
) -> PyResult<(usize, &'static str, Vec<i64>, Vec<i64>)> {
    let tensor = dlpack::tensor(capsule)?;
    // SAFETY: a tensor of a capsule that is not consumed, so that its owner keeps it.
    unsafe {
        let dlpack::Tensor { data, device, ndim, dtype, shape, strides, byte_offset } = &*tensor;
        if device.kind != dlpack::CPU {
            return Err(PyTypeError::new_err("an array on another device, expected the CPU"));
        }
        let list = |p: *const i64| match (p.is_null(), *ndim) {
            (true, _) | (_, ..=0) => Vec::new(),
            (false, rank) => std::slice::from_raw_parts(p, rank as usize).to_vec(),
        };
        let (shape, mut strides) = (list(*shape), list(*strides));
        if strides.len() != shape.len() {
            let sizes: Vec<usize> = shape.iter().map(|&size| size as usize).collect();
            let dense = row_major(&sizes[..sizes.len().min(fuselane::MAX_RANK)]);
            strides =
                dense[..shape.len().min(fuselane::MAX_RANK)].iter().map(|&s| s as i64).collect();
            strides.resize(shape.len(), 0);
        }
        let name = match (dtype.code, dtype.bits, dtype.lanes) {
            (dlpack::FLOAT, 32, 1) => "float32",
            (dlpack::FLOAT, 16, 1) => "float16",
            (dlpack::FLOAT, 64, 1) => "float64",
            (dlpack::BFLOAT, 16, 1) => "bfloat16",
            (dlpack::INT, 32, 1) => "int32",
            (dlpack::INT, 64, 1) => "int64",
            (dlpack::INT, 8, 1) => "int8",
            (dlpack::INT, 16, 1) => "int16",
            _ => "of another kind",
        };
        Ok((*data as usize + *byte_offset as usize, name, shape, strides))
    }
}

/// The structures of DLPack (version 0, which every library speaks).
mod dlpack {
    use super::*;

    pub(super) const CPU: i32 = 1;
    pub(super) const INT: u8 = 0;
    pub(super) const FLOAT: u8 = 2;
    pub(super) const BFLOAT: u8 = 4;
    const FRESH: &CStr = c"dltensor";

    #[repr(C)]
    pub(super) struct Device {
        pub(super) kind: i32,
        pub(super) index: i32,
    }

    #[repr(C)]
    pub(super) struct DataType {
        pub(super) code: u8,
        pub(super) bits: u8,
        pub(super) lanes: u16,
    }

    #[repr(C)]
    pub(super) struct Tensor {
        pub(super) data: *mut c_void,
        pub(super) device: Device,
        pub(super) ndim: i32,
        pub(super) dtype: DataType,
        pub(super) shape: *mut i64,
        pub(super) strides: *mut i64,
        pub(super) byte_offset: u64,
    }

    #[repr(C)]
    struct Managed {
        tensor: Tensor,
        owner: *mut c_void,
        deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    }

    /// What a shared tensor points to.
    struct Shared {
        managed: Managed,
        dims: Vec<i64>,
        _memory: Arc<Memory>,
    }

    /// The tensor of a capsule that nobody has consumed.
    pub(super) fn tensor(capsule: &Bound<'_, PyCapsule>) -> PyResult<*const Tensor> {
        // SAFETY: a capsule; its name says what it holds.
        let found = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), FRESH.as_ptr()) };
        if found.is_null() {
            return Err(PyErr::fetch(capsule.py()));
        }
        Ok(found.cast::<Managed>().cast()) // the tensor is its first field
    }

    pub(super) fn share<'py>(py: Python<'py>, memory: Arc<Memory>) -> PyResult<Bound<'py, PyAny>> {
        let rank = memory.shape.len();
        let sizes = memory.shape.iter().map(|&size| size as i64);
        let dims = sizes.chain(memory.strides.iter().map(|&step| step as i64)).collect();
        let dtype = memory.buffer.dtype();
        let code = if dtype == DType::BF16 { BFLOAT } else { FLOAT };
        let tensor = Tensor {
            data: memory.buffer.view().as_ptr().cast_mut().cast(),
            device: Device { kind: CPU, index: 0 },
            ndim: rank as i32,
            dtype: DataType { code, bits: 8 * dtype.size() as u8, lanes: 1 },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        let managed = Managed { tensor, owner: std::ptr::null_mut(), deleter: Some(delete) };
        let shared = Box::into_raw(Box::new(Shared { managed, dims, _memory: memory }));
        // SAFETY: just made; `dims` does not move any more. `Shared` may be reached from its field
        // because the pointer is kept as `owner`. The capsule is Python's then.
        unsafe {
            let dims = (*shared).dims.as_mut_ptr();
            (*shared).managed.tensor.shape = dims;
            (*shared).managed.tensor.strides = dims.add(rank);
            (*shared).managed.owner = shared.cast();
            let managed = &raw mut (*shared).managed;
            let capsule = ffi::PyCapsule_New(managed.cast(), FRESH.as_ptr(), Some(forget));
            Bound::from_owned_ptr_or_err(py, capsule)
        }
    }

    /// Called by whoever has consumed the capsule.
    unsafe extern "C" fn delete(managed: *mut Managed) {
        // SAFETY: made by `share`, and called once.
        unsafe { drop(Box::from_raw((*managed).owner.cast::<Shared>())) };
    }

    /// Called for a capsule that nobody has consumed, too.
    unsafe extern "C" fn forget(capsule: *mut ffi::PyObject) {
        // SAFETY: the capsule of `share`; one that was consumed has another name.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, FRESH.as_ptr()) == 1 {
                let managed = ffi::PyCapsule_GetPointer(capsule, FRESH.as_ptr());
                delete(managed.cast());
            }
        }
    }
}
