//! The threads that operators run on: PyTorch's, where it lends them, or else a pool of our own, whose
//! size can be changed, and which a forked child makes anew.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use fuselane::Executor;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::fault::Fault;
use crate::lock::Lock;

/// Calls with fewer bytes of operands run on the calling thread: the core would not wake others for
/// them, and to enter the pool costs more than they do.
const WORTH_ENTERING: usize = 1 << 20;

/// How many threads; 0 before anybody has said.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Who is asked as long as that is so.
static ASK: OnceLock<Box<dyn Fn() -> usize + Send + Sync>> = OnceLock::new();

/// Threads of PyTorch's, which calls run on where they are enough: the two libraries work one after the other, and
/// two sets of threads would disturb each other, since those of OpenMP spin for a while before they
/// sleep.
static TEAM: OnceLock<Team> = OnceLock::new();

/// Whether this process is a forked child, where PyTorch's threads do not exist and are waited for in
/// vain.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Calls a function with each of `0..n`, on n threads if there are as many.
pub(crate) type Lent = Box<dyn Fn(usize, &(dyn Fn() + Sync)) + Send + Sync>;

struct Team {
    /// How many threads PyTorch uses now.
    most: Box<dyn Fn() -> usize + Send + Sync>,
    run: Lent,
}

impl Team {
    fn threads(&self) -> usize {
        (self.most)()
    }
}

impl Executor for Team {
    fn threads(&self) -> usize {
        count()
    }

    fn run(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        // Each thread takes tasks until none is left, so that one that was held up does not hold up
        // the others.
        (self.run)(count().min(tasks), &|| {
            loop {
                match next.fetch_add(1, Ordering::Relaxed) {
                    task if task < tasks => work(task),
                    _ => break,
                }
            }
        });
    }
}

/// Lends threads: `most` tells how many there are.
pub(crate) fn lend(most: impl Fn() -> usize + Send + Sync + 'static, run: Lent) {
    let _ = TEAM.set(Team { most: Box::new(most), run });
}

/// Made at the first large call that these are not enough for. Behind a pointer, so that a forked child can leave its parent's,
/// which has no threads there and whose lock may be held for ever.
static POOL: Lock<Option<Arc<ThreadPool>>> = Lock::new();

/// How many threads large calls use: what somebody has said, or what PyTorch uses now.
pub(crate) fn count() -> usize {
    match COUNT.load(Ordering::Relaxed) {
        0 => {
            let variable = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
            if let Some(count) = variable("FUSELANE_NUM_THREADS").filter(|&n| n > 0) {
                COUNT.store(count, Ordering::Relaxed);
                return count;
            }
            let all = || std::thread::available_parallelism().map_or(1, usize::from);
            ASK.get().map_or_else(all, |ask| ask()).max(1)
        }
        count => count,
    }
}

/// Names who is asked how many, as long as nobody has said. The two libraries work one after the other, so that as
/// many as PyTorch uses is never too many; its workers, for instance, use one each.
pub(crate) fn follow(ask: impl Fn() -> usize + Send + Sync + 'static) {
    let _ = ASK.set(Box::new(ask));
}

/// Sets how many; calls that run go on with what they have.
pub(crate) fn set_count(threads: usize) -> Result<(), Fault> {
    if threads == 0 {
        return Err(Fault::value("set_num_threads: n is 0, expected at least 1"));
    }
    COUNT.store(threads, Ordering::Relaxed);
    Ok(())
}

/// Runs a call whose operands have this many bytes.
pub(crate) fn run<R: Send>(bytes: usize, call: impl FnOnce() -> R + Send) -> R {
    if bytes < WORTH_ENTERING || rayon::current_thread_index().is_some() {
        return call();
    }
    let count = count(); // before the lock, since it may ask Python
    if count == 1 {
        return fuselane::on_this_thread(call);
    }
    if let Some(team) = TEAM.get()
        && count <= team.threads()
        && !FORKED.load(Ordering::Relaxed)
    {
        return fuselane::with_executor(team, call);
    }
    let pool = {
        let mut cell = POOL.lock();
        if cell.as_ref().is_none_or(|pool| pool.current_num_threads() != count) {
            let name = |i| format!("fuselane-{i}");
            let built = ThreadPoolBuilder::new().num_threads(count).thread_name(name).build();
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
    FORKED.store(true, Ordering::Relaxed);
    // SAFETY: as said. The pool is changed without Python's lock, but in one store, and what it held
    // is not looked at: its threads are not here.
    unsafe { POOL.renew() };
    std::mem::forget(POOL.lock().take());
    fuselane::pool::after_fork();
}
