//! What kernels keep for themselves: numbers in the order of lanes, in whole blocks.

use super::sweep::At;
use crate::exec::scratch::Plain;
use crate::simd::{LANES, Simd, V};

/// A number of scratch whose place depends on the instruction set. A type of its own, so that it is
/// not taken for an element of a row.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lane(f32);

impl Lane {
    #[inline(always)]
    pub(crate) fn is_zero(self) -> bool {
        self.0 == 0.0
    }

    /// Replaces the number by what `f` makes of it.
    #[inline(always)]
    pub(crate) fn replace(&mut self, f: impl FnOnce(f32) -> f32) {
        self.0 = f(self.0);
    }
}

// SAFETY: any bits are an f32.
unsafe impl Plain for Lane {
    const ZERO: Self = Self(0.0);
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl<S: Simd> V<S> {
    /// The block at `i` of scratch.
    #[inline(always)]
    pub(crate) fn get(scratch: &[Lane], i: usize) -> Self {
        assert!(i + LANES <= scratch.len());
        // SAFETY: just checked; a `Lane` is an f32.
        V::of(unsafe { S::load_lanes(scratch.as_ptr().add(i).cast()) })
    }

    /// The block of scratch that belongs to a block of a row.
    #[inline(always)]
    pub(crate) fn at(scratch: &[Lane], at: At) -> Self {
        at.check(scratch.len());
        // SAFETY: just checked; a `Lane` is an f32.
        V::of(unsafe { S::load_lanes(scratch.as_ptr().add(at.i).cast()) })
    }

    /// Writes the block at `i` of scratch.
    #[inline(always)]
    pub(crate) fn set(self, scratch: &mut [Lane], i: usize) {
        assert!(i + LANES <= scratch.len());
        // SAFETY: just checked; a `Lane` is an f32.
        unsafe { S::store_lanes(self.block(), scratch.as_mut_ptr().add(i).cast()) }
    }

    /// Writes the block of scratch that belongs to a block of a row.
    #[inline(always)]
    pub(crate) fn set_at(self, scratch: &mut [Lane], at: At) {
        at.check(scratch.len());
        // SAFETY: just checked; a `Lane` is an f32.
        unsafe { S::store_lanes(self.block(), scratch.as_mut_ptr().add(at.i).cast()) }
    }
}

/// Brings numbers in index order into the order of lanes; zeros fill the last block.
#[inline(always)]
pub(crate) fn to_lanes<S: Simd>(numbers: &[f32], scratch: &mut [Lane]) {
    let (blocks, tail) = numbers.as_chunks::<LANES>();
    for (k, block) in blocks.iter().enumerate() {
        V::<S>::load_f32(block).set(scratch, k * LANES);
    }
    if !tail.is_empty() {
        let mut block = [0.0; LANES];
        block[..tail.len()].copy_from_slice(tail);
        V::<S>::load_f32(&block).set(scratch, blocks.len() * LANES);
    }
}

/// Brings numbers from the order of lanes into index order, up to the end of `numbers`.
#[inline(always)]
pub(crate) fn to_index_order<S: Simd>(scratch: &[Lane], numbers: &mut [f32]) {
    let (blocks, tail) = numbers.as_chunks_mut::<LANES>();
    let whole = blocks.len() * LANES;
    for (k, block) in blocks.iter_mut().enumerate() {
        V::<S>::get(scratch, k * LANES).store_f32(block);
    }
    if !tail.is_empty() {
        let mut block = [0.0; LANES];
        V::<S>::get(scratch, whole).store_f32(&mut block);
        tail.copy_from_slice(&block[..tail.len()]);
    }
}
