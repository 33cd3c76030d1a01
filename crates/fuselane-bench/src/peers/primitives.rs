//! Primitive operations on tensors: each reads its operands from memory and writes one new tensor,
//! from the library's pool. A 16-bit and an f32 operand meet in f32, as frameworks have it.

mod loops;

use fuselane::{Buffer, DType, View};
use rayon::prelude::*;

use self::loops::{Fold, fold_columns, fold_rows, map};
pub(super) use self::loops::{Like, Operand};
use crate::worker::Fault;

/// Of each block of two operands.
macro_rules! binary {
    ($name:ident, $what:literal, $f:expr) => {
        #[doc = $what]
        pub(super) fn $name<'a>(
            like: Like<'_>,
            a: impl Into<Operand<'a>>,
            b: impl Into<Operand<'a>>,
        ) -> Result<Buffer, Fault> {
            map(like, [a.into(), b.into()], |_, [a, b], o| {
                for ((o, &a), &b) in o.iter_mut().zip(a).zip(b) {
                    *o = $f(a, b);
                }
            })
        }
    };
}

/// Of each block of one operand.
macro_rules! unary {
    ($name:ident, $what:literal, $f:expr) => {
        #[doc = $what]
        pub(super) fn $name<'a>(
            like: Like<'_>,
            a: impl Into<Operand<'a>>,
        ) -> Result<Buffer, Fault> {
            map(like, [a.into()], |_, [a], o| {
                for (o, &a) in o.iter_mut().zip(a) {
                    *o = $f(a);
                }
            })
        }
    };
}

binary!(add, "a + b", |a: f32, b: f32| a + b);
binary!(sub, "a - b", |a: f32, b: f32| a - b);
binary!(mul, "a * b", |a: f32, b: f32| a * b);
binary!(div, "a / b", |a: f32, b: f32| a / b);
binary!(
    sigmoid_backward,
    "The gradient through a sigmoid whose output was b, from the gradient a of that output.",
    |a: f32, b: f32| a * (b * (1.0 - b))
);
unary!(cast, "The same numbers, in the output's type.", |a: f32| a);
unary!(exp, "e^a", exponential);
unary!(cos, "cos a", |a| turn(a, 1));
unary!(sin, "sin a", |a| turn(a, 0));

/// `1 / sqrt(a / d + eps)`
pub(super) fn rstd_of_sum(a: &Buffer, d: usize, eps: f64) -> Result<Buffer, Fault> {
    let (scale, eps) = (1.0 / d as f32, eps as f32);
    map(Like { dtype: DType::F32, shape: a.shape() }, [a.into()], |_, [a], o| {
        for (o, &a) in o.iter_mut().zip(a) {
            *o = 1.0 / (a * scale + eps).sqrt();
        }
    })
}

/// `-b a^3 / d`: the gradient through [`rstd_of_sum`] whose output was a, from the gradient b of
/// that output, and on through a sum of squares as far as the factor of p goes.
pub(super) fn rstd_backward(a: &Buffer, b: &Buffer, d: usize) -> Result<Buffer, Fault> {
    let scale = -1.0 / d as f32;
    map(Like { dtype: DType::F32, shape: a.shape() }, [a.into(), b.into()], |_, [a, b], o| {
        for ((o, &a), &b) in o.iter_mut().zip(a).zip(b) {
            *o = b * (a * a) * (a * scale);
        }
    })
}

/// Sums over the last dimension, in f32.
pub(super) fn sum_last(x: View<'_>) -> Result<Buffer, Fault> {
    fold_last(Fold::Sum, x)
}

/// Sums of squares over the last dimension, in f32.
pub(super) fn sum_of_squares_last(x: View<'_>) -> Result<Buffer, Fault> {
    fold_last(Fold::SumOfSquares, x)
}

fn fold_last(fold: Fold, x: View<'_>) -> Result<Buffer, Fault> {
    let width = x.shape().last().copied().unwrap_or(1).max(1);
    fold_rows(fold, x, width, &[x.len() / width])
}

/// (outer, n, inner): a tensor around the dimension that something runs along.
pub(super) type Around = [usize; 3];

/// Sums along the middle dimension, in f32.
pub(super) fn sum_along(x: View<'_>, around: Around) -> Result<Buffer, Fault> {
    fold_along(Fold::Sum, x, around)
}

/// The largest along the middle dimension, in f32.
pub(super) fn max_along(x: View<'_>, around: Around) -> Result<Buffer, Fault> {
    fold_along(Fold::Max, x, around)
}

fn fold_along(fold: Fold, x: View<'_>, around: Around) -> Result<Buffer, Fault> {
    let [outer, n, inner] = around;
    match inner {
        1 => fold_rows(fold, x, n, &[outer, 1]),
        _ => fold_columns(fold, x, around, &[outer, inner]),
    }
}

