//! The lanes: a block of numbers that one kernel line works on, and the choice of instruction set.
//!
//! Kernels are written once, over the traits of this file; each instruction set is one file that
//! implements them. A kernel reaches its instruction set through [`run`], which enters a function
//! compiled for it; everything below has to be inlined into that function, so every lane method
//! and every kernel function carries `#[inline(always)]`, and kernels use no closures.
//!
//! **The order of lanes is the implementation's own.** A block loaded from bf16 by AVX2 holds the
//! elements of even index in one register and those of odd index in the other, since that
//! takes no shuffle. Lane-wise arithmetic does not notice. Three rules follow: `f32` data that
//! meets such a block comes through [`Memory::load`], which reorders it the same way;
//! scratch that only kernels see goes through [`Lanes::load_raw`] and [`Lanes::store_raw`], which
//! keep the register order; and nothing else may assume which lane holds which element.

mod isa;
mod math;
mod portable;
mod portable64;

#[cfg(target_arch = "x86_64")]
mod avx2;

pub use isa::{Isa, isa, with_isa};
pub(crate) use math::Math;

use crate::dtype::{DType, Element, Real};
use half::{bf16, f16};

/// The largest [`Lanes::N`] of any implementation.
pub(crate) const MAX_LANES: usize = 16;

/// Alignment, in bytes, of an address that [`Memory::stream`] writes to.
pub(crate) const STREAM_ALIGN: usize = 32;

/// A block of `N` numbers that arithmetic works on at once.
pub(crate) trait Lanes: Copy {
    /// The type of each number.
    type Real: Real;
    /// What a comparison gives.
    type Mask: Copy;
    /// Numbers in a block.
    const N: usize;

    fn splat(value: Self::Real) -> Self;

    /// # Safety
    /// `p` points to `N` readable numbers.
    unsafe fn load_raw(p: *const Self::Real) -> Self;
    /// # Safety
    /// `p` points to `N` writable numbers.
    unsafe fn store_raw(self, p: *mut Self::Real);

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// The larger of each pair; `other` where either is NaN, so `zero.max(x)` keeps a NaN of x.
    fn max(self, other: Self) -> Self;
    fn neg(self) -> Self;
    fn abs(self) -> Self;
    /// `self * factor + term`, rounded once where the instruction set can.
    fn mul_add(self, factor: Self, term: Self) -> Self;
    /// `term - self * factor`, rounded once where the instruction set can.
    fn neg_mul_add(self, factor: Self, term: Self) -> Self;

    /// `self < other`; false where either is NaN.
    fn lt(self, other: Self) -> Self::Mask;
    /// `self <= other`; false where either is NaN.
    fn le(self, other: Self) -> Self::Mask;
    /// Lanes that are NaN.
    fn is_nan(self) -> Self::Mask;
    /// `yes` where the mask is set, `no` elsewhere.
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
    /// Whether the mask is set in any lane.
    fn any(mask: Self::Mask) -> bool;

    /// Swaps the elements of index 2k and 2k + 1.
    fn swap_pairs(self) -> Self;
    /// The sum of all lanes, in an order that depends on `N` only.
    fn reduce_add(self) -> Self::Real;
    /// The largest lane; NaN if any lane is.
    fn reduce_max(self) -> Self::Real;

    /// Maximum that keeps a NaN of either side.
    #[inline(always)]
    fn max_nan(self, other: Self) -> Self {
        Self::select(self.is_nan(), self, self.max(other))
    }
    /// The block at `i` of scratch, in register order.
    #[inline(always)]
    fn get(scratch: &[Self::Real], i: usize) -> Self {
        assert!(i + Self::N <= scratch.len());
        // SAFETY: just checked.
        unsafe { Self::load_raw(scratch.as_ptr().add(i)) }
    }
    /// Keeps this block at `i` of scratch, in register order.
    #[inline(always)]
    fn set(self, scratch: &mut [Self::Real], i: usize) {
        assert!(i + Self::N <= scratch.len());
        // SAFETY: just checked.
        unsafe { self.store_raw(scratch.as_mut_ptr().add(i)) }
    }
    /// Makes streamed stores visible to other threads.
    #[inline(always)]
    fn fence() {}
    /// Asks for the cache line at `p`, which may be any address.
    #[inline(always)]
    fn prefetch<T>(_p: *const T) {}
}

/// What the elementary functions in f32 need besides arithmetic.
pub(crate) trait F32Lanes: Lanes<Real = f32> {
    /// The nearest integer, ties to even; for |self| < 2^22.
    fn round(self) -> Self;
    /// 2^self for integral self within -126..=127.
    fn exp2_integral(self) -> Self;
    /// The magnitude of self with the sign of `sign`.
    fn copysign(self, sign: Self) -> Self;
    /// For integral |self| < 2^22: whether bit 0 is set, and whether bit 1 is set (two's
    /// complement).
    fn low_bits(self) -> (Self::Mask, Self::Mask);
    /// `self * other` as an unevaluated sum, exact barring underflow.
    fn two_product(self, other: Self) -> (Self, Self);
    /// Applies a scalar function lane by lane: for cold paths only.
    fn map(self, f: impl Fn(f32) -> f32) -> Self;
}

