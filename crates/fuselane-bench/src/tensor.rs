//! Tensors that this program's own workers read from files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;

use fuselane::{Buffer, DType, View};
use half::{bf16, f16};

use crate::protocol::{Input, Job, Sample};
use crate::worker::Fault;

/// A tensor: in a buffer of the pool, or mapped from its file.
pub(crate) enum Tensor {
    Buffer(Buffer),
    Mapped(Mapped),
}

impl Tensor {
    pub(crate) fn view(&self) -> View<'_> {
        match self {
            Self::Buffer(buffer) => buffer.view(),
            Self::Mapped(mapped) => mapped.view(),
        }
    }

    fn read(input: &Input, mapped: bool) -> Result<Self, Fault> {
        let fault = |why: &dyn std::fmt::Display| {
            Fault::Failed(format!("input {} ({}): {why}", input.name, input.path.display()))
        };
        if mapped {
            return Mapped::open(input).map(Self::Mapped).map_err(|error| fault(&error));
        }
        let mut buffer = Buffer::unfilled(input.dtype.0, &input.shape)?;
        let mut file = File::open(&input.path).map_err(|error| fault(&error))?;
        file.read_exact(bytes_mut(&mut buffer)?).map_err(|error| fault(&error))?;
        Ok(Self::Buffer(buffer))
    }
}

/// The inputs of a job, by name.
pub(crate) struct Inputs(BTreeMap<String, Tensor>);

impl Inputs {
    pub(crate) fn read(job: &Job) -> Result<Self, Fault> {
        let read = |input: &Input| Ok((input.name.clone(), Tensor::read(input, job.mapped)?));
        job.inputs.iter().map(read).collect::<Result<_, Fault>>().map(Self)
    }

    pub(crate) fn get(&self, name: &str) -> Option<View<'_>> {
        self.0.get(name).map(Tensor::view)
    }

    /// One that the operator cannot do without.
    pub(crate) fn need(&self, name: &str) -> Result<View<'_>, Fault> {
        self.get(name).ok_or_else(|| Fault::Failed(format!("the job has no input {name}")))
    }

    /// Elements of an input, widened.
    pub(crate) fn sample(&self, name: &str, samples: &[Sample]) -> Result<Vec<f32>, Fault> {
        let all = self.need(name)?.to_f64_vec();
        pick(&all, samples, |value| value as f32)
    }
}

/// The raw bytes of a dense tensor.
fn bytes_mut(buffer: &mut Buffer) -> Result<&mut [u8], Fault> {
    fn cast<T>(numbers: &mut [T]) -> &mut [u8] {
        // SAFETY: `cast` is called with floats, which have no padding and take any bits.
        let (head, bytes, tail) = unsafe { numbers.align_to_mut::<u8>() };
        debug_assert!(head.is_empty() && tail.is_empty(), "a byte has no alignment");
        bytes
    }
    Ok(match buffer.dtype() {
        DType::F32 => cast(buffer.as_mut_slice::<f32>()?),
        DType::F16 => cast(buffer.as_mut_slice::<f16>()?),
        DType::BF16 => cast(buffer.as_mut_slice::<bf16>()?),
        DType::F64 => cast(buffer.as_mut_slice::<f64>()?),
    })
}

/// Elements of a dense tensor, widened.
pub(crate) fn sample(buffer: &Buffer, samples: &[Sample]) -> Result<Vec<f32>, Fault> {
    match buffer.dtype() {
        DType::F32 => pick(buffer.as_slice::<f32>()?, samples, |value| value),
        DType::F16 => pick(buffer.as_slice::<f16>()?, samples, f16::to_f32),
        DType::BF16 => pick(buffer.as_slice::<bf16>()?, samples, bf16::to_f32),
        DType::F64 => pick(buffer.as_slice::<f64>()?, samples, |value| value as f32),
    }
}

/// Elements of a dense tensor's values, widened.
pub(crate) fn pick<T: Copy>(
    values: &[T],
    samples: &[Sample],
    widen: fn(T) -> f32,
) -> Result<Vec<f32>, Fault> {
    let mut picked = Vec::new();
    for sample in samples {
        for i in 0..sample.count {
            let start = sample.start + i * sample.step;
            let part = values.get(start..start + sample.length);
            let part =
                part.ok_or_else(|| Fault::Failed("a sample outside its output".to_owned()))?;
            picked.extend(part.iter().map(|&value| widen(value)));
        }
    }
    Ok(picked)
}

/// A file in memory, read only.
pub(crate) struct Mapped {
    pointer: *mut libc::c_void,
    bytes: usize,
    dtype: DType,
    shape: Vec<usize>,
}

/// Read at once, rather than at the first touch, where the system can.
#[cfg(target_os = "linux")]
const POPULATE: libc::c_int = libc::MAP_POPULATE;
#[cfg(all(unix, not(target_os = "linux")))]
const POPULATE: libc::c_int = 0;

impl Mapped {
    #[cfg(unix)]
    fn open(input: &Input) -> std::io::Result<Self> {
        use std::os::fd::AsRawFd;
        let file = File::open(&input.path)?;
        let elements: usize = input.shape.iter().product();
        let bytes = elements * input.dtype.0.size();
        if file.metadata()?.len() < bytes as u64 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: a new read-only mapping of an open file, anywhere.
        let pointer = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes.max(1),
                libc::PROT_READ,
                libc::MAP_SHARED | POPULATE,
                file.as_raw_fd(),
                0,
            )
        };
        if pointer == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Self { pointer, bytes, dtype: input.dtype.0, shape: input.shape.clone() })
    }

    #[cfg(not(unix))]
    fn open(_input: &Input) -> std::io::Result<Self> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    fn view(&self) -> View<'_> {
        fn of<'a, T: fuselane::Element>(mapped: &'a Mapped) -> View<'a> {
            let elements = mapped.bytes / size_of::<T>();
            // SAFETY: the mapping has these bytes for as long as `mapped` lives, a page's border
            // is aligned for any float, and `fuselane bench` writes to a file that it has named to a
            // worker only when the job is released or the worker is gone.
            let slice = unsafe { std::slice::from_raw_parts(mapped.pointer.cast::<T>(), elements) };
            View::new(slice, &mapped.shape).expect("the shape has as many elements")
        }
        match self.dtype {
            DType::F32 => of::<f32>(self),
            DType::F16 => of::<f16>(self),
            DType::BF16 => of::<bf16>(self),
            DType::F64 => of::<f64>(self),
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        #[cfg(unix)]
        // SAFETY: the mapping is this one's own, and views of it have ended.
        unsafe {
            libc::munmap(self.pointer, self.bytes.max(1));
        }
    }
}
