"""Softmax and its logarithm."""

from __future__ import annotations

from typing import Any

from .. import _arrays, _backend


def softmax(x: Any, dim: int = -1, *, zero_masked_rows: bool = False) -> Any:
    """The softmax over one dimension.

    Args:
        x: A tensor of any shape.
        dim: The dimension; negative ones count from the last. One other than the last is as good: it is
            not transposed.
        zero_masked_rows: A row of nothing but minus infinity gives zeros, and zero gradients,
            instead of NaN.

    Returns:
        A tensor of the shape and dtype of x.

    Example:
        >>> import torch, fuselane
        >>> fuselane.softmax(torch.zeros(2, 4), -1)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return _softmax(x, dim, False, zero_masked_rows)


def log_softmax(x: Any, dim: int = -1, *, zero_masked_rows: bool = False) -> Any:
    """The logarithm of the softmax over one dimension, right also where that would be 0.

    Args and result are those of :func:`softmax`; with ``zero_masked_rows``, a row of nothing but minus
    infinity stays so.

    Example:
        >>> import torch, fuselane
        >>> fuselane.log_softmax(torch.tensor([1000.0, 0.0]), 0)
        tensor([    0., -1000.])
    """
    return _softmax(x, dim, True, zero_masked_rows)


def _softmax(x: Any, dim: int, log: bool, zero_masked_rows: bool) -> Any:
    if isinstance(x, _backend.Tensor) or _backend.is_tensor(x):
        return _backend.torch.softmax(x, dim, log, zero_masked_rows)
    return _arrays.call("softmax", "softmax", [x, dim, log, zero_masked_rows], x)[0]
