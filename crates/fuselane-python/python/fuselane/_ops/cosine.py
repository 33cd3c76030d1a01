"""Cosine position encoding with a fused activation."""

from __future__ import annotations

from typing import Any

from .. import _arrays, _backend
from .angles import arguments_of, frequencies_of


def lrpe_cosine(
    x: Any,
    theta: Any,
    shape: Any = None,
    l: int = 0,  # noqa: E741: the name of the published tables
    act: str = "none",
    dim: int | None = None,
    *,
    offset: int = 0,
    positions: Any = None,
    cu_seqlens: Any = None,
    layout: str = "bhnd",
) -> Any:
    """``[act(x) * cos A, act(x) * sin A]`` with the angles A of each token.

    A token at position t has the angles ``t * theta``; one at (s1, ..., sm) on a grid has those of each
    axis one after the other, ``concat(s1 * theta, ..., sm * theta)``, cut to the features.

    Args:
        x: A tensor (batch, heads, tokens, features), or as ``layout`` says; its last dimension
            contiguous.
        theta: Frequencies, (heads, e), (1, e), (heads, 1) or (e), with e at least the features
            divided by the axes; or an :class:`AngleTable` made of them.
        shape: The grid that tokens stand on, the last axis fastest; without it they stand in a
            sequence.
        l: So many first tokens have angle 0 (class or condition tokens).
        act: An elementwise activation, or ``"softmax"``.
        dim: The dimension of a softmax: the features' (-1) or the tokens' (-2, or -3 for bnhd).
        offset: The position of the first token of a sequence.
        positions: Integers, one for each token (tokens) or (batch, tokens), instead of offset.
        cu_seqlens: Ends of packed sequences: integers from 0 to the number of tokens.
        layout: ``"bhnd"`` or ``"bnhd"``.

    Returns:
        A tensor of the dtype of x, with twice as many features.

    Example:
        >>> import torch, fuselane
        >>> x = torch.ones(1, 1, 2, 1)
        >>> fuselane.lrpe_cosine(x, torch.tensor([[0.5]]))[0, 0]
        tensor([[1.0000, 0.0000],
                [0.8776, 0.4794]])
    """
    placed = arguments_of(
        "lrpe_cosine", x, theta, act, dim, offset, shape, l, positions, cu_seqlens, layout
    )
    if isinstance(x, _backend.Tensor) or _backend.is_tensor(x):
        return _backend.torch.cosine(x, theta, placed)
    frequencies = frequencies_of(theta, x)
    return _arrays.call("lrpe_cosine", "cosine", [x, frequencies, *placed], x)[0]
