//! The Python package: its wheel, and the environment that its tests run in.
//!
//! | what | where |
//! |---|---|
//! | maturin, which builds the wheel | `target/python/maturin-<hash>` |
//! | the wheel | `target/wheels` |
//! | the wheel, unpacked for the tests | `target/python/package` |
//! | what the tests need beside it | `python-tests-<hash>` in the cache folder |
//!
//! The last one is shared by all checkouts, since it is large, and so has nothing of a checkout in it. It
//! does not have PyTorch itself: it sees the libraries that `fuselane setup-peers` has installed.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::folders::{built, root, target};

/// What builds the wheel. `pip install` takes any version that `pyproject.toml` allows.
const MATURIN: &str = "maturin==1.16.0";

/// What the tests need beside the libraries of `fuselane setup-peers`.
const REQUIREMENTS: &str = "crates/fuselane-python/tests/requirements.txt";

/// Tells the tests which wheel to try in a clean environment.
const WHEEL_VARIABLE: &str = "FUSELANE_WHEEL";

/// How to get the program `fuselane`.
const BUILD: &str = "`cargo build --release` builds it";

fn program() -> PathBuf {
    built(Path::new(&format!("fuselane{}", std::env::consts::EXE_SUFFIX)))
}

/// The Python with the libraries that benchmarks compare with.
pub(crate) fn peers_python() -> Result<PathBuf, String> {
    let text = output(Command::new(program()).args(["setup-peers", "--print-python"]), BUILD)?;
    Ok(PathBuf::from(text))
}

/// Installs the libraries that benchmarks compare with, and makes the environment of the tests.
pub(crate) fn install_libraries() -> Result<(), String> {
    let program = program();
    if !program.is_file() {
        return Err(format!("there is no {}: {BUILD}", program.display()));
    }
    show(Command::new(program).arg("setup-peers"), "`fuselane setup-peers` has failed, see above")?;
    let tests = Tests::find()?;
    if is_ready(&tests.folder) {
        eprintln!("set up already: {}", tests.folder.display());
        return Ok(());
    }
    eprintln!("Setting up {}: about 30 MB, 225 MB unpacked.", tests.folder.display());
    make(&tests.peers_python, &tests.folder, &tests.pins, Some(&tests.peers_packages))
}

/// Builds the wheel, and prints its path.
pub(crate) fn build_wheel() -> Result<(), String> {
    let wheels = target().join("wheels");
    // Older ones go, so that the tests cannot take one of them for the new one.
    remove_wheels(&wheels).map_err(|error| format!("{}: {error}", wheels.display()))?;
    let tools = target().join("python").join(format!("maturin-{}", hash(MATURIN)));
    if !is_ready(&tools) {
        make(Path::new("python3"), &tools, &[MATURIN.to_owned()], None)?;
    }
    let python = python_of(&tools);
    let mut maturin = Command::new(&python);
    maturin.args(["-E", "-s", "-m", "maturin", "build", "--release"]);
    maturin.args(["--manifest-path", "crates/fuselane-python/Cargo.toml", "--out"]).arg(&wheels);
    maturin.arg("--interpreter").arg(&python);
    // So that the core, which takes a minute, is the one that the step of the Rust tests has compiled.
    maturin.args(["--features", "as-in-tests"]).env("CARGO_TARGET_DIR", target());
    show(&mut maturin, "maturin could not build the wheel, see above")?;
    println!("{}", wheel()?.display());
    Ok(())
}

/// Unpacks the wheel where the tests import it from.
///
/// That is a folder of this checkout: two of them can run their tests at the same time.
pub(crate) fn install_wheel() -> Result<(), String> {
    let (tests, wheel, package) = (Tests::find()?.complete()?, wheel()?, package());
    remove(&package)?;
    let mut pip = pip_install(&tests);
    pip.args(["--quiet", "--no-index", "--no-deps", "--target"]).arg(&package).arg(wheel);
    show(&mut pip, "pip could not install the wheel, see above")
}

