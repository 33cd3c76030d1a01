//! AVX-512 with registers of 512 bits: sixteen f32 in one.
//!
//! Half the instructions of `avx2.rs`, for CPUs whose pipes are as wide as these registers; a CPU
//! that works on them in halves is better off with the other file (see `isa.rs` and
//! docs/performance.md).
//!
//! For f32 and f16 the lanes are in index order. For bf16, the lower half of the register holds the elements of
//! even index and the upper half those of odd index. As the sixteen are loaded into both halves of the
//! register, which costs nothing, one shuffle within 16 bytes widens them; one permutation of bytes packs
//! them.

use std::arch::x86_64::*;
use std::ops::Range;

use half::{bf16, f16};

use super::avx2::{EIGHTHS, align_frame, inside};
use super::{F32Lanes, LINE, Lanes, Line, Memory, Task};
use crate::dtype::Element;

#[derive(Clone, Copy)]
pub(crate) struct Avx512<const SPLIT: bool, const STORED_BITS: u32>(__m512);

pub(crate) type ForF32 = Avx512<false, 24>;
pub(crate) type ForF16 = Avx512<false, 11>;
pub(crate) type ForBf16 = Avx512<true, 8>;

/// Calls an intrinsic.
///
/// SAFETY of every use: the lanes of this file are only made by kernels that `super::run` enters
/// after `Isa::Avx512Wide` was found available, so the CPU has AVX2, FMA, F16C, and F, BW, DQ, VL and
/// VBMI of AVX-512. Intrinsics that touch memory are used under the pointer promises of their caller, or
/// within the slice that they were given: of loads with a mask, lanes whose bit is clear are
/// neither read nor do they fault.
macro_rules! x86 {
    ($($call:tt)*) => {{
        #[allow(clippy::undocumented_unsafe_blocks)]
        unsafe { $($call)* }
    }};
}

