//! The threads that operators run on: a pool of our own, whose size can be changed, and which
//! a forked child makes anew.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::fault::Fault;

/// Calls with fewer bytes of operands run on the calling thread: the core would not wake others for
/// them, and to enter the pool costs more than they do.
const WORTH_ENTERING: usize = 1 << 20;

/// How many threads; 0 before anybody has said.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Made at the first large call. Behind a pointer, so that a forked child can leave its parent's,
/// which has no threads there and whose lock may be held for ever.
static POOL: AtomicPtr<Mutex<Option<Arc<ThreadPool>>>> = AtomicPtr::new(std::ptr::null_mut());

fn pool() -> MutexGuard<'static, Option<Arc<ThreadPool>>> {
    let mut cell = POOL.load(Ordering::Acquire);
    if cell.is_null() {
        let new = Box::into_raw(Box::default());
        match POOL.compare_exchange(cell, new, Ordering::AcqRel, Ordering::Acquire) {
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

/// How many threads large calls use.
pub(crate) fn count() -> usize {
    match COUNT.load(Ordering::Relaxed) {
        0 => {
            let variable = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
            let named = ["FUSELANE_NUM_THREADS", "OMP_NUM_THREADS"].into_iter().find_map(variable);
            let all = || std::thread::available_parallelism().map_or(1, usize::from);
            let count = named.filter(|&n| n > 0).unwrap_or_else(all);
            COUNT.store(count, Ordering::Relaxed);
            count
        }
        count => count,
    }
}

/// Sets how many; calls that run go on with what they have.
pub(crate) fn set_count(threads: usize) -> Result<(), Fault> {
    if threads == 0 {
        return Err(Fault::value("set_num_threads: n is 0, expected at least 1"));
    }
    COUNT.store(threads, Ordering::Relaxed);
    *pool() = None;
    Ok(())
}

/// Sets how many, unless somebody has said so before.
pub(crate) fn set_default_count(threads: usize) {
    let _ = COUNT.compare_exchange(0, threads.max(1), Ordering::Relaxed, Ordering::Relaxed);
}

/// Runs a call whose operands have this many bytes.
pub(crate) fn run<R: Send>(bytes: usize, call: impl FnOnce() -> R + Send) -> R {
    if bytes < WORTH_ENTERING || rayon::current_thread_index().is_some() {
        return call();
    }
    let pool = {
        let mut cell = pool();
        if cell.is_none() {
            let name = |i| format!("fuselane-{i}");
            let built = ThreadPoolBuilder::new().num_threads(count()).thread_name(name).build();
            *cell = built.ok().map(Arc::new);
        }
        cell.clone()
    };
    match pool {
        Some(pool) => pool.install(call),
        None => call(), // the system gives no more threads; the core then finds its own
    }
}

/// To be called in a forked child.
pub(crate) fn after_fork() {
    POOL.store(std::ptr::null_mut(), Ordering::Release);
    fuselane::pool::after_fork();
}
