//! Integration tests that are part of the unit tests too: calls with sizes, strides and values of all kinds.
//!
//! The unit tests are built with checks of arithmetic for overflow, the integration tests as the library is
//! shipped. With these files in both, the kernels are compiled once for each.

#![allow(clippy::duplicate_mod, reason = "each of these files has `common` as a module of its own")]

#[path = "../tests/corners.rs"]
mod corners;
#[path = "../tests/errors.rs"]
mod errors;
#[path = "../tests/facts.rs"]
mod facts;
#[path = "../tests/properties.rs"]
mod properties;
