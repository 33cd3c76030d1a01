//! Parameters (weight, bias) of any float dtype, and their gradients: widened and rounded once per call.

use super::lanes::{self, Lane};
use super::sink::{RowSink, Sink};
use super::sweep::sweep;
use crate::dtype::DType;
use crate::exec::scratch::Scratch;
use crate::simd::{self, Kernel, LANES, Simd, V, isa};
use crate::view::{View, ViewMut};

/// Widens a parameter, in index order. Every NaN becomes the usual one, whose payload survives rounding
/// to 16 bits.
fn widen(view: View<'_>, out: &mut [f32]) {
    struct Widen<'a>(View<'a>, &'a mut [f32]);
    impl Kernel for Widen<'_> {
        #[inline(always)]
        fn run<S: Simd>(self) {
            let values = self.0.contiguous::<S::Elem>().unwrap_or_default();
            let out = &mut self.1[..values.len()];
            sweep::<S>(
                values.len(),
                #[inline(always)]
                |at| {
                    let mut block = [0.0; LANES];
                    usual_nan(V::<S>::load(values, at)).store_f32(&mut block);
                    out[at.i..][..at.n].copy_from_slice(&block[..at.n]);
                },
            );
        }
    }
    if view.is_contiguous() && view.dtype() != DType::F64 {
        simd::dispatch(isa(), view.dtype(), Widen(view, out));
    } else {
        view.widen(out);
    }
}

/// Rounds a parameter's gradient to the dtype of the caller's memory.
pub(crate) fn store(gradient: &mut ViewMut<'_>, values: &[f32]) {
    struct Store<'a, 'v>(&'a mut ViewMut<'v>, &'a [f32]);
    impl Kernel for Store<'_, '_> {
        #[inline(always)]
        fn run<S: Simd>(self) {
            let gradient = self.0.contiguous_mut::<S::Elem>().unwrap_or_default();
            let values = &self.1[..gradient.len()];
            let (len, mut gradient) = (values.len(), RowSink::<S>::new(gradient, false));
            sweep::<S>(
                len,
                #[inline(always)]
                |at| {
                    let mut block = [0.0; LANES];
                    block[..at.n].copy_from_slice(&values[at.i..][..at.n]);
                    gradient.put(at, usual_nan(V::<S>::load_f32(&block)).round());
                },
            );
        }
    }
    if gradient.is_contiguous() && gradient.dtype() != DType::F64 {
        simd::dispatch(isa(), gradient.dtype(), Store(gradient, values));
    } else {
        gradient.round_from(values);
    }
}

/// Every NaN as the one that survives rounding to 16 bits.
#[inline(always)]
fn usual_nan<S: Simd>(block: V<S>) -> V<S> {
    V::select(block.is_nan(), V::splat(-f32::NAN), block)
}

/// The length of `rows` rows of `len` numbers in the order of lanes, each from a block's start on.
pub(crate) fn lanes_len(rows: usize, len: usize) -> usize {
    rows * len.next_multiple_of(LANES)
}

/// `rows` rows of a parameter of `len` numbers each, in the order of lanes, each from a block's start on.
#[inline(always)]
pub(crate) fn rows_to_lanes<S: Simd>(values: &[f32], rows: usize, len: usize) -> Scratch<Lane> {
    let width = len.next_multiple_of(LANES);
    let mut scratch = Scratch::new(rows * width);
    let lanes = &mut scratch[..];
    S::call(
        #[inline(always)]
        move || {
            for row in 0..rows {
                let (from, to) = (&values[row * len..][..len], &mut lanes[row * width..][..width]);
                lanes::to_lanes::<S>(from, to);
            }
        },
    );
    scratch
}

/// An optional parameter of `len` numbers, widened, in index order.
pub(crate) fn widened(parameter: Option<View<'_>>, len: usize) -> Scratch<f32> {
    let mut values = Scratch::new(len);
    if let Some(parameter) = parameter {
        widen(parameter, &mut values[..len]);
    }
    values
}

/// Brings sums that kernels for activations of `dtype` left in the order of lanes, `rows` rows from a
/// block's start on each, into index order.
pub(crate) fn rows_to_index_order(dtype: DType, sums: &[Lane], rows: usize, values: &mut [f32]) {
    struct Reorder<'a>(&'a [Lane], usize, &'a mut [f32]);
    impl Kernel for Reorder<'_> {
        #[inline(always)]
        fn run<S: Simd>(self) {
            let Self(sums, rows, values) = self;
            let len = values.len() / rows;
            let width = len.next_multiple_of(LANES);
            for row in 0..rows {
                let values = &mut values[row * len..][..len];
                lanes::to_index_order::<S>(&sums[row * width..][..width], values);
            }
        }
    }
    if !values.is_empty() {
        simd::dispatch(isa(), dtype, Reorder(sums, rows, values));
    }
}
