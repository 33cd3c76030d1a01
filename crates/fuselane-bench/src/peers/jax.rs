//! JAX on the CPU, compiled by XLA.

use super::python::PythonPeer;

pub(super) const JAX: PythonPeer =
    PythonPeer { name: "jax", library: "jax", can_map: false, memory_factor: 4.0 };
