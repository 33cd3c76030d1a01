//! The elementary functions, written once over lanes.
//!
//! Everything here stands on one exponential. To find e^-u, let n be the integer nearest to
//! -u / ln 2; then r = u + n ln 2 lies within ±ln 2 / 2, and e^-u = 2^n e^-r. A polynomial of
//! degree 6 gives e^-r. Three things keep this short and exact enough:
//!
//! - **n comes from an addition.** -u / ln 2 is added to [`PUSH`], which leaves no room for a
//!   fraction; n then stands in the low bits of the sum, and a shift to the left by 23 turns it
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
//! are written so that they keep a NaN (`limit.min(x)`, see [`F32Lanes::min`]). Lanes never branch;
//! what a sign decides is either avoided by an identity or selected at the end.
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
//! argument, as the tests at the end measure and assert them on dense samples. Coefficients
//! minimise the largest relative error (weighted least squares with Lawson's weights in f64); they
//! were rounded to f32 one by one, lowest order first, fitting the others anew after each.

use super::{F32Lanes, Lanes, MAX_LANES, PUSH, Task, portable64::Portable64};

/// Elementary functions of a block.
pub(crate) trait Math: Lanes {
    /// Whether there are short forms: whether those `for_store` differ from the others.
    const HAS_SHORT: bool;
    fn exp(self) -> Self;
    /// e^x for sums and ratios whose results are stored: right to 2^-11 where 8 bits are stored, to
    /// 2^-13.5 where 11 are, and as [`Math::exp`] elsewhere.
    ///
    /// `NEAR`, here and below, leaves out what arguments of large magnitude need, which has a
    /// price in a loop. The caller [notes](super::Memory::note) its arguments and, where one
    /// [is far](super::Memory::is_far), does it again without `NEAR`; results of near arguments
    /// are the same bits.
    fn exp_for_store<const NEAR: bool>(self) -> Self;
    /// e^-x; as [`Math::exp_for_store`] with `NEAR`.
    fn exp_minus_for_store(self) -> Self;
    /// 1 / self, as exact as [`Math::exp_for_store`], for numbers from 1 on.
    fn reciprocal_for_store(self) -> Self;
    /// Sine and cosine, within 1e-7 absolute for every finite argument.
    fn sin_cos(self) -> (Self, Self);
    /// 1 / (1 + e^-x).
    fn sigmoid(self) -> Self;
    /// x sigmoid(x).
    fn silu(self) -> Self;
    /// These, as [`Math::exp_for_store`] is to [`Math::exp`].
    fn sigmoid_for_store<const NEAR: bool>(self) -> Self;
    fn silu_for_store<const NEAR: bool>(self) -> Self;
    fn tanh(self) -> Self;
    /// x Φ(x), where Φ is the distribution function of the standard normal distribution.
    fn gelu(self) -> Self;
    /// x sigmoid(2 √(2/π) (x + 0.044715 x³)): GELU by its usual approximation.
    fn gelu_tanh(self) -> Self;
    /// ln(1 + e^x).
    fn softplus(self) -> Self;
    /// The function and its derivative, sharing what they have in common. The value may differ from
    /// that of the function alone by a rounding.
    fn sigmoid_and_slope(self) -> (Self, Self);
    fn silu_and_slope(self) -> (Self, Self);
    /// These, as [`Math::exp_for_store`] is to [`Math::exp`].
    fn sigmoid_and_slope_for_store<const NEAR: bool>(self) -> (Self, Self);
    fn silu_and_slope_for_store<const NEAR: bool>(self) -> (Self, Self);
    fn tanh_and_slope(self) -> (Self, Self);
    fn gelu_and_slope(self) -> (Self, Self);
    fn gelu_tanh_and_slope(self) -> (Self, Self);
}

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in 15 bits: times an integer of 9 bits it is exact.
const LN2_HIGH: f32 = 22713.0 / 32768.0;
const LN2_LOW: f32 = 1.428_606_8e-6;
/// 2^64: the distance that intermediate results keep from the ends of f32.
const UP: f32 = (1u128 << 64) as f32;
/// 2^-64.
const DOWN: f32 = 1.0 / UP;

/// A polynomial by Horner's rule, highest coefficient first. A block is two registers and loop
/// iterations are independent, so the CPU has other work while a step waits for the one before.
#[inline(always)]
fn polynomial<L: F32Lanes, const K: usize>(x: L, coefficients: [f32; K]) -> L {
    let mut sum = L::splat(coefficients[0]);
    let mut k = 1;
    while k < K {
        sum = sum.mul_add(x, L::splat(coefficients[k]));
        k += 1;
    }
    sum
}

/// e^-u in pieces: (1 + r q) * scale, where e^-r = 1 + r q.
struct Power<L> {
    r: L,
    q: L,
    /// 2^(n + shift).
    scale: L,
}

impl<L: F32Lanes> Power<L> {
    /// e^-u * 2^`shift` for u whose n + shift stays within -126..=127.
    #[inline(always)]
    fn minus(u: L, shift: f32) -> Self {
        let (n, scale) = Self::halvings(u, shift);
        let r = n.mul_add(L::splat(LN2_LOW), n.mul_add(L::splat(LN2_HIGH), u));
        Self::reduced(r, scale)
    }

    /// As [`Power::minus`], for an argument `u + low` with |low| below an ulp or so of u. At
    /// u = 100 the rounding of u alone would be worth 60 ulp of the result.
    #[inline(always)]
    fn minus_pair(u: L, low: L, shift: f32) -> Self {
        let (n, scale) = Self::halvings(u, shift);
        let r = n.mul_add(L::splat(LN2_HIGH), u).add(n.mul_add(L::splat(LN2_LOW), low));
        Self::reduced(r, scale)
    }

    /// n, and 2^(n + shift).
    #[inline(always)]
    fn halvings(u: L, shift: f32) -> (L, L) {
        let push = L::splat(PUSH + 127.0 + shift);
        let pushed = u.neg_mul_add(L::splat(LOG2_E), push);
        (pushed.sub(push), pushed.exp2_pushed())
    }

    /// Fitted for the relative error of r q = e^-r - 1 on ±0.347, which is 2^-26.1; that of
    /// 1 + r q is 2^-27.6.
    #[inline(always)]
    fn reduced(r: L, scale: L) -> Self {
        let q = polynomial(
            r,
            [0.001_387_073_2, -0.008_366_277, 0.041_667_435, -0.166_665_46, 0.499_999_97, -1.0],
        );
        Self { r, q, scale }
    }

    /// 1 + r q, between 0.7 and 1.42.
    #[inline(always)]
    fn fraction(&self) -> L {
        self.q.mul_add(self.r, L::splat(1.0))
    }

    #[inline(always)]
    fn value(&self) -> L {
        self.fraction().mul(self.scale)
    }

    #[inline(always)]
    fn value_plus(&self, term: f32) -> L {
        self.fraction().mul_add(self.scale, L::splat(term))
    }
}

