//! JAX on the CPU, compiled by XLA.

use std::process::Command;

use super::{Peer, Start, python};

pub(crate) struct Jax;

impl Peer for Jax {
    fn name(&self) -> &'static str {
        "jax"
    }

    fn command(&self, start: Start) -> Result<Command, String> {
        python::worker(self.name(), "jax", start)
    }

    fn can_map(&self) -> bool {
        false
    }

    fn memory_factor(&self) -> f64 {
        4.0
    }
}
