"""Softmax and its logarithm."""

from __future__ import annotations

from typing import Any

import torch

from .errors import check_float, translated
from .layout import like
from .once import once_differentiable
from .register import operator, register_fake

_forward = operator("softmax")
_backward = operator("softmax_backward")
_grad_enabled = torch.is_grad_enabled


def softmax(x: Any, dim: int, log: bool, zero_masked_rows: bool) -> Any:
    try:
        if x.requires_grad and _grad_enabled():
            return _Softmax.apply(x, dim, log, zero_masked_rows)
        return _forward(x, dim, log, zero_masked_rows)
    except RuntimeError as error:
        raise translated(error, "softmax", x=x) from None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, dim: int, log: bool, zero_masked_rows: bool) -> Any:
        o = _forward(x, dim, log, zero_masked_rows)
        ctx.save_for_backward(o)
        ctx.options = (dim, log, zero_masked_rows)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        (o,) = ctx.saved_tensors
        return _backward(like(grad, o), o, *ctx.options), None, None, None


def _check_dim(x: Any, dim: int) -> None:
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise ValueError(f"softmax: dim is {dim}, expected {-rank} to {rank - 1} (dimensions of x)")


@register_fake("softmax")
def _(x: Any, dim: int, log: bool, zero_masked_rows: bool) -> Any:
    check_float("softmax", x=x)
    _check_dim(x, dim)
    return torch.empty_like(x)


@register_fake("softmax_backward")
def _(grad: Any, o: Any, dim: int, log: bool, zero_masked_rows: bool) -> Any:
    check_float("softmax", grad=grad, o=o)
    _check_dim(o, dim)
    return torch.empty_like(o)
