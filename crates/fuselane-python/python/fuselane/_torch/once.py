"""Gradients that have no gradient themselves."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for the backward of an operator, which makes a second derivative an error.

    PyTorch's own of this name does so only where the incoming gradient requires one. A gradient may
    also depend on what the forward has kept: then the second derivative would be silently zero.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return outputs
        inputs = (*grads, *ctx.saved_tensors)
        if not any(tensor is not None and tensor.requires_grad for tensor in inputs):
            return outputs
        there = [o for o in outputs if isinstance(o, torch.Tensor)]
        refused = iter(_Refused.apply(len(there), *there, *inputs))
        return tuple(next(refused) if isinstance(o, torch.Tensor) else o for o in outputs)

    return wrapper


class _Refused(torch.autograd.Function):
    """The identity on gradients, connected to all that they depend on, that has no gradient."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> Any:
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "fuselane: an operator was differentiated twice, expected once: it has no second derivative"
        )
