//! Functions of the operators, in f32.
//!
//! The core's functions (`simd/math.rs` of [`fuselane`]), one number at a time, with its
//! polynomials, clamps and shifts by 2^64; what they rest on is said there. Some steps differ,
//! because a GPU's compiler promises less than a CPU's:
//!
//! - **2^n is built from an integer** that was rounded and converted, not by an addition that
//!   leaves no room for a fraction: compilers may take the latter for x + c - c.
//! - **The error of a product** comes from halves of its factors ([`two_product`]), cut by their
//!   bits. It is right whether products and sums are fused or not, some or all of them.
//! - **Where a rounding matters**, what was rounded goes through [`opaque`]. Shading languages have
//!   no word for it, and compilers otherwise take x + c - x for c, and (x y) 2^-64 for
//!   (2^-64 x) y, which is denormal or nothing.
//! - **NaN and infinities are looked for by their bits**, since compilers may assume that
//!   comparisons and sums never meet them; see [`nan_of_nan`] and its like.
//!
//! Where a result is stored in 16 bits (`short`), sigmoid and silu take the device's own
//! exponential. The others are exact to a few ulp of f32 everywhere.

use cubecl::prelude::*;
use fuselane::Act;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in 15 bits: times an integer of 9 bits it is exact.
const LN2_HIGH: f32 = 22713.0 / 32768.0;
const LN2_LOW: f32 = 1.428_606_8e-6;
/// 2^64: how far intermediate results stay from the ends of f32.
const UP: f32 = (1u128 << 64) as f32;
const TWICE_UP: f32 = 2.0 * UP;
/// 2^-64.
const DOWN: f32 = 1.0 / UP;
/// ln 2^64.
const LN_UP: f32 = 44.361_42;
/// Below this, the device's own exponential may come to denormal numbers.
const SHORT_LIMIT: f32 = -80.0;

/// 2 √(2/π), in 21 bits and the rest, and its product with 0.044715.
const TANH_K: f32 = 1.595_768_928_527_832;
const TANH_K_LOW: f32 = 1.930_779e-7;
const TANH_K_SUM: f32 = TANH_K + TANH_K_LOW;
const TANH_KC: f32 = 0.071_354_814;
const TANH_KC_LOW: f32 = 2.398_832_5e-9;
const TANH_3KC: f32 = 3.0 * TANH_KC;

/// The bits of infinity, which those of a NaN are above.
const INFINITY: u32 = 0x7f80_0000;
const SIGN: u32 = 0x8000_0000;
/// Or'ed to the bits of an infinity or a NaN, makes a quiet NaN.
const QUIET: u32 = 0x7fc0_0000;

/// f(x). `short` says that the result is stored in 16 bits.
#[cube]
pub(crate) fn value<N: Size>(
    x: Vector<f32, N>,
    #[comptime] act: Act,
    #[comptime] short: bool,
) -> Vector<f32, N> {
    if comptime!(act == Act::None) {
        x
    } else {
        let mut y = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..N::value() {
            y.insert(i, value_of(x.extract(i), act, short));
        }
        y
    }
}

/// e^x; see [`exp_of`].
#[cube]
pub(crate) fn exp<N: Size>(x: Vector<f32, N>, #[comptime] short: bool) -> Vector<f32, N> {
    let mut e = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        e.insert(i, exp_of(x.extract(i), short));
    }
    e
}

/// grad * f'(x), where relu and its square cut `grad` off whatever it is.
#[cube]
pub(crate) fn pull_back<N: Size>(
    x: Vector<f32, N>,
    grad: Vector<f32, N>,
    #[comptime] act: Act,
    #[comptime] short: bool,
) -> Vector<f32, N> {
    if comptime!(act == Act::None) {
        grad
    } else {
        let mut dx = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..N::value() {
            dx.insert(i, pull_back_of(x.extract(i), grad.extract(i), act, short));
        }
        dx
    }
}

