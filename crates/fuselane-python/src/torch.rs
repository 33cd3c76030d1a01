//! PyTorch's dispatcher, through its stable C interface (torch 2.10 and newer): our operators become
//! PyTorch's own, without a compiler for C++ and without linking to any one version.
//!
//! The functions are looked up in the library that Python has loaded. A kernel gets a stack of 64-bit
//! values: numbers as they are, tensors and lists as handles that it owns from then on, and optional
//! values as a pointer to a 64-bit value, null where there is none.

use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use fuselane::{Buffer, DType};

use crate::fault::{self, Fault};
use crate::ops::{Edge, OPS};
use crate::raw::{Kind, Raw};

type Code = i32; // 0 is success
/// A handle.
pub(crate) type Tensor = *mut c_void;
type List = *mut c_void;
type Library = *mut c_void;
type Boxed = unsafe extern "C-unwind" fn(*mut u64, u64, u64);
type Part = unsafe extern "C" fn(i64, i64, *mut c_void);
type FromBlob = unsafe extern "C" fn(
    *mut c_void,
    i64,
    *const i64,
    *const i64,
    i64,
    i32,
    i32,
    i32,
    *mut Tensor,
    i32,
    *const u8,
    i64,
    unsafe extern "C" fn(*mut c_void, *mut c_void),
    *mut c_void,
) -> Code;

