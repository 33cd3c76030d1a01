"""Elementwise activations."""

from __future__ import annotations

from typing import Any

from .. import _arrays, _backend
from .._names import ACTS, act_number, unknown
from .softmax import softmax


def act(x: Any, act: str = "silu", dim: int | None = None) -> Any:
    """Applies an activation.

    With ``dim``, a softmax over that dimension, whose name is ``"softmax"`` (as in the published
    tables); else one of ``none``, ``relu``, ``sigmoid``, ``silu``, ``tanh``, ``gelu``,
    ``gelu_tanh``, ``softplus``, ``relu_squared``, elementwise.

    Args:
        x: A tensor of any shape. One dimension has to be contiguous.
        act: The name of the activation.
        dim: The dimension of a softmax; negative ones count from the last.

    Returns:
        A tensor of the shape and dtype of x; for ``none`` x itself.

    Example:
        >>> import torch, fuselane
        >>> fuselane.act(torch.tensor([-1.0, 2.0]), "relu")
        tensor([0., 2.])
        >>> fuselane.act(torch.tensor([[0.0, 0.0]]), "softmax", dim=-1)
        tensor([[0.5000, 0.5000]])
    """
    number = ACTS.get(act) if dim is None else None
    if not number:
        return x if number == 0 else _softmax(x, act, dim)
    if isinstance(x, _backend.Tensor) or _backend.is_tensor(x):
        return _backend.torch.act(x, number)
    return _arrays.call("act", "act", [x, number], x)[0]


def _softmax(x: Any, act: str, dim: int | None) -> Any:
    """What is no elementwise activation has to be a softmax, or an error."""
    if dim is None and act != "softmax":
        act_number("act", "act", act)
    if act not in ("softmax", "silu"):  # silu is the default, not a choice
        unknown("act", "act", f"{act}, with dim", ["softmax"])
    if dim is None:
        raise ValueError("act: dim is missing, expected the dimension of the softmax")
    return softmax(x, dim)