/// grad * f'(x), from o = f(x), for the functions of [`Act::has_slope_from_output`].
#[cube]
pub(crate) fn pull_back_from_output<N: Size>(
    o: Vector<f32, N>,
    grad: Vector<f32, N>,
    #[comptime] act: Act,
) -> Vector<f32, N> {
    match comptime!(act) {
        Act::Relu => pull_back::<N>(o, grad, Act::Relu, false),
        Act::Sigmoid => grad * (o - o * o),
        Act::Tanh => grad * (Vector::<f32, N>::new(1.0f32) - o * o),
        _ => grad,
    }
}

/// f(x), for one number.
#[cube]
pub(crate) fn value_of(x: f32, #[comptime] act: Act, #[comptime] short: bool) -> f32 {
    match comptime!(act) {
        Act::None => x,
        Act::Relu => relu(x),
        Act::Sigmoid => sigmoid(x, short),
        Act::Silu => silu(x, short),
        Act::Tanh => tanh(x),
        Act::Gelu => gelu(x),
        Act::GeluTanh => gelu_tanh(x),
        Act::Softplus => softplus(x),
        Act::ReluSquared => {
            let positive = relu(x);
            positive * positive
        }
    }
}

/// f'(x), for one number.
#[cube]
pub(crate) fn slope_of(x: f32, #[comptime] act: Act, #[comptime] short: bool) -> f32 {
    match comptime!(act) {
        Act::None => f32::new(1.0),
        Act::Relu => select(x <= 0.0f32, 0.0f32, 1.0f32),
        Act::Softplus => sigmoid(x, false),
        Act::ReluSquared => {
            let positive = relu(x);
            positive + positive
        }
        _ => {
            let (_, slope) = value_and_slope_of(x, act, short);
            slope
        }
    }
}

/// f(x) and f'(x), for one number.
#[cube]
pub(crate) fn value_and_slope_of(
    x: f32,
    #[comptime] act: Act,
    #[comptime] short: bool,
) -> (f32, f32) {
    match comptime!(act) {
        Act::Sigmoid => sigmoid_and_slope(x, short),
        Act::Silu => silu_and_slope(x, short),
        Act::Tanh => tanh_and_slope(x),
        Act::Gelu => gelu_and_slope(x),
        Act::GeluTanh => gelu_tanh_and_slope(x),
        _ => (value_of(x, act, short), slope_of(x, act, short)),
    }
}

#[cube]
fn pull_back_of(x: f32, grad: f32, #[comptime] act: Act, #[comptime] short: bool) -> f32 {
    match comptime!(act) {
        Act::None => grad,
        Act::Relu => select(x <= 0.0f32, 0.0f32, grad),
        Act::ReluSquared => {
            // The product is doubled last: twice x or twice the gradient may overflow where the
            // result does not.
            let half = opaque(grad * x);
            select(x <= 0.0f32, 0.0f32, half + half)
        }
        _ => grad * slope_of(x, act, short),
    }
}

/// e^x: 0 or denormal numbers below, infinity above. `short` is the device's own, where that is
/// exact enough, as it is for results that are stored in 16 bits.
#[cube]
pub(crate) fn exp_of(x: f32, #[comptime] short: bool) -> f32 {
    if comptime!(short) {
        let (e, scale) = short_exp(x);
        e * scale
    } else {
        exact_exp(x)
    }
}

/// ln x, for x of 1 and more, within 2 ulp. (For smaller ones too, down to the smallest normal
/// number.)
///
/// x = 2^k m with m within √½ and √2; ln m is as in [`ln_1p`].
#[cube]
pub(crate) fn ln_of(x: f32) -> f32 {
    let bits = u32::reinterpret(x);
    // Just above √½, from where the exponent counts.
    let low = 0x3f35_04f4u32;
    let exponent = (bits - low) >> 23;
    let m = f32::reinterpret(((bits - low) & 0x007f_ffffu32) + low);
    // Below √½ the difference wrapped around.
    let k = f32::cast_from(i32::cast_from(exponent) - select(exponent > 255u32, 512i32, 0i32));
    let ln = k * LN2_HIGH + (k * LN2_LOW + ln_1p(m - 1.0f32));
    select(bits >= comptime!(INFINITY), x, ln)
}

