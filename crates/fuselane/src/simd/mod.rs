//! What one instruction set is to the kernels: sixteen f32 at a time.
//!
//! A kernel is written once, over a type `S: Simd`, which names an instruction set together with the
//! element type in memory (f32, f16 or bf16; arithmetic is in f32). It computes on [`V<S>`], a block of
//! [`LANES`] numbers with the usual operators. Each instruction set is one file that implements
//! [`Simd`]; [`dispatch`] is the one place that chooses.
//!
//! Whatever has a [`V`] has to be inlined into a function that was compiled for its instruction
//! set. So functions and closures on the way carry `#[inline(always)]`, and [`Simd::call`] begins such
//! a function, one for each loop, so that its constants and sums stay in registers. What drives loops
//! is ordinary code.
//!
//! **The order of lanes belongs to the instruction set.** AVX2 holds the bf16 elements of even index in
//! one register and those of odd index in the other, which takes no shuffle. f32 data that meets such
//! blocks comes through [`V::load_f32`]; what kernels keep for themselves is a type of its own,
//! [`Lane`](crate::kernels::lanes::Lane).

mod isa;
mod line;
pub(crate) mod math;
mod portable;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm_sfence};
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use half::{bf16, f16};

use crate::dtype::{DType, Element};
pub use isa::{Isa, isa, with_isa};
pub(crate) use line::Line;
#[cfg(target_arch = "x86_64")]
use x86::x86;

/// Numbers in a block, for every instruction set.
pub(crate) const LANES: usize = 16;

/// Bytes of a cache line.
pub(crate) const CACHE_LINE: usize = 64;

/// How elements of one type are stored, and how blocks of type `B` are made of them.
pub(crate) trait Storage<B>: Element<Real = f32> {
    type Packed: Packed<Self>;

    fn widen(packed: Self::Packed) -> B;
    /// Rounds to nearest even.
    fn round(a: B) -> Self::Packed;
    /// Rounds to nearest, ties away from zero where that is faster: for approximate results, which
    /// meet a tie by chance only.
    #[inline(always)]
    fn round_ties_away(a: B) -> Self::Packed {
        Self::round(a)
    }
    /// For numbers that the element type has exactly.
    #[inline(always)]
    fn truncate(a: B) -> Self::Packed {
        Self::round(a)
    }
}

/// [`LANES`] elements as they are stored.
///
/// # Safety of its functions
/// `p` points to so many elements that may be read or written. It need not be aligned, but for
/// `store_non_temporal`: see [`Simd::NON_TEMPORAL_ALIGN`].
pub(crate) trait Packed<E>: Copy {
    unsafe fn load(p: *const E) -> Self;
    /// The elements from `i` on of a row that ends within the block, and zeros.
    fn load_tail(row: &[E], i: usize, masked_loads: bool) -> Self;
    unsafe fn store(self, p: *mut E);
    /// Stores around the caches.
    #[inline(always)]
    unsafe fn store_non_temporal(self, p: *mut E) {
        // SAFETY: the caller's promise is stronger than what `store` asks for.
        unsafe { self.store(p) }
    }
}

