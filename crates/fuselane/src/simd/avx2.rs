//! AVX2 + FMA + F16C: sixteen f32 in two registers; and the same where AVX-512 is there too.
//!
//! With `VL`, code is compiled for AVX-512 as well (F, BW, DQ, VL): still registers of 256 bits, but 32
//! of them instead of 16, so that constants and sums stay in them, and loads that leave out what is
//! behind a row's end. It serves CPUs that work on registers of 512 bits in halves.
//!
//! For f32 and f16, the first register holds elements 0..8 and the second 8..16. For bf16, the first
//! holds the elements of even index and the second those of odd index: they are then widened by a
//! shift or a mask and packed by a blend, without a shuffle.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use half::{bf16, f16};

use super::x86::{align_frame, sum_of_eight, x86};
use super::{Simd, Storage};
use crate::dtype::DType;

/// Elements of type `E`; compiled for AVX-512 with `VL`.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<E, const VL: bool>(PhantomData<E>);

/// A block.
pub(super) type Pair = [__m256; 2];

impl<E: Storage<Pair>, const VL: bool> Avx2<E, VL> {
    /// Whether the registers hold elements of even and of odd index.
    const EVEN_ODD: bool = matches!(E::DTYPE, DType::BF16);
}

impl<E: Storage<Pair>, const VL: bool> Simd for Avx2<E, VL> {
    type Elem = E;
    type Block = Pair;
    type Packed = E::Packed;
    type Mask = Pair;
    type Line = ();
    const MASKED_LOADS: bool = VL;

    #[inline(always)]
    fn call<R>(f: impl FnOnce() -> R) -> R {
        /// It takes two functions, since rustc forgets `inline(never)` beside `target_feature` (1.95
        /// does); the outer one keeps it, and lacks the features that inlining the other would need.
        #[inline(never)]
        fn apart<R, const VL: bool>(f: impl FnOnce() -> R) -> R {
            x86!(if VL { compiled_for_vl(f) } else { compiled(f) })
        }
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<R>(f: impl FnOnce() -> R) -> R {
            align_frame::<__m256>();
            f()
        }
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
        fn compiled_for_vl<R>(f: impl FnOnce() -> R) -> R {
            align_frame::<__m256>();
            f()
        }
        apart::<R, VL>(f)
    }