/// x, or `most` where x is above it. A NaN stays.
#[cube]
fn at_most(x: f32, most: f32) -> f32 {
    select(x > most, most, x)
}

/// x, or `least` where x is below it. A NaN stays.
#[cube]
fn at_least(x: f32, least: f32) -> f32 {
    select(x < least, least, x)
}

/// `y`, but NaN where x is NaN.
#[cube]
fn nan_of_nan(x: f32, y: f32) -> f32 {
    let bits = u32::reinterpret(x);
    let nan = (bits & comptime!(!SIGN)) > comptime!(INFINITY);
    select(nan, f32::reinterpret(bits | comptime!(QUIET)), y)
}

/// `y`, but NaN where x is NaN or minus infinity: there x sigmoid(x) is -inf * 0.
#[cube]
fn nan_of_nan_and_minus_infinity(x: f32, y: f32) -> f32 {
    let bits = u32::reinterpret(x);
    let nan = (bits > comptime!(INFINITY) && bits < comptime!(SIGN))
        || bits >= comptime!(INFINITY | SIGN);
    select(nan, f32::reinterpret(bits | comptime!(QUIET)), y)
}

/// `y`, but NaN where x is not finite.
#[cube]
fn nan_unless_finite(x: f32, y: f32) -> f32 {
    let bits = u32::reinterpret(x);
    let beyond = (bits & comptime!(!SIGN)) >= comptime!(INFINITY);
    select(beyond, f32::reinterpret(bits | comptime!(QUIET)), y)
}

/// `y`, which is not negative, with the sign of x.
#[cube]
fn with_sign_of(x: f32, y: f32) -> f32 {
    f32::reinterpret(u32::reinterpret(y) | (u32::reinterpret(x) & comptime!(SIGN)))
}

/// x, of which no compiler knows where it comes from.
///
/// Besides the above, a compiler may take n a + (n b + c) for n (a + b) + c, which is what splitting
/// a constant in two is there to avoid. CubeCL itself, and the driver after it, fuse products and
/// sums; that does no harm.
///
/// Launches count cubes in two dimensions at most ([`crate::launch::Grid`]), so that the third
/// position is 0, which is known on the device only.
#[cube]
pub(crate) fn opaque(x: f32) -> f32 {
    f32::reinterpret(u32::reinterpret(x) ^ CUBE_POS_Z)
}

/// The upper 12 bits of x.
#[cube]
fn upper(x: f32) -> f32 {
    f32::reinterpret(u32::reinterpret(x) & 0xffff_f000u32)
}

/// a * b, and its error, to 2^-35 of it.
#[cube]
pub(crate) fn two_product(a: f32, b: f32) -> (f32, f32) {
    let product = opaque(a * b);
    let (a_high, b_high) = (upper(a), upper(b));
    let (a_low, b_low) = (a - a_high, b - b_high);
    // Otherwise a_high is taken out of the sum of its two products, and the error with it.
    let first = opaque(a_high * b_high - product);
    (product, a_low * b_low + (a_low * b_high + (a_high * b_low + first)))
}

/// 2^n.
#[cube]
fn power_of_two(n: i32) -> f32 {
    f32::reinterpret(u32::cast_from(n + 127i32) << 23u32)
}

/// e^-u as a product, (1 + r q) * scale, where e^-r = 1 + r q.
#[derive(CubeType)]
struct Power {
    r: f32,
    q: f32,
    /// 2^(n + shift).
    scale: f32,
}

/// e^-(u + low) * 2^`shift`, for u whose n + shift stays within -126..=127, and |low| below an ulp
/// or so of u.
#[cube]
fn power_of_minus(u: f32, low: f32, #[comptime] shift: i32) -> Power {
    let n = (u * (-LOG2_E)).round();
    let scale = power_of_two(i32::cast_from(n) + shift);
    let r = opaque(u + n * LN2_HIGH) + (n * LN2_LOW + low);
    let q = ((((0.001_387_073_2f32 * r - 0.008_366_277f32) * r + 0.041_667_435f32) * r
        - 0.166_665_46f32)
        * r
        + 0.499_999_97f32)
        * r
        - 1.0f32;
    Power { r, q, scale }
}

