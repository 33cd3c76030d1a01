//! The operators on the device, one call after the other.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cubecl::future::block_on;
use cubecl::{MemoryAllocationMode, MemoryScope};
use fuselane::{Act, Buffer, DType, Softmax, View};
use fuselane_gpu::{Angles, Device, Tensor, act, cosine, normalize, rotate, softmax};

use crate::case::{Mode, Operator};
use crate::gpu::{self, Clock};
use crate::protocol::{Alloc, Job, Sample};
use crate::tensor::{Inputs, pick};
use crate::worker::{Call, Fault, Library, Loaded};

/// The device of this worker, with its clock and its allocator's figures.
pub(crate) struct Worker {
    device: Device,
    clock: Clock,
    /// When a peak began: bytes in use, and those that the pool of exact sizes had reserved.
    start: Cell<(u64, u64)>,
}

impl Worker {
    pub(crate) fn open() -> Result<Self, Fault> {
        let device = gpu::open().map_err(Fault::Failed)?;
        Ok(Self { clock: gpu::clock(&device), device, start: Cell::default() })
    }

    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::from([
            ("fuselane".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("device".to_owned(), self.device.name().to_owned()),
            ("runtime".to_owned(), self.device.runtime().to_owned()),
        ])
    }

    fn trim(&self) {
        if let Some(client) = self.device.client() {
            let _ = client.memory_cleanup();
        }
    }

    /// Bytes in use, and bytes that the pool of exact sizes has reserved. What the runtime keeps
    /// for its own uploads and launches does not count.
    fn memory(&self) -> Result<(u64, u64), Fault> {
        self.device.wait()?;
        let Some(client) = self.device.client() else { return Ok((0, 0)) };
        let streams = client.memory_report(MemoryScope::Device).streams;
        let in_use = streams.iter().map(|stream| stream.pools.usage().bytes_in_use).sum();
        let exact = streams.iter().map(|stream| stream.pools.persistent.usage.bytes_reserved);
        Ok((in_use, exact.sum()))
    }

    fn allocate(&self, mode: MemoryAllocationMode) {
        if let Some(client) = self.device.client() {
            // SAFETY: this worker has one thread that allocates, and memory goes back to the pool
            // that it came from.
            unsafe { client.allocation_mode(mode) };
        }
    }

    /// From here on each allocation is reserved by itself, and reserved memory is given out again
    /// before more is reserved: what is reserved at the end is the peak.
    fn reset_peak(&self) -> Result<(), Fault> {
        self.start.set(self.memory()?);
        self.allocate(MemoryAllocationMode::Persistent);
        Ok(())
    }

    fn peak(&self) -> Result<u64, Fault> {
        let (in_use, reserved) = self.memory()?;
        self.allocate(MemoryAllocationMode::Auto);
        let (in_use_before, reserved_before) = self.start.get();
        Ok(in_use.max(in_use_before + reserved.saturating_sub(reserved_before)))
    }

