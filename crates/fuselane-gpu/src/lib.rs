//! Fused transformer operators on GPUs.
//!
//! The operators of [`fuselane`], with its options, checks and errors, as CubeCL kernels.

#![allow(
    clippy::collapsible_if,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of,
    reason = "kernels have no such methods, and conditions of compilation stand by themselves"
)]

mod angles;
#[cfg(feature = "check")]
mod backend;
mod copy;
mod device;
mod kernel;
mod launch;
mod ops;
#[cfg(feature = "sources")]
pub mod sources;
mod tensor;

pub use angles::{AngleTable, Angles};
#[cfg(feature = "check")]
pub use backend::CheckBackend;
pub use device::{Device, Tuning};
pub use ops::{act, cosine, normalize, rotate, softmax};
pub use tensor::Tensor;

/// The examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
