//! f64 for checking: two lanes in plain Rust, the same on every instruction set, so that a f64
//! result never depends on the machine's vector width.

use super::{Lanes, Memory, Task};

const N: usize = 2;

#[derive(Clone, Copy)]
pub(crate) struct Portable64([f64; N]);

impl Portable64 {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f64, f64) -> f64) -> Self {
        let mut out = self;
        for i in 0..N {
            out.0[i] = f(self.0[i], other.0[i]);
        }
        out
    }
    /// Applies a scalar function lane by lane.
    #[inline(always)]
    pub(super) fn map(self, f: impl Fn(f64) -> f64) -> Self {
        let mut out = self;
        for lane in &mut out.0 {
            *lane = f(*lane);
        }
        out
    }
    #[inline(always)]
    fn compare(self, other: Self, f: impl Fn(f64, f64) -> bool) -> [bool; N] {
        let mut out = [false; N];
        for i in 0..N {
            out[i] = f(self.0[i], other.0[i]);
        }
        out
    }
}

impl Lanes for Portable64 {
    type Real = f64;
    type Mask = [bool; N];
    type Line = ();
    const N: usize = N;

    #[inline(always)]
    fn splat(value: f64) -> Self {
        Self([value; N])
    }
    #[inline(always)]
    unsafe fn load_raw(p: *const f64) -> Self {
        // SAFETY: the caller's promise; an array of f64 is aligned as one f64.
        Self(unsafe { p.cast::<[f64; N]>().read() })
    }
    #[inline(always)]
    unsafe fn store_raw(self, p: *mut f64) {
        // SAFETY: the caller's promise; an array of f64 is aligned as one f64.
        unsafe { p.cast::<[f64; N]>().write(self.0) }
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
        self.map(f64::abs)
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
        Self([v[1], v[0]])
    }
    #[inline(always)]
    fn reduce_add(self) -> f64 {
        let v = self.0;
        v[0] + v[1]
    }
    #[inline(always)]
    fn reduce_max(self) -> f64 {
        self.0.iter().fold(f64::NEG_INFINITY, |m, &v| if m.is_nan() || m > v { m } else { v })
    }
}

impl Memory<f64> for Portable64 {
    #[inline(always)]
    unsafe fn load(p: *const f64) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::load_raw(p) }
    }
    type Packed = Self;
    #[inline(always)]
    fn pack(self) -> Self {
        self
    }
    #[inline(always)]
    unsafe fn put(packed: Self, p: *mut f64) {
        // SAFETY: the caller's promise.
        unsafe { packed.store_raw(p) }
    }
}
