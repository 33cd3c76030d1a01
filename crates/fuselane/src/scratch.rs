//! Small working memory of each thread, kept from call to call.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::dtype::Real;
use crate::pool::{aligned_numbers, aligned_numbers_mut};
use crate::simd::MAX_LANES;

/// Blocks of more than this many bytes go back to the system after use.
const KEEP: usize = 16 << 20;

thread_local! {
    static FREE: RefCell<Vec<Vec<u64>>> = const { RefCell::new(Vec::new()) };
}

/// Numbers of any value, a whole number of blocks of lanes, aligned to a cache line.
///
/// It is taken from the store of the thread and goes back to it when dropped; so a rayon
/// thread that takes up other work while it waits finds none of it in use.
pub(crate) struct Scratch<R: Real> {
    words: Vec<u64>,
    len: usize,
    numbers: PhantomData<R>,
}

impl<R: Real> Scratch<R> {
    /// At least `len` numbers.
    pub(crate) fn new(len: usize) -> Self {
        let len = len.next_multiple_of(MAX_LANES);
        let need = (len * size_of::<R>()).div_ceil(8) + 8;
        let mut words = FREE.with_borrow_mut(|free| {
            // The smallest that fits, else the largest, to grow.
            let fit = (0..free.len())
                .filter(|&i| free[i].len() >= need)
                .min_by_key(|&i| free[i].len())
                .or_else(|| (0..free.len()).max_by_key(|&i| free[i].len()));
            fit.map_or_else(Vec::new, |i| free.swap_remove(i))
        });
        if words.len() < need {
            words = vec![0; need];
        }
        Self { words, len, numbers: PhantomData }
    }

    /// At least `len` zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        let mut scratch = Self::new(len);
        scratch.fill(R::of(0.0));
        scratch
    }
}

impl<R: Real> Deref for Scratch<R> {
    type Target = [R];
    #[inline(always)]
    fn deref(&self) -> &[R] {
        aligned_numbers(&self.words, self.len)
    }
}

impl<R: Real> DerefMut for Scratch<R> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [R] {
        aligned_numbers_mut(&mut self.words, self.len)
    }
}

impl<R: Real> Drop for Scratch<R> {
    fn drop(&mut self) {
        let words = std::mem::take(&mut self.words);
        if words.len() * 8 <= KEEP {
            // At the end of a thread its store may be gone before us.
            let _ = FREE.try_with(|free| free.borrow_mut().push(words));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reused_and_never_shared() {
        let first = Scratch::<f32>::new(100);
        let address = first.as_ptr();
        assert_eq!((first.len(), address as usize % 64), (112, 0));
        let second = Scratch::<f64>::new(5);
        assert_ne!(second.as_ptr().cast(), address);
        drop(first);
        assert_eq!(Scratch::<f32>::zeros(90).as_ptr(), address);
    }
}
