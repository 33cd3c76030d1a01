//! Errors in units of the last place.

use half::{bf16, f16};

use crate::dtype::{DType, Element};

/// Digits of the significand, and the exponents of the smallest normal and the largest number.
fn format(dtype: DType) -> (i32, i32, i32) {
    match dtype {
        DType::F16 => (11, -14, 15),
        DType::BF16 => (8, -126, 127),
        DType::F32 => (24, -126, 127),
        DType::F64 => (53, -1022, 1023),
    }
}

/// The spacing of the numbers of `dtype` from `|value|` upwards: that of the denormals at the
/// bottom, that below the largest number beyond it and at infinity. Never 0; NaN for NaN.
///
/// ```
/// use fuselane::{DType, reference::ulp::ulp};
/// assert_eq!(ulp(DType::BF16, 1.0), 1.0 / 128.0);
/// assert_eq!(ulp(DType::F32, 0.0), f32::from_bits(1).into());
/// ```
pub fn ulp(dtype: DType, value: f64) -> f64 {
    if value.is_nan() {
        return f64::NAN;
    }
    let (digits, smallest, largest) = format(dtype);
    // floor(log2 |value|); far below every range for 0 and far above it for infinity.
    let exponent = libm::ilogb(value);
    libm::ldexp(1.0, exponent.clamp(smallest, largest) - (digits - 1))
}

/// `|got - truth|` in units of `ulp(dtype, truth)`.
///
/// - 0 where both are NaN or the same infinity, infinite where only one is NaN.
/// - An infinity is right where the truth rounds to it in `dtype`. Elsewhere it counts as the power
///   of two that would follow the largest number, so that an overflow next to the threshold is an
///   error of one ulp or less, and any other a large one.
///
/// ```
/// use fuselane::{DType, reference::ulp::error};
/// assert_eq!(error(DType::F32, 1.0 + f64::from(f32::EPSILON), 1.0), 1.0);
/// assert_eq!(error(DType::F16, f64::INFINITY, 70_000.0), 0.0);
/// ```
pub fn error(dtype: DType, got: f64, truth: f64) -> f64 {
    distance(dtype, got, truth, ulp(dtype, truth))
}

/// [`error`] for a sum whose terms may cancel: `magnitude` is the sum of the absolute terms, and
/// the unit is the larger of `ulp(dtype, truth)`, for the rounding at the store, and
/// `ulp(dtype.real(), magnitude)`, for the arithmetic.
///
/// ```
/// use fuselane::{DType, reference::ulp::error_at};
/// // 1000.0 - 999.9 in f32, one ulp of 1000 (6.1e-5) away from 0.1.
/// assert!(error_at(DType::F32, 0.1 + 6.1e-5, 0.1, 1999.9) <= 1.0);
/// ```
pub fn error_at(dtype: DType, got: f64, truth: f64, magnitude: f64) -> f64 {
    // f64::max passes over a magnitude that is NaN.
    let unit = ulp(dtype, truth).max(ulp(dtype.real(), magnitude));
    distance(dtype, got, truth, unit)
}

