//! The providers of a comparison, one file each: how its worker is started, and for those that
//! run in this program, the library itself.

mod candle;
mod copy;
mod fuselane;
mod fuselane_gpu;
mod fuselane_python;
mod jax;
mod primitives;
mod python;
mod tables;
#[cfg(test)]
mod testing;
mod torch;
mod torch_compile;
mod unfused;

use std::process::Command;

use ::fuselane::{Act, Buffer};

use crate::case::Operator;
use crate::protocol::{Alloc, Job, Sample};
use crate::tensor::{self, Inputs};
use crate::worker::{Fault, Library};

/// How a worker is to be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) threads: usize,
    pub(crate) alloc: Alloc,
}

/// A provider.
pub(crate) trait Peer {
    /// As on the command line and in results.
    fn name(&self) -> &'static str;

    /// The command that starts its worker, by default one of this program. An error is one line
    /// that says how to get it.
    fn command(&self, start: Start) -> Result<Command, String> {
        own_worker(self.name(), start)
    }

    /// Whether it has a column in the tables of this operator.
    fn applies(&self, _operator: &Operator) -> bool {
        true
    }

    /// Whether inputs that are mapped from files take none of its own memory.
    fn can_map(&self) -> bool {
        true
    }

    /// Roughly what a call takes at its peak, in multiples of its inputs and outputs.
    fn memory_factor(&self) -> f64;
}

/// What the tables always show: ours, and the limit.
pub(crate) fn own() -> Vec<Box<dyn Peer>> {
    vec![
        Box::new(fuselane::Fuselane { table: false }),
        Box::new(fuselane::Fuselane { table: true }),
        Box::new(copy::Copy),
    ]
}

/// What the tables show on a GPU: ours, and the limit there.
pub(crate) fn own_on_gpu() -> Vec<Box<dyn Peer>> {
    vec![Box::new(fuselane_gpu::FuselaneGpu), Box::new(fuselane_gpu::CopyGpu)]
}

/// What ours can be compared with, in the order of the tables' columns.
pub(crate) fn others() -> Vec<Box<dyn Peer>> {
    vec![
        Box::new(fuselane_python::FuselanePython),
        Box::new(unfused::Unfused),
        Box::new(candle::Candle),
        Box::new(torch::TORCH),
        Box::new(torch_compile::TorchCompile),
        Box::new(jax::JAX),
    ]
}

/// A library that runs in a worker of this program, by its worker's name.
pub(crate) fn library(name: &str) -> Result<Box<dyn Library>, Fault> {
    Ok(match name {
        "copy" => Box::new(copy::Copy),
        "fuselane" => Box::new(fuselane::Fuselane { table: false }),
        "fuselane_table" => Box::new(fuselane::Fuselane { table: true }),
        #[cfg(feature = "candle")]
        "candle" => Box::new(candle::Candle),
        #[cfg(feature = "gpu")]
        "fuselane_gpu" => Box::new(fuselane_gpu::OnGpu(fuselane_gpu::Worker::open()?)),
        #[cfg(feature = "gpu")]
        fuselane_gpu::COPY_WORKER => {
            Box::new(fuselane_gpu::CopyOnGpu(fuselane_gpu::Worker::open()?))
        }
        "unfused" => Box::new(unfused::Unfused),
        _ => return Err(Fault::Failed(format!("no provider {name:?} in this program"))),
    })
}

/// Samples of one of the outputs of a call that ran in this program's memory.
fn sample(
    job: &Job,
    inputs: &Inputs,
    outputs: &[(&'static str, Buffer)],
    output: &str,
    samples: &[Sample],
) -> Result<Vec<f32>, Fault> {
    match outputs.iter().find(|(name, _)| *name == output) {
        Some((_, buffer)) => tensor::sample(buffer, samples),
        // The identity gives back what it was given.
        None if job.operator == (Operator::Act { act: Act::None }) => {
            inputs.sample(if output == "o" { "x" } else { "grad" }, samples)
        }
        None => Err(Fault::Failed(format!("there is no output {output}"))),
    }
}

/// A worker of this program.
fn own_worker(name: &str, start: Start) -> Result<Command, String> {
    let program = std::env::current_exe().map_err(|error| format!("{name}: {error}"))?;
    let mut command = Command::new(program);
    command.args(["worker", name]).env("RAYON_NUM_THREADS", start.threads.to_string());
    Ok(command)
}