    /// The time of what `launch` launches, in nanoseconds.
    fn time(&self, launch: impl FnOnce() -> Result<(), Fault>) -> Result<u64, Fault> {
        let (Clock::Device, Some(client)) = (self.clock, self.device.client()) else {
            return by_this_clock(|| {
                launch()?;
                Ok(self.device.wait()?)
            });
        };
        let fault = |error: &dyn std::fmt::Display| Fault::Failed(format!("timestamps: {error}"));
        let window = client.profile_start().map_err(|error| fault(&error))?;
        if let Err(error) = launch() {
            client.profile_abandon(window);
            return Err(error);
        }
        let time = client.profile_end(window).map_err(|error| fault(&error))?;
        match block_on(time.resolve()) {
            Some(ticks) => Ok(nanoseconds(ticks.duration())),
            None => Err(fault(&"the device has told none")),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn by_this_clock(work: impl FnOnce() -> Result<(), Fault>) -> Result<u64, Fault> {
    let start = Instant::now();
    work()?;
    Ok(nanoseconds(start.elapsed()))
}

/// The provider `fuselane_gpu`.
pub(crate) struct OnGpu(pub(crate) Worker);

impl Library for OnGpu {
    fn versions(&self) -> BTreeMap<String, String> {
        self.0.versions()
    }

    fn load(&self, job: &Job) -> Result<Box<dyn Loaded + '_>, Fault> {
        if !self.0.device.supports(job.dtype.0) {
            let why = format!("{} has no {}", self.0.device.name(), job.dtype.0);
            return Err(Fault::Unsupported(why));
        }
        let host = Inputs::read(job)?;
        let upload = |name: &str| Ok((name.to_owned(), self.0.device.upload(host.need(name)?)?));
        let inputs = job.inputs.iter().map(|input| upload(&input.name));
        let inputs = inputs.collect::<Result<_, Fault>>()?;
        self.0.device.wait()?;
        let grid = job.operator.grid(job.n);
        Ok(Box::new(Prepared { worker: &self.0, job: job.clone(), inputs, grid }))
    }

    fn trim(&self) {
        fuselane::pool::trim();
        self.0.trim();
    }

    fn memory(&self) -> Result<u64, Fault> {
        self.0.memory().map(|(in_use, _)| in_use)
    }

    fn reset_peak(&self) -> Result<(), Fault> {
        self.0.reset_peak()
    }

    fn peak(&self) -> Result<u64, Fault> {
        self.0.peak()
    }
}

struct Prepared<'w> {
    worker: &'w Worker,
    job: Job,
    inputs: BTreeMap<String, Tensor>,
    /// The grid of a cosine encoding.
    grid: Vec<usize>,
}

impl Loaded for Prepared<'_> {
    fn call(&self) -> Result<Box<dyn Call + '_>, Fault> {
        let mut call =
            Ours { of: self, outputs: BTreeMap::new(), saved: Saved { o: None, rstd: None } };
        if self.job.mode == Mode::Bwd {
            let mut outputs = Outputs::new();
            self.forward(&mut outputs)?;
            call.saved = Saved { o: outputs.remove("o"), rstd: outputs.remove("rstd") };
            self.worker.device.wait()?;
        }
        Ok(Box::new(call))
    }
}

type Outputs = BTreeMap<&'static str, Tensor>;

/// What a backward needs of its forward.
struct Saved {
    o: Option<Tensor>,
    rstd: Option<Tensor>,
}

struct Ours<'a> {
    of: &'a Prepared<'a>,
    outputs: Outputs,
    saved: Saved,
}

impl Ours<'_> {
    fn launch(&mut self) -> Result<(), Fault> {
        match self.of.job.mode {
            Mode::Fwd => self.of.forward(&mut self.outputs),
            Mode::Bwd => self.of.backward(&self.saved, &mut self.outputs),
        }
    }

    fn forget_outputs(&mut self) {
        if self.of.job.alloc == Alloc::Fresh {
            // The runtime's allocator takes them back and hands them out again.
            self.outputs.clear();
        }
    }
}

impl Call for Ours<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        self.forget_outputs();
        self.launch()?;
        Ok(self.of.worker.device.wait()?)
    }

    fn time(&mut self) -> Result<u64, Fault> {
        self.forget_outputs();
        let worker = self.of.worker;
        if self.of.is_identity() {
            // Nothing is launched, so the device has nothing to tell.
            return by_this_clock(|| self.launch());
        }
        worker.time(|| self.launch())
    }

    fn sample(&self, output: &str, samples: &[Sample]) -> Result<Vec<f32>, Fault> {
        match self.outputs.get(output) {
            Some(tensor) => sample(tensor, samples),
            // The identity gives back what it was given.
            None if self.of.is_identity() => {
                sample(self.of.need(if output == "o" { "x" } else { "grad" })?, samples)
            }
            None => Err(Fault::Failed(format!("there is no output {output}"))),
        }
    }
}

/// Elements of a dense tensor, widened.
fn sample(tensor: &Tensor, samples: &[Sample]) -> Result<Vec<f32>, Fault> {
    match tensor.dtype() {
        DType::F32 => pick(&tensor.download::<f32>()?, samples, |value| value),
        DType::F16 => pick(&tensor.download::<half::f16>()?, samples, half::f16::to_f32),
        DType::BF16 => pick(&tensor.download::<half::bf16>()?, samples, half::bf16::to_f32),
        DType::F64 => pick(&tensor.download::<f64>()?, samples, |value| value as f32),
    }
}

