//! `fuselane setup-peers`: the Python libraries that `fuselane bench` compares with, at the versions
//! of `python/requirements.txt`, in an environment of their own in the cache folder.
//!
//! A file `ready`, written last, names the libraries that are there. A folder without it is what an
//! interrupted set-up left, and is made anew.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Names a Python that has the libraries, to be used instead of the environment that this command
/// makes.
pub(crate) const PYTHON_VARIABLE: &str = "FUSELANE_PEERS_PYTHON";

/// What a set-up takes, in short: the download and the time.
pub(crate) const COSTS: &str = "about 3 GB, some minutes";

const CACHE_VARIABLE: &str = "FUSELANE_CACHE";
const PINS: &str = include_str!("../python/requirements.txt");
/// The least version of Python that the pinned libraries run on.
const OLDEST: (u32, u32) = (3, 11);
const GB: u64 = 1_000_000_000;
/// The packages, and beside them the files that are unpacked from them.
const NEEDED_BYTES: u64 = 10 * GB;

/// Install the Python libraries to compare with, once.
///
/// That is a download of about 3 GB, takes 6 GB on the disk, and some minutes. They go to a folder
/// of their own in FUSELANE_CACHE [default: `fuselane` in the user's cache folder]. To use a Python that has the libraries already, name it in FUSELANE_PEERS_PYTHON
/// instead.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Begin anew, also if everything is there.
    #[arg(long)]
    force: bool,
    /// The Python to make the environment with [default: python3].
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Which libraries.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "torch,jax")]
    peers: Vec<Library>,
    /// Print the path of the environment's Python and end; nothing is installed.
    #[arg(long)]
    print_python: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Library {
    Torch,
    Jax,
}

impl Library {
    fn name(self) -> &'static str {
        match self {
            Self::Torch => "torch",
            Self::Jax => "jax",
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let begin = Instant::now();
    let folder = environment(&cache_folder()?);
    if args.print_python {
        println!("{}", python_of(&folder).display());
        return Ok(ExitCode::SUCCESS);
    }
    let mut names: Vec<_> = args.peers.iter().map(|library| library.name()).collect();
    if !args.force {
        let there = ready(&folder);
        if names.iter().all(|name| there.iter().any(|other| other == name)) {
            println!("{} set up already: {}", are(&names), folder.display());
            return Ok(ExitCode::SUCCESS);
        }
        // What is there stays there.
        for library in [Library::Torch, Library::Jax] {
            let name = library.name();
            if !names.contains(&name) && there.iter().any(|other| other == name) {
                names.push(name);
            }
        }
    }
    let python = args.python.clone().unwrap_or_else(|| PathBuf::from("python3"));
    check_python(&python)?;
    let anew = if folder.exists() { ", anew" } else { "" };
    eprintln!(
        "Setting up {} in {}{anew}: {COSTS}. It takes 6 GB on the disk.",
        names.join(" and "),
        folder.display(),
    );
    install(&python, &folder, &names).map_err(|why| match free_bytes(&folder) {
        Some(free) if free < GB / 2 => format!("{why}\n{}", disk_full(&folder, free)),
        _ => why,
    })?;
    let took = Duration::from_secs(begin.elapsed().as_secs());
    println!("{} set up, in {}", are(&names), humantime::format_duration(took));
    Ok(ExitCode::SUCCESS)
}

/// "torch is" or "torch and jax are".
fn are(names: &[&str]) -> String {
    format!("{} {}", names.join(" and "), if names.len() == 1 { "is" } else { "are" })
}

/// Where the program keeps what it would otherwise make again.
pub(crate) fn cache_folder() -> Result<PathBuf, String> {
    cache_folder_of(std::env::var_os(CACHE_VARIABLE), dirs::cache_dir())
}

fn cache_folder_of(named: Option<OsString>, user: Option<PathBuf>) -> Result<PathBuf, String> {
    match (named, user) {
        (Some(named), _) if !named.is_empty() => {
            std::path::absolute(named).map_err(|error| format!("{CACHE_VARIABLE}: {error}"))
        }
        (_, Some(user)) => Ok(user.join("fuselane")),
        _ => Err(format!("this user has no cache folder: name one in {CACHE_VARIABLE}")),
    }
}

/// The Python of the environment, if it is complete and has this library.
pub(crate) fn installed_python(cache: &Path, library: &str) -> Option<PathBuf> {
    let folder = environment(cache);
    ready(&folder).iter().any(|name| name == library).then(|| python_of(&folder))
}

fn environment(cache: &Path) -> PathBuf {
    cache.join(format!("peers-{}", short_hash(&[PINS])))
}

fn python_of(folder: &Path) -> PathBuf {
    folder.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" })
}

/// The libraries of an environment. None, if it is not complete.
fn ready(folder: &Path) -> Vec<String> {
    let names = fs::read_to_string(folder.join("ready")).unwrap_or_default();
    names.lines().map(str::to_owned).collect()
}

/// Eight digits that differ where the texts differ (FNV-1a).
pub(crate) fn short_hash(texts: &[&str]) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for text in texts {
        for &byte in text.as_bytes().iter().chain(&[0]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    format!("{:08x}", (hash >> 32) ^ (hash & 0xffff_ffff))
}

/// The pins of libraries, and of numpy, which all need.
fn pins(names: &[&str]) -> Vec<&'static str> {
    let wanted = |pin: &&str| {
        let name = pin.split("==").next().unwrap_or_default();
        name == "numpy" || names.contains(&name)
    };
    PINS.lines().filter(|line| !line.starts_with('#')).filter(wanted).collect()
}

fn check_python(python: &Path) -> Result<(), String> {
    let (major, minor) = OLDEST;
    let how = format!("install Python {major}.{minor} or newer, or name one with --python PATH");
    let code = "import sys; print(*sys.version_info[:2])";
    let name = python.display();
    let output = Command::new(python).args(["-E", "-c", code]).output();
    let output = output.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!("there is no {name}: {how}"),
        _ => format!("{name} does not start ({error}): {how}"),
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut numbers = text.split_whitespace().map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= OLDEST => Ok(()),
        (Some(Ok(major)), Some(Ok(minor))) => Err(format!("{name} is {major}.{minor}: {how}")),
        _ => Err(format!("{name} does not tell its version: {how}")),
    }
}