/// Loads from and stores to memory of element type `T`: widening on the way in, one rounding to
/// nearest even on the way out.
pub(crate) trait Memory<T: Element<Real = Self::Real>>: Lanes {
    /// # Safety
    /// `p` points to `N` readable elements.
    unsafe fn load(p: *const T) -> Self;
    /// # Safety
    /// `p` points to `N` writable elements.
    unsafe fn store(self, p: *mut T);
    /// Stores past the caches; [`Lanes::fence`] has to follow before another thread reads.
    ///
    /// # Safety
    /// `p` points to `N` writable elements and is aligned to [`STREAM_ALIGN`] bytes.
    #[inline(always)]
    unsafe fn stream(self, p: *mut T) {
        // SAFETY: the caller's promise is stronger than what `store` asks for.
        unsafe { self.store(p) }
    }

    /// The block at `i` of a row, with `fill` past the row's end.
    #[inline(always)]
    fn read(row: &[T], i: usize, fill: T::Real) -> Self {
        // SAFETY: the row holds the `N` elements from `i`, or those up to its end.
        unsafe {
            if i + Self::N <= row.len() {
                Self::load(row.as_ptr().add(i))
            } else {
                let i = i.min(row.len());
                Self::load_part(row.as_ptr().add(i), row.len() - i, fill)
            }
        }
    }

    /// The block at `i` of a row, which has to hold it.
    #[inline(always)]
    fn read_whole(row: &[T], i: usize) -> Self {
        assert!(i + Self::N <= row.len());
        // SAFETY: just checked.
        unsafe { Self::load(row.as_ptr().add(i)) }
    }

    /// Writes the block at `i` of a row, which has to hold it; `stream` as for [`Memory::write`].
    #[inline(always)]
    fn write_whole(self, row: &mut [T], i: usize, stream: bool) {
        assert!(i + Self::N <= row.len());
        // SAFETY: just checked; so is the alignment.
        unsafe {
            let p = row.as_mut_ptr().add(i);
            if stream && (p as usize).is_multiple_of(STREAM_ALIGN) {
                self.stream(p);
            } else {
                self.store(p);
            }
        }
    }

    /// Writes the block at `i` of a row, up to the row's end; past the caches if `stream` is set
    /// and the address allows it.
    #[inline(always)]
    fn write(self, row: &mut [T], i: usize, stream: bool) {
        if i + Self::N <= row.len() {
            self.write_whole(row, i, stream);
        } else {
            let i = i.min(row.len());
            // SAFETY: the row holds the elements from `i` up to its end, fewer than `N`.
            unsafe { self.store_part(row.as_mut_ptr().add(i), row.len() - i) }
        }
    }

    /// Loads `len < N` elements; the rest is `fill`.
    ///
    /// # Safety
    /// `p` points to `len` readable elements.
    #[inline(always)]
    unsafe fn load_part(p: *const T, len: usize, fill: T::Real) -> Self {
        let mut block = [T::from_real(fill); MAX_LANES];
        // SAFETY: `len < N <= MAX_LANES`, and `block` holds `MAX_LANES` elements.
        unsafe {
            std::ptr::copy_nonoverlapping(p, block.as_mut_ptr(), len);
            Self::load(block.as_ptr())
        }
    }

    /// Stores the first `len < N` elements.
    ///
    /// # Safety
    /// `p` points to `len` writable elements.
    #[inline(always)]
    unsafe fn store_part(self, p: *mut T, len: usize) {
        let mut block = [T::default(); MAX_LANES];
        // SAFETY: `len < N <= MAX_LANES`, and `block` holds `MAX_LANES` elements.
        unsafe {
            self.store(block.as_mut_ptr());
            std::ptr::copy_nonoverlapping(block.as_ptr(), p, len);
        }
    }
}

/// Code that is generic over lanes and element type, waiting for both.
pub(crate) trait Kernel {
    /// Does the work. Implementations are `#[inline(always)]`.
    fn run<L, T>(self)
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>;
}

/// Runs a kernel for activations of type `dtype` with the lanes of `isa`.
pub(crate) fn run<K: Kernel>(isa: Isa, dtype: DType, kernel: K) {
    match isa {
        Isa::Portable => run_portable(dtype, kernel),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` exists only where the CPU has these features (see `isa.rs`).
        Isa::Avx2 => unsafe { run_avx2(dtype, kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 => run_portable(dtype, kernel),
    }
}

fn run_portable<K: Kernel>(dtype: DType, kernel: K) {
    use portable::Portable;
    match dtype {
        DType::F32 => kernel.run::<Portable, f32>(),
        DType::F16 => kernel.run::<Portable, f16>(),
        DType::BF16 => kernel.run::<Portable, bf16>(),
        DType::F64 => kernel.run::<portable64::Portable64, f64>(),
    }
}

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
unsafe fn run_avx2<K: Kernel>(dtype: DType, kernel: K) {
    use avx2::Avx2;

    /// A function for each dtype: in a larger one the compiler runs out of registers.
    ///
    /// # Safety
    /// As for `run_avx2`.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline(never)]
    unsafe fn enter<K, L, T>(kernel: K)
    where
        K: Kernel,
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        kernel.run::<L, T>();
        Avx2::<false>::fence();
    }

    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => enter::<K, Avx2<false>, f32>(kernel),
            DType::F16 => enter::<K, Avx2<false>, f16>(kernel),
            DType::BF16 => enter::<K, Avx2<true>, bf16>(kernel),
            DType::F64 => enter::<K, portable64::Portable64, f64>(kernel),
        }
    }
}
