//! candle, on the CPU. It is built in with the feature `candle`.

#[cfg(feature = "candle")]
mod library;

use std::process::Command;

use super::{Peer, Start, own_worker};

pub(crate) struct Candle;

impl Peer for Candle {
    fn name(&self) -> &'static str {
        "candle"
    }

    fn command(&self, start: Start) -> Result<Command, String> {
        if cfg!(feature = "candle") {
            return own_worker(self.name(), start);
        }
        Err("candle is not built in: rebuild with \
             `cargo run --release --features candle --bin fuselane`"
            .to_owned())
    }

    fn memory_factor(&self) -> f64 {
        8.0
    }
}
