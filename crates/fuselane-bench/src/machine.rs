//! What the system tells about the machine: processor, caches, memory.
//!
//! Linux tells it in files; elsewhere, and where a file is missing, a fact is `None`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The facts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The processor's name.
    pub(crate) cpu: Option<String>,
    /// Cores, each of which may run several threads.
    pub(crate) physical_cores: Option<usize>,
    /// Threads that the system lets this process run at once.
    pub(crate) logical_cpus: Option<usize>,
    pub(crate) caches: Caches,
    /// Bytes of memory.
    pub(crate) memory_bytes: Option<u64>,
    /// Bytes of memory that this process may still take.
    pub(crate) available_memory_bytes: Option<u64>,
    /// `always`, `madvise` or `never`.
    pub(crate) transparent_huge_pages: Option<String>,
}

/// The data caches, as the first core sees them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Caches {
    pub(crate) l1d: Option<Cache>,
    pub(crate) l2: Option<Cache>,
    pub(crate) l3: Option<Cache>,
}

impl Caches {
    /// The largest cache that is known.
    pub(crate) fn last_level(&self) -> Option<Cache> {
        self.l3.or(self.l2).or(self.l1d)
    }
}

/// One cache.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cache {
    pub(crate) bytes: u64,
    /// Logical CPUs that share it.
    pub(crate) shared_by: Option<usize>,
}

impl Machine {
    /// Asks the system.
    pub(crate) fn read() -> Self {
        let logical_cpus = std::thread::available_parallelism().ok().map(usize::from);
        Self { logical_cpus, ..Self::read_from(Path::new("/")) }
    }

    /// Reads the files of a system whose root is `root`.
    fn read_from(root: &Path) -> Self {
        let meminfo = read(&root.join("proc/meminfo"));
        let memory = |key| meminfo.as_deref().and_then(|text| kibibytes(text, key));
        let (total, available) = (memory("MemTotal"), memory("MemAvailable"));
        let limit = cgroup_limit(root);
        Self {
            cpu: read(&root.join("proc/cpuinfo")).as_deref().and_then(model_name),
            physical_cores: physical_cores(&root.join("sys/devices/system/cpu")),
            logical_cpus: None,
            caches: caches(&root.join("sys/devices/system/cpu/cpu0/cache")),
            memory_bytes: total,
            available_memory_bytes: [available, limit].into_iter().flatten().min(),
            transparent_huge_pages: read(&root.join("sys/kernel/mm/transparent_hugepage/enabled"))
                .as_deref()
                .and_then(bracketed),
        }
    }
}

/// A file's text without the white space around it.
fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn read_number(path: &Path) -> Option<u64> {
    read(path)?.parse().ok()
}

fn model_name(cpuinfo: &str) -> Option<String> {
    let (_, name) = cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "model name")?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// The value of a line `key:  123 kB`, in bytes.
fn kibibytes(meminfo: &str, key: &str) -> Option<u64> {
    let (_, value) =
        meminfo.lines().filter_map(|line| line.split_once(':')).find(|&(name, _)| name == key)?;
    value.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// What a container's memory limit leaves, for both versions of control groups.
fn cgroup_limit(root: &Path) -> Option<u64> {
    let group = root.join("sys/fs/cgroup");
    let left = |limit: &str, used: &str| {
        let limit = read_number(&group.join(limit))?;
        Some(limit.saturating_sub(read_number(&group.join(used)).unwrap_or(0)))
    };
    left("memory.max", "memory.current")
        .or_else(|| left("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
}

/// The choice marked in a line `always [madvise] never`.
fn bracketed(choices: &str) -> Option<String> {
    let (_, rest) = choices.split_once('[')?;
    let (choice, _) = rest.split_once(']')?;
    Some(choice.to_owned())
}

/// The folders in `folder` whose name is `prefix` and a number.
fn numbered(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix(prefix));
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        })
        .map(|entry| entry.path())
        .collect()
}

fn physical_cores(cpus: &Path) -> Option<usize> {
    let cores: BTreeSet<(u64, u64)> = numbered(cpus, "cpu")
        .iter()
        .filter_map(|cpu| {
            let topology = cpu.join("topology");
            let package = read_number(&topology.join("physical_package_id"))?;
            Some((package, read_number(&topology.join("core_id"))?))
        })
        .collect();
    Some(cores.len()).filter(|&count| count > 0)
}

