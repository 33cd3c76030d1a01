//! One file per operator.

pub mod act;