/// The short forms, for results that are stored in 16 bits at once. Of a bf16's eight bits, a
/// relative error of 2^-10 spoils a few in a thousand, by one unit in the last place; of an f16's
/// eleven, one of 2^-13.5 does. (`fuselane-check` runs all 65,536 inputs.) They need about half the
/// instructions.
///
/// e^-u is 2^m 2^f, where m + f is -u / ln 2. m stands in the low bits of `pushed`, as in [`Power`],
/// and f comes out times a constant, in steps of which none waits for an integer:
///
/// ```text
/// pushed = M - u log2(e)
/// g      = (K - c pushed) - u c log2(e)       K = c M, so that g = c f
/// ```
///
/// **For bf16**, M = 1.5 * 2^20 leaves three bits of m behind the point; 2^m comes from a table of
/// eight and a shift; K is larger by 1, and as |f| is at most 1/16, g = 1 + c f with c near ln 2 is
/// all that is needed of 2^f: 4.7e-4.
///
/// **For f16**, m is an integer, and 2^f = (g² + h) g + b, where c is the third root of the cubic's
/// highest coefficient, which saves that multiplication: 8.1e-5. M has a half bit of slack: m is
/// rounded down by about a half, so that g is positive throughout.
///
/// The constants of each (and the table) were searched together, so that K is a number of f32 and
/// the largest relative error is least.
struct Short<L> {
    fraction: L,
    scale: L,
}

/// M, c, c log2(e) and K.
struct Reduction {
    push: f32,
    c: f32,
    c_log2_e: f32,
    k: f32,
}

/// The short forms hold for arguments up to this magnitude, a number of every dtype. Beyond, the
/// exact form takes over, lane by lane, so that no result depends on its neighbours.
pub(crate) const SHORT_LIMIT: f32 = 80.0;

impl<L: F32Lanes> Short<L> {
    const BY_TABLE: bool = L::STORED_BITS <= 8;
    const BY: Reduction = if Self::BY_TABLE {
        Reduction { push: 1_572_864.0, c: 0.692_713_74, c_log2_e: 0.999_374_7, k: 1_089_545.5 }
    } else {
        Reduction { push: 8_846_975.0, c: 0.380_690_46, c_log2_e: 0.549_220_2, k: 3_367_959.5 }
    };

    /// e^-u.
    #[inline(always)]
    fn minus(u: L) -> Self {
        let pushed = u.neg_mul_add(L::splat(LOG2_E), L::splat(Self::BY.push));
        let g = pushed.neg_mul_add(L::splat(Self::BY.c), L::splat(Self::BY.k));
        Self::of(pushed, u.neg_mul_add(L::splat(Self::BY.c_log2_e), g))
    }

    /// e^x.
    #[inline(always)]
    fn plus(x: L) -> Self {
        let pushed = x.mul_add(L::splat(LOG2_E), L::splat(Self::BY.push));
        let g = pushed.neg_mul_add(L::splat(Self::BY.c), L::splat(Self::BY.k));
        Self::of(pushed, x.mul_add(L::splat(Self::BY.c_log2_e), g))
    }

    #[inline(always)]
    fn of(pushed: L, g: L) -> Self {
        if Self::BY_TABLE {
            return Self { fraction: g, scale: pushed.exp2_eighths() };
        }
        let fraction = g.mul_add(g, L::splat(0.886_927)).mul_add(g, L::splat(0.331_258_4));
        Self { fraction, scale: pushed.exp2_pushed() }
    }

    #[inline(always)]
    fn value(&self) -> L {
        self.fraction.mul(self.scale)
    }

    /// 1 / (1 + e^-u).
    #[inline(always)]
    fn sigmoid(&self) -> L {
        Self::reciprocal(self.fraction.mul_add(self.scale, L::splat(1.0)))
    }

    /// 1 / x: the CPU's estimate (2^-11.5) for bf16, and one step of Newton's from it for f16.
    #[inline(always)]
    fn reciprocal(x: L) -> L {
        let estimate = x.reciprocal_estimate();
        if Self::BY_TABLE {
            return estimate;
        }
        estimate.mul(x.neg_mul_add(estimate, L::splat(2.0)))
    }
}

/// The functions that have a short form.
#[derive(Clone, Copy)]
enum Exactly {
    Exp,
    Sigmoid,
    Silu,
    SigmoidAndSlope,
    SiluAndSlope,
}

/// A block through the exact form, out of line: it is rarely needed. Functions without a slope
/// give their value twice.
struct Exact<L>(Exactly, L);

impl<L: F32Lanes> Task for Exact<L> {
    type Output = (L, L);
    #[inline(always)]
    fn run(self) -> (L, L) {
        let twice = match self.0 {
            Exactly::Exp => exact_exp(self.1),
            Exactly::Sigmoid => exact_sigmoid(self.1),
            Exactly::Silu => exact_silu(self.1),
            Exactly::SigmoidAndSlope => return exact_sigmoid_and_slope(self.1),
            Exactly::SiluAndSlope => return exact_silu_and_slope(self.1),
        };
        (twice, twice)
    }
}

/// `short`, but the exact form where `x` is beyond [`SHORT_LIMIT`]. A NaN passes through either.
#[inline(always)]
fn unless_far<L: F32Lanes, const NEAR: bool>(x: L, which: Exactly, short: (L, L)) -> (L, L) {
    let far = L::splat(SHORT_LIMIT).lt(x.abs());
    if NEAR || !L::any(far) {
        return short;
    }
    let exact = L::enter(Exact(which, x));
    (L::select(far, exact.0, short.0), L::select(far, exact.1, short.1))
}

/// x within `low..=high`; a NaN stays.
#[inline(always)]
fn clamp<L: F32Lanes>(x: L, low: f32, high: f32) -> L {
    L::splat(low).max(L::splat(high).min(x))
}

/// The argument cut at `high`, and what that takes away: zero (with the sign that a sum with it
/// keeps), or the rest of a larger argument, or NaN at minus infinity.
#[inline(always)]
fn cut<L: F32Lanes>(x: L, high: f32) -> (L, L) {
    let kept = L::splat(high).min(x);
    (kept, kept.sub(x).neg())
}

/// x sigmoid(v), and its derivative: what silu and the approximate GELU have in common.
///
/// `x` is clamped, `rest` as [`cut`] left it, `power` is 2^-64 e^-v. Without the shift by 2^64, the
/// divisor would overflow in the tail.
#[inline(always)]
fn gated<L: F32Lanes>(x: L, rest: L, power: &Power<L>) -> L {
    x.div(power.value_plus(DOWN)).mul_add(L::splat(DOWN), rest)
}

/// As [`gated`]; `reach` is x dv/dx, and `whole` is x before any clamp.
///
/// With s = sigmoid(v), the slope is s (1 + reach (1 - s)). 1 - s is found as s e^-v, which has no
/// cancellation. s is 2^48 too large here, so that the tail stays normal.
#[inline(always)]
fn gated_and_slope<L: F32Lanes>(whole: L, x: L, rest: L, reach: L, power: &Power<L>) -> (L, L) {
    const LIFT: f32 = (1u64 << 48) as f32;
    let lowered = L::splat(1.0 / LIFT);
    let s = L::splat(LIFT * DOWN).div(power.value_plus(DOWN));
    let value = x.mul(s).mul_add(lowered, rest);
    let complement = power.value().mul(s); // 2^-16 (1 - s)
    let bracket = reach.mul(complement).mul_add(L::splat(UP / LIFT), L::splat(1.0));
    // The zero is NaN for an infinite argument, as the plain formula is.
    let slope = s.mul(bracket).mul_add(lowered, whole.mul(L::splat(0.0)));
    (value, slope)
}

