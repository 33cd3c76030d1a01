//! Ctrl-C, and a system's request to end: the first one asks the sweep to stop and keep what it has,
//! the second ends at once.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

static ASKED: AtomicUsize = AtomicUsize::new(0);
static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);

/// From now on, a signal is taken as a request.
pub(super) fn listen() {
    let set = ctrlc::set_handler(|| {
        if ASKED.fetch_add(1, Ordering::Relaxed) > 0 {
            if let Some(folder) = FOLDER.lock().ok().and_then(|mut folder| folder.take()) {
                let _ = std::fs::remove_dir_all(folder);
            }
            std::process::exit(130);
        }
    });
    if let Err(error) = set {
        eprintln!("fuselane: warning: Ctrl-C will end the run without a summary: {error}");
    }
}

/// Names a folder to be removed if the program has to end at once.
pub(super) fn remove_at_end(folder: PathBuf) {
    if let Ok(mut kept) = FOLDER.lock() {
        *kept = Some(folder);
    }
}

/// Whether the user has asked to stop.
pub(super) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed) > 0
}
