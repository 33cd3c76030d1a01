//! What each command runs, as a list.
//!
//! The core takes longer to compile than all else, so `cargo xtask test` does it twice: as it is shipped,
//! for all that calls it, and for its unit tests, in the `test` profile, which checks arithmetic for
//! overflow. [`SHARED`] says how all steps get the same first one.
//!
//! The GPU crate has steps of its own, since the libraries that it builds on take minutes: no other
//! step compiles it.
//!
//! What tests need and a machine may lack is installed beside other steps, up to the first that needs it.

use std::path::Path;

use crate::folders::root;
use crate::install::Tool;
use crate::python;
use crate::step::Step;

/// All crates but the GPU's, and the same features of all. A step that needs a part of it names targets, not
/// packages: the features of libraries depend on which packages a command names, and cargo compiles the core
/// anew where those of any library below it differ. (Only the core itself can be left out, which changes
/// none of these.) The feature `candle` is not there: it would double the build.
const SHARED: &str = "--release --workspace --exclude fuselane-gpu --features fuselane/ndarray";

/// The GPU crate and the program with it. All steps name both, for the same reason.
const GPU: &str = "--release --package fuselane-gpu --package fuselane-bench \
    --features fuselane-bench/wgpu,fuselane-bench/gpu-sources";

/// The test that needs NVIDIA's compiler and no GPU.
const CUDA: &str = "cuda";

/// The step that installs what needs no program of ours.
const TOOLS: &str = "tools";

/// The step that installs Python libraries.
const LIBRARIES: &str = "Python libraries";

/// The steps of `cargo xtask test`.
pub(crate) fn test(large: bool) -> std::io::Result<Vec<Step>> {
    let mut steps = vec![Step::install(TOOLS, &[Tool::Browser])];
    steps.extend(test_steps(large)?);
    Ok(steps)
}

/// The steps of `cargo xtask test --gpu` and of `--cuda-compile`.
pub(crate) fn test_gpu(run: bool, compile: bool) -> std::io::Result<Vec<Step>> {
    let tools: Vec<Tool> = [run.then_some(Tool::Driver), compile.then_some(Tool::Nvrtc)]
        .into_iter()
        .flatten()
        .collect();
    let mut steps = vec![Step::install(TOOLS, &tools)];
    steps.extend(gpu_steps(run, compile)?);
    Ok(steps)
}

/// The steps of `cargo xtask wheel`.
pub(crate) fn wheel() -> Vec<Step> {
    vec![Step::here("wheel", python::build_wheel, "maturin build --release")]
}

/// The steps of `cargo xtask ci`.
pub(crate) fn ci() -> std::io::Result<Vec<Step>> {
    let mut steps = vec![
        Step::install(TOOLS, &[Tool::Browser, Tool::Driver, Tool::Nvrtc]),
        Step::new("formatting", "fmt --all --check"),
        Step::new("clippy", &format!("clippy {SHARED} --all-targets -- -D warnings")),
        Step::new("documentation", &format!("doc {SHARED} --no-deps"))
            .with("RUSTDOCFLAGS", "-D warnings"),
    ];
    steps.extend(test_steps(false)?);
    steps.extend(gpu_steps(true, true)?);
    Ok(steps)
}

fn test_steps(large: bool) -> std::io::Result<Vec<Step>> {
    let core = root().join("crates/fuselane");
    let files = names(&core.join("tests"))?;
    let files: String = files.iter().map(|name| format!(" --test {name}")).collect();
    let others = format!("test {SHARED} --exclude fuselane");

    let mut steps = vec![
        Step::new("build", &format!("{others} --no-run")),
        Step::install(LIBRARIES, &[Tool::Libraries]), // by the program that was built
        // This compiles for long, while the former step loads and unpacks.
        Step::new("unit tests", UNIT_TESTS),
    ];
    if has_avx512() {
        // Most tests run on the best instruction set only, and that of most users is AVX2.
        let avx2 = |name, line: &str| Step::new(name, line).with("FUSELANE_ISA", "avx2");
        steps.push(avx2("AVX2 unit tests", UNIT_TESTS));
        steps.push(avx2("AVX2 allocations", &format!("test {SHARED} --test allocation")));
    }
    steps.push(Step::new("core tests", &format!("test {SHARED} --no-fail-fast{files}")));
    steps.push(Step::new("other crates", &format!("{others} --no-fail-fast")).after(TOOLS));
    steps.push(Step::new("documentation tests", &format!("test {SHARED} --doc")));
    steps.push(Step::new("examples", &format!("build {SHARED} --examples")));
    for name in names(&core.join("examples"))? {
        steps.push(Step::built(&format!("example {name}"), &format!("examples/{name}"), ""));
    }
    steps.push(Step::built("fuselane check", "fuselane", "check"));
    steps.extend(wheel());
    steps.push(
        Step::with_peers("Python tests", "-E -s crates/fuselane-bench/python/test_worker.py")
            .after(LIBRARIES),
    );
    steps.push(Step::new("tests with peers", &format!("{others} --test peers -- --ignored")));
    steps.extend(python_package_steps());
    if large {
        // One at a time, since each fills the memory.
        let large = format!("test {SHARED} --test large -- --ignored --test-threads=1");
        steps.push(Step::new("large tests", &large));
    }
    Ok(steps)
}

/// With the integration tests that `calls.rs` of the core names.
const UNIT_TESTS: &str = "test --package fuselane --all-features --no-fail-fast --lib";

