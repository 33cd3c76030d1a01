//! How work is cut: by rows, so that no row's result depends on the cut.
//!
//! Work runs on the current rayon pool (the global one, or the one a caller has installed), and on
//! the calling thread alone where waking others would cost more than it saves, or where the caller
//! wants it so.

use std::cell::Cell;
use std::ops::Range;

use rayon::prelude::*;

use crate::dtype::Real;
use crate::scratch::Scratch;

/// Below this many bytes of operands, one thread is as fast as several.
const WORTH_WAKING: usize = 1 << 20;

/// The least bytes of operands in a task.
const TASK: usize = 1 << 18;

/// Tasks per thread: enough that a thread that was held up does not hold up the call.
const TASKS_PER_THREAD: usize = 4;

/// The most blocks that partial sums are kept for.
const MAX_BLOCKS: usize = 32;

thread_local! {
    static ALONE: Cell<bool> = const { Cell::new(false) };
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
    /// Restores the setting also if the call panics.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            ALONE.set(self.0);
        }
    }
    let _restore = Restore(ALONE.replace(true));
    call()
}

/// How many threads a call with this many bytes of operands runs on.
fn threads(bytes: usize) -> usize {
    if bytes < WORTH_WAKING || ALONE.get() { 1 } else { rayon::current_num_threads() }
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
    let tasks = units.min(threads * TASKS_PER_THREAD).min((bytes / TASK).max(threads));
    (0..tasks).into_par_iter().for_each(|i| work(cut(units, tasks, i)));
}

/// Calls `work` for each of `0..units` with its own `len` numbers of `results`.
pub(crate) fn for_each_chunk<R: Real>(
    units: usize,
    bytes_per_unit: usize,
    results: &mut [R],
    len: usize,
    work: impl Fn(usize, &mut [R]) + Sync,
) {
    let chunks = &mut results[..units * len];
    if threads(units.saturating_mul(bytes_per_unit)) == 1 {
        chunks.chunks_mut(len).enumerate().for_each(|(i, chunk)| work(i, chunk));
    } else {
        chunks.par_chunks_mut(len).enumerate().for_each(|(i, chunk)| work(i, chunk));
    }
}

/// Calls `work` with ranges that cover `0..units` and a zeroed vector for each, to be filled with
/// partial sums; adds the vectors to `total`, in order. The ranges depend on `units` alone, so
/// the sums do not depend on the number of threads.
pub(crate) fn sum_over_ranges<R: Real>(
    units: usize,
    bytes_per_unit: usize,
    total: &mut [R],
    work: impl Fn(Range<usize>, &mut [R]) + Sync,
) {
    if units == 0 {
        return;
    }
    let blocks = (units / 16).clamp(1, MAX_BLOCKS);
    let len = total.len().max(1);
    let mut partials = Scratch::<R>::zeros(blocks * len);
    let partials = &mut partials[..blocks * len];
    let bytes = units.saturating_mul(bytes_per_unit);
    if threads(bytes) == 1 || blocks == 1 {
        for (i, partial) in partials.chunks_mut(len).enumerate() {
            work(cut(units, blocks, i), &mut partial[..total.len()]);
        }
    } else {
        partials.par_chunks_mut(len).enumerate().for_each(|(i, partial)| {
            work(cut(units, blocks, i), &mut partial[..total.len()]);
        });
    }
    for partial in partials.chunks(len) {
        for (sum, &value) in total.iter_mut().zip(partial) {
            *sum += value;
        }
    }
}

/// Range `i` of `0..units` cut into `parts` of nearly equal length.
fn cut(units: usize, parts: usize, i: usize) -> Range<usize> {
    let at = |i: usize| (units as u128 * i as u128 / parts as u128) as usize;
    at(i)..at(i + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

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
        assert!(!ALONE.get());
    }

    #[test]
    fn sums_do_not_depend_on_threads() {
        let sum = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut total = [0.0f32; 3];
            pool.install(|| {
                sum_over_ranges(1001, 1 << 12, &mut total, |range, partial| {
                    for i in range {
                        for (k, p) in partial.iter_mut().enumerate() {
                            *p += 1.0 / (1.0 + (i * 3 + k) as f32);
                        }
                    }
                });
            });
            total
        };
        let one = sum(1);
        assert!([2, 3, 7].into_iter().all(|threads| sum(threads) == one));
        let exact: f64 = (0..1001).map(|i| 1.0 / (1.0 + 3.0 * f64::from(i))).sum();
        assert!((f64::from(one[0]) - exact).abs() < 1e-5);
    }
}