/// silu is x beyond 32, and rounds to zero below -111.
#[inline(always)]
fn silu_parts<L: F32Lanes>(x: L) -> (L, L, Power<L>) {
    let (kept, rest) = cut(x, 32.0);
    let clamped = L::splat(-111.0).max(kept);
    (clamped, rest, Power::minus(clamped, -64.0))
}

/// 2 √(2/π), in 21 bits and the rest, and its product with 0.044715.
const TANH_K: f32 = 1.595_768_928_527_832;
const TANH_K_LOW: f32 = 1.930_779e-7;
const TANH_KC: f32 = 0.071_354_814;
const TANH_KC_LOW: f32 = 2.398_832_5e-9;

/// The approximate GELU is x beyond 7, and rounds to zero below -11. Also gives x².
///
/// v = x (k + kc x²) reaches -112, so it has to be known to 2^-34 for e^-v to be right in
/// f32. Each product and sum on the way therefore comes with its error. k is short enough for
/// k - b to be exact.
#[inline(always)]
fn gelu_tanh_parts<L: F32Lanes>(x: L) -> (L, L, Power<L>, L) {
    let (kept, rest) = cut(x, 7.0);
    let x = L::splat(-11.0).max(kept);
    let (k, kc) = (L::splat(TANH_K), L::splat(TANH_KC));
    let (square, square_low) = x.two_product(x);
    let (g, g_low) = square.two_product(kc);
    let b = k.add(g);
    let b_low =
        k.sub(b).add(g).add(g_low.add(
            square_low.mul_add(kc, square.mul_add(L::splat(TANH_KC_LOW), L::splat(TANH_K_LOW))),
        ));
    let (v, v_low) = x.two_product(b);
    let power = Power::minus_pair(v, x.mul_add(b_low, v_low), -64.0);
    (x, rest, power, square)
}

/// What tanh and its slope share: 2^64 (1 - z) and 2^64 (1 + z), with z = e^-2|x|.
///
/// 1 - z is -(2^n r q + (2^n - 1)), which keeps its relative accuracy as z goes to 1.
#[inline(always)]
fn tanh_parts<L: F32Lanes>(x: L) -> (L, L, Power<L>) {
    let a = L::splat(54.0).min(x.abs());
    let power = Power::minus(a.add(a), 64.0);
    let difference = power.r.mul(power.q).neg_mul_add(power.scale, L::splat(UP).sub(power.scale));
    (difference, L::splat(2.0 * UP).sub(difference), power)
}

/// What GELU and its slope share: a = |x|, cut where a Φ(-a) rounds to zero; 2^64 e^(-a²/2); and P
/// and Q with Φ(-a) = e^(-a²/2) P / Q.
///
/// P / Q was fitted on 0..=14.95, to a relative error of 2^-27. All its coefficients are positive,
/// so no step of either polynomial cancels. They are grouped by h = a²/2 so that few roundings
/// follow each other where a is large, and only the last counts where it is small.
#[inline(always)]
fn gelu_parts<L: F32Lanes>(x: L) -> (L, L, L, L) {
    const P: [f32; 5] = [0.5, 0.438_481_84, 0.183_368_4, 0.040_676_687, 0.004_122_155];
    const Q: [f32; 6] = [1.0, 1.674_848_6, 1.203_068_3, 0.469_820_74, 0.101_967_685, 0.010_332_593];
    let a = L::splat(14.9).min(x.abs());
    let (h, h_low) = a.two_product(a.mul(L::splat(0.5)));
    let e = Power::minus_pair(h, h_low, 64.0).value();
    let p1 = polynomial(a, [P[2], P[1]]);
    let p3 = polynomial(a, [2.0 * P[4], 2.0 * P[3]]);
    let p = p3.mul_add(h, p1).mul_add(a, L::splat(P[0]));
    let q1 = polynomial(a, [Q[2], Q[1]]);
    let q3 = polynomial(a, [2.0 * Q[4], 2.0 * Q[3]]);
    let q = h.mul_add(L::splat(4.0 * Q[5]), q3).mul_add(h, q1).mul_add(a, L::splat(Q[0]));
    (a, e, p, q)
}

/// max(x, 0), but NaN at minus infinity, and -0 for -0.
#[inline(always)]
fn positive_part<L: F32Lanes>(x: L) -> L {
    x.sub(x.min(L::splat(0.0)))
}

/// ln(1 + z) for z within 0..=1, plus `term`.
///
/// ln(1 + z) = 2 artanh(v / 2) with v = z / (1 + z / 2), whose series has only odd powers. The
/// polynomial was fitted on 0..=2/3; its relative error is 2^-27.7.
#[inline(always)]
fn ln_1p_plus<L: F32Lanes>(z: L, term: L) -> L {
    let v = z.div(z.mul_add(L::splat(0.5), L::splat(1.0)));
    let series =
        polynomial(v.mul(v), [0.000_547_006_9, 0.002_187_736_6, 0.012_506_699, 0.083_333_02, 1.0]);
    v.mul_add(series, term)
}

/// e^-|x|, down to the last denormal number.
#[inline(always)]
fn exp_minus_abs<L: F32Lanes>(x: L) -> L {
    Power::minus(L::splat(104.0).min(x.abs()), 64.0).value().mul(L::splat(DOWN))
}

/// Where [`Math::sin_cos`] stops reducing in f32. The split of π/2 that serves without fused
/// multiply-add has room for 15 bits of n.
#[inline(always)]
fn sin_cos_limit<L: F32Lanes>() -> f32 {
    if L::FUSED { 1_048_576.0 } else { 32_768.0 }
}

/// Sine and cosine through f64, for arguments of any size.
#[cold]
#[inline(never)]
fn sin_cos_of_large(x: &mut [f32; MAX_LANES], cosines: &mut [f32; MAX_LANES]) {
    for (x, cosine) in x.iter_mut().zip(cosines) {
        let (s, c) = f64::from(*x).sin_cos();
        (*x, *cosine) = (s as f32, c as f32);
    }
}

/// Within 2 ulp (2.3 without fused multiply-add).
///
/// Reduced by multiples of 2 ln 2, so that the power of two is a square: both its factors are
/// the same normal number, and the second product is where overflow and denormal results
/// happen. That costs one degree more, and spares building a second power. The polynomial was
/// fitted on ±0.694; its relative error is 2^-26.
#[inline(always)]
fn exact_exp<L: F32Lanes>(x: L) -> L {
    let x = clamp(x, -104.0, 89.0);
    let push = L::splat(PUSH + 127.0);
    let pushed = x.mul_add(L::splat(0.5 * LOG2_E), push);
    let n = pushed.sub(push);
    let r = n.neg_mul_add(L::splat(2.0 * LN2_HIGH), x);
    let r = n.neg_mul_add(L::splat(2.0 * LN2_LOW), r);
    let fraction = polynomial(
        r,
        [
            0.000_196_305_7,
            0.001_410_553_2,
            0.008_335_964,
            0.041_661_195,
            0.166_666_16,
            0.500_000_36,
            1.0,
            1.0,
        ],
    );
    let root = pushed.exp2_pushed();
    fraction.mul(root).mul(root)
}

