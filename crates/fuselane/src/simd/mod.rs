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

mod appender;
mod isa;
mod math;
mod portable;
mod portable64;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

pub(crate) use appender::{Appender, Line};
pub use isa::{Isa, isa, with_isa};
pub(crate) use math::{Math, SHORT_LIMIT};

use crate::dtype::{DType, Element, Real};
use half::{bf16, f16};
use std::marker::PhantomData;

/// The largest [`Lanes::N`] of any implementation.
pub(crate) const MAX_LANES: usize = 16;

/// Alignment, in bytes, of an address that stores past the caches write to.
pub(crate) const STREAM_ALIGN: usize = 32;
/// Bytes of a cache line.
const LINE: usize = 64;

/// A block of `N` numbers that arithmetic works on at once.
pub(crate) trait Lanes: Copy {
    /// The type of each number.
    type Real: Real;
    /// What a comparison gives.
    type Mask: Copy;
    /// Numbers in a block.
    const N: usize;
    /// Whether there are registers for some 24 blocks, so that a loop may do the work of two.
    const MANY_REGISTERS: bool = false;
    /// Registers of a cache line, for [`Appender`]; `()` where there are none.
    type Line: Line;

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

    /// Runs a task in a function of its own, compiled for these lanes: how a kernel is entered,
    /// and how kernels share code that would be too much to have in each of them.
    fn enter<K: Task>(task: K) -> K::Output;

    /// Swaps the elements of index 2k and 2k + 1.
    fn swap_pairs(self) -> Self;
    /// The sum of all lanes, in an order that depends on `N` only.
    fn reduce_add(self) -> Self::Real;
    /// The sums of all lanes of each block, the same as [`Lanes::reduce_add`] gives.
    #[inline(always)]
    fn reduce_add_each(blocks: &[Self], sums: &mut [Self::Real]) {
        for (block, sum) in blocks.iter().zip(sums) {
            *sum = block.reduce_add();
        }
    }
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
    /// [`Lanes::prefetch`] that leaves the first-level cache as it is.
    #[inline(always)]
    fn prefetch_far<T>(_p: *const T) {}
}

/// What the elementary functions in f32 need besides arithmetic.
pub(crate) trait F32Lanes: Lanes<Real = f32> {
    /// Whether [`Lanes::mul_add`] rounds once.
    const FUSED: bool;
    /// The bits of a number as it is stored: 24 (f32), 11 (f16) or 8 (bf16). With fewer than 24,
    /// elementary functions need not be right to the last bit of f32.
    const STORED_BITS: u32;
    /// 1 / self, to 2^-11 or better.
    fn reciprocal_estimate(self) -> Self;
    /// The smaller of each pair; `other` where either is NaN.
    fn min(self, other: Self) -> Self;
    /// The magnitude of self with the sign of `sign`.
    fn copysign(self, sign: Self) -> Self;
    /// `negative` where the sign bit of self is set, `positive` elsewhere.
    fn select_sign(self, negative: Self, positive: Self) -> Self;
    /// For self = [`PUSH`] + 127 + k: 2^k, for integral k within -126..=127.
    fn exp2_pushed(self) -> Self;
    /// For self = 1.5 * 2^20 + m, where m is a multiple of 1/8: 2^m, to 2^-11; see `math::Short`.
    fn exp2_eighths(self) -> Self;
    /// For self = [`PUSH`] + k, with integral |k| < 2^22: whether bit 0 of k is set, and whether
    /// bit 1 is (two's complement).
    fn low_bits_pushed(self) -> (Self::Mask, Self::Mask);
    /// `self * other` as an unevaluated sum, exact barring underflow.
    fn two_product(self, other: Self) -> (Self, Self);
}

/// Added to a number of magnitude below 2^22, leaves no room for a fraction: the sum is rounded to
/// an integer, nearest even, and that integer stands in the low 22 bits of the sum's
/// representation, where this constant itself has only zeros.
pub(crate) const PUSH: f32 = 12_582_912.0; // 1.5 * 2^23

