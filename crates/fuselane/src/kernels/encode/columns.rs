//! For a softmax over the sequence: the statistics of its columns.

use super::Segments;
use crate::exec::rows::TaskRows;
use crate::exec::scratch::Scratch;
use crate::kernels::lanes::Lane;
use crate::kernels::softmax;
use crate::simd::{Kernel, LANES, Simd, V};

/// What a softmax over the sequence keeps of the columns of x, for each batch entry and some heads that
/// were read together: what is subtracted first, the inverses of the sums of exponentials, and a block
/// of anything but zeros if all elements are so near 0 that nothing is subtracted.
pub(crate) struct Columns {
    statistics: Scratch<Lane>,
    /// The heads that were read together, and the scratch of each.
    heads: usize,
    width: usize,
    /// Whether the exponentials are exact.
    pub(super) exact: bool,
    /// Whether nothing is subtracted, from any column.
    pub(super) in_range: bool,
}

/// The statistics of a head's columns.
pub(super) struct HeadColumns<'c> {
    pub(super) shift: &'c [Lane],
    pub(super) inverse: &'c [Lane],
}

impl Columns {
    /// Room for those of `count` heads of all batch entries together, `heads` of which are read at once.
    pub(crate) fn new(count: usize, heads: usize, width: usize, exact: bool) -> Self {
        let mut columns = Self { heads, width, ..Self::none(exact) };
        columns.statistics = Scratch::zeros(count / heads * columns.len());
        columns
    }

    /// None, for activations that have no use for them.
    pub(crate) fn none(exact: bool) -> Self {
        Self { statistics: Scratch::new(0), heads: 1, width: 0, exact, in_range: false }
    }

    /// Numbers that are kept of the heads that are read at once.
    pub(crate) fn len(&self) -> usize {
        2 * self.heads * self.width + LANES
    }

    pub(crate) fn statistics(&mut self) -> &mut [Lane] {
        &mut self.statistics
    }

    /// To be called when all statistics are there.
    pub(crate) fn finish(&mut self) {
        let mut groups = self.statistics.chunks_exact(self.len());
        self.in_range =
            groups.all(|group| group.last().is_some_and(|in_range| !in_range.is_zero()));
    }

    /// Whether those of `heads` heads of a tile lie side by side.
    pub(super) fn together(&self, heads: usize) -> bool {
        self.heads == heads
    }

    /// Calls `work` with those of `count` rows of `joined` heads, from a head on, counted over all batch
    /// entries.
    #[inline(always)]
    pub(super) fn for_each_row(
        &self,
        first: usize,
        joined: usize,
        count: usize,
        mut work: impl FnMut(usize, HeadColumns<'_>),
    ) {
        let (width, len) = (self.width, self.len());
        let (mut group, mut slot) = (first / self.heads, first % self.heads);
        for row in 0..count {
            let (shifts, inverses) =
                self.statistics[group * len..][..len - LANES].split_at((len - LANES) / 2);
            let (shift, inverse) = (
                &shifts[slot * width..][..joined * width],
                &inverses[slot * width..][..joined * width],
            );
            work(row, HeadColumns { shift, inverse });
            slot += joined;
            if slot == self.heads {
                (group, slot) = (group + 1, 0);
            }
        }
    }
}

/// The statistics of the columns of some neighbouring heads; see [`Columns`].
pub(crate) struct ColumnStatistics<'k, 'r> {
    pub(crate) rows: TaskRows<'r, 1, 0>,
    pub(crate) segments: &'k Segments,
    pub(crate) statistics: &'k mut [Lane],
    pub(crate) exact: bool,
}

impl Kernel for ColumnStatistics<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(mut self) {
        let n = self.rows.range().len();
        let Some(rows) = self.rows.next_rows::<S::Elem>(n) else { return };
        let ([x], statistics) = (&rows.inputs, self.statistics);
        let (statistics, in_range) = statistics.split_at_mut(statistics.len() - LANES);
        let (shift, inverse) = statistics.split_at_mut(statistics.len() / 2);
        let mut all = true;
        if self.segments.is_whole() {
            all = softmax::column_statistics::<S>(x, shift, inverse, self.exact);
        } else {
            // Each in blocks of its own, as rows lie in scratch.
            for segment in self.segments.joined() {
                let (shift, inverse) =
                    (&mut shift[segment.scratch()], &mut inverse[segment.scratch()]);
                let x = x.narrow(segment.features());
                all &= softmax::column_statistics::<S>(&x, shift, inverse, self.exact);
            }
        }
        V::<S>::splat(if all { 1.0 } else { 0.0 }).set(in_range, 0);
    }
}