/// The Python of the tests, which imports the package from the wheel and leaves no files in the
/// source tree.
pub(crate) fn tests_python() -> Result<Command, String> {
    let tests = Tests::find()?.complete()?;
    let package = package();
    if !package.is_dir() {
        return Err("the wheel is not installed: an earlier step has failed".to_owned());
    }
    let mut command = Command::new(python_of(&tests));
    command.arg("-s").env("PYTHONPATH", package).env(WHEEL_VARIABLE, wheel()?);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    Ok(command)
}

/// The environment of the tests, be it there or not.
struct Tests {
    folder: PathBuf,
    pins: Vec<String>,
    peers_python: PathBuf,
    peers_packages: PathBuf,
}

impl Tests {
    fn find() -> Result<Self, String> {
        let text = fs::read_to_string(root().join(REQUIREMENTS));
        let text = text.map_err(|error| format!("{REQUIREMENTS}: {error}"))?;
        let peers_python = peers_python()?;
        let peers_packages = packages_of(&peers_python)?;
        let pins = pins(&text);
        // The path tells the version of Python too.
        let folder = format!("python-tests-{}", hash((&pins, &peers_packages)));
        let cache = peers_python.ancestors().nth(3).ok_or("the cache folder is not known")?;
        Ok(Self { folder: cache.join(folder), pins, peers_python, peers_packages })
    }

    /// Its folder, where it is there.
    fn complete(self) -> Result<PathBuf, String> {
        if is_ready(&self.folder) {
            return Ok(self.folder);
        }
        Err("the environment of the tests is not complete: an earlier step has failed".to_owned())
    }
}

/// The lines of a file of requirements that are no comments.
fn pins(text: &str) -> Vec<String> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// Makes an environment with these packages, which also sees those in a folder of another one.
///
/// A file `ready` is written last. A folder without it is what an interruption left, and is made anew.
pub(crate) fn make(
    python: &Path,
    folder: &Path,
    pins: &[String],
    others: Option<&Path>,
) -> Result<(), String> {
    let fault = |error: io::Error| format!("{}: {error}", folder.display());
    remove(folder)?;
    show(
        Command::new(python).args(["-E", "-m", "venv"]).arg(folder),
        "making the environment failed, see above. On Debian and Ubuntu, the package python3-venv \
         may be missing",
    )?;
    if let Some(others) = others {
        // Before the packages are installed, so that pip leaves out those that are seen.
        let own = packages_of(&python_of(folder))?;
        fs::write(own.join("others.pth"), format!("{}\n", others.display())).map_err(fault)?;
    }
    show(
        pip_install(folder).args(pins),
        "pip failed, see above. If the network was at fault, run the same command again",
    )?;
    fs::write(folder.join("ready"), pins.join("\n")).map_err(fault)
}

pub(crate) fn is_ready(folder: &Path) -> bool {
    folder.join("ready").is_file()
}

/// The folder that an environment's packages are in, as its Python says.
pub(crate) fn packages_of(python: &Path) -> Result<PathBuf, String> {
    let code = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let how = "`fuselane setup-peers` makes its environment";
    output(Command::new(python).args(["-E", "-s", "-c", code]), how).map(PathBuf::from)
}

pub(crate) fn python_of(folder: &Path) -> PathBuf {
    folder.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" })
}

fn pip_install(folder: &Path) -> Command {
    let mut pip = Command::new(python_of(folder));
    pip.args(["-E", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]);
    pip
}

/// The wheel that was built.
fn wheel() -> Result<PathBuf, String> {
    let wheels = wheels(&target().join("wheels")).unwrap_or_default();
    wheels.into_iter().next().ok_or("there is no wheel: `cargo xtask wheel` builds it".to_owned())
}

/// The wheel, unpacked.
fn package() -> PathBuf {
    target().join("python/package")
}

fn wheels(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            paths.push(path);
        }
    }
    Ok(paths)
}

