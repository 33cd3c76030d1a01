//! The option matrix of each operator on the GPU that there is, against the reference, within the
//! bounds of the CPU's kernels, down to the last denormal number. (Devices that flush those to zero
//! would break the bounds there; lavapipe does not.)
#![cfg(any(feature = "wgpu", feature = "vulkan", feature = "cuda", feature = "rocm"))]

mod support;

use fuselane_check::{Effort, Operator};
use fuselane_gpu::Tuning;

/// All of it: every number of the 16-bit dtypes.
#[test]
fn act() {
    let one = Tuning { vector: Some(1), ..Tuning::default() };
    let tunings = [("default", Tuning::default()), ("vector 1", one)];
    support::check(Operator::Act, Effort::Full, &tunings);
}
