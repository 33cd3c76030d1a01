//! `fuselane info`: what this machine is, what fuselane uses of it, and how fast it copies.

use std::error::Error;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::process::ExitCode;

use fuselane::Isa;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::copy::{self, Bandwidth};
use crate::gpu::{self, Gpu};
use crate::machine::{Cache, Machine};

const MIB: u64 = 1 << 20;
const ROUNDS: u16 = 9;

/// Print the machine's facts and its measured copy bandwidth.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Size of the copied buffer [default: 4 times the last-level cache, at least 256, at most an
    /// eighth of the available memory].
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    copy_size: Option<u32>,
    /// How often each kind of copy is measured.
    #[arg(long, default_value_t = ROUNDS, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

impl Default for Args {
    fn default() -> Self {
        Self { json: false, copy_size: None, rounds: ROUNDS }
    }
}

/// All that the command prints.
#[derive(Debug, Serialize)]
struct Info {
    version: &'static str,
    machine: Machine,
    /// Threads that operators use.
    threads: usize,
    isa: IsaInfo,
    /// The GPU that `--device gpu` would use.
    gpu: Option<Gpu>,
    /// Why there is none.
    #[serde(skip)]
    no_gpu: &'static str,
    copy: Bandwidth,
}

/// The choice of instruction set.
#[derive(Debug, PartialEq, Serialize)]
struct IsaInfo {
    in_use: &'static str,
    available: Vec<&'static str>,
    /// What the environment variable `FUSELANE_ISA` says.
    requested: Option<String>,
    /// Why the request is not followed.
    warning: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let machine = Machine::read();
    let isa = isa_info(std::env::var_os("FUSELANE_ISA").map(|v| v.to_string_lossy().into_owned()));
    if let Some(warning) = &isa.warning {
        eprintln!("fuselane: warning: {warning}");
    }
    let buffer_bytes = args.copy_size.map_or_else(
        || {
            let last_level = machine.caches.last_level().map(|cache| cache.bytes);
            buffer_bytes(last_level, machine.available_memory_bytes)
        },
        |mib| u64::from(mib) * MIB,
    );
    let info = Info {
        version: env!("CARGO_PKG_VERSION"),
        machine,
        threads: rayon::current_num_threads(),
        isa,
        gpu: if cfg!(feature = "gpu") { gpu::find("bench").ok() } else { None },
        no_gpu: match cfg!(feature = "gpu") {
            true => "none found",
            false => "no runtime in this build (--features wgpu has one)",
        },
        copy: measure(buffer_bytes, usize::from(args.rounds))?,
    };
    let text =
        if args.json { serde_json::to_string_pretty(&info)? + "\n" } else { info.to_string() };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn isa_info(requested: Option<String>) -> IsaInfo {
    let in_use = fuselane::isa();
    let warning = requested.as_deref().and_then(|name| match name.parse::<Isa>() {
        Err(_) => Some(format!(
            "FUSELANE_ISA is {name:?}, which is none of {}; using {in_use}",
            Isa::ALL.map(Isa::name).join(", ")
        )),
        Ok(isa) if !isa.is_available() => {
            Some(format!("FUSELANE_ISA is {name}, which this CPU lacks; using {in_use}"))
        }
        Ok(_) => None,
    });
    let available = Isa::available().map(Isa::name).collect();
    IsaInfo { in_use: in_use.name(), available, requested, warning }
}

/// Bytes to copy: well above the last-level cache, and well below the memory there is.
fn buffer_bytes(last_level: Option<u64>, available: Option<u64>) -> u64 {
    let wish = (4 * last_level.unwrap_or(0)).max(256 * MIB);
    wish.min(available.unwrap_or(2048 * MIB) / 8).max(MIB)
}

fn measure(buffer_bytes: u64, rounds: usize) -> Result<Bandwidth, Box<dyn Error>> {
    let steps = copy::copies_per_round() * (rounds + 1);
    // Hidden by itself where stderr is not a terminal.
    let bar = ProgressBar::new(steps as u64)
        .with_style(ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}")?)
        .with_message("measuring copies");
    let bandwidth = copy::measure(usize::try_from(buffer_bytes)?, rounds, || bar.inc(1));
    bar.finish_and_clear();
    bandwidth.map_err(|error| format!("copies were not measured: {error}").into())
}

impl fmt::Display for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = &self.machine;
        let text = |value: Option<&str>| value.unwrap_or("unknown").to_owned();
        let count = |value: Option<usize>| value.map_or("unknown".to_owned(), |n| n.to_string());
        let size = |value: Option<u64>| value.map_or("unknown".to_owned(), human_size);
        let cache = |value: Option<Cache>| match value {
            None => "unknown".to_owned(),
            Some(Cache { bytes, shared_by: None | Some(1) }) => human_size(bytes),
            Some(Cache { bytes, shared_by: Some(n) }) => {
                format!("{} (shared by {n} CPUs)", human_size(bytes))
            }
        };
        let mut line = |name: &str, value: &str| writeln!(f, "{name:<23}{value}");
        line("fuselane", self.version)?;
        line("CPU", &text(machine.cpu.as_deref()))?;
        line("cores", &count(machine.physical_cores))?;
        line("CPUs", &count(machine.logical_cpus))?;
        line("threads used", &self.threads.to_string())?;
        line("L1 data cache", &cache(machine.caches.l1d))?;
        line("L2 cache", &cache(machine.caches.l2))?;
        line("L3 cache", &cache(machine.caches.l3))?;
        let (total, free) = (machine.memory_bytes, machine.available_memory_bytes);
        line("memory", &format!("{} ({} available)", size(total), size(free)))?;
        line("transparent huge pages", &text(machine.transparent_huge_pages.as_deref()))?;
        line("instruction set", self.isa.in_use)?;
        line("instruction sets", &self.isa.available.join(", "))?;
        line("FUSELANE_ISA", self.isa.requested.as_deref().unwrap_or("not set"))?;
        match &self.gpu {
            None => line("GPU", self.no_gpu)?,
            Some(gpu) => {
                let kind = if gpu.software { " (a software device)" } else { "" };
                line("GPU", &format!("{}{kind}, {}", gpu.name, gpu.runtime))?;
                line("GPU memory", &size(gpu.memory_bytes))?;
                line("GPU largest buffer", &human_size(gpu.largest_buffer_bytes))?;
            }
        }

