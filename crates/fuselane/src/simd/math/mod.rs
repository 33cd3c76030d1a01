//! The elementary functions, written once for all instruction sets, as methods of [`V`].
//!
//! Everything here stands on one exponential. To find e^-u, let n be the integer nearest to
//! -u / ln 2; then r = u + n ln 2 lies within ±ln 2 / 2, and e^-u = 2^n e^-r. A polynomial of
//! degree 6 gives e^-r. Three things keep this short and exact enough:
//!
//! - **n comes from an addition.** -u / ln 2 is added to [`ROUND_MAGIC`], which leaves no room for
//!   a fraction; n then stands in the low bits of the sum, and a shift to the left by 23 turns it
//!   into the exponent of 2^n. No conversion to integers, and a NaN passes through the arithmetic.
//! - **ln 2 is split in two**, the first part so short that n times it is exact. So r carries one
//!   rounding only, on CPUs with fused multiply-add and without.
//! - **The power of two is kept apart** from e^-r, and is 2^±64 off on purpose. f32 spans 2^-149 to
//!   2^128, and results may use all of it, while factors inside must not leave it: sigmoid(-100)
//!   is a denormal number, 1 / (1 + e^100), but e^100 is beyond f32. With everything shifted by
//!   2^64 all steps stay within normal numbers, and the last one, which takes the shift back, is
//!   the only one that rounds to the denormal grid. That is why relative accuracy holds in the
//!   tails down to where f32 ends.
//!
//! Arguments are clamped first, at values beyond which the result does not change any more. Clamps
//! are written so that they keep a NaN (see [`V::clamp`]). Lanes never branch; what a sign decides
//! is either avoided by an identity or selected at the end.
//!
//! Infinities behave as in PyTorch, by the plain formula of each function: x * sigmoid(x) at
//! minus infinity is -inf * 0, which is NaN. Where a clamp would hide that, the code takes the
//! difference between the argument and its clamped self into the sum, which is 0 for small
//! arguments, the rest of large ones, and NaN where it has to be.
//!
//! A NaN that comes out is the one that came in, made quiet, or the CPU's default: in both cases
//! its low half is zero if the input came from bf16, which is what storing as bf16 relies on.
//!
//! Error bounds are in units of the last place (ulp) of f32 at the exact result, for every finite
//! argument, as the tests measure and assert them on dense samples. Coefficients minimise the
//! largest relative error (weighted least squares with Lawson's weights in f64); they were rounded
//! to f32 one by one, lowest order first, fitting the others anew after each.
//!
//! Results that are stored in 16 bits have faster forms of less accuracy: see `fast.rs`.

mod exp;
mod fast;
mod gelu;
mod sigmoid;
mod tanh;
mod trigonometry;

#[cfg(test)]
mod tests;

pub(crate) use sigmoid::FoldedSigmoid;

use super::{ROUND_MAGIC, Simd, V};

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in 15 bits: times an integer of 9 bits it is exact.
const LN2_HIGH: f32 = 22713.0 / 32768.0;
const LN2_LOW: f32 = 1.428_606_8e-6;
/// 2^64: the distance that intermediate results keep from the ends of f32.
const UP: f32 = (1u128 << 64) as f32;
/// 2^-64.
const DOWN: f32 = 1.0 / UP;

/// A polynomial by Horner's rule, highest coefficient first. A block may be two registers and loop
/// iterations are independent, so the CPU has other work while a step waits for the one before.
#[inline(always)]
fn polynomial<S: Simd, const K: usize>(x: V<S>, coefficients: [f32; K]) -> V<S> {
    S::apart(
        #[inline(always)]
        || {
            let (mut sum, mut k) = (V::splat(coefficients[0]), 1);
            while k < K {
                sum = sum.mul_add(x, V::splat(coefficients[k]));
                k += 1;
            }
            sum
        },
    )
}

/// The argument cut at `high`, and what that takes away: zero (with the sign that a sum with it
/// keeps), or the rest of a larger argument, or NaN at minus infinity.
#[inline(always)]
fn cut<S: Simd>(x: V<S>, high: f32) -> (V<S>, V<S>) {
    let kept = V::splat(high).min(x);
    (kept, -(kept - x))
}
