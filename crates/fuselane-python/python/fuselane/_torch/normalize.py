"""Normalization, with residual, gate, weight and bias fused in."""

from __future__ import annotations

from typing import Any

import torch

from .errors import check_float, translated
from .layout import rows
from .once import once_differentiable
from .register import operator, register_fake

_forward = operator("normalize")
_forward_keeping = operator("normalize_keeping")
_backward = operator("normalize_backward")
_grad_enabled = torch.is_grad_enabled


def normalize(
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    gate: Any,
    options: tuple[Any, ...],
    return_residual: bool,
    exact_residual: bool,
) -> Any:
    """`options` are gate_act, gate_post, one_plus_weight, scale, eps, center and groups."""
    try:
        if (residual is not None or gate is not None) and torch.is_autocast_enabled("cpu"):
            x, residual, gate = _promoted(x, residual, gate)
        keep_sum = return_residual and residual is not None
        if _grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (residual is not None and residual.requires_grad)
            or (gate is not None and gate.requires_grad)
        ):
            o = _Normalize.apply(x, weight, bias, residual, gate, options, keep_sum, exact_residual)
        elif keep_sum:
            o = _forward_keeping(x, weight, bias, residual, gate, *options, True)[:2]
        else:
            o = _forward(x, weight, bias, residual, gate, *options)
    except (RuntimeError, AttributeError) as error:
        tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "gate": gate}
        raise translated(error, "normalize", **tensors) from None
    return (o, x) if return_residual and not keep_sum else o


def _promoted(*tensors: Any) -> list[Any]:
    """Within autocast, a stream of residuals in float32 may meet activations of 16 bits: all take the
    wider type."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        x, weight, bias, residual, gate, options, keep_sum, exact_residual = arguments
        o, total, rstd, mean = _forward_keeping(x, weight, bias, residual, gate, *options, keep_sum)
        # The sum is all that the backward needs to know of x and the residual, but it is rounded.
        kept = (total, None) if keep_sum and not exact_residual else (x, residual)
        ctx.save_for_backward(kept[0], weight, bias, kept[1], gate, rstd, mean if options[5] else None)
        ctx.options = options
        ctx.set_materialize_grads(False)
        if keep_sum and not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(total)
        return (o, total) if keep_sum else o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, grad_sum: Any = None) -> Any:
        x, weight, bias, residual, gate, rstd, mean = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual, need_gate = ctx.needs_input_grad[:5]
        if grad is None:  # only the sum was used
            return grad_sum, None, None, grad_sum, None, None, None, None
        if grad_sum is not None:
            grad_sum = rows(grad_sum)
        dx, dgate, dweight, dbias = _backward(
            rows(grad),
            grad_sum,
            x,
            weight,
            bias,
            residual,
            gate,
            rstd,
            mean,
            *ctx.options,
            need_x or need_residual,
            need_gate,
            need_weight,
            need_bias,
        )
        return (
            dx if need_x else None,
            dweight if need_weight else None,
            dbias if need_bias else None,
            dx if need_residual else None,
            dgate if need_gate else None,
            None,
            None,
            None,
        )


def _check(x: Any, weight: Any, bias: Any, residual: Any, gate: Any, groups: int) -> None:
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "gate": gate}
    check_float("normalize", **tensors)
    if x.dim() == 0:
        raise ValueError("normalize: x is a scalar, expected a dimension")
    for name in ("weight", "bias"):
        tensor = tensors[name]
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != x.shape[-1]):
            raise ValueError(
                f"normalize: {name} has shape {[*tensor.shape]}, expected [{x.shape[-1]}] "
                "(last dimension of x)"
            )
    for name in ("residual", "gate"):
        tensor = tensors[name]
        if tensor is None:
            continue
        if tensor.shape != x.shape:
            raise ValueError(
                f"normalize: {name} has shape {[*tensor.shape]}, expected {[*x.shape]} (shape of x)"
            )
        if tensor.dtype != x.dtype:
            raise TypeError(
                f"normalize: {name} has dtype {tensor.dtype}, expected {x.dtype} (dtype of x)"
            )


def _real(x: Any) -> Any:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@register_fake("normalize")
def _(x, weight, bias, residual, gate, gate_act, gate_post, one_plus_weight, scale, eps, center, groups):
    _check(x, weight, bias, residual, gate, groups)
    return torch.empty_like(x)


@register_fake("normalize_keeping")
def _(
    x, weight, bias, residual, gate,
    gate_act, gate_post, one_plus_weight, scale, eps, center, groups, keep_sum,
):  # fmt: skip
    _check(x, weight, bias, residual, gate, groups)
    none, real, kept = x.new_empty([0]), _real(x), [*x.shape[:-1], groups]
    return (
        torch.empty_like(x),
        torch.empty_like(x) if keep_sum else none,
        x.new_empty(kept, dtype=real),
        x.new_empty(kept if center else [0], dtype=real),
    )


@register_fake("normalize_backward")
def _(
    grad, grad_sum, x, weight, bias, residual, gate, rstd, mean,
    gate_act, gate_post, one_plus_weight, scale, eps, center, groups, dx, dgate, dweight, dbias,
):  # fmt: skip
    _check(x, weight, bias, residual, gate, groups)
    wanted = [(dx, x), (dgate, gate), (dweight, weight), (dbias, bias)]
    return tuple(
        torch.empty_like(of) if want and of is not None else x.new_empty([0]) for want, of in wanted
    )
