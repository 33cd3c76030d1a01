//! For a softmax over the sequence: the statistics of its columns.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Pieces;
use crate::dtype::{Element, Real};
use crate::ops::softmax::{self, NEAR};
use crate::rows::{Part, Run};
use crate::scratch::Scratch;
use crate::simd::{KernelIn, Lanes, MAX_LANES, Math, Memory, Task};

/// The statistics of some columns, for all heads that they are of; see [`super::Columns`].
pub(super) struct ColumnStatistics<'k, 'r, R> {
    pub(super) part: Part<'r, 1, 0>,
    pub(super) pieces: &'k Pieces,
    pub(super) statistics: &'k mut [R],
    pub(super) exact: bool,
    /// Set where columns are not near.
    pub(super) far: &'k AtomicBool,
}

impl<R: Real> KernelIn<R> for ColumnStatistics<'_, '_, R> {
    #[inline(always)]
    fn run_in<L, T>(mut self)
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let n = self.part.range().len();
        let Some(run) = self.part.next_run::<T>(n) else { return };
        let ([x], rows, width) = (&run.inputs, run.rows, self.pieces.width);
        let columns = x.len();
        let heads = self.statistics.chunks_exact_mut(2 * width);
        let d = columns / heads.len().max(1);
        let short = L::HAS_SHORT && !self.exact && self.pieces.whole();
        let mut sums = Scratch::<R>::zeros(columns);
        if short {
            let lanes = PhantomData::<L>;
            let far = L::enter(NearColumnSums { x, rows, sums: &mut sums, lanes });
            if !far {
                let one = L::splat(Real::of(1.0));
                for (head, sums) in heads.zip(sums.chunks_exact(d)) {
                    for k in (0..d).step_by(L::N) {
                        one.div(L::get(sums, k)).set(head, width + k);
                    }
                }
                return;
            }
        }
        self.far.store(true, Ordering::Relaxed);
        let blocks = columns.next_multiple_of(L::N);
        let (mut max, mut inverse) = (Scratch::<R>::new(columns), Scratch::<R>::new(columns));
        let (max, inverse) = (&mut max[..blocks], &mut inverse[..blocks]);
        softmax::column_statistics::<L, T>(x, 0..rows, false, max, inverse);
        for k in (0..columns).step_by(L::N) {
            if short {
                // Near columns are what they are among near ones.
                let (mut largest, zero) = (L::splat(Real::of(0.0)), Real::of(0.0));
                for r in 0..rows {
                    largest = largest.max_nan(L::read(x.row(r), k, zero).abs());
                }
                let near = largest.le(L::splat(Real::of(f64::from(NEAR))));
                let one = L::splat(Real::of(1.0));
                // 0 stands for near: a maximum of 0 is replaced by one that subtracts nothing.
                let (zero, tiny) =
                    (L::splat(zero), L::splat(Real::of(f64::from(f32::MIN_POSITIVE))));
                let found: L = L::get(max, k);
                let found = L::select(zero.lt(found.abs()), found, tiny);
                L::select(near, zero, found).set(max, k);
                let sum = one.div(L::get(&sums, k));
                L::select(near, sum, L::get(inverse, k)).set(inverse, k);
            }
            L::get(max, k).write(max, k, false);
            L::get(inverse, k).write(inverse, k, false);
        }
        for (i, head) in heads.enumerate() {
            let (to_max, to_inverse) = head.split_at_mut(width);
            self.pieces.gather::<L>(&max[i * d..(i + 1) * d], to_max);
            self.pieces.gather::<L>(&inverse[i * d..(i + 1) * d], to_inverse);
        }
    }
}

/// Rows whose exponentials are added to the sums of columns at once.
const ROWS: usize = 4;
/// Rows whose exponentials are summed before these sums are added up.
const CHUNK_ROWS: usize = 64 * ROWS;

/// The sums of the columns' exponentials, by the short form and without a maximum. Tells whether
/// some elements are not near 0.
struct NearColumnSums<'k, 'r, L, T: Element> {
    x: &'k Run<'r, T>,
    rows: usize,
    /// Zeros so far.
    sums: &'k mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T> Task for NearColumnSums<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, rows, sums, .. } = self;
        let mut noted = L::splat(Real::of(0.0));
        let mut chunk = Scratch::<T::Real>::new(sums.len());
        let (sums, _) = sums.as_chunks_mut::<MAX_LANES>();
        let (chunk, _) = chunk.as_chunks_mut::<MAX_LANES>();
        let ahead = x.ahead();
        for start in (0..rows).step_by(CHUNK_ROWS) {
            let end = rows.min(start + CHUNK_ROWS);
            chunk.as_flattened_mut().fill(Real::of(0.0));
            let mut r = start;
            while r + ROWS <= end {
                let (a, b) = (x.row(r).as_chunks().0, x.row(r + 1).as_chunks().0);
                let (c, d) = (x.row(r + 2).as_chunks().0, x.row(r + 3).as_chunks().0);
                let rows = a.iter().zip(b).zip(c.iter().zip(d));
                for (((a, b), (c, d)), sum) in rows.zip(&mut *chunk) {
                    let mut e = L::get(sum, 0);
                    let rows: [&[T; MAX_LANES]; ROWS] = [a, b, c, d];
                    for x in rows {
                        L::prefetch(x.as_ptr().wrapping_byte_offset(ahead));
                        noted = L::note(x, 0, noted);
                        e = e.add(L::read_whole(x, 0).exp_for_store::<true>());
                    }
                    e.set(sum, 0);
                }
                r += ROWS;
            }
            for r in r..end {
                for (x, sum) in x.row(r).as_chunks::<MAX_LANES>().0.iter().zip(&mut *chunk) {
                    noted = L::note(x, 0, noted);
                    L::get(sum, 0).add(L::read_whole(x, 0).exp_for_store::<true>()).set(sum, 0);
                }
            }
            for (sum, chunk) in sums.iter_mut().zip(&*chunk) {
                L::get(sum, 0).add(L::get(chunk, 0)).set(sum, 0);
            }
        }
        L::is_far(noted, NEAR)
    }
}
