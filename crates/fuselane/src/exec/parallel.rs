//! How work is cut: by rows, so that no row's result depends on the cut.
//!
//! Work runs on the calling thread and a team of helpers ([`super::team`]), as many as rayon's
//! global pool has; in a rayon pool, where the caller has entered one; and on the calling thread
//! alone where waking others would cost more than it saves, or where the caller wants it so.

use std::cell::Cell;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::team;
use crate::exec::scratch::{Plain, Scratch};

/// Below this many bytes of operands, one thread is as fast as several.
const MIN_PARALLEL_BYTES: usize = 1 << 20;

/// The least bytes of operands in a task.
const MIN_TASK_BYTES: usize = 1 << 18;

/// Tasks per thread: enough that a thread that was held up does not hold up the call.
const TASKS_PER_THREAD: usize = 4;

/// The most vectors of partial sums in a call.
const MAX_PARTIAL_SUMS: usize = 32;

/// Threads that are not rayon's, such as those of a library whose calls alternate with those of this one.
pub trait Executor: Sync {
    /// How many there are, the calling one included.
    fn threads(&self) -> usize;

    /// Calls `work` with each of `0..tasks`, once, on any of them, and returns when all is done.
    fn run(&self, tasks: usize, work: &(dyn Fn(usize) + Sync));
}

/// The calling thread alone.
struct Alone;

impl Executor for Alone {
    fn threads(&self) -> usize {
        1
    }

    fn run(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(work);
    }
}

thread_local! {
    static EXECUTOR: Cell<Option<&'static dyn Executor>> = const { Cell::new(None) };
}

