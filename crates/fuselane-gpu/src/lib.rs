//! Fused transformer operators on GPUs.
//!
//! The operators of [`fuselane`], with its options, checks and errors, as CubeCL kernels.

mod copy;
mod device;
mod kernel;
mod launch;
mod ops;
#[cfg(feature = "sources")]
pub mod sources;
mod tensor;

pub use device::{Device, Tuning};
pub use ops::act;
pub use ops::softmax;
pub use tensor::Tensor;

/// The examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