/// Looks up functions by their names, each of which has to be there.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?,)*) => {
        struct Functions {
            $($name: unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            fn find(library: *mut c_void) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        let found = symbol(library, name).ok_or(stringify!($name))?;
                        // SAFETY: PyTorch's headers declare this function with these types.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    aoti_torch_library_init_def: fn(*const c_char, *const c_char, u32, *mut Library) -> Code,
    aoti_torch_library_init_impl: fn(*const c_char, *const c_char, *const c_char, u32, *mut Library) -> Code,
    aoti_torch_library_def: fn(Library, *const c_char) -> Code,
    torch_library_impl: fn(Library, *const c_char, Boxed, u64) -> Code,
    aoti_torch_check: fn(bool, *const c_char, *const c_char, u32, *const c_char),
    torch_get_const_data_ptr: fn(Tensor, *mut *const c_void) -> Code,
    aoti_torch_get_data_ptr: fn(Tensor, *mut *mut c_void) -> Code,
    aoti_torch_get_dim: fn(Tensor, *mut i64) -> Code,
    aoti_torch_get_sizes: fn(Tensor, *mut *const i64) -> Code,
    aoti_torch_get_strides: fn(Tensor, *mut *const i64) -> Code,
    aoti_torch_get_dtype: fn(Tensor, *mut i32) -> Code,
    aoti_torch_get_device_type: fn(Tensor, *mut i32) -> Code,
    aoti_torch_get_layout: fn(Tensor, *mut i32) -> Code,
    aoti_torch_delete_tensor_object: fn(Tensor) -> Code,
    aoti_torch_empty_strided: fn(i64, *const i64, *const i64, i32, i32, i32, *mut Tensor) -> Code,
    aoti_torch_device_type_cpu: fn() -> i32,
    aoti_torch_layout_strided: fn() -> i32,
    aoti_torch_dtype_float32: fn() -> i32,
    aoti_torch_dtype_float16: fn() -> i32,
    aoti_torch_dtype_bfloat16: fn() -> i32,
    aoti_torch_dtype_float64: fn() -> i32,
    aoti_torch_dtype_int8: fn() -> i32,
    aoti_torch_dtype_int16: fn() -> i32,
    aoti_torch_dtype_int32: fn() -> i32,
    aoti_torch_dtype_int64: fn() -> i32,
    aoti_torch_dtype_uint8: fn() -> i32,
    aoti_torch_dtype_bool: fn() -> i32,
    aoti_torch_dtype_complex64: fn() -> i32,
    aoti_torch_dtype_complex128: fn() -> i32,
    torch_get_num_threads: fn(*mut u32) -> Code,
    torch_parallel_for: fn(i64, i64, i64, Part, *mut c_void) -> Code,
    torch_list_size: fn(List, *mut usize) -> Code,
    torch_list_get_item: fn(List, usize, *mut u64) -> Code,
    torch_delete_list: fn(List) -> Code,
}

/// What kernels need of PyTorch.
pub(crate) struct Api {
    call: Functions,
    /// The address of the library's handle.
    library: usize,
    /// From 2.11 on.
    from_blob: Option<FromBlob>,
    /// Frees the cell of an optional value.
    free: unsafe extern "C" fn(*mut c_void),
    floats: [(DType, i32); 4],
    /// Those that are no float.
    others: [(Kind, i32); 8],
    cpu: i32,
    strided: i32,
}

static API: OnceLock<Api> = OnceLock::new();

/// The version whose stack of values this file reads, 2.10: newer ones keep it for us.
const WRITTEN_FOR: u64 = 2 << 56 | 10 << 48;

/// Outputs of at least this many bytes come from the pool; smaller ones from PyTorch's own
/// allocator, which is as fast for them.
const FROM_POOL: usize = 1 << 18;

fn symbol(library: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = CStr::from_bytes_with_nul(name.as_bytes()).ok()?;
    // SAFETY: a library that is loaded, and a name that ends in 0.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

impl Api {
    fn find(library: *mut c_void) -> Result<Self, String> {
        let call = Functions::find(library)?;
        // Cells come from C++'s `new`; from 2.13 on there is a function to free them.
        let free = symbol(library, "torch_delete_stable_ivalue\0");
        let free = free.or_else(|| symbol(library, "_ZdlPv\0")).ok_or("operator delete")?;
        let from_blob = symbol(library, "torch_from_blob\0");
        // SAFETY: PyTorch's headers declare `torch_from_blob` with these types, and `operator
        // delete` takes a pointer. The others take nothing and only tell a number.
        unsafe {
            Ok(Self {
                library: library as usize,
                from_blob: from_blob
                    .map(|found| std::mem::transmute::<*mut c_void, FromBlob>(found)),
                free: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(free),
                floats: [
                    (DType::BF16, (call.aoti_torch_dtype_bfloat16)()),
                    (DType::F32, (call.aoti_torch_dtype_float32)()),
                    (DType::F16, (call.aoti_torch_dtype_float16)()),
                    (DType::F64, (call.aoti_torch_dtype_float64)()),
                ],
                others: [
                    (Kind::Int64, (call.aoti_torch_dtype_int64)()),
                    (Kind::Int32, (call.aoti_torch_dtype_int32)()),
                    (Kind::Other("int8"), (call.aoti_torch_dtype_int8)()),
                    (Kind::Other("int16"), (call.aoti_torch_dtype_int16)()),
                    (Kind::Other("uint8"), (call.aoti_torch_dtype_uint8)()),
                    (Kind::Other("bool"), (call.aoti_torch_dtype_bool)()),
                    (Kind::Other("complex64"), (call.aoti_torch_dtype_complex64)()),
                    (Kind::Other("complex128"), (call.aoti_torch_dtype_complex128)()),
                ],
                cpu: (call.aoti_torch_device_type_cpu)(),
                strided: (call.aoti_torch_layout_strided)(),
                call,
            })
        }
    }

    fn kind(&self, code: i32) -> Kind {
        let float = self.floats.iter().find(|(_, other)| *other == code);
        let other = || self.others.iter().find(|(_, other)| *other == code);
        match float {
            Some(&(dtype, _)) => Kind::Float(dtype),
            None => other().map_or(Kind::Other("of another kind"), |&(kind, _)| kind),
        }
    }

    fn code(&self, dtype: DType) -> i32 {
        self.floats.iter().find(|(other, _)| *other == dtype).map_or(0, |&(_, code)| code)
    }
}

/// Defines the operators in PyTorch's dispatcher, with kernels for the CPU. An error says what this
/// PyTorch lacks; then nothing is defined.
pub(crate) fn register(library: &str) -> Result<(), String> {
    if API.get().is_some() {
        return Ok(());
    }
    let path = CString::new(library).map_err(|error| error.to_string())?;
    // SAFETY: only finds a library that is loaded already.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return Err("the library is not loaded".to_owned());
    }
    let api = API.get_or_init_fallible(|| Api::find(library))?;
    let threads = || {
        let mut count = 1;
        // SAFETY: room for the answer.
        unsafe { (api.call.torch_get_num_threads)(&mut count) };
        count as usize
    };
    crate::threads::follow(threads);
    crate::threads::lend(threads, Box::new(|n, work| parallel_for(api, n, work)));
    let file = c"fuselane";
    let done = |code: Code, what: &str| match code {
        0 => Ok(()),
        _ => Err(format!("{what} failed")),
    };
    // SAFETY: calls as PyTorch's headers declare them; all strings end in 0. The libraries stay for
    // as long as the process, and so do the kernels.
    unsafe {
        let mut definitions = std::ptr::null_mut();
        let code = (api.call.aoti_torch_library_init_def)(
            file.as_ptr(),
            file.as_ptr(),
            0,
            &mut definitions,
        );
        done(code, "the definition of the library")?;
        let mut kernels = std::ptr::null_mut();
        let code = (api.call.aoti_torch_library_init_impl)(
            file.as_ptr(),
            c"CPU".as_ptr(),
            file.as_ptr(),
            0,
            &mut kernels,
        );
        done(code, "the library of kernels")?;
        for (op, boxed) in OPS.iter().zip(BOXED) {
            let text = |text: &str| CString::new(text).map_err(|error| error.to_string());
            let (schema, name) = (text(op.schema)?, text(op.name())?);
            done((api.call.aoti_torch_library_def)(definitions, schema.as_ptr()), op.schema)?;
            let code = (api.call.torch_library_impl)(kernels, name.as_ptr(), boxed, WRITTEN_FOR);
            done(code, op.name())?;
        }
    }
    Ok(())
}

/// Calls `work` n times, on PyTorch's threads.
fn parallel_for(api: &Api, n: usize, work: &(dyn Fn() + Sync)) {
    unsafe extern "C" fn part(begin: i64, end: i64, work: *mut c_void) {
        // SAFETY: `parallel_for` passes it, and waits for all parts.
        let work = unsafe { &*work.cast::<&(dyn Fn() + Sync)>() };
        // Kernels do not panic. If one did, this would end the process, as it may not pass through
        // foreign code.
        (begin..end).for_each(|_| work());
    }
    let context = (&raw const work).cast_mut().cast();
    // SAFETY: the context lives until the call returns.
    let failed = unsafe { (api.call.torch_parallel_for)(0, n as i64, 1, part, context) };
    if failed != 0 {
        work(); // alone: what other threads may have begun, they have ended
    }
}

/// `OnceLock::get_or_try_init`, which is not stable yet.
trait GetOrInit<T> {
    fn get_or_init_fallible<E>(&self, init: impl FnOnce() -> Result<T, E>) -> Result<&T, E>;
}

impl<T> GetOrInit<T> for OnceLock<T> {
    fn get_or_init_fallible<E>(&self, init: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        match self.get() {
            Some(value) => Ok(value),
            None => init().map(|value| self.get_or_init(|| value)),
        }
    }
}

/// The most tensors that an operator takes or gives.
pub(crate) const MOST: usize = 10;

/// The tensors that a call owns.
pub(crate) struct Tensors {
    api: &'static Api,
    inputs: [Tensor; MOST],
    outputs: [Tensor; MOST],
    counts: (usize, usize),
}

impl Tensors {
    /// None, before the operators are registered.
    pub(crate) fn new() -> Option<Self> {
        let none = [std::ptr::null_mut(); MOST];
        API.get().map(|api| Self { api, inputs: none, outputs: none, counts: (0, 0) })
    }

    pub(crate) fn inputs_are_full(&self) -> bool {
        self.counts.0 == MOST
    }

    /// Takes an input over.
    fn own(&mut self, tensor: Tensor) -> Option<Raw> {
        self.inputs[self.counts.0] = tensor;
        self.counts.0 += 1;
        let mut data = std::ptr::null();
        // SAFETY: a tensor that this call owns. To ask for memory to write would copy what is shared
        // until then.
        let failed = unsafe { (self.api.call.torch_get_const_data_ptr)(tensor, &mut data) };
        if failed == 0 { self.read(tensor, data.cast_mut()) } else { None }
    }

    /// Takes an input over, and tells what it is if that is a plain tensor on the CPU.
    pub(crate) fn own_plain(&mut self, tensor: Tensor) -> Option<Raw> {
        let raw = self.own(tensor)?;
        let (mut device, mut layout) = (0, 0);
        // SAFETY: a tensor that this call owns.
        let failed = unsafe {
            (self.api.call.aoti_torch_get_device_type)(tensor, &mut device)
                | (self.api.call.aoti_torch_get_layout)(tensor, &mut layout)
        };
        let plain = failed == 0 && device == self.api.cpu && layout == self.api.strided;
        (plain && !raw.is_elsewhere()).then_some(raw)
    }

    fn read(&self, tensor: Tensor, data: *mut c_void) -> Option<Raw> {
        let call = &self.api.call;
        let (mut rank, mut dtype) = (0, 0);
        let (mut sizes, mut strides) = (std::ptr::null(), std::ptr::null());
        // SAFETY: a tensor that this call owns; sizes and strides live as long as it.
        unsafe {
            let failed = (call.aoti_torch_get_dim)(tensor, &mut rank)
                | (call.aoti_torch_get_dtype)(tensor, &mut dtype)
                | (call.aoti_torch_get_sizes)(tensor, &mut sizes)
                | (call.aoti_torch_get_strides)(tensor, &mut strides);
            if failed != 0 {
                return None;
            }
            let slice = |p: *const i64| match p.is_null() {
                true => &[][..],
                false => std::slice::from_raw_parts(p, rank as usize),
            };
            Some(Raw::new(
                data.cast(),
                self.api.kind(dtype),
                slice(sizes).iter().map(|&size| size as usize),
                slice(strides).iter().map(|&stride| stride as isize),
            ))
        }
    }

    /// Makes an output.
    pub(crate) fn output(
        &mut self,
        dtype: DType,
        shape: &[usize],
        strides: &[isize],
    ) -> Result<Raw, Fault> {
        let mut dims = [[0i64; fuselane::MAX_RANK]; 2];
        dims[0].iter_mut().zip(shape).for_each(|(to, &from)| *to = from as i64);
        dims[1].iter_mut().zip(strides).for_each(|(to, &from)| *to = from as i64);
        let (rank, code) = (shape.len() as i64, self.api.code(dtype));
        let (sizes, strides, cpu) = (dims[0].as_ptr(), dims[1].as_ptr(), self.api.cpu);
        let mut tensor = std::ptr::null_mut();
        let len = shape.iter().fold(1usize, |len, &size| len.saturating_mul(size));
        let bytes = len.saturating_mul(dtype.size());
        let failed = match self.api.from_blob {
            Some(from_blob) if bytes >= FROM_POOL && fuselane::pool::limit() > 0 => {
                let buffer = Box::new(Buffer::unfilled(dtype, &[len])?);
                let data = buffer.view().as_ptr().cast_mut().cast();
                let owner = Box::into_raw(buffer).cast();
                let (strided, none) = (self.api.strided, std::ptr::null());
                // SAFETY: the buffer has the elements of this dense shape, and is dropped with the
                // tensor.
                // If it fails, the buffer is lost: who owns it then cannot be known.
                unsafe {
                    from_blob(
                        data,
                        rank,
                        sizes,
                        strides,
                        0,
                        code,
                        cpu,
                        -1,
                        &mut tensor,
                        strided,
                        none,
                        0,
                        drop_buffer,
                        owner,
                    )
                }
            }
            // SAFETY: sizes and strides have this rank.
            _ => unsafe {
                let empty = self.api.call.aoti_torch_empty_strided;
                empty(rank, sizes, strides, code, cpu, -1, &mut tensor)
            },
        };
        if failed == 0 && self.counts.1 < MOST {
            self.outputs[self.counts.1] = tensor;
            self.counts.1 += 1;
            let mut data = std::ptr::null_mut();
            // SAFETY: a tensor that this call owns.
            unsafe { (self.api.call.aoti_torch_get_data_ptr)(tensor, &mut data) };
            if let Some(raw) = self.read(tensor, data) {
                return Ok(raw);
            }
        }
        let message = format!("PyTorch has no {bytes} bytes for a result");
        Err(Fault { kind: fault::Kind::Memory, message })
    }

    /// Gives the outputs away, and how many there are.
    pub(crate) fn take_outputs(&mut self) -> ([Tensor; MOST], usize) {
        (self.outputs, std::mem::take(&mut self.counts.1))
    }
}

impl Drop for Tensors {
    /// Frees all inputs, and outputs that nobody has taken.
    fn drop(&mut self) {
        let (inputs, outputs) = self.counts;
        for &tensor in self.inputs[..inputs].iter().chain(&self.outputs[..outputs]) {
            // SAFETY: owned by this call.
            unsafe { (self.api.call.aoti_torch_delete_tensor_object)(tensor) };
        }
    }
}

/// Frees a tensor.
///
/// # Safety
///
/// It has to be the caller's, who does not use it any more.
pub(crate) unsafe fn delete(tensor: Tensor) {
    if let Some(api) = API.get() {
        // SAFETY: as the caller says.
        unsafe { (api.call.aoti_torch_delete_tensor_object)(tensor) };
    }
}

/// A function of PyTorch's that not every version has.
pub(crate) fn optional(name: &str) -> Option<*mut c_void> {
    API.get().and_then(|api| symbol(api.library as *mut c_void, name))
}

/// The stack of a call from the dispatcher.
struct Stack<'a> {
    values: &'a [u64],
    at: usize,
    tensors: Tensors,
}

