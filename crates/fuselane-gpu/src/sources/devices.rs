//! Devices that are not there: what CubeCL's runtimes would say of them.

use cubecl::Compiler;
use cubecl::features::{AtomicUsage, Plane, TypeUsage};
use cubecl::ir::{
    DeviceIdentity, ElemType, FloatKind, HardwareProperties, IntKind, MemoryDeviceProperties,
    UIntKind,
};
use cubecl::prelude::*;
use cubecl_common::profile::TimingMethod;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use cubecl_cpp::{register_supported_types, target};

use super::{Compiled, Language};

/// A device and its compiler.
pub(super) struct Kind {
    /// What tells it from the first one of its language.
    pub(super) suffix: &'static str,
    pub(super) compiler: Language,
    pub(super) properties: DeviceProperties,
    pub(super) target: TargetProperties,
}

/// The devices of a language, the most usual one first.
pub(super) fn of(language: Language) -> Vec<Kind> {
    let kind = |suffix, properties| {
        let target = TargetProperties { mma: Default::default() };
        Kind { suffix, compiler: language, properties, target }
    };
    match language {
        Language::Cuda => vec![kind("", cuda())],
        Language::Hip => vec![kind("", hip(32)), kind("wave64", hip(64))],
        Language::Metal => vec![kind("", metal())],
        #[cfg(feature = "wgpu")]
        Language::Wgsl => vec![kind("", wgsl(false)), kind("subgroups", wgsl(true))],
    }
}

impl Kind {
    pub(super) fn compile(&self, kernel: KernelDefinition) -> Result<Compiled, String> {
        match self.compiler {
            Language::Cuda => {
                // Grid constants: since compute capability 7.0.
                let features = CppSupportedFeatures {
                    fast_math: true,
                    grid_constants: true,
                    dp4a: true,
                    ..Default::default()
                };
                self.cpp::<target::Cuda>(CppCompiler::default(), kernel, features)
            }
            Language::Hip => {
                let features = CppSupportedFeatures { fast_math: true, ..Default::default() };
                self.cpp::<target::Hip>(CppCompiler::default(), kernel, features)
            }
            Language::Metal => {
                let features = CppSupportedFeatures { fast_math: true, ..Default::default() };
                self.cpp::<target::Metal>(CppCompiler::default(), kernel, features)
            }
            #[cfg(feature = "wgpu")]
            Language::Wgsl => {
                let options = cubecl::WgpuCompilationOptions::default();
                let shader = cubecl::wgpu::WgslCompiler.compile(kernel, &options);
                let shader = shader.map_err(|error| error.to_string())?;
                Ok(Compiled { shared: shader.shared_memory_size, text: shader.to_string() })
            }
        }
    }

    fn cpp<T>(
        &self,
        mut compiler: CppCompiler<T>,
        kernel: KernelDefinition,
        supports_features: CppSupportedFeatures,
    ) -> Result<Compiled, String>
    where
        T: target::CppTarget,
        CppCompiler<T>: Compiler<
                Representation = cubecl_cpp::ComputeKernel,
                CompilationOptions = CompilationOptions,
            >,
    {
        let warp_size = self.properties.hardware.plane_size_min as usize;
        let options = CompilationOptions { warp_size, supports_features, amd_wmma: None };
        let kernel = compiler.compile(kernel, &options).map_err(|error| error.to_string())?;
        Ok(Compiled { shared: kernel.shared_memory_size, text: kernel.source })
    }
}

/// What all of them have in common.
fn properties(name: &str, plane: u32, vector: VectorSize, shared: usize) -> DeviceProperties {
    let memory = MemoryDeviceProperties::new(1 << 34, 512);
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: plane,
        plane_size_max: plane,
        max_bindings: 30,
        max_shared_memory_size: shared,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        max_vector_size: vector,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity { name: name.into(), ..Default::default() };
    let timing = TimingMethod::Device;
    DeviceProperties::new(Default::default(), memory, hardware, timing, identity)
}

fn cuda() -> DeviceProperties {
    let mut properties = of_cpp("some CUDA device", 32, 99 << 10);
    properties.features.plane.insert(Plane::Sync);
    properties
}

fn hip(wave: u32) -> DeviceProperties {
    of_cpp("some HIP device", wave, 64 << 10)
}

/// What CUDA and HIP have in common.
fn of_cpp(name: &str, plane: u32, shared: usize) -> DeviceProperties {
    let mut properties = properties(name, plane, VectorSize::MAX, shared);
    register_supported_types(&mut properties);
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    properties.features.device_memory_scope = true;
    properties.features.plane.insert(Plane::Ops);
    properties.features.plane.insert(Plane::NonUniformControlFlow);
    properties
}

fn metal() -> DeviceProperties {
    let mut properties = properties("some Metal device", 32, 4, 32 << 10);
    properties.register_address_type(AddressType::U32);
    properties.register_address_type(AddressType::U64);
    for kind in [UIntKind::U8, UIntKind::U16, UIntKind::U32, UIntKind::U64] {
        properties.register_type_usage(ElemType::UInt(kind), TypeUsage::all());
    }
    for kind in [IntKind::I8, IntKind::I16, IntKind::I32, IntKind::I64] {
        properties.register_type_usage(ElemType::Int(kind), TypeUsage::all());
    }
    for kind in [FloatKind::F16, FloatKind::BF16, FloatKind::F32] {
        properties.register_type_usage(ElemType::Float(kind), TypeUsage::all());
    }
    properties.register_type_usage(ElemType::Bool, TypeUsage::all());
    for kind in [ElemType::Int(IntKind::I32), ElemType::UInt(UIntKind::U32)] {
        properties.register_atomic_type_usage(Type::atomic(kind), AtomicUsage::all());
    }
    properties.features.alignment = true;
    properties.features.device_memory_scope = true;
    properties.features.plane.insert(Plane::Ops);
    properties.features.plane.insert(Plane::Sync);
    properties.features.plane.insert(Plane::NonUniformControlFlow);
    properties
}

/// One with the optional f16, as most have it, and with or without subgroups.
#[cfg(feature = "wgpu")]
fn wgsl(subgroups: bool) -> DeviceProperties {
    let mut properties = properties("some WebGPU device", 32, 4, 16 << 10);
    properties.register_address_type(AddressType::U32);
    let floats = [FloatKind::F16, FloatKind::F32, FloatKind::Flex32].map(ElemType::Float);
    let others = [
        ElemType::Index,
        ElemType::UInt(UIntKind::U32),
        ElemType::Int(IntKind::I32),
        ElemType::Bool,
    ];
    for kind in floats.into_iter().chain(others) {
        properties.register_type_usage(kind, TypeUsage::all());
    }
    for kind in [ElemType::Int(IntKind::I32), ElemType::UInt(UIntKind::U32)] {
        let uses = AtomicUsage::LoadStore | AtomicUsage::Exchange | AtomicUsage::Add;
        properties.register_atomic_type_usage(Type::atomic(kind), uses);
    }
    if subgroups {
        properties.features.plane.insert(Plane::Ops);
    }
    properties.hardware.max_cube_count = (65_535, 65_535, 65_535);
    properties.hardware.max_units_per_cube = 256;
    properties.hardware.max_cube_dim = (256, 256, 64);
    properties
}
