//! AVX-512 with registers of 512 bits: sixteen f32 in one.
//!
//! Half the instructions of `avx2.rs`, for CPUs whose pipes are as wide as these registers; a CPU
//! that works on them in halves is better off with the other file (see `isa.rs`).
//!
//! For f32 and f16 the lanes are in index order. For bf16, the lower half of the register holds the
//! elements of even index and the upper half those of odd index. As the sixteen are loaded into both
//! halves of the register, which costs nothing, one shuffle within 16 bytes widens them; one
//! permutation of bytes packs them.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::x86::{align_frame, sum_of_eight, x86};
use super::{CACHE_LINE, Line, Simd, Storage};
use crate::dtype::DType;

/// Elements of type `E`.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<E>(PhantomData<E>);

/// Of which one block or two are a cache line.
pub(crate) trait PackedLine: Copy {
    /// Two blocks of 16-bit elements; the second one, where it is a cache line by itself.
    fn line(blocks: [Self; 2]) -> Line512;
}

impl PackedLine for __m512 {
    #[inline(always)]
    fn line([_, only]: [__m512; 2]) -> Line512 {
        x86!(Line512(_mm512_castps_si512(only)))
    }
}

impl PackedLine for __m256i {
    #[inline(always)]
    fn line([a, b]: [__m256i; 2]) -> Line512 {
        x86!(Line512(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)))
    }
}

impl<E: Storage<__m512>> Avx512<E> {
    /// Whether the halves of the register hold elements of even and of odd index.
    const EVEN_ODD: bool = matches!(E::DTYPE, DType::BF16);
}

impl<E: Storage<__m512, Packed: PackedLine>> Simd for Avx512<E> {
    type Elem = E;
    type Block = __m512;
    type Packed = E::Packed;
    type Mask = __mmask16;
    type Line = Line512;
    const PIPELINE: bool = true;
    const MASKED_LOADS: bool = true;
    const NON_TEMPORAL_ALIGN: usize = 64;
    const WHOLE_LINES: bool = size_of::<E>() == 2;

    #[inline(always)]
    fn call<R>(f: impl FnOnce() -> R) -> R {
        /// As in `avx2.rs`: rustc forgets `inline(never)` beside `target_feature`.
        #[inline(never)]
        fn apart<R>(f: impl FnOnce() -> R) -> R {
            x86!(compiled(f))
        }
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
        fn compiled<R>(f: impl FnOnce() -> R) -> R {
            align_frame::<__m512>();
            f()
        }
        apart(f)
    }

    #[inline(always)]
    fn splat(value: f32) -> __m512 {
        x86!(_mm512_set1_ps(value))
    }
    #[inline(always)]
    fn add(a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn max(a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn neg(a: __m512) -> __m512 {
        x86!(_mm512_xor_ps(a, _mm512_set1_ps(-0.0)))
    }
    #[inline(always)]
    fn abs(a: __m512) -> __m512 {
        x86!(_mm512_andnot_ps(_mm512_set1_ps(-0.0), a))
    }
    #[inline(always)]
    fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        x86!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn neg_mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        x86!(_mm512_fnmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn copysign(a: __m512, sign: __m512) -> __m512 {
        x86!({
            let (mask, sign, a) =
                (_mm512_set1_epi32(i32::MIN), _mm512_castps_si512(sign), _mm512_castps_si512(a));
            // The second where the first has a bit, the third elsewhere.
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xCA>(mask, sign, a))
        })
    }
    #[inline(always)]
    fn reciprocal_estimate(a: __m512) -> __m512 {
        x86!(_mm512_rcp14_ps(a))
    }
    #[inline(always)]
    fn lt(a: __m512, b: __m512) -> __mmask16 {
        x86!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn le(a: __m512, b: __m512) -> __mmask16 {
        x86!(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b))
    }
    #[inline(always)]
    fn is_nan(a: __m512) -> __mmask16 {
        x86!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a))
    }
    #[inline(always)]
    fn max_magnitude(a: __m512, b: __m512) -> __m512 {
        x86!({
            let a = _mm512_castps_si512(Self::abs(a));
            _mm512_castsi512_ps(_mm512_max_epi32(a, _mm512_castps_si512(b)))
        })
    }
    #[inline(always)]
    fn is_negative(a: __m512) -> __mmask16 {
        x86!(_mm512_movepi32_mask(_mm512_castps_si512(a)))
    }
    #[inline(always)]
    fn select(mask: __mmask16, yes: __m512, no: __m512) -> __m512 {
        x86!(_mm512_mask_blend_ps(mask, no, yes))
    }
    #[inline(always)]
    fn any(mask: __mmask16) -> bool {
        mask != 0
    }

