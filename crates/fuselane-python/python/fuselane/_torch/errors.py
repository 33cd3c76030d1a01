"""Errors of operators as Python's own: PyTorch's dispatcher makes a RuntimeError of everything."""

from __future__ import annotations

from typing import Any

import torch

from .. import _native

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def translated(error: Exception, operator: str, **tensors: Any) -> Exception:
    """What to raise for an error of a call with these tensors."""
    if torch.compiler.is_compiling():
        return error
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            return TypeError(f"{operator}: {name} is a {type(tensor).__name__}, expected a tensor")
        try:
            check(operator, **{name: tensor})
        except (TypeError, ValueError) as found:
            return found
    if "setup_context" in str(error):
        return NotImplementedError(
            f"{operator}: called within a transform of torch.func (vmap, grad, jvp), expected a call "
            "outside of them"
        )
    if "Expected a value of type" in str(error):  # a number or flag that is none
        return TypeError(f"{operator}: {str(error).splitlines()[0].partition('() ')[2]}")
    kept = _native.take_error()
    # One that was kept earlier may be of another call.
    return kept if kept is not None and str(kept)[:400] in str(error) else error


def check(operator: str, **tensors: Any) -> None:
    """Refuses devices and layouts that there are no kernels for, and tensors on different devices."""
    first = next((tensor for tensor in tensors.values() if tensor is not None), None)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"{operator}: {name} is on {tensor.device}, expected the CPU, the only device for now: "
                "call .cpu() on it"
            )
        if first is not None and tensor.device.type != first.device.type:
            raise ValueError(
                f"{operator}: {name} is on {tensor.device}, expected {first.device} (as x)"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{operator}: {name} has layout {tensor.layout}, expected torch.strided: "
                "call .to_dense() on it"
            )


def check_float(operator: str, **tensors: Any) -> None:
    """Refuses what is on another device, and what is no float."""
    check(operator, **tensors)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in _FLOATS:
            dtype = str(tensor.dtype).partition(".")[2]
            raise TypeError(
                f"{operator}: {name} has dtype {dtype}, expected float32, float16, bfloat16 or float64"
            )
