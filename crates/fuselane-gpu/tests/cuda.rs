//! The kernels in the languages of GPUs, of which none is needed here: every one of them can be
//! written in each language, and NVIDIA's compiler takes them and holds them in registers.
//!
//! The compiler is loaded as `nvrtc::Nvrtc::load` says; `cargo xtask test --cuda-compile` installs
//! it. Without it, and without the variable `FUSELANE_NVRTC`, its test says so and passes.

use std::collections::HashSet;

use fuselane_gpu::sources::{Language, Source, nvrtc, sources};

const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];

/// Kernels that go number by number whatever the sizes: copies that change dtype and strides, and
/// the last steps of sums, over little memory.
const SCALAR: [&str; 7] = [
    "widen",
    "narrow",
    "widen_packed",
    "narrow_packed",
    "sum_rows",
    "softmax_statistics",
    "gather",
];

/// Those that every language has.
const KERNELS: [&str; 19] = [
    "act_backward",
    "act_forward",
    "angle_gradients",
    "column_dots",
    "encode",
    "encode_backward",
    "encode_rows",
    "encode_rows_backward",
    "gather",
    "narrow",
    "normalize_backward",
    "normalize_forward",
    "row_dots",
    "row_statistics",
    "softmax_columns",
    "softmax_rows",
    "softmax_statistics",
    "sum_rows",
    "widen",
];
/// Those of a language without bf16.
const OF_PACKED: [&str; 2] = ["narrow_packed", "widen_packed"];

/// The variable with a text that the names of the kernels to look at contain.
const PART: &str = "FUSELANE_KERNELS";

fn known(language: Language) -> impl Iterator<Item = &'static str> {
    let packed = if language.name() == "wgsl" { &OF_PACKED[..] } else { &[] };
    KERNELS.iter().chain(packed).copied()
}

/// All kernels, or those whose names contain the text in `FUSELANE_KERNELS`.
fn all(language: Language) -> Vec<Source> {
    let part = std::env::var(PART).unwrap_or_default();
    sources(language, &|name| name.contains(&part))
        .unwrap_or_else(|error| panic!("{language}: {error}"))
}

#[test]
fn every_language_has_every_kernel() {
    let kernels = |source: &Source| source.name.split('-').next().unwrap_or("").to_owned();
    for &language in Language::ALL {
        let sources = all(language);
        let mut names = HashSet::new();
        for source in &sources {
            assert!(names.insert(&source.name), "{language}: {} is there twice", source.name);
            assert!(source.text.contains(&source.entry), "{}: no {}", source.name, source.entry);
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            assert!(source.name.chars().all(plain), "{}", source.name);
        }
        let found: HashSet<String> = sources.iter().map(kernels).collect();
        if std::env::var_os(PART).is_none() {
            let missing: Vec<_> = KERNELS.iter().filter(|name| !found.contains(**name)).collect();
            assert!(missing.is_empty(), "{language} has no {missing:?}");
            let unknown: Vec<_> =
                found.iter().filter(|name| !known(language).any(|k| k == *name)).collect();
            assert!(unknown.is_empty(), "{language}: {unknown:?} are not in the list");
        }
        println!("{language}: {} kernels", sources.len());
    }
}

#[test]
fn cuda_takes_every_kernel_and_spills_nothing() {
    let compiler = match nvrtc::Nvrtc::load() {
        Ok(compiler) => compiler,
        Err(fault) if std::env::var_os(nvrtc::VARIABLE).is_none() => {
            println!("not run: {fault}");
            return;
        }
        Err(fault) => panic!("{fault}"),
    };
    let sources = all(Language::Cuda);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let results = compiler.compile_all(&sources, &ARCHITECTURES, threads);
    let mut faults = Vec::new();
    for (source, results) in sources.iter().zip(&results) {
        let scalar = SCALAR.iter().any(|name| source.name.split('-').next() == Some(name));
        for (architecture, result) in ARCHITECTURES.iter().zip(results) {
            let mut fault = |text: String| {
                faults.push(format!("{} for {architecture}: {text}", source.name));
            };
            match result {
                Err(error) => fault(error.to_string()),
                Ok(kernel) => {
                    let spills = kernel.spill_stores + kernel.spill_loads;
                    if spills > 0 || kernel.stack > 0 {
                        fault(format!("{spills} bytes spilled, {} of stack", kernel.stack));
                    }
                    if source.wide && !scalar && kernel.widest_load < 128 {
                        fault(format!("the widest load is of {} bits", kernel.widest_load));
                    }
                }
            }
        }
    }
    let (major, minor) = compiler.version();
    println!("NVRTC {major}.{minor}\n{}", nvrtc::table(&sources, &ARCHITECTURES, &results));
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}
