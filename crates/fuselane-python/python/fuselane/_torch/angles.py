"""What rotate and cosine share."""

from __future__ import annotations

from typing import Any

import torch

from ..theta import AngleTable
from .errors import check, check_float, translated
from .layout import rows

_grad_enabled = torch.is_grad_enabled


def encode(
    function: Any, operator: Any, name: str, x: Any, theta: Any, placed: Any, options: Any
) -> Any:
    """Runs an encoding: its operator, or its `autograd.Function` where a gradient is needed."""
    positions, cu_seqlens, *rest = placed
    options = (*rest, *options)  # those of the operator, from its table on
    try:
        table = isinstance(theta, AngleTable)
        frequencies = _frequencies(theta.theta if table else theta, x)
        learned = frequencies.requires_grad and not table
        if (x.requires_grad or learned) and _grad_enabled():
            # The table has to live until the backward.
            owner = theta if table else None
            return function.apply(x, frequencies, positions, cu_seqlens, options, owner)
        return operator(x, frequencies, positions, cu_seqlens, *options)
    except (RuntimeError, AttributeError) as error:
        tensors = {"x": x, "positions": positions, "cu_seqlens": cu_seqlens}
        if not isinstance(theta, AngleTable):
            tensors["theta"] = theta
        raise translated(error, name, **tensors) from None


def _frequencies(theta: Any, x: Any) -> Any:
    """As a tensor with a row for each head, or one for all."""
    if not isinstance(theta, torch.Tensor):
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        theta = torch.as_tensor(theta, dtype=dtype)
    return theta if theta.dim() != 1 else theta[None]


def forward(
    operator: Any, ctx: Any, x: Any, theta: Any, positions: Any, ends: Any, options: Any, owner: Any
) -> Any:
    """The forward of an encoding's `autograd.Function`."""
    needs_x, needs_theta = ctx.needs_input_grad[:2]
    needs_theta = needs_theta and options[0] == 0
    # Without an activation, the gradient of x does not depend on x.
    kept = x if options[1] != 0 or needs_theta else None
    ctx.save_for_backward(kept, theta, positions, ends)
    ctx.options, ctx.owner = options, owner
    ctx.needed = (needs_x, needs_theta)
    return operator(x, theta, positions, ends, *options)


def backward(operator: Any, ctx: Any, grad: Any) -> Any:
    """Its backward."""
    x, theta, positions, ends = ctx.saved_tensors
    needs_x, needs_theta = ctx.needed
    dx, dtheta = operator(
        rows(grad), x, theta, positions, ends, *ctx.options, needs_x, needs_theta
    )
    return dx if needs_x else None, dtheta if needs_theta else None, None, None, None, None


def check_call(name: str, x: Any, theta: Any, positions: Any, cu_seqlens: Any) -> None:
    check_float(name, x=x, theta=theta)
    check(name, positions=positions, cu_seqlens=cu_seqlens)
    if x.dim() != 4:
        raise ValueError(f"{name}: x has shape {[*x.shape]}, expected 4 dimensions")
    if theta.dim() != 2:
        raise ValueError(f"{name}: theta has shape {[*theta.shape]}, expected 2 dimensions")

