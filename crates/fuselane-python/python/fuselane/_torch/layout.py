"""Strides of gradients, which arrive as they like."""

from __future__ import annotations

from typing import Any

import torch


def rows(grad: Any) -> Any:
    """The same with a contiguous last dimension."""
    return grad if grad.stride(-1) == 1 or grad.shape[-1] == 1 else grad.contiguous()


def like(grad: Any, other: Any) -> Any:
    """The same with the strides of another tensor of its shape, unless it has them."""
    if grad.stride() == other.stride():
        return grad
    return torch.empty_like(other, dtype=grad.dtype).copy_(grad)
