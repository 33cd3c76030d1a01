//! A GPU, what it can do, and how kernels are to be launched on it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
#[cfg(feature = "sources")]
use std::sync::Mutex;

use cubecl::features::{Plane, TypeUsage};
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use fuselane::{DType, Error, Result};

/// A GPU of one of the runtimes that this crate was built with. Clones are the same device.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    target: Target,
    properties: Arc<DeviceProperties>,
    target_properties: Arc<TargetProperties>,
    tuning: Tuning,
}

/// Where launches go.
pub(crate) enum Target {
    /// To a device.
    Client(Client),
    /// Nowhere: kernels are saved for their sources.
    #[cfg(feature = "sources")]
    Recorder(Mutex<Vec<Recorded>>),
}

/// A kernel that was launched on a recorder.
#[cfg(feature = "sources")]
pub(crate) struct Recorded {
    /// The function's name.
    pub(crate) name: &'static str,
    pub(crate) kernel: Box<dyn CubeKernel>,
}

/// The client of CubeCL's default device, which only a build with a runtime has.
fn default_client() -> Option<Client> {
    #[cfg(feature = "runtime")]
    return Some(cubecl::Device::default().client());
    #[cfg(not(feature = "runtime"))]
    None
}

/// What the launch layer would choose by itself, said by the caller: for tests, which run every
/// way on one device, and for experiments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tuning {
    /// The most numbers that are loaded at once; by default as many as one load can hold.
    pub vector: Option<usize>,
    /// Whether units of a plane (a warp) exchange numbers directly; by default where the device
    /// says that it can.
    pub planes: Option<bool>,
    /// The most units in a cube (threads in a block).
    pub units: Option<u32>,
    /// Whether index arithmetic is in 64 bits; by default where sizes ask for it.
    pub wide_indices: Option<bool>,
    /// Whether rows are read again rather than held in registers; by default the long ones.
    pub reread: Option<bool>,
}

impl Device {
    /// The most capable device of the runtimes that this crate was built with.
    pub fn open() -> Result<Self> {
        // A runtime that finds no driver or no adapter panics; here that is an error like others.
        match catch_unwind(AssertUnwindSafe(default_client)) {
            Ok(Some(client)) => Ok(Self::of_client(client)),
            Ok(None) => {
                let expected = "one of the features wgpu, vulkan, metal, cuda, cuda-cpp and rocm";
                Err(Error::new("device", "runtime", "is none in this build", expected))
            }
            Err(_) => {
                Err(Error::new("device", "runtime", "found no device", "a GPU with its driver"))
            }
        }
    }

    /// The device of a CubeCL client.
    pub fn of_client(client: Client) -> Self {
        Self(Arc::new(Inner {
            properties: client.properties_shared(),
            target_properties: client.target_properties_shared(),
            target: Target::Client(client),
            tuning: Tuning::default(),
        }))
    }

    /// A device that runs nothing and saves the kernels.
    #[cfg(feature = "sources")]
    pub(crate) fn recorder(properties: DeviceProperties, target: TargetProperties) -> Self {
        Self(Arc::new(Inner {
            target: Target::Recorder(Mutex::default()),
            properties: Arc::new(properties),
            target_properties: Arc::new(target),
            tuning: Tuning::default(),
        }))
    }

    /// The same device with some choices made by the caller.
    #[must_use]
    pub fn tuned(&self, tuning: Tuning) -> Self {
        let Inner { target, properties, target_properties, .. } = &*self.0;
        let target = match target {
            Target::Client(client) => Target::Client(client.clone()),
            #[cfg(feature = "sources")]
            Target::Recorder(_) => Target::Recorder(Mutex::default()),
        };
        let (properties, target_properties) = (properties.clone(), target_properties.clone());
        Self(Arc::new(Inner { target, properties, target_properties, tuning }))
    }

    /// Its name, as its driver has it.
    pub fn name(&self) -> &str {
        &self.0.properties.identity.name
    }

    /// The runtime and its compiler, as in `wgpu<wgsl>`.
    pub fn runtime(&self) -> &str {
        match &self.0.target {
            Target::Client(client) => client.name(),
            #[cfg(feature = "sources")]
            Target::Recorder(_) => "recorder",
        }
    }

    /// Whether this is a program on the CPU that behaves like a GPU.
    pub fn is_software(&self) -> bool {
        self.0.properties.identity.physical.is_none()
    }

    /// Whether tensors of a dtype can be worked on here: f32 and bf16 everywhere, f16 where the
    /// device has it, f64 nowhere.
    pub fn supports(&self, dtype: DType) -> bool {
        match dtype {
            DType::F32 | DType::BF16 => true,
            DType::F16 => self.is_native(FloatKind::F16),
            DType::F64 => false,
        }
    }

    /// Waits until all that was launched so far is done.
    pub fn wait(&self) -> Result<()> {
        match &self.0.target {
            Target::Client(client) => cubecl::future::block_on(client.sync())
                .map_err(|error| Error::new("device", "work", format!("failed: {error}"), "none")),
            #[cfg(feature = "sources")]
            Target::Recorder(_) => Ok(()),
        }
    }

    /// The CubeCL client, for its timers and memory reports. A recorder has none.
    pub fn client(&self) -> Option<&Client> {
        match &self.0.target {
            Target::Client(client) => Some(client),
            #[cfg(feature = "sources")]
            Target::Recorder(_) => None,
        }
    }

    pub(crate) fn target(&self) -> &Target {
        &self.0.target
    }

    pub(crate) fn properties(&self) -> &Arc<DeviceProperties> {
        &self.0.properties
    }

    #[cfg(feature = "sources")]
    pub(crate) fn target_properties(&self) -> &Arc<TargetProperties> {
        &self.0.target_properties
    }

    pub(crate) fn tuning(&self) -> &Tuning {
        &self.0.tuning
    }

    /// Whether memory and conversions have a 16-bit type.
    pub(crate) fn is_native(&self, kind: FloatKind) -> bool {
        let uses = self.0.properties.type_usage(ElemType::Float(kind));
        uses.contains(TypeUsage::Conversion) && uses.contains(TypeUsage::Buffer)
    }

    /// The size of planes whose units may exchange numbers, if there are such.
    pub(crate) fn plane(&self) -> Option<u32> {
        let Inner { properties, tuning, .. } = &*self.0;
        let hardware = &properties.hardware;
        let has = properties.features.plane.contains(Plane::Ops);
        let equal = hardware.plane_size_min == hardware.plane_size_max;
        let size = (tuning.planes.unwrap_or(has) && equal).then_some(hardware.plane_size_min);
        size.filter(|&size| size > 0)
    }

    /// The most units in a cube.
    pub(crate) fn units(&self) -> u32 {
        let most = self.0.properties.hardware.max_units_per_cube.max(1);
        let most = self.0.tuning.units.map_or(most, |units| units.clamp(1, most));
        1 << most.ilog2()
    }

    /// Whether both are handles of one device.
    pub(crate) fn same_as(&self, other: &Self) -> bool {
        match (&self.0.target, &other.0.target) {
            (Target::Client(a), Target::Client(b)) => a.service_id() == b.service_id(),
            #[cfg(feature = "sources")]
            _ => Arc::ptr_eq(&self.0, &other.0),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.name(), self.runtime())
    }
}
