//! Small working memory of each thread, kept from call to call.

use std::cell::RefCell;

use crate::dtype::Real;
use crate::simd::MAX_LANES;

/// Blocks of more than this many bytes go back to the system after use.
const KEEP: usize = 16 << 20;

thread_local! {
    static FREE: RefCell<Vec<Vec<u64>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with `len` numbers of any value, rounded up to whole blocks of lanes.
///
/// Calls may nest. Memory is taken from the thread's store for the time of the call, so a rayon
/// thread that takes up other work while it waits finds none of it in use.
pub(crate) fn with<R: Real, Out>(len: usize, f: impl FnOnce(&mut [R]) -> Out) -> Out {
    let len = len.next_multiple_of(MAX_LANES);
    let words = (len * size_of::<R>()).div_ceil(8) + 8;
    let mut block = FREE.with_borrow_mut(|free| {
        // The smallest that fits, else the largest, to grow.
        let fit = (0..free.len())
            .filter(|&i| free[i].len() >= words)
            .min_by_key(|&i| free[i].len())
            .or_else(|| (0..free.len()).max_by_key(|&i| free[i].len()));
        fit.map_or_else(Vec::new, |i| free.swap_remove(i))
    });
    if block.len() < words {
        block = vec![0; words];
    }
    let result = f(crate::pool::aligned_numbers(&mut block, len));
    if block.len() * 8 <= KEEP {
        FREE.with_borrow_mut(|free| free.push(block));
    }
    result
}

/// [`with`] for several equal pieces.
pub(crate) fn with_many<R: Real, const K: usize, Out>(
    len: usize,
    f: impl FnOnce([&mut [R]; K]) -> Out,
) -> Out {
    let len = len.next_multiple_of(MAX_LANES);
    with(len * K, |all: &mut [R]| {
        let mut rest = all;
        f(std::array::from_fn(|_| {
            let (piece, tail) = std::mem::take(&mut rest).split_at_mut(len);
            rest = tail;
            piece
        }))
    })
}
