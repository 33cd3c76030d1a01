"""Rotary position encoding with a fused activation."""

from __future__ import annotations

from typing import Any

from .. import _arrays, _backend
from .angles import arguments_of, frequencies_of


def lrpe_rotate(
    x: Any,
    theta: Any,
    offset: int = 0,
    act: str = "none",
    dim: int | None = None,
    *,
    shape: Any = None,
    l: int = 0,  # noqa: E741: the name of the published tables
    positions: Any = None,
    cu_seqlens: Any = None,
    layout: str = "bnhd",
    interleaved: bool = False,
    rotary_dim: bool = False,
    pairs: int | None = None,
) -> Any:
    """Turns each pair of features of ``act(x)`` by the angle of its token: position times theta.

    ::

        o1 = x1 cos a - x2 sin a        pairs: (k, k + d/2), or (2k, 2k + 1) if interleaved
        o2 = x1 sin a + x2 cos a

    Angles are formed in float32, whatever the dtype of x.

    Args:
        x: A tensor (batch, tokens, heads, features), or as ``layout`` says; its last dimension
            contiguous.
        theta: Frequencies, (heads, e), (1, e), (heads, 1) or (e), with e at most half of the
            features; or an :class:`AngleTable` made of them.
        offset: The position of the first token (the length of a cache).
        act: An elementwise activation, or ``"softmax"``.
        dim: The dimension of a softmax: the features' (-1) or the tokens' (-3, or -2 for bhnd).
        shape: Tokens stand on a grid of this shape, the last axis fastest, and the pairs are split
            among its axes.
        l: So many first tokens are not turned.
        positions: Integers, one for each token, (tokens), (1, tokens) or (batch, tokens), instead of
            offset.
        cu_seqlens: Ends of packed sequences: integers from 0 to the number of tokens. Positions start
            anew in each, and a softmax over tokens stays within each.
        layout: ``"bnhd"`` or ``"bhnd"``.
        interleaved: Pairs neighbours.
        rotary_dim: Where fewer than all pairs turn, pairs the first 2e features among themselves (as
            NeoX does), instead of turning the first e of the d/2 pairs.
        pairs: How many pairs turn; by default as many as theta is for.

    Returns:
        A tensor of the shape and dtype of x.

    Example:
        >>> import math, torch, fuselane
        >>> x = torch.tensor([1.0, 0.0, 1.0, 0.0]).reshape(1, 2, 1, 2)
        >>> fuselane.lrpe_rotate(x, torch.tensor([math.pi / 2])).round().flatten().tolist()
        [1.0, 0.0, -0.0, 1.0]
    """
    placed = arguments_of(
        "lrpe_rotate", x, theta, act, dim, offset, shape, l, positions, cu_seqlens, layout
    )
    if pairs is not None and pairs < 0:
        raise ValueError(f"lrpe_rotate: pairs is {pairs}, expected at least 0")
    options = (interleaved, rotary_dim, -1 if pairs is None else pairs)
    if isinstance(x, _backend.Tensor) or _backend.is_tensor(x):
        return _backend.torch.rotate(x, theta, placed, options)
    frequencies = frequencies_of(theta, x)
    return _arrays.call("lrpe_rotate", "rotate", [x, frequencies, *placed, *options], x)[0]