impl<const SPLIT: bool, const STORED_BITS: u32> Lanes for Avx512<SPLIT, STORED_BITS> {
    type Real = f32;
    type Mask = __mmask16;
    type Line = WideLine;
    const N: usize = 16;
    const MANY_REGISTERS: bool = true;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        x86!(Self(_mm512_set1_ps(value)))
    }
    #[inline(always)]
    unsafe fn load_raw(p: *const f32) -> Self {
        x86!(Self(_mm512_loadu_ps(p)))
    }
    #[inline(always)]
    unsafe fn store_raw(self, p: *mut f32) {
        x86!(_mm512_storeu_ps(p, self.0))
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        x86!(Self(_mm512_add_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        x86!(Self(_mm512_sub_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        x86!(Self(_mm512_mul_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        x86!(Self(_mm512_div_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        x86!(Self(_mm512_max_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn neg(self) -> Self {
        x86!(Self(_mm512_xor_ps(self.0, _mm512_set1_ps(-0.0))))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        x86!(Self(_mm512_andnot_ps(_mm512_set1_ps(-0.0), self.0)))
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        x86!(Self(_mm512_fmadd_ps(self.0, factor.0, term.0)))
    }
    #[inline(always)]
    fn neg_mul_add(self, factor: Self, term: Self) -> Self {
        x86!(Self(_mm512_fnmadd_ps(self.0, factor.0, term.0)))
    }
    #[inline(always)]
    fn lt(self, other: Self) -> __mmask16 {
        x86!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0))
    }
    #[inline(always)]
    fn le(self, other: Self) -> __mmask16 {
        x86!(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.0, other.0))
    }
    #[inline(always)]
    fn is_nan(self) -> __mmask16 {
        x86!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0))
    }
    #[inline(always)]
    fn select(mask: __mmask16, yes: Self, no: Self) -> Self {
        x86!(Self(_mm512_mask_blend_ps(mask, no.0, yes.0)))
    }
    #[inline(always)]
    fn any(mask: __mmask16) -> bool {
        mask != 0
    }
    #[inline(always)]
    fn enter<K: Task>(task: K) -> K::Output {
        /// As in `avx2.rs`: rustc forgets `inline(never)` beside `target_feature`.
        #[inline(never)]
        fn apart<K: Task>(task: K) -> K::Output {
            x86!(compiled(task))
        }
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
        fn compiled<K: Task>(task: K) -> K::Output {
            align_frame::<__m512>();
            task.run()
        }
        apart(task)
    }
    #[inline(always)]
    fn swap_pairs(self) -> Self {
        if SPLIT {
            return x86!(Self(_mm512_shuffle_f32x4::<0b01_00_11_10>(self.0, self.0)));
        }
        x86!(Self(_mm512_permute_ps::<0xB1>(self.0)))
    }
    #[inline(always)]
    fn reduce_add(self) -> f32 {
        let (low, high) = self.halves();
        x86!({
            let eight = _mm256_add_ps(low, high);
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
                // Of each register, the sums of its halves, then of the halves of those: four
                // numbers are left of each of four blocks.
                let halves = |a: Self, b: Self| {
                    let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a.0, b.0);
                    _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a.0, b.0))
                };
                let quarters = |a: __m512, b: __m512| {
                    let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                    _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
                };
                let [a, b, c, d, e, f, g, h] = *blocks;
                let four = quarters(halves(a, b), halves(c, d));
                let other = quarters(halves(e, f), halves(g, h));
                let low = _mm512_shuffle_ps::<0b01_00_01_00>(four, other);
                let two = _mm512_add_ps(low, _mm512_shuffle_ps::<0b11_10_11_10>(four, other));
                // In each quarter of the register, a pair of one block and one of its counterpart.
                let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
                let order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
                let one = _mm512_castps512_ps256(_mm512_permutexvar_ps(order, one));
                _mm256_storeu_ps(sums.as_mut_ptr(), one);
            });
        }
        for (block, sum) in rest.iter().zip(rest_sums) {
            *sum = block.reduce_add();
        }
    }
    #[inline(always)]
    fn reduce_max(self) -> f32 {
        let mut all = self;
        all = all.max_nan(x86!(Self(_mm512_shuffle_f32x4::<0b01_00_11_10>(all.0, all.0))));
        all = all.max_nan(x86!(Self(_mm512_shuffle_f32x4::<0b10_11_00_01>(all.0, all.0))));
        all = all.max_nan(x86!(Self(_mm512_permute_ps::<0x4E>(all.0))));
        all = all.max_nan(x86!(Self(_mm512_permute_ps::<0xB1>(all.0))));
        x86!(_mm512_cvtss_f32(all.0))
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

impl<const SPLIT: bool, const STORED_BITS: u32> F32Lanes for Avx512<SPLIT, STORED_BITS> {
    const FUSED: bool = true;
    const STORED_BITS: u32 = STORED_BITS;

    #[inline(always)]
    fn reciprocal_estimate(self) -> Self {
        x86!(Self(_mm512_rcp14_ps(self.0)))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        x86!(Self(_mm512_min_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn copysign(self, sign: Self) -> Self {
        x86!({
            let (mask, a, b) = (
                _mm512_set1_epi32(i32::MIN),
                _mm512_castps_si512(sign.0),
                _mm512_castps_si512(self.0),
            );
            // The second where the first has a bit, the third elsewhere.
            Self(_mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xCA>(mask, a, b)))
        })
    }
    #[inline(always)]
    fn select_sign(self, negative: Self, positive: Self) -> Self {
        let negative_lanes = x86!(_mm512_movepi32_mask(_mm512_castps_si512(self.0)));
        Self::select(negative_lanes, negative, positive)
    }
    #[inline(always)]
    fn exp2_pushed(self) -> Self {
        x86!(Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(self.0)))))
    }
    #[inline(always)]
    fn exp2_eighths(self) -> Self {
        x86!({
            // Twice, as sixteen are chosen from.
            let table = _mm512_broadcast_i64x4(_mm256_loadu_si256(EIGHTHS.as_ptr().cast()));
            let pushed = _mm512_castps_si512(self.0);
            let fraction = _mm512_permutexvar_epi32(pushed, table);
            Self(_mm512_castsi512_ps(_mm512_add_epi32(fraction, _mm512_slli_epi32::<20>(pushed))))
        })
    }
    #[inline(always)]
    fn low_bits_pushed(self) -> (__mmask16, __mmask16) {
        x86!({
            let bits = _mm512_castps_si512(self.0);
            (
                _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1)),
                _mm512_test_epi32_mask(bits, _mm512_set1_epi32(2)),
            )
        })
    }
    #[inline(always)]
    fn two_product(self, other: Self) -> (Self, Self) {
        let high = self.mul(other);
        (high, self.mul_add(other, high.neg()))
    }
}

