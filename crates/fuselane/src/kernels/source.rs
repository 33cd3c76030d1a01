//! A row of an input, as kernels read it.

use super::sweep::At;
use crate::simd::{Simd, V};

/// What a source asks for while it is read, so that memory stays busy: so many bytes from the block at
/// hand (any number: a prefetch may name any address).
#[derive(Clone, Copy)]
pub(crate) enum Prefetch {
    None,
    /// Into the first-level cache.
    L1(isize),
    /// Into the second-level cache, where the first one is full of what is needed sooner.
    L2(isize),
}

/// A row of an input.
#[derive(Clone, Copy)]
pub(crate) struct Source<'r, S: Simd> {
    row: &'r [S::Elem],
    prefetch: Prefetch,
}

impl<'r, S: Simd> Source<'r, S> {
    #[inline(always)]
    pub(crate) fn new(row: &'r [S::Elem], prefetch: Prefetch) -> Self {
        Self { row, prefetch }
    }

    /// The length of the row.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.row.len()
    }

    /// The same row, of which nothing is asked for ahead.
    #[inline(always)]
    pub(crate) fn without_prefetch(self) -> Self {
        Self { prefetch: Prefetch::None, ..self }
    }

    /// The block at `at`, with zeros behind the row's end.
    #[inline(always)]
    pub(crate) fn load(&self, at: At) -> V<S> {
        self.prefetch(at);
        V::load(self.row, at)
    }

    /// What [`Source::load`] asks for, without the block.
    #[inline(always)]
    pub(crate) fn prefetch(&self, at: At) {
        if at.begins_line::<S::Elem>() {
            let p = self.row.as_ptr().wrapping_add(at.i);
            match self.prefetch {
                Prefetch::None => {}
                Prefetch::L1(bytes) => S::prefetch_l1(p.wrapping_byte_offset(bytes)),
                Prefetch::L2(bytes) => S::prefetch_l2(p.wrapping_byte_offset(bytes)),
            }
        }
    }
}

impl<S: Simd> V<S> {
    /// The elements that the row has, and `fill` in the place of the others.
    #[inline(always)]
    pub(crate) fn up_to(self, at: At, fill: f32) -> Self {
        if at.is_full() { self } else { self.first(at.n, fill) }
    }

    /// The block at `at` of a row, with zeros behind the row's end.
    #[inline(always)]
    pub(crate) fn load(row: &[S::Elem], at: At) -> Self {
        if !at.is_full() {
            return V::of(S::load_tail(row, at.i));
        }
        at.check(row.len());
        // SAFETY: just checked.
        V::of(unsafe { S::load(row.as_ptr().add(at.i)) })
    }
}