    #[inline(always)]
    fn exp2_of_magic(a: __m512) -> __m512 {
        x86!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(a))))
    }
    #[inline(always)]
    fn exp2_of_eighths(a: __m512, table: &[u32; 8]) -> __m512 {
        x86!({
            // Twice, as sixteen are chosen from.
            let table = _mm512_broadcast_i64x4(_mm256_loadu_si256(table.as_ptr().cast()));
            let bits = _mm512_castps_si512(a);
            let fraction = _mm512_permutexvar_epi32(bits, table);
            _mm512_castsi512_ps(_mm512_add_epi32(fraction, _mm512_slli_epi32::<20>(bits)))
        })
    }
    #[inline(always)]
    fn low_bits_of_magic(a: __m512) -> (__mmask16, __mmask16) {
        x86!({
            let bits = _mm512_castps_si512(a);
            (
                _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1)),
                _mm512_test_epi32_mask(bits, _mm512_set1_epi32(2)),
            )
        })
    }

    #[inline(always)]
    fn swap_pairs(a: __m512) -> __m512 {
        if Self::EVEN_ODD {
            return x86!(_mm512_shuffle_f32x4::<0b01_00_11_10>(a, a));
        }
        x86!(_mm512_permute_ps::<0xB1>(a))
    }
    #[inline(always)]
    fn sum(a: __m512) -> f32 {
        sum_of_eight(x86!(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a))))
    }
    /// The same additions in the same order, each for two, four or eight blocks together.
    #[inline(always)]
    fn sum_eight(blocks: &[__m512; 8]) -> [f32; 8] {
        x86!({
            // Of each register, the sums of its halves, then of the halves of those: four numbers
            // are left of each of four blocks.
            let halves = |a: __m512, b: __m512| {
                let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
                _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b))
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
            let mut sums = [0.0; 8];
            _mm256_storeu_ps(sums.as_mut_ptr(), one);
            sums
        })
    }
    #[inline(always)]
    fn largest(a: __m512) -> f32 {
        let larger = |a: __m512, b: __m512| Self::select(Self::is_nan(a), a, Self::max(a, b));
        x86!({
            let eight = larger(a, _mm512_shuffle_f32x4::<0b01_00_11_10>(a, a));
            let four = larger(eight, _mm512_shuffle_f32x4::<0b10_11_00_01>(eight, eight));
            let two = larger(four, _mm512_permute_ps::<0x4E>(four));
            _mm512_cvtss_f32(larger(two, _mm512_permute_ps::<0xB1>(two)))
        })
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> __m512 {
        x86!({
            let block = _mm512_loadu_ps(p);
            if !Self::EVEN_ODD {
                return block;
            }
            let order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
            _mm512_permutexvar_ps(order, block)
        })
    }
    #[inline(always)]
    unsafe fn store_f32(a: __m512, p: *mut f32) {
        x86!({
            let order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
            let ordered = if Self::EVEN_ODD { _mm512_permutexvar_ps(order, a) } else { a };
            _mm512_storeu_ps(p, ordered);
        })
    }
    #[inline(always)]
    fn line(blocks: [E::Packed; 2]) -> Line512 {
        E::Packed::line(blocks)
    }
}

