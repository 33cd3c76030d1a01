"""Cosine encoding with a fused activation."""

from __future__ import annotations

from typing import Any

import torch

from . import angles
from .angles import check_call
from .once import once_differentiable
from .register import operator, register_fake

_forward = operator("cosine")
_backward = operator("cosine_backward")


def cosine(x: Any, theta: Any, placed: Any) -> Any:
    return angles.encode(_Cosine, _forward, "lrpe_cosine", x, theta, placed, ())


class _Cosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return angles.forward(_forward, ctx, *arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        return angles.backward(_backward, ctx, grad)


@register_fake("cosine")
def _(x, theta, positions, cu_seqlens, table, act, offset, grid, extra_tokens, heads_first):
    check_call("lrpe_cosine", x, theta, positions, cu_seqlens)
    return x.new_empty([*x.shape[:-1], 2 * x.shape[-1]])


@register_fake("cosine_backward")
def _(
    grad, x, theta, positions, cu_seqlens, table, act, offset, grid, extra_tokens, heads_first,
    dx, dtheta,
):  # fmt: skip
    check_call("lrpe_cosine", grad, theta, positions, cu_seqlens)
    shape = [*grad.shape[:-1], grad.shape[-1] // 2]
    return (
        grad.new_empty(shape if dx else [0]),
        torch.empty_like(theta) if dtheta else theta.new_empty([0]),
    )