/// One instruction set for one element type.
///
/// # Safety of its functions
/// As for [`Packed`]: `p` points to [`LANES`] elements or numbers.
pub(crate) trait Simd: Copy + Sized + 'static {
    /// The type in memory.
    type Elem: Storage<Self::Block, Packed = Self::Packed>;
    /// Sixteen f32.
    type Block: Packed<f32>;
    /// Sixteen elements as they are stored.
    type Packed: Packed<Self::Elem>;
    /// What a comparison gives.
    type Mask: Copy;
    /// A cache line in a register, if there are such.
    type Line: Line;
    /// Whether there are registers enough for the loops of two passes in one.
    const PIPELINE: bool = false;
    /// Whether operators have loops of their own for their usual calls, beside a generic one.
    const COMPOSED: bool = true;
    /// Whether loops go in steps of four blocks, which takes code of four blocks.
    const STEPS: bool = true;
    /// Whether [`Simd::mul_add`] rounds once.
    const FUSED: bool = true;
    /// Whether loads can leave out lanes.
    const MASKED_LOADS: bool = false;
    /// Alignment, in bytes, of rows that are stored non-temporally.
    const NON_TEMPORAL_ALIGN: usize = 32;
    /// Elements that such rows have a multiple of.
    const NON_TEMPORAL_UNIT: usize = {
        let aligned = Self::NON_TEMPORAL_ALIGN / size_of::<Self::Elem>();
        if aligned > LANES { aligned } else { LANES }
    };
    /// Whether [`Simd::line`] takes two blocks, so that they are stored as a cache line at once.
    const WHOLE_LINES: bool = false;
    /// The significant bits that an approximate result needs: those of the element type, or 24 where
    /// elementary functions have no faster form.
    const RESULT_BITS: u32 = match Self::Elem::DTYPE {
        DType::BF16 => 8,
        DType::F16 => 11,
        DType::F32 | DType::F64 => 24,
    };

    /// Runs `f` in a function of its own, compiled for this instruction set.
    fn call<R>(f: impl FnOnce() -> R) -> R;
    /// Runs `f`; out of line where small code matters more than speed.
    #[inline(always)]
    fn apart<R>(f: impl FnOnce() -> R) -> R {
        f()
    }

    fn splat(value: f32) -> Self::Block;
    fn add(a: Self::Block, b: Self::Block) -> Self::Block;
    fn sub(a: Self::Block, b: Self::Block) -> Self::Block;
    fn mul(a: Self::Block, b: Self::Block) -> Self::Block;
    fn div(a: Self::Block, b: Self::Block) -> Self::Block;
    /// The larger of each pair; `b` where either is NaN.
    fn max(a: Self::Block, b: Self::Block) -> Self::Block;
    /// The smaller of each pair; `b` where either is NaN.
    fn min(a: Self::Block, b: Self::Block) -> Self::Block;
    fn neg(a: Self::Block) -> Self::Block;
    fn abs(a: Self::Block) -> Self::Block;
    /// `a * b + c`.
    fn mul_add(a: Self::Block, b: Self::Block, c: Self::Block) -> Self::Block;
    /// `c - a * b`.
    fn neg_mul_add(a: Self::Block, b: Self::Block, c: Self::Block) -> Self::Block;
    /// The magnitude of `a` with the sign of `sign`.
    fn copysign(a: Self::Block, sign: Self::Block) -> Self::Block;
    /// 1 / a, to 2^-11 or better.
    fn reciprocal_estimate(a: Self::Block) -> Self::Block;
    /// `a * b` as an unevaluated sum, exact barring underflow.
    #[inline(always)]
    fn two_product(a: Self::Block, b: Self::Block) -> (Self::Block, Self::Block) {
        let high = Self::mul(a, b);
        (high, Self::mul_add(a, b, Self::neg(high)))
    }

    /// `a < b`; false where either is NaN.
    fn lt(a: Self::Block, b: Self::Block) -> Self::Mask;
    /// `a <= b`; false where either is NaN.
    fn le(a: Self::Block, b: Self::Block) -> Self::Mask;
    fn is_nan(a: Self::Block) -> Self::Mask;
    /// The larger of |a| and b, where b is not negative; compared as integers, which CPUs have more room
    /// for beside arithmetic. A NaN of a is larger than all.
    fn max_magnitude(a: Self::Block, b: Self::Block) -> Self::Block;
    /// Lanes whose sign bit is set.
    fn is_negative(a: Self::Block) -> Self::Mask;
    /// `yes` where the mask is set, `no` elsewhere.
    fn select(mask: Self::Mask, yes: Self::Block, no: Self::Block) -> Self::Block;
    fn any(mask: Self::Mask) -> bool;

    /// For a = [`ROUND_MAGIC`] + 127 + k: 2^k, for integral k within -126..=127.
    fn exp2_of_magic(a: Self::Block) -> Self::Block;
    /// For a = 1.5 * 2^20 + m, where m is a multiple of 1/8: `table[8 m mod 8]` shifted by the integer
    /// part of m into the exponent.
    fn exp2_of_eighths(a: Self::Block, table: &[u32; 8]) -> Self::Block;
    /// For a = [`ROUND_MAGIC`] + k, with integral |k| < 2^22: whether bit 0 of k is set, and whether
    /// bit 1 is.
    fn low_bits_of_magic(a: Self::Block) -> (Self::Mask, Self::Mask);

    /// Swaps the elements of index 2k and 2k + 1.
    fn swap_pairs(a: Self::Block) -> Self::Block;
    /// The sum of all lanes, always in the same order.
    fn sum(a: Self::Block) -> f32;
    /// [`Simd::sum`] of eight blocks.
    #[inline(always)]
    fn sum_eight(blocks: &[Self::Block; 8]) -> [f32; 8] {
        std::array::from_fn(|i| Self::sum(blocks[i]))
    }
    /// The largest lane; NaN if any lane is.
    fn largest(a: Self::Block) -> f32;

    #[inline(always)]
    unsafe fn load(p: *const Self::Elem) -> Self::Block {
        // SAFETY: the caller's promise.
        Self::Elem::widen(unsafe { Self::Packed::load(p) })
    }
    /// The elements from `i` on of a row that ends within the block, and zeros.
    #[inline(always)]
    fn load_tail(row: &[Self::Elem], i: usize) -> Self::Block {
        Self::Elem::widen(Self::Packed::load_tail(row, i, Self::MASKED_LOADS))
    }
    /// Loads f32 in index order.
    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Self::Block {
        // SAFETY: the caller's promise.
        unsafe { Self::load_lanes(p) }
    }
    /// Stores f32 in index order.
    #[inline(always)]
    unsafe fn store_f32(a: Self::Block, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { Self::store_lanes(a, p) }
    }
    /// Loads numbers in the order of lanes.
    #[inline(always)]
    unsafe fn load_lanes(p: *const f32) -> Self::Block {
        // SAFETY: the caller's promise.
        unsafe { Self::Block::load(p) }
    }
    /// Stores numbers in the order of lanes.
    #[inline(always)]
    unsafe fn store_lanes(a: Self::Block, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { a.store(p) }
    }

    /// Rounds to nearest even.
    #[inline(always)]
    fn round(a: Self::Block) -> Self::Packed {
        Self::Elem::round(a)
    }
    #[inline(always)]
    unsafe fn store(packed: Self::Packed, p: *mut Self::Elem) {
        // SAFETY: the caller's promise.
        unsafe { packed.store(p) }
    }
    /// Stores around the caches, a whole number of blocks behind an address that is aligned to
    /// [`Simd::NON_TEMPORAL_ALIGN`] bytes; a [`Simd::fence`] has to follow before another thread reads.
    #[inline(always)]
    unsafe fn store_non_temporal(packed: Self::Packed, p: *mut Self::Elem) {
        // SAFETY: the caller's promise.
        unsafe { packed.store_non_temporal(p) }
    }
    /// Stores two blocks non-temporally at `p`, which is aligned to [`CACHE_LINE`] bytes.
    #[inline(always)]
    unsafe fn store_line_non_temporal([a, b]: [Self::Packed; 2], p: *mut Self::Elem) {
        // SAFETY: the caller's promise.
        unsafe {
            if Self::WHOLE_LINES {
                return Self::line([a, b]).store_non_temporal(p.cast());
            }
            a.store_non_temporal(p);
            b.store_non_temporal(p.add(LANES));
        }
    }
    /// Two blocks (or the second alone, where one is as long) as a cache line in a register.
    fn line(blocks: [Self::Packed; 2]) -> Self::Line;

    /// Orders non-temporal stores before what follows.
    #[inline(always)]
    fn fence() {
        #[cfg(target_arch = "x86_64")]
        x86!(_mm_sfence());
    }
    /// Asks for the cache line at `p`, which may be any address.
    #[inline(always)]
    fn prefetch_l1<T>(_p: *const T) {
        #[cfg(target_arch = "x86_64")]
        x86!(_mm_prefetch::<_MM_HINT_T0>(_p.cast()));
    }
    /// The same, into the second-level cache.
    #[inline(always)]
    fn prefetch_l2<T>(_p: *const T) {
        #[cfg(target_arch = "x86_64")]
        x86!(_mm_prefetch::<_MM_HINT_T1>(_p.cast()));
    }
}

