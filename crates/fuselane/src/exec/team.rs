//! Threads that stay awake for a moment: how calls from outside a rayon pool are spread.
//!
//! A kernel that runs at the speed of memory takes some hundred microseconds, and waking a sleeping
//! thread takes fifty of them or more. So, of a team, the calling thread works along from the first
//! moment instead of waiting, and the others spin for a while ([`SPIN_TIME`]) before they
//! sleep: operators of one model follow each other faster than that.
//!
//! **How a job is shared.** It lies on the caller's stack, and [`Shared::job`] points to it. A
//! helper says that it is inside, then looks at the pointer; the caller takes the pointer away,
//! then waits until nobody is inside. Both are sequentially consistent, so either the helper sees
//! no job or the caller sees the helper. A helper that comes late finds no job and nobody waits for
//! it: a team whose helpers are held up is as fast as one thread, not slower.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long a helper spins, waiting for the next job, before it sleeps. Long enough for the small
/// operators between two of ours, and as short as what a sleeping thread costs to wake a few times.
const SPIN_TIME: Duration = Duration::from_micros(200);

/// Tests for a job between two looks at the clock.
const SPINS: u32 = 64;

/// The tasks of one call. Whoever is there takes the next one.
struct Job<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    tasks: usize,
    next: AtomicUsize,
    /// What a helper's task has panicked with, if one has.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job<'_> {
    /// Works until no task is left.
    fn run(&self) {
        loop {
            match self.next.fetch_add(1, Ordering::Relaxed) {
                task if task < self.tasks => (self.work)(task),
                _ => break,
            }
        }
    }

    /// The same on a helper, whose panics are the caller's.
    fn help(&self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run())) {
            self.next.store(self.tasks, Ordering::Relaxed);
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
    }
}

/// What the caller and the helpers see.
struct Shared {
    /// The job that is under way, or null.
    job: AtomicPtr<Job<'static>>,
    /// Jobs so far, so that a helper does not look at one twice.
    count: AtomicUsize,
    /// Helpers that may hold the pointer.
    inside: AtomicUsize,
    /// The CPU that the caller was on.
    caller: AtomicUsize,
}

/// One helper, as the caller knows it.
struct Helper {
    thread: Thread,
    asleep: Arc<AtomicBool>,
}

struct Team {
    shared: Arc<Shared>,
    helpers: Vec<Helper>,
}

/// The team of this process, made at the first call; one caller at a time has it.
static TEAM: OnceLock<Mutex<Team>> = OnceLock::new();

/// Calls `work` with each of `0..tasks` on the calling thread and up to `threads - 1` helpers. Gives
/// false, and does nothing, if another thread has the team.
pub(crate) fn run(threads: usize, tasks: usize, work: &(dyn Fn(usize) + Sync)) -> bool {
    let mut team = match TEAM.get_or_init(|| Mutex::new(Team::new())).try_lock() {
        Ok(team) => team,
        Err(TryLockError::Poisoned(team)) => team.into_inner(),
        Err(TryLockError::WouldBlock) => return false,
    };
    team.run(threads, tasks, work);
    true
}

impl Team {
    fn new() -> Self {
        let shared = Shared {
            job: AtomicPtr::new(ptr::null_mut()),
            count: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            caller: AtomicUsize::new(usize::MAX),
        };
        Self { shared: Arc::new(shared), helpers: Vec::new() }
    }

    fn run(&mut self, threads: usize, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        let helpers = threads.min(tasks).saturating_sub(1);
        while self.helpers.len() < helpers && self.spawn() {}
        let job = Job { work, tasks, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        {
            let _open = Open::new(&self.shared, &job);
            for helper in self.helpers.iter().take(helpers) {
                if helper.asleep.swap(false, Ordering::SeqCst) {
                    helper.thread.unpark();
                }
            }
            job.run();
        }
        if let Some(panic) = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }

    /// One helper more, if the system has one.
    fn spawn(&mut self) -> bool {
        let (shared, asleep) = (Arc::clone(&self.shared), Arc::new(AtomicBool::new(false)));
        let name = format!("fuselane-{}", self.helpers.len() + 1);
        let flag = Arc::clone(&asleep);
        let builder = thread::Builder::new().name(name);
        let Ok(handle) = builder.spawn(move || help(&shared, &flag)) else { return false };
        self.helpers.push(Helper { thread: handle.thread().clone(), asleep });
        true
    }
}

/// A job that helpers may enter, until this is dropped.
struct Open<'s>(&'s Shared);

impl<'s> Open<'s> {
    fn new(shared: &'s Shared, job: &Job<'_>) -> Self {
        let job = ptr::from_ref(job).cast_mut().cast::<Job<'static>>();
        shared.caller.store(cpu(), Ordering::SeqCst);
        shared.job.store(job, Ordering::SeqCst);
        shared.count.fetch_add(1, Ordering::SeqCst);
        Self(shared)
    }
}

impl Drop for Open<'_> {
    /// Also if the caller's own task has panicked: the job is on its stack.
    fn drop(&mut self) {
        self.0.job.store(ptr::null_mut(), Ordering::SeqCst);
        let mut spins = 0;
        while self.0.inside.load(Ordering::SeqCst) > 0 {
            // Whoever is inside has a part of a call left. After some microseconds it may have been
            // put off its CPU: let it have this one.
            if spins < SPINS * 4 {
                std::hint::spin_loop()
            } else {
                thread::yield_now()
            }
            spins += 1;
        }
    }
}

