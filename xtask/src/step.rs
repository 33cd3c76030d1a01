//! One step of a command, and the loop that runs a list of them.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::folders::{built, root, target};
use crate::install::Tool;
use crate::{gpu, python};

/// What a step calls.
#[derive(Debug)]
pub(crate) enum Program {
    Cargo,
    /// Cargo for the GPU crate, in a folder of its own, with NVRTC at hand or not.
    GpuCargo {
        nvrtc: bool,
    },
    /// This program.
    Xtask,
    /// One that an earlier step built, relative to the folder of the release build.
    Built(PathBuf),
    /// The Python that `fuselane setup-peers` has set up.
    PeersPython,
    /// The Python that the tests of the Python package run in, with the wheel that was built.
    TestsPython,
    /// Something that is done in here.
    Here(fn() -> Result<(), String>),
}

/// One call of a program, or of a function.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) program: Program,
    arguments: Vec<String>,
    environment: Option<(&'static str, &'static str)>,
    /// Whether the next steps begin before this one has ended. What it prints comes when it is waited for.
    beside: bool,
    /// The step of the former kind that has to have ended before this one.
    pub(crate) needs: Option<&'static str>,
}

impl Step {
    /// A call of cargo. `arguments` are split at white space.
    pub(crate) fn new(name: &str, arguments: &str) -> Self {
        Self {
            name: name.to_owned(),
            program: Program::Cargo,
            arguments: arguments.split_whitespace().map(str::to_owned).collect(),
            environment: None,
            beside: false,
            needs: None,
        }
    }

    /// A call of cargo for the GPU crate.
    pub(crate) fn gpu(name: &str, arguments: &str) -> Self {
        Self { program: Program::GpuCargo { nvrtc: false }, ..Self::new(name, arguments) }
    }

    /// One for tests that run NVRTC.
    pub(crate) fn nvrtc(name: &str, arguments: &str) -> Self {
        Self { program: Program::GpuCargo { nvrtc: true }, ..Self::new(name, arguments) }
    }

    /// A program of the release build.
    pub(crate) fn built(name: &str, program: &str, arguments: &str) -> Self {
        let program = format!("{program}{}", std::env::consts::EXE_SUFFIX);
        Self { program: Program::Built(PathBuf::from(program)), ..Self::new(name, arguments) }
    }

    /// A function of ours; `line` says what it does.
    pub(crate) fn here(name: &str, function: fn() -> Result<(), String>, line: &str) -> Self {
        Self { program: Program::Here(function), ..Self::new(name, line) }
    }

    /// A call of the Python that has the libraries to compare with.
    pub(crate) fn with_peers(name: &str, arguments: &str) -> Self {
        Self { program: Program::PeersPython, ..Self::new(name, arguments) }
    }

    /// A call of Python that imports the package from the wheel.
    pub(crate) fn with_package(name: &str, arguments: &str) -> Self {
        Self { program: Program::TestsPython, ..Self::new(name, arguments) }
    }

    /// Installs these tools, beside the steps up to the first that needs this one.
    pub(crate) fn install(name: &str, tools: &[Tool]) -> Self {
        let names: String = tools.iter().map(|tool| format!(" {}", tool.name())).collect();
        let step = Self::new(name, &format!("install{names}"));
        Self { program: Program::Xtask, beside: true, ..step }
    }

    /// The same with a variable of the environment.
    pub(crate) fn with(self, variable: &'static str, value: &'static str) -> Self {
        Self { environment: Some((variable, value)), ..self }
    }

    /// The same, after the step of this name has installed its tools.
    pub(crate) fn after(self, install: &'static str) -> Self {
        Self { needs: Some(install), ..self }
    }

    /// The command as one would type it.
    pub(crate) fn line(&self) -> String {
        let variable = self.environment.map(|(k, v)| format!("{k}=\"{v}\" ")).unwrap_or_default();
        let program = match &self.program {
            Program::Cargo | Program::GpuCargo { .. } => "cargo".to_owned(),
            Program::Xtask => "cargo xtask".to_owned(),
            Program::Built(path) => Path::new("target/release").join(path).display().to_string(),
            Program::PeersPython | Program::TestsPython => "python".to_owned(),
            Program::Here(_) => String::new(),
        };
        format!("{variable}{program} {}", self.arguments.join(" ")).trim().to_owned()
    }

    /// Does it, and tells whether it passed.
    fn run(&self) -> Result<bool, String> {
        if let Program::Here(function) = self.program {
            return function().map(|()| true);
        }
        match self.command()?.status() {
            Ok(status) => Ok(status.success()),
            Err(error) => Err(format!("cannot start it: {error}")),
        }
    }

