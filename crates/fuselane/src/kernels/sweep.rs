//! A pass over a row, block by block.

use std::ops::Range;

use crate::simd::{LANES, Simd, V};

/// Blocks of a step, and elements. A step has no tail, and its sums need not wait for each other.
pub(crate) const STEP_BLOCKS: usize = 4;
pub(crate) const STEP: usize = STEP_BLOCKS * LANES;

/// Where a block stands in a row.
#[derive(Clone, Copy)]
pub(crate) struct At {
    /// The index of its first element.
    pub(crate) i: usize,
    /// How many of its elements the row has.
    pub(crate) n: usize,
    /// Its number among four.
    pub(crate) slot: usize,
    /// Whether it is one of a step of four full blocks.
    pub(crate) in_step: bool,
}

impl At {
    /// Whether the row has all of its elements.
    #[inline(always)]
    pub(crate) fn is_full(self) -> bool {
        self.n == LANES
    }

    /// Checks that a row of `len` numbers has this block, which is full. The condition is the same for all
    /// four blocks of a step, so that a loop tests it once, before its sums go on.
    #[inline(always)]
    pub(crate) fn check(self, len: usize) {
        if self.in_step {
            let first = self.i.wrapping_sub(self.slot * LANES);
            assert!(self.slot < STEP_BLOCKS && first < len && first + STEP <= len);
        } else {
            assert!(self.i + LANES <= len);
        }
    }

    /// Whether a cache line of elements `T` begins with this block, if one begins with the row.
    #[inline(always)]
    pub(crate) fn begins_line<T>(self) -> bool {
        self.slot.is_multiple_of((crate::simd::CACHE_LINE / (LANES * size_of::<T>())).max(1))
    }
}

/// Calls `block` for each block of a row of `len` elements, in order.
///
/// `block` has to be an `#[inline(always)]` closure. It is compiled twice: for steps of four full
/// blocks, where all of [`At`] but `i` is constant, and for the up to four blocks behind the last step,
/// of which the last may be a tail. (Only for the latter where an instruction set does without steps.)
#[inline(always)]
pub(crate) fn sweep<S: Simd>(len: usize, block: impl FnMut(At)) {
    sweep_range::<S>(0..len, block);
}

/// [`sweep`] over a part of a row, which begins with a multiple of [`STEP`].
#[inline(always)]
pub(crate) fn sweep_range<S: Simd>(range: Range<usize>, mut block: impl FnMut(At)) {
    let Range { start: mut i, end } = range;
    if S::STEPS && end >= STEP {
        // From this form of the condition the compiler sees that nothing overflows, and so that blocks are
        // within operands of length `end`.
        let last = end - STEP;
        while i <= last {
            block(At { i, n: LANES, slot: 0, in_step: true });
            block(At { i: i + LANES, n: LANES, slot: 1, in_step: true });
            block(At { i: i + 2 * LANES, n: LANES, slot: 2, in_step: true });
            block(At { i: i + 3 * LANES, n: LANES, slot: 3, in_step: true });
            i += STEP;
        }
    }
    let mut slot = 0;
    while i < end {
        block(At { i, n: LANES.min(end - i), slot, in_step: false });
        i += LANES;
        slot += 1;
    }
}

/// [`sweep_range`], or [`sweep_blocks`].
#[inline(always)]
pub(crate) fn sweep_by<S: Simd>(steps: bool, range: Range<usize>, block: impl FnMut(At)) {
    if steps { sweep_range::<S>(range, block) } else { sweep_blocks(range, block) }
}

/// [`sweep_range`] without steps, for blocks that take so much arithmetic that they need not share anything:
/// `block` is compiled once, not five times.
#[inline(always)]
pub(crate) fn sweep_blocks(range: Range<usize>, mut block: impl FnMut(At)) {
    for i in range.clone().step_by(LANES) {
        let slot = i / LANES % STEP_BLOCKS;
        block(At { i, n: LANES.min(range.end - i), slot, in_step: false });
    }
}

/// Sums of blocks: `N` of them (1, 2 or 4), which blocks take in turn, so that one addition need not
/// wait for the one before.
#[derive(Clone, Copy)]
pub(crate) struct Sums<S: Simd, const N: usize>([V<S>; N]);

impl<S: Simd, const N: usize> Sums<S, N> {
    #[inline(always)]
    pub(crate) fn zero() -> Self {
        Self([V::zero(); N])
    }

    /// Replaces the sum that the block at `at` belongs to.
    #[inline(always)]
    pub(crate) fn update(&mut self, at: At, f: impl FnOnce(V<S>) -> V<S>) {
        // Constant indices, so that the sums stay in registers.
        match at.slot % N {
            0 => self.0[0] = f(self.0[0]),
            1 => self.0[1 % N] = f(self.0[1 % N]),
            2 => self.0[2 % N] = f(self.0[2 % N]),
            _ => self.0[3 % N] = f(self.0[3 % N]),
        }
    }

    /// Adds a product.
    #[inline(always)]
    pub(crate) fn add_product(&mut self, at: At, a: V<S>, b: V<S>) {
        self.update(
            at,
            #[inline(always)]
            |sum| a.mul_add(b, sum),
        );
    }

    /// Adds a block.
    #[inline(always)]
    pub(crate) fn add(&mut self, at: At, a: V<S>) {
        self.update(
            at,
            #[inline(always)]
            |sum| sum + a,
        );
    }

    /// The sum of all, by lanes.
    #[inline(always)]
    pub(crate) fn total(self) -> V<S> {
        match N {
            1 => self.0[0],
            2 => self.0[0] + self.0[1 % N],
            _ => (self.0[0] + self.0[1 % N]) + (self.0[2 % N] + self.0[3 % N]),
        }
    }
}

/// Cuts `0..len` into chunks of `chunk` elements, a multiple of [`STEP`]. Sums run in lanes within a
/// chunk and in f64 across chunks, so that their error does not grow with the length.
#[inline(always)]
pub(crate) fn chunks(len: usize, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(
        #[inline(always)]
        move || {
            let range = start..len.min(start + chunk);
            start = range.end;
            (!range.is_empty()).then_some(range)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::AnyWithSteps as Steps;

    #[test]
    fn every_element_is_in_one_block() {
        for len in 0..=200 {
            let mut next = 0;
            sweep::<Steps>(len, |at| {
                assert_eq!(at.i, next);
                assert_eq!(at.slot % STEP_BLOCKS, at.i / LANES % STEP_BLOCKS);
                assert_eq!(at.in_step, Steps::STEPS && at.i / STEP < len / STEP);
                assert!((1..=LANES).contains(&at.n) && (at.is_full() || at.i + at.n == len));
                next += at.n;
            });
            assert_eq!(next, len);
            let all: Vec<_> = chunks(len, STEP).collect();
            assert_eq!(all.len(), len.div_ceil(STEP));
            assert!(all.iter().all(|chunk| chunk.len() <= STEP && chunk.start % STEP == 0));
            assert_eq!(all.last().map_or(0, |chunk| chunk.end), len);
        }
    }
}
