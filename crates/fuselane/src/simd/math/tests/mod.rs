//! Tests of the elementary functions: dense samples of f32, and all numbers of 16 bits.

mod truth;

use half::{bf16, f16};

use super::*;
use crate::dtype::{DType, Element};
use crate::simd::{Isa, Kernel, LANES, dispatch};

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

#[derive(Clone, Copy, PartialEq)]
enum Which {
    Exp,
    Sigmoid,
    Silu,
    Tanh,
    Gelu,
    GeluTanh,
    Softplus,
    SinCos,
    /// e^x; the forms for arguments in range, and for negative ones.
    ExpFast,
    /// The function; the same from a kept exponential; the slope.
    SigmoidFast,
    SiluFast,
}

const EXP: Case =
    Case { name: "exp", which: Which::Exp, value: f64::exp, bound: [2.0, 2.3], slope: None };
const SIGMOID: Case = Case {
    name: "sigmoid",
    which: Which::Sigmoid,
    value: truth::sigmoid,
    bound: [3.0, 3.0],
    slope: Some(Slope {
        value: truth::sigmoid_slope,
        scale: truth::sigmoid_slope,
        bound: [3.0, 3.0],
    }),
};
const SILU: Case = Case {
    name: "silu",
    which: Which::Silu,
    value: truth::silu,
    bound: [3.0, 3.0],
    slope: Some(Slope {
        value: truth::silu_slope,
        scale: |x| truth::sigmoid(x).max(x.abs() * truth::sigmoid_slope(x)),
        bound: [4.0, 4.0],
    }),
};
const TANH: Case = Case {
    name: "tanh",
    which: Which::Tanh,
    value: f64::tanh,
    bound: [3.0, 3.0],
    slope: Some(Slope { value: truth::tanh_slope, scale: truth::tanh_slope, bound: [4.0, 4.0] }),
};
const GELU: Case = Case {
    name: "gelu",
    which: Which::Gelu,
    value: truth::gelu,
    bound: [7.0, 8.0],
    slope: Some(Slope {
        value: truth::gelu_slope,
        scale: |x| truth::distribution(x).max(x.abs() * truth::density(x)),
        bound: [5.5, 5.5],
    }),
};
const GELU_TANH: Case = Case {
    name: "gelu_tanh",
    which: Which::GeluTanh,
    value: truth::gelu_tanh,
    bound: [3.0, 3.2],
    slope: Some(Slope {
        value: truth::gelu_tanh_slope,
        scale: |x| {
            let (v, reach) = truth::gelu_tanh_inner(x.clamp(-64.0, 64.0));
            truth::sigmoid(v).max(reach.abs() * truth::sigmoid_slope(v))
        },
        bound: [6.5, 6.5],
    }),
};
const SOFTPLUS: Case = Case {
    name: "softplus",
    which: Which::Softplus,
    value: truth::softplus,
    bound: [4.0, 4.0],
    slope: Some(Slope { value: truth::sigmoid, scale: truth::sigmoid, bound: [3.0, 3.0] }),
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
const CASES: [&Case; 8] = [&EXP, &SIGMOID, &SILU, &TANH, &GELU, &GELU_TANH, &SOFTPLUS, &SIN_COS];

/// Applies one function to f32 numbers, whose count is a multiple of a block; the results stay f32
/// or, with `STORED`, are rounded to the element type.
struct Apply<'a, const STORED: bool> {
    which: Which,
    x: &'a [f32],
    /// The function on its own, and with its slope.
    out: &'a mut [Vec<f32>; 3],
}

