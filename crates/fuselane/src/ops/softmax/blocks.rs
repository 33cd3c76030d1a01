//! What softmax over either dimension shares: how rows are read and written block by block, and what a
//! block comes to.

use crate::simd::{Appender, Lanes, MAX_LANES, Memory};
use crate::{Element, Real};

/// Runs `$body` for each block of a range: first the whole ones, in a loop that calls nothing, so
/// that its sums stay in registers; then, with `$WHOLE` false, the row's end.
macro_rules! blocks {
    ($L:ident in $range:expr, ($i:ident, $WHOLE:ident) => $body:block) => {{
        let range: std::ops::Range<usize> = $range;
        let whole = range.start + range.len() / $L::N * $L::N;
        for $i in (range.start..whole).step_by($L::N) {
            const $WHOLE: bool = true;
            $body
        }
        if whole < range.end {
            const $WHOLE: bool = false;
            let $i = whole;
            $body
        }
    }};
}

/// Elements of a loop's step, in arrays of known length: so that no step has a bound to check.
pub(super) const STEP: usize = 4 * MAX_LANES;

/// Runs `$body` for each block of the first `$len` elements of some slices, which within it are
/// parts of themselves: steps of [`STEP`] elements, in a loop that calls nothing; then the rest.
macro_rules! steps {
    ($L:ident in $len:expr, [$($a:ident),*], [$($m:ident),*], ($i:ident, $WHOLE:ident) => $body:block) => {{
        let len: usize = $len;
        for k in 0..len / STEP {
            $(let $a = &$a.as_chunks::<STEP>().0[k];)*
            $(let $m = &mut $m.as_chunks_mut::<STEP>().0[k];)*
            for $i in (0..STEP).step_by($L::N) {
                const $WHOLE: bool = true;
                $body
            }
        }
        let (done, whole) = (len / STEP * STEP, len / $L::N * $L::N);
        if done < whole {
            $(let $a = &$a[done..];)*
            $(let $m = &mut $m[done..];)*
            for $i in (0..whole - done).step_by($L::N) {
                const $WHOLE: bool = true;
                $body
            }
        }
        // In whole slices: the last block of one is read together with elements before it.
        if whole < len {
            const $WHOLE: bool = false;
            let $i = whole;
            $body
        }
    }};
}

/// Blocks that are written together.
pub(super) const BLOCKS: usize = STEP / MAX_LANES;

/// Where a row is written to.
pub(super) enum To<'r, 'a, L: Memory<T>, T: Element<Real = L::Real>> {
    /// To itself, and whether past the caches.
    Row(&'r mut [T], bool),
    /// To what it is appended to.
    Appender(&'r mut Appender<'a, L, T>),
}

impl<L, T> To<'_, '_, L, T>
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    /// Writes blocks from `start` of step `k` on.
    #[inline(always)]
    pub(super) fn write_blocks(&mut self, blocks: [L::Packed; BLOCKS], k: usize, start: usize) {
        match self {
            Self::Row(row, stream) => {
                L::write_packed(blocks, &mut row.as_chunks_mut::<STEP>().0[k], start, *stream);
            }
            Self::Appender(appender) => {
                for b in 0..BLOCKS {
                    appender.block(blocks[b], (start + b * L::N, true), STEP);
                }
            }
        }
    }

    /// Writes the block at `i` of a row of `len` elements, rounded by [`Memory::nearest`].
    #[inline(always)]
    pub(super) fn write<const WHOLE: bool>(&mut self, block: L, i: usize, len: usize) {
        match self {
            Self::Row(row, stream) => write_nearest::<L, T, WHOLE>(block, row, i, *stream),
            Self::Appender(appender) => {
                appender.block(block.nearest().pack_exact(), (i, false), len);
            }
        }
    }
}

/// As [`steps`], for a loop that gives a block for each of the `$len` elements of a row: rounds it by
/// [`Memory::nearest`] and writes it.
macro_rules! write_steps {
    ($L:ident, $T:ident to $to:expr, $len:expr, [$($a:ident),*], ($i:ident, $WHOLE:ident) => $value:expr) => {{
        let len: usize = $len;
        let mut to: To<'_, '_, $L, $T> = $to;
        for k in 0..len / STEP {
            $(let $a = &$a.as_chunks::<STEP>().0[k];)*
            for start in (0..STEP).step_by(BLOCKS * $L::N) {
                const $WHOLE: bool = true;
                let zero = $L::splat(Real::of(0.0));
                let mut blocks = [<$L as Memory<$T>>::pack(zero); BLOCKS];
                for b in 0..BLOCKS {
                    let $i = start + b * $L::N;
                    let value: $L = $value;
                    blocks[b] = <$L as Memory<$T>>::pack_exact(<$L as Memory<$T>>::nearest(value));
                }
                to.write_blocks(blocks, k, start);
            }
        }
        let (done, whole) = (len / STEP * STEP, len / $L::N * $L::N);
        if done < whole {
            $(let $a = &$a[done..];)*
            for $i in (0..whole - done).step_by($L::N) {
                const $WHOLE: bool = true;
                let value: $L = $value;
                to.write::<$WHOLE>(value, done + $i, len);
            }
        }
        if whole < len {
            const $WHOLE: bool = false;
            let $i = whole;
            let value: $L = $value;
            to.write::<$WHOLE>(value, $i, len);
        }
    }};
}

/// The block at `i` of a row.
#[inline(always)]
pub(super) fn read<L, T, const WHOLE: bool>(row: &[T], i: usize, fill: T::Real) -> L
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    if WHOLE { L::read_whole(row, i) } else { L::read(row, i, fill) }
}

/// Writes the block at `i` of a row, rounded by [`Memory::nearest`].
#[inline(always)]
pub(super) fn write_nearest<L, T, const WHOLE: bool>(
    block: L,
    row: &mut [T],
    i: usize,
    stream: bool,
) where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let block = block.nearest();
    if WHOLE {
        block.write_exact_whole(row, i, stream);
    } else {
        block.write_exact(row, i, stream);
    }
}

/// ln(sum); 0 for a masked row if `zero_masked`.
#[inline(always)]
pub(super) fn logarithm<R: Real>(sum: f64, zero_masked: bool) -> R {
    if zero_masked && sum == 0.0 { R::of(0.0) } else { R::of(sum.ln()) }
}

/// The gradient of a block, from its output (for the logarithm, the exponential of its output),
/// and from the sum over the dimension of o * grad (of grad).
#[inline(always)]
pub(super) fn pull_back<L: Lanes, const LOG: bool>(o: L, grad: L, total: L) -> L {
    if LOG { o.neg_mul_add(total, grad) } else { o.mul(grad.sub(total)) }
}

/// `value`, but 0 where `flag` is.
#[inline(always)]
pub(super) fn zero_where_zero<L: Lanes>(flag: L, value: L) -> L {
    let zero = L::splat(Real::of(0.0));
    L::select(flag.le(zero), zero, value)
}

pub(super) use {blocks, steps, write_steps};