    #[inline(always)]
    fn splat(value: f32) -> Pair {
        x86!([_mm256_set1_ps(value); 2])
    }
    #[inline(always)]
    fn add(a: Pair, b: Pair) -> Pair {
        x86!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(a: Pair, b: Pair) -> Pair {
        x86!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(a: Pair, b: Pair) -> Pair {
        x86!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(a: Pair, b: Pair) -> Pair {
        x86!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn max(a: Pair, b: Pair) -> Pair {
        x86!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn min(a: Pair, b: Pair) -> Pair {
        x86!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn neg(a: Pair) -> Pair {
        x86!({
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_xor_ps(a[0], sign), _mm256_xor_ps(a[1], sign)]
        })
    }
    #[inline(always)]
    fn abs(a: Pair) -> Pair {
        x86!({
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
        })
    }
    #[inline(always)]
    fn mul_add(a: Pair, b: Pair, c: Pair) -> Pair {
        x86!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn neg_mul_add(a: Pair, b: Pair, c: Pair) -> Pair {
        x86!([_mm256_fnmadd_ps(a[0], b[0], c[0]), _mm256_fnmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn copysign(a: Pair, sign: Pair) -> Pair {
        [copysign(a[0], sign[0]), copysign(a[1], sign[1])]
    }
    #[inline(always)]
    fn reciprocal_estimate(a: Pair) -> Pair {
        x86!([_mm256_rcp_ps(a[0]), _mm256_rcp_ps(a[1])])
    }

    #[inline(always)]
    fn lt(a: Pair, b: Pair) -> Pair {
        x86!([_mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])])
    }
    #[inline(always)]
    fn le(a: Pair, b: Pair) -> Pair {
        x86!([_mm256_cmp_ps::<_CMP_LE_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_LE_OQ>(a[1], b[1])])
    }
    #[inline(always)]
    fn is_nan(a: Pair) -> Pair {
        x86!([_mm256_cmp_ps::<_CMP_UNORD_Q>(a[0], a[0]), _mm256_cmp_ps::<_CMP_UNORD_Q>(a[1], a[1])])
    }
    #[inline(always)]
    fn max_magnitude(a: Pair, b: Pair) -> Pair {
        let a = Self::abs(a);
        [max_as_integers(a[0], b[0]), max_as_integers(a[1], b[1])]
    }
    /// [`Simd::select`] reads the sign bit of each lane only.
    #[inline(always)]
    fn is_negative(a: Pair) -> Pair {
        a
    }
    #[inline(always)]
    fn select(mask: Pair, yes: Pair, no: Pair) -> Pair {
        x86!([_mm256_blendv_ps(no[0], yes[0], mask[0]), _mm256_blendv_ps(no[1], yes[1], mask[1])])
    }
    #[inline(always)]
    fn any(mask: Pair) -> bool {
        x86!(_mm256_movemask_ps(_mm256_or_ps(mask[0], mask[1])) != 0)
    }

    #[inline(always)]
    fn exp2_of_magic(a: Pair) -> Pair {
        [shifted::<23>(a[0]), shifted::<23>(a[1])]
    }
    #[inline(always)]
    fn exp2_of_eighths(a: Pair, table: &[u32; 8]) -> Pair {
        [exp2_of_eighths(a[0], table), exp2_of_eighths(a[1], table)]
    }
    #[inline(always)]
    fn low_bits_of_magic(a: Pair) -> (Pair, Pair) {
        // `select` reads the sign bit of each lane only, so a shift makes the mask.
        ([shifted::<31>(a[0]), shifted::<31>(a[1])], [shifted::<30>(a[0]), shifted::<30>(a[1])])
    }

    #[inline(always)]
    fn swap_pairs(a: Pair) -> Pair {
        if Self::EVEN_ODD {
            return [a[1], a[0]];
        }
        x86!([_mm256_permute_ps::<0xB1>(a[0]), _mm256_permute_ps::<0xB1>(a[1])])
    }
    #[inline(always)]
    fn sum(a: Pair) -> f32 {
        sum_of_eight(x86!(_mm256_add_ps(a[0], a[1])))
    }
    /// The same additions in the same order, each for two, four or eight blocks together.
    #[inline(always)]
    fn sum_eight(blocks: &[Pair; 8]) -> [f32; 8] {
        x86!({
            let halves = |a: Pair, b: Pair| {
                let (a, b) = (_mm256_add_ps(a[0], a[1]), _mm256_add_ps(b[0], b[1]));
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
            let mut sums = [0.0; 8];
            _mm256_storeu_ps(sums.as_mut_ptr(), _mm256_add_ps(low, high));
            sums
        })
    }
    #[inline(always)]
    fn largest(a: Pair) -> f32 {
        let larger = |a: __m256, b: __m256| {
            Self::select(Self::is_nan([a; 2]), [a; 2], Self::max([a; 2], [b; 2]))[0]
        };
        x86!({
            let eight = larger(a[0], a[1]);
            let four = larger(eight, _mm256_permute2f128_ps::<0x01>(eight, eight));
            let two = larger(four, _mm256_permute_ps::<0x4E>(four));
            _mm256_cvtss_f32(larger(two, _mm256_permute_ps::<0xB1>(two)))
        })
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Pair {
        // SAFETY: the caller's promise.
        let ordered = unsafe { Self::load_lanes(p) };
        if Self::EVEN_ODD { even_odd(ordered) } else { ordered }
    }
    #[inline(always)]
    unsafe fn store_f32(a: Pair, p: *mut f32) {
        let ordered = if Self::EVEN_ODD { index_order(a) } else { a };
        // SAFETY: the caller's promise.
        unsafe { Self::store_lanes(ordered, p) }
    }
    #[inline(always)]
    fn line(_blocks: [E::Packed; 2]) {}
}

#[inline(always)]
fn copysign(a: __m256, sign: __m256) -> __m256 {
    x86!({
        let mask = _mm256_set1_ps(-0.0);
        _mm256_or_ps(_mm256_andnot_ps(mask, a), _mm256_and_ps(mask, sign))
    })
}

#[inline(always)]
fn max_as_integers(a: __m256, b: __m256) -> __m256 {
    x86!(_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b))))
}

/// The representations, shifted to the left.
#[inline(always)]
fn shifted<const BITS: i32>(a: __m256) -> __m256 {
    x86!(_mm256_castsi256_ps(_mm256_slli_epi32::<BITS>(_mm256_castps_si256(a))))
}

#[inline(always)]
fn exp2_of_eighths(a: __m256, table: &[u32; 8]) -> __m256 {
    x86!({
        let (bits, table) = (_mm256_castps_si256(a), _mm256_loadu_si256(table.as_ptr().cast()));
        let fraction = _mm256_permutevar8x32_epi32(table, bits);
        _mm256_castsi256_ps(_mm256_add_epi32(fraction, _mm256_slli_epi32::<20>(bits)))
    })
}

/// From index order to even and odd indices.
#[inline(always)]
fn even_odd([a, b]: Pair) -> Pair {
    let ordered = |v: __m256| {
        x86!(_mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v))))
    };
    x86!([
        ordered(_mm256_shuffle_ps::<0b10_00_10_00>(a, b)),
        ordered(_mm256_shuffle_ps::<0b11_01_11_01>(a, b)),
    ])
}

/// From even and odd indices back to index order.
#[inline(always)]
fn index_order([even, odd]: Pair) -> Pair {
    x86!({
        let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
        [_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high)]
    })
}

impl Storage<Pair> for f32 {
    type Packed = Pair;
    #[inline(always)]
    fn widen(packed: Pair) -> Pair {
        packed
    }
    #[inline(always)]
    fn round(a: Pair) -> Pair {
        a
    }
}

impl Storage<Pair> for f16 {
    type Packed = __m256i;
    #[inline(always)]
    fn widen(packed: __m256i) -> Pair {
        x86!([
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed)),
            _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(packed)),
        ])
    }
    #[inline(always)]
    fn round(a: Pair) -> __m256i {
        x86!(_mm256_set_m128i(
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[1]),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[0]),
        ))
    }
}

