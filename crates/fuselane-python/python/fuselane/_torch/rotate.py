"""Rotary encoding with a fused activation."""

from __future__ import annotations

from typing import Any

import torch

from .angles import Encoding, check_call, encode, once
from .register import operator, register_fake


def rotate(x: Any, theta: Any, placed: Any, options: Any) -> Any:
    return encode(_Rotate, "lrpe_rotate", x, theta, placed, options)


class _Rotate(Encoding):
    forward_operator = operator("rotate")
    backward_operator = operator("rotate_backward")

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return _Rotate.run(ctx, *arguments)

    @staticmethod
    @once("lrpe_rotate")
    def backward(ctx: Any, grad: Any) -> Any:
        return _Rotate.pull_back(ctx, grad)


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