/// 1 + r q, between 0.7 and 1.42.
#[cube]
fn fraction(power: &Power) -> f32 {
    power.q * power.r + 1.0f32
}

/// e^x within 2.3 ulp, by multiples of 2 ln 2: the power of two is a square, and the product with
/// its second root is where overflow and denormal results happen.
#[cube]
fn exact_exp(x: f32) -> f32 {
    let y = at_least(at_most(x, 89.0f32), -104.0f32);
    let n = (y * comptime!(0.5 * LOG2_E)).round();
    let r = opaque(y - n * comptime!(2.0 * LN2_HIGH)) - n * comptime!(2.0 * LN2_LOW);
    let fraction = ((((((0.000_196_305_7f32 * r + 0.001_410_553_2f32) * r + 0.008_335_964f32)
        * r
        + 0.041_661_195f32)
        * r
        + 0.166_666_16f32)
        * r
        + 0.500_000_36f32)
        * r
        + 1.0f32)
        * r
        + 1.0f32;
    let root = power_of_two(i32::cast_from(n));
    nan_of_nan(x, opaque(fraction * root) * root)
}

/// e^x as a product of two numbers, of which the first is not denormal where the second is not 1.
#[cube]
fn short_exp(x: f32) -> (f32, f32) {
    let low = x < SHORT_LIMIT;
    (select(low, x + LN_UP, x).exp(), select(low, DOWN, 1.0f32))
}

#[cube]
fn relu(x: f32) -> f32 {
    nan_of_nan(x, select(x < 0.0f32, 0.0f32, x))
}

#[cube]
fn sigmoid(x: f32, #[comptime] short: bool) -> f32 {
    if comptime!(short) {
        let (e, scale) = short_exp(-x.abs());
        let negative = x < 0.0f32;
        select(negative, e, 1.0f32) / (1.0f32 + e * scale) * select(negative, scale, 1.0f32)
    } else {
        let power = power_of_minus(at_least(at_most(x, 32.0f32), -105.0f32), 0.0f32, -64);
        nan_of_nan(x, DOWN / (fraction(&power) * power.scale + DOWN))
    }
}

/// The slope is even, so that the exact form starts from the smaller of sigmoid(x) and
/// sigmoid(-x): their product keeps its accuracy on both sides.
#[cube]
fn sigmoid_and_slope(x: f32, #[comptime] short: bool) -> (f32, f32) {
    if comptime!(short) {
        let (e, scale) = short_exp(-x.abs());
        let s = 1.0f32 / (1.0f32 + e * scale);
        let small = e * s * scale;
        (select(x < 0.0f32, small, s), e * s * s * scale)
    } else {
        let power = power_of_minus(at_least(-x.abs(), -105.0f32), 0.0f32, -64);
        let small = nan_of_nan(x, DOWN / (fraction(&power) * power.scale + DOWN));
        let large = 1.0f32 - small;
        (select(x < 0.0f32, small, large), small * large)
    }
}

/// silu is x beyond 32, and rounds to zero below -111.
#[cube]
fn silu(x: f32, #[comptime] short: bool) -> f32 {
    if comptime!(short) {
        let (e, scale) = short_exp(-x.abs());
        let negative = x < 0.0f32;
        let value = x * select(negative, e, 1.0f32) / (1.0f32 + e * scale);
        nan_of_nan_and_minus_infinity(x, value * select(negative, scale, 1.0f32))
    } else {
        let clamped = at_least(at_most(x, 32.0f32), -111.0f32);
        let power = power_of_minus(clamped, 0.0f32, -64);
        gated(x, clamped, 32.0f32, &power)
    }
}

