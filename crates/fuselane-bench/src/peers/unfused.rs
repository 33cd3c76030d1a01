//! The same mathematics with one materialised tensor per primitive operation.

use std::collections::BTreeMap;
use std::process::Command;

use super::{Peer, Start, own_worker};
use crate::protocol::Job;
use crate::worker::{Fault, Library, Loaded};

pub(crate) struct Unfused;

impl Peer for Unfused {
    fn name(&self) -> &'static str {
        "unfused"
    }

    fn command(&self, start: Start) -> Result<Command, String> {
        own_worker(self.name(), start)
    }

    fn memory_factor(&self) -> f64 {
        4.0
    }
}

impl Library for Unfused {
    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::from([("fuselane".to_owned(), env!("CARGO_PKG_VERSION").to_owned())])
    }

    fn load(&self, job: &Job) -> Result<Box<dyn Loaded>, Fault> {
        Err(Fault::Unsupported(format!("{} is not there yet", job.operator.name())))
    }
}
