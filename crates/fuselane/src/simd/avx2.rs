//! AVX2 + FMA + F16C: sixteen f32 in two registers; and the same lanes where AVX-512 is there too.
//!
//! With `VL`, code is compiled for AVX-512 as well (F, BW, DQ, VL): still registers of 256 bits, but 32
//! of them instead of 16, so that constants and sums stay in them, and loads that leave out what is not
//! there. Registers of 512 bits were no faster on a Zen 4, which works on them in halves (see
//! docs/performance.md).
//!
//! For f32 and f16, the first register holds elements 0..8 and the second 8..16. For bf16, the first
//! holds the elements of even index and the second those of odd index: they are then widened by a
//! shift or a mask and packed by a blend, without a shuffle.

use std::arch::x86_64::*;
use std::hint::black_box;
use std::mem::MaybeUninit;

use half::{bf16, f16};

use super::{F32Lanes, Lanes, Memory, Task, row_end};
use crate::dtype::Element;

#[derive(Clone, Copy)]
pub(crate) struct Avx2<const SPLIT: bool, const STORED_BITS: u32, const VL: bool>(__m256, __m256);

pub(crate) type ForF32<const VL: bool> = Avx2<false, 24, VL>;
pub(crate) type ForF16<const VL: bool> = Avx2<false, 11, VL>;
pub(crate) type ForBf16<const VL: bool> = Avx2<true, 8, VL>;

/// The representations of 2^(k/8), less what k adds when it is shifted in.
pub(super) static EIGHTHS: [u32; 8] = [
    0x3F80_0F5E,
    0x3F7B_A684,
    0x3F78_4A36,
    0x3F76_12C4,
    0x3F75_1AAE,
    0x3F75_7EDD,
    0x3F77_5ED5,
    0x3F7A_DCF6,
];

/// Calls an intrinsic.
///
/// SAFETY of every use: the lanes of this file are only made by kernels that `super::run` enters
/// after `Isa::Avx2` was found available, so the CPU has AVX2, FMA and F16C; or, with `VL`, after
/// `Isa::Avx512` was, so it has F, BW, DQ and VL of AVX-512 besides. Intrinsics that touch memory
/// are used under the pointer promises of their caller, or within the slice that they were given: of
/// loads with a mask, lanes whose bit is clear are neither read nor do they fault.
macro_rules! x86 {
    ($($call:tt)*) => {{
        #[allow(clippy::undocumented_unsafe_blocks)]
        unsafe { $($call)* }
    }};
}

/// Has the frame of the function that this is inlined into aligned for whole registers.
///
/// Registers that a loop has no room for go to the stack and come back. By itself, the compiler
/// aligns the frame to 16 bytes only, and it is the caller's depth that decides whether such a register
/// lies across two cache lines. A load from there has to wait until its store is done, and that waits for
/// the results before it, which are on their way to memory: by that chance, whole calls took up to
/// three times as long. (`black_box` promises nothing; without its effect, only speed is lost.)
#[inline(always)]
pub(super) fn align_frame<Register>() {
    let mut register = MaybeUninit::<Register>::uninit();
    black_box(register.as_mut_ptr());
}