impl<const STORED: bool> Kernel for Apply<'_, STORED> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let (blocks, []) = self.x.as_chunks::<LANES>() else { panic!() };
        let [alone, value, slope] = self.out;
        macro_rules! each {
            ($x:ident, $fast:expr, $alone:expr, $both:expr) => {
                for block in blocks {
                    let $x = V::<S>::load_f32(block);
                    alone.extend(numbers::<S, STORED, $fast>($alone));
                    let (a, b) = $both;
                    value.extend(numbers::<S, STORED, $fast>(a));
                    slope.extend(numbers::<S, STORED, $fast>(b));
                }
            };
        }
        match self.which {
            Which::Exp => each!(x, false, x.exp(), (x.exp(), x.exp())),
            Which::Sigmoid => each!(x, false, x.sigmoid(), x.sigmoid_and_slope()),
            Which::Silu => each!(x, false, x.silu(), x.silu_and_slope()),
            Which::Tanh => each!(x, false, x.tanh(), x.tanh_and_slope()),
            Which::Gelu => each!(x, false, x.gelu(), x.gelu_and_slope()),
            Which::GeluTanh => each!(x, false, x.gelu_tanh(), x.gelu_tanh_and_slope()),
            Which::Softplus => each!(x, false, x.softplus(), (x.softplus(), x.sigmoid())),
            Which::SinCos => each!(x, false, x.sin_cos().0, x.sin_cos()),
            Which::ExpFast => {
                each!(x, true, x.exp_fast(), { (x.exp_fast_in_range(), x.exp_fast()) })
            }
            Which::SigmoidFast => each!(x, true, x.sigmoid_fast(), { x.sigmoid_and_slope_fast() }),
            Which::SiluFast => each!(x, true, x.silu_fast(), { x.silu_and_slope_fast() }),
        }
    }
}

#[inline(always)]
fn numbers<S: Simd, const STORED: bool, const FAST: bool>(block: V<S>) -> [f32; LANES] {
    let mut numbers = [0.0; LANES];
    if STORED {
        let mut elements = [S::Elem::default(); LANES];
        let packed = if FAST { block.round_ties_away() } else { block.round() };
        // SAFETY: the array holds a block.
        unsafe { S::store(packed, elements.as_mut_ptr()) };
        for (number, element) in numbers.iter_mut().zip(elements) {
            *number = element.to_real();
        }
    } else {
        block.store_f32(&mut numbers);
    }
    numbers
}

