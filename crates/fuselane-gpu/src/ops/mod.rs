//! One module per operator.

pub mod act;
pub mod cosine;
pub(crate) mod encode;
pub mod normalize;
pub mod rotate;
pub mod softmax;
