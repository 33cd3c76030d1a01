"""Cosine encoding with a fused activation."""

from __future__ import annotations

from typing import Any

import torch

from .angles import Encoding, check_call, encode, once
from .register import operator, register_fake


def cosine(x: Any, theta: Any, placed: Any) -> Any:
    return encode(_Cosine, "lrpe_cosine", x, theta, placed, ())


class _Cosine(Encoding):
    forward_operator = operator("cosine")
    backward_operator = operator("cosine_backward")

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return _Cosine.run(ctx, *arguments)

    @staticmethod
    @once("lrpe_cosine")
    def backward(ctx: Any, grad: Any) -> Any:
        return _Cosine.pull_back(ctx, grad)


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