fn remove_wheels(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    wheels(folder)?.iter().try_for_each(fs::remove_file)
}

/// Removes a folder, which need not be there.
fn remove(folder: &Path) -> Result<(), String> {
    // First what says that it is complete, for the case that this is interrupted.
    let removed = match fs::remove_file(folder.join("ready")) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => fs::remove_dir_all(folder),
    };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(format!("{}: {error}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Runs a Python that shows its progress to the user, on standard error.
fn show(python: &mut Command, failed: &str) -> Result<(), String> {
    let python = python.current_dir(root()).stdin(Stdio::null()).stdout(io::stderr());
    match python.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(failed.to_owned()),
        Err(error) => Err(does_not_start(python, &error, "install Python 3.11 or newer")),
    }
}

/// The line that a command prints; `how` says how to get a program that is missing.
fn output(command: &mut Command, how: &str) -> Result<String, String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| does_not_start(command, &error, how))?;
    let line = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.success() && !line.is_empty() {
        return Ok(line);
    }
    Err(format!("{} has failed: {}", command.get_program().display(), output.status))
}

fn does_not_start(command: &Command, error: &io::Error, how: &str) -> String {
    let program = command.get_program().display();
    match error.kind() {
        ErrorKind::NotFound => format!("there is no {program}: {how}"),
        _ => format!("{program} does not start ({error}): {how}"),
    }
}

/// Eight digits that differ where the values differ.
pub(crate) fn hash(value: impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:08x}", hasher.finish() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that goes away.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("fuselane-xtask-{name}-{}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn pins_are_exact() {
        let text = fs::read_to_string(root().join(REQUIREMENTS)).unwrap();
        let pins = pins(&text);
        assert!(pins.iter().any(|pin| pin.starts_with("pytest==")), "{pins:?}");
        assert!(pins.iter().all(|pin| pin.contains("==")), "{pins:?}");
        assert!(MATURIN.starts_with("maturin=="));
    }

    #[test]
    fn comments_are_no_pins() {
        assert_eq!(pins("# why\na==1\n\n  b==2 # why\n"), ["a==1", "b==2"]);
    }

    #[test]
    fn hashes_tell_values_apart() {
        let path = Path::new("packages");
        assert_eq!(hash((["a==1"], path)).len(), 8);
        assert_eq!(hash((["a==1"], path)), hash((["a==1"], path)));
        assert_ne!(hash((["a==1"], path)), hash((["a==2"], path)));
        assert_ne!(hash((["a==1"], path)), hash((["a==1"], Path::new("others"))));
    }

    #[test]
    fn older_wheels_go() {
        let scratch = Scratch::new("wheels");
        let folder = scratch.0.join("wheels");
        remove_wheels(&folder).unwrap();
        fs::write(folder.join("old.whl"), "").unwrap();
        fs::write(folder.join("note.txt"), "").unwrap();
        assert_eq!(wheels(&folder).unwrap(), [folder.join("old.whl")]);
        remove_wheels(&folder).unwrap();
        assert!(wheels(&folder).unwrap().is_empty());
        assert!(folder.join("note.txt").is_file());
    }

    #[test]
    fn an_environment_counts_when_it_is_complete() {
        let scratch = Scratch::new("ready");
        let folder = scratch.0.join("environment");
        remove(&folder).unwrap();
        fs::create_dir_all(folder.join("bin")).unwrap();
        assert!(!is_ready(&folder));
        fs::write(folder.join("ready"), "").unwrap();
        assert!(is_ready(&folder));
        remove(&folder).unwrap();
        assert!(!folder.exists());
    }

    #[test]
    fn a_missing_program_is_named() {
        let missing = "/no/such/python";
        let error = show(&mut Command::new(missing), "failed").unwrap_err();
        assert_eq!(error, format!("there is no {missing}: install Python 3.11 or newer"));
        let error = output(&mut Command::new(missing), "build it").unwrap_err();
        assert_eq!(error, format!("there is no {missing}: build it"));
    }
}