/// Within 3 ulp.
#[inline(always)]
fn exact_sigmoid<L: F32Lanes>(x: L) -> L {
    let power = Power::minus(clamp(x, -105.0, 32.0), -64.0);
    L::splat(DOWN).div(power.value_plus(DOWN))
}

/// Within 3 ulp.
#[inline(always)]
fn exact_silu<L: F32Lanes>(x: L) -> L {
    let (x, rest, power) = silu_parts(x);
    gated(x, rest, &power)
}

/// Slope within 3 ulp.
///
/// The slope is even, so this starts from the smaller of sigmoid(x) and sigmoid(-x): their
/// product keeps its accuracy on both sides.
#[inline(always)]
fn exact_sigmoid_and_slope<L: F32Lanes>(x: L) -> (L, L) {
    let power = Power::minus(L::splat(-105.0).max(x.abs().neg()), -64.0);
    let small = L::splat(DOWN).div(power.value_plus(DOWN));
    let large = L::splat(1.0).sub(small);
    (x.select_sign(small, large), small.mul(large))
}

/// Slope within 4.5 ulp of the larger of its terms s and x s (1 - s); they cancel at
/// x = -1.278.
#[inline(always)]
fn exact_silu_and_slope<L: F32Lanes>(x: L) -> (L, L) {
    let (clamped, rest, power) = silu_parts(x);
    gated_and_slope(x, clamped, rest, clamped, &power)
}

impl<L: F32Lanes> Math for L {
    const HAS_SHORT: bool = L::STORED_BITS < 24;
    #[inline(always)]
    fn exp(self) -> Self {
        exact_exp(self)
    }

    #[inline(always)]
    fn exp_for_store<const NEAR: bool>(self) -> Self {
        if !Self::HAS_SHORT {
            return exact_exp(self);
        }
        let short = Short::plus(self).value();
        unless_far::<L, NEAR>(self, Exactly::Exp, (short, short)).0
    }

    #[inline(always)]
    fn exp_minus_for_store(self) -> Self {
        if Self::HAS_SHORT { Short::minus(self).value() } else { exact_exp(self.neg()) }
    }

    #[inline(always)]
    fn reciprocal_for_store(self) -> Self {
        if Self::HAS_SHORT { Short::reciprocal(self) } else { L::splat(1.0).div(self) }
    }

    /// Within 1e-7 absolute; where |x| < 0.7, sine is within 0.7 ulp.
    ///
    /// The nearest multiple of π/2 is taken away, in two parts where a product and a
    /// difference round once together (the first such step is then exact), and otherwise in three,
    /// of which two are so short that their products are exact. Polynomials of degree 7 and 8
    /// follow, fitted on 0.001..=0.82, to relative errors of 2^-27.4 and 2^-32. Arguments beyond
    /// [`sin_cos_limit`] go through f64.
    #[inline(always)]
    fn sin_cos(self) -> (Self, Self) {
        let push = L::splat(PUSH);
        let pushed = self.mul_add(L::splat(std::f32::consts::FRAC_2_PI), push);
        let n = pushed.sub(push);
        let r = if L::FUSED {
            let r = n.neg_mul_add(L::splat(std::f32::consts::FRAC_PI_2), self);
            n.neg_mul_add(L::splat(-4.371_139e-8), r)
        } else {
            let r = n.neg_mul_add(L::splat(402.0 / 256.0), self);
            let r = n.neg_mul_add(L::splat(63.0 / 131_072.0), r);
            n.neg_mul_add(L::splat(3.174_939_4e-6), r)
        };
        let square = r.mul(r);
        let sine = polynomial(square, [-0.000_194_841_46, 0.008_331_925, -0.166_666_51]);
        let sine = r.mul(square).mul_add(sine, r);
        let cosine = polynomial(square, [2.439_365e-5, -0.001_388_695_9, 0.041_666_638, -0.5, 1.0]);
        // A quarter turn swaps the two; half a turn changes the sign.
        let (swap, minus_sine) = pushed.low_bits_pushed();
        let (_, minus_cosine) = pushed.add(L::splat(1.0)).low_bits_pushed();
        let (sine, cosine) = (L::select(swap, cosine, sine), L::select(swap, sine, cosine));
        let sine = L::select(minus_sine, sine.neg(), sine);
        let cosine = L::select(minus_cosine, cosine.neg(), cosine);
        let large = L::splat(sin_cos_limit::<L>()).lt(self.abs());
        if !L::any(large) {
            return (sine, cosine);
        }
        let (mut sines, mut cosines) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
        // SAFETY: the arrays hold `MAX_LANES >= N` numbers.
        unsafe {
            self.store_raw(sines.as_mut_ptr());
            sin_cos_of_large(&mut sines, &mut cosines);
            // Lane by lane, so that no result depends on its neighbours.
            (
                L::select(large, L::load_raw(sines.as_ptr()), sine),
                L::select(large, L::load_raw(cosines.as_ptr()), cosine),
            )
        }
    }

    #[inline(always)]
    fn sigmoid(self) -> Self {
        exact_sigmoid(self)
    }

    #[inline(always)]
    fn sigmoid_for_store<const NEAR: bool>(self) -> Self {
        if !Self::HAS_SHORT {
            return exact_sigmoid(self);
        }
        let short = Short::minus(self).sigmoid();
        unless_far::<L, NEAR>(self, Exactly::Sigmoid, (short, short)).0
    }

    #[inline(always)]
    fn silu(self) -> Self {
        exact_silu(self)
    }

    #[inline(always)]
    fn silu_for_store<const NEAR: bool>(self) -> Self {
        if !Self::HAS_SHORT {
            return exact_silu(self);
        }
        let short = self.mul(Short::minus(self).sigmoid());
        unless_far::<L, NEAR>(self, Exactly::Silu, (short, short)).0
    }

    /// Within 3 ulp.
    #[inline(always)]
    fn tanh(self) -> Self {
        let (difference, sum, _) = tanh_parts(self);
        difference.div(sum).copysign(self)
    }

    /// Within 7 ulp (8 without fused multiply-add).
    ///
    /// a Φ(-a) is found for a = |x|, where it is accurate in the tail, and taken from max(x, 0):
    /// for x > 0, x Φ(x) = x - x Φ(-x), which cancels at most one bit.
    #[inline(always)]
    fn gelu(self) -> Self {
        let (a, e, p, q) = gelu_parts(self);
        a.mul(e).mul(p).div(q).neg_mul_add(L::splat(DOWN), positive_part(self))
    }

    /// Within 3 ulp (3.2 without fused multiply-add).
    #[inline(always)]
    fn gelu_tanh(self) -> Self {
        let (x, rest, power, _) = gelu_tanh_parts(self);
        gated(x, rest, &power)
    }

    /// Within 4 ulp.
    #[inline(always)]
    fn softplus(self) -> Self {
        ln_1p_plus(exp_minus_abs(self), L::splat(0.0).max(self))
    }

    #[inline(always)]
    fn sigmoid_and_slope(self) -> (Self, Self) {
        exact_sigmoid_and_slope(self)
    }

    /// The slope is e / (1 + e)², by two factors, since either square may leave f32.
    #[inline(always)]
    fn sigmoid_and_slope_for_store<const NEAR: bool>(self) -> (Self, Self) {
        if !Self::HAS_SHORT {
            return exact_sigmoid_and_slope(self);
        }
        let e = Short::minus(self).value();
        let s = Short::reciprocal(e.add(L::splat(1.0)));
        unless_far::<L, NEAR>(self, Exactly::SigmoidAndSlope, (s, e.mul(s).mul(s)))
    }

