//! How a row is cut into segments, which an encoding treats as one each, and how it lies in scratch.

use std::ops::Range;

use crate::kernels::lanes::Lane;
use crate::kernels::sweep::{Sums, chunks, sweep_range};
use crate::simd::{LANES, Simd, V};

/// The segments of a row. Its scratch is in the order of lanes, and each segment begins with a new block
/// there.
#[derive(Clone, Copy)]
pub(crate) struct Segments {
    /// The feature that each begins with, and the end of the last. Some may be empty.
    features: [usize; 5],
    /// Where they begin in scratch.
    scratch: [usize; 5],
    /// The same with those joined that follow each other in whole blocks, which mostly are all.
    joined: [Joined; 4],
    count: usize,
}

/// Segments that follow each other in scratch without a gap.
#[derive(Clone, Copy, Default)]
pub(super) struct Joined {
    first: usize,
    pub(super) len: usize,
    start: usize,
}

impl Joined {
    /// The features.
    #[inline(always)]
    pub(super) fn features(self) -> Range<usize> {
        self.first..self.first + self.len
    }

    /// Their numbers in scratch.
    #[inline(always)]
    pub(super) fn scratch(self) -> Range<usize> {
        self.start..self.start + padded(self.len)
    }
}

impl Segments {
    /// Segments of these lengths, one after the other.
    pub(crate) fn new(lengths: [usize; 4]) -> Self {
        let mut segments =
            Self { features: [0; 5], scratch: [0; 5], joined: [Joined::default(); 4], count: 0 };
        for (k, len) in lengths.into_iter().enumerate() {
            let (first, start) = (segments.features[k], segments.scratch[k]);
            segments.features[k + 1] = first + len;
            segments.scratch[k + 1] = start + padded(len);
            match segments.joined[..segments.count].last_mut() {
                Some(last) if last.len.is_multiple_of(LANES) => last.len += len,
                _ if len == 0 => {}
                _ => {
                    segments.joined[segments.count] = Joined { first, len, start };
                    segments.count += 1;
                }
            }
        }
        segments
    }

    /// Where segments begin, by feature, and where the last ends.
    #[inline(always)]
    pub(super) fn features(&self) -> [usize; 5] {
        self.features
    }

    /// Where they begin in scratch, and where the last ends.
    #[inline(always)]
    pub(super) fn scratch(&self) -> [usize; 5] {
        self.scratch
    }

    /// Numbers of scratch for each row.
    #[inline(always)]
    pub(crate) fn width(&self) -> usize {
        self.scratch[4]
    }

    /// Whether a row lies in scratch as it is, in whole blocks.
    #[inline(always)]
    pub(crate) fn is_whole(&self) -> bool {
        self.count == 1 && self.joined[0].len == self.width()
    }

    /// The segments, as few as there can be.
    #[inline(always)]
    pub(super) fn joined(&self) -> &[Joined] {
        &self.joined[..self.count]
    }

    /// The sum of products of two rows of scratch: by lanes within a chunk, in f64 across chunks.
    #[inline(always)]
    pub(super) fn dot<S: Simd>(&self, a: &[Lane], b: &[Lane]) -> f32 {
        let mut total = 0.0;
        for segment in self.joined() {
            let (a, b) = (&a[segment.scratch()], &b[segment.scratch()]);
            for chunk in chunks(a.len(), 64 * LANES) {
                let mut sum = Sums::<S, 1>::zero();
                sweep_range::<S>(
                    chunk,
                    #[inline(always)]
                    |at| sum.add_product(at, V::at(a, at), V::at(b, at)),
                );
                total += f64::from(sum.total().sum());
            }
        }
        total as f32
    }
}

/// A length rounded up to whole blocks.
pub(crate) const fn padded(len: usize) -> usize {
    len.next_multiple_of(LANES)
}