impl Prepared<'_> {
    fn need(&self, name: &str) -> Result<&Tensor, Fault> {
        let input = self.inputs.get(name);
        input.ok_or_else(|| Fault::Failed(format!("the job has no input {name}")))
    }

    fn is_identity(&self) -> bool {
        self.job.operator == Operator::Act { act: Act::None }
    }

    /// Makes the output of a name where there is none yet.
    fn make(
        &self,
        outputs: &mut Outputs,
        name: &'static str,
        dtype: DType,
        shape: &[usize],
    ) -> Result<(), Fault> {
        if !outputs.contains_key(name) {
            outputs.insert(name, self.worker.device.empty(dtype, shape)?);
        }
        Ok(())
    }

    fn angles(&self) -> Result<Angles<'_>, Fault> {
        Ok(Angles::Theta(self.need("theta")?))
    }

    /// Writes o, and the statistics of a norm.
    fn forward(&self, outputs: &mut Outputs) -> Result<(), Fault> {
        let (x, dtype) = (self.need("x")?, self.job.dtype.0);
        let mut shape = x.shape().to_vec();
        if let (Operator::Cosine { .. }, Some(last)) = (self.job.operator, shape.last_mut()) {
            *last *= 2;
        }
        if self.is_identity() {
            return Ok(()); // o is x
        }
        self.make(outputs, "o", dtype, &shape)?;
        if let Operator::Normalize { .. } = self.job.operator {
            self.make(outputs, "rstd", DType::F32, &[&shape[..shape.len() - 1], &[1]].concat())?;
        }
        let (mut o, mut rstd) = (outputs.get("o").cloned(), outputs.get("rstd").cloned());
        let Some(o) = o.as_mut() else { return Ok(()) };
        let operator = self.job.operator;
        match operator {
            Operator::Act { act } => act::forward_into(act, x, o)?,
            Operator::Softmax { dim } => softmax::forward_into(&Softmax::over(dim), x, o)?,
            Operator::Rotate { .. } => {
                rotate::forward_into(&operator.rotate(), x, self.angles()?, o)?;
            }
            Operator::Cosine { .. } => {
                cosine::forward_into(&operator.cosine(&self.grid), x, self.angles()?, o)?;
            }
            Operator::Normalize { .. } => {
                let residual = self.inputs.get("residual");
                let call = normalize::NormalizeForward {
                    x,
                    weight: self.inputs.get("weight"),
                    bias: None,
                    gate: self.inputs.get("gate"),
                    residual: residual.map_or(normalize::Residual::None, normalize::Residual::Add),
                    o,
                    rstd: rstd.as_mut(),
                    mean: None,
                };
                normalize::forward_into(&operator.normalize(), call)?;
            }
        }
        Ok(())
    }

    fn backward(&self, saved: &Saved, outputs: &mut Outputs) -> Result<(), Fault> {
        let (x, grad) = (self.need("x")?, self.need("grad")?);
        let (dtype, shape) = (self.job.dtype.0, x.shape());
        if self.is_identity() {
            return Ok(()); // dx is grad
        }
        let missing = || Fault::Failed("the forward was not run".to_owned());
        self.make(outputs, "dx", dtype, shape)?;
        if let Operator::Normalize { .. } = self.job.operator {
            if self.inputs.contains_key("gate") {
                self.make(outputs, "dgate", dtype, shape)?;
            }
            if self.inputs.contains_key("weight") {
                self.make(outputs, "dweight", dtype, &shape[shape.len() - 1..])?;
            }
        }
        let [mut dx, mut dgate, mut dweight] =
            ["dx", "dgate", "dweight"].map(|name| outputs.get(name).cloned());
        let Some(dx) = dx.as_mut() else { return Ok(()) };
        // A linear encoding does not need x.
        let linear = self.job.operator.fused_act() == Some(Act::None.into());
        let point = (!linear).then_some(x);
        let operator = self.job.operator;
        match operator {
            Operator::Act { act: Act::Sigmoid } => {
                let o = saved.o.as_ref().ok_or_else(missing)?;
                act::backward_from_output_into(Act::Sigmoid, o, grad, dx)?;
            }
            Operator::Act { act } => act::backward_into(act, x, grad, dx)?,
            Operator::Softmax { dim } => {
                let o = saved.o.as_ref().ok_or_else(missing)?;
                softmax::backward_into(&Softmax::over(dim), o, grad, dx)?;
            }
            Operator::Normalize { .. } => {
                let call = normalize::NormalizeBackward {
                    grad,
                    x,
                    residual: self.inputs.get("residual"),
                    gate: self.inputs.get("gate"),
                    weight: self.inputs.get("weight"),
                    bias: None,
                    rstd: saved.rstd.as_ref().ok_or_else(missing)?,
                    mean: None,
                    grad_residual_out: None,
                    dx: Some(dx),
                    dresidual: None,
                    dgate: dgate.as_mut(),
                    dweight: dweight.as_mut(),
                    dbias: None,
                };
                normalize::backward_into(&operator.normalize(), call)?;
            }
            Operator::Rotate { .. } => {
                let angles = self.angles()?;
                let call =
                    rotate::RotateBackward { x: point, grad, angles, dx: Some(dx), dtheta: None };
                rotate::backward_into(&operator.rotate(), call)?;
            }
            Operator::Cosine { .. } => {
                let angles = self.angles()?;
                let call =
                    cosine::CosineBackward { x: point, grad, angles, dx: Some(dx), dtheta: None };
                cosine::backward_into(&operator.cosine(&self.grid), call)?;
            }
        }
        Ok(())
    }
}

