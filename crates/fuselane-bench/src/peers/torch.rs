//! PyTorch, eager: one call of a library function after the other, as users write it.

use std::process::Command;

use super::{Peer, Start, python};

pub(crate) struct Torch;

impl Peer for Torch {
    fn name(&self) -> &'static str {
        "torch"
    }

    fn command(&self, start: Start) -> Result<Command, String> {
        python::worker(self.name(), "torch", start)
    }

    fn memory_factor(&self) -> f64 {
        6.0
    }
}