/// With e = e^-|x|, the slope s (1 + x (1 - s)) is (1 + e + x e) s² for positive x, and
/// e (1 + e + x) s² for negative ones, where s is 1 / (1 + e): nothing cancels but what cancels in
/// the result.
#[cube]
fn silu_and_slope(x: f32, #[comptime] short: bool) -> (f32, f32) {
    if comptime!(short) {
        let (e, scale) = short_exp(-x.abs());
        let negative = x < 0.0f32;
        let divisor = 1.0f32 + e * scale;
        let s = 1.0f32 / divisor;
        let by = select(negative, scale, 1.0f32);
        let value = x * select(negative, e, 1.0f32) * s * by;
        let bracket = select(negative, e * (divisor + x), divisor + x * (e * scale));
        let slope = bracket * s * s * by;
        (nan_of_nan_and_minus_infinity(x, value), nan_unless_finite(x, slope))
    } else {
        let clamped = at_least(at_most(x, 32.0f32), -111.0f32);
        let power = power_of_minus(clamped, 0.0f32, -64);
        gated_and_slope(x, clamped, 32.0f32, clamped, &power)
    }
}

/// x sigmoid(v): what silu and the approximate GELU have in common.
///
/// `clamped` is x within what the power can hold; beyond `most` the result is x. `power` is 2^-64 e^-v: without the shift,
/// the divisor would overflow in the tail.
#[cube]
fn gated(x: f32, clamped: f32, most: f32, power: &Power) -> f32 {
    let y = opaque(clamped / (fraction(power) * power.scale + DOWN)) * DOWN;
    nan_of_nan_and_minus_infinity(x, select(x > most, x, y))
}

/// As [`gated`], and the derivative; `reach` is x dv/dx.
///
/// With s = sigmoid(v), the slope is s (1 + reach (1 - s)). 1 - s is found as s e^-v, which has no
/// cancellation. s is 2^48 too large here, so that the tail stays normal.
#[cube]
fn gated_and_slope(x: f32, clamped: f32, most: f32, reach: f32, power: &Power) -> (f32, f32) {
    let lowered = comptime!(1.0 / (1u64 << 48) as f32);
    let e = fraction(power) * power.scale;
    let s = comptime!(1.0 / 65536.0f32) / (e + DOWN);
    let value = select(x > most, x, opaque(clamped * s) * lowered);
    let complement = e * s; // 2^-16 (1 - s)
    let bracket = reach * complement * 65536.0f32 + 1.0f32;
    let slope = opaque(s * bracket) * lowered;
    (nan_of_nan_and_minus_infinity(x, value), nan_unless_finite(x, slope))
}

/// What tanh and its slope share: 2^64 (1 - z), 2^64 (1 + z) and 2^64 z, with z = e^-2|x|.
///
/// 1 - z is -(2^n r q + (2^n - 1)), which keeps its relative accuracy as z goes to 1.
#[cube]
fn tanh_parts(x: f32) -> (f32, f32, f32) {
    let a = at_most(x.abs(), 54.0f32);
    let power = power_of_minus(a + a, 0.0f32, 64);
    let difference = (UP - power.scale) - power.r * power.q * power.scale;
    (difference, TWICE_UP - difference, fraction(&power) * power.scale)
}

#[cube]
fn tanh(x: f32) -> f32 {
    let (difference, sum, _) = tanh_parts(x);
    nan_of_nan(x, with_sign_of(x, difference / sum))
}

/// With w = 4 z / (1 + z), the slope 4 z / (1 + z)² is w (1 - w / 4).
#[cube]
fn tanh_and_slope(x: f32) -> (f32, f32) {
    let (difference, sum, z) = tanh_parts(x);
    let w = z / (sum * 0.25f32);
    let slope = w * (1.0f32 - 0.25f32 * w);
    (nan_of_nan(x, with_sign_of(x, difference / sum)), nan_of_nan(x, slope))
}