impl Storage<Pair> for bf16 {
    type Packed = __m256i;
    #[inline(always)]
    fn widen(packed: __m256i) -> Pair {
        x86!({
            let high = _mm256_set1_epi32(0xFFFF_0000_u32 as i32);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(packed)),
                _mm256_castsi256_ps(_mm256_and_si256(packed, high)),
            ]
        })
    }
    /// Nearest even by integer addition. A NaN stays one as long as its payload leaves the carry
    /// room, which holds for those that bf16 inputs bring (their low half is zero) and for the one
    /// that the CPU makes (0xFFC00000); parameters of wider types are made so when they are
    /// widened (`kernels::param`).
    ///
    /// Both halves of the representations are gathered first, so that sixteen are rounded at once:
    /// up where the lower half is above the middle, or at it and the upper half is odd.
    #[inline(always)]
    fn round(a: Pair) -> __m256i {
        x86!({
            let (even, odd) = (_mm256_castps_si256(a[0]), _mm256_castps_si256(a[1]));
            let upper = Self::truncate(a);
            let lower = _mm256_blend_epi16::<0b1010_1010>(even, _mm256_slli_epi32::<16>(odd));
            let is_even = _mm256_andnot_si256(upper, _mm256_set1_epi16(1));
            let up = _mm256_srli_epi16::<15>(_mm256_subs_epu16(lower, is_even));
            _mm256_add_epi16(upper, up)
        })
    }
    /// Half a unit more, so that the upper halves are the rounded number. NaNs as in `round`.
    #[inline(always)]
    fn round_ties_away(a: Pair) -> __m256i {
        x86!({
            let half = _mm256_set1_epi32(0x8000);
            let (even, odd) = (_mm256_castps_si256(a[0]), _mm256_castps_si256(a[1]));
            Self::truncate([
                _mm256_castsi256_ps(_mm256_add_epi32(even, half)),
                _mm256_castsi256_ps(_mm256_add_epi32(odd, half)),
            ])
        })
    }
    /// The upper halves of the representations, in index order.
    #[inline(always)]
    fn truncate(a: Pair) -> __m256i {
        x86!({
            let (even, odd) = (_mm256_castps_si256(a[0]), _mm256_castps_si256(a[1]));
            _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(even), odd)
        })
    }
}
