//! Ctrl-C: the first one asks the sweep to stop and keep what it has, the second ends at once.

use std::sync::atomic::{AtomicUsize, Ordering};

static ASKED: AtomicUsize = AtomicUsize::new(0);

/// From now on, Ctrl-C is taken as a request.
pub(super) fn listen() {
    let set = ctrlc::set_handler(|| {
        if ASKED.fetch_add(1, Ordering::Relaxed) > 0 {
            std::process::exit(130);
        }
    });
    if let Err(error) = set {
        eprintln!("fuselane: warning: Ctrl-C will end the run without a summary: {error}");
    }
}

/// Whether the user has asked to stop.
pub(super) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed) > 0
}