    #[inline(always)]
    fn silu_and_slope(self) -> (Self, Self) {
        exact_silu_and_slope(self)
    }

    /// The slope s (1 + x (1 - s)) is (1 + e + x e) s²: nothing cancels but what cancels in the
    /// result.
    #[inline(always)]
    fn silu_and_slope_for_store<const NEAR: bool>(self) -> (Self, Self) {
        if !Self::HAS_SHORT {
            return exact_silu_and_slope(self);
        }
        let e = Short::minus(self).value();
        let divisor = e.add(L::splat(1.0));
        let s = Short::reciprocal(divisor);
        let slope = self.mul_add(e, divisor).mul(s).mul(s);
        unless_far::<L, NEAR>(self, Exactly::SiluAndSlope, (self.mul(s), slope))
    }

    /// Slope within 4 ulp.
    ///
    /// With w = 4 z / (1 + z), the slope 4 z / (1 + z)² is w (1 - w / 4).
    #[inline(always)]
    fn tanh_and_slope(self) -> (Self, Self) {
        let (difference, sum, power) = tanh_parts(self);
        let w = power.value().div(sum.mul(L::splat(0.25)));
        let slope = w.mul(w.neg_mul_add(L::splat(0.25), L::splat(1.0)));
        (difference.div(sum).copysign(self), slope)
    }

    /// Slope within 5.5 ulp of the larger of its terms Φ(x) and x φ(x); they cancel at
    /// x = -0.752.
    #[inline(always)]
    fn gelu_and_slope(self) -> (Self, Self) {
        const FRAC_1_SQRT_2PI: f32 = 0.398_942_28;
        let (a, e, p, q) = gelu_parts(self);
        let ratio = p.div(q);
        let down = L::splat(DOWN);
        let value = a.mul(e).mul(ratio).neg_mul_add(down, positive_part(self));
        // The slope at -a; that at a is what it lacks to 1.
        let lifted = a.neg_mul_add(L::splat(FRAC_1_SQRT_2PI), ratio).mul(e);
        let slope = self.select_sign(lifted.mul(down), lifted.neg_mul_add(down, L::splat(1.0)));
        // The zero is NaN for an infinite argument, as the plain formula is.
        (value, self.mul_add(L::splat(0.0), slope))
    }

    /// Slope within 6.5 ulp of the larger of its terms s and x s (1 - s) v'; they cancel
    /// at x = -0.753.
    #[inline(always)]
    fn gelu_tanh_and_slope(self) -> (Self, Self) {
        let (x, rest, power, square) = gelu_tanh_parts(self);
        let reach = square.mul_add(L::splat(3.0 * TANH_KC), L::splat(TANH_K + TANH_K_LOW)).mul(x);
        gated_and_slope(self, x, rest, reach, &power)
    }
}

/// The same functions for one f64, by formulas without cancellation. Speed does not matter here.
mod scalar {
    use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI, PI};

    pub(super) fn sigmoid(x: f64) -> f64 {
        let z = (-x.abs()).exp();
        (if x < 0.0 { z } else { 1.0 }) / (1.0 + z)
    }
    pub(super) fn sigmoid_slope(x: f64) -> f64 {
        sigmoid(x) * sigmoid(-x)
    }
    pub(super) fn silu(x: f64) -> f64 {
        x * sigmoid(x)
    }
    pub(super) fn silu_slope(x: f64) -> f64 {
        sigmoid(x) * (1.0 + x * sigmoid(-x))
    }
    pub(super) fn tanh_slope(x: f64) -> f64 {
        4.0 * sigmoid_slope(2.0 * x)
    }
    pub(super) fn softplus(x: f64) -> f64 {
        // A comparison, since `f64::max` drops a NaN.
        (if x < 0.0 { 0.0 } else { x }) + (-x.abs()).exp().ln_1p()
    }

    pub(super) fn distribution(x: f64) -> f64 {
        0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
    }
    pub(super) fn density(x: f64) -> f64 {
        // The square of the upper bits is exact, so the exponential sees no rounding of it.
        let upper = f64::from_bits(x.to_bits() & !0x7FF_FFFF);
        let rest = if upper == x { 0.0 } else { (x - upper) * (x + upper) };
        (-0.5 * upper * upper).exp() * (-0.5 * rest).exp() / (2.0 * PI).sqrt()
    }
    pub(super) fn gelu(x: f64) -> f64 {
        x * distribution(x)
    }
    pub(super) fn gelu_slope(x: f64) -> f64 {
        distribution(x) + x * density(x)
    }

    /// v of `gelu_tanh`, and x dv/dx.
    pub(super) fn gelu_tanh_inner(x: f64) -> (f64, f64) {
        let k = 2.0 * FRAC_2_PI.sqrt();
        let cubic = 0.044715 * x * x;
        (k * x * (1.0 + cubic), k * x * (1.0 + 3.0 * cubic))
    }
    pub(super) fn gelu_tanh(x: f64) -> f64 {
        x * sigmoid(gelu_tanh_inner(x).0)
    }
    pub(super) fn gelu_tanh_slope(x: f64) -> f64 {
        // Finite arguments beyond 64 would have x² overflow before the sigmoid is zero.
        let bounded = if x.is_finite() { x.clamp(-64.0, 64.0) } else { x };
        let (v, reach) = gelu_tanh_inner(bounded);
        sigmoid(v) * (1.0 + reach * sigmoid(-v))
    }
}

