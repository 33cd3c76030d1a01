//! Plain Rust for every CPU: four f32 that the compiler vectorises.

use half::{bf16, f16};

use super::{F32Lanes, Lanes, Memory, Task};

const N: usize = 4;

#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; N]);

impl Portable {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        let mut out = self;
        for lane in &mut out.0 {
            *lane = f(*lane);
        }
        out
    }
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self;
        for i in 0..N {
            out.0[i] = f(self.0[i], other.0[i]);
        }
        out
    }
    #[inline(always)]
    fn compare(self, other: Self, f: impl Fn(f32, f32) -> bool) -> [bool; N] {
        let mut out = [false; N];
        for i in 0..N {
            out[i] = f(self.0[i], other.0[i]);
        }
        out
    }
}

impl Lanes for Portable {
    type Real = f32;
    type Mask = [bool; N];
    type Line = ();
    const N: usize = N;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; N])
    }
    #[inline(always)]
    unsafe fn load_raw(p: *const f32) -> Self {
        // SAFETY: the caller's promise; an array of f32 is aligned as one f32.
        Self(unsafe { p.cast::<[f32; N]>().read() })
    }
    #[inline(always)]
    unsafe fn store_raw(self, p: *mut f32) {
        // SAFETY: the caller's promise; an array of f32 is aligned as one f32.
        unsafe { p.cast::<[f32; N]>().write(self.0) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn neg(self) -> Self {
        self.map(|a| -a)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        self.map(f32::abs)
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        self.mul(factor).add(term)
    }
    #[inline(always)]
    fn neg_mul_add(self, factor: Self, term: Self) -> Self {
        term.sub(self.mul(factor))
    }
    #[inline(always)]
    fn lt(self, other: Self) -> [bool; N] {
        self.compare(other, |a, b| a < b)
    }
    #[inline(always)]
    fn le(self, other: Self) -> [bool; N] {
        self.compare(other, |a, b| a <= b)
    }
    #[inline(always)]
    fn is_nan(self) -> [bool; N] {
        self.compare(self, |a, _| a.is_nan())
    }
    #[inline(always)]
    fn select(mask: [bool; N], yes: Self, no: Self) -> Self {
        let mut out = no;
        for i in 0..N {
            out.0[i] = if mask[i] { yes.0[i] } else { no.0[i] };
        }
        out
    }
    #[inline(always)]
    fn any(mask: [bool; N]) -> bool {
        mask.iter().fold(false, |any, &m| any | m)
    }
    #[inline(never)]
    fn enter<K: Task>(task: K) -> K::Output {
        task.run()
    }
    #[inline(always)]
    fn swap_pairs(self) -> Self {
        let v = self.0;
        Self([v[1], v[0], v[3], v[2]])
    }
    #[inline(always)]
    fn reduce_add(self) -> f32 {
        let v = self.0;
        (v[0] + v[2]) + (v[1] + v[3])
    }
    #[inline(always)]
    fn reduce_max(self) -> f32 {
        self.0.iter().fold(f32::NEG_INFINITY, |m, &v| if m.is_nan() || m > v { m } else { v })
    }
}

impl F32Lanes for Portable {
    const FUSED: bool = false;
    /// The short forms rely on fused multiply-add.
    const STORED_BITS: u32 = 24;

    #[inline(always)]
    fn reciprocal_estimate(self) -> Self {
        Self::splat(1.0).div(self)
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn copysign(self, sign: Self) -> Self {
        self.zip(sign, f32::copysign)
    }
    #[inline(always)]
    fn select_sign(self, negative: Self, positive: Self) -> Self {
        Self::select(self.compare(self, |a, _| a.is_sign_negative()), negative, positive)
    }
    #[inline(always)]
    fn exp2_eighths(self) -> Self {
        self.map(|m| (m - 1_572_864.0).exp2())
    }
    #[inline(always)]
    fn exp2_pushed(self) -> Self {
        self.map(|a| f32::from_bits(a.to_bits() << 23))
    }
    #[inline(always)]
    fn low_bits_pushed(self) -> ([bool; N], [bool; N]) {
        (
            self.compare(self, |a, _| a.to_bits() & 1 != 0),
            self.compare(self, |a, _| a.to_bits() & 2 != 0),
        )
    }
    #[inline(always)]
    fn two_product(self, other: Self) -> (Self, Self) {
        let high = self.mul(other);
        let mut low = high;
        for i in 0..N {
            // The product of two f32 is exact in f64, and so is its distance from the rounded one.
            low.0[i] = (f64::from(self.0[i]) * f64::from(other.0[i]) - f64::from(high.0[i])) as f32;
        }
        (high, low)
    }
}

impl Memory<f32> for Portable {
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::load_raw(p) }
    }
    type Packed = Self;
    #[inline(always)]
    fn pack(self) -> Self {
        self
    }
    #[inline(always)]
    unsafe fn put(packed: Self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { packed.store_raw(p) }
    }
}

macro_rules! memory16 {
    ($type:ty, $widen:expr, $round:expr) => {
        impl Memory<$type> for Portable {
            #[inline(always)]
            unsafe fn load(p: *const $type) -> Self {
                // SAFETY: the caller's promise; an array is aligned as one element.
                let block = unsafe { p.cast::<[$type; N]>().read() };
                let mut out = [0.0; N];
                for i in 0..N {
                    out[i] = $widen(block[i]);
                }
                Self(out)
            }
            type Packed = [$type; N];
            #[inline(always)]
            fn pack(self) -> [$type; N] {
                let mut block = [<$type>::ZERO; N];
                for i in 0..N {
                    block[i] = $round(self.0[i]);
                }
                block
            }
            #[inline(always)]
            unsafe fn put(packed: [$type; N], p: *mut $type) {
                // SAFETY: the caller's promise; an array is aligned as one element.
                unsafe { p.cast::<[$type; N]>().write(packed) }
            }
        }
    };
}

memory16!(f16, f16::to_f32, f16::from_f32);
memory16!(bf16, |x: bf16| f32::from_bits(u32::from(x.to_bits()) << 16), |x: f32| {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF).wrapping_add((bits >> 16) & 1) >> 16;
    bf16::from_bits(if x.is_nan() { 0x7FC0 } else { rounded as u16 })
});