impl<const SPLIT: bool, const STORED_BITS: u32> Avx512<SPLIT, STORED_BITS> {
    #[inline(always)]
    fn halves(self) -> (__m256, __m256) {
        x86!((_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0)))
    }

    /// A block of f32 in index order, as these lanes have it.
    #[inline(always)]
    fn of_ordered(block: __m512) -> Self {
        if !SPLIT {
            return Self(block);
        }
        x86!({
            let order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
            Self(_mm512_permutexvar_ps(order, block))
        })
    }

    /// [`Memory::note`] for 16-bit floats, as integers, sixteen at once: magnitudes are in the order of
    /// their representations.
    #[inline(always)]
    fn note_block(block: __m256i, so_far: Self) -> Self {
        x86!({
            let magnitudes = _mm256_and_si256(block, _mm256_set1_epi16(0x7FFF));
            let so_far = _mm512_castsi512_si256(_mm512_castps_si512(so_far.0));
            let largest = _mm256_max_epi16(magnitudes, so_far);
            Self(_mm512_castsi512_ps(_mm512_castsi256_si512(largest)))
        })
    }

    /// [`Memory::is_far`] for what [`Self::note_block`] gives.
    #[inline(always)]
    fn noted_beyond(noted: Self, limit: u16) -> bool {
        x86!({
            let noted = _mm512_castsi512_si256(_mm512_castps_si512(noted.0));
            _mm256_cmpgt_epi16_mask(noted, _mm256_set1_epi16(limit.cast_signed())) != 0
        })
    }
}

impl<const SPLIT: bool, const STORED_BITS: u32> Memory<f32> for Avx512<SPLIT, STORED_BITS> {
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        x86!(Self::of_ordered(_mm512_loadu_ps(p)))
    }
    #[inline(always)]
    fn read_end(row: &[f32], i: usize, fill: f32) -> Self {
        let (inside, p) = (inside(row, i), row.as_ptr().wrapping_add(i));
        x86!(Self::of_ordered(_mm512_mask_loadu_ps(_mm512_set1_ps(fill), inside, p)))
    }
    type Packed = __m512;
    #[inline(always)]
    fn pack(self) -> __m512 {
        if !SPLIT {
            return self.0;
        }
        x86!({
            let order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
            _mm512_permutexvar_ps(order, self.0)
        })
    }
    #[inline(always)]
    unsafe fn put(packed: __m512, p: *mut f32) {
        x86!(_mm512_storeu_ps(p, packed))
    }
    #[inline(always)]
    unsafe fn put_past_caches(packed: __m512, p: *mut f32) {
        // In halves, as the address is promised to be aligned for these.
        x86!({
            _mm256_stream_ps(p, _mm512_castps512_ps256(packed));
            _mm256_stream_ps(p.add(8), _mm512_extractf32x8_ps::<1>(packed));
        })
    }
    #[inline(always)]
    fn line([_, only]: [__m512; 2]) -> WideLine {
        x86!(WideLine(_mm512_castps_si512(only)))
    }
}

/// The 64 bytes of a register.
#[derive(Clone, Copy)]
pub(crate) struct WideLine(__m512i);

