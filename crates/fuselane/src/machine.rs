//! Facts about the machine that decide how kernels store and how much the pool keeps.

use std::sync::OnceLock;

/// The size of the last-level cache, as the system tells it; 32 MiB where it does not.
pub fn last_level_cache_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| caches().map(|(_, bytes)| bytes).max().unwrap_or(32 << 20))
}

/// Where the operands of a call together take this many bytes, or more, they are not expected to stay in
/// the caches, and its outputs are stored past them.
///
/// That is the size of the last-level cache, but at most 16 MiB for each CPU that the first thread to ask
/// may run on: a virtual machine may see a cache of hundreds of MiB, which it shares with neighbours that
/// it does not see. (On two CPUs of an Emerald Rapids that sees 260 MiB, a norm with residual, of 3 x 16
/// MiB, takes 1.27 ms with plain stores and 0.77 past the caches.)
pub fn cached_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        last_level_cache_bytes().min(cpus.saturating_mul(16 << 20))
    })
}

/// The size of a core's second-level cache, as the system tells it; 1 MiB where it does not.
pub(crate) fn second_level_cache_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| cache_of_level(2).unwrap_or(1 << 20))
}

/// The size of a core's first-level data cache, as the system tells it; 32 KiB where it does not.
///
/// Tables and scratch that are read again and again are to stay within it.
pub(crate) fn first_level_cache_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| cache_of_level(1).unwrap_or(32 << 10))
}

fn cache_of_level(level: usize) -> Option<usize> {
    caches().find(|cache| cache.0 == level).map(|cache| cache.1)
}

/// The level and the size of each cache for data of the first core.
fn caches() -> impl Iterator<Item = (usize, usize)> {
    (0..8).filter_map(|i| {
        let of = |what: &str| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{i}/{what}");
            std::fs::read_to_string(path).ok().filter(|text| text.trim() != "Instruction")
        };
        of("type")?;
        Some((of("level")?.trim().parse().ok()?, parse_size(of("size")?.trim())?))
    })
}

/// The memory that this process may use, in bytes: the machine's, or the limit of its container if that
/// is smaller; 4 GiB where the system does not tell.
pub fn memory_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let line = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<usize>().ok());
        let all = kib.map_or(4 << 30, |kib| kib.saturating_mul(1024));
        let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        let limits = limits.iter().filter_map(|path| std::fs::read_to_string(path).ok());
        limits.filter_map(|text| text.trim().parse().ok()).fold(all, usize::min)
    })
}

/// The system writes sizes of caches as in "48K".
fn parse_size(text: &str) -> Option<usize> {
    text.strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    #[test]
    fn cache_sizes_are_read() {
        assert_eq!(super::parse_size("49152K"), Some(48 << 20));
        assert_eq!(super::parse_size("what"), None);
        assert!(super::last_level_cache_bytes() >= super::second_level_cache_bytes());
        assert!(super::second_level_cache_bytes() >= 1 << 16);
        assert!(super::second_level_cache_bytes() >= super::first_level_cache_bytes());
        assert!((1 << 12..=1 << 20).contains(&super::first_level_cache_bytes()));
        assert!(super::memory_bytes() >= 1 << 26);
        assert!(super::cached_bytes() <= super::last_level_cache_bytes());
        assert!(super::cached_bytes() >= super::last_level_cache_bytes().min(16 << 20));
    }
}