/// The function on its own, and with its slope, of each number.
fn evaluate<const STORED: bool>(isa: Isa, dtype: DType, which: Which, x: &[f32]) -> [Vec<f32>; 3] {
    let mut blocks = x.to_vec();
    blocks.resize(x.len().next_multiple_of(LANES), 0.0);
    let mut out = [(); 3].map(|()| Vec::with_capacity(blocks.len()));
    dispatch(isa, dtype, Apply::<STORED> { which, x: &blocks, out: &mut out });
    out.map(|mut v| {
        v.truncate(x.len());
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

/// Instruction sets and element types under test: with f32 in index order, and as it meets bf16.
fn lanes() -> impl Iterator<Item = (Isa, DType)> {
    Isa::available().flat_map(|isa| [(isa, DType::F32), (isa, DType::BF16)])
}

fn check(case: &Case) {
    let xs = sweep();
    let unfused = |isa: Isa| usize::from(isa == Isa::Portable);
    for (isa, dtype) in lanes() {
        let [alone, value, slope] = evaluate::<false>(isa, dtype, case.which, &xs);
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
        let [_, sine, _] = evaluate::<false>(isa, dtype, Which::SinCos, &xs);
        let errors = xs.iter().zip(&sine).map(|(&x, &got)| {
            let wanted = f64::from(x).sin();
            error(got, wanted, wanted)
        });
        let worst = errors.fold(0.0, f64::max);
        println!("{isa} {dtype}: {worst:.3}");
        assert!(worst <= 0.7);
    }
}

/// All numbers of a 16-bit type.
fn all_numbers(dtype: DType) -> Vec<f32> {
    let number = |bits| match dtype {
        DType::F16 => f16::from_bits(bits).to_f32(),
        _ => bf16::from_bits(bits).to_f32(),
    };
    (0..=u16::MAX).map(number).collect()
}

/// Rounds once to a 16-bit type.
fn rounded(dtype: DType, x: f64) -> f32 {
    match dtype {
        DType::F16 => <f16 as Element>::from_f64(x).to_f32(),
        _ => <bf16 as Element>::from_f64(x).to_f32(),
    }
}

/// Consecutive integers for consecutive numbers of a 16-bit type, with both zeros at 0.
fn rank(dtype: DType, x: f32) -> i32 {
    let bits = match dtype {
        DType::F16 => f16::from_f32(x).to_bits(),
        _ => bf16::from_f32(x).to_bits(),
    };
    let magnitude = i32::from(bits & 0x7FFF);
    if bits < 0x8000 { magnitude } else { -magnitude }
}

/// How many results are one step from the rounding of the exact one; none may be further. Also, they
/// are NaN where they should be.
fn count_off(name: &str, dtype: DType, xs: &[f32], got: &[f32], truth: impl Fn(f64) -> f64) -> i32 {
    let mut off = 0;
    for (&x, &got) in xs.iter().zip(got) {
        let wanted = rounded(dtype, truth(x.into()));
        assert_eq!(got.is_nan(), wanted.is_nan(), "{name} of {x:?}");
        if !wanted.is_nan() {
            let steps = (rank(dtype, got) - rank(dtype, wanted)).abs();
            assert!(steps <= 1, "{name} {dtype}: {x:?} {got:?} {wanted:?}");
            off += steps;
        }
    }
    off
}

#[test]
fn results_of_16_bits_are_roundings() {
    for dtype in [DType::BF16, DType::F16] {
        let xs = all_numbers(dtype);
        for (isa, case) in Isa::available().flat_map(|isa| CASES.map(|case| (isa, case))) {
            let [alone, value, slope] = evaluate::<true>(isa, dtype, case.which, &xs);
            let of_slope = case
                .slope
                .as_ref()
                .map_or(0, |truth| count_off(case.name, dtype, &xs, &slope, truth.value));
            let off = [
                count_off(case.name, dtype, &xs, &alone, case.value),
                count_off(case.name, dtype, &xs, &value, case.value),
                of_slope,
            ];
            println!("{:9} {dtype} {isa}: {off:?} of 65536 are one step off", case.name);
            assert!(off.iter().all(|&off| off < 20));
        }
    }
}

type Formula = fn(f64) -> f64;

/// A function with a fast form: what it should give, and how many of the 65,536 numbers of bf16 and of
/// f16 may be one step off. (Not all makers of CPUs estimate reciprocals the same way.)
struct FastCase {
    name: &'static str,
    which: Which,
    value: fn(f64) -> f64,
    off: [i32; 2],
    /// The slope, and the magnitude that its error is relative to.
    slope: Option<(Formula, Formula)>,
}

const FAST_CASES: [FastCase; 3] = [
    FastCase { name: "exp", which: Which::ExpFast, value: f64::exp, off: [270, 3300], slope: None },
    FastCase {
        name: "sigmoid",
        which: Which::SigmoidFast,
        value: truth::sigmoid,
        off: [150, 1500],
        slope: Some((truth::sigmoid_slope, truth::sigmoid_slope)),
    },
    FastCase {
        name: "silu",
        which: Which::SiluFast,
        value: truth::silu,
        off: [300, 2200],
        slope: Some((truth::silu_slope, |x| {
            truth::sigmoid(x).max(x.abs() * truth::sigmoid_slope(x))
        })),
    },
];

/// Whether both are the same number or NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[test]
fn fast_results_are_roundings() {
    for (k, dtype) in [DType::BF16, DType::F16].into_iter().enumerate() {
        let xs = all_numbers(dtype);
        for (isa, case) in Isa::available().flat_map(|isa| FAST_CASES.each_ref().map(|c| (isa, c)))
        {
            let [alone, other, third] = evaluate::<true>(isa, dtype, case.which, &xs);
            let mut off = vec![count_off(case.name, dtype, &xs, &alone, case.value)];
            if case.which == Which::ExpFast {
                for (i, &x) in xs.iter().enumerate() {
                    assert!(x.abs() > 80.0 || same(other[i], alone[i]), "{isa} {dtype} {x}");
                    assert!(x > 42.0 || same(third[i], alone[i]), "{isa} {dtype} {x}");
                }
            } else {
                off.push(count_off(case.name, dtype, &xs, &other, case.value));
            }
            if case.which == Which::SigmoidFast {
                off.push(count_off("slope", dtype, &xs, &third, truth::sigmoid_slope));
            }
            println!("{:9} {dtype} {isa}: {off:?} of 65536 are one step off", case.name);
            assert!(off.iter().all(|&off| off <= case.off[k]));
        }
    }
}

/// Of fast forms, numbers that no 16-bit type has: the relative error stays what the few terms of the
/// exponential and two estimated reciprocals make it, and the tails end in zeros and infinities.
#[test]
fn fast_forms_serve_every_argument() {
    let xs = sweep();
    for (dtype, bound, smallest) in [
        (DType::BF16, 2f64.powf(-9.7), 2f64.powi(-134)),
        (DType::F16, 2f64.powf(-13.5), 2f64.powi(-140)),
    ] {
        for (isa, case) in Isa::available().flat_map(|isa| FAST_CASES.each_ref().map(|c| (isa, c)))
        {
            let [alone, other, third] = evaluate::<false>(isa, dtype, case.which, &xs);
            let mut worst = [0f64; 3];
            for (i, &x) in xs.iter().enumerate() {
                let x = f64::from(x);
                let mut check = |k: usize, got: f32, wanted: f64, scale: f64| {
                    if wanted * (1.0 - bound) > 2f64.powi(128) {
                        assert_eq!(got, f32::INFINITY, "{} {isa} {dtype} {x}", case.name);
                    } else if got.is_finite() || wanted * (1.0 + bound) < 2f64.powi(128) {
                        let excess = (f64::from(got) - wanted).abs() - smallest;
                        assert!(
                            excess <= bound * scale,
                            "{} {k} {isa} {dtype} {x} {got:e}",
                            case.name
                        );
                        worst[k] = worst[k].max(excess / scale);
                    }
                };
                let wanted = (case.value)(x);
                check(0, alone[i], wanted, wanted.abs());
                if case.which == Which::ExpFast {
                    if x.abs() <= 80.0 {
                        check(1, other[i], wanted, wanted);
                    }
                    if x <= 42.0 {
                        check(2, third[i], wanted, wanted);
                    }
                } else {
                    check(1, other[i], wanted, wanted.abs());
                }
                if let Some((slope, scale)) = case.slope {
                    check(2, third[i], slope(x), scale(x));
                }
            }
            let worst = worst.map(|w| format!("{:.2}", w.log2()));
            println!("{:9} {dtype} {isa}: errors are 2^ {worst:?} of the result", case.name);
        }
    }
}

/// The slope of silu near its zero, where its terms cancel: at least as exact as by the formula
/// s (1 + x (1 - s)), each step rounded to f32.
#[test]
fn slope_of_silu_is_accurate_at_its_zero() {
    let plain = |x: f32| {
        let s = 1.0 / (1.0 + f64::from(-x).exp() as f32);
        s * (1.0 + x * (1.0 - s))
    };
    let xs: Vec<f32> =
        (1.2f32.to_bits()..1.35f32.to_bits()).step_by(3).map(|b| -f32::from_bits(b)).collect();
    let worst = |slopes: &[f32]| {
        let errors =
            xs.iter().zip(slopes).map(|(&x, &got)| f64::from(got) - truth::silu_slope(x.into()));
        errors.fold(0.0, |worst: f64, error| worst.max(error.abs()))
    };
    let of_plain = worst(&xs.iter().map(|&x| plain(x)).collect::<Vec<_>>());
    for (isa, dtype) in lanes() {
        let [_, _, slopes] = evaluate::<false>(isa, dtype, Which::Silu, &xs);
        println!("{isa} {dtype}: {:e}, plain formula {of_plain:e}", worst(&slopes));
        assert!(worst(&slopes) <= 1.05 * of_plain);
    }
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
    let same = |a: f32, b: f32, signed: bool| same(a, b) || !signed && a == b;
    for (isa, dtype) in lanes() {
        for (which, values, slopes) in table {
            let [alone, value, slope] =
                evaluate::<false>(isa, dtype, which, &[-INF, -0.0, 0.0, INF]);
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
    for (isa, dtype) in Isa::available().flat_map(|isa| [(isa, DType::BF16), (isa, DType::F16)]) {
        for (fast, which) in [
            (Which::ExpFast, Which::Exp),
            (Which::SigmoidFast, Which::Sigmoid),
            (Which::SiluFast, Which::Silu),
        ] {
            let xs = [-INF, -0.0, 0.0, INF];
            let [alone, value, slope] = evaluate::<true>(isa, dtype, fast, &xs);
            let [wanted, _, wanted_slope] = evaluate::<true>(isa, dtype, which, &xs);
            for i in 0..4 {
                assert!(same(alone[i], wanted[i], true), "{isa} {dtype} {} {i}", fast as u8);
                if fast != Which::ExpFast {
                    assert!(same(value[i], wanted[i], true), "{isa} {dtype} {} {i}", fast as u8);
                    assert!(
                        same(slope[i], wanted_slope[i], true),
                        "{isa} {dtype} {} {i}",
                        fast as u8
                    );
                }
            }
        }
    }
}

#[test]
fn nan_stays_nan_with_its_payload() {
    let mut xs = vec![];
    for bits in [0x7FC0_0000u32, 0x7F80_0001, 0x7FFF_FFFF, 0x7F81_2345, 0x7FAB_0000, 0x7F81_0000] {
        xs.extend([f32::from_bits(bits), f32::from_bits(bits | 1 << 31)]);
    }
    // Every lane, among numbers.
    let xs: Vec<f32> = xs.iter().flat_map(|&nan| [nan, 1.0, -2.0]).collect();
    for (isa, dtype) in lanes() {
        let exact = CASES.iter().map(|case| (case.name, case.which));
        for (name, which) in exact.chain(FAST_CASES.iter().map(|case| (case.name, case.which))) {
            let got = evaluate::<false>(isa, dtype, which, &xs);
            let is_fast = FAST_CASES.iter().any(|case| case.which == which);
            for (i, x) in xs.iter().enumerate() {
                // Fast forms only meet numbers of 16 bits.
                if is_fast && x.to_bits() & 0xFFFF != 0 {
                    continue;
                }
                for got in &got {
                    assert_eq!(got[i].is_nan(), x.is_nan(), "{name}");
                    if x.is_nan() {
                        let quiet = x.to_bits() & 0x7FFF_FFFF | 0x0040_0000;
                        let bits = got[i].to_bits() & 0x7FFF_FFFF;
                        assert!(bits == quiet || bits == 0x7FC0_0000, "{name} {bits:x}");
                    }
                }
            }
        }
    }
}

/// A row's tile decides which of these it takes, so that they must not differ.
#[test]
fn forms_in_range_have_the_same_bits() {
    struct Compare(DType);
    impl Kernel for Compare {
        #[inline(always)]
        fn run<S: Simd>(self) {
            if !V::<S>::HAS_FAST {
                return;
            }
            for bits in (0..1u32 << 16).step_by(LANES) {
                let mut numbers = [0.0; LANES];
                for (number, bits) in numbers.iter_mut().zip(bits..) {
                    let x = f32::from_bits(bits << 16);
                    *number = if x.abs() <= 80.0 { x } else { 0.0 };
                }
                let x = V::<S>::load_f32(&numbers);
                let all = [
                    [x.sigmoid_fast_in_range(), x.sigmoid_fast()],
                    [x.silu_fast_in_range(), x.silu_fast()],
                    [x.exp_fast_in_range(), x.exp_fast()],
                ];
                for [a, b] in all {
                    let [mut in_range, mut any] = [[0.0; LANES]; 2];
                    a.store_f32(&mut in_range);
                    b.store_f32(&mut any);
                    let same = in_range.map(f32::to_bits) == any.map(f32::to_bits);
                    assert!(same, "{} {numbers:?}: {in_range:?}, {any:?}", self.0);
                }
            }
        }
    }
    for isa in Isa::available() {
        for dtype in [DType::BF16, DType::F16] {
            dispatch(isa, dtype, Compare(dtype));
        }
    }
}
