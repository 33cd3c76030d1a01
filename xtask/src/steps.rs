//! What each command runs, as a list, and the loop that runs it.
//!
//! Nearly everything that `cargo xtask test` runs comes from one `release` build with all features:
//! the kernels take a minute to compile. Only the tests that call operators with sizes and strides of
//! all kinds run again in the `test` profile, which is optimised too but checks arithmetic for
//! overflow.
//!
//! Some steps install what tests need and a machine may lack: a browser for the report's tests, the
//! Python libraries that the benchmarks compare with, and what the tests of the Python package need
//! beside these. They do nothing where it is there.
//!
//! The GPU crate has steps of its own, since the libraries that it builds on take minutes: no other
//! step compiles it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::folders::{built, root};
use crate::{gpu, python};

/// What a step calls.
#[derive(Debug)]
enum Program {
    Cargo,
    /// Cargo for the GPU crate, in a folder of its own, with NVRTC at hand or not.
    GpuCargo {
        nvrtc: bool,
    },
    /// One that an earlier step built, relative to the folder of the release build.
    Built(PathBuf),
    /// The Python that `fuselane setup-peers` has set up.
    PeersPython,
    /// The Python that the tests of the Python package run in, with the wheel that was built.
    TestsPython,
    /// A shell command, unless this program is there already.
    ShellUnless(&'static str),
    /// Something that is done in here.
    Here(fn() -> Result<(), String>),
}

/// One call of a program, or of a function.
#[derive(Debug)]
pub(crate) struct Step {
    name: String,
    program: Program,
    arguments: Vec<String>,
    environment: Option<(&'static str, &'static str)>,
}

impl Step {
    /// `arguments` are split at white space.
    fn new(name: &str, arguments: &str) -> Self {
        Self {
            name: name.to_owned(),
            program: Program::Cargo,
            arguments: arguments.split_whitespace().map(str::to_owned).collect(),
            environment: None,
        }
    }

    /// A call of cargo for the GPU crate.
    fn gpu(name: &str, arguments: &str) -> Self {
        Self { program: Program::GpuCargo { nvrtc: false }, ..Self::new(name, arguments) }
    }

    /// A program of the release build.
    fn built(name: &str, program: &str, arguments: &str) -> Self {
        let program = format!("{program}{}", std::env::consts::EXE_SUFFIX);
        Self { program: Program::Built(PathBuf::from(program)), ..Self::new(name, arguments) }
    }

    /// A function of ours; `line` says what it does.
    fn here(name: &str, function: fn() -> Result<(), String>, line: &str) -> Self {
        Self { program: Program::Here(function), ..Self::new(name, line) }
    }

    /// A call of Python that imports the package from the wheel.
    fn with_package(name: &str, arguments: &str) -> Self {
        Self { program: Program::TestsPython, ..Self::new(name, arguments) }
    }

    /// The command as one would type it.
    fn line(&self) -> String {
        let variable = self.environment.map(|(k, v)| format!("{k}=\"{v}\" ")).unwrap_or_default();
        let program = match &self.program {
            Program::Cargo | Program::GpuCargo { .. } => "cargo".to_owned(),
            Program::Built(path) => Path::new("target/release").join(path).display().to_string(),
            Program::PeersPython | Program::TestsPython => "python".to_owned(),
            Program::ShellUnless(_) => "sh".to_owned(),
            Program::Here(_) => String::new(),
        };
        format!("{variable}{program} {}", self.arguments.join(" ")).trim().to_owned()
    }