impl<const SPLIT: bool, const STORED_BITS: u32, const VL: bool> Lanes
    for Avx2<SPLIT, STORED_BITS, VL>
{
    type Real = f32;
    type Mask = (__m256, __m256);
    type Line = ();
    const N: usize = 16;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        let v = x86!(_mm256_set1_ps(value));
        Self(v, v)
    }
    #[inline(always)]
    unsafe fn load_raw(p: *const f32) -> Self {
        x86!(Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))))
    }
    #[inline(always)]
    unsafe fn store_raw(self, p: *mut f32) {
        x86!({
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        })
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        x86!(Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        x86!(Self(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        x86!(Self(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        x86!(Self(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        x86!(Self(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)))
    }
    #[inline(always)]
    fn neg(self) -> Self {
        x86!({
            let sign = _mm256_set1_ps(-0.0);
            Self(_mm256_xor_ps(self.0, sign), _mm256_xor_ps(self.1, sign))
        })
    }
    #[inline(always)]
    fn abs(self) -> Self {
        x86!({
            let sign = _mm256_set1_ps(-0.0);
            Self(_mm256_andnot_ps(sign, self.0), _mm256_andnot_ps(sign, self.1))
        })
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        x86!(Self(
            _mm256_fmadd_ps(self.0, factor.0, term.0),
            _mm256_fmadd_ps(self.1, factor.1, term.1)
        ))
    }
    #[inline(always)]
    fn neg_mul_add(self, factor: Self, term: Self) -> Self {
        x86!(Self(
            _mm256_fnmadd_ps(self.0, factor.0, term.0),
            _mm256_fnmadd_ps(self.1, factor.1, term.1)
        ))
    }
    #[inline(always)]
    fn lt(self, other: Self) -> Self::Mask {
        x86!((
            _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0),
            _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, other.1)
        ))
    }
    #[inline(always)]
    fn le(self, other: Self) -> Self::Mask {
        x86!((
            _mm256_cmp_ps::<_CMP_LE_OQ>(self.0, other.0),
            _mm256_cmp_ps::<_CMP_LE_OQ>(self.1, other.1)
        ))
    }
    #[inline(always)]
    fn is_nan(self) -> Self::Mask {
        x86!((
            _mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0),
            _mm256_cmp_ps::<_CMP_UNORD_Q>(self.1, self.1)
        ))
    }
    #[inline(always)]
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self {
        x86!(Self(_mm256_blendv_ps(no.0, yes.0, mask.0), _mm256_blendv_ps(no.1, yes.1, mask.1)))
    }
    #[inline(always)]
    fn any(mask: Self::Mask) -> bool {
        x86!(_mm256_movemask_ps(_mm256_or_ps(mask.0, mask.1)) != 0)
    }
    #[inline(always)]
    fn enter<K: Task>(task: K) -> K::Output {
        /// One function for each task: the compiler shares registers better among less code. It
        /// takes two, since rustc forgets `inline(never)` beside `target_feature` (1.95 does); the
        /// outer one keeps it, and lacks the features that inlining the other would need.
        #[inline(never)]
        fn apart<K: Task, const VL: bool>(task: K) -> K::Output {
            x86!(if VL { compiled_for_vl(task) } else { compiled(task) })
        }
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<K: Task>(task: K) -> K::Output {
            align_frame::<__m256>();
            task.run()
        }
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
        fn compiled_for_vl<K: Task>(task: K) -> K::Output {
            align_frame::<__m256>();
            task.run()
        }
        apart::<K, VL>(task)
    }
    #[inline(always)]
    fn swap_pairs(self) -> Self {
        if SPLIT {
            return Self(self.1, self.0);
        }
        x86!(Self(_mm256_permute_ps::<0xB1>(self.0), _mm256_permute_ps::<0xB1>(self.1)))
    }
    #[inline(always)]
    fn reduce_add(self) -> f32 {
        x86!({
            let eight = _mm256_add_ps(self.0, self.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }
    /// Eight blocks at once: the same additions in the same order, each for two, four or eight
    /// blocks together.
    #[inline(always)]
    fn reduce_add_each(blocks: &[Self], sums: &mut [f32]) {
        let (eights, rest) = blocks.as_chunks::<8>();
        let (sums, rest_sums) = sums.split_at_mut(8 * eights.len());
        for (blocks, sums) in eights.iter().zip(sums.as_chunks_mut::<8>().0) {
            x86!({
                let halves = |a: Self, b: Self| {
                    let (a, b) = (_mm256_add_ps(a.0, a.1), _mm256_add_ps(b.0, b.1));
                    let low = _mm256_permute2f128_ps::<0x20>(a, b);
                    _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b))
                };
                let quarters = |a: __m256, b: __m256| {
                    let low = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
                    _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_10_11_10>(a, b))
                };
                let [a, b, c, d, e, f, g, h] = *blocks;
                // Each half of a register is about every other block.
                let (four, other) =
                    (quarters(halves(a, e), halves(b, f)), quarters(halves(c, g), halves(d, h)));
                let low = _mm256_shuffle_ps::<0b10_00_10_00>(four, other);
                let high = _mm256_shuffle_ps::<0b11_01_11_01>(four, other);
                _mm256_storeu_ps(sums.as_mut_ptr(), _mm256_add_ps(low, high));
            });
        }
        for (block, sum) in rest.iter().zip(rest_sums) {
            *sum = block.reduce_add();
        }
    }
    #[inline(always)]
    fn reduce_max(self) -> f32 {
        let eight = Self(self.0, self.0).max_nan(Self(self.1, self.1)).0;
        let half = x86!(_mm256_permute2f128_ps::<0x01>(eight, eight));
        let four = Self(eight, eight).max_nan(Self(half, half)).0;
        let swapped = x86!(_mm256_permute_ps::<0x4E>(four));
        let two = Self(four, four).max_nan(Self(swapped, swapped)).0;
        let swapped = x86!(_mm256_permute_ps::<0xB1>(two));
        let one = Self(two, two).max_nan(Self(swapped, swapped)).0;
        x86!(_mm256_cvtss_f32(one))
    }
    #[inline(always)]
    fn fence() {
        x86!(_mm_sfence())
    }
    #[inline(always)]
    fn prefetch<T>(p: *const T) {
        x86!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
    #[inline(always)]
    fn prefetch_far<T>(p: *const T) {
        x86!(_mm_prefetch::<_MM_HINT_T1>(p.cast()))
    }
}

impl<const SPLIT: bool, const STORED_BITS: u32, const VL: bool> F32Lanes
    for Avx2<SPLIT, STORED_BITS, VL>
{
    const FUSED: bool = true;
    const STORED_BITS: u32 = STORED_BITS;

    #[inline(always)]
    fn reciprocal_estimate(self) -> Self {
        x86!(Self(_mm256_rcp_ps(self.0), _mm256_rcp_ps(self.1)))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        x86!(Self(_mm256_min_ps(self.0, other.0), _mm256_min_ps(self.1, other.1)))
    }
    #[inline(always)]
    fn copysign(self, sign: Self) -> Self {
        x86!({
            let mask = _mm256_set1_ps(-0.0);
            Self(
                _mm256_or_ps(_mm256_andnot_ps(mask, self.0), _mm256_and_ps(mask, sign.0)),
                _mm256_or_ps(_mm256_andnot_ps(mask, self.1), _mm256_and_ps(mask, sign.1)),
            )
        })
    }
    #[inline(always)]
    fn select_sign(self, negative: Self, positive: Self) -> Self {
        Self::select((self.0, self.1), negative, positive)
    }
    #[inline(always)]
    fn exp2_pushed(self) -> Self {
        let (a, b) = self.shifted::<23>();
        Self(a, b)
    }
    #[inline(always)]
    fn exp2_eighths(self) -> Self {
        x86!({
            let table = _mm256_loadu_si256(EIGHTHS.as_ptr().cast());
            let (a, b) = (_mm256_castps_si256(self.0), _mm256_castps_si256(self.1));
            let fraction_a = _mm256_permutevar8x32_epi32(table, a);
            let fraction_b = _mm256_permutevar8x32_epi32(table, b);
            Self(
                _mm256_castsi256_ps(_mm256_add_epi32(fraction_a, _mm256_slli_epi32::<20>(a))),
                _mm256_castsi256_ps(_mm256_add_epi32(fraction_b, _mm256_slli_epi32::<20>(b))),
            )
        })
    }
    #[inline(always)]
    fn low_bits_pushed(self) -> (Self::Mask, Self::Mask) {
        // `select` reads the sign bit of each lane only, so a shift makes the mask.
        (self.shifted::<31>(), self.shifted::<30>())
    }
    #[inline(always)]
    fn two_product(self, other: Self) -> (Self, Self) {
        let high = self.mul(other);
        (high, self.mul_add(other, high.neg()))
    }
}

impl<const SPLIT: bool, const STORED_BITS: u32, const VL: bool> Avx2<SPLIT, STORED_BITS, VL> {
    /// The representations, shifted to the left.
    #[inline(always)]
    fn shifted<const BITS: i32>(self) -> (__m256, __m256) {
        x86!((
            _mm256_castsi256_ps(_mm256_slli_epi32::<BITS>(_mm256_castps_si256(self.0))),
            _mm256_castsi256_ps(_mm256_slli_epi32::<BITS>(_mm256_castps_si256(self.1))),
        ))
    }
}

impl<const SPLIT: bool, const STORED_BITS: u32, const VL: bool> Memory<f32>
    for Avx2<SPLIT, STORED_BITS, VL>
{
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        let Self(a, b) = unsafe { Self::load_raw(p) };
        if SPLIT { split(a, b) } else { Self(a, b) }
    }
    #[inline(always)]
    fn read_end(row: &[f32], i: usize, fill: f32) -> Self {
        if !VL {
            // SAFETY: a block holds sixteen.
            return unsafe { Self::load(row_end(row, i, fill).as_ptr()) };
        }
        let (inside, p) = (inside(row, i), row.as_ptr().wrapping_add(i));
        let (a, b) = x86!({
            let fill = _mm256_set1_ps(fill);
            let upper = p.wrapping_add(8);
            (
                _mm256_mask_loadu_ps(fill, inside as __mmask8, p),
                _mm256_mask_loadu_ps(fill, (inside >> 8) as __mmask8, upper),
            )
        });
        if SPLIT { split(a, b) } else { Self(a, b) }
    }
    type Packed = Self;
    #[inline(always)]
    fn pack(self) -> Self {
        if SPLIT { merge(self.0, self.1) } else { self }
    }
    #[inline(always)]
    unsafe fn put(packed: Self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { packed.store_raw(p) }
    }
    #[inline(always)]
    unsafe fn put_past_caches(packed: Self, p: *mut f32) {
        x86!({
            _mm256_stream_ps(p, packed.0);
            _mm256_stream_ps(p.add(8), packed.1);
        })
    }
}

/// From index order to even and odd indices.
#[inline(always)]
fn split<const SPLIT: bool, const STORED_BITS: u32, const VL: bool>(
    a: __m256,
    b: __m256,
) -> Avx2<SPLIT, STORED_BITS, VL> {
    #[inline(always)]
    fn untwist(v: __m256) -> __m256 {
        x86!(_mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v))))
    }
    x86!(Avx2(
        untwist(_mm256_shuffle_ps::<0b10_00_10_00>(a, b)),
        untwist(_mm256_shuffle_ps::<0b11_01_11_01>(a, b)),
    ))
}