impl Math for Portable64 {
    const HAS_SHORT: bool = false;
    fn exp(self) -> Self {
        self.map(f64::exp)
    }
    fn exp_for_store<const NEAR: bool>(self) -> Self {
        self.exp()
    }
    fn exp_minus_for_store(self) -> Self {
        self.neg().exp()
    }
    fn reciprocal_for_store(self) -> Self {
        self.map(f64::recip)
    }
    fn sin_cos(self) -> (Self, Self) {
        (self.map(f64::sin), self.map(f64::cos))
    }
    fn sigmoid(self) -> Self {
        self.map(scalar::sigmoid)
    }
    fn silu(self) -> Self {
        self.map(scalar::silu)
    }
    fn tanh(self) -> Self {
        self.map(f64::tanh)
    }
    fn gelu(self) -> Self {
        self.map(scalar::gelu)
    }
    fn gelu_tanh(self) -> Self {
        self.map(scalar::gelu_tanh)
    }
    fn softplus(self) -> Self {
        self.map(scalar::softplus)
    }
    fn sigmoid_and_slope(self) -> (Self, Self) {
        (self.sigmoid(), self.map(scalar::sigmoid_slope))
    }
    fn silu_and_slope(self) -> (Self, Self) {
        (self.silu(), self.map(scalar::silu_slope))
    }
    fn tanh_and_slope(self) -> (Self, Self) {
        (self.tanh(), self.map(scalar::tanh_slope))
    }
    fn gelu_and_slope(self) -> (Self, Self) {
        (self.gelu(), self.map(scalar::gelu_slope))
    }
    fn gelu_tanh_and_slope(self) -> (Self, Self) {
        (self.gelu_tanh(), self.map(scalar::gelu_tanh_slope))
    }
    fn sigmoid_for_store<const NEAR: bool>(self) -> Self {
        self.sigmoid()
    }
    fn silu_for_store<const NEAR: bool>(self) -> Self {
        self.silu()
    }
    fn sigmoid_and_slope_for_store<const NEAR: bool>(self) -> (Self, Self) {
        self.sigmoid_and_slope()
    }
    fn silu_and_slope_for_store<const NEAR: bool>(self) -> (Self, Self) {
        self.silu_and_slope()
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::dtype::{DType, Element};
    use crate::simd::{Isa, Kernel, Memory, run};

    /// One function, what it should give, and how far off it may be.
    struct Case {
        name: &'static str,
        which: Which,
        value: fn(f64) -> f64,
        /// Largest error, in ulp, with and without fused multiply-add.
        bound: [f64; 2],
        slope: Option<Slope>,
    }
    struct Slope {
        value: fn(f64) -> f64,
        /// The magnitude whose ulp the error is counted in.
        scale: fn(f64) -> f64,
        bound: [f64; 2],
    }

    #[derive(Clone, Copy)]
    enum Which {
        Exp,
        Sigmoid,
        Silu,
        Tanh,
        Gelu,
        GeluTanh,
        Softplus,
        SinCos,
    }

    const EXP: Case =
        Case { name: "exp", which: Which::Exp, value: f64::exp, bound: [2.0, 2.3], slope: None };
    const SIGMOID: Case = Case {
        name: "sigmoid",
        which: Which::Sigmoid,
        value: scalar::sigmoid,
        bound: [3.0, 3.0],
        slope: Some(Slope {
            value: scalar::sigmoid_slope,
            scale: scalar::sigmoid_slope,
            bound: [3.0, 3.0],
        }),
    };
    const SILU: Case = Case {
        name: "silu",
        which: Which::Silu,
        value: scalar::silu,
        bound: [3.0, 3.0],
        slope: Some(Slope {
            value: scalar::silu_slope,
            scale: |x| scalar::sigmoid(x).max(x.abs() * scalar::sigmoid_slope(x)),
            bound: [4.5, 4.5],
        }),
    };
    const TANH: Case = Case {
        name: "tanh",
        which: Which::Tanh,
        value: f64::tanh,
        bound: [3.0, 3.0],
        slope: Some(Slope {
            value: scalar::tanh_slope,
            scale: scalar::tanh_slope,
            bound: [4.0, 4.0],
        }),
    };
    const GELU: Case = Case {
        name: "gelu",
        which: Which::Gelu,
        value: scalar::gelu,
        bound: [7.0, 8.0],
        slope: Some(Slope {
            value: scalar::gelu_slope,
            scale: |x| scalar::distribution(x).max(x.abs() * scalar::density(x)),
            bound: [5.5, 5.5],
        }),
    };
    const GELU_TANH: Case = Case {
        name: "gelu_tanh",
        which: Which::GeluTanh,
        value: scalar::gelu_tanh,
        bound: [3.0, 3.2],
        slope: Some(Slope {
            value: scalar::gelu_tanh_slope,
            scale: |x| {
                let (v, reach) = scalar::gelu_tanh_inner(x.clamp(-64.0, 64.0));
                scalar::sigmoid(v).max(reach.abs() * scalar::sigmoid_slope(v))
            },
            bound: [6.5, 6.5],
        }),
    };
    const SOFTPLUS: Case = Case {
        name: "softplus",
        which: Which::Softplus,
        value: scalar::softplus,
        bound: [4.0, 4.0],
        slope: Some(Slope { value: scalar::sigmoid, scale: scalar::sigmoid, bound: [3.0, 3.0] }),
    };
    /// The errors of sine and cosine are counted in ulp of 1/2, which is 2^-24; 1.6 of them are
    /// below 1e-7.
    const SIN_COS: Case = Case {
        name: "sin_cos",
        which: Which::SinCos,
        value: f64::sin,
        bound: [1.6, 1.6],
        slope: Some(Slope { value: f64::cos, scale: |_| 0.5, bound: [1.6, 1.6] }),
    };
    const CASES: [&Case; 8] =
        [&EXP, &SIGMOID, &SILU, &TANH, &GELU, &GELU_TANH, &SOFTPLUS, &SIN_COS];

    /// Where a kernel of this test reads and writes.
    #[derive(Clone, Copy)]
    struct Buffers<T> {
        x: *const T,
        /// The function on its own.
        alone: *mut T,
        /// The function with its slope.
        value: *mut T,
        slope: *mut T,
        /// A multiple of `MAX_LANES`.
        len: usize,
    }

    /// Applies one function to elements of the kernel's type or, where that is another, of f32.
    struct Apply<T> {
        which: Which,
        buffers: Buffers<T>,
    }

    impl<U: Element> Kernel for Apply<U> {
        #[inline(always)]
        fn run<L, T>(self)
        where
            T: Element,
            L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
        {
            let b = self.buffers;
            if U::DTYPE == T::DTYPE {
                let b: Buffers<T> = Buffers {
                    x: b.x.cast(),
                    alone: b.alone.cast(),
                    value: b.value.cast(),
                    slope: b.slope.cast(),
                    len: b.len,
                };
                apply::<L, T>(self.which, b);
            } else {
                assert_eq!(U::DTYPE, <T::Real as Element>::DTYPE);
                let b: Buffers<T::Real> = Buffers {
                    x: b.x.cast(),
                    alone: b.alone.cast(),
                    value: b.value.cast(),
                    slope: b.slope.cast(),
                    len: b.len,
                };
                apply::<L, T::Real>(self.which, b);
            }
        }
    }

    #[inline(always)]
    fn apply<L: Math + Memory<T>, T: Element<Real = L::Real>>(which: Which, b: Buffers<T>) {
        macro_rules! each {
            ($x:ident, $alone:expr, $both:expr) => {
                for i in (0..b.len).step_by(L::N) {
                    // SAFETY: the buffers hold `len` elements, a multiple of `N`.
                    unsafe {
                        let $x = <L as Memory<T>>::load(b.x.add(i));
                        $alone.store(b.alone.add(i));
                        let (value, slope) = $both;
                        value.store(b.value.add(i));
                        slope.store(b.slope.add(i));
                    }
                }
            };
        }
        match which {
            Which::Exp => each!(x, x.exp(), (x.exp(), x.exp())),
            Which::Sigmoid => each!(x, x.sigmoid(), x.sigmoid_and_slope()),
            Which::Silu => each!(x, x.silu(), x.silu_and_slope()),
            Which::Tanh => each!(x, x.tanh(), x.tanh_and_slope()),
            Which::Gelu => each!(x, x.gelu(), x.gelu_and_slope()),
            Which::GeluTanh => each!(x, x.gelu_tanh(), x.gelu_tanh_and_slope()),
            Which::Softplus => each!(x, x.softplus(), (x.softplus(), x.sigmoid())),
            Which::SinCos => each!(x, x.sin_cos().0, x.sin_cos()),
        }
    }

    /// The function on its own, and with its slope, of every element of `x`.
    fn evaluate<T: Element>(isa: Isa, dtype: DType, which: Which, x: &[T]) -> [Vec<T>; 3] {
        let mut x = x.to_vec();
        let len = x.len();
        x.resize(len.next_multiple_of(MAX_LANES), T::default());
        let mut out = [x.clone(), x.clone(), x.clone()];
        let [alone, value, slope] = &mut out;
        let buffers = Buffers {
            x: x.as_ptr(),
            alone: alone.as_mut_ptr(),
            value: value.as_mut_ptr(),
            slope: slope.as_mut_ptr(),
            len: x.len(),
        };
        run(isa, dtype, Apply { which, buffers });
        out.map(|mut v| {
            v.truncate(len);
            v
        })
    }

    /// The distance of f32 at x.
    fn ulp(x: f64) -> f64 {
        let exponent = ((x.to_bits() >> 52) & 0x7FF) as i32 - 1023;
        2f64.powi(exponent.clamp(-126, 127) - 23)
    }

    /// |got - wanted| in ulp of `scale`, where an overflow of f32 has to be an infinity.
    fn error(got: f32, wanted: f64, scale: f64) -> f64 {
        if (wanted as f32).is_infinite() || got.is_infinite() {
            // 2^128 stands for infinity: right there, the distance is that of finite numbers.
            let finite = |v: f64| v.clamp(-(2f64.powi(128)), 2f64.powi(128));
            return (finite(f64::from(got)) - finite(wanted)).abs() / ulp(f64::from(f32::MAX));
        }
        let error = (f64::from(got) - wanted).abs() / ulp(scale);
        if error.is_nan() { f64::INFINITY } else { error }
    }

    /// Finite arguments: a coarse grid over all f32, a fine one where functions bend, and the
    /// neighbourhoods of clamps and other seams.
    fn sweep() -> Vec<f32> {
        let mut x: Vec<f32> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).collect();
        let (low, high) = (2f32.powi(-6).to_bits(), 128f32.to_bits());
        x.extend((low..high).step_by(151).map(f32::from_bits));
        x.extend((low..high).step_by(151).map(|bits| -f32::from_bits(bits)));
        let seams = [
            0.0,
            f32::MIN_POSITIVE,
            0.3465736,
            std::f32::consts::LN_2,
            0.75179,
            1.27846,
            7.0,
            11.0,
            14.9,
            16.0,
            17.328,
            32.0,
            54.0,
            87.33655,
            88.0,
            88.72284,
            89.0,
            103.97208,
            104.0,
            105.0,
            111.0,
            128.0,
            32768.0,
            1048576.0,
            8388608.0,
            1e10,
            1.7014118e38,
            f32::MAX,
        ];
        for seam in seams {
            let bits = f32::to_bits(seam);
            for near in bits.saturating_sub(200)..=(bits + 200).min(f32::MAX.to_bits()) {
                x.extend([f32::from_bits(near), -f32::from_bits(near)]);
            }
        }
        x.retain(|x| x.is_finite());
        x
    }