    /// Does it, and tells whether it passed.
    fn run(&self) -> Result<bool, String> {
        let cargo =
            || Command::new(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
        let mut command = match &self.program {
            Program::Cargo => cargo(),
            Program::GpuCargo { nvrtc } => {
                let mut cargo = cargo();
                cargo.envs(gpu::environment(*nvrtc)?);
                cargo
            }
            Program::Built(path) => Command::new(built(path)),
            Program::PeersPython => Command::new(python::peers_python()?),
            Program::TestsPython => python::tests_python()?,
            Program::ShellUnless(there) if is_on_path(there) => return Ok(true),
            Program::ShellUnless(_) => Command::new("sh"),
            Program::Here(function) => return function().map(|()| true),
        };
        command.args(&self.arguments).envs(self.environment).current_dir(root());
        match command.status() {
            Ok(status) => Ok(status.success()),
            Err(error) => Err(format!("cannot start it: {error}")),
        }
    }
}

fn is_on_path(program: &str) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(program).is_file())
}

/// Debian's and Ubuntu's way; elsewhere the test of the report says what it needs.
const INSTALL_BROWSER: &str = "\
    if command -v apt-get >/dev/null && [ \"$(id -u)\" = 0 ]; then \
    apt-get update -qq && apt-get install -y -qq chromium chromium-driver; \
    else echo 'not installed: Chromium with chromedriver, which the test of the report needs'; fi";

/// The steps of `cargo xtask test`.
pub(crate) fn test(large: bool) -> std::io::Result<Vec<Step>> {
    let examples = names(&root().join("crates/fuselane/examples"))?;
    Ok(test_steps(&examples, large))
}

/// The steps of `cargo xtask wheel`.
pub(crate) fn wheel() -> Vec<Step> {
    vec![Step::here("wheel", python::build_wheel, "maturin build --release")]
}

/// The steps of `cargo xtask ci`.
pub(crate) fn ci() -> std::io::Result<Vec<Step>> {
    let mut steps = vec![
        Step::new("formatting", "fmt --all --check"),
        Step::new(
            "clippy",
            "clippy --workspace --exclude fuselane-gpu --all-targets --features fuselane/ndarray -- -D warnings",
        ),
        Step {
            environment: Some(("RUSTDOCFLAGS", "-D warnings")),
            ..Step::new(
                "documentation",
                "doc --workspace --exclude fuselane-gpu --no-deps --features fuselane/ndarray",
            )
        },
    ];
    steps.extend(test(false)?);
    steps.extend(test_gpu(true, true)?);
    Ok(steps)
}

/// The GPU crate and the program with it. All steps name both, so that the libraries are compiled
/// once: their features depend on who asks for them.
const GPU: &str = "--release --package fuselane-gpu --package fuselane-bench \
    --features fuselane-bench/wgpu,fuselane-bench/gpu-sources";

/// The steps of `cargo xtask test --gpu` and of `--cuda-compile`.
pub(crate) fn test_gpu(run: bool, compile: bool) -> std::io::Result<Vec<Step>> {
    let mut steps = Vec::new();
    if run {
        let files = names(&root().join("crates/fuselane-gpu/tests"))?;
        let files = files.iter().filter(|&name| name != CUDA);
        let files: String = files.map(|name| format!(" --test {name}")).collect();
        steps.push(Step::here(
            "Vulkan driver",
            gpu::install_driver,
            "apt-get install mesa-vulkan-drivers libvulkan1",
        ));
        steps.push(Step::gpu("GPU clippy", &format!("clippy {GPU} --all-targets -- -D warnings")));
        steps.push(Step {
            environment: Some(("RUSTDOCFLAGS", "-D warnings")),
            ..Step::gpu("GPU documentation", &format!("doc {GPU} --no-deps"))
        });
        steps.push(Step::gpu("GPU tests", &format!("test {GPU} --no-fail-fast --lib{files}")));
        steps.push(Step::gpu("GPU examples", &format!("test {GPU} --doc")));
        // One at a time: memory is counted for the whole device.
        let program = format!("test {GPU} --no-fail-fast --bin fuselane --test program");
        steps.push(Step::gpu("GPU benchmarks", &format!("{program} -- gpu --test-threads=1")));
    }
    if compile {
        steps.push(Step::here(
            "NVRTC",
            gpu::install_nvrtc,
            "pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12",
        ));
        steps.push(Step {
            program: Program::GpuCargo { nvrtc: true },
            ..Step::new("CUDA kernels", &format!("test {GPU} --test {CUDA} -- --nocapture"))
        });
        let program = format!("test {GPU} --test program -- kernels");
        steps.push(Step::gpu("fuselane kernels", &program));
    }
    Ok(steps)
}

