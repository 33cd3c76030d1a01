//! The memory of this process, as Linux counts it.
//!
//! `VmHWM` is the most that was resident at any time; writing 5 to `/proc/self/clear_refs` starts
//! it anew from what is resident now.

use std::fs;
use std::io;

/// Bytes resident now.
pub(crate) fn resident() -> io::Result<u64> {
    field("VmRSS")
}

/// The most bytes resident at any time since [`reset_peak`].
pub(crate) fn peak() -> io::Result<u64> {
    field("VmHWM")
}

/// Starts the peak anew.
pub(crate) fn reset_peak() -> io::Result<()> {
    fs::write("/proc/self/clear_refs", "5").map_err(unreadable)
}

fn field(name: &str) -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status").map_err(unreadable)?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| unreadable(io::ErrorKind::InvalidData.into()))
}

fn unreadable(error: io::Error) -> io::Error {
    let why = format!("the system does not tell this process's peak memory ({error})");
    io::Error::new(error.kind(), why)
}

/// Asks the C library to give freed memory back to the system.
pub(crate) fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes any number, and only looks at memory that is free.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Other tests run beside this one, so the bounds are wide.
    #[test]
    fn a_peak_is_seen() {
        const BYTES: u64 = 256 << 20;
        if reset_peak().is_err() {
            return; // not allowed here
        }
        let before = resident().unwrap();
        let block = vec![1u8; BYTES as usize];
        std::hint::black_box(&block);
        drop(block);
        assert!(peak().unwrap() >= before + BYTES / 2);
    }
}
