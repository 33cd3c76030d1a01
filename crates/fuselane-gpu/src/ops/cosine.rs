//! Cosine encoding with a fused activation; see [`fuselane::Cosine`].

pub use super::encode::EncodingBackward as CosineBackward;

super::encode::functions! {
    /// Writes the encoded `x` into `o`, which has twice as many features.
    forward_into,
    /// The encoded `x` in a new tensor.
    forward,
    Cosine, CosineBackward, name: "cosine", outputs: 2
}
