//! Files that are either whole or not there.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// Writes a file of the same folder and renames it. An error names the path and what to do.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let result = write_and_rename(&temporary, path, text);
    if result.is_err() {
        // It may not even exist; the first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    }
    result.map_err(|error| fault("cannot write", path, &error))
}

fn write_and_rename(temporary: &Path, path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::File::create(temporary)?;
    file.write_all(text.as_bytes())?;
    // Some file systems tell only here that the disk is full.
    file.sync_all()?;
    drop(file);
    fs::rename(temporary, path)
}

/// Makes a folder and those above it.
pub(crate) fn folder(path: &Path) -> Result<(), String> {
    fs::create_dir_all(path).map_err(|error| fault("cannot make the folder", path, &error))
}

fn fault(what: &str, path: &Path, error: &io::Error) -> String {
    let advice = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "; free some space, or give a folder on another disk with --out"
        }
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "; give a folder that you may write to with --out"
        }
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            "; a file has the name of a folder: give another one with --out"
        }
        _ => "",
    };
    format!("{what} {}: {error}{advice}", path.display())
}