    /// Kernel types under test: f32 in index order, and f32 as it meets bf16.
    fn lanes() -> impl Iterator<Item = (Isa, DType)> {
        Isa::available().flat_map(|isa| [(isa, DType::F32), (isa, DType::BF16)])
    }

    fn check(case: &Case) {
        let xs = sweep();
        let unfused = |isa: Isa| usize::from(isa == Isa::Portable);
        for (isa, dtype) in lanes() {
            let [alone, value, slope] = evaluate(isa, dtype, case.which, &xs);
            let mut worst = [(0.0, 0.0); 3];
            for (i, &x) in xs.iter().enumerate() {
                let wanted = (case.value)(f64::from(x));
                let scale = if matches!(case.which, Which::SinCos) { 0.5 } else { wanted };
                let mut note = |k: usize, error: f64| {
                    if error > worst[k].0 {
                        worst[k] = (error, x);
                    }
                };
                note(0, error(alone[i], wanted, scale));
                note(1, error(value[i], wanted, scale));
                if let Some(expected) = &case.slope {
                    let x = f64::from(x);
                    note(2, error(slope[i], (expected.value)(x), (expected.scale)(x)));
                }
            }
            let [a, v, s] = worst;
            println!(
                "{:9} {isa:8} {dtype:4}: {:.3} ulp at {:e}; with slope {:.3} at {:e}, slope {:.3} at {:e}",
                case.name, a.0, a.1, v.0, v.1, s.0, s.1
            );
            assert!(a.0 <= case.bound[unfused(isa)]);
            assert!(v.0 <= case.bound[unfused(isa)]);
            assert!(case.slope.as_ref().is_none_or(|slope| s.0 <= slope.bound[unfused(isa)]));
        }
    }

    #[test]
    fn exp_is_accurate() {
        check(&EXP);
    }
    #[test]
    fn sigmoid_is_accurate() {
        check(&SIGMOID);
    }
    #[test]
    fn silu_is_accurate() {
        check(&SILU);
    }
    #[test]
    fn tanh_is_accurate() {
        check(&TANH);
    }
    #[test]
    fn gelu_is_accurate() {
        check(&GELU);
    }
    #[test]
    fn gelu_tanh_is_accurate() {
        check(&GELU_TANH);
    }
    #[test]
    fn softplus_is_accurate() {
        check(&SOFTPLUS);
    }
    #[test]
    fn sin_cos_is_accurate() {
        check(&SIN_COS);
    }

    #[test]
    fn sine_of_small_arguments_is_relatively_accurate() {
        let xs: Vec<f32> = sweep().into_iter().filter(|x| x.abs() < 0.7).collect();
        for (isa, dtype) in lanes() {
            let [_, sine, _] = evaluate(isa, dtype, Which::SinCos, &xs);
            let errors = xs.iter().zip(&sine).map(|(&x, &got)| {
                let wanted = f64::from(x).sin();
                error(got, wanted, wanted)
            });
            let worst = errors.fold(0.0, f64::max);
            println!("{isa} {dtype}: {worst:.3}");
            assert!(worst <= 0.7);
        }
    }

    /// All 65536 numbers of a 16-bit type: at most one step from the rounding of the exact result.
    fn check_all_of<T: Element>(dtype: DType, from_bits: fn(u16) -> T, to_bits: fn(T) -> u16) {
        // Consecutive integers for consecutive numbers, with both zeros at 0.
        let rank = |v: T| {
            let bits = i32::from(to_bits(v));
            if bits < 0x8000 { bits } else { 0x8000 - bits }
        };
        let xs: Vec<T> = (0..=u16::MAX).map(from_bits).collect();
        for isa in Isa::available() {
            for case in CASES {
                let got = evaluate(isa, dtype, case.which, &xs);
                let mut off = [0; 3];
                for k in 0..3 {
                    let wanted = match (&case.slope, k) {
                        (Some(slope), 2) => slope.value,
                        (None, 2) => continue,
                        _ => case.value,
                    };
                    for (x, &got) in xs.iter().zip(&got[k]) {
                        let wanted = T::from_f64(wanted(x.to_f64()));
                        if wanted.to_f64().is_nan() || got.to_f64().is_nan() {
                            assert_eq!(
                                got.to_f64().is_nan(),
                                wanted.to_f64().is_nan(),
                                "{} of {x:?}",
                                case.name
                            );
                            continue;
                        }
                        let steps = (rank(got) - rank(wanted)).abs();
                        let name = case.name;
                        assert!(steps <= 1, "{name} {isa} {k}: {x:?} {got:?} {wanted:?}");
                        off[k] += steps;
                    }
                }
                println!("{:9} {dtype} {isa}: {off:?} of 65536 are one step off", case.name);
                assert!(off.iter().all(|&off| off < 20));
            }
        }
    }

