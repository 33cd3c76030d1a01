//! The command line.

use crate::install::Tool;

/// What `--help` prints.
pub(crate) const USAGE: &str = "\
Usage: cargo xtask <COMMAND>

Commands:
  test [--large]  Run every test of the workspace: the Rust tests, those in the
                  documentation, the examples, `fuselane check`, and the Python
                  tests, those of the Python package with the wheel of it.
                  Installs what they need where it is missing, see below.
                  --large adds the tests of tensors above 2^31 elements; they
                  need tens of gigabytes of memory.
  test --gpu      Only the GPU crate: clippy, documentation and all of its tests, on
                  the GPU that is there, or else on a program that behaves like
                  one. Builds into the cache folder: minutes, once.
  test --cuda-compile
                  Only the sources of the GPU kernels: written in all languages, and
                  compiled with NVIDIA's NVRTC. Needs no GPU.
  wheel           Build the Python package and print the path of its wheel, in
                  target/wheels. Installs maturin in the target folder.
  ci              What has to pass before a merge: formatting, clippy,
                  documentation, then `test`, `test --gpu` and `test --cuda-compile`.
  install TOOL... Install what is missing of these, as the tests do by themselves:
                  browser (Chromium) and driver (lavapipe, for Vulkan without a
                  GPU), on Debian as root; libraries (PyTorch, JAX and others,
                  about 3 GB; after `cargo build --release`) and nvrtc (about
                  100 MB), in the cache folder.

Options:
  -h, --help      Print this.

All steps are run, also after one has failed. The exit code is 0 when all
passed, 1 when one failed, 2 when the command line is wrong.";

/// A command line that was understood.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Help,
    Test {
        large: bool,
    },
    /// The GPU crate's tests, the sources of its kernels, or both.
    TestGpu {
        run: bool,
        compile: bool,
    },
    Wheel,
    Ci,
    Install(Vec<Tool>),
}

/// Reads the arguments after the program's name.
pub(crate) fn parse(arguments: impl Iterator<Item = String>) -> Result<Command, String> {
    let arguments: Vec<String> = arguments.collect();
    if arguments.iter().any(|argument| argument == "-h" || argument == "--help") {
        return Ok(Command::Help);
    }
    let (name, rest) = arguments.split_first().ok_or("a command is missing")?;
    let mut command = match name.as_str() {
        "test" => Command::Test { large: false },
        "wheel" => Command::Wheel,
        "ci" => Command::Ci,
        "install" if rest.is_empty() => return Err("`install` needs a tool".to_owned()),
        "install" => Command::Install(Vec::new()),
        _ => return Err(format!("unknown command `{name}`")),
    };
    for argument in rest {
        match (&mut command, argument.as_str()) {
            (Command::Test { large }, "--large") => *large = true,
            (Command::Test { large: false }, "--gpu") => {
                command = Command::TestGpu { run: true, compile: false };
            }
            (Command::Test { large: false }, "--cuda-compile") => {
                command = Command::TestGpu { run: false, compile: true };
            }
            (Command::TestGpu { run, .. }, "--gpu") => *run = true,
            (Command::TestGpu { compile, .. }, "--cuda-compile") => *compile = true,
            (
                Command::Test { .. } | Command::TestGpu { .. },
                "--large" | "--gpu" | "--cuda-compile",
            ) => {
                return Err("--large does not go with --gpu and --cuda-compile".to_owned());
            }
            (Command::Install(tools), _) => {
                let tool = Tool::ALL.into_iter().find(|tool| tool.name() == argument);
                tools.push(tool.ok_or_else(|| format!("unknown tool `{argument}`"))?);
            }
            _ => return Err(format!("unknown argument `{argument}` of `{name}`")),
        }
    }
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn commands() {
        assert_eq!(parse_line("test"), Ok(Command::Test { large: false }));
        assert_eq!(parse_line("test --large"), Ok(Command::Test { large: true }));
        let gpu = |run, compile| Ok(Command::TestGpu { run, compile });
        assert_eq!(parse_line("test --gpu"), gpu(true, false));
        assert_eq!(parse_line("test --cuda-compile"), gpu(false, true));
        assert_eq!(parse_line("test --cuda-compile --gpu"), gpu(true, true));
        assert_eq!(parse_line("wheel"), Ok(Command::Wheel));
        assert_eq!(parse_line("ci"), Ok(Command::Ci));
        let line = "install nvrtc browser";
        assert_eq!(parse_line(line), Ok(Command::Install(vec![Tool::Nvrtc, Tool::Browser])));
    }

    #[test]
    fn help_wins() {
        for line in ["--help", "-h", "test --help", "test --large -h", "wheel -h", "ci --help"] {
            assert_eq!(parse_line(line), Ok(Command::Help), "{line}");
        }
    }

    #[test]
    fn unknown_arguments_are_errors() {
        for (line, part) in [
            ("", "missing"),
            ("tset", "`tset`"),
            ("--large", "`--large`"),
            ("test large", "`large`"),
            ("test --larger", "`--larger`"),
            ("test --large --gpu", "--large does not go"),
            ("test --gpu --large", "--large does not go"),
            ("wheel --large", "`--large`"),
            ("ci --gpu", "`--gpu`"),
            ("ci --large", "`--large`"),
            ("ci test", "`test`"),
            ("install", "needs a tool"),
            ("install gpu", "`gpu`"),
        ] {
            let message = parse_line(line).unwrap_err();
            assert!(message.contains(part), "{line:?} gave {message:?}");
        }
    }

    #[test]
    fn usage_names_every_command() {
        for name in
            ["test [--large]", "--gpu", "--cuda-compile", "wheel ", "ci ", "install ", "--help"]
        {
            assert!(USAGE.contains(name), "{name}");
        }
        for tool in Tool::ALL {
            assert!(USAGE.contains(&format!("{} (", tool.name())), "{tool:?}");
        }
    }
}
