//! What the operators' kernels share.

pub(crate) mod angles;
pub(crate) mod math;
pub(crate) mod reduce;
pub(crate) mod storage;
pub(crate) mod sums;
