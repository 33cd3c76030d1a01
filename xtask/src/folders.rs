//! Where things are.

use std::path::{Path, PathBuf};

/// The workspace's root: the folder above this crate's, which cargo tells when it runs us.
pub(crate) fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR");
    let here = here.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.parent().map_or_else(|| here.clone(), Path::to_path_buf)
}

/// The folder that cargo builds into.
pub(crate) fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => root().join(folder),
        None => root().join("target"),
    }
}

/// The folder for what all checkouts share, as `fuselane` has it.
pub(crate) fn cache() -> Result<PathBuf, String> {
    let variable = |name: &str| std::env::var_os(name).filter(|text| !text.is_empty());
    if let Some(folder) = variable("FUSELANE_CACHE") {
        return Ok(root().join(folder));
    }
    let home = |below: &str| variable("HOME").map(|home| Path::new(&home).join(below));
    let folder = if cfg!(windows) {
        variable("LOCALAPPDATA").map(PathBuf::from)
    } else if cfg!(target_os = "macos") {
        home("Library/Caches")
    } else {
        variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| home(".cache"))
    };
    let folder = folder.map(|folder| folder.join("fuselane"));
    folder.ok_or_else(|| "this user has no cache folder: name one in FUSELANE_CACHE".to_owned())
}

/// A program of the release build.
pub(crate) fn built(program: &Path) -> PathBuf {
    target().join("release").join(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_the_workspace() {
        assert!(root().join("Cargo.lock").is_file());
    }
}