impl Line for WideLine {
    const ANY: bool = true;
    type Bytes = __mmask64;
    #[inline(always)]
    fn zero() -> Self {
        x86!(Self(_mm512_setzero_si512()))
    }
    #[inline(always)]
    fn before(end: usize) -> __mmask64 {
        (1 << end) - 1
    }
    #[inline(always)]
    fn order(by: usize) -> Self {
        /// A permutation looks at the lower six bits of an index.
        static ORDER: [u8; 2 * LINE] = {
            let (mut order, mut k) = ([0; 2 * LINE], 0);
            while k < 2 * LINE {
                order[k] = k as u8;
                k += 1;
            }
            order
        };
        let order = &ORDER[LINE - by..][..LINE];
        x86!(Self(_mm512_loadu_si512(order.as_ptr().cast())))
    }
    #[inline(always)]
    fn rotate(self, order: Self) -> Self {
        x86!(Self(_mm512_permutexvar_epi8(order.0, self.0)))
    }
    #[inline(always)]
    fn select(bytes: __mmask64, yes: Self, no: Self) -> Self {
        x86!(Self(_mm512_mask_blend_epi8(bytes, no.0, yes.0)))
    }
    #[inline(always)]
    unsafe fn put_past_caches(self, p: *mut u8) {
        x86!(_mm512_stream_si512(p.cast(), self.0))
    }
    #[inline(always)]
    unsafe fn put_some(self, p: *mut u8, bytes: Range<usize>) {
        let mask = (u64::MAX >> (LINE - bytes.end)) & (u64::MAX << bytes.start);
        x86!(_mm512_mask_storeu_epi8(p.cast(), mask, self.0))
    }
}

/// The sixteen elements of 16 bits from `i` on, with `fill` past the row's end.
#[inline(always)]
fn block_of<T: Element>(row: &[T], i: usize, fill: T) -> __m256i {
    const { assert!(size_of::<T>() == 2) };
    if i + 16 <= row.len() {
        return x86!(_mm256_loadu_si256(row.as_ptr().add(i).cast()));
    }
    let (inside, p) = (inside(row, i), row.as_ptr().wrapping_add(i));
    x86!({
        let fill = _mm256_set1_epi16(std::mem::transmute_copy::<T, i16>(&fill));
        _mm256_mask_loadu_epi16(fill, inside, p.cast())
    })
}

/// Two blocks of 16 bits, one behind the other.
#[inline(always)]
fn joined(a: __m256i, b: __m256i) -> __m512i {
    x86!(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b))
}

impl Memory<f16> for ForF16 {
    #[inline(always)]
    unsafe fn load(p: *const f16) -> Self {
        x86!(Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))))
    }
    #[inline(always)]
    fn read_end(row: &[f16], i: usize, fill: f32) -> Self {
        // The constant form, as the other asks the CPU what it has.
        x86!(Self(_mm512_cvtph_ps(block_of(row, i, f16::from_f32_const(fill)))))
    }
    type Packed = __m256i;
    #[inline(always)]
    fn pack(self) -> __m256i {
        x86!(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))
    }
    #[inline(always)]
    unsafe fn put(packed: __m256i, p: *mut f16) {
        x86!(_mm256_storeu_si256(p.cast(), packed))
    }
    #[inline(always)]
    unsafe fn put_past_caches(packed: __m256i, p: *mut f16) {
        x86!(_mm256_stream_si256(p.cast(), packed))
    }
    const LINES: bool = true;
    #[inline(always)]
    unsafe fn put_line_past_caches([a, b]: [__m256i; 2], p: *mut f16) {
        x86!(_mm512_stream_si512(p.cast(), joined(a, b)))
    }
    const BLOCKS_OF_LINE: usize = 2;
    #[inline(always)]
    fn line([a, b]: [__m256i; 2]) -> WideLine {
        WideLine(joined(a, b))
    }
    #[inline(always)]
    fn note(row: &[f16], i: usize, so_far: Self) -> Self {
        Self::note_block(block_of(row, i, f16::ZERO), so_far)
    }
    #[inline(always)]
    fn is_far(noted: Self, limit: f32) -> bool {
        Self::noted_beyond(noted, f16::from_f32(limit).to_bits())
    }
}

