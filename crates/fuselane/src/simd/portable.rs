//! Plain Rust for every CPU: arrays of sixteen f32, which the compiler vectorises.

use std::marker::PhantomData;

use super::{LANES, Packed, Simd, Storage, copy_tail};
use crate::dtype::Element;

/// Elements of type `E`.
#[derive(Clone, Copy)]
pub(crate) struct Portable<E>(PhantomData<E>);

type Block = [f32; LANES];
type Mask = [bool; LANES];

#[inline(always)]
fn map(a: Block, f: impl Fn(f32) -> f32) -> Block {
    let mut out = a;
    for x in &mut out {
        *x = f(*x);
    }
    out
}

#[inline(always)]
fn zip(a: Block, b: Block, f: impl Fn(f32, f32) -> f32) -> Block {
    let mut out = a;
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[inline(always)]
fn test(a: Block, b: Block, f: impl Fn(f32, f32) -> bool) -> Mask {
    let mut out = [false; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// Converts from elements of type `E` or to such: out of line where that takes more than a copy.
#[inline(always)]
fn convert<E, A: Copy, B: Copy + Default>(a: &[A; LANES], f: impl Fn(A) -> B) -> [B; LANES] {
    let convert = || {
        let mut out = [B::default(); LANES];
        for i in 0..LANES {
            out[i] = f(a[i]);
        }
        out
    };
    if size_of::<E>() == size_of::<f32>() { convert() } else { Portable::<f32>::apart(convert) }
}

impl<E: Element<Real = f32>> Simd for Portable<E> {
    type Elem = E;
    type Block = Block;
    type Packed = [E; LANES];
    type Mask = Mask;
    type Line = ();
    const COMPOSED: bool = false;
    const STEPS: bool = false;
    const FUSED: bool = false;
    /// The fast forms rely on fused multiply-add.
    const RESULT_BITS: u32 = 24;

    #[inline(never)]
    fn call<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(never)]
    fn apart<R>(f: impl FnOnce() -> R) -> R {
        f()
    }

    #[inline(always)]
    fn splat(value: f32) -> Block {
        [value; LANES]
    }
    #[inline(always)]
    fn add(a: Block, b: Block) -> Block {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(a: Block, b: Block) -> Block {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(a: Block, b: Block) -> Block {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(a: Block, b: Block) -> Block {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(a: Block, b: Block) -> Block {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(a: Block, b: Block) -> Block {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn neg(a: Block) -> Block {
        map(a, |a| -a)
    }
    #[inline(always)]
    fn abs(a: Block) -> Block {
        map(a, f32::abs)
    }
    #[inline(always)]
    fn mul_add(a: Block, b: Block, c: Block) -> Block {
        Self::add(Self::mul(a, b), c)
    }
    #[inline(always)]
    fn neg_mul_add(a: Block, b: Block, c: Block) -> Block {
        Self::sub(c, Self::mul(a, b))
    }
    #[inline(always)]
    fn copysign(a: Block, sign: Block) -> Block {
        zip(a, sign, f32::copysign)
    }
    #[inline(always)]
    fn reciprocal_estimate(a: Block) -> Block {
        map(a, f32::recip)
    }
    #[inline(always)]
    fn two_product(a: Block, b: Block) -> (Block, Block) {
        let high = Self::mul(a, b);
        let mut low = high;
        for i in 0..LANES {
            // The product of two f32 is exact in f64, and so is its distance from the rounded one.
            low[i] = (f64::from(a[i]) * f64::from(b[i]) - f64::from(high[i])) as f32;
        }
        (high, low)
    }

    #[inline(always)]
    fn lt(a: Block, b: Block) -> Mask {
        test(a, b, |a, b| a < b)
    }
    #[inline(always)]
    fn le(a: Block, b: Block) -> Mask {
        test(a, b, |a, b| a <= b)
    }
    #[inline(always)]
    fn is_nan(a: Block) -> Mask {
        test(a, a, |a, _| a.is_nan())
    }
    #[inline(always)]
    fn max_magnitude(a: Block, b: Block) -> Block {
        zip(a, b, |a, b| f32::from_bits(a.abs().to_bits().max(b.to_bits())))
    }
    #[inline(always)]
    fn is_negative(a: Block) -> Mask {
        test(a, a, |a, _| a.is_sign_negative())
    }
    #[inline(always)]
    fn select(mask: Mask, yes: Block, no: Block) -> Block {
        let mut out = no;
        for i in 0..LANES {
            out[i] = if mask[i] { yes[i] } else { no[i] };
        }
        out
    }
    #[inline(always)]
    fn any(mask: Mask) -> bool {
        mask.iter().fold(false, |any, &m| any | m)
    }

    #[inline(always)]
    fn exp2_of_magic(a: Block) -> Block {
        map(a, |a| f32::from_bits(a.to_bits() << 23))
    }
    #[inline(always)]
    fn exp2_of_eighths(a: Block, table: &[u32; 8]) -> Block {
        map(a, |a| f32::from_bits(table[a.to_bits() as usize % 8].wrapping_add(a.to_bits() << 20)))
    }
    #[inline(always)]
    fn low_bits_of_magic(a: Block) -> (Mask, Mask) {
        (test(a, a, |a, _| a.to_bits() & 1 != 0), test(a, a, |a, _| a.to_bits() & 2 != 0))
    }

    #[inline(always)]
    fn swap_pairs(a: Block) -> Block {
        let mut out = a;
        for i in 0..LANES {
            out[i] = a[i ^ 1];
        }
        out
    }
    #[inline(always)]
    fn sum(a: Block) -> f32 {
        let mut sums = a;
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                sums[i] += sums[i + width];
            }
        }
        sums[0]
    }
    #[inline(always)]
    fn largest(a: Block) -> f32 {
        a.iter().fold(f32::NEG_INFINITY, |m, &v| if m.is_nan() || m > v { m } else { v })
    }

    #[inline(always)]
    fn line(_blocks: [[E; LANES]; 2]) {}
}

impl<E: Element<Real = f32>> Storage<Block> for E {
    type Packed = [E; LANES];
    #[inline(always)]
    fn widen(packed: [E; LANES]) -> Block {
        convert::<E, _, _>(&packed, E::to_real)
    }
    #[inline(always)]
    fn round(a: Block) -> [E; LANES] {
        convert::<E, _, _>(&a, E::from_real)
    }
}

impl<E: Element> Packed<E> for [E; LANES] {
    #[inline(always)]
    unsafe fn load(p: *const E) -> Self {
        // SAFETY: the caller's promise; an array is aligned as one element.
        unsafe { p.cast::<Self>().read() }
    }
    #[inline(always)]
    fn load_tail(row: &[E], i: usize, _masked_loads: bool) -> Self {
        copy_tail(row, i)
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut E) {
        // SAFETY: the caller's promise; an array is aligned as one element.
        unsafe { p.cast::<Self>().write(self) }
    }
}
