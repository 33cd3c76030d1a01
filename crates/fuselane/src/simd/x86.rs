//! What the instruction sets of x86-64 share.

use std::arch::x86_64::*;
use std::hint::black_box;
use std::mem::MaybeUninit;

use super::avx2::Pair;
use super::{LANES, Packed, copy_tail};
use crate::dtype::Element;

/// Calls an intrinsic.
///
/// SAFETY of every use: [`Simd`] of this folder's x86 types is only used by kernels that
/// `super::dispatch` enters after the type's instruction set was found available. (Fences and prefetches
/// are of SSE, which every x86-64 has.) Intrinsics that
/// touch memory are used under the pointer promises of their caller, or within the slice that they were
/// given: of loads with a mask, lanes whose bit is clear are neither read nor do they fault.
macro_rules! x86 {
    ($($call:tt)*) => {{
        #[allow(clippy::undocumented_unsafe_blocks)]
        unsafe { $($call)* }
    }};
}
pub(super) use x86;

/// Has the frame of the function that this is inlined into aligned for whole registers.
///
/// Registers that a loop has no room for go to the stack and come back. By itself, the compiler
/// aligns the frame to 16 bytes only, and it is the caller's depth that decides whether such a register
/// lies across two cache lines, where store forwarding fails: whole calls then took up to three times
/// as long. (`black_box` promises nothing; without its effect, only speed is lost.)
#[inline(always)]
pub(super) fn align_frame<Register>() {
    let mut register = MaybeUninit::<Register>::uninit();
    black_box(register.as_mut_ptr());
}

impl Packed<f32> for Pair {
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        x86!([_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))])
    }
    #[inline(always)]
    fn load_tail(row: &[f32], i: usize, masked_loads: bool) -> Self {
        if !masked_loads {
            // SAFETY: the array holds a block.
            return unsafe { Self::load(copy_tail(row, i).as_ptr()) };
        }
        let (inside, p) = (inside(row, i), row.as_ptr().wrapping_add(i));
        x86!([
            _mm256_maskz_loadu_ps(inside as __mmask8, p),
            _mm256_maskz_loadu_ps((inside >> 8) as __mmask8, p.wrapping_add(8)),
        ])
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        x86!({
            _mm256_storeu_ps(p, self[0]);
            _mm256_storeu_ps(p.add(8), self[1]);
        })
    }
    #[inline(always)]
    unsafe fn store_non_temporal(self, p: *mut f32) {
        x86!({
            _mm256_stream_ps(p, self[0]);
            _mm256_stream_ps(p.add(8), self[1]);
        })
    }
}

impl Packed<f32> for __m512 {
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        x86!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    fn load_tail(row: &[f32], i: usize, _masked_loads: bool) -> Self {
        x86!(_mm512_maskz_loadu_ps(inside(row, i), row.as_ptr().wrapping_add(i)))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        x86!(_mm512_storeu_ps(p, self))
    }
    #[inline(always)]
    unsafe fn store_non_temporal(self, p: *mut f32) {
        x86!(_mm512_stream_ps(p, self))
    }
}

impl<E: Element> Packed<E> for __m256i {
    #[inline(always)]
    unsafe fn load(p: *const E) -> Self {
        x86!(_mm256_loadu_si256(p.cast()))
    }
    /// In registers where that can be done: what goes through memory has to wait until stores before it, a
    /// row's results, are done. Without masks, the row's last sixteen are loaded, and those that come
    /// before `i` are shifted out.
    #[inline(always)]
    fn load_tail(row: &[E], i: usize, masked_loads: bool) -> Self {
        const { assert!(size_of::<E>() == 2) };
        if masked_loads {
            let p = row.as_ptr().wrapping_add(i).cast();
            return x86!(_mm256_maskz_loadu_epi16(inside(row, i), p));
        }
        if row.len() < LANES {
            return x86!(_mm256_loadu_si256(copy_tail(row, i).as_ptr().cast()));
        }
        x86!(shift_tail(row, i))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut E) {
        x86!(_mm256_storeu_si256(p.cast(), self))
    }
    #[inline(always)]
    unsafe fn store_non_temporal(self, p: *mut E) {
        x86!(_mm256_stream_si256(p.cast(), self))
    }
}

/// The sum of eight lanes: halves, then quarters, then the last two.
#[inline(always)]
pub(super) fn sum_of_eight(eight: __m256) -> f32 {
    x86!({
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    })
}

/// Which of the sixteen elements from `i` on a row has, as bits.
#[inline(always)]
fn inside<T>(row: &[T], i: usize) -> __mmask16 {
    let count = row.len().saturating_sub(i).min(LANES);
    ((1u32 << count) - 1) as __mmask16
}

/// The tail of a row of sixteen 16-bit elements or more. Out of line, so that loops have little of it.
#[target_feature(enable = "avx2")]
#[inline(never)]
fn shift_tail<T: Element>(row: &[T], i: usize) -> __m256i {
    static INSIDE: [i16; 2 * LANES] = {
        let (mut inside, mut i) = ([0; 2 * LANES], 0);
        while i < LANES {
            inside[i] = -1;
            i += 1;
        }
        inside
    };
    let skipped = (i + LANES).saturating_sub(row.len()).min(LANES);
    x86!({
        let last = _mm256_loadu_si256(row.as_ptr().add(row.len() - LANES).cast());
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
        _mm256_and_si256(_mm256_or_si256(low, high), inside)
    })
}
