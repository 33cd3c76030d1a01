"""Strides of gradients, which arrive as they like."""

from __future__ import annotations

from typing import Any

import torch

#: Whether kernels arrange gradients themselves. Those that are Python functions do: the versions of
#: PyTorch that need them cannot trace a look at strides within a backward.
kernels_arrange = False


def rows(grad: Any) -> Any:
    """The same with a contiguous last dimension."""
    if kernels_arrange and torch.compiler.is_compiling():
        return grad
    return grad if grad.stride(-1) == 1 or grad.shape[-1] == 1 else grad.contiguous()


def like(grad: Any, other: Any) -> Any:
    """The same with the strides of another tensor of its shape, unless it has them."""
    if kernels_arrange and torch.compiler.is_compiling():
        return grad
    if grad.stride() == other.stride():
        return grad
    return torch.empty_like(other, dtype=grad.dtype).copy_(grad)


def arranged(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator, with a gradient that its kernel takes."""
    if name in ("act_backward", "softmax_backward"):
        return like(arguments[0], arguments[1]), *arguments[1:]
    if name.endswith("_backward"):
        return rows(arguments[0]), *arguments[1:]
    return arguments
