//! fuselane on a GPU, and its limit there: a copy on the same device. They are built in with one
//! of the features that name a runtime.

#[cfg(feature = "gpu")]
mod library;

#[cfg(feature = "gpu")]
pub(super) use library::{CopyOnGpu, OnGpu, Worker};

use std::process::Command;

use super::{Peer, Start, own_worker};
use crate::case::Operator;

/// The worker of [`CopyGpu`], whose provider is `copy` like that of the CPU.
pub(super) const COPY_WORKER: &str = "copy_gpu";

pub(crate) struct FuselaneGpu;

impl Peer for FuselaneGpu {
    fn name(&self) -> &'static str {
        "fuselane_gpu"
    }

    fn can_map(&self) -> bool {
        false
    }

    fn memory_factor(&self) -> f64 {
        2.0 // a copy of the inputs on their way, and all of it on a software device
    }
}

pub(crate) struct CopyGpu;

impl Peer for CopyGpu {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn command(&self, start: Start) -> Result<Command, String> {
        own_worker(COPY_WORKER, start)
    }

    fn applies(&self, operator: &Operator) -> bool {
        super::copy::Copy.applies(operator)
    }

    fn can_map(&self) -> bool {
        false
    }

    fn memory_factor(&self) -> f64 {
        1.0
    }
}
