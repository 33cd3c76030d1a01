//! The facts of a run in words.

use crate::gpu::Clock;
use crate::info::human_size;
use crate::record::Run;

/// The machine and the date in one line.
pub(crate) fn line(run: &Run) -> String {
    let cpu = run.machine.cpu.as_deref().unwrap_or("unknown CPU");
    let threads = match run.threads {
        1 => "1 thread".to_owned(),
        threads => format!("{threads} threads"),
    };
    let day = run.started.split('T').next().unwrap_or_default();
    if let Some(gpu) = &run.gpu {
        return format!("{}; {}, {day}", gpu.words(), gpu.runtime);
    }
    format!("{cpu}, {threads}, {}, {day}", run.isa)
}

/// Names and values, those that are known.
pub(crate) fn list(run: &Run) -> Vec<(&'static str, String)> {
    let machine = &run.machine;
    let cores = match (machine.physical_cores, machine.logical_cpus) {
        (Some(cores), Some(cpus)) => Some(format!("{cores} ({cpus} logical CPUs)")),
        (Some(cores), None) => Some(cores.to_string()),
        (None, Some(cpus)) => Some(format!("{cpus} logical CPUs")),
        (None, None) => None,
    };
    let caches =
        [("L1d", machine.caches.l1d), ("L2", machine.caches.l2), ("L3", machine.caches.l3)];
    let caches: Vec<_> = caches
        .into_iter()
        .filter_map(|(name, cache)| Some(format!("{name} {}", human_size(cache?.bytes))))
        .collect();
    let gpu = run.gpu.as_ref();
    let facts = [
        ("date", Some(run.started.clone())),
        ("commit", Some(run.commit.clone().unwrap_or_else(|| "unknown".to_owned()))),
        ("GPU", gpu.map(|gpu| gpu.words())),
        ("runtime", gpu.map(|gpu| gpu.runtime.clone())),
        (
            "times",
            gpu.map(|gpu| match gpu.clock {
                Clock::Device => "of the device, by its timestamps".to_owned(),
                Clock::Host => "from launch to end, by the host's clock".to_owned(),
            }),
        ),
        ("machine", Some(machine.cpu.clone().unwrap_or_else(|| "unknown CPU".to_owned()))),
        ("cores", cores),
        ("threads", Some(run.threads.to_string())),
        ("instruction set", Some(run.isa.clone())),
        ("caches", Some(caches.join(", "))),
        ("memory", machine.memory_bytes.map(human_size)),
        ("huge pages", machine.transparent_huge_pages.clone()),
        ("system", Some(run.os.clone())),
        ("versions", Some(versions(run))),
        ("command", Some(command(run))),
    ];
    let known = facts.into_iter().filter_map(|(name, fact)| Some((name, fact?)));
    known.filter(|(_, fact)| !fact.is_empty()).collect()
}

/// "fuselane 0.1.0, torch 2.15.0 (mkl 2026)".
fn versions(run: &Run) -> String {
    let mut parts = vec![format!("fuselane {}", run.fuselane)];
    for (provider, versions) in &run.versions {
        let own = versions.get(provider);
        let rest = versions.iter().filter(|(name, version)| {
            *name != provider && !(*name == "fuselane" && **version == run.fuselane)
        });
        let rest: Vec<_> = rest.map(|(name, version)| format!("{name} {version}")).collect();
        let part = match (own, rest.is_empty()) {
            (Some(own), true) => format!("{provider} {own}"),
            (Some(own), false) => format!("{provider} {own} ({})", rest.join(", ")),
            (None, false) => format!("{provider} ({})", rest.join(", ")),
            (None, true) => continue,
        };
        if !parts.contains(&part) {
            parts.push(part);
        }
    }
    parts.join(", ")
}

/// The command that measured. A report may be published, so it names no folder of the machine.
pub(crate) fn command(run: &Run) -> String {
    let mut command = "fuselane bench".to_owned();
    for argument in &run.arguments {
        let (option, value) = match argument.split_once('=') {
            Some((option, value)) if option.starts_with('-') => (format!("{option}="), value),
            _ => (String::new(), argument.as_str()),
        };
        let path = std::path::Path::new(value);
        let value = match path.file_name() {
            Some(name) if path.is_absolute() => name.to_string_lossy().into_owned(),
            _ => value.to_owned(),
        };
        let plain = value.chars().all(|c| c.is_ascii_alphanumeric() || "-_.,:/=+".contains(c));
        let value = if plain && !value.is_empty() {
            value
        } else {
            format!("'{}'", value.replace('\'', r"'\''"))
        };
        command.push(' ');
        command.push_str(&option);
        command.push_str(&value);
    }
    command
}