/// 1.5 * 2^23. Added to a number of magnitude below 2^22, it leaves no room for a fraction: the sum is
/// rounded to an integer, which then stands in the low 22 bits of its representation.
pub(crate) const ROUND_MAGIC: f32 = 12_582_912.0;

/// A block of [`LANES`] f32, with the usual operators.
pub(crate) struct V<S: Simd>(pub(super) S::Block);

impl<S: Simd> Clone for V<S> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<S: Simd> Copy for V<S> {}

impl<S: Simd> Add for V<S> {
    type Output = Self;
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(S::add(self.0, other.0))
    }
}
impl<S: Simd> AddAssign for V<S> {
    #[inline(always)]
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}
impl<S: Simd> Sub for V<S> {
    type Output = Self;
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(S::sub(self.0, other.0))
    }
}
impl<S: Simd> Mul for V<S> {
    type Output = Self;
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(S::mul(self.0, other.0))
    }
}
impl<S: Simd> Div for V<S> {
    type Output = Self;
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(S::div(self.0, other.0))
    }
}
impl<S: Simd> Neg for V<S> {
    type Output = Self;
    #[inline(always)]
    fn neg(self) -> Self {
        Self(S::neg(self.0))
    }
}

impl<S: Simd> V<S> {
    #[inline(always)]
    pub(crate) fn of(block: S::Block) -> Self {
        Self(block)
    }
    #[inline(always)]
    pub(crate) fn block(self) -> S::Block {
        self.0
    }
    #[inline(always)]
    pub(crate) fn splat(value: f32) -> Self {
        Self(S::splat(value))
    }
    #[inline(always)]
    pub(crate) fn zero() -> Self {
        Self::splat(0.0)
    }
    /// The larger of each pair; `other` where either is NaN, so `zero.max(x)` keeps a NaN of x.
    #[inline(always)]
    pub(crate) fn max(self, other: Self) -> Self {
        Self(S::max(self.0, other.0))
    }
    /// The smaller of each pair; `other` where either is NaN.
    #[inline(always)]
    pub(crate) fn min(self, other: Self) -> Self {
        Self(S::min(self.0, other.0))
    }
    /// Within `low..=high`; a NaN stays.
    #[inline(always)]
    pub(crate) fn clamp(self, low: f32, high: f32) -> Self {
        Self::splat(low).max(Self::splat(high).min(self))
    }
    #[inline(always)]
    pub(crate) fn abs(self) -> Self {
        Self(S::abs(self.0))
    }
    /// `self * factor + term`, rounded once where the instruction set can.
    #[inline(always)]
    pub(crate) fn mul_add(self, factor: Self, term: Self) -> Self {
        Self(S::mul_add(self.0, factor.0, term.0))
    }
    /// `term - self * factor`, rounded once where the instruction set can.
    #[inline(always)]
    pub(crate) fn neg_mul_add(self, factor: Self, term: Self) -> Self {
        Self(S::neg_mul_add(self.0, factor.0, term.0))
    }
    /// The larger of |self| and `other`, which is not negative. A NaN of self is larger than all.
    #[inline(always)]
    pub(crate) fn max_magnitude(self, other: Self) -> Self {
        Self(S::max_magnitude(self.0, other.0))
    }
    #[inline(always)]
    pub(crate) fn copysign(self, sign: Self) -> Self {
        Self(S::copysign(self.0, sign.0))
    }
    /// `self * other` as an unevaluated sum, exact barring underflow.
    #[inline(always)]
    pub(crate) fn two_product(self, other: Self) -> (Self, Self) {
        let (high, low) = S::two_product(self.0, other.0);
        (Self(high), Self(low))
    }
    #[inline(always)]
    pub(crate) fn lt(self, other: Self) -> S::Mask {
        S::lt(self.0, other.0)
    }
    #[inline(always)]
    pub(crate) fn le(self, other: Self) -> S::Mask {
        S::le(self.0, other.0)
    }
    #[inline(always)]
    pub(crate) fn is_nan(self) -> S::Mask {
        S::is_nan(self.0)
    }
    #[inline(always)]
    pub(crate) fn is_negative(self) -> S::Mask {
        S::is_negative(self.0)
    }
    #[inline(always)]
    pub(crate) fn select(mask: S::Mask, yes: Self, no: Self) -> Self {
        Self(S::select(mask, yes.0, no.0))
    }
    #[inline(always)]
    pub(crate) fn swap_pairs(self) -> Self {
        Self(S::swap_pairs(self.0))
    }
    /// The sum of all lanes, always in the same order.
    #[inline(always)]
    pub(crate) fn sum(self) -> f32 {
        S::sum(self.0)
    }
    /// The largest lane; NaN if any lane is.
    #[inline(always)]
    pub(crate) fn largest(self) -> f32 {
        S::largest(self.0)
    }
    /// Sixteen f32 in index order, such as a parameter's.
    #[inline(always)]
    pub(crate) fn load_f32(numbers: &[f32; LANES]) -> Self {
        // SAFETY: the array holds a block.
        Self(unsafe { S::load_f32(numbers.as_ptr()) })
    }
    /// [`V::load_f32`], back.
    #[inline(always)]
    pub(crate) fn store_f32(self, numbers: &mut [f32; LANES]) {
        // SAFETY: the array holds a block.
        unsafe { S::store_f32(self.0, numbers.as_mut_ptr()) }
    }
    /// Rounds to the element type, to nearest even.
    #[inline(always)]
    pub(crate) fn round(self) -> S::Packed {
        S::Elem::round(self.0)
    }
    /// Rounds an approximate result, for which a tie is chance, as fast as can be.
    #[inline(always)]
    pub(crate) fn round_ties_away(self) -> S::Packed {
        S::Elem::round_ties_away(self.0)
    }
    /// For numbers that the element type has exactly.
    #[inline(always)]
    pub(crate) fn truncate(self) -> S::Packed {
        S::Elem::truncate(self.0)
    }
    /// The first `n` elements, and `fill` in the place of the others.
    #[inline(always)]
    pub(crate) fn first(self, n: usize, fill: f32) -> Self {
        const INDEX: [f32; LANES] =
            [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
        Self::select(Self::load_f32(&INDEX).lt(Self::splat(n as f32)), self, Self::splat(fill))
    }
}

/// An instruction set for tests of loops that never load or store.
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) type AnyWithSteps = avx2::Avx2<f32, false>;
#[cfg(all(test, not(target_arch = "x86_64")))]
pub(crate) type AnyWithSteps = portable::Portable<f32>;