/// Loads from and stores to memory of element type `T`: widening on the way in, one rounding to
/// nearest even on the way out.
pub(crate) trait Memory<T: Element<Real = Self::Real>>: Lanes {
    /// # Safety
    /// `p` points to `N` readable elements.
    unsafe fn load(p: *const T) -> Self;
    /// A block as it is stored.
    type Packed: Copy;
    /// Rounds to nearest even.
    fn pack(self) -> Self::Packed;
    /// As [`Memory::pack`], for numbers that `T` has exactly, and for those of
    /// [`Memory::nearest`].
    #[inline(always)]
    fn pack_exact(self) -> Self::Packed {
        self.pack()
    }
    /// # Safety
    /// `p` points to `N` writable elements.
    unsafe fn put(packed: Self::Packed, p: *mut T);
    /// Stores past the caches; [`Lanes::fence`] has to follow before another thread reads.
    ///
    /// # Safety
    /// `p` points to `N` writable elements and is aligned to [`STREAM_ALIGN`] bytes.
    #[inline(always)]
    unsafe fn put_past_caches(packed: Self::Packed, p: *mut T) {
        // SAFETY: the caller's promise is stronger than what `put` asks for.
        unsafe { Self::put(packed, p) }
    }
    /// Whether two blocks are a cache line that [`Memory::put_line_past_caches`] writes at once.
    ///
    /// Lines that are written in halves leave an Intel's few buffers late: on an Emerald Rapids, a
    /// rotation alone (in C, no other tensors between) took 3.0 to 3.7 ns for 16 elements with stores of 32
    /// bytes, and 2.4 with stores of 64. In `rotate`, pairs of 32 or one of 64 made no difference.
    const LINES: bool = false;
    /// Stores two blocks past the caches.
    ///
    /// # Safety
    /// `p` points to `2 * N` writable elements and is aligned to [`LINE`] bytes.
    #[inline(always)]
    unsafe fn put_line_past_caches([a, b]: [Self::Packed; 2], p: *mut T) {
        // SAFETY: the caller's promise.
        unsafe {
            Self::put_past_caches(a, p);
            Self::put_past_caches(b, p.add(Self::N));
        }
    }

    /// How many blocks are a cache line, if [`Lanes::Line`] has such.
    const BLOCKS_OF_LINE: usize = 1;
    /// A cache line: two blocks, one behind the other, or the second of them alone if that is one.
    #[inline(always)]
    fn line(_blocks: [Self::Packed; 2]) -> Self::Line {
        Self::Line::zero()
    }

    /// Rounds and stores.
    ///
    /// # Safety
    /// `p` points to `N` writable elements.
    #[cfg(test)]
    unsafe fn store(self, p: *mut T) {
        // SAFETY: the caller's promise.
        unsafe { Self::put(self.pack(), p) }
    }
    /// Rounds to `T`, ties away from zero where that is cheaper, for [`Memory::pack_exact`]. Meant
    /// for results that are themselves approximate, so that a tie is chance.
    #[inline(always)]
    fn nearest(self) -> Self {
        self
    }
    /// Takes the block at `i` of a row, up to the row's end, into `so_far`, for
    /// [`Memory::is_far`]; at the end, maybe with elements of the row before it.
    #[inline(always)]
    fn note(_row: &[T], _i: usize, so_far: Self) -> Self {
        so_far
    }
    /// Whether a number that was noted (from zeros on) is beyond `limit`, a number of `T`, in
    /// magnitude, or NaN. Always false for lanes that have no short forms.
    #[inline(always)]
    fn is_far(_noted: Self, _limit: f32) -> bool {
        false
    }

    /// The block at `i` of a row, with `fill` past the row's end.
    #[inline(always)]
    fn read(row: &[T], i: usize, fill: T::Real) -> Self {
        if i + Self::N <= row.len() {
            // SAFETY: the row holds the `N` elements from `i`.
            unsafe { Self::load(row.as_ptr().add(i)) }
        } else {
            Self::read_end(row, i, fill)
        }
    }

    /// [`Memory::read`] of a block that the row does not hold.
    #[inline(always)]
    fn read_end(row: &[T], i: usize, fill: T::Real) -> Self {
        // SAFETY: a block holds `MAX_LANES >= N` elements.
        unsafe { Self::load(row_end(row, i, fill).as_ptr()) }
    }

    /// The block at `i` of a row, which has to hold it.
    #[inline(always)]
    fn read_whole(row: &[T], i: usize) -> Self {
        assert!(i + Self::N <= row.len());
        // SAFETY: just checked.
        unsafe { Self::load(row.as_ptr().add(i)) }
    }