    #[test]
    fn bf16_results_are_roundings() {
        check_all_of(DType::BF16, bf16::from_bits, bf16::to_bits);
    }
    #[test]
    fn f16_results_are_roundings() {
        check_all_of(DType::F16, f16::from_bits, f16::to_bits);
    }

    #[test]
    fn infinities_and_zeros() {
        const INF: f32 = f32::INFINITY;
        const NAN: f32 = f32::NAN;
        // Values at -inf, -0, 0 and inf; slopes at -inf and inf.
        let table = [
            (Which::Exp, [0.0, 1.0, 1.0, INF], None),
            (Which::Sigmoid, [0.0, 0.5, 0.5, 1.0], Some([0.0, 0.0])),
            (Which::Silu, [NAN, -0.0, 0.0, INF], Some([NAN, NAN])),
            (Which::Tanh, [-1.0, -0.0, 0.0, 1.0], Some([0.0, 0.0])),
            (Which::Gelu, [NAN, -0.0, 0.0, INF], Some([NAN, NAN])),
            (Which::GeluTanh, [NAN, -0.0, 0.0, INF], Some([NAN, NAN])),
            (
                Which::Softplus,
                [0.0, std::f32::consts::LN_2, std::f32::consts::LN_2, INF],
                Some([0.0, 1.0]),
            ),
            (Which::SinCos, [NAN, 0.0, 0.0, NAN], Some([NAN, NAN])),
        ];
        fn same(a: f32, b: f32, signed: bool) -> bool {
            a == b && (!signed || a.is_sign_negative() == b.is_sign_negative())
                || a.is_nan() && b.is_nan()
        }
        for (isa, dtype) in lanes() {
            for (which, values, slopes) in table {
                let [alone, value, slope] = evaluate(isa, dtype, which, &[-INF, -0.0, 0.0, INF]);
                let signed = !matches!(which, Which::SinCos);
                for i in 0..4 {
                    assert!(same(alone[i], values[i], signed), "{isa} {} {i}", which as u8);
                    assert!(same(value[i], values[i], signed), "{isa} {} {i}", which as u8);
                }
                if let Some([low, high]) = slopes {
                    assert!(same(slope[0], low, true) && same(slope[3], high, true));
                }
            }
        }
    }

    #[test]
    fn f64_lanes_follow_the_same_rules_at_the_ends() {
        let xs = [f64::NEG_INFINITY, f64::MIN, f64::MAX, f64::INFINITY, f64::NAN];
        for case in CASES {
            let [_, value, slope] = evaluate(Isa::Portable, DType::F64, case.which, &xs);
            let [_, value32, slope32] =
                evaluate(Isa::Portable, DType::F32, case.which, &xs.map(|x| x as f32));
            for i in [0, 3, 4] {
                assert_eq!(value[i].is_nan(), value32[i].is_nan(), "{} of {}", case.name, xs[i]);
                assert_eq!(slope[i].is_nan(), slope32[i].is_nan(), "{}' of {}", case.name, xs[i]);
            }
            if case.slope.is_some() {
                assert!(slope[1].is_finite() && slope[2].is_finite(), "{}", case.name);
            }
        }
    }

    /// The f64 formulas themselves, against values from mpmath with 40 digits.
    #[test]
    fn f64_formulas_are_accurate() {
        type Formula = fn(f64) -> f64;
        let table: [(Formula, f64, f64); 30] = [
            (scalar::sigmoid, -100.3, 2.75590006535656847e-44),
            (scalar::sigmoid, -1.7, 0.15446526508353471),
            (scalar::sigmoid, 2.4, 0.916827303506077623),
            (scalar::silu, -100.3, -2.7641677655526381e-42),
            (scalar::silu, -1.7, -0.262590950642009),
            (scalar::silu, 2.4, 2.20038552841458621),
            (scalar::sigmoid_slope, -100.3, 2.75590006535656847e-44),
            (scalar::sigmoid_slope, -1.7, 0.130605746966208063),
            (scalar::sigmoid_slope, 2.4, 0.0762549990518522497),
            (scalar::silu_slope, -100.3, -2.73660876489907241e-42),
            (scalar::silu_slope, -1.7, -0.0675645047590189909),
            (scalar::silu_slope, 2.4, 1.09983930123052302),
            (scalar::tanh_slope, -100.3, 3.03799406809293535e-87),
            (scalar::tanh_slope, -1.7, 0.125009870633446597),
            (scalar::tanh_slope, 2.4, 0.0323837743413179941),
            (scalar::softplus, -100.3, 2.75590006535656847e-44),
            (scalar::softplus, -1.7, 0.167786029386265924),
            (scalar::softplus, 2.4, 2.4868361521539496),
            (scalar::gelu, -12.3, -5.57030955607530544e-34),
            (scalar::gelu, -1.7, -0.0757612866895231722),
            (scalar::gelu, 2.4, 2.3803259137809692),
            (scalar::gelu_slope, -12.3, -6.85090094979213631e-33),
            (scalar::gelu_slope, -1.7, -0.115317968782164734),
            (scalar::gelu_slope, 2.4, 1.04554933678302683),
            (scalar::gelu_tanh, -9.7, -9.58337118936905799e-35),
            (scalar::gelu_tanh, -1.7, -0.0758941044488438414),
            (scalar::gelu_tanh, 2.4, 2.38072315384439819),
            (scalar::gelu_tanh_slope, -9.7, -2.07326655448093935e-33),
            (scalar::gelu_tanh_slope, -1.7, -0.115914631452604996),
            (scalar::gelu_tanh_slope, 2.4, 1.04605995860572833),
        ];
        for (f, x, wanted) in table {
            let relative = (f(x) - wanted).abs() / wanted.abs();
            assert!(relative < 4e-14, "{x}: {:e} {wanted:e}", f(x));
        }
    }

    #[test]
    fn nan_stays_nan_with_its_payload() {
        let mut xs = vec![];
        for bits in
            [0x7FC0_0000u32, 0x7F80_0001, 0x7FFF_FFFF, 0x7F81_2345, 0x7FAB_0000, 0x7F81_0000]
        {
            xs.extend([f32::from_bits(bits), f32::from_bits(bits | 1 << 31)]);
        }
        // Every lane, among numbers.
        let xs: Vec<f32> = xs.iter().flat_map(|&nan| [nan, 1.0, -2.0]).collect();
        for (isa, dtype) in lanes() {
            for case in CASES {
                let got = evaluate(isa, dtype, case.which, &xs);
                for (i, x) in xs.iter().enumerate() {
                    for got in &got {
                        assert_eq!(got[i].is_nan(), x.is_nan(), "{}", case.name);
                        if x.is_nan() {
                            let quiet = x.to_bits() & 0x7FFF_FFFF | 0x0040_0000;
                            let bits = got[i].to_bits() & 0x7FFF_FFFF;
                            assert!(bits == quiet || bits == 0x7FC0_0000, "{} {bits:x}", case.name);
                        }
                    }
                }
            }
        }
    }
}