fn install(python: &Path, folder: &Path, names: &[&str]) -> Result<(), String> {
    let fault = |error: io::Error| format!("{}: {error}", folder.display());
    if folder.exists() {
        // First what says that it is complete, for the case that this is interrupted.
        match fs::remove_file(folder.join("ready")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fault(error)),
            _ => fs::remove_dir_all(folder).map_err(fault)?,
        }
    }
    // pip unpacks beside what it installs, as the usual place may be a small disk in memory.
    let scratch = folder.join("tmp");
    fs::create_dir_all(&scratch).map_err(fault)?;
    if let Some(free) = free_bytes(folder).filter(|&free| free < NEEDED_BYTES) {
        return Err(disk_full(folder, free));
    }
    let venv = "making the environment failed, see above. On Debian and Ubuntu, the package \
                python3-venv may be missing";
    step(Command::new(python).args(["-E", "-m", "venv"]).arg(folder), venv)?;
    let mut pip = Command::new(python_of(folder));
    pip.args(["-E", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]);
    pip.args(pins(names)).env("TMPDIR", &scratch);
    step(
        &mut pip,
        "pip failed, see above. If the network was at fault, run `fuselane setup-peers` again; it \
         takes up the packages that pip has kept",
    )?;
    let import = format!("import {}", names.join(", "));
    let broken = "what was installed does not load, see above. Another Python may be needed: \
                  name one with --python PATH";
    step(Command::new(python_of(folder)).args(["-E", "-s", "-c", &import]), broken)?;
    fs::remove_dir_all(&scratch).map_err(fault)?;
    fs::write(folder.join("ready"), names.join("\n")).map_err(fault)
}

/// Runs a command that shows its progress to the user, on standard error.
fn step(command: &mut Command, failed: &str) -> Result<(), String> {
    let command = command.stdin(Stdio::null()).stdout(io::stderr());
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(failed.to_owned()),
        Err(error) => {
            Err(format!("{} does not start: {error}", command.get_program().to_string_lossy()))
        }
    }
}