    /// Writes the blocks from `i` on of a row, which has to hold them; `stream` as for
    /// [`Memory::write`]. Several at once share the look at the address.
    #[inline(always)]
    fn write_packed<const K: usize>(
        blocks: [Self::Packed; K],
        row: &mut [T],
        i: usize,
        stream: bool,
    ) {
        const { assert!(!Self::LINES || 2 * Self::N * size_of::<T>() == LINE) };
        assert!(i + K * Self::N <= row.len());
        // SAFETY: just checked; so is the alignment, as a block is a multiple of it, and two blocks are a
        // line.
        unsafe {
            let p = row.as_mut_ptr().add(i);
            if streams(p, stream) && (Self::N * size_of::<T>()).is_multiple_of(STREAM_ALIGN) {
                if Self::LINES && K.is_multiple_of(2) && (p as usize).is_multiple_of(LINE) {
                    for k in (0..K).step_by(2) {
                        let pair = [blocks[k], blocks[k + 1]];
                        Self::put_line_past_caches(pair, p.add(k * Self::N));
                    }
                    return;
                }
                for (k, block) in blocks.into_iter().enumerate() {
                    Self::put_past_caches(block, p.add(k * Self::N));
                }
            } else {
                for (k, block) in blocks.into_iter().enumerate() {
                    Self::put(block, p.add(k * Self::N));
                }
            }
        }
    }

    /// Writes the block at `i` of a row, which has to hold it; `stream` as for [`Memory::write`].
    #[inline(always)]
    fn write_whole(self, row: &mut [T], i: usize, stream: bool) {
        Self::write_packed([self.pack()], row, i, stream);
    }

    /// As [`Memory::write_whole`], for the numbers of [`Memory::pack_exact`].
    #[inline(always)]
    fn write_exact_whole(self, row: &mut [T], i: usize, stream: bool) {
        Self::write_packed([self.pack_exact()], row, i, stream);
    }

    /// As [`Memory::write`], for the numbers of [`Memory::pack_exact`].
    #[inline(always)]
    fn write_exact(self, row: &mut [T], i: usize, stream: bool) {
        Self::write_end(self.pack_exact(), row, i, stream);
    }

    /// Writes the block at `i`, a multiple of a block, of a row that has to hold it; `stream` as for
    /// [`Memory::write`]. The look at the address is one at the row's, which a loop takes once.
    #[inline(always)]
    fn write_aligned(packed: Self::Packed, row: &mut [T], i: usize, stream: bool) {
        assert!(i + Self::N <= row.len() && i.is_multiple_of(Self::N));
        let streams = streams(row.as_mut_ptr(), stream);
        // SAFETY: just checked; so is the alignment, as a block is a multiple of it.
        unsafe {
            let p = row.as_mut_ptr().add(i);
            if streams && (Self::N * size_of::<T>()).is_multiple_of(STREAM_ALIGN) {
                Self::put_past_caches(packed, p);
            } else {
                Self::put(packed, p);
            }
        }
    }

    /// Writes the block at `i` of a row, up to the row's end; past the caches if `stream` is set
    /// and the address allows it.
    #[inline(always)]
    fn write(self, row: &mut [T], i: usize, stream: bool) {
        Self::write_end(self.pack(), row, i, stream);
    }

    /// As [`Memory::write`], of a block that is packed already.
    #[inline(always)]
    fn write_end(packed: Self::Packed, row: &mut [T], i: usize, stream: bool) {
        if i + Self::N <= row.len() {
            Self::write_packed([packed], row, i, stream);
        } else {
            let mut block = [T::default(); MAX_LANES];
            // SAFETY: a block holds `MAX_LANES >= N` elements.
            unsafe { Self::put(packed, block.as_mut_ptr()) };
            write_row_end(&block, row, i);
        }
    }
}

/// Whether a store to `p` goes past the caches: where that is wished and the address allows it.
/// One test, with a mask that loops keep.
#[inline(always)]
fn streams<T>(p: *mut T, wish: bool) -> bool {
    let mask = if wish { STREAM_ALIGN - 1 } else { usize::MAX };
    p as usize & mask == 0
}

/// What a run of numbers is to lanes, for functions that are written once for rows of a tensor
/// and for scratch.
pub(crate) trait Access<L: Lanes> {
    /// Whether it is scratch in register order.
    const REGISTERS: bool;
    /// The type of each number in memory.
    type Number: Element<Real = L::Real>;
    /// The block at `i` of a run, with zeros past the run's end.
    fn read(run: &[Self::Number], i: usize) -> L;
    /// Writes the block at `i` of a run; `stream` as for [`Memory::write`].
    fn write(block: L, run: &mut [Self::Number], i: usize, stream: bool);
    /// Writes the blocks from `i` on of a run, which has to hold them, with one look at the address.
    fn write_blocks<const K: usize>(
        blocks: [L; K],
        run: &mut [Self::Number],
        i: usize,
        stream: bool,
    );

