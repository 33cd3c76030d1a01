//! One file per operator.

pub mod act;
pub mod softmax;