fn caches(folder: &Path) -> Caches {
    let mut caches = Caches::default();
    for index in numbered(folder, "index") {
        let kind = read(&index.join("type"));
        let bytes = read(&index.join("size")).as_deref().and_then(cache_size);
        let (Some(bytes), Some("Data" | "Unified")) = (bytes, kind.as_deref()) else { continue };
        let shared_by = read(&index.join("shared_cpu_list")).as_deref().and_then(list_len);
        let cache = Some(Cache { bytes, shared_by });
        match read_number(&index.join("level")) {
            Some(1) => caches.l1d = cache,
            Some(2) => caches.l2 = cache,
            Some(3) => caches.l3 = cache,
            _ => {}
        }
    }
    caches
}

/// `48K` and the like, in bytes.
fn cache_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit).filter(|&bytes| bytes > 0)
}

/// How many numbers a list such as `0-3,8` holds.
fn list_len(list: &str) -> Option<usize> {
    list.split(',').try_fold(0usize, |count, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        count.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(list_len("0"), Some(1));
        assert_eq!(list_len("0-1"), Some(2));
        assert_eq!(list_len("0-3,8,10-11"), Some(7));
        assert_eq!(list_len("3-1"), None);
        assert_eq!(list_len(""), None);
    }

    #[test]
    fn sizes() {
        assert_eq!(cache_size("48K"), Some(48 << 10));
        assert_eq!(cache_size("2M"), Some(2 << 20));
        assert_eq!(cache_size("512"), Some(512));
        assert_eq!(cache_size("0K"), None);
        assert_eq!(cache_size("48Q"), None);
    }

    #[test]
    fn a_linux_tree() {
        let root = std::env::temp_dir().join(format!("fuselane-machine-{}", std::process::id()));
        let files = [
            ("proc/cpuinfo", "processor\t: 0\nmodel name\t: A Processor @ 1 GHz\n"),
            ("proc/meminfo", "MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n"),
            ("sys/fs/cgroup/memory.max", "700000\n"),
            ("sys/fs/cgroup/memory.current", "200000\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("sys/devices/system/cpu/cpu0/topology/physical_package_id", "0\n"),
            ("sys/devices/system/cpu/cpu0/topology/core_id", "0\n"),
            ("sys/devices/system/cpu/cpu1/topology/physical_package_id", "0\n"),
            ("sys/devices/system/cpu/cpu1/topology/core_id", "0\n"),
            ("sys/devices/system/cpu/cpufreq/nothing", "0\n"),
            ("sys/devices/system/cpu/cpu0/cache/index0/level", "1\n"),
            ("sys/devices/system/cpu/cpu0/cache/index0/type", "Instruction\n"),
            ("sys/devices/system/cpu/cpu0/cache/index0/size", "32K\n"),
            ("sys/devices/system/cpu/cpu0/cache/index1/level", "1\n"),
            ("sys/devices/system/cpu/cpu0/cache/index1/type", "Data\n"),
            ("sys/devices/system/cpu/cpu0/cache/index1/size", "48K\n"),
            ("sys/devices/system/cpu/cpu0/cache/index1/shared_cpu_list", "0-1\n"),
            ("sys/devices/system/cpu/cpu0/cache/index2/level", "2\n"),
            ("sys/devices/system/cpu/cpu0/cache/index2/type", "Unified\n"),
            ("sys/devices/system/cpu/cpu0/cache/index2/size", "1280K\n"),
        ];
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let machine = Machine::read_from(&root);
        fs::remove_dir_all(&root).unwrap();
        let l2 = Cache { bytes: 1280 << 10, shared_by: None };
        assert_eq!(
            machine,
            Machine {
                cpu: Some("A Processor @ 1 GHz".to_owned()),
                physical_cores: Some(1),
                logical_cpus: None,
                caches: Caches {
                    l1d: Some(Cache { bytes: 48 << 10, shared_by: Some(2) }),
                    l2: Some(l2),
                    l3: None,
                },
                memory_bytes: Some(2048 << 10),
                available_memory_bytes: Some(500_000),
                transparent_huge_pages: Some("madvise".to_owned()),
            }
        );
        assert_eq!(machine.caches.last_level(), Some(l2));
    }

    #[test]
    fn an_empty_tree_is_unknown() {
        let machine = Machine::read_from(Path::new("/no such folder"));
        assert_eq!(machine.cpu, None);
        assert_eq!(machine.caches, Caches::default());
        assert_eq!(machine.available_memory_bytes, None);
    }
}
