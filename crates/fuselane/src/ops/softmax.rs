//! Softmax and log-softmax over one dimension.

/// Softmax over dimension `dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Softmax {
    /// The dimension that is summed over; negative ones count from the last.
    pub dim: isize,
    /// Gives the logarithm of the softmax instead.
    pub log: bool,
    /// A row of nothing but minus infinity gives zeros (minus infinities for the logarithm) and
    /// zero gradients, instead of NaN.
    pub zero_masked_rows: bool,
}

impl Default for Softmax {
    fn default() -> Self {
        Self { dim: -1, log: false, zero_masked_rows: false }
    }
}

// Stand-ins until the softmax branch lands.
use crate::{
    DType, Element, Isa, Real, View,
    error::Result,
    simd::{Lanes, Math, Memory},
};
#[inline(always)]
pub(crate) fn row<L, T>(x: &[T], y: &mut [T::Real])
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    let max = x
        .iter()
        .map(|x| x.to_f64())
        .fold(f64::NEG_INFINITY, |m, v| if m.is_nan() || m > v { m } else { v });
    let sum: f64 = x.iter().map(|x| (x.to_f64() - max).exp()).sum();
    for (y, x) in y.iter_mut().zip(x) {
        *y = Real::of((x.to_f64() - max).exp() / sum);
    }
}
#[inline(always)]
pub(crate) fn dot<L>(a: &[L::Real], b: &[L::Real]) -> L::Real
where
    L: Math + Memory<<L as Lanes>::Real>,
{
    Real::of(a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum())
}
pub(crate) fn column_statistics<R: Real>(
    _isa: Isa,
    x: View<'_>,
    statistics: &mut [R],
) -> Result<()> {
    let [b, h, n, d] = *x.shape() else { unreachable!() };
    let _ = DType::F32;
    let v = x.to_f64_vec();
    for bh in 0..b * h {
        for c in 0..d {
            let col = || (0..n).map(|t| v[(bh * n + t) * d + c]);
            let max = col().fold(f64::NEG_INFINITY, |m, v| if m.is_nan() || m > v { m } else { v });
            let sum: f64 = col().map(|x| (x - max).exp()).sum();
            statistics[bh * 2 * d + c] = R::of(max);
            statistics[bh * 2 * d + d + c] = R::of(1.0 / sum);
        }
    }
    Ok(())
}
