"""Defines the operators in PyTorch's dispatcher: from Rust, through its stable C interface (torch 2.10
and newer), or else with kernels that are Python functions."""

from __future__ import annotations

import glob
import os
from types import SimpleNamespace
from typing import Any, Callable

import torch

from .. import _native
from . import layout

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 4):
    raise ImportError(f"fuselane needs torch 2.4 or newer, and this is {torch.__version__}")


def _library() -> str:
    """The file of PyTorch's library."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    found = glob.glob(os.path.join(folder, "libtorch_cpu.*"))
    return found[0] if found else ""


def _python_kernel(name: str) -> Callable[..., Any]:
    def describe(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            dtype = str(argument.dtype).partition(".")[2]
            return argument.data_ptr(), dtype, tuple(argument.shape), argument.stride()
        return argument

    def kernel(*arguments: Any) -> Any:
        arguments = layout.arranged(name, arguments)
        blocks = _native.call(name, [describe(argument) for argument in arguments])
        results = tuple(torch.from_dlpack(block) for block in blocks)
        return results if len(results) > 1 else results[0]

    return kernel


def _define() -> str | None:
    """None, or why the fast way cannot be."""
    if os.environ.get("FUSELANE_TORCH_FALLBACK") == "1":
        reason: str | None = "FUSELANE_TORCH_FALLBACK is 1"
    else:
        reason = _native.register_torch(_library())
    if reason is not None:
        layout.kernels_arrange = True
        for schema in _native.schemas():
            name = schema.partition("(")[0]
            LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
            LIBRARY.impl(name, _python_kernel(name), "CPU")
    return reason


LIBRARY = torch.library.Library("fuselane", "FRAGMENT")

#: None where kernels are called from PyTorch without Python in between, else why they are not.
FALLBACK_REASON = _define()

if FALLBACK_REASON is not None:
    # The fast way asks by itself.
    _native.follow_num_threads(torch.get_num_threads)


def _prepare_direct() -> bool:
    """Whether plain calls can go past the dispatcher (torch 2.14 and newer)."""
    if FALLBACK_REASON is not None or os.environ.get("FUSELANE_TORCH_DIRECT") == "0":
        return False
    try:
        watched = SimpleNamespace(
            types=[torch.Tensor, torch.nn.Parameter],
            is_neg=torch.Tensor.is_neg,
            modes=torch._C._len_torch_dispatch_stack,
            profiler=torch.autograd.profiler,
            forward_ad=torch.autograd.forward_ad,
            levels=[torch._C._functorch.maybe_current_level, torch._C._get_tracing_state],
        )
        # Have to be there:
        watched.profiler._is_profiler_enabled, watched.forward_ad._current_level  # noqa: B018
        if not _native.prepare_torch_call(watched):
            return False
        # While `torch.compile` traces, nothing goes past the dispatcher.
        torch.compiler.substitute_in_graph(_native.torch_call)(lambda *arguments: None)
    except AttributeError:  # a version without one of these
        return False
    return True


#: Whether plain calls go past the dispatcher.
DIRECT = _prepare_direct()

#: Calls an operator by its number; None where the dispatcher has to.
direct: Callable[..., Any] = _native.torch_call if DIRECT else lambda *arguments: None

#: The number of each operator.
NUMBERS = {schema.partition("(")[0]: i for i, schema in enumerate(_native.schemas())}


def dispatched(name: str) -> Callable[..., Any]:
    """An operator in PyTorch's dispatcher, which refuses what would lose a gradient there."""
    overload = getattr(torch.ops.fuselane, name).default

    def call(*arguments: Any) -> Any:
        if _transform_level() is not None:
            raise NotImplementedError(
                f"{name}: called within a transform of torch.func (vmap, grad, jvp), expected a call "
                "outside of them"
            )
        if not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0:
            if any(map(_has_tangent, arguments)):
                raise NotImplementedError(
                    f"{name}: a tensor carries a tangent of forward-mode differentiation, expected "
                    "gradients by a backward"
                )
        return overload(*arguments)

    return call


def _has_tangent(argument: Any) -> bool:
    if not isinstance(argument, torch.Tensor):
        return False
    return torch.autograd.forward_ad.unpack_dual(argument).tangent is not None


_transform_level = torch._C._functorch.maybe_current_level


def operator(name: str) -> Callable[..., Any]:
    """Calls an operator, by the shortest way that there is."""
    overload = dispatched(name)
    if not DIRECT:
        return overload
    number = NUMBERS[name]

    def call(*arguments: Any) -> Any:
        result = direct(number, *arguments)
        return overload(*arguments) if result is None else result

    return call


def register_fake(name: str) -> Callable[[Any], Any]:
    """Says what an operator's results look like."""
    return torch.library.register_fake(f"fuselane::{name}")
