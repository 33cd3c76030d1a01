//! candle, on the CPU. It is built in with the feature `candle`.

#[cfg(feature = "candle")]
mod library;

use std::process::Command;

use super::python::REUSE;
use super::{Peer, Start, own_worker};
use crate::protocol::Alloc;

pub(crate) struct Candle;

impl Peer for Candle {
    fn name(&self) -> &'static str {
        "candle"
    }

    fn command(&self, start: Start) -> Result<Command, String> {
        if cfg!(feature = "candle") {
            let mut command = own_worker(self.name(), start)?;
            if start.alloc == Alloc::Warm {
                command.env("GLIBC_TUNABLES", REUSE);
            }
            return Ok(command);
        }
        Err("candle is not built in: rebuild with \
             `cargo run --release --features candle --bin fuselane`"
            .to_owned())
    }

    fn can_map(&self) -> bool {
        false
    }

    fn memory_factor(&self) -> f64 {
        8.0
    }
}
