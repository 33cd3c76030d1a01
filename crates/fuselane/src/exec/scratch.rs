//! Small working memory of each thread, used again from call to call.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::pool::{aligned_start, numbers, numbers_mut};
use crate::simd::LANES;

/// Memory of more than this many bytes goes back to the system after use.
const MAX_REUSED: usize = 16 << 20;

thread_local! {
    static FREE: RefCell<Vec<Vec<u64>>> = const { RefCell::new(Vec::new()) };
}

/// Numbers that scratch is made of.
///
/// # Safety
/// Any bits are a value of this type, and it is aligned no more than u64.
pub(crate) unsafe trait Plain: Copy + Send + Sync {
    const ZERO: Self;
    fn plus(self, other: Self) -> Self;
}

// SAFETY: any bits are a float.
unsafe impl Plain for f32 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self + other
    }
}

// SAFETY: any bits are a float.
unsafe impl Plain for f64 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self + other
    }
}

/// Numbers of any value, a whole number of SIMD blocks, aligned to a cache line.
///
/// Its memory is taken from a list of the thread and goes back to it when dropped; so a rayon
/// thread that takes up other work while it waits finds none of it in use.
pub(crate) struct Scratch<R: Plain> {
    words: Vec<u64>,
    /// The word that the numbers begin with.
    start: usize,
    len: usize,
    numbers: PhantomData<R>,
}

impl<R: Plain> Scratch<R> {
    /// At least `len` numbers.
    pub(crate) fn new(len: usize) -> Self {
        let len = len.next_multiple_of(LANES);
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
        let start = aligned_start(&words);
        Self { words, start, len, numbers: PhantomData }
    }

    /// At least `len` zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        let mut scratch = Self::new(len);
        scratch.fill(R::ZERO);
        scratch
    }
}

impl<R: Plain> Deref for Scratch<R> {
    type Target = [R];
    #[inline(always)]
    fn deref(&self) -> &[R] {
        numbers(&self.words[self.start..], self.len)
    }
}

impl<R: Plain> DerefMut for Scratch<R> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [R] {
        numbers_mut(&mut self.words[self.start..], self.len)
    }
}

impl<R: Plain> Drop for Scratch<R> {
    fn drop(&mut self) {
        let words = std::mem::take(&mut self.words);
        if words.len() * 8 <= MAX_REUSED {
            // At the end of a thread its list may be gone before us.
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