impl Memory<bf16> for ForBf16 {
    #[inline(always)]
    unsafe fn load(p: *const bf16) -> Self {
        x86!(Self::widen(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    fn read_end(row: &[bf16], i: usize, fill: f32) -> Self {
        Self::widen(block_of(row, i, bf16::from_f32(fill)))
    }
    type Packed = __m256i;
    /// Nearest even by integer addition; NaNs as in `avx2.rs`. Up by a half of the last place that is
    /// kept, less one where that place is even.
    #[inline(always)]
    fn pack(self) -> __m256i {
        x86!({
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x1_0000));
            let up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
            let up = _mm512_mask_add_epi32(up, odd, bits, _mm512_set1_epi32(0x8000));
            Self(_mm512_castsi512_ps(up)).upper_halves()
        })
    }
    #[inline(always)]
    unsafe fn put(packed: __m256i, p: *mut bf16) {
        x86!(_mm256_storeu_si256(p.cast(), packed))
    }
    #[inline(always)]
    unsafe fn put_past_caches(packed: __m256i, p: *mut bf16) {
        x86!(_mm256_stream_si256(p.cast(), packed))
    }
    const LINES: bool = true;
    #[inline(always)]
    unsafe fn put_line_past_caches([a, b]: [__m256i; 2], p: *mut bf16) {
        x86!(_mm512_stream_si512(p.cast(), joined(a, b)))
    }
    const BLOCKS_OF_LINE: usize = 2;
    #[inline(always)]
    fn line([a, b]: [__m256i; 2]) -> WideLine {
        WideLine(joined(a, b))
    }
    #[inline(always)]
    fn pack_exact(self) -> __m256i {
        self.upper_halves()
    }
    /// Half a unit more, so that the upper halves are the rounded number. NaNs as in `pack`.
    #[inline(always)]
    fn nearest(self) -> Self {
        x86!({
            let bits = _mm512_castps_si512(self.0);
            Self(_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000))))
        })
    }
    #[inline(always)]
    fn note(row: &[bf16], i: usize, so_far: Self) -> Self {
        Self::note_block(block_of(row, i, bf16::ZERO), so_far)
    }
    #[inline(always)]
    fn is_far(noted: Self, limit: f32) -> bool {
        Self::noted_beyond(noted, bf16::from_f32(limit).to_bits())
    }
}

impl ForBf16 {
    #[inline(always)]
    fn widen(block: __m256i) -> Self {
        x86!({
            let twice = _mm512_broadcast_i64x4(block);
            // Of each 16 bytes, the elements of even index in the lower half of the register and
            // those of odd index in the upper one, each with two zeros below.
            let even = _mm_setr_epi8(-1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13);
            let odd = _mm_setr_epi8(-1, -1, 2, 3, -1, -1, 6, 7, -1, -1, 10, 11, -1, -1, 14, 15);
            let (even, odd) = (_mm256_broadcastsi128_si256(even), _mm256_broadcastsi128_si256(odd));
            let order = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(even), odd);
            Self(_mm512_castsi512_ps(_mm512_shuffle_epi8(twice, order)))
        })
    }

    /// The upper halves of the representations, in index order.
    #[inline(always)]
    fn upper_halves(self) -> __m256i {
        static ORDER: [u8; 64] = {
            let (mut order, mut k) = ([0; 64], 0);
            while k < 16 {
                // Bytes 2 and 3 of the lane that holds element k.
                let lane = k / 2 + 8 * (k % 2);
                order[2 * k] = (4 * lane + 2) as u8;
                order[2 * k + 1] = (4 * lane + 3) as u8;
                k += 1;
            }
            order
        };
        x86!({
            let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
            let packed = _mm512_permutexvar_epi8(order, _mm512_castps_si512(self.0));
            _mm512_castsi512_si256(packed)
        })
    }
}
