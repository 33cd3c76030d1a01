//! Who computes what: the operands of a call, checked and cut into rows, and the threads that work on them.

pub(crate) mod operands;
pub(crate) mod parallel;
pub(crate) mod rows;
pub(crate) mod scratch;
mod team;
