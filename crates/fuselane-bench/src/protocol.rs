//! What the program and its workers say to each other.
//!
//! Each provider runs in a process of its own, a worker: of this program (`fuselane worker NAME`)
//! or of Python (`python/worker.py`). A worker prints [`Reply::Hello`] when it is up, then answers
//! each line of JSON on its standard input ([`Request`]) with one line on its standard output
//! ([`Reply`]). It ends when its standard input does. Whatever it prints to standard error goes to
//! a log.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::case::{Dtype, Mode, Operator};

/// How a call gets the memory of its outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(clap::ValueEnum)]
pub(crate) enum Alloc {
    /// Outputs are used again: memory that was touched before.
    Warm,
    /// A new output for each call, from the library's default allocator.
    Fresh,
}

impl Alloc {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Fresh => "fresh",
        }
    }
}

/// An input: a file that begins with its raw elements, little-endian, in row-major order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Input {
    /// x, residual, gate, weight, theta, grad.
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) path: PathBuf,
}

/// One call to be prepared and measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) operator: Operator,
    pub(crate) mode: Mode,
    pub(crate) dtype: Dtype,
    pub(crate) inputs: Vec<Input>,
    /// Inputs are mapped from their files rather than read into memory of the worker's own: for
    /// sizes of which memory does not hold one copy per provider.
    pub(crate) mapped: bool,
    /// The size: for cosine, the length of each axis of the grid.
    pub(crate) n: usize,
    pub(crate) threads: usize,
    pub(crate) alloc: Alloc,
}

/// A part of an output's elements, in row-major order: for i below `count` and j below `length`,
/// the element `start + i * step + j`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) start: usize,
    pub(crate) length: usize,
    pub(crate) step: usize,
    pub(crate) count: usize,
}

/// A line to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(crate) enum Request {
    /// Load the inputs; for a backward, run the forward and keep what its backward needs; compile
    /// and warm up, with two calls at least. Answer: `ready`, `unsupported` or `failed`.
    Prepare { job: Job },
    /// Write the samples of each output that is named, of the last run of the prepared call, one after
    /// the other, as f32 to `folder/NAME.f32`. Answer: `written`.
    Outputs { samples: BTreeMap<String, Vec<Sample>>, folder: PathBuf },
    /// One call that is not timed if `settle`, then this many timed ones. Answer: `times`.
    Round { calls: usize, settle: bool },
    /// Forget the prepared call and free its memory. Answer: `released`.
    Release,
    /// Measure the memory of a call by itself, see [`Reply::Memory`]. Answer: `memory`,
    /// `unsupported` or `failed`.
    Memory { job: Job },
}

/// A line from a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub(crate) enum Reply {
    /// Up and running.
    Hello {
        versions: BTreeMap<String, String>,
    },
    Ready,
    /// This provider does not have this operator, or not this mode of it.
    Unsupported {
        why: String,
    },
    Failed {
        why: String,
    },
    Written,
    /// The time of each call, in nanoseconds.
    Times {
        ns: Vec<u64>,
    },
    Released,
    /// The most memory at any time during the call, minus what the process had when only the
    /// inputs (with `grad`, for a backward) were loaded. After a warm-up, with allocators trimmed.
    /// For a backward, the peak is that of the backward alone, with what the forward kept and the
    /// forward's output alive.
    Memory {
        extra_bytes: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use fuselane::{Act, DType};

    /// The wire format, which `python/worker.py` relies on.
    #[test]
    fn wire_format() {
        let job = Job {
            operator: Operator::Act { act: Act::Silu },
            mode: Mode::Fwd,
            dtype: Dtype(DType::BF16),
            n: 2,
            threads: 2,
            alloc: Alloc::Warm,
            inputs: vec![Input {
                name: "x".to_owned(),
                dtype: Dtype(DType::BF16),
                shape: vec![1, 2],
                path: PathBuf::from("/tmp/x"),
            }],
            mapped: false,
        };
        let line = serde_json::to_string(&Request::Prepare { job }).unwrap();
        assert_eq!(
            line,
            r#"{"do":"prepare","job":{"operator":{"op":"act","act":"silu"},"mode":"fwd","dtype":"bf16","inputs":[{"name":"x","dtype":"bf16","shape":[1,2],"path":"/tmp/x"}],"mapped":false,"n":2,"threads":2,"alloc":"warm"}}"#
        );
        let round = Request::Round { calls: 3, settle: true };
        assert_eq!(
            serde_json::to_string(&round).unwrap(),
            r#"{"do":"round","calls":3,"settle":true}"#
        );
        let reply: Reply = serde_json::from_str(r#"{"is":"times","ns":[5,6]}"#).unwrap();
        assert_eq!(reply, Reply::Times { ns: vec![5, 6] });
    }
}