/// What a helper does, for as long as the process lives.
fn help(shared: &Shared, asleep: &AtomicBool) {
    let mut seen = 0;
    loop {
        seen = wait(shared, asleep, seen);
        shared.inside.fetch_add(1, Ordering::SeqCst);
        let job = shared.job.load(Ordering::SeqCst);
        // SAFETY: `inside` was raised before the pointer was read, so the caller either has taken
        // the pointer away by then, and it is null, or waits for us before its job goes away.
        if let Some(job) = unsafe { job.as_ref() } {
            leave_cpu(shared.caller.load(Ordering::SeqCst));
            job.help();
        }
        shared.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The CPU that this thread is on, where the system tells.
fn cpu() -> usize {
    #[cfg(target_os = "linux")]
    // SAFETY: it has no preconditions.
    let cpu = usize::try_from(unsafe { libc::sched_getcpu() });
    #[cfg(not(target_os = "linux"))]
    let cpu = Err(());
    cpu.unwrap_or(usize::MAX)
}

/// Goes to another CPU if this thread is on that one.
///
/// A system may wake a thread where it slept, though its waker is at work there and other CPUs are idle,
/// and leave it there for milliseconds: two threads then take as long as one.
fn leave_cpu(caller: usize) {
    if cpu() != caller || caller == usize::MAX {
        return;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: the sets are ours and of the size that is told; a number beyond them is not in them.
    unsafe {
        let mut all: libc::cpu_set_t = std::mem::zeroed();
        let size = size_of_val(&all);
        if caller >= 8 * size || libc::sched_getaffinity(0, size, &mut all) != 0 {
            return;
        }
        let mut others = all;
        libc::CPU_CLR(caller, &mut others);
        // With the CPU left out, the thread has to move; then it may be anywhere again.
        if libc::CPU_COUNT(&others) > 0 && libc::sched_setaffinity(0, size, &others) == 0 {
            libc::sched_setaffinity(0, size, &all);
        }
    }
}

/// Waits for a job other than number `seen`, and gives its number.
fn wait(shared: &Shared, asleep: &AtomicBool, seen: usize) -> usize {
    let new = || Some(shared.count.load(Ordering::SeqCst)).filter(|&count| count != seen);
    let start = Instant::now();
    loop {
        for _ in 0..SPINS {
            if let Some(count) = new() {
                return count;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() < SPIN_TIME {
            continue;
        }
        // The caller raises the count, then looks at the flag; so one of both sees the other.
        asleep.store(true, Ordering::SeqCst);
        while asleep.load(Ordering::SeqCst) && new().is_none() {
            thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_task_is_done_once() {
        let mut team = Team::new();
        for round in 0..2000 {
            let tasks = round % 37;
            let seen: Vec<AtomicU64> = (0..tasks).map(|_| AtomicU64::new(0)).collect();
            team.run(4, tasks, &|i| {
                seen[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{round}");
            if round % 100 == 0 {
                thread::sleep(SPIN_TIME * 2); // so that helpers fall asleep
            }
        }
        assert_eq!(team.helpers.len(), 3);
    }

    #[test]
    fn helpers_help() {
        let mut team = Team::new();
        let here = thread::current().id();
        for _ in 0..100 {
            let others = AtomicUsize::new(0);
            team.run(2, 64, &|_| {
                thread::sleep(Duration::from_micros(20));
                others.fetch_add(usize::from(thread::current().id() != here), Ordering::Relaxed);
            });
            if others.into_inner() > 0 {
                return;
            }
        }
        panic!("nobody has helped in 100 calls");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn helpers_leave_the_callers_cpu() {
        let allowed = || -> Vec<usize> {
            // SAFETY: the set is ours and of the size that is told.
            let set = unsafe {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                libc::sched_getaffinity(0, size_of_val(&set), &mut set);
                set
            };
            // SAFETY: these are numbers within the set.
            (0..8 * size_of_val(&set)).filter(|&i| unsafe { libc::CPU_ISSET(i, &set) }).collect()
        };
        let before = allowed();
        let alone = before.len() < 2;
        // The system may send it back at once, but not each time.
        let left = (0..100).any(|_| {
            let here = cpu();
            leave_cpu(here);
            cpu() != here
        });
        assert!(left || alone);
        assert_eq!(allowed(), before, "the thread may run where it could before");
        let here = cpu();
        leave_cpu(here + 1_000_000);
        leave_cpu(usize::MAX);
        assert_eq!(allowed(), before);
    }

    #[test]
    fn panics_are_the_callers_and_the_team_goes_on() {
        let mut team = Team::new();
        for bad in [0, 31] {
            let mut call = || {
                team.run(3, 32, &|i| {
                    thread::sleep(Duration::from_micros(20));
                    assert!(i != bad, "task {i}");
                });
            };
            assert!(catch_unwind(AssertUnwindSafe(&mut call)).is_err());
        }
        let done = AtomicUsize::new(0);
        team.run(3, 10, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 10);
    }

    #[test]
    fn one_caller_at_a_time() {
        let inner = Mutex::new(None);
        let outer = run(2, 2, &|i| {
            if i == 0 {
                *inner.lock().unwrap() = Some(run(2, 2, &|_| {}));
            }
        });
        // Other tests may have the team at the moment.
        assert!(!outer || inner.into_inner().unwrap() == Some(false));
    }
}