/// The test that needs NVIDIA's compiler and no GPU.
const CUDA: &str = "cuda";

fn test_steps(examples: &[String], large: bool) -> Vec<Step> {
    // The feature `candle` is left out: it would double the build.
    let mut steps = vec![
        Step {
            program: Program::ShellUnless("chromedriver"),
            arguments: vec!["-c".to_owned(), INSTALL_BROWSER.to_owned()],
            ..Step::new("browser", "")
        },
        Step::new(
            "Rust tests", // which builds the program and the examples too
            "test --release --workspace --exclude fuselane-gpu --features fuselane/ndarray --no-fail-fast",
        ),
    ];
    if has_avx512() {
        // Most tests run on the best instruction set only, and that of most users is AVX2.
        steps.push(Step {
            environment: Some(("FUSELANE_ISA", "avx2")),
            ..Step::new(
                "AVX2 tests",
                "test --release --workspace --exclude fuselane-gpu --features fuselane/ndarray --no-fail-fast \
                 --lib --test corners --test facts --test properties --test allocation",
            )
        });
    }
    steps.push(Step::new(
        "overflow checks",
        "test --package fuselane --all-features --no-fail-fast \
         --test corners --test errors --test facts --test properties",
    ));
    steps.push(Step::built("Python libraries", "fuselane", "setup-peers"));
    steps.push(Step {
        program: Program::PeersPython,
        ..Step::new("Python tests", "-E -s crates/fuselane-bench/python/test_worker.py")
    });
    steps.push(Step::new(
        "tests with peers",
        "test --release --package fuselane-bench --features fuselane/ndarray --test peers -- --ignored",
    ));
    steps.extend(python_package_steps());
    for example in examples {
        steps.push(Step::built(&format!("example {example}"), &format!("examples/{example}"), ""));
    }
    steps.push(Step::built("fuselane check", "fuselane", "check"));
    if large {
        // One at a time, since each fills the memory. `--tests` leaves out documentation
        // examples, where `ignored` has another meaning.
        steps.push(Step::new(
            "large tests",
            "test --release --package fuselane --all-features --tests -- --ignored --test-threads=1",
        ));
    }
    steps
}

/// Whether the library would choose AVX-512 here.
fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512vl");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// The Python package, as its users get it: from the wheel.
fn python_package_steps() -> Vec<Step> {
    let mut steps = vec![Step::here(
        "Python environment",
        python::set_up_tests,
        "pip install -r crates/fuselane-python/tests/requirements.txt",
    )];
    steps.extend(wheel());
    steps.push(Step::here("Python package", python::install_wheel, "pip install target/wheels/*"));
    steps.push(Step::with_package(
        "Python package tests",
        "-m pytest -p no:cacheprovider crates/fuselane-python/tests",
    ));
    steps.push(Step::with_package(
        "Python documentation",
        "-m pytest -p no:cacheprovider --doctest-modules --pyargs fuselane",
    ));
    // Examples in Python go here, as `Step::with_package("example name", "path/of/name.py")`.
    steps
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

/// Runs all steps in the workspace's root, prints a summary, and tells whether all passed.
pub(crate) fn run(steps: &[Step]) -> bool {
    let mut results = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        eprintln!("\n==> [{}/{}] {}: {}", index + 1, steps.len(), step.name, step.line());
        let start = Instant::now();
        let passed = step.run().unwrap_or_else(|error| {
            eprintln!("xtask: {error}");
            false
        });
        results.push((step.name.as_str(), start.elapsed(), passed));
    }
    eprintln!("\n{}", summary(&results));
    results.iter().all(|&(_, _, passed)| passed)
}