/// `[a, b]` along the last dimension, for two f32 tensors of one shape. The last two dimensions of
/// the result are the choice between a and b, and what was last.
pub(super) fn concat(a: &Buffer, b: &Buffer) -> Result<Buffer, Fault> {
    let mut shape = a.shape().to_vec();
    shape.insert(shape.len().saturating_sub(1), 2);
    let operands = [Operand::rows(a.view(), 2), Operand::rows(b.view(), 2)];
    map(Like { dtype: DType::F32, shape: &shape }, operands, |row, [a, b], o| {
        o.copy_from_slice(if row % 2 == 0 { a } else { b });
    })
}

/// The positions 0 to n, as f32.
pub(super) fn positions(n: usize) -> Result<Buffer, Fault> {
    let mut o = Buffer::unfilled(DType::F32, &[n])?;
    o.as_mut_slice::<f32>()?.iter_mut().enumerate().for_each(|(i, o)| *o = i as f32);
    Ok(o)
}

/// For each token of a grid, after `extra` ones that stand at its origin, and each of d features:
/// the coordinate along the axis that the feature belongs to, where each axis has `per_axis` of
/// them. The last axis is the fastest.
pub(super) fn coordinates(
    grid: &[usize],
    extra: usize,
    per_axis: usize,
    d: usize,
) -> Result<Buffer, Fault> {
    let mut o = Buffer::unfilled(DType::F32, &[extra + grid.iter().product::<usize>(), d])?;
    o.as_mut_slice::<f32>()?.par_chunks_mut(d).enumerate().for_each(|(token, o)| {
        let mut rest = token.saturating_sub(extra);
        let mut end = grid.len();
        for &length in grid.iter().rev() {
            end -= 1;
            let features = (end * per_axis).min(d)..((end + 1) * per_axis).min(d);
            o[features].fill((rest % length) as f32);
            rest /= length;
        }
    });
    Ok(o)
}

/// The columns of a matrix again and again, until there are d of them, in f32.
pub(super) fn repeat_columns(x: View<'_>, d: usize) -> Result<Buffer, Fault> {
    let width = x.shape().last().copied().unwrap_or(1).max(1);
    let rows = x.len() / width;
    let x = cast(Like { dtype: DType::F32, shape: x.shape() }, x)?;
    let mut o = Buffer::unfilled(DType::F32, &[rows, d])?;
    let pairs = o.as_mut_slice::<f32>()?.chunks_mut(d).zip(x.as_slice::<f32>()?.chunks(width));
    for (o, x) in pairs {
        o.chunks_mut(width).for_each(|o| o.copy_from_slice(&x[..o.len()]));
    }
    Ok(o)
}

/// e^x to some 2 ulp of f32, without branches, so that it is vectorised. Below the smallest normal
/// number it stays there.
#[inline(always)]
fn exponential(x: f32) -> f32 {
    const ROUNDER: f32 = 12_582_912.0; // 1.5 * 2^23: its last place is 1
    let x = x.clamp(-87.3, 88.3);
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let k = shifted - ROUNDER;
    let r = x - k * 0.693_359_375 + k * 2.121_944_4e-4; // ln 2 in two parts
    let p = 1.987_569_15e-4;
    let p = p * r + 1.398_199_950_7e-3;
    let p = p * r + 8.333_451_907_3e-3;
    let p = p * r + 4.166_579_589_4e-2;
    let p = p * r + 1.666_666_545_9e-1;
    let p = p * r + 5.000_000_120_1e-1;
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    (p * (r * r) + r + 1.0) * power
}

/// The sine of an angle and of `quarters` quarter turns more, to some 2^-23, without branches.
/// The angle is reduced in f64, which is enough for any position times a frequency up to 1.
#[inline(always)]
fn turn(angle: f32, quarters: u32) -> f32 {
    const ROUNDER: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52: its last place is 1
    let angle = f64::from(angle);
    let shifted = angle * std::f64::consts::FRAC_2_PI + ROUNDER;
    let r = (angle - (shifted - ROUNDER) * std::f64::consts::FRAC_PI_2) as f32;
    let quarter = (shifted.to_bits() as u32).wrapping_add(quarters);
    let z = r * r;
    let sine =
        ((-1.951_529_589_1e-4 * z + 8.332_160_873_6e-3) * z - 1.666_665_461_1e-1) * z * r + r;
    let cosine = 2.443_315_711_81e-5 * z - 1.388_731_625_49e-3;
    let cosine = (cosine * z + 4.166_664_568_3e-2) * (z * z) - 0.5 * z + 1.0;
    let value = if quarter & 1 == 0 { sine } else { cosine };
    f32::from_bits(value.to_bits() ^ (quarter & 2) << 30)
}