/// From even and odd indices back to index order.
#[inline(always)]
fn merge<const SPLIT: bool, const STORED_BITS: u32, const VL: bool>(
    even: __m256,
    odd: __m256,
) -> Avx2<SPLIT, STORED_BITS, VL> {
    x86!({
        let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
        Avx2(_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high))
    })
}

/// [`Memory::note`] for 16-bit floats, as integers, sixteen at once: magnitudes are in the order of
/// their representations.
#[inline(always)]
fn note<T: Element<Real = f32>, const SPLIT: bool, const STORED_BITS: u32, const VL: bool>(
    row: &[T],
    i: usize,
    so_far: Avx2<SPLIT, STORED_BITS, VL>,
) -> Avx2<SPLIT, STORED_BITS, VL> {
    const { assert!(size_of::<T>() == 2) };
    let end;
    let block = if i + 16 <= row.len() {
        x86!(_mm256_loadu_si256(row.as_ptr().add(i).cast()))
    } else if VL {
        end_of_row::<T, VL>(row, i, T::default())
    } else if row.len() >= 16 {
        // Some are noted twice.
        x86!(_mm256_loadu_si256(row.as_ptr().add(row.len() - 16).cast()))
    } else {
        end = row_end(row, i, 0.0);
        x86!(_mm256_loadu_si256(end.as_ptr().cast()))
    };
    x86!({
        let magnitudes = _mm256_and_si256(block, _mm256_set1_epi16(0x7FFF));
        let largest = _mm256_max_epi16(magnitudes, _mm256_castps_si256(so_far.0));
        Avx2(_mm256_castsi256_ps(largest), so_far.1)
    })
}

