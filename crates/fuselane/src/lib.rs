//! Fused transformer operators that run at memory speed, forward and backward.

mod dtype;
mod error;
pub mod machine;
pub mod ops;
mod parallel;
pub mod pool;
pub mod reference;
mod rows;
mod scratch;
mod simd;
mod view;

pub use dtype::{DType, Element, Real};
pub use error::{Error, Result};
pub use ops::act::Act;
pub use ops::angles::{AngleTable, Angles, Positions};
pub use ops::cosine::{Cosine, CosineBackward};
pub use ops::normalize::{
    GatePosition, Normalize, NormalizeBackward, NormalizeForward, NormalizeGradients, Normalized,
    Residual, WeightForm,
};
pub use ops::rotate::{Pairing, Partial, Rotate, RotateBackward};
pub use ops::softmax::Softmax;
pub use ops::tokens::{FusedAct, TokenLayout};
pub use pool::Buffer;
pub use simd::{Isa, isa, with_isa};
pub use view::{MAX_RANK, View, ViewMut};
