//! What the Python providers share: which Python runs their worker, and with what settings.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Peer, Start};
use crate::protocol::Alloc;
use crate::setup_peers::{self, PYTHON_VARIABLE, short_hash};

/// The worker and its modules.
const SCRIPTS: [(&str, &str); 5] = [
    ("worker.py", include_str!("../../python/worker.py")),
    ("job.py", include_str!("../../python/job.py")),
    ("torch_peer.py", include_str!("../../python/torch_peer.py")),
    ("fuselane_peer.py", include_str!("../../python/fuselane_peer.py")),
    ("jax_peer.py", include_str!("../../python/jax_peer.py")),
];

/// Settings of glibc's allocator by which freed outputs are kept and used again: large blocks come
/// from the heap rather than from mappings, the heap does not shrink, all threads share it, and
/// scraps beside a freed block join it at once (the cache per thread holds them back, and the next
/// block of the same size does not fit where the last one was). Huge pages are asked for, as
/// fuselane's pool does.
pub(super) const REUSE: &str = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:\
                     glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0";

/// A provider whose worker needs nothing beside its library.
pub(super) struct PythonPeer {
    pub(super) name: &'static str,
    pub(super) library: &'static str,
    pub(super) can_map: bool,
    pub(super) memory_factor: f64,
}

impl Peer for PythonPeer {
    fn name(&self) -> &'static str {
        self.name
    }

    fn command(&self, start: Start) -> Result<Command, String> {
        worker(self.name, self.library, start)
    }

    fn can_map(&self) -> bool {
        self.can_map
    }

    fn memory_factor(&self) -> f64 {
        self.memory_factor
    }
}

/// The command that starts the worker of a provider of a library.
pub(super) fn worker(provider: &str, library: &str, start: Start) -> Result<Command, String> {
    let named = std::env::var_os(PYTHON_VARIABLE).map(PathBuf::from);
    worker_in(&setup_peers::cache_folder()?, named, provider, library, start)
}

fn worker_in(
    cache: &Path,
    named: Option<PathBuf>,
    provider: &str,
    library: &str,
    start: Start,
) -> Result<Command, String> {
    let python = match named {
        Some(path) if path.is_file() => path,
        Some(path) => return Err(format!("{PYTHON_VARIABLE}: there is no {}", path.display())),
        None => setup_peers::installed_python(cache, library).ok_or_else(|| {
            format!("{provider} is not set up: run `fuselane setup-peers` ({})", setup_peers::COSTS)
        })?,
    };
    let folder = cache.join(format!("python-{}", short_hash(&SCRIPTS.map(|(_, text)| text))));
    write_scripts(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut command = Command::new(python);
    let threads = start.threads.to_string();
    command
        .args(["-E", "-s"]) // nothing of the user's own Python set-up
        .arg(folder.join("worker.py"))
        .arg(provider)
        .env("OMP_NUM_THREADS", &threads)
        .env("MKL_NUM_THREADS", &threads);
    if start.alloc == Alloc::Warm {
        command.env("GLIBC_TUNABLES", REUSE);
    }
    Ok(command)
}

/// Writes those that are not there. Several programs may do so at a time, so each file comes to
/// its place complete.
fn write_scripts(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for (name, text) in SCRIPTS {
        let path = folder.join(name);
        if fs::read(&path).is_ok_and(|there| there == text.as_bytes()) {
            continue;
        }
        let part = folder.join(format!("{name}.{}", std::process::id()));
        fs::write(&part, text)?;
        fs::rename(part, path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands() {
        let cache = tempfile::tempdir().unwrap();
        let start = Start { threads: 3, alloc: Alloc::Warm };
        let of = |named| worker_in(cache.path(), named, "torch_compile", "torch", start);
        assert_eq!(
            of(None).unwrap_err(),
            "torch_compile is not set up: run `fuselane setup-peers` (about 3 GB, some minutes)"
        );
        assert_eq!(
            of(Some("/no/python".into())).unwrap_err(),
            "FUSELANE_PEERS_PYTHON: there is no /no/python"
        );
        let python = cache.path().join("my-python");
        fs::write(&python, "").unwrap();
        let command = of(Some(python.clone())).unwrap();
        assert_eq!(command.get_program(), python);
        let args: Vec<_> = command.get_args().collect();
        assert!(Path::new(args[2]).is_file() && args[3] == "torch_compile", "{args:?}");
        let env = |name: &str| command.get_envs().find(|(key, _)| *key == name);
        assert_eq!(env("OMP_NUM_THREADS").unwrap().1.unwrap(), "3");
        assert!(env("GLIBC_TUNABLES").is_some());
    }

    #[test]
    fn scripts_are_written_and_mended() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("deep/er");
        write_scripts(&folder).unwrap();
        fs::write(folder.join("job.py"), "half of i").unwrap();
        write_scripts(&folder).unwrap();
        let mut names: Vec<_> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            ["fuselane_peer.py", "jax_peer.py", "job.py", "torch_peer.py", "worker.py"]
        );
        for (name, text) in SCRIPTS {
            assert_eq!(fs::read_to_string(folder.join(name)).unwrap(), text);
        }
    }
}
