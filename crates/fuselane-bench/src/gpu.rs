//! The GPU that `--device gpu` means: what it is, in words and in results. Kernels are built in
//! with a runtime, which is a feature each.

use serde::{Deserialize, Serialize};

/// Where operators run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum On {
    #[default]
    Cpu,
    /// The first GPU that this build's runtime finds.
    Gpu,
}

/// The facts of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gpu {
    /// As its driver has it.
    pub(crate) name: String,
    /// The runtime and its compiler, as in `wgpu<wgsl>`.
    pub(crate) runtime: String,
    /// A program on the CPU that behaves like a GPU.
    pub(crate) software: bool,
    /// How calls are timed.
    pub(crate) clock: Clock,
    /// Its memory, where its runtime tells.
    pub(crate) memory_bytes: Option<u64>,
    /// The largest tensor that it takes.
    pub(crate) largest_buffer_bytes: u64,
}

/// How calls are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Clock {
    /// By the device's own timestamps, from the start of the first kernel to the end of the last.
    Device,
    /// By the host's clock, from the launch until the device is done.
    Host,
}

impl Gpu {
    /// The name, and for a software device what its times are worth.
    pub(crate) fn words(&self) -> String {
        let Self { name, software, .. } = self;
        if *software {
            format!("{name}, a software device: these times are those of a CPU")
        } else {
            name.clone()
        }
    }

    /// Why a row with a tensor of `largest` bytes, of `total` bytes in all, cannot be measured
    /// here.
    pub(crate) fn refuses(&self, largest: u64, total: u64) -> Option<String> {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        if largest > self.largest_buffer_bytes {
            return Some(format!(
                "does not fit the device: a tensor of {:.0} MiB, its largest buffer has {:.0} MiB",
                mib(largest),
                mib(self.largest_buffer_bytes)
            ));
        }
        let memory = self.memory_bytes.filter(|&memory| total > memory)?;
        Some(format!(
            "does not fit the device: needs {:.0} MiB, its memory has {:.0} MiB",
            mib(total),
            mib(memory)
        ))
    }
}

/// The runtimes to choose from, as features.
#[cfg(any(not(feature = "gpu"), test))]
const RUNTIMES: &str = "vulkan, metal, cuda, cuda-cpp or rocm";

/// What to run when this build has no runtime; `command` is `bench` or `check`.
#[cfg(any(not(feature = "gpu"), test))]
fn missing(command: &str) -> String {
    format!(
        "this build has no GPU runtime: run `cargo run --release --bin fuselane --features wgpu -- \
         {command} --device gpu` ({RUNTIMES} in place of wgpu, where that is what the machine has)"
    )
}

/// The device, or one line that says what to do.
#[cfg(not(feature = "gpu"))]
pub(crate) fn find(command: &str) -> Result<Gpu, String> {
    Err(missing(command))
}

/// The device, or one line that says what to do.
#[cfg(feature = "gpu")]
pub(crate) fn find(_command: &str) -> Result<Gpu, String> {
    open().map(|device| facts(&device))
}

#[cfg(feature = "gpu")]
pub(crate) fn open() -> Result<fuselane_gpu::Device, String> {
    fuselane_gpu::Device::open().map_err(|error| error.to_string())
}

#[cfg(feature = "gpu")]
fn facts(device: &fuselane_gpu::Device) -> Gpu {
    let memory = device.client().map(|client| client.properties().memory.clone());
    Gpu {
        name: device.name().to_owned(),
        runtime: device.runtime().to_owned(),
        software: device.is_software(),
        clock: clock(device),
        largest_buffer_bytes: memory.as_ref().map_or(0, |memory| memory.max_page_size),
        memory_bytes: memory.and_then(|memory| memory.max_memory()),
    }
}

#[cfg(feature = "gpu")]
pub(crate) fn clock(device: &fuselane_gpu::Device) -> Clock {
    use cubecl::profile::TimingMethod;
    match device.client().map(|client| client.properties().timing_method) {
        Some(TimingMethod::Device) => Clock::Device,
        Some(TimingMethod::System) | None => Clock::Host,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn some() -> Gpu {
        Gpu {
            name: "A <fast> GPU".to_owned(),
            runtime: "wgpu<wgsl>".to_owned(),
            software: false,
            clock: Clock::Device,
            largest_buffer_bytes: 128 << 20,
            memory_bytes: Some(256 << 20),
        }
    }

    #[test]
    fn a_software_device_says_so() {
        assert_eq!(some().words(), "A <fast> GPU");
        let software = Gpu { software: true, ..some() };
        assert!(software.words().ends_with("a software device: these times are those of a CPU"));
    }

    #[test]
    fn rows_that_do_not_fit() {
        assert_eq!(some().refuses(128 << 20, 256 << 20), None);
        let note = some().refuses((128 << 20) + 1, 1).unwrap();
        assert!(note.contains("largest buffer has 128 MiB"), "{note}");
        let note = some().refuses(1, 300 << 20).unwrap();
        assert!(note.contains("needs 300 MiB, its memory has 256 MiB"), "{note}");
        assert_eq!(Gpu { memory_bytes: None, ..some() }.refuses(1, u64::MAX), None);
    }

    #[test]
    fn a_build_without_a_runtime_names_the_command() {
        let command = "cargo run --release --bin fuselane --features wgpu -- bench --device gpu`";
        assert!(missing("bench").contains(command), "{}", missing("bench"));
    }
}
