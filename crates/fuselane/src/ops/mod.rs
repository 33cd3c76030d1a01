//! The operators: for each one file with its formula, options, checks, forward, backward and
//! tests.

pub mod act;
pub mod angles;
pub mod cosine;
pub mod normalize;
pub(crate) mod parameter;
pub mod rotate;
pub mod softmax;
pub mod theta;
pub mod tokens;