impl Storage<__m512> for f32 {
    type Packed = __m512;
    #[inline(always)]
    fn widen(packed: __m512) -> __m512 {
        packed
    }
    #[inline(always)]
    fn round(a: __m512) -> __m512 {
        a
    }
}

impl Storage<__m512> for f16 {
    type Packed = __m256i;
    #[inline(always)]
    fn widen(packed: __m256i) -> __m512 {
        x86!(_mm512_cvtph_ps(packed))
    }
    #[inline(always)]
    fn round(a: __m512) -> __m256i {
        x86!(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a))
    }
}

impl Storage<__m512> for bf16 {
    type Packed = __m256i;
    #[inline(always)]
    fn widen(packed: __m256i) -> __m512 {
        x86!({
            let twice = _mm512_broadcast_i64x4(packed);
            // Of each 16 bytes, the elements of even index in the lower half of the register and
            // those of odd index in the upper one, each with two zeros below.
            let even = _mm_setr_epi8(-1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13);
            let odd = _mm_setr_epi8(-1, -1, 2, 3, -1, -1, 6, 7, -1, -1, 10, 11, -1, -1, 14, 15);
            let (even, odd) = (_mm256_broadcastsi128_si256(even), _mm256_broadcastsi128_si256(odd));
            let order = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(even), odd);
            _mm512_castsi512_ps(_mm512_shuffle_epi8(twice, order))
        })
    }
    /// Nearest even by integer addition; NaNs as in `avx2.rs`. Up by a half of the last place that is
    /// stored, less one where that place is even.
    #[inline(always)]
    fn round(a: __m512) -> __m256i {
        x86!({
            let bits = _mm512_castps_si512(a);
            let odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x1_0000));
            let up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
            let up = _mm512_mask_add_epi32(up, odd, bits, _mm512_set1_epi32(0x8000));
            Self::truncate(_mm512_castsi512_ps(up))
        })
    }
    /// Half a unit more, so that the upper halves are the rounded number. NaNs as in `round`.
    #[inline(always)]
    fn round_ties_away(a: __m512) -> __m256i {
        x86!({
            let bits = _mm512_castps_si512(a);
            Self::truncate(_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000))))
        })
    }
    /// The upper halves of the representations, in index order.
    #[inline(always)]
    fn truncate(a: __m512) -> __m256i {
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
            _mm512_castsi512_si256(_mm512_permutexvar_epi8(order, _mm512_castps_si512(a)))
        })
    }
}

/// The 64 bytes of a register.
#[derive(Clone, Copy)]
pub(crate) struct Line512(__m512i);

impl Line for Line512 {
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
    fn rotation(by: usize) -> Self {
        /// A permutation looks at the lower six bits of an index.
        static ORDER: [u8; 2 * CACHE_LINE] = {
            let (mut order, mut k) = ([0; 2 * CACHE_LINE], 0);
            while k < 2 * CACHE_LINE {
                order[k] = k as u8;
                k += 1;
            }
            order
        };
        let order = &ORDER[CACHE_LINE - by..][..CACHE_LINE];
        x86!(Self(_mm512_loadu_si512(order.as_ptr().cast())))
    }
    #[inline(always)]
    fn rotate(self, rotation: Self) -> Self {
        x86!(Self(_mm512_permutexvar_epi8(rotation.0, self.0)))
    }
    #[inline(always)]
    fn select(bytes: __mmask64, yes: Self, no: Self) -> Self {
        x86!(Self(_mm512_mask_blend_epi8(bytes, no.0, yes.0)))
    }
    #[inline(always)]
    unsafe fn store_non_temporal(self, p: *mut u8) {
        x86!(_mm512_stream_si512(p.cast(), self.0))
    }
    #[inline(always)]
    unsafe fn store_some(self, p: *mut u8, bytes: Range<usize>) {
        let mask = (u64::MAX >> (CACHE_LINE - bytes.end)) & (u64::MAX << bytes.start);
        x86!(_mm512_mask_storeu_epi8(p.cast(), mask, self.0))
    }
}
