//! A lock that a forked child can renew.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mutex behind a pointer: another thread of the parent may have held it when the child was made,
/// where it would then be held for ever.
pub(crate) struct Lock<T: 'static>(AtomicPtr<Mutex<T>>);

impl<T: Default> Lock<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'static, T> {
        let mut cell = self.0.load(Ordering::Acquire);
        if cell.is_null() {
            let new = Box::into_raw(Box::default());
            match self.0.compare_exchange(cell, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => cell = new,
                Err(other) => {
                    // SAFETY: just made, and not shared.
                    drop(unsafe { Box::from_raw(new) });
                    cell = other;
                }
            }
        }
        // SAFETY: made above by some thread, and never freed.
        unsafe { &*cell }.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new lock on the same content.
    ///
    /// # Safety
    ///
    /// The process was just forked, so that no other thread is there; and no thread of the parent was
    /// changing the content, for instance because that is done with Python's lock alone, which the
    /// forking thread has.
    pub(crate) unsafe fn renew(&self) {
        let cell = self.0.load(Ordering::Acquire);
        if cell.is_null() {
            return;
        }
        // SAFETY: nobody else has access, as the caller says; a guard may be left over from a thread
        // that does not exist here. The old mutex is not freed.
        let content = unsafe { &mut *cell }.get_mut().unwrap_or_else(PoisonError::into_inner);
        let new = Box::into_raw(Box::new(Mutex::new(std::mem::take(content))));
        self.0.store(new, Ordering::Release);
    }
}
