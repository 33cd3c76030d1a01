"""Rotary encoding with a fused activation."""

from __future__ import annotations

from typing import Any

import torch

from . import angles
from .angles import check_call
from .once import once_differentiable
from .register import operator, register_fake

_forward = operator("rotate")
_backward = operator("rotate_backward")


def rotate(x: Any, theta: Any, placed: Any, options: Any) -> Any:
    return angles.encode(_Rotate, _forward, "lrpe_rotate", x, theta, placed, options)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return angles.forward(_forward, ctx, *arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        return angles.backward(_backward, ctx, grad)


@register_fake("rotate")
def _(
    x, theta, positions, cu_seqlens, table, act, offset, grid, extra_tokens, heads_first,
    interleaved, rotary_dim, pairs,
):  # fmt: skip
    check_call("lrpe_rotate", x, theta, positions, cu_seqlens)
    return torch.empty_like(x)


@register_fake("rotate_backward")
def _(
    grad, x, theta, positions, cu_seqlens, table, act, offset, grid, extra_tokens, heads_first,
    interleaved, rotary_dim, pairs, dx, dtheta,
):  # fmt: skip
    check_call("lrpe_rotate", grad, theta, positions, cu_seqlens)
    like = grad if x is None else x
    return (
        torch.empty_like(like) if dx else grad.new_empty([0]),
        torch.empty_like(theta) if dtheta else theta.new_empty([0]),
    )