impl Stack<'_> {
    fn next(&mut self) -> u64 {
        let value = self.values.get(self.at).copied().unwrap_or_default();
        self.at += 1;
        value
    }

    fn own(&mut self, tensor: Tensor) -> Raw {
        self.tensors.own(tensor).unwrap_or_else(Raw::nothing)
    }
}

impl Edge for Stack<'_> {
    fn tensor(&mut self) -> Raw {
        let tensor = self.next() as usize as Tensor;
        self.own(tensor)
    }

    fn optional(&mut self) -> Option<Raw> {
        let cell = self.next() as usize as *mut u64;
        if cell.is_null() {
            return None;
        }
        // SAFETY: the cell of an optional value, which this call owns.
        let tensor = unsafe {
            let tensor = *cell as usize as Tensor;
            (self.tensors.api.free)(cell.cast());
            tensor
        };
        Some(self.own(tensor))
    }

    fn int(&mut self) -> i64 {
        self.next() as i64
    }

    fn float(&mut self) -> f64 {
        f64::from_bits(self.next())
    }

    fn flag(&mut self) -> bool {
        self.next() as u8 != 0
    }

    fn ints(&mut self) -> Vec<i64> {
        let list = self.next() as usize as List;
        let (call, mut len) = (&self.tensors.api.call, 0);
        // SAFETY: a list that this call owns, and its items.
        unsafe {
            (call.torch_list_size)(list, &mut len);
            let item = |i| {
                let mut value = 0;
                (call.torch_list_get_item)(list, i, &mut value);
                value as i64
            };
            let values = (0..len).map(item).collect();
            (call.torch_delete_list)(list);
            values
        }
    }

    fn output(&mut self, dtype: DType, shape: &[usize], strides: &[isize]) -> Result<Raw, Fault> {
        self.tensors.output(dtype, shape, strides)
    }
}

