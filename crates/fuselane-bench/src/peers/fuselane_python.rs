//! The Python package `fuselane` on tensors of PyTorch: what a call from Python costs.

use std::path::Path;
use std::process::Command;

use super::{Peer, Start, python};

/// Names a folder that has the package, where it is not installed; `fuselane_peer.py` reads it.
const PACKAGE_VARIABLE: &str = "FUSELANE_PYTHON_PACKAGE";

pub(crate) struct FuselanePython;

impl Peer for FuselanePython {
    fn name(&self) -> &'static str {
        "fuselane_python"
    }

    fn command(&self, start: Start) -> Result<Command, String> {
        let command = python::worker(self.name(), "torch", start)?;
        available(Path::new(command.get_program()))?;
        Ok(command)
    }

    fn memory_factor(&self) -> f64 {
        1.2
    }
}

/// Whether this Python finds the package. PyTorch is not imported for that, so it takes no time.
fn available(python: &Path) -> Result<(), String> {
    // A folder `fuselane` that happens to lie somewhere can be imported too, and has nothing.
    let code = format!(
        "import os, sys; sys.path[:0] = filter(None, [os.environ.get('{PACKAGE_VARIABLE}')]); \
         from fuselane import act"
    );
    // Isolated, as the worker is: nothing of the user's own set-up, nor of the current folder.
    let output = Command::new(python).args(["-I", "-c", &code]).output();
    let output = output.map_err(|error| format!("{} does not start: {error}", python.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    let why = words.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("no reason");
    Err(format!(
        "fuselane_python is not there ({why}): build it with `cargo xtask wheel` and install it \
         with `{} -m pip install WHEEL`, or name the folder that has the package in {PACKAGE_VARIABLE}",
        python.display()
    ))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::setup_peers::tests::script;

    #[test]
    fn a_missing_package_is_one_line_that_says_how_to_get_it() {
        let folder = tempfile::tempdir().unwrap();
        let script = |name: &str, text: &str| script(folder.path(), name, text);
        available(&script("with", "exit 0")).unwrap();
        let without = script("without", "echo 'Traceback:\nModuleNotFoundError: no' >&2; exit 1");
        let why = available(&without).unwrap_err();
        assert!(why.starts_with("fuselane_python is not there (ModuleNotFoundError: no)"), "{why}");
        for part in ["cargo xtask wheel", "without -m pip install", PACKAGE_VARIABLE] {
            assert!(why.contains(part), "{part} is missing in {why}");
        }
        assert_eq!(why.lines().count(), 1, "{why}");
        assert!(available(Path::new("/no/python")).unwrap_err().contains("/no/python"));
    }
}