/// Whether the library would choose AVX-512 here.
fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512vl");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// The Python package, as its users get it: from the wheel.
fn python_package_steps() -> Vec<Step> {
    vec![
        Step::here("Python package", python::install_wheel, "pip install target/wheels/*"),
        Step::with_package(
            "Python package tests",
            "-m pytest -p no:cacheprovider crates/fuselane-python/tests",
        ),
        Step::with_package(
            "Python documentation",
            "-m pytest -p no:cacheprovider --doctest-modules --pyargs fuselane",
        ),
        // Examples in Python go here, as `Step::with_package("example name", "path/of/name.py")`.
    ]
}

fn gpu_steps(run: bool, compile: bool) -> std::io::Result<Vec<Step>> {
    let mut steps = Vec::new();
    if run {
        let files = names(&root().join("crates/fuselane-gpu/tests"))?;
        let files = files.iter().filter(|&name| name != CUDA);
        let files: String = files.map(|name| format!(" --test {name}")).collect();
        steps.push(Step::gpu("GPU clippy", &format!("clippy {GPU} --all-targets -- -D warnings")));
        // There are no examples. Naming them makes cargo take the features of libraries that tests have, with which
        // clippy has looked at these libraries already.
        let documentation = format!("doc {GPU} --no-deps --lib --examples");
        steps.push(
            Step::gpu("GPU documentation", &documentation).with("RUSTDOCFLAGS", "-D warnings"),
        );
        let tests = format!("test {GPU} --no-fail-fast --lib{files}");
        steps.push(Step::gpu("GPU tests", &tests).after(TOOLS));
        steps.push(Step::gpu("GPU examples", &format!("test {GPU} --doc")));
        // One at a time: memory is counted for the whole device.
        let program = format!("test {GPU} --no-fail-fast --bin fuselane --test program");
        steps.push(Step::gpu("GPU benchmarks", &format!("{program} -- gpu --test-threads=1")));
    }
    if compile {
        let tests = format!("test {GPU} --test {CUDA} -- --nocapture");
        steps.push(Step::nvrtc("CUDA kernels", &tests).after(TOOLS));
        let program = format!("test {GPU} --test program -- kernels");
        steps.push(Step::gpu("fuselane kernels", &program));
    }
    Ok(steps)
}

/// The names of the Rust files in a folder, which need not exist, in order.
fn names(folder: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    if folder.is_dir() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let is_example = path.extension().is_some_and(|extension| extension == "rs");
            if let (true, Some(name)) = (is_example, path.file_stem().and_then(|s| s.to_str())) {
                names.push(name.to_owned());
            }
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::Program;

    #[test]
    fn every_test_and_example_is_run() {
        let lines: Vec<String> = test_steps(false).unwrap().iter().map(Step::line).collect();
        assert!(lines.contains(&"target/release/examples/train_block".to_owned()));
        assert!(lines.iter().any(|line| line.contains(" --test facts --test large ")));
        assert!(!lines.iter().any(|line| line.contains("--test-threads")));
    }

    #[test]
    fn large_adds_the_ignored_tests() {
        let steps = test_steps(true).unwrap();
        assert!(steps.last().unwrap().line().contains("--test large -- --ignored"));
        assert_eq!(steps.len(), test_steps(false).unwrap().len() + 1);
    }

    #[test]
    fn ci_denies_warnings_and_has_all_tests() {
        let lines = |steps: Vec<Step>| steps.iter().map(Step::line).collect::<Vec<_>>();
        let ci = lines(ci().unwrap());
        for part in [test(false).unwrap(), test_gpu(true, true).unwrap()] {
            // But for the tools, which it installs at once.
            assert!(lines(part)[1..].iter().all(|line| ci.contains(line)));
        }
        assert!(ci[2].ends_with(" -- -D warnings"));
        assert!(ci[3].starts_with("RUSTDOCFLAGS=\"-D warnings\" cargo doc"));
    }

    #[test]
    fn tools_are_installed_before_they_are_needed() {
        for steps in [
            test(true).unwrap(),
            test_gpu(true, false).unwrap(),
            test_gpu(false, true).unwrap(),
            ci().unwrap(),
        ] {
            let mut needs = 0;
            for (place, step) in steps.iter().enumerate() {
                let Some(tool) = step.needs else { continue };
                assert!(steps[..place].iter().any(|step| step.name == tool), "{}", step.name);
                needs += 1;
            }
            assert!(needs > 0);
        }
    }

    #[test]
    fn the_wheel_is_built_and_installed_before_it_is_tested() {
        let steps = test_steps(false).unwrap();
        let place = |name: &str| steps.iter().position(|step| step.name == name).unwrap();
        let order = ["wheel", "Python package", "Python package tests", "Python documentation"];
        assert!(order.map(place).is_sorted());
        let line = steps[place("Python package tests")].line();
        assert!(line.starts_with("python -m pytest "), "{line}");
    }

    #[test]
    fn steps_share_their_builds() {
        for step in test_steps(true).unwrap().iter().chain(&ci().unwrap()) {
            let line = step.line();
            match step.program {
                Program::GpuCargo { .. } => assert!(line.contains(GPU), "{line}"),
                Program::Cargo if !line.contains(UNIT_TESTS) && !line.contains("cargo fmt") => {
                    assert!(line.contains(SHARED), "{line}");
                }
                _ => assert!(!line.contains("fuselane-gpu"), "{line}"),
            }
        }
    }

    #[test]
    fn examples_may_be_missing() {
        assert!(names(&root().join("no such folder")).unwrap().is_empty());
    }
}
