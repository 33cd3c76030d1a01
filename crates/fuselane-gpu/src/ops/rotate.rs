//! Rotary position encoding with a fused activation; see [`fuselane::Rotate`].

pub use super::encode::EncodingBackward as RotateBackward;

super::encode::functions! {
    /// Writes the rotated `x` into `o`.
    forward_into,
    /// The rotated `x` in a new tensor.
    forward,
    Rotate, RotateBackward, name: "rotate", outputs: 1
}