/// One line per step, and the total.
fn summary(results: &[(&str, Duration, bool)]) -> String {
    let width = results.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0).max(5);
    let line = |name: &str, time: Duration, end: &str| {
        format!("{name:width$}  {:7.1} s  {end}\n", time.as_secs_f64())
    };
    let mut text = String::new();
    for &(name, time, passed) in results {
        text += &line(name, time, if passed { "ok" } else { "FAILED" });
    }
    let failed = results.iter().filter(|&&(_, _, passed)| !passed).count();
    let verdict = if failed == 0 {
        "all passed".to_owned()
    } else {
        format!("{failed} of {} FAILED", results.len())
    };
    text += &line("total", results.iter().map(|&(_, time, _)| time).sum(), &verdict);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_is_run() {
        let steps = test_steps(&["block".to_owned(), "pool".to_owned()], false);
        let lines: Vec<String> = steps.iter().map(Step::line).collect();
        assert!(lines.contains(&"target/release/examples/block".to_owned()));
        assert!(lines.contains(&"target/release/examples/pool".to_owned()));
        assert!(!steps.iter().any(|step| step.name == "large tests"));
    }

    #[test]
    fn large_adds_the_ignored_tests() {
        let steps = test_steps(&[], true);
        assert!(steps.last().unwrap().line().contains("--ignored"));
        assert_eq!(steps.len(), test_steps(&[], false).len() + 1);
    }

    #[test]
    fn ci_denies_warnings_and_ends_with_the_tests() {
        let (ci, mut test) = (ci().unwrap(), test(false).unwrap());
        test.extend(test_gpu(true, true).unwrap());
        let lines = |steps: &[Step]| steps.iter().map(Step::line).collect::<Vec<_>>();
        assert!(lines(&ci).ends_with(&lines(&test)));
        assert!(lines(&ci)[2].starts_with("RUSTDOCFLAGS=\"-D warnings\" cargo doc"));
    }

    #[test]
    fn the_wheel_is_built_and_installed_before_it_is_tested() {
        let steps = test_steps(&[], false);
        let place = |name: &str| steps.iter().position(|step| step.name == name).unwrap();
        let order = [
            "Python libraries", // which the environment sees
            "Python environment",
            "wheel",
            "Python package",
            "Python package tests",
            "Python documentation",
        ];
        assert!(order.map(place).is_sorted());
        let line = steps[place("Python package tests")].line();
        assert!(line.starts_with("python -m pytest "), "{line}");
    }

    #[test]
    fn only_gpu_steps_compile_the_gpu_crate() {
        for step in test_steps(&[], true).iter().chain(&ci().unwrap()) {
            let line = step.line();
            match step.program {
                Program::GpuCargo { .. } => assert!(line.contains("--package fuselane-"), "{line}"),
                _ if line.contains("--workspace") => {
                    assert!(line.contains("--exclude fuselane-gpu "), "{line}");
                }
                _ => assert!(!line.contains("fuselane-gpu"), "{line}"),
            }
        }
    }

    #[test]
    fn a_step_in_here_gives_its_fault() {
        let fails = || Err("no wheel".to_owned());
        assert_eq!(Step::here("a", fails, "").run(), Err("no wheel".to_owned()));
        assert!(!run(&[Step::here("a", fails, ""), Step::here("b", || Ok(()), "")]));
        assert!(run(&[Step::here("b", || Ok(()), "")]));
        assert_eq!(Step::here("b", || Ok(()), "pip install it").line(), "pip install it");
    }

    #[test]
    fn examples_may_be_missing() {
        assert!(names(&root().join("no such folder")).unwrap().is_empty());
    }

    #[test]
    fn summary_counts_failures() {
        let second = Duration::from_millis(1234);
        assert_eq!(
            summary(&[("tests", second, true), ("check", second, false)]),
            "tests      1.2 s  ok\ncheck      1.2 s  FAILED\ntotal      2.5 s  1 of 2 FAILED\n"
        );
        assert!(summary(&[("tests", second, true)]).ends_with("all passed\n"));
    }
}
