"""Elementwise activations."""

from __future__ import annotations

from typing import Any

import torch

from .. import _native
from .errors import check_float, translated
from .layout import like
from .once import once_differentiable
from .register import NUMBERS, direct, dispatched, operator, register_fake

_backward = operator("act_backward")
_dispatched = dispatched("act")
_grad_enabled = torch.is_grad_enabled
_ACT = NUMBERS["act"]

#: Activations whose gradient is taken from their output.
_FROM_OUTPUT = frozenset(_native.acts_from_output())


def act(x: Any, number: int) -> Any:
    try:
        if x.requires_grad and _grad_enabled():
            return _Act.apply(x, number)
        o = direct(_ACT, x, number)  # without a frame around it, in the smallest operator
        return _dispatched(x, number) if o is None else o
    except RuntimeError as error:
        raise translated(error, "act", x=x) from None


class _Act(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, number: int) -> Any:
        o = direct(_ACT, x, number)
        if o is None:
            o = _dispatched(x, number)
        # As PyTorch does: without an exponential in the backward, and without keeping x.
        ctx.save_for_backward(o if number in _FROM_OUTPUT else x)
        ctx.number = number
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        number = ctx.number
        return _backward(like(grad, x), x, number, number in _FROM_OUTPUT), None


@register_fake("act")
def _(x: Any, act: int) -> Any:
    check_float("act", x=x)
    return torch.empty_like(x)


@register_fake("act_backward")
def _(grad: Any, x: Any, act: int, from_output: bool) -> Any:
    check_float("act", grad=grad, x=x)
    return torch.empty_like(x)
