"""Normalization over the last dimension, and its presets."""

from __future__ import annotations

import math
from typing import Any

from .. import _arrays, _backend
from .._names import ACTS, act_number, unknown

#: What stands for the activation of a gate where there is none.
_NO_GATE = ACTS["none"]


def normalize(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    gate: Any = None,
    gate_act: str = "sigmoid",
    gate_pos: str = "pre",
    c: float = 1.0,
    eps: float = 1e-6,
    use_mean: bool = False,
    num_groups: int = 1,
    return_residual: bool = False,
    *,
    scale: float | None = None,
    one_plus_weight: bool = False,
    exact_residual: bool = False,
) -> Any:
    """Normalizes the last dimension, in one pass over memory, with what often stands around it.

    Over the last dimension in ``num_groups`` groups of e features::

        p = x  [+ residual]  [* g(gate)   (gate_pos "pre")]
        q = p                      or  p - mean(p)                                (use_mean)
        o = scale * q / sqrt(mean(q^2) + eps)
        o = o  [* weight | * (1 + weight)]  [+ bias]  [* g(gate)   (gate_pos "post")]

    where ``scale = c / sqrt(e)`` (so that a row has length c), unless ``scale`` itself is given.

    Args:
        x: A tensor (..., d), its last dimension contiguous.
        weight: d numbers, of any float dtype.
        bias: d numbers, of any float dtype.
        residual: Added to x first; shape and dtype of x.
        gate: Shape and dtype of x.
        gate_act: The activation g of the gate.
        gate_pos: ``"pre"`` or ``"post"`` the normalization.
        c: The length of a normalized row.
        eps: Added to the mean square.
        use_mean: Subtracts the mean first.
        num_groups: How many groups; it divides d.
        return_residual: Whether to return ``x + residual`` too.
        scale: Instead of c; 1 gives rows with a mean square of 1.
        one_plus_weight: Multiplies by 1 + weight, as Gemma does.
        exact_residual: Has the backward read x and the residual again. Otherwise it reads the returned
            ``x + residual``, which is rounded to the dtype of x; that takes less time and memory.

    Returns:
        A tensor of the shape and dtype of x; with ``return_residual``, a pair of it and
        ``x + residual`` (x, if there is no residual).

    Example:
        >>> import torch, fuselane
        >>> fuselane.normalize(torch.tensor([[3.0, 4.0]]), eps=0.0)
        tensor([[0.6000, 0.8000]])
    """
    if gate_pos not in ("pre", "post"):
        unknown("normalize", "gate_pos", gate_pos, ["pre", "post"])
    if scale is None:
        # Groups that do not divide are refused by the operator.
        shape = _backend.shape_of(x) or (1,)
        scale = c / math.sqrt(max(shape[-1] // max(num_groups, 1), 1))
    options = (
        act_number("normalize", "gate_act", gate_act),
        gate_pos == "post",
        one_plus_weight,
        scale,
        eps,
        use_mean,
        num_groups,
    )
    return run(x, weight, bias, residual, gate, options, return_residual, exact_residual)


def options_of(
    eps: float, use_mean: bool = False, num_groups: int = 1, one_plus_weight: bool = False
) -> tuple[Any, ...]:
    """The options of a norm without a gate that scales to a mean square of 1, in the order of the
    operator's schema."""
    return _NO_GATE, False, one_plus_weight, 1.0, eps, use_mean, num_groups


def srms_norm(
    x: Any,
    residual: Any = None,
    *,
    eps: float = 1e-6,
    return_residual: bool = False,
    exact_residual: bool = False,
) -> Any:
    """``x / sqrt(mean(x^2) + eps)``: an RMS norm without parameters.

    Args:
        x: A tensor (..., d).
        residual: Added to x first.
        eps: Added to the mean square.
        return_residual: Whether to return ``x + residual`` too.
        exact_residual: See :func:`normalize`.

    Example:
        >>> import torch, fuselane
        >>> fuselane.srms_norm(torch.tensor([2.0, -2.0]), eps=0.0)
        tensor([ 1., -1.])
    """
    options = options_of(eps)
    return run(x, None, None, residual, None, options, return_residual, exact_residual)


def rms_norm(
    x: Any,
    weight: Any = None,
    residual: Any = None,
    *,
    eps: float = 1e-6,
    one_plus_weight: bool = False,
    return_residual: bool = False,
    exact_residual: bool = False,
) -> Any:
    """``weight * x / sqrt(mean(x^2) + eps)``.

    Args:
        x: A tensor (..., d).
        weight: d numbers, of any float dtype.
        residual: Added to x first.
        eps: Added to the mean square.
        one_plus_weight: Multiplies by 1 + weight, as Gemma does.
        return_residual: Whether to return ``x + residual`` too.
        exact_residual: See :func:`normalize`.

    Example:
        >>> import torch, fuselane
        >>> fuselane.rms_norm(torch.tensor([2.0, -2.0]), torch.tensor([1.0, 3.0]), eps=0.0)
        tensor([ 1., -3.])
    """
    options = options_of(eps, one_plus_weight=one_plus_weight)
    return run(x, weight, None, residual, None, options, return_residual, exact_residual)


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    *,
    eps: float = 1e-5,
    return_residual: bool = False,
    exact_residual: bool = False,
) -> Any:
    """``weight * (x - mean(x)) / sqrt(var(x) + eps) + bias``.

    Args:
        x: A tensor (..., d).
        weight: d numbers, of any float dtype.
        bias: d numbers, of any float dtype.
        residual: Added to x first.
        eps: Added to the variance.
        return_residual: Whether to return ``x + residual`` too.
        exact_residual: See :func:`normalize`.

    Example:
        >>> import torch, fuselane
        >>> fuselane.layer_norm(torch.tensor([5.0, 9.0]), eps=0.0)
        tensor([-1.,  1.])
    """
    options = options_of(eps, use_mean=True)
    return run(x, weight, bias, residual, None, options, return_residual, exact_residual)


def group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    use_mean: bool = True,
) -> Any:
    """A layer norm (or an RMS norm, without ``use_mean``) of each group of the last dimension.

    The channels are the last dimension, as in transformers, and not the second, as in convolutions;
    a group is normalized for each token by itself.

    Args:
        x: A tensor (..., d).
        num_groups: How many groups; it divides d.
        weight: d numbers, of any float dtype.
        bias: d numbers, of any float dtype.
        eps: Added to the variance.
        use_mean: Subtracts the mean of a group first.

    Example:
        >>> import torch, fuselane
        >>> fuselane.group_norm(torch.tensor([1.0, 3.0, 10.0, 30.0]), 2, eps=0.0)
        tensor([-1.,  1., -1.,  1.])
    """
    return run(x, weight, bias, None, None, options_of(eps, use_mean, num_groups), False)


def run(
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    gate: Any,
    options: tuple[Any, ...],
    return_residual: bool,
    exact_residual: bool = False,
) -> Any:
    """With the options in the order of the operator's schema."""
    if isinstance(x, _backend.Tensor) or _backend.is_tensor(x):
        return _backend.torch.normalize(
            x, weight, bias, residual, gate, options, return_residual, exact_residual
        )
    arguments = [x, weight, bias, residual, gate, *options]
    if not return_residual:
        return _arrays.call("normalize", "normalize", arguments, x)[0]
    keep_sum = residual is not None
    o, total, *_ = _arrays.call("normalize", "normalize_keeping", [*arguments, keep_sum], x)
    return o, total if keep_sum else x
