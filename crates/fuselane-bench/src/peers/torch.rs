//! PyTorch, eager: one call of a library function after the other, as users write it.

use super::python::PythonPeer;

pub(super) const TORCH: PythonPeer =
    PythonPeer { name: "torch", library: "torch", can_map: true, memory_factor: 6.0 };