    /// [`Memory::note`] for the block at `i`, by accesses whose results are only right if it is near.
    #[inline(always)]
    fn note(_run: &[Self::Number], _i: usize, so_far: L) -> L {
        so_far
    }

    /// How many of `len` numbers a kernel should take in whole blocks of [`MAX_LANES`], in a loop
    /// of its own; shorter lanes take all numbers in the loop that goes to the end.
    #[inline(always)]
    fn whole(len: usize) -> usize {
        if L::N == MAX_LANES { len - len % MAX_LANES } else { 0 }
    }
}

/// Elements in index order.
pub(crate) struct Elements<T>(PhantomData<T>);

impl<L: Memory<T>, T: Element<Real = L::Real>> Access<L> for Elements<T> {
    const REGISTERS: bool = false;
    type Number = T;
    #[inline(always)]
    fn read(run: &[T], i: usize) -> L {
        L::read(run, i, Real::of(0.0))
    }
    #[inline(always)]
    fn write(block: L, run: &mut [T], i: usize, stream: bool) {
        block.write(run, i, stream);
    }
    #[inline(always)]
    fn write_blocks<const K: usize>(blocks: [L; K], run: &mut [T], i: usize, stream: bool) {
        // A loop, as a closure would not be inlined.
        let mut packed = [blocks[0].pack(); K];
        for k in 1..K {
            packed[k] = blocks[k].pack();
        }
        L::write_packed(packed, run, i, stream);
    }
}

/// Scratch of whole blocks in register order.
pub(crate) struct Registers;

impl<L: Lanes> Access<L> for Registers {
    const REGISTERS: bool = true;
    type Number = L::Real;
    #[inline(always)]
    fn read(run: &[L::Real], i: usize) -> L {
        L::get(run, i)
    }
    #[inline(always)]
    fn write(block: L, run: &mut [L::Real], i: usize, _stream: bool) {
        block.set(run, i);
    }
    #[inline(always)]
    fn write_blocks<const K: usize>(blocks: [L; K], run: &mut [L::Real], i: usize, _: bool) {
        for (k, block) in blocks.into_iter().enumerate() {
            block.set(run, i + k * L::N);
        }
    }
}

/// The last elements of a row, from `i` on, and `fill` behind them. Out of line, so that the
/// loops around it stay small.
#[cold]
#[inline(never)]
fn row_end<T: Element>(row: &[T], i: usize, fill: T::Real) -> [T; MAX_LANES] {
    let mut block = [T::from_real(fill); MAX_LANES];
    let end = row.get(i..).unwrap_or_default();
    block[..end.len()].copy_from_slice(end);
    block
}

/// Writes the last elements of a row, from `i` on, by two stores that overlap.
#[inline(always)]
fn write_row_end<T: Element>(block: &[T; MAX_LANES], row: &mut [T], i: usize) {
    /// The first and the last `N` elements, which are all.
    #[inline(always)]
    fn both_ends<T: Element, const N: usize>(block: &[T; MAX_LANES], row: &mut [T]) {
        let start = row.len() - N;
        row[..N].copy_from_slice(&block[..N]);
        row[start..].copy_from_slice(&block[start..][..N]);
    }
    let row = row.get_mut(i..).unwrap_or_default();
    match row.len() {
        8.. => both_ends::<T, 8>(block, row),
        4.. => both_ends::<T, 4>(block, row),
        2.. => both_ends::<T, 2>(block, row),
        1 => row[0] = block[0],
        0 => {}
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

/// Code for lanes that its type already names.
pub(crate) trait Task {
    /// What it gives.
    type Output;
    /// Does the work. Implementations are `#[inline(always)]`.
    fn run(self) -> Self::Output;
}

/// A kernel with its lanes and element type.
struct Bound<K, L, T>(K, PhantomData<(L, T)>);

impl<K, L, T> Task for Bound<K, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    K: KernelIn<T::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        self.0.run_in::<L, T>();
    }
}

