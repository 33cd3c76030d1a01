"""What rotate and cosine share: their arguments, in the order of the operators' schemas."""

from __future__ import annotations

from typing import Any

from .. import _backend
from .._names import ACTS, SOFTMAX_FEATURES, SOFTMAX_SEQUENCE, unknown
from ..theta import AngleTable

#: (positions, cu_seqlens, table, act, offset, grid, extra_tokens, heads_first)
Placed = tuple[Any, Any, int, int, int, list[int], int, bool]


def arguments_of(
    operator: str,
    x: Any,
    theta: Any,
    act: str,
    dim: int | None,
    offset: int,
    shape: Any,
    extra_tokens: int,
    positions: Any,
    cu_seqlens: Any,
    layout: str,
) -> Placed:
    """The arguments after theta."""
    if layout not in ("bnhd", "bhnd"):
        unknown(operator, "layout", layout, ["bnhd", "bhnd"])
    heads_first = layout == "bhnd"
    table = theta.number if isinstance(theta, AngleTable) else 0
    size = _backend.shape_of(x)
    if size is not None and len(size) != 4:
        raise ValueError(f"{operator}: x has shape {tuple(size)}, expected 4 dimensions ({layout})")
    grid = [] if shape is None else [shape] if isinstance(shape, int) else list(shape)
    if grid and (positions is not None or cu_seqlens is not None):
        raise ValueError(f"{operator}: shape is given with positions or cu_seqlens, expected one of them")
    if positions is not None:
        if not isinstance(offset, int) or offset != 0:
            raise ValueError(f"{operator}: offset is {offset} with positions, expected one of them")
        spots = _backend.shape_of(positions)
        if spots is not None and len(spots) == 2 and spots[0] == 1:
            positions = positions[0]  # the same for every batch entry
    number = _act_number(operator, act, dim, heads_first)
    return positions, cu_seqlens, table, number, offset, grid, extra_tokens, heads_first


def frequencies_of(theta: Any, x: Any) -> Any:
    """Theta for arrays that are no tensors: with a row for each head, or one for all."""
    theta = theta.theta if isinstance(theta, AngleTable) else theta
    if isinstance(theta, (list, tuple)):
        import numpy

        theta = numpy.asarray(theta, dtype="float32")
    size = _backend.shape_of(theta)
    return theta[None] if size is not None and len(size) == 1 else theta


def _act_number(operator: str, act: str, dim: int | None, heads_first: bool) -> int:
    if act != "softmax":
        if act not in ACTS:
            unknown(operator, "act", act, [*ACTS, "softmax"])
        if dim is not None:
            raise ValueError(f"{operator}: dim is {dim} with act {act!r}, expected softmax, or no dim")
        return ACTS[act]
    tokens = 2 if heads_first else 1
    if dim in (-1, 3):
        return SOFTMAX_FEATURES
    if dim in (tokens, tokens - 4):
        return SOFTMAX_SEQUENCE
    raise ValueError(
        f"{operator}: dim is {dim}, expected -1 (features) or {tokens - 4} (tokens) for a softmax"
    )
