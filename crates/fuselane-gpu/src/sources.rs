//! The kernels' sources, without a GPU.
//!
//! The operators are called on devices that run nothing but save what is launched on them: one of
//! each kind that is known well enough to be described here. What was launched goes through
//! CubeCL's own compilers, as it would on such a device, and what they write is returned as text.
//!
//! ```
//! use fuselane_gpu::sources::{Language, sources};
//! let found = sources(Language::Cuda, &|name| name == "act_forward-bf16-silu")?;
//! assert!(found[0].text.contains("__global__"));
//! # Ok::<(), fuselane::Error>(())
//! ```

mod cases;
mod devices;
pub mod nvrtc;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use std::sync::PoisonError;

use cubecl::prelude::*;
use fuselane::{DType, Error, Result};

use crate::device::{Device, Recorded, Target, Tuning};

/// A language that kernels are written in on their way to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Language {
    /// C++ for NVIDIA's compiler, as the feature `cuda-cpp` has it.
    Cuda,
    /// C++ for AMD's compiler.
    Hip,
    /// Apple's Metal shading language.
    Metal,
    /// WebGPU's shading language.
    #[cfg(feature = "wgpu")]
    Wgsl,
}

impl Language {
    /// Those of this build.
    pub const ALL: &'static [Self] = &[
        Self::Cuda,
        Self::Hip,
        Self::Metal,
        #[cfg(feature = "wgpu")]
        Self::Wgsl,
    ];

    /// The name used on command lines, as in `"cuda"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Hip => "hip",
            Self::Metal => "metal",
            #[cfg(feature = "wgpu")]
            Self::Wgsl => "wgsl",
        }
    }

    /// How the names of its files end, as in `"cu"`.
    pub const fn extension(self) -> &'static str {
        match self {
            Self::Cuda => "cu",
            Self::Hip => "hip",
            Self::Metal => "metal",
            #[cfg(feature = "wgpu")]
            Self::Wgsl => "wgsl",
        }
    }
}

impl fmt::Display for Language {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Language {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.iter().find(|language| language.name() == name);
        found.copied().ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|language| language.name()).collect();
            Error::new("sources", "language", format!("is `{name}`"), names.join(", "))
        })
    }
}

/// A kernel in one language.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The kernel's function, the dtype and the options, as in `"act_forward-bf16-silu"`: a name
    /// that no other source of the language has.
    pub name: String,
    /// The operator whose call launched it first.
    pub operator: &'static str,
    /// The dtype of the call's activations.
    pub dtype: DType,
    /// The options and the sizes of the call, in words.
    pub options: String,
    /// Whether sizes and strides of the call let it read and write as much at once as the device
    /// can.
    pub wide: bool,
    /// The name of the function in the text.
    pub entry: String,
    /// The units (threads) of a cube (block) in x, y and z.
    pub cube: [u32; 3],
    /// Shared memory that a cube needs, in bytes.
    pub shared: usize,
    /// All of the program.
    pub text: String,
}

/// What a call is about.
#[derive(Debug, Clone)]
struct Class {
    operator: &'static str,
    dtype: DType,
    options: String,
    wide: bool,
}

impl Class {
    /// The name of a kernel that such a call launched.
    fn name(&self, kernel: &str) -> String {
        let words = self.options.replace(", ", "-").replace(' ', "_");
        let name = format!("{kernel}-{}-{words}", self.dtype);
        name.trim_end_matches('-').to_owned()
    }
}

/// Calls on a device, and the kernels that they launched.
struct Recording {
    device: Device,
    kernels: Vec<(Class, Recorded)>,
}

impl Recording {
    fn call(&mut self, class: &Class, call: impl FnOnce(&Device) -> Result<()>) -> Result<()> {
        let device = self.device.clone();
        self.call_on(&device, class, call)
    }

    /// A call with indices of 64 bits, where the device has them.
    fn call_wide_indices(
        &mut self,
        class: &Class,
        call: impl FnOnce(&Device) -> Result<()>,
    ) -> Result<()> {
        let device = self.device.tuned(Tuning { wide_indices: Some(true), ..Tuning::default() });
        if device.properties().features.supports_address(AddressType::U64) {
            self.call_on(&device, class, call)?;
        }
        Ok(())
    }

