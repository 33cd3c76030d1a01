//! Results: one record per table, size and provider, and the facts of the run that they belong to.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::case::{Metric, Mode};
use crate::protocol::Alloc;

/// One measured cell of a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) table: String,
    /// The case file's family, and the case's title.
    pub(crate) family: String,
    pub(crate) title: String,
    /// The operator's name in the library.
    pub(crate) operator: String,
    pub(crate) metric: Metric,
    pub(crate) mode: Mode,
    pub(crate) n: usize,
    pub(crate) dtype: String,
    /// fuselane, fuselane_gpu, fuselane_table, fuselane_python, unfused, candle, torch, torch_compile, jax; copy
    /// for the limit.
    pub(crate) provider: String,
    pub(crate) alloc: Alloc,
    /// The GPU's name; none for the CPU.
    #[serde(default)]
    pub(crate) device: Option<String>,
    /// The median time of a call in ms, or inputs plus peak in MiB; none where there is no result.
    pub(crate) value: Option<f64>,
    pub(crate) p20: Option<f64>,
    pub(crate) p80: Option<f64>,
    /// ms or MiB.
    pub(crate) unit: String,
    /// Speed: bytes that the call has to move. Memory: peak beyond the inputs.
    pub(crate) bytes: Option<u64>,
    /// Memory: the least that has to exist beyond the inputs.
    pub(crate) least_bytes: Option<u64>,
    /// Speed: the time of a copy that moves as many bytes, in the same rounds, over this time.
    pub(crate) of_copy_limit: Option<f64>,
    /// Speed: as `of_copy_limit`, but against the operator's own rate in cache where that is
    /// lower (fuselane only).
    pub(crate) of_roofline: Option<f64>,
    /// The largest error of the outputs against the f64 reference, in ulp at the larger of the
    /// value and the output's root mean square.
    pub(crate) error: Option<f64>,
    /// Measured, and the outputs are right.
    pub(crate) ok: bool,
    /// Why there is no value, or what to know about it; empty if nothing.
    pub(crate) note: String,
    /// How many calls were timed.
    pub(crate) calls: usize,
    /// There is no result for a reason that may pass, such as a crash or a lack of memory: a
    /// resumed run measures it again.
    #[serde(default)]
    pub(crate) again: bool,
}

impl Record {
    /// What a resumed run does not measure again.
    pub(crate) fn key(&self) -> (String, usize, String, Alloc) {
        (self.table.clone(), self.n, self.provider.clone(), self.alloc)
    }
}

/// The facts of a run: `run.json` in its folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    /// When it began, in UTC: 2026-01-31T12:00:00Z.
    pub(crate) started: String,
    /// The command line, without the program.
    pub(crate) arguments: Vec<String>,
    pub(crate) fuselane: String,
    /// The commit that was measured, with "-dirty" where files were changed; none if unknown.
    pub(crate) commit: Option<String>,
    pub(crate) machine: crate::machine::Machine,
    pub(crate) os: String,
    pub(crate) isa: String,
    /// The GPU that was measured; none for the CPU.
    #[serde(default)]
    pub(crate) gpu: Option<crate::gpu::Gpu>,
    pub(crate) threads: usize,
    /// Versions that each provider told, by provider: {"torch": {"torch": "2.15.0", ...}}.
    pub(crate) versions: BTreeMap<String, BTreeMap<String, String>>,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A right result of the relu table, of which a test changes what it is about.
    pub(crate) fn some() -> Record {
        Record {
            table: "act-speed-fwd-batch12-head12-dim128-act_relu-bf16".to_owned(),
            family: "act".to_owned(),
            title: "relu".to_owned(),
            operator: "act".to_owned(),
            metric: Metric::Speed,
            mode: Mode::Fwd,
            n: 256,
            dtype: "bf16".to_owned(),
            provider: "fuselane".to_owned(),
            alloc: Alloc::Warm,
            device: None,
            value: Some(1.0),
            p20: None,
            p80: None,
            unit: "ms".to_owned(),
            bytes: Some(1000),
            least_bytes: None,
            of_copy_limit: None,
            of_roofline: None,
            error: Some(0.1),
            ok: true,
            note: String::new(),
            calls: 10,
            again: false,
        }
    }
}