/// [`Memory::is_far`] for what [`note`] gives.
#[inline(always)]
fn is_far<const SPLIT: bool, const STORED_BITS: u32, const VL: bool>(
    noted: Avx2<SPLIT, STORED_BITS, VL>,
    limit: u16,
) -> bool {
    x86!({
        let limit = _mm256_set1_epi16(limit.cast_signed());
        let far = _mm256_cmpgt_epi16(_mm256_castps_si256(noted.0), limit);
        _mm256_movemask_epi8(far) != 0
    })
}

/// Which of the sixteen elements from `i` on a row has, as bits: those that a load with this mask reads.
#[inline(always)]
pub(super) fn inside<T>(row: &[T], i: usize) -> __mmask16 {
    let count = row.len().saturating_sub(i).min(16);
    ((1u32 << count) - 1) as __mmask16
}

/// The last elements of a row of 16-bit numbers, from `i` on, and `fill` behind them. Without `VL`
/// the row has sixteen or more: those of its last sixteen that come before `i` are shifted out.
///
/// All in registers. What goes through memory has to wait until its stores are done, and those
/// before them: a row's results, which may be on their way to memory.
#[inline(always)]
fn end_of_row<T: Element, const VL: bool>(row: &[T], i: usize, fill: T) -> __m256i {
    const { assert!(size_of::<T>() == 2) };
    if VL {
        let (inside, p) = (inside(row, i), row.as_ptr().wrapping_add(i));
        return x86!({
            let fill = _mm256_set1_epi16(std::mem::transmute_copy::<T, i16>(&fill));
            _mm256_mask_loadu_epi16(fill, inside, p.cast())
        });
    }
    static INSIDE: [i16; 32] = {
        let (mut inside, mut i) = ([0; 32], 0);
        while i < 16 {
            inside[i] = -1;
            i += 1;
        }
        inside
    };
    assert!(row.len() >= 16);
    let skipped = (i + 16).saturating_sub(row.len()).min(16);
    x86!({
        let last = _mm256_loadu_si256(row.as_ptr().add(row.len() - 16).cast());
        // Pairs from the first one that is not skipped on; of an odd number, halves of two pairs.
        let pairs = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let pairs = _mm256_add_epi32(pairs, _mm256_set1_epi32(skipped as i32 / 2));
        let next = _mm256_add_epi32(pairs, _mm256_set1_epi32(1));
        let odd = 16 * (skipped as i32 % 2);
        let low =
            _mm256_srl_epi32(_mm256_permutevar8x32_epi32(last, pairs), _mm_cvtsi32_si128(odd));
        let high =
            _mm256_sll_epi32(_mm256_permutevar8x32_epi32(last, next), _mm_cvtsi32_si128(32 - odd));
        let inside = _mm256_loadu_si256(INSIDE[skipped..].as_ptr().cast());
        let fill = std::mem::transmute_copy::<T, i16>(&fill);
        _mm256_blendv_epi8(_mm256_set1_epi16(fill), _mm256_or_si256(low, high), inside)
    })
}

