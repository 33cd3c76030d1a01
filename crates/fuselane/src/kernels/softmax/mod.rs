//! The kernels of the softmax: what both directions and both dimensions share.
//!
//! Exponentials are relative to the maximum, or to nothing at all: in formats of 16 bits, where all
//! elements are within [`IN_RANGE`] of 0, e^x itself is as good, and there is no maximum to look for
//! first. Each row and each column by itself is done again with its maximum if it is not in range, so
//! that no result depends on its neighbours.

mod backward_rows;
mod columns;
mod rows;

pub(crate) use backward_rows::{BackwardRows, BackwardRowsFromInput};
pub(crate) use columns::{
    BackwardColumns, BackwardColumnsFromInput, ForwardColumns, column_statistics,
};
pub(crate) use rows::{ForwardLogRows, ForwardRows, exp_row};

use crate::exec::rows::TaskRows;
use crate::simd::{Simd, V};

/// How far elements may be off 0 for their exponentials to be taken as they are: sums of many, and
/// their inverses, then stay well within f32.
pub(crate) const IN_RANGE: f32 = 60.0;

/// What one thread does: all of some rows, or of some tiles of columns.
pub(crate) struct Task<'r, const I: usize> {
    pub(crate) rows: TaskRows<'r, I, 1>,
    /// The length of the dimension that is summed over.
    pub(crate) n: usize,
    /// The most elements in a row.
    pub(crate) width: usize,
    /// Whether what is nothing but minus infinity gives zeros.
    pub(crate) zero_masked: bool,
    pub(crate) non_temporal: bool,
}

/// The softmax or its logarithm.
pub(crate) trait Form: Copy {
    const LOG: bool;
    /// Adds a block to the total of the backward: the sum of o * grad, or of grad.
    #[inline(always)]
    fn add<S: Simd>(total: V<S>, o: V<S>, grad: V<S>) -> V<S> {
        if Self::LOG { total + grad } else { o.mul_add(grad, total) }
    }

    /// The probability, from the output.
    #[inline(always)]
    fn probability<S: Simd>(o: V<S>) -> V<S> {
        if Self::LOG { o.exp() } else { o }
    }

    /// The gradient, from the probability and the total.
    #[inline(always)]
    fn gradient<S: Simd>(p: V<S>, grad: V<S>, total: V<S>) -> V<S> {
        if Self::LOG { p.neg_mul_add(total, grad) } else { p * (grad - total) }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl Form for Plain {
    const LOG: bool = false;
}

#[derive(Clone, Copy)]
pub(crate) struct Log;

impl Form for Log {
    const LOG: bool = true;
}

/// `value`, but 0 where `flag` is.
#[inline(always)]
fn zero_where_zero<S: Simd>(flag: V<S>, value: V<S>) -> V<S> {
    V::select(flag.le(V::zero()), V::zero(), value)
}

/// 1 / sum; 0 of what is nothing but minus infinity, if `zero_masked`. (Nothing else has a sum of 0, as
/// the largest element of it adds 1, or at least e^-60.)
#[inline(always)]
fn inverse(sum: f64, zero_masked: bool) -> f32 {
    if zero_masked && sum == 0.0 { 0.0 } else { (1.0 / sum) as f32 }
}

/// ln(sum); 0 of what is nothing but minus infinity, if `zero_masked`.
#[inline(always)]
fn logarithm(sum: f64, zero_masked: bool) -> f32 {
    if zero_masked && sum == 0.0 { 0.0 } else { sum.ln() as f32 }
}