/// Gives the memory of a tensor back to the pool.
unsafe extern "C" fn drop_buffer(_data: *mut c_void, owner: *mut c_void) {
    // SAFETY: `output` made it of a box, and PyTorch calls this once.
    drop(unsafe { Box::from_raw(owner.cast::<Buffer>()) });
}

/// The kernels: one function for each operator, since PyTorch gives no other hint of which it is.
static BOXED: [Boxed; OPS.len()] = [
    boxed::<0>,
    boxed::<1>,
    boxed::<2>,
    boxed::<3>,
    boxed::<4>,
    boxed::<5>,
    boxed::<6>,
    boxed::<7>,
    boxed::<8>,
    boxed::<9>,
    boxed::<10>,
];

unsafe extern "C-unwind" fn boxed<const OP: usize>(stack: *mut u64, inputs: u64, outputs: u64) {
    let Some(api) = API.get() else { return };
    // SAFETY: PyTorch passes a stack with room for all arguments, and for all results.
    let stack = unsafe { std::slice::from_raw_parts_mut(stack, inputs.max(outputs) as usize) };
    let message = call(OP, stack, inputs as usize).err();
    if let Some(message) = message {
        // This throws a C++ exception, which passes through this function and no other of ours;
        // the message is copied before.
        let mut text = [0u8; 512];
        let end = message.len().min(text.len() - 1);
        text[..end].copy_from_slice(&message.as_bytes()[..end]);
        drop(message);
        let name = c"fuselane".as_ptr();
        // SAFETY: strings that end in 0.
        unsafe { (api.call.aoti_torch_check)(false, name, name, 0, text.as_ptr().cast()) };
    }
}

/// Runs an operator; an error is what PyTorch is to say.
fn call(op: usize, stack: &mut [u64], inputs: usize) -> Result<(), String> {
    let Some(tensors) = Tensors::new() else { return Err("not registered".to_owned()) };
    let mut call = Stack { values: &stack[..inputs], at: 0, tensors };
    let ran = catch_unwind(AssertUnwindSafe(|| (OPS[op].run)(&mut call)));
    let fault = match ran {
        Ok(Ok(())) => None,
        Ok(Err(fault)) => Some(fault),
        Err(_) => Some(Fault::bug(OPS[op].name())),
    };
    if let Some(fault) = fault {
        let message = fault.message.clone();
        fault::keep(fault);
        return Err(message);
    }
    let (results, count) = call.tensors.take_outputs();
    drop(call);
    for (value, &tensor) in stack.iter_mut().zip(&results[..count]) {
        *value = tensor as usize as u64;
    }
    Ok(())
}
