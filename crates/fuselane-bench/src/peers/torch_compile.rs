//! PyTorch's compiler on the same code as `torch`.

use std::process::Command;

use super::{Peer, Start, python};

pub(crate) struct TorchCompile;

impl Peer for TorchCompile {
    fn name(&self) -> &'static str {
        "torch_compile"
    }

    fn command(&self, start: Start) -> Result<Command, String> {
        let mut command = python::worker(self.name(), "torch", start)?;
        // Otherwise the compiler keeps a pool of processes, which other measurements would feel.
        command.env("TORCHINDUCTOR_COMPILE_THREADS", "1");
        Ok(command)
    }

    fn memory_factor(&self) -> f64 {
        3.0
    }
}