/// A kernel that carries numbers of the arithmetic type `R` and so is for activations of that
/// arithmetic type only.
pub(crate) trait KernelIn<R: Real> {
    /// Does the work. Implementations are `#[inline(always)]`.
    fn run_in<L, T>(self)
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>;
}

impl<R: Real, K: Kernel> KernelIn<R> for K {
    #[inline(always)]
    fn run_in<L, T>(self)
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        self.run::<L, T>();
    }
}

/// Runs a kernel for activations of type `dtype` with the lanes of `isa`.
pub(crate) fn run<K: Kernel>(isa: Isa, dtype: DType, kernel: K) {
    match dtype.real() {
        DType::F64 => f64::run(isa, dtype, kernel),
        _ => f32::run(isa, dtype, kernel),
    }
}

/// The arithmetic types, as places that kernels are dispatched from.
pub(crate) trait Arithmetic: Real {
    /// Runs a kernel for activations of type `dtype`, whose arithmetic type is this one, with the
    /// lanes of `isa`.
    fn run<K: KernelIn<Self>>(isa: Isa, dtype: DType, kernel: K);
}

/// Enters a kernel with lanes `L` and element type `T`.
fn enter<L, T, K>(kernel: K)
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    K: KernelIn<T::Real>,
{
    L::enter(Bound::<K, L, T>(kernel, PhantomData));
}

/// Runs a kernel with the lanes of AVX2; with `VL`, compiled for AVX-512.
#[cfg(target_arch = "x86_64")]
fn run_avx2<K: KernelIn<f32>, const VL: bool>(dtype: DType, kernel: K) {
    use avx2::{ForBf16, ForF16, ForF32};
    match dtype {
        DType::F16 => enter::<ForF16<VL>, f16, K>(kernel),
        DType::BF16 => enter::<ForBf16<VL>, bf16, K>(kernel),
        _ => enter::<ForF32<VL>, f32, K>(kernel),
    }
    ForF32::<VL>::fence();
}

/// Runs a kernel with registers of 512 bits.
#[cfg(target_arch = "x86_64")]
fn run_avx512<K: KernelIn<f32>>(dtype: DType, kernel: K) {
    use avx512::{ForBf16, ForF16, ForF32};
    match dtype {
        DType::F16 => enter::<ForF16, f16, K>(kernel),
        DType::BF16 => enter::<ForBf16, bf16, K>(kernel),
        _ => enter::<ForF32, f32, K>(kernel),
    }
    ForF32::fence();
}

impl Arithmetic for f32 {
    fn run<K: KernelIn<f32>>(isa: Isa, dtype: DType, kernel: K) {
        use portable::Portable;
        match (isa, dtype) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, _) => run_avx2::<K, false>(dtype, kernel),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, _) => run_avx2::<K, true>(dtype, kernel),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Wide, _) => run_avx512(dtype, kernel),
            (_, DType::F16) => enter::<Portable, f16, K>(kernel),
            (_, DType::BF16) => enter::<Portable, bf16, K>(kernel),
            _ => enter::<Portable, f32, K>(kernel),
        }
    }
}

/// f64, which is there for checking, is the same plain code for every instruction set.
impl Arithmetic for f64 {
    fn run<K: KernelIn<f64>>(_isa: Isa, _dtype: DType, kernel: K) {
        enter::<portable64::Portable64, f64, K>(kernel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the block at `i` of a row, and writes it to another row.
    struct Block<'a> {
        row: &'a [f64],
        i: usize,
        fill: f64,
        read: &'a mut Vec<f64>,
        written: &'a mut Vec<f64>,
    }

    impl Kernel for Block<'_> {
        #[inline(always)]
        fn run<L, T>(self)
        where
            T: Element,
            L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
        {
            let numbers = |row: &[T]| row.iter().map(|x| x.to_f64()).collect();
            let row: Vec<T> = self.row.iter().map(|&x| T::from_f64(x)).collect();
            let block: L = L::read(&row, self.i, Real::of(self.fill));
            let mut all = [T::default(); MAX_LANES];
            // SAFETY: a block holds `MAX_LANES >= N` elements.
            unsafe { block.store(all.as_mut_ptr()) };
            *self.read = numbers(&all[..L::N]);
            let mut to = vec![T::from_f64(-1.0); row.len()];
            <L as Memory<T>>::write(block, &mut to, self.i, false);
            *self.written = numbers(&to);
        }
    }

