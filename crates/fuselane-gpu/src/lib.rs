//! Fused transformer operators on GPUs.
//!
//! The operators of [`fuselane`], with its options, checks and errors, as CubeCL kernels.

mod angles;
mod copy;
mod device;
mod kernel;
mod launch;
mod ops;
#[cfg(feature = "sources")]
pub mod sources;
mod tensor;

pub use angles::{AngleTable, Angles};
pub use device::{Device, Tuning};
pub use ops::{act, cosine, normalize, rotate, softmax};
pub use tensor::Tensor;

/// The examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
