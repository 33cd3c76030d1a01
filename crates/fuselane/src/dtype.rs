//! The four float types of activations and parameters.

use std::fmt;

use half::{bf16, f16};

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of binary32.
    BF16,
    /// IEEE binary64, for checking: all arithmetic stays in f64. Calls on f64 activations are served by
    /// the plain code of [`mod@crate::reference`], slowly: most on the calling thread, from copies of their
    /// tensors, and with as much again for intermediate results.
    F64,
}

impl DType {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::BF16, Self::F64];

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// `"f32"`, `"f16"`, `"bf16"` or `"f64"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F64 => "f64",
        }
    }

    /// The type arithmetic is done in, which is also the type of kept statistics:
    /// f64 for f64, f32 for all others.
    pub const fn real(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            _ => Self::F32,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A type that tensors can hold: `f32`, `f16`, `bf16` (from the `half` crate) and `f64`.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + fmt::Debug + 'static {
    /// The tag of this type.
    const DTYPE: DType;
    /// The type arithmetic on it is done in.
    type Real: Real;

    /// Widens without loss.
    fn to_f64(self) -> f64;
    /// Rounds once, to nearest even.
    fn from_f64(value: f64) -> Self;
    /// Widens to the arithmetic type, or rounds to it where `self` is wider.
    fn to_real(self) -> Self::Real;
    /// Rounds once, to nearest even.
    fn from_real(value: Self::Real) -> Self;

    /// Bits that are in the order of magnitudes.
    #[doc(hidden)]
    type Magnitude: Copy + Ord + Default;
    /// The bits of |self|. Those of a NaN are above all others.
    #[doc(hidden)]
    fn magnitude(self) -> Self::Magnitude;
}

/// A type arithmetic is done in: `f32` or `f64`.
pub trait Real:
    Element<Real = Self>
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
{
    /// Minus infinity, the neutral element of the maximum.
    const MINUS_INFINITY: Self;
    /// Rounds an f64 to this type.
    #[inline(always)]
    fn of(value: f64) -> Self {
        Self::from_f64(value)
    }
    /// Rounds an integer to this type, once.
    fn of_integer(value: i64) -> Self;
}

macro_rules! element {
    ($type:ty, $bits:ty, $dtype:ident, $real:ty, $to_real:expr, $from_real:expr, $to_f64:expr, $from_f64:expr) => {
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            type Real = $real;
            #[inline(always)]
            fn to_f64(self) -> f64 {
                $to_f64(self)
            }
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                $from_f64(value)
            }
            #[inline(always)]
            fn to_real(self) -> $real {
                $to_real(self)
            }
            #[inline(always)]
            fn from_real(value: $real) -> Self {
                $from_real(value)
            }
            type Magnitude = $bits;
            #[inline(always)]
            fn magnitude(self) -> $bits {
                self.to_bits() & <$bits>::MAX >> 1
            }
        }
    };
}

element!(f32, u32, F32, f32, |x| x, |x| x, f64::from, |x| x as f32);
element!(f64, u64, F64, f64, |x| x, |x| x, |x| x, |x| x);
element!(f16, u16, F16, f32, f16::to_f32, f16::from_f32, f16::to_f64, |x| f16::from_f32(to_odd(x)));
element!(bf16, u16, BF16, f32, bf16::to_f32, bf16::from_f32, bf16::to_f64, |x| bf16::from_f32(
    to_odd(x)
));

/// Rounds to f32 so that a second rounding to 16 bits gives what one rounding would have given:
/// where the result is inexact, it is cut towards zero and its last bit set.
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() {
        return near;
    }
    let bits = near.to_bits();
    let cut = if f64::from(near).abs() > x.abs() { bits - 1 } else { bits };
    f32::from_bits(cut | 1)
}

impl Real for f32 {
    const MINUS_INFINITY: Self = f32::NEG_INFINITY;
    #[inline(always)]
    fn of_integer(value: i64) -> Self {
        value as Self
    }
}
impl Real for f64 {
    const MINUS_INFINITY: Self = f64::NEG_INFINITY;
    #[inline(always)]
    fn of_integer(value: i64) -> Self {
        value as Self
    }
}

/// Runs `$body` with the type alias `$T` bound to the element type that a [`DType`] names.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            $crate::DType::F64 => {
                type $T = f64;
                $body
            }
        }
    };
}
pub(crate) use with_element;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_f64_rounds_once() {
        // Just above the middle between 1 and its successor: by way of f32 it would become a tie
        // and fall back to 1.
        let above = 1.0 + f64::from(bf16::EPSILON) / 2.0 + f64::EPSILON;
        assert_eq!(<bf16 as Element>::from_f64(above), bf16::from_f32(1.0 + 1.0 / 128.0));
        let above = 1.0 + f64::from(f16::EPSILON) / 2.0 + f64::EPSILON;
        assert_eq!(<f16 as Element>::from_f64(above), f16::from_f32(1.0 + 1.0 / 1024.0));
        assert_eq!(<f16 as Element>::from_f64(65520.0), f16::INFINITY);
        assert_eq!(<f16 as Element>::from_f64(65519.99), f16::MAX);
        assert!(<bf16 as Element>::from_f64(f64::NAN).is_nan());
        assert_eq!(<bf16 as Element>::from_f64(f64::NEG_INFINITY), bf16::NEG_INFINITY);
        for bits in 0..=u16::MAX {
            let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert!(h.is_nan() || <f16 as Element>::from_f64(h.to_f64()) == h);
            assert!(b.is_nan() || <bf16 as Element>::from_f64(b.to_f64()) == b);
        }
    }
}