    /// Sums of several blocks together, and of each by itself.
    struct Sums<'a>(&'a mut Vec<(f64, f64)>);

    impl Kernel for Sums<'_> {
        #[inline(always)]
        fn run<L, T>(self)
        where
            T: Element,
            L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
        {
            // The order of additions shows: the magnitudes of neighbours differ, and their signs.
            let number = |i: usize| {
                let size = 1.5f64.powi((i * 7 % 23) as i32);
                Real::of(if i.is_multiple_of(3) { -size } else { size + i as f64 * 1e-3 })
            };
            let all: Vec<T::Real> = (0..19 * L::N).map(number).collect();
            let blocks: Vec<L> = (0..19).map(|k| L::get(&all, k * L::N)).collect();
            let mut sums: [T::Real; 19] = [Real::of(0.0); 19];
            L::reduce_add_each(&blocks, &mut sums);
            let each = blocks.iter().zip(sums);
            self.0.extend(each.map(|(b, sum)| (b.reduce_add().to_f64(), sum.to_f64())));
        }
    }

    #[test]
    fn sums_of_blocks_are_the_same_together() {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            for isa in Isa::available() {
                let mut sums = Vec::new();
                run(isa, dtype, Sums(&mut sums));
                assert_eq!(sums.len(), 19);
                assert!(sums.iter().all(|(one, other)| one == other), "{isa} {dtype} {sums:?}");
            }
        }
    }

    /// Reads each block of rows that end where readable memory does.
    #[cfg(target_os = "linux")]
    struct AtTheEdge {
        /// The first byte behind.
        edge: *const u8,
        len: usize,
    }

    #[cfg(target_os = "linux")]
    impl Kernel for AtTheEdge {
        #[inline(always)]
        fn run<L, T>(self)
        where
            T: Element,
            L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
        {
            /// Rows of zeros, so that blocks are zeros and then `fill`.
            #[inline(always)]
            fn read_all<L: Lanes<Real = T::Real> + Memory<T>, T: Element>(
                edge: *const u8,
                len: usize,
            ) {
                // SAFETY: the page before the edge is readable, and any bits are a number.
                let row = unsafe { std::slice::from_raw_parts(edge.cast::<T>().sub(len), len) };
                for i in 0..len + 3 {
                    let noted = L::note(row, i, L::splat(Real::of(0.0)));
                    assert!(!L::is_far(noted, 1.0));
                    let block = L::read(row, i, Real::of(1.0));
                    let outside = (i + L::N).saturating_sub(len).min(L::N);
                    assert_eq!(block.reduce_add().to_f64(), outside as f64, "at {i} of {len}");
                }
            }
            read_all::<L, T>(self.edge, self.len);
            read_all::<L, T::Real>(self.edge, self.len);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn nothing_behind_a_row_is_read() {
        // SAFETY: two new pages, of which the second may not be touched from here on.
        let edge = unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            let map = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let both = libc::PROT_READ | libc::PROT_WRITE;
            let start = libc::mmap(std::ptr::null_mut(), 2 * page, both, map, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            let edge = start.cast::<u8>().add(page);
            assert_eq!(libc::mprotect(edge.cast(), page, libc::PROT_NONE), 0);
            edge
        };
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            for isa in Isa::available() {
                for len in 0..=50 {
                    run(isa, dtype, AtTheEdge { edge, len });
                }
            }
        }
    }

    #[test]
    fn blocks_end_where_their_rows_do() {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            for isa in Isa::available() {
                for len in 0..=50 {
                    let row: Vec<f64> = (1..=len).map(f64::from).collect();
                    for i in 0..row.len() + 3 {
                        let (mut read, mut written) = (Vec::new(), Vec::new());
                        let kernel = Block {
                            row: &row,
                            i,
                            fill: -7.0,
                            read: &mut read,
                            written: &mut written,
                        };
                        run(isa, dtype, kernel);
                        for (k, &x) in read.iter().enumerate() {
                            let want = row.get(i + k).copied().unwrap_or(-7.0);
                            assert_eq!(x, want, "{dtype} {isa}: {k} of the block at {i} of {len}");
                        }
                        for (k, &x) in written.iter().enumerate() {
                            let inside = (i..i + read.len()).contains(&k);
                            let want = if inside { row[k] } else { -1.0 };
                            assert_eq!(x, want, "{dtype} {isa}: {k} of {len}, written at {i}");
                        }
                    }
                }
            }
        }
    }
}
