//! One file per operator.

pub mod act;
pub mod cosine;
pub mod normalize;
pub mod rotate;
pub mod softmax;
mod tokens;