fn distance(dtype: DType, got: f64, truth: f64, unit: f64) -> f64 {
    if got.is_nan() || truth.is_nan() {
        return if got.is_nan() && truth.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if got == truth || (got.is_infinite() && got == round(dtype, truth)) {
        return 0.0;
    }
    // In halves, because 2^1024 and the difference of two large f64 overflow.
    let half = if got.is_infinite() {
        let (.., largest) = format(dtype);
        libm::ldexp(1.0, largest).copysign(got)
    } else {
        got / 2.0
    };
    // Halving is not exact for denormal f64.
    if got.abs().max(truth.abs()) < 1.0 {
        (got - truth).abs() / unit
    } else {
        (half - truth / 2.0).abs() / (unit / 2.0)
    }
}

/// `value` rounded to `dtype` once.
///
/// ```
/// use fuselane::{DType, reference::ulp::round};
/// assert_eq!(round(DType::BF16, 1.01), 1.0078125);
/// ```
pub fn round(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F32 => <f32 as Element>::from_f64(value).into(),
        DType::F16 => <f16 as Element>::from_f64(value).to_f64(),
        DType::BF16 => <bf16 as Element>::from_f64(value).to_f64(),
        DType::F64 => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INF: f64 = f64::INFINITY;

    #[test]
    fn spacing_is_the_distance_to_the_next_number() {
        for bits in 0..f16::INFINITY.to_bits() - 1 {
            let (low, high) = (f16::from_bits(bits), f16::from_bits(bits + 1));
            let spacing = high.to_f64() - low.to_f64();
            assert_eq!(ulp(DType::F16, low.to_f64()), spacing);
            assert_eq!(ulp(DType::F16, -low.to_f64() - 0.4 * spacing), spacing);
        }
        for bits in 0..bf16::INFINITY.to_bits() - 1 {
            let (low, high) = (bf16::from_bits(bits), bf16::from_bits(bits + 1));
            assert_eq!(ulp(DType::BF16, low.to_f64()), high.to_f64() - low.to_f64());
        }
        for value in [0.0f32, 1e-45, 1e-38, 0.1, 1.0, 1.5, 3e38] {
            let next = f64::from(value.next_up()) - f64::from(value);
            assert_eq!(ulp(DType::F32, value.into()), next, "{value}");
        }
        for value in [0.0f64, 5e-324, 1e-310, 0.1, 1.0, 1e308] {
            assert_eq!(ulp(DType::F64, value), value.next_up() - value, "{value}");
        }
    }

    #[test]
    fn spacing_beyond_the_largest_number() {
        for (dtype, max) in [
            (DType::F16, 65504.0),
            (DType::BF16, bf16::MAX.to_f64()),
            (DType::F32, f32::MAX.into()),
            (DType::F64, f64::MAX),
        ] {
            for value in [max, -max, max * 1.5, INF, -INF] {
                assert_eq!(ulp(dtype, value), ulp(dtype, max), "{dtype} {value}");
            }
            assert!(ulp(dtype, f64::NAN).is_nan());
        }
    }

    #[test]
    fn errors() {
        for dtype in DType::ALL {
            assert_eq!(error(dtype, f64::NAN, f64::NAN), 0.0);
            assert_eq!(error(dtype, f64::NAN, 1.0), INF);
            assert_eq!(error(dtype, 1.0, f64::NAN), INF);
            assert_eq!(error(dtype, INF, INF), 0.0);
            assert_eq!(error(dtype, -INF, -INF), 0.0);
            assert_eq!(error(dtype, 1.0, INF), INF);
            assert_eq!(error(dtype, -INF, INF), INF);
            assert_eq!(error(dtype, 0.0, -0.0), 0.0);
            for value in [0.0, 1e-3, 1.0, 1000.0, 2.0 * ulp(dtype, 0.0)] {
                let unit = ulp(dtype, value);
                assert_eq!(error(dtype, value + unit, value), 1.0, "{dtype} {value}");
                assert_eq!(error(dtype, -value - 3.0 * unit, -value), 3.0, "{dtype} {value}");
            }
            assert!(error(dtype, INF, 1.0) > 1000.0);
        }
        // Half an ulp above the largest f16 rounds to infinity, a little less does not.
        assert_eq!(error(DType::F16, INF, 65520.0), 0.0);
        assert_eq!(error(DType::F16, -INF, -65520.0), 0.0);
        let near = error(DType::F16, INF, 65519.0);
        assert!((0.5..0.6).contains(&near), "{near}");
        assert!(error(DType::F16, -INF, 65520.0) > 4000.0);
        assert_eq!(error(DType::F16, 65504.0, 65520.0), 0.5);
        assert_eq!(error(DType::F64, INF, f64::MAX), 1.0);
        assert_eq!(error(DType::F64, f64::MAX, -f64::MAX), 2.0 * (2f64.powi(53) - 1.0));
    }

    #[test]
    fn errors_at_a_magnitude() {
        assert_eq!(error_at(DType::F32, 2f64.powi(-20), 0.0, 8.0), 1.0);
        assert_eq!(error_at(DType::F32, 1.5, 1.0, 0.0), error(DType::F32, 1.5, 1.0));
        // The store in bf16 is coarser than the arithmetic in f32.
        assert_eq!(error_at(DType::BF16, 1.0 + 1.0 / 128.0, 1.0, 100.0), 1.0);
        assert_eq!(error_at(DType::BF16, 2f64.powi(-20), 0.0, 8.0), 1.0);
        assert_eq!(error_at(DType::F32, 2.0, 1.0, f64::NAN), error(DType::F32, 2.0, 1.0));
    }
}
