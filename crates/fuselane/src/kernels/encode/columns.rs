//! For a softmax over the sequence: the statistics of its columns.

use super::Segments;
use crate::exec::rows::TaskRows;
use crate::exec::scratch::Scratch;
use crate::kernels::lanes::Lane;
use crate::kernels::softmax;
use crate::simd::{Kernel, LANES, Simd, V};

/// What a softmax over the sequence keeps of the columns of x, for each batch entry and some heads that
/// were read together: what is subtracted first, the inverses of the sums of exponentials, and a block
/// of anything but zeros if all elements are in range.
pub(crate) struct Columns {
    statistics: Scratch<Lane>,
    /// The heads that were read together, and the scratch of each.
    heads: usize,
    width: usize,
    /// Whether the exponentials are exact.
    pub(super) exact: bool,
}

/// The statistics of a head's columns.
pub(super) struct HeadColumns<'c> {
    pub(super) shift: &'c [Lane],
    pub(super) inverse: &'c [Lane],
    /// Whether all elements are so near 0 that there is no shift.
    pub(super) in_range: bool,
}

impl Columns {
    /// Room for those of `count` heads of all batch entries together, `heads` of which are read at once.
    pub(crate) fn new(count: usize, heads: usize, width: usize, exact: bool) -> Self {
        let mut columns = Self { statistics: Scratch::new(0), heads, width, exact };
        columns.statistics = Scratch::zeros(count / heads * columns.len());
        columns
    }

    /// None, for activations that have no use for them.
    pub(crate) fn none(exact: bool) -> Self {
        Self { statistics: Scratch::new(0), heads: 1, width: 0, exact }
    }

    /// Numbers that are kept of the heads that are read at once.
    pub(crate) fn len(&self) -> usize {
        2 * self.heads * self.width + LANES
    }

    pub(crate) fn statistics(&mut self) -> &mut [Lane] {
        &mut self.statistics
    }

    /// Those of neighbouring heads, from one on, counted over all batch entries.
    #[inline(always)]
    pub(super) fn heads_from(&self, first: usize) -> impl Iterator<Item = HeadColumns<'_>> {
        let (heads, width, len) = (self.heads, self.width, self.len());
        let inverses = heads * width;
        let mut groups = self.statistics[first / heads * len..].chunks_exact(len);
        let (mut group, mut slot) = (groups.next(), first % heads);
        std::iter::from_fn(
            #[inline(always)]
            move || {
                if slot == heads {
                    (group, slot) = (groups.next(), 0);
                }
                let (all, at) = (group?, slot * width);
                slot += 1;
                Some(HeadColumns {
                    shift: &all[at..][..width],
                    inverse: &all[inverses + at..][..width],
                    in_range: !all[2 * inverses].is_zero(),
                })
            },
        )
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