fn disk_full(folder: &Path, free: u64) -> String {
    format!(
        "the disk of {} has {:.1} GB free, of about {} that are needed: make room, or name a \
         folder on another disk in {CACHE_VARIABLE}",
        folder.display(),
        free as f64 / GB as f64,
        NEEDED_BYTES / GB,
    )
}

/// What a user may still write to the disk of a folder.
#[cfg(unix)]
pub(crate) fn free_bytes(folder: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
    let mut facts = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: a path that ends in 0, and room for the answer.
    let code = unsafe { libc::statvfs(path.as_ptr(), facts.as_mut_ptr()) };
    if code != 0 {
        return None;
    }
    // SAFETY: the call has written the answer.
    let facts = unsafe { facts.assume_init() };
    // The types of the fields differ between systems.
    #[allow(clippy::unnecessary_cast)]
    Some(facts.f_bavail as u64 * facts.f_frsize as u64)
}

#[cfg(not(unix))]
pub(crate) fn free_bytes(_folder: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A shell script of this text, in place of a Python.
    #[cfg(unix)]
    pub(crate) fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn the_cache_folder_is_the_named_one_or_the_users() {
        let user = || Some(PathBuf::from("/home/me/.cache"));
        let folder = |named: Option<&str>| cache_folder_of(named.map(OsString::from), user());
        assert_eq!(folder(Some("/big/disk")).unwrap(), Path::new("/big/disk"));
        assert_eq!(folder(None).unwrap(), Path::new("/home/me/.cache/fuselane"));
        assert_eq!(folder(Some("")).unwrap(), Path::new("/home/me/.cache/fuselane"));
        let error = cache_folder_of(None, None).unwrap_err();
        assert!(error.contains("FUSELANE_CACHE"), "{error}");
        // A worker may run elsewhere.
        assert!(folder(Some("here")).unwrap().is_absolute());
    }

    #[test]
    fn hashes_tell_texts_apart() {
        assert_eq!(short_hash(&["a", "b"]).len(), 8);
        assert_ne!(short_hash(&["a", "b"]), short_hash(&["ab"]));
        assert_ne!(short_hash(&["torch==1"]), short_hash(&["torch==2"]));
        // Stays the same from one program to the next.
        assert_eq!(short_hash(&[]), "4fd0bfc1");
    }

    #[test]
    fn pins_are_exact() {
        let all = pins(&["torch", "jax"]);
        assert_eq!(all.len(), 3);
        assert!(all.iter().all(|pin| pin.contains("==")), "{all:?}");
        assert!(pins(&["jax"]).iter().all(|pin| !pin.starts_with("torch")));
        assert!(pins(&["jax"])[0].starts_with("numpy=="));
    }

    #[test]
    fn an_environment_counts_when_it_is_complete() {
        let cache = tempfile::tempdir().unwrap();
        let folder = environment(cache.path());
        assert_eq!(installed_python(cache.path(), "torch"), None);
        fs::create_dir_all(folder.join("bin")).unwrap();
        assert_eq!(installed_python(cache.path(), "torch"), None);
        fs::write(folder.join("ready"), "torch").unwrap();
        assert_eq!(installed_python(cache.path(), "torch"), Some(python_of(&folder)));
        assert_eq!(installed_python(cache.path(), "jax"), None);
    }

    #[test]
    fn a_missing_python_is_named() {
        let error = check_python(Path::new("/no/such/python")).unwrap_err();
        let how = "install Python 3.11 or newer, or name one with --python PATH";
        assert_eq!(error, format!("there is no /no/such/python: {how}"));
    }

    #[cfg(unix)]
    #[test]
    fn an_old_python_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let script = |name: &str, text: &str| script(folder.path(), name, text);
        let error = check_python(&script("old", "echo 3 9")).unwrap_err();
        assert!(error.contains("old is 3.9: install Python 3.11"), "{error}");
        let error = check_python(&script("odd", "exit 1")).unwrap_err();
        assert!(error.contains("does not tell its version"), "{error}");
        check_python(&script("new", "echo 3 12")).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn free_space_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        assert!(free_bytes(folder.path()).is_some_and(|free| free > 0));
        assert_eq!(free_bytes(Path::new("/no/such/folder")), None);
    }
}