/// Code that waits for an instruction set and an element type.
pub(crate) trait Kernel {
    /// Does the work. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self);
}

/// Runs a kernel for elements of type `dtype`, which is not f64, on `isa`.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, dtype: DType, kernel: K) {
    use DType::{BF16, F16, F32};
    use portable::Portable;
    #[cfg(target_arch = "x86_64")]
    use {avx2::Avx2, avx512::Avx512};
    match (isa, dtype) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, BF16) => enter::<Avx2<bf16, false>, K>(kernel),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, F16) => enter::<Avx2<f16, false>, K>(kernel),
        // (In f32 the twin has the same bits, and was 1 % faster in the mean: not worth its code.)
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2 | Isa::Avx512, F32) => enter::<Avx2<f32, false>, K>(kernel),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, BF16) => enter::<Avx2<bf16, true>, K>(kernel),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, F16) => enter::<Avx2<f16, true>, K>(kernel),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Wide, BF16) => enter::<Avx512<bf16>, K>(kernel),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Wide, F16) => enter::<Avx512<f16>, K>(kernel),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Wide, F32) => enter::<Avx512<f32>, K>(kernel),
        (Isa::Portable, BF16) => enter::<Portable<bf16>, K>(kernel),
        (Isa::Portable, F16) => enter::<Portable<f16>, K>(kernel),
        (Isa::Portable, F32) => enter::<Portable<f32>, K>(kernel),
        #[cfg(not(target_arch = "x86_64"))]
        (Isa::Avx2 | Isa::Avx512 | Isa::Avx512Wide, BF16 | F16 | F32) => {
            unreachable!("{isa} is not of this CPU")
        }
        (_, DType::F64) => unreachable!("f64 is served by the reference"),
    }
}

/// Enters a function compiled for `S`, and makes its non-temporal stores visible at its end.
fn enter<S: Simd, K: Kernel>(kernel: K) {
    S::call(
        #[inline(always)]
        move || kernel.run::<S>(),
    );
    S::fence();
}

/// The last elements of a row, from `i` on, and zeros behind them.
#[cold]
#[inline(never)]
fn copy_tail<T: Element>(row: &[T], i: usize) -> [T; LANES] {
    let mut block = [T::default(); LANES];
    let tail = row.get(i..).unwrap_or_default();
    block[..tail.len()].copy_from_slice(tail);
    block
}