    /// A call on a variant of the device.
    fn call_on(
        &mut self,
        device: &Device,
        class: &Class,
        call: impl FnOnce(&Device) -> Result<()>,
    ) -> Result<()> {
        call(device)?;
        if let Target::Recorder(kernels) = device.target() {
            let kernels =
                std::mem::take(&mut *kernels.lock().unwrap_or_else(PoisonError::into_inner));
            self.kernels.extend(kernels.into_iter().map(|kernel| (class.clone(), kernel)));
        }
        Ok(())
    }
}

/// What a compiler has made of a kernel.
struct Compiled {
    text: String,
    shared: usize,
}

/// The sources of all kernels whose name `names` takes: of every operator, for every dtype and
/// every class of options. A kernel that several calls share appears once.
pub fn sources(language: Language, names: &dyn Fn(&str) -> bool) -> Result<Vec<Source>> {
    let mut found = Vec::new();
    let mut texts = HashSet::new();
    let mut taken: HashMap<String, usize> = HashMap::new();
    let mut faults = Vec::new();
    for kind in devices::of(language) {
        let device = Device::recorder(kind.properties.clone(), kind.target.clone());
        let mut recording = Recording { device, kernels: Vec::new() };
        cases::all(&mut recording)?;
        let mut ids = HashSet::new();
        for (class, recorded) in recording.kernels {
            if !ids.insert(recorded.kernel.id()) {
                continue;
            }
            let mut name = class.name(recorded.name);
            if !kind.suffix.is_empty() {
                name = format!("{name}-{}", kind.suffix);
            }
            // Calls that differ in nothing that the class says may launch different kernels still.
            let count = taken.entry(name.clone()).or_default();
            *count += 1;
            if *count > 1 {
                name = format!("{name}-{count}");
            }
            if !names(&name) {
                continue;
            }
            match compile(&name, &class, &recorded, &kind) {
                Ok(source) if texts.insert(source.text.clone()) => found.push(source),
                Ok(_) => {}
                Err(reason) => faults.push(format!("{name}: {reason}")),
            }
        }
    }
    if faults.is_empty() {
        return Ok(found);
    }
    let expected = format!("kernels that {language} can express");
    Err(Error::new("sources", "kernels", format!("fail:\n{}\n", faults.join("\n")), expected))
}

/// Gives the reason where there is no source.
fn compile(
    name: &str,
    class: &Class,
    recorded: &Recorded,
    kind: &devices::Kind,
) -> std::result::Result<Source, String> {
    // What is wrong with a kernel may show as a panic while it unfolds.
    let compiled = catch_unwind(AssertUnwindSafe(|| {
        let mut definition = recorded.kernel.define();
        // As in a launch; what stands there by default adds checks of every index.
        definition.settings.execution_mode = ExecutionMode::Unchecked;
        let dim = definition.settings.cube_dim;
        let entry = definition.settings.kernel_name.clone();
        kind.compile(definition).map(|compiled| (compiled, [dim.x, dim.y, dim.z], entry))
    }));
    let (compiled, cube, entry) = compiled.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panics: {}", text.unwrap_or("for no reason given")))
    })?;
    Ok(Source {
        name: name.to_owned(),
        operator: class.operator,
        dtype: class.dtype,
        options: class.options.clone(),
        wide: class.wide,
        entry,
        cube,
        shared: compiled.shared,
        text: compiled.text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::normalize::{self, NormalizeBackward};
    use fuselane::Normalize;

    /// A device whose kernels may have few buffers refuses the calls that need more, by name.
    #[test]
    fn few_buffers_are_an_error() {
        let kind = devices::of(Language::Cuda).into_iter().next().expect("a device");
        let gradient = |buffers| {
            let mut properties = kind.properties.clone();
            properties.hardware.max_bindings = buffers;
            let device = Device::recorder(properties, kind.target.clone());
            let tensor = |d| device.empty(DType::F32, &[4, d]);
            let (x, grad, rstd, mut dx) = (tensor(8)?, tensor(8)?, tensor(1)?, tensor(8)?);
            let call = NormalizeBackward::new(&grad, &x, &rstd);
            let call = NormalizeBackward { dx: Some(&mut dx), ..call };
            normalize::backward_into(&Normalize::srms_norm(), call)
        };
        gradient(15).expect("enough");
        let error = gradient(8).expect_err("too few").to_string();
        assert!(error.starts_with("normalize: x is on some CUDA device"), "{error}");
        assert!(
            error.ends_with("whose kernels have 8 buffers, expected a device with 15"),
            "{error}"
        );
    }
}