impl<const VL: bool> Memory<f16> for ForF16<VL> {
    #[inline(always)]
    unsafe fn load(p: *const f16) -> Self {
        x86!(Self::widen(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    fn read_end(row: &[f16], i: usize, fill: f32) -> Self {
        if VL || row.len() >= 16 {
            // The constant form, as the other asks the CPU what it has.
            return Self::widen(end_of_row::<_, VL>(row, i, f16::from_f32_const(fill)));
        }
        // SAFETY: a block holds sixteen.
        unsafe { Self::load(row_end(row, i, fill).as_ptr()) }
    }
    type Packed = __m256i;
    #[inline(always)]
    fn pack(self) -> __m256i {
        self.to_f16()
    }
    #[inline(always)]
    unsafe fn put(packed: __m256i, p: *mut f16) {
        x86!(_mm256_storeu_si256(p.cast(), packed))
    }
    #[inline(always)]
    unsafe fn put_past_caches(packed: __m256i, p: *mut f16) {
        x86!(_mm256_stream_si256(p.cast(), packed))
    }
    #[inline(always)]
    fn note(row: &[f16], i: usize, so_far: Self) -> Self {
        note(row, i, so_far)
    }
    #[inline(always)]
    fn is_far(noted: Self, limit: f32) -> bool {
        is_far(noted, f16::from_f32(limit).to_bits())
    }
}

impl<const VL: bool> ForF16<VL> {
    #[inline(always)]
    fn widen(block: __m256i) -> Self {
        x86!(Self(
            _mm256_cvtph_ps(_mm256_castsi256_si128(block)),
            _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(block)),
        ))
    }

    #[inline(always)]
    fn to_f16(self) -> __m256i {
        x86!(_mm256_set_m128i(
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
        ))
    }
}

impl<const VL: bool> Memory<bf16> for ForBf16<VL> {
    #[inline(always)]
    unsafe fn load(p: *const bf16) -> Self {
        x86!(Self::widen(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    fn read_end(row: &[bf16], i: usize, fill: f32) -> Self {
        if VL || row.len() >= 16 {
            return Self::widen(end_of_row::<_, VL>(row, i, bf16::from_f32(fill)));
        }
        // SAFETY: a block holds sixteen.
        unsafe { Self::load(row_end(row, i, fill).as_ptr()) }
    }
    type Packed = __m256i;
    #[inline(always)]
    fn pack(self) -> __m256i {
        self.to_bf16()
    }
    #[inline(always)]
    unsafe fn put(packed: __m256i, p: *mut bf16) {
        x86!(_mm256_storeu_si256(p.cast(), packed))
    }
    #[inline(always)]
    unsafe fn put_past_caches(packed: __m256i, p: *mut bf16) {
        x86!(_mm256_stream_si256(p.cast(), packed))
    }
    #[inline(always)]
    fn pack_exact(self) -> __m256i {
        self.upper_halves()
    }
    /// Half a unit more, so that the upper halves are the rounded number. NaNs as in `to_bf16`.
    #[inline(always)]
    fn nearest(self) -> Self {
        x86!({
            let half = _mm256_set1_epi32(0x8000);
            let (even, odd) = (_mm256_castps_si256(self.0), _mm256_castps_si256(self.1));
            Self(
                _mm256_castsi256_ps(_mm256_add_epi32(even, half)),
                _mm256_castsi256_ps(_mm256_add_epi32(odd, half)),
            )
        })
    }
    #[inline(always)]
    fn note(row: &[bf16], i: usize, so_far: Self) -> Self {
        note(row, i, so_far)
    }
    #[inline(always)]
    fn is_far(noted: Self, limit: f32) -> bool {
        is_far(noted, bf16::from_f32(limit).to_bits())
    }
}

impl<const VL: bool> ForBf16<VL> {
    #[inline(always)]
    fn widen(pairs: __m256i) -> Self {
        x86!({
            let high = _mm256_set1_epi32(0xFFFF_0000_u32 as i32);
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
                _mm256_castsi256_ps(_mm256_and_si256(pairs, high)),
            )
        })
    }

    /// The upper halves of the representations, in index order.
    #[inline(always)]
    fn upper_halves(self) -> __m256i {
        x86!({
            let (even, odd) = (_mm256_castps_si256(self.0), _mm256_castps_si256(self.1));
            _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(even), odd)
        })
    }

    /// Nearest even by integer addition. A NaN stays one as long as its payload leaves the carry
    /// room, which holds for those that bf16 inputs bring (their low half is zero) and for the one
    /// that the CPU makes (0xFFC00000); parameters of wider types are made so when they are
    /// widened (`ops::parameter`).
    ///
    /// Both halves of the representations are gathered first, so that sixteen are rounded at once:
    /// up where the lower half is above the middle, or at it and the upper half is odd.
    #[inline(always)]
    fn to_bf16(self) -> __m256i {
        x86!({
            let (even, odd) = (_mm256_castps_si256(self.0), _mm256_castps_si256(self.1));
            let upper = self.upper_halves();
            let lower = _mm256_blend_epi16::<0b1010_1010>(even, _mm256_slli_epi32::<16>(odd));
            let is_even = _mm256_andnot_si256(upper, _mm256_set1_epi16(1));
            let up = _mm256_srli_epi16::<15>(_mm256_subs_epu16(lower, is_even));
            _mm256_add_epi16(upper, up)
        })
    }
}