        let copy = &self.copy;
        writeln!(
            f,
            "\ncopy of {}, GB/s read + written, {} rounds",
            human_size(copy.buffer_bytes as u64),
            copy.rounds
        )?;
        writeln!(f, "{:<12}{:>8}{:>9}{:>9}", "", "threads", "best", "median")?;
        for rate in &copy.rates {
            let (kind, threads) = (rate.kind.name(), rate.threads);
            writeln!(f, "{kind:<12}{threads:>8}{:>9.1}{:>9.1}", rate.best_gb_s, rate.median_gb_s)?;
        }
        if !copy::Kind::Streaming.is_available() {
            writeln!(f, "(no streaming copy for this CPU)")?;
        }
        Ok(())
    }
}

/// `48 KiB`, `1.25 MiB`: the largest unit of which there is at least one, at most two decimals.
pub(crate) fn human_size(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..1024 => return format!("{bytes} B"),
        1024..MIB => (1024, "KiB"),
        MIB..0x4000_0000 => (MIB, "MiB"),
        _ => (1 << 30, "GiB"),
    };
    let mut text = String::new();
    let _ = write!(text, "{:.2}", bytes as f64 / unit as f64);
    let short = text.trim_end_matches('0').trim_end_matches('.');
    format!("{short} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        assert_eq!(human_size(512), "512 B");
        assert_eq!(human_size(48 << 10), "48 KiB");
        assert_eq!(human_size(1280 << 10), "1.25 MiB");
        assert_eq!(human_size(100 * MIB), "100 MiB");
        assert_eq!(human_size(24 << 30), "24 GiB");
    }

    #[test]
    fn buffers_exceed_the_cache_and_fit_memory() {
        assert_eq!(buffer_bytes(Some(32 * MIB), Some(65536 * MIB)), 256 * MIB);
        assert_eq!(buffer_bytes(Some(256 * MIB), Some(65536 * MIB)), 1024 * MIB);
        assert_eq!(buffer_bytes(Some(32 * MIB), Some(1024 * MIB)), 128 * MIB);
        assert_eq!(buffer_bytes(None, None), 256 * MIB);
        assert_eq!(buffer_bytes(None, Some(0)), MIB);
    }

    #[test]
    fn isa_requests() {
        let info = isa_info(None);
        assert_eq!(info.in_use, fuselane::isa().name());
        assert!(info.available.contains(&"portable"));
        assert_eq!((info.requested, info.warning), (None, None));
        assert_eq!(isa_info(Some("portable".to_owned())).warning, None);
        let warning = isa_info(Some("sse9".to_owned())).warning.unwrap();
        assert!(
            warning.contains("sse9") && warning.contains("portable, avx2, avx512, avx512_wide"),
            "{warning}"
        );
    }
}