    fn command(&self) -> Result<Command, String> {
        let cargo =
            || Command::new(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
        let mut command = match &self.program {
            Program::Cargo => cargo(),
            Program::GpuCargo { nvrtc } => {
                let mut cargo = cargo();
                cargo.envs(gpu::environment(*nvrtc)?);
                cargo
            }
            Program::Xtask => {
                let this = std::env::current_exe();
                Command::new(this.map_err(|error| format!("where this program is: {error}"))?)
            }
            Program::Built(path) => Command::new(built(path)),
            Program::PeersPython => Command::new(python::peers_python()?),
            Program::TestsPython => python::tests_python()?,
            Program::Here(_) => return Err("it is no command".to_owned()),
        };
        command.args(&self.arguments).envs(self.environment).current_dir(root());
        Ok(command)
    }

    /// Begins it beside others.
    fn begin(&self) -> Result<JoinHandle<(bool, Duration)>, String> {
        let (start, path) = (Instant::now(), self.log());
        let fault = |error| format!("{}: {error}", path.display());
        fs::create_dir_all(target()).map_err(fault)?;
        let log = File::create(&path).map_err(fault)?;
        let mut command = self.command()?;
        command.stdin(Stdio::null()).stdout(log.try_clone().map_err(fault)?).stderr(log);
        let mut child = command.spawn().map_err(|error| format!("cannot start it: {error}"))?;
        Ok(thread::spawn(move || {
            (child.wait().is_ok_and(|status| status.success()), start.elapsed())
        }))
    }

    /// What it prints while it runs beside others.
    fn log(&self) -> PathBuf {
        target().join(format!("xtask-{}.log", self.name.replace(' ', "-")))
    }
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Outcome<'a> {
    name: &'a str,
    time: Duration,
    passed: bool,
}

/// Runs all steps in the workspace's root, prints a summary, and tells whether all passed.
pub(crate) fn run(steps: &[Step]) -> bool {
    let begin = Instant::now();
    let mut outcomes = Vec::new();
    let mut beside = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        if let Some(place) =
            beside.iter().position(|(s, _): &(&Step, _)| step.needs == Some(&s.name))
        {
            let (step, running) = beside.swap_remove(place);
            outcomes.push(wait(step, running));
        }
        eprintln!("\n==> [{}/{}] {}: {}", index + 1, steps.len(), step.name, step.line());
        let start = Instant::now();
        let passed = if step.beside {
            step.begin().map(|running| {
                eprintln!("... beside the next steps");
                beside.push((step, running));
                None
            })
        } else {
            step.run().map(Some)
        };
        let passed = passed.unwrap_or_else(|error| {
            eprintln!("xtask: {error}");
            Some(false)
        });
        outcomes.extend(passed.map(|passed| Outcome {
            name: &step.name,
            time: start.elapsed(),
            passed,
        }));
    }
    outcomes.extend(beside.into_iter().map(|(step, running)| wait(step, running)));
    eprintln!("\n{}", summary(&outcomes, begin.elapsed()));
    outcomes.iter().all(|outcome| outcome.passed)
}

/// Waits for a step that runs beside others, and shows what it has printed.
fn wait(step: &Step, running: JoinHandle<(bool, Duration)>) -> Outcome<'_> {
    eprintln!("\n==> {}, which ran beside others:", step.name);
    let (passed, time) = running.join().unwrap_or_default();
    eprint!("{}", String::from_utf8_lossy(&fs::read(step.log()).unwrap_or_default()));
    Outcome { name: &step.name, time, passed }
}

/// One line per step, and the total.
fn summary(outcomes: &[Outcome<'_>], total: Duration) -> String {
    let width = outcomes.iter().map(|o| o.name.chars().count()).max().unwrap_or(0).max(5);
    let line = |name: &str, time: Duration, end: &str| {
        format!("{name:width$}  {:7.1} s  {end}\n", time.as_secs_f64())
    };
    let mut text = String::new();
    for outcome in outcomes {
        text += &line(outcome.name, outcome.time, if outcome.passed { "ok" } else { "FAILED" });
    }
    let failed = outcomes.iter().filter(|outcome| !outcome.passed).count();
    let verdict = if failed == 0 {
        "all passed".to_owned()
    } else {
        format!("{failed} of {} FAILED", outcomes.len())
    };
    text += &line("total", total, &verdict);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_in_here_gives_its_fault() {
        let fails = || Err("no wheel".to_owned());
        assert_eq!(Step::here("a", fails, "").run(), Err("no wheel".to_owned()));
        assert!(!run(&[Step::here("a", fails, ""), Step::here("b", || Ok(()), "")]));
        assert!(run(&[Step::here("b", || Ok(()), "")]));
        assert_eq!(Step::here("b", || Ok(()), "pip install it").line(), "pip install it");
    }

    #[test]
    fn a_step_beside_others_is_waited_for() {
        let beside = |name: &str, line: &str| Step { beside: true, ..Step::new(name, line) };
        let (passes, fails) = (beside("test passes", "--version"), beside("test fails", "no-such"));
        let needs = |name| Step::here("", || Ok(()), "").after(name);
        let running = passes.begin().unwrap();
        assert!(wait(&passes, running).passed);
        assert!(fs::read_to_string(passes.log()).unwrap().starts_with("cargo "));
        assert!(run(&[passes, needs("test passes"), needs("test passes")]));
        assert!(!run(&[fails, needs("test fails")]));
        // Also where no step needs it.
        assert!(!run(&[beside("test alone", "no-such")]));
        for name in ["passes", "fails", "alone"] {
            let step = beside(&format!("test {name}"), "");
            fs::remove_file(step.log()).unwrap();
        }
    }

    #[test]
    fn summary_counts_failures() {
        let outcome = |name, passed| Outcome { name, time: Duration::from_millis(1234), passed };
        let total = Duration::from_millis(2000);
        assert_eq!(
            summary(&[outcome("tests", true), outcome("check", false)], total),
            "tests      1.2 s  ok\ncheck      1.2 s  FAILED\ntotal      2.0 s  1 of 2 FAILED\n"
        );
        assert!(summary(&[outcome("tests", true)], total).ends_with("all passed\n"));
    }
}
