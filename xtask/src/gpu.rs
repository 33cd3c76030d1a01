//! The GPU crate: what its tests need, and how cargo is called for it.
//!
//! | what | where |
//! |---|---|
//! | the build, which takes minutes | `gpu-target` in the cache folder |
//! | NVIDIA's compiler NVRTC, and header files | `nvrtc-<hash>` in the cache folder |
//!
//! Both are shared by all checkouts. Only the libraries that the GPU crate builds on are the same for
//! all of them: a checkout's own crates are compiled for it.

use std::path::{Path, PathBuf};

use crate::folders::cache;
use crate::install::apt_install;
use crate::python;

/// NVRTC and CUDA's header files.
const NVRTC: [&str; 2] = ["nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-runtime-cu12==12.9.79"];

/// Tells the tests where NVRTC is.
const NVRTC_VARIABLE: &str = "FUSELANE_NVRTC";

/// Where drivers of Vulkan tell of themselves.
const DRIVERS: [&str; 2] = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"];

/// The folder that the GPU crate is built into.
pub(crate) fn target() -> Result<PathBuf, String> {
    Ok(cache()?.join("gpu-target"))
}

/// Installs a driver of Vulkan that needs no GPU, where there is none of any kind.
pub(crate) fn install_driver() -> Result<(), String> {
    let is_there = |folder: &&str| {
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        files.into_iter().any(|file| file.path().extension().is_some_and(|e| e == "json"))
    };
    if !cfg!(target_os = "linux") || DRIVERS.iter().any(is_there) {
        eprintln!("driver: there already");
        return Ok(());
    }
    apt_install("mesa-vulkan-drivers libvulkan1").unwrap_or_else(|| {
        Err("there is no driver of Vulkan: install that of your GPU, or Mesa's lavapipe (on Debian \
             and Ubuntu, mesa-vulkan-drivers and libvulkan1)"
            .to_owned())
    })
}

/// Installs NVRTC, where it is not there.
pub(crate) fn install_nvrtc() -> Result<(), String> {
    let folder = nvrtc_folder()?;
    if python::is_ready(&folder) {
        eprintln!("set up already: {}", folder.display());
        return Ok(());
    }
    eprintln!("Setting up {}: about 100 MB, 250 MB unpacked.", folder.display());
    let parent = folder.parent().unwrap_or(&folder);
    std::fs::create_dir_all(parent).map_err(|error| format!("{}: {error}", parent.display()))?;
    python::make(Path::new("python3"), &folder, &NVRTC.map(str::to_owned), None)
}

fn nvrtc_folder() -> Result<PathBuf, String> {
    Ok(cache()?.join(format!("nvrtc-{}", python::hash(NVRTC))))
}

/// What cargo has to know: where to build, and where NVRTC is, for tests that have to run it.
pub(crate) fn environment(nvrtc: bool) -> Result<Vec<(&'static str, PathBuf)>, String> {
    let mut variables = vec![("CARGO_TARGET_DIR", target()?)];
    if nvrtc {
        let folder = nvrtc_folder()?;
        if !python::is_ready(&folder) {
            return Err("NVRTC is not installed: an earlier step has failed".to_owned());
        }
        let packages = python::packages_of(&python::python_of(&folder))?;
        variables.push((NVRTC_VARIABLE, packages.join("nvidia/cuda_nvrtc/lib")));
    }
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_exact() {
        assert!(NVRTC.iter().all(|pin| pin.contains("==")));
    }

    #[test]
    fn nvrtc_is_found_or_missed() {
        match environment(true) {
            Ok(variables) => assert!(variables[1].1.is_dir(), "{variables:?}"),
            Err(error) => assert!(error.contains("not installed"), "{error}"),
        }
    }
}
