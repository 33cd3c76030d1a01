//! What tests need and a machine may lack. What is there already stays as it is.

use std::process::Command;

use crate::{gpu, python};

/// Something to install.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tool {
    /// Chromium with its driver, for the tests of the report.
    Browser,
    /// A driver of Vulkan that needs no GPU.
    Driver,
    /// The Python libraries that benchmarks compare with, and what the tests of the Python package need
    /// beside these.
    Libraries,
    /// NVIDIA's compiler of kernels.
    Nvrtc,
}

impl Tool {
    pub(crate) const ALL: [Self; 4] = [Self::Browser, Self::Driver, Self::Libraries, Self::Nvrtc];

    /// As the command line has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Browser => "browser",
            Self::Driver => "driver",
            Self::Libraries => "libraries",
            Self::Nvrtc => "nvrtc",
        }
    }

    pub(crate) fn install(self) -> Result<(), String> {
        match self {
            Self::Browser => install_browser(),
            Self::Driver => gpu::install_driver(),
            Self::Libraries => python::install_libraries(),
            Self::Nvrtc => gpu::install_nvrtc(),
        }
    }
}

/// Installs all of these, also after one has failed, and tells whether none has.
pub(crate) fn install(tools: &[Tool]) -> bool {
    let mut passed = true;
    for tool in tools {
        if let Err(error) = tool.install() {
            eprintln!("xtask: {}: {error}", tool.name());
            passed = false;
        }
    }
    passed
}

fn install_browser() -> Result<(), String> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&folders).any(|folder| folder.join("chromedriver").is_file()) {
        eprintln!("browser: there already");
        return Ok(());
    }
    if let Some(result) = apt_install("chromium chromium-driver") {
        return result;
    }
    // The test says so too, and can be left out.
    eprintln!("not installed: Chromium with chromedriver, which the test of the report needs");
    Ok(())
}

/// Installs packages as Debian and Ubuntu do it. Nothing, where that cannot be done.
pub(crate) fn apt_install(packages: &str) -> Option<Result<(), String>> {
    let succeeds = |line: &str| {
        Command::new("sh").args(["-c", line]).status().is_ok_and(|status| status.success())
    };
    if !succeeds("command -v apt-get >/dev/null && [ \"$(id -u)\" = 0 ]") {
        return None;
    }
    let line = format!("apt-get update -qq && apt-get install -y -qq {packages}");
    Some(if succeeds(&line) { Ok(()) } else { Err("apt-get has failed, see above".to_owned()) })
}