/// The limit: a copy on the device of as many bytes as an operator has to move.
pub(crate) struct CopyOnGpu(pub(crate) Worker);

impl Library for CopyOnGpu {
    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    fn load(&self, job: &Job) -> Result<Box<dyn Loaded + '_>, Fault> {
        Ok(Box::new(Bytes { worker: &self.0, bytes: job.n }))
    }

    fn trim(&self) {
        fuselane::pool::trim();
        self.0.trim();
    }
}

struct Bytes<'w> {
    worker: &'w Worker,
    bytes: usize,
}

impl Loaded for Bytes<'_> {
    fn call(&self) -> Result<Box<dyn Call + '_>, Fault> {
        let device = &self.worker.device;
        let largest = device.client().map(|client| client.properties().memory.max_page_size);
        let largest = largest.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
        // What one buffer does not hold is copied in equal pieces.
        let size = DType::F32.size();
        let pieces = self.bytes.div_ceil(largest).max(1);
        let numbers = self.bytes.div_ceil(pieces).div_ceil(size);
        let mut from = Buffer::zeros(DType::F32, &[numbers])?;
        from.as_mut_slice::<f32>()?.fill(1.5);
        let view: View<'_> = from.view();
        let mut pairs = Vec::new();
        for _ in 0..pieces {
            pairs.push((device.upload(view)?, device.empty(DType::F32, &[numbers])?));
        }
        Ok(Box::new(Copier { worker: self.worker, pairs }))
    }
}

struct Copier<'w> {
    worker: &'w Worker,
    pairs: Vec<(Tensor, Tensor)>,
}

impl Copier<'_> {
    fn launch(&mut self) -> Result<(), Fault> {
        for (from, to) in &mut self.pairs {
            act::forward_into(Act::None, from, to)?;
        }
        Ok(())
    }
}

impl Call for Copier<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        self.launch()?;
        Ok(self.worker.device.wait()?)
    }

    fn time(&mut self) -> Result<u64, Fault> {
        let worker = self.worker;
        worker.time(|| self.launch())
    }

    fn sample(&self, _output: &str, _samples: &[Sample]) -> Result<Vec<f32>, Fault> {
        Err(Fault::Unsupported("a copy has nothing to compare".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{self, Trial};
    use super::*;

    #[test]
    fn operators_are_right() {
        let library = OnGpu(Worker::open().expect("a device"));
        testing::check(&library, |_| true, |_| 16.0, |_, _| true);
    }

    /// A call takes its outputs and nothing else, as the allocator has it, whatever ran before.
    #[test]
    fn memory_is_that_of_the_outputs() {
        let library = OnGpu(Worker::open().expect("a device"));
        for case in testing::cases().iter().take(3) {
            for (mode, tensors) in [(Mode::Fwd, 1), (Mode::Bwd, 2)] {
                let n = case.sizes[0];
                let trial = Trial::new(case, mode, n, DType::F32);
                let extra = crate::worker::memory(&library, &trial.job).unwrap();
                let bytes = case.outputs(Mode::Fwd, n, DType::F32)[0].len() as u64 * 4;
                assert!(extra >= tensors * bytes, "{} {}: {extra}", case.title, mode.name());
                assert!(
                    extra <= tensors * (bytes + 256),
                    "{} {}: {extra}",
                    case.title,
                    mode.name()
                );
            }
        }
    }

    #[test]
    fn a_copy_takes_time() {
        let library = CopyOnGpu(Worker::open().expect("a device"));
        let case = &testing::cases()[0];
        let trial = Trial::new(case, Mode::Fwd, case.sizes[0], DType::F32);
        let job = Job { n: 1 << 20, ..trial.job.clone() };
        let loaded = library.load(&job).unwrap();
        let mut call = loaded.call().unwrap();
        call.run().unwrap();
        assert!(call.time().unwrap() > 0);
    }
}