/// What GELU and its slope share: a = |x|, cut where a Φ(-a) rounds to zero; 2^64 e^(-a²/2); and P
/// and Q with Φ(-a) = e^(-a²/2) P / Q.
///
/// All coefficients of P and Q are positive, so no step of either polynomial cancels. They are
/// grouped by h = a²/2 so that few roundings follow each other where a is large, and only the
/// last counts where it is small.
#[cube]
fn gelu_parts(x: f32) -> (f32, f32, f32, f32) {
    let a = at_most(x.abs(), 14.9f32);
    let (h, h_low) = two_product(a, a * 0.5f32);
    let power = power_of_minus(h, h_low, 64);
    let e = fraction(&power) * power.scale;
    let p1 = 0.183_368_4f32 * a + 0.438_481_84f32;
    let p3 = comptime!(2.0 * 0.004_122_155f32) * a + comptime!(2.0 * 0.040_676_687f32);
    let p = (p3 * h + p1) * a + 0.5f32;
    let q1 = 1.203_068_3f32 * a + 1.674_848_6f32;
    let q3 = comptime!(2.0 * 0.101_967_685f32) * a + comptime!(2.0 * 0.469_820_74f32);
    let q = ((h * comptime!(4.0 * 0.010_332_593f32) + q3) * h + q1) * a + 1.0f32;
    (a, e, p, q)
}

/// a Φ(-a) is found for a = |x|, where it is accurate in the tail, and taken from max(x, 0): for
/// x > 0, x Φ(x) = x - x Φ(-x), which cancels at most one bit.
#[cube]
fn gelu(x: f32) -> f32 {
    let (a, e, p, q) = gelu_parts(x);
    let y = select(x < 0.0f32, 0.0f32, x) - opaque(a * e * p / q) * DOWN;
    nan_of_nan_and_minus_infinity(x, y)
}

#[cube]
fn gelu_and_slope(x: f32) -> (f32, f32) {
    let (a, e, p, q) = gelu_parts(x);
    let ratio = p / q;
    let value = select(x < 0.0f32, 0.0f32, x) - opaque(a * e * ratio) * DOWN;
    // The slope at -a; that at a is what it lacks to 1.
    let below = opaque((ratio - a * 0.398_942_28f32) * e) * DOWN;
    let slope = select(x < 0.0f32, below, 1.0f32 - below);
    (nan_of_nan_and_minus_infinity(x, value), nan_unless_finite(x, slope))
}

/// x clamped, 2^-64 e^-v and x², for the approximate GELU, which is x beyond 7, and rounds to zero
/// below -11.
///
/// v = x (k + kc x²) reaches -112, so it has to be known to 2^-34 for e^-v to be right in f32. Each
/// product and sum on the way therefore comes with its error. k is short enough for k - b to be
/// exact.
#[cube]
fn gelu_tanh_parts(x: f32) -> (f32, Power, f32) {
    let clamped = at_least(at_most(x, 7.0f32), -11.0f32);
    let (square, square_low) = two_product(clamped, clamped);
    let (g, g_low) = two_product(square, TANH_KC);
    let b = opaque(TANH_K + g);
    let b_low =
        ((TANH_K - b) + g) + (g_low + (square_low * TANH_KC + (square * TANH_KC_LOW + TANH_K_LOW)));
    let (v, v_low) = two_product(clamped, b);
    (clamped, power_of_minus(v, clamped * b_low + v_low, -64), square)
}

#[cube]
fn gelu_tanh(x: f32) -> f32 {
    let (clamped, power, _) = gelu_tanh_parts(x);
    gated(x, clamped, 7.0f32, &power)
}

#[cube]
fn gelu_tanh_and_slope(x: f32) -> (f32, f32) {
    let (clamped, power, square) = gelu_tanh_parts(x);
    let reach = (square * TANH_3KC + TANH_K_SUM) * clamped;
    gated_and_slope(x, clamped, 7.0f32, reach, &power)
}

/// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|).
#[cube]
fn softplus(x: f32) -> f32 {
    let power = power_of_minus(at_most(x.abs(), 104.0f32), 0.0f32, 64);
    let z = opaque(fraction(&power) * power.scale) * DOWN;
    nan_of_nan(x, ln_1p(z) + select(x < 0.0f32, 0.0f32, x))
}

/// ln(1 + z) for z within -0.3..=1.
///
/// ln(1 + z) = 2 artanh(v / 2) with v = z / (1 + z / 2), whose series has only odd powers. The
/// polynomial was fitted on 0..=2/3; its relative error is 2^-27.7.
#[cube]
fn ln_1p(z: f32) -> f32 {
    let v = z / (z * 0.5f32 + 1.0f32);
    let w = v * v;
    let series = ((0.000_547_006_9f32 * w + 0.002_187_736_6f32) * w + 0.012_506_699f32) * w
        + 0.083_333_02f32;
    v + v * w * series
}

