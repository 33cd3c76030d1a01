use std::path::{Path, PathBuf};
pub(crate) fn write(folder: &Path) -> Result<PathBuf, String> {
    Ok(folder.join("index.html"))
}
