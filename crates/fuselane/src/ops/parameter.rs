//! Parameters (weight, bias): any float dtype, widened once per call.

use crate::dtype::{DType, Element, Real};
use crate::error::{Error, Result};
use crate::isa;
use crate::pool::{same_reals, same_reals_mut};
use crate::simd::{self, Kernel, Lanes, Math, Memory};
use crate::view::{View, ViewMut};

/// A parameter has to be a vector as long as the last dimension of x.
pub(crate) fn check(
    operator: &'static str,
    name: &'static str,
    view: View<'_>,
    len: usize,
) -> Result<()> {
    if view.shape() != [len] {
        return Err(Error::new(
            operator,
            name,
            format!("has shape {:?}", view.shape()),
            format!("[{len}] (last dimension of x)"),
        ));
    }
    Ok(())
}

/// Brings numbers from index order into the register order of `L`, from where
/// [`Lanes::get`] takes them. Both lengths are whole blocks (as scratch is).
#[inline(always)]
pub(crate) fn to_registers<L>(values: &[L::Real], registers: &mut [L::Real])
where
    L: Lanes + Memory<<L as Lanes>::Real>,
{
    for i in (0..values.len()).step_by(L::N) {
        L::read(values, i, Real::of(0.0)).set(registers, i);
    }
}

/// Brings sums that kernels for activations of `dtype` left in register order (whole blocks) into
/// index order, up to the end of `values`.
pub(crate) fn to_index_order<R: Real>(dtype: DType, registers: &[R], values: &mut [R]) {
    struct Reorder<'a, R> {
        registers: &'a [R],
        values: &'a mut [R],
    }
    impl<R: Real> Kernel for Reorder<'_, R> {
        #[inline(always)]
        fn run<L, T>(self)
        where
            T: Element,
            L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
        {
            let registers: &[T::Real] = same_reals(self.registers);
            let values: &mut [T::Real] = same_reals_mut(self.values);
            for i in (0..registers.len()).step_by(L::N) {
                L::get(registers, i).write(values, i, false);
            }
        }
    }
    simd::run(isa(), dtype, Reorder { registers, values });
}

/// Widens a parameter, in index order, into `out`. Every NaN becomes the usual one, whose payload
/// survives rounding to 16 bits.
pub(crate) fn widen<R: Real>(view: View<'_>, out: &mut [R]) {
    struct Widen<'a, R> {
        view: View<'a>,
        out: &'a mut [R],
    }
    impl<R: Real> Kernel for Widen<'_, R> {
        #[inline(always)]
        fn run<L, T>(self)
        where
            T: Element,
            L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
        {
            let (values, zero) = (self.view.contiguous::<T>().unwrap_or_default(), Real::of(0.0));
            let out: &mut [T::Real] = same_reals_mut(self.out);
            for i in (0..values.len()).step_by(L::N) {
                usual_nan::<L>(L::read(values, i, zero)).write(out, i, false);
            }
        }
    }
    if view.is_contiguous() && view.dtype().real() == R::DTYPE {
        simd::run(isa(), view.dtype(), Widen { view, out });
    } else {
        view.widen(out);
    }
}

/// Rounds a parameter's gradient to the dtype of the caller's memory.
pub(crate) fn store<R: Real>(gradient: &mut ViewMut<'_>, values: &[R]) {
    struct Store<'a, 'v, R> {
        gradient: &'a mut ViewMut<'v>,
        values: &'a [R],
    }
    impl<R: Real> Kernel for Store<'_, '_, R> {
        #[inline(always)]
        fn run<L, T>(self)
        where
            T: Element,
            L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
        {
            let (values, zero) = (same_reals::<R, T::Real>(self.values), Real::of(0.0));
            let gradient = self.gradient.contiguous_mut::<T>().unwrap_or_default();
            for i in (0..values.len()).step_by(L::N) {
                usual_nan::<L>(L::read(values, i, zero)).write(gradient, i, false);
            }
        }
    }
    if gradient.is_contiguous() && gradient.dtype().real() == R::DTYPE {
        simd::run(isa(), gradient.dtype(), Store { gradient, values });
    } else {
        gradient.round_from(values);
    }
}

/// Every NaN as the one that survives rounding to 16 bits.
#[inline(always)]
fn usual_nan<L: Lanes>(block: L) -> L {
    L::select(block.is_nan(), L::splat(Real::of(-f64::NAN)), block)
}