#[cfg(all(test, feature = "runtime"))]
mod tests {
    use cubecl::prelude::*;
    use fuselane::reference::ulp;
    use fuselane::{DType, View};

    use super::{exp_of, ln_of};
    use crate::Device;
    use crate::kernel::storage::unit_number;
    use crate::launch::{Grid, Storage, buffer, launch};

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    enum Which {
        Exp,
        ShortExp,
        Ln,
    }

    #[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
    fn apply(x: &[f32], y: &mut [f32], len: usize, #[comptime] which: Which) {
        let i = unit_number();
        if i < len {
            y[i] = match comptime!(which) {
                Which::Exp => exp_of(x[i], false),
                Which::ShortExp => exp_of(x[i], true),
                Which::Ln => ln_of(x[i]),
            };
        }
    }

    fn evaluate(which: Which, x: &[f32]) -> Vec<f32> {
        let device = &Device::open().expect("a device");
        let x = device.upload(View::new(x, &[x.len()]).unwrap()).unwrap();
        let y = device.empty(DType::F32, x.shape()).unwrap();
        let grid = Grid::of_units("test", device, x.len(), x.len()).unwrap();
        let [x_there, y_there] = [&x, &y].map(|tensor| buffer(tensor, Storage::F32));
        launch!(device, apply, grid, x_there, y_there, x.len(), which);
        y.download().unwrap()
    }

    /// The largest error of finite numbers, in ulp.
    fn worst(which: Which, x: &[f32], truth: fn(f64) -> f64) -> f64 {
        let mut worst = (0.0, 0.0);
        for (&x, got) in x.iter().zip(evaluate(which, x)) {
            let error = ulp::error(DType::F32, got.into(), truth(x.into()));
            if error > worst.0 || error.is_nan() {
                worst = (error, x);
            }
        }
        println!("{which:?}: {:.3} ulp at {:e}", worst.0, worst.1);
        worst.0
    }

    fn between(low: f32, high: f32, step: usize) -> impl Iterator<Item = f32> {
        (low.to_bits()..high.to_bits()).step_by(step).map(f32::from_bits)
    }

    #[test]
    fn exponentials() {
        let mut x: Vec<f32> = between(1e-6, 88.7, 601).flat_map(|x| [x, -x]).collect();
        x.extend(between(86.0, 104.5, 97).map(|x| -x));
        assert!(worst(Which::Exp, &x, f64::exp) <= 2.3);
        // 2^-13.5 is what is stored in f16; where results are denormal, that and a half ulp.
        let of_f16 = |x: f32| half::f16::from_f32(x).to_f32();
        let x: Vec<f32> = x.into_iter().map(of_f16).collect();
        assert!(worst(Which::ShortExp, &x, f64::exp) <= 2f64.powi(24) / 2f64.powf(13.5));
        for which in [Which::Exp, Which::ShortExp] {
            let ends = [f32::NEG_INFINITY, -1e30, -200.0, -0.0, 0.0, 89.0, 1e30, f32::INFINITY];
            let infinity = f32::INFINITY;
            let want = [0.0, 0.0, 0.0, 1.0, 1.0, infinity, infinity, infinity];
            assert_eq!(evaluate(which, &ends), want);
            assert!(evaluate(which, &[f32::NAN])[0].is_nan());
        }
    }

    #[test]
    fn logarithms() {
        let x: Vec<f32> = between(1.0, 4.0, 7).chain(between(4.0, f32::MAX, 601)).collect();
        assert!(worst(Which::Ln, &x, f64::ln) <= 2.0);
        let x: Vec<f32> = between(f32::MIN_POSITIVE, 1.0, 601).collect();
        assert!(worst(Which::Ln, &x, f64::ln) <= 2.0);
        assert_eq!(evaluate(Which::Ln, &[1.0, f32::INFINITY]), [0.0, f32::INFINITY]);
        assert!(evaluate(Which::Ln, &[f32::NAN])[0].is_nan());
    }
}
