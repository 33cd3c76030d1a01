//! Fused transformer operators that run at memory speed, forward and backward.
//!
//! | operator | what it computes |
//! |---|---|
//! | [`Act`] | activations: relu, sigmoid, silu, gelu, ... |
//! | [`Softmax`] | softmax and log-softmax over any dimension |
//! | [`Normalize`] | RMS, layer and group norms with residual, gate, weight and bias fused in |
//! | [`Rotate`] | rotary position encoding with a fused activation, on sequences and grids |
//! | [`Cosine`] | cosine position encoding with a fused activation, on sequences and grids |
//! | [`Theta`] | frequency schedules for the last two |
//!
//! Every operator works on the caller's memory through [`View`]s: a pointer with dtype (f32, f16,
//! bf16, f64), shape and strides. Options are plain structs; what is wrong with a call comes back
//! as an [`Error`] that names the argument; the `_into` forms write where you say, and the short
//! forms return a [`Buffer`] from a [`pool`].
//!
//! ```
//! use fuselane::{Act, Normalize, NormalizeForward, View, ViewMut};
//! let (x, weight) = (vec![3.0f32, -4.0], vec![1.0f32, 0.5]);
//! let mut o = vec![0.0f32; 2];
//! Normalize::rms_norm().forward_into(NormalizeForward {
//!     weight: Some(View::new(&weight, &[2])?),
//!     ..NormalizeForward::new(View::new(&x, &[1, 2])?, ViewMut::new(&mut o, &[1, 2])?)
//! })?;
//! assert!((o[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6);
//! let gradient = Act::Silu.backward(View::new(&o, &[1, 2])?, View::new(&x, &[1, 2])?)?;
//! assert_eq!(gradient.shape(), [1, 2]);
//! # Ok::<(), fuselane::Error>(())
//! ```
//!
//! What holds for all operators: arithmetic is in f32 (f64 for f64), and each output is rounded
//! once; results have the same bits for any number of threads and do not depend on the other rows
//! of a call; inputs are never written, and nothing is copied behind your back. Large
//! calls run on as many threads as `rayon`'s global pool has, the calling one among them; in a
//! `rayon` pool, where the caller has entered one; or where [`with_executor`] says.
//! [`mod@reference`] has each operator again in plain f64, as the truth that tests compare with. Calls
//! on f64 are for checking, and it is what serves them: see [`DType::F64`].

#[cfg(test)]
mod calls;
mod dtype;
mod error;
mod exec;
mod kernels;
pub mod machine;
#[cfg(feature = "ndarray")]
mod ndarray;
pub mod ops;
pub mod plan;
pub mod pool;
pub mod reference;
mod simd;
mod view;

// What `tests/` calls this crate.
#[cfg(test)]
extern crate self as fuselane;

pub use dtype::{DType, Element, Real};
pub use error::{Error, Result};
pub use exec::parallel::{Executor, for_each_task, on_this_thread, with_executor};
pub use ops::act::Act;
pub use ops::angles::{AngleTable, Angles, Positions};
pub use ops::cosine::{Cosine, CosineBackward};
pub use ops::encode::{EncodingBackward, FusedAct, TokenLayout};
pub use ops::normalize::{
    GatePosition, Normalize, NormalizeBackward, NormalizeForward, NormalizeGradients, Normalized,
    Residual, WeightForm,
};
pub use ops::rotate::{Pairing, Partial, Rotate, RotateBackward};
pub use ops::softmax::Softmax;
pub use ops::theta::{Scaling, Theta};
pub use pool::Buffer;
pub use simd::{Isa, isa, with_isa};
pub use view::{MAX_RANK, View, ViewMut};