/// Runs `call` with all operators in it on these threads, instead of those of the current rayon pool.
/// Results do not depend on it.
///
/// ```
/// use fuselane::{Act, Executor, View};
/// /// Threads that are started for each call.
/// struct Fresh;
/// impl Executor for Fresh {
///     fn threads(&self) -> usize {
///         2
///     }
///     fn run(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
///         std::thread::scope(|scope| {
///             let half = scope.spawn(move || (0..tasks / 2).for_each(work));
///             (tasks / 2..tasks).for_each(work);
///             let _ = half.join();
///         });
///     }
/// }
/// let x = vec![-1.0f32; 1 << 20];
/// let o = fuselane::with_executor(&Fresh, || Act::Relu.forward(View::new(&x, &[1 << 20])?))?;
/// assert_eq!(o.as_slice::<f32>()?, vec![0.0; 1 << 20]);
/// # Ok::<(), fuselane::Error>(())
/// ```
pub fn with_executor<R>(executor: &'static dyn Executor, call: impl FnOnce() -> R) -> R {
    /// Restores the last one also if the call panics.
    struct Restore(Option<&'static dyn Executor>);
    impl Drop for Restore {
        fn drop(&mut self) {
            EXECUTOR.set(self.0);
        }
    }
    let _restore = Restore(EXECUTOR.replace(Some(executor)));
    call()
}

/// Runs `call` with all operators in it on the calling thread alone.
///
/// A rayon pool of one thread would do the same, but hand each call over to that thread and wait.
///
/// ```
/// use fuselane::{Act, View};
/// let x = vec![-1.0f32; 1 << 20];
/// let o = fuselane::on_this_thread(|| Act::Relu.forward(View::new(&x, &[1 << 20])?))?;
/// assert_eq!(o.as_slice::<f32>()?[7], 0.0);
/// # Ok::<(), fuselane::Error>(())
/// ```
pub fn on_this_thread<R>(call: impl FnOnce() -> R) -> R {
    with_executor(&Alone, call)
}

/// How many threads large calls run on.
pub(crate) fn current_threads() -> usize {
    EXECUTOR.get().map_or_else(rayon::current_num_threads, |executor| executor.threads().max(1))
}

/// How many threads a call with this many bytes of operands runs on.
fn threads(bytes: usize) -> usize {
    if bytes < MIN_PARALLEL_BYTES { 1 } else { current_threads() }
}

/// Calls `work` with each of `0..tasks`, once, on all threads.
fn spread(tasks: usize, work: impl Fn(usize) + Sync) {
    if let Some(executor) = EXECUTOR.get() {
        return executor.run(tasks, &work);
    }
    let in_pool = rayon::current_thread_index().is_some();
    if in_pool || !team::run(rayon::current_num_threads(), tasks, &work) {
        (0..tasks).into_par_iter().for_each(&work);
    }
}

/// Calls `work` with each of `0..tasks`, once, on the threads that operators run on, and returns when
/// all is done: for work between two operators, or to measure what these threads can do.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// let sum = AtomicUsize::new(0);
/// fuselane::for_each_task(5, |i| {
///     sum.fetch_add(i, Ordering::Relaxed);
/// });
/// assert_eq!(sum.into_inner(), 10);
/// ```
pub fn for_each_task(tasks: usize, work: impl Fn(usize) + Sync) {
    if tasks <= 1 || current_threads() == 1 {
        (0..tasks).for_each(work);
    } else {
        spread(tasks, work);
    }
}

/// Calls `work` with ranges that cover `0..units`, each unit once.
pub(crate) fn for_each_range(
    units: usize,
    bytes_per_unit: usize,
    work: impl Fn(Range<usize>) + Sync,
) {
    let bytes = units.saturating_mul(bytes_per_unit);
    let threads = threads(bytes);
    if threads == 1 || units <= 1 {
        if units > 0 {
            work(0..units);
        }
        return;
    }
    let tasks = units.min(threads * TASKS_PER_THREAD).min((bytes / MIN_TASK_BYTES).max(threads));
    spread(tasks, |i| work(cut(units, tasks, i)));
}

/// Calls `work` for each of `0..units` with its own `len` numbers of `results`.
pub(crate) fn for_each_chunk<R: Plain>(
    units: usize,
    bytes_per_unit: usize,
    results: &mut [R],
    len: usize,
    work: impl Fn(usize, &mut [R]) + Sync,
) {
    let chunks = results[..units * len].chunks_mut(len);
    if units == 1 || threads(units.saturating_mul(bytes_per_unit)) == 1 {
        return chunks.enumerate().for_each(|(i, chunk)| work(i, chunk));
    }
    // There are few. Each lock is taken once, so that nobody waits for one.
    let chunks: Vec<_> = chunks.map(Mutex::new).collect();
    spread(units, |i| work(i, &mut chunks[i].lock().unwrap_or_else(PoisonError::into_inner)));
}

/// Calls `work` with ranges that cover `0..units` and a zeroed vector for each, to be filled with
/// partial sums; adds the vectors to `total`, in order. The ranges depend on `units` alone, so
/// the sums do not depend on the number of threads.
pub(crate) fn sum_over_ranges<R: Plain>(
    units: usize,
    bytes_per_unit: usize,
    total: &mut [R],
    work: impl Fn(Range<usize>, &mut [R]) + Sync,
) {
    if units == 0 {
        return;
    }
    let tasks = (units / 16).clamp(1, MAX_PARTIAL_SUMS);
    let len = total.len().max(1);
    let mut partials = Scratch::<R>::zeros(tasks * len);
    let bytes_per_task = units.saturating_mul(bytes_per_unit).div_ceil(tasks);
    for_each_chunk(tasks, bytes_per_task, &mut partials, len, |i, partial| {
        work(cut(units, tasks, i), &mut partial[..total.len()]);
    });
    for partial in partials[..tasks * len].chunks(len) {
        for (sum, &value) in total.iter_mut().zip(partial) {
            *sum = sum.plus(value);
        }
    }
}

/// Range `i` of `0..units` cut into `tasks` of nearly equal length.
fn cut(units: usize, tasks: usize, i: usize) -> Range<usize> {
    let at = |i: usize| (units as u128 * i as u128 / tasks as u128) as usize;
    at(i)..at(i + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_visited_once() {
        for (units, bytes) in [(0, 1), (1, 1 << 22), (7, 1 << 20), (1000, 1 << 12)] {
            for threads in [1, 2, 3, 7] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let seen = Mutex::new(vec![0; units]);
                pool.install(|| {
                    for_each_range(units, bytes, |range| {
                        for i in range {
                            seen.lock().unwrap()[i] += 1;
                        }
                    });
                });
                assert!(seen.into_inner().unwrap().iter().all(|&n| n == 1));
            }
        }
    }

    #[test]
    fn one_thread_is_the_calling_one() {
        let here = std::thread::current().id();
        let same = || {
            let all = Mutex::new(true);
            for_each_range(64, 1 << 20, |_| {
                *all.lock().unwrap() &= std::thread::current().id() == here
            });
            all.into_inner().unwrap()
        };
        assert!(on_this_thread(same));
        assert!(std::panic::catch_unwind(|| on_this_thread(|| panic!())).is_err());
        assert!(EXECUTOR.get().is_none());
    }

    /// As many threads as tasks, in no order.
    struct Scattered;

    impl Executor for Scattered {
        fn threads(&self) -> usize {
            5
        }

        fn run(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
            std::thread::scope(|scope| {
                (0..tasks).rev().for_each(|i| drop(scope.spawn(move || work(i))));
            });
        }
    }

    #[test]
    fn another_executor_visits_every_unit_once() {
        for units in [1, 7, 1000] {
            let seen = Mutex::new(vec![0; units]);
            let mut results = vec![0.0f32; units * 3];
            with_executor(&Scattered, || {
                for_each_range(units, 1 << 20, |range| {
                    range.for_each(|i| seen.lock().unwrap()[i] += 1);
                });
                for_each_chunk(units, 1 << 20, &mut results, 3, |i, chunk| chunk.fill(i as f32));
            });
            assert!(seen.into_inner().unwrap().iter().all(|&n| n == 1));
            assert!(results.chunks(3).enumerate().all(|(i, chunk)| chunk == [i as f32; 3]));
        }
    }

    #[test]
    fn sums_do_not_depend_on_threads() {
        let sum = |threads: usize| {
            let mut total = [0.0f32; 3];
            let mut call = || {
                sum_over_ranges(1001, 1 << 12, &mut total, |range, partial| {
                    for i in range {
                        for (k, p) in partial.iter_mut().enumerate() {
                            *p += 1.0 / (1.0 + (i * 3 + k) as f32);
                        }
                    }
                });
            };
            match threads {
                0 => call(), // as the caller has said
                _ => {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                    pool.build().unwrap().install(call);
                }
            }
            total
        };
        let one = sum(1);
        assert!([2, 3, 7].into_iter().all(|threads| sum(threads) == one));
        assert_eq!(with_executor(&Scattered, || sum(0)), one);
        assert_eq!(on_this_thread(|| sum(0)), one);
        let exact: f64 = (0..1001).map(|i| 1.0 / (1.0 + 3.0 * f64::from(i))).sum();
        assert!((f64::from(one[0]) - exact).abs() < 1e-5);
    }
}
