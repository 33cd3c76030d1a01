"""Frequencies for :func:`fuselane.lrpe_rotate` and :func:`fuselane.lrpe_cosine`, and tables of angles
made of them."""

from __future__ import annotations

from typing import Any, Sequence

from . import _native


def frequencies(
    dim: int,
    base: float = 10000.0,
    scaling: str = "none",
    factor: float = 1.0,
    original_max_position: int = 8192,
    *,
    low: float | None = None,
    high: float | None = None,
) -> list[float]:
    """``base^(-2k/dim)`` for k below dim / 2, scaled for longer sequences.

    Args:
        dim: How many features rotate; even.
        base: What configurations call ``rope_theta``.
        scaling: ``none``, ``linear``, ``ntk``, ``llama3`` or ``yarn``.
        factor: How much longer sequences are than those of the training.
        original_max_position: The length of those, for llama3 and yarn.
        low: ``low_freq_factor`` of llama3 (1), ``beta_slow`` of yarn (1).
        high: ``high_freq_factor`` of llama3 (4), ``beta_fast`` of yarn (32).

    Example:
        >>> import fuselane
        >>> fuselane.theta.frequencies(4)
        [1.0, 0.01]
    """
    return _native.theta(dim, base, scaling, factor, original_max_position, low, high)[0]


def attention_factor(
    dim: int,
    base: float = 10000.0,
    scaling: str = "none",
    factor: float = 1.0,
    original_max_position: int = 8192,
) -> float:
    """What queries and keys are to be multiplied by besides: 1, but for yarn.

    Example:
        >>> import fuselane
        >>> fuselane.theta.attention_factor(128, scaling="yarn", factor=4.0)
        1.138629436111989
    """
    return _native.theta(dim, base, scaling, factor, original_max_position, None, None)[1]


class AngleTable:
    """Sines and cosines of all angles of a sequence or grid, made once and shared between queries and
    keys, layers and steps. It goes where theta would; theta then gets no gradient.

    Args:
        theta: Frequencies: (heads, e) or (e), a tensor, an array or lists.
        count: Angles per token: the pairs that turn, for rotate; the features, for cosine.
        length: Positions ``start`` to ``start + length``.
        start: The first position.
        shape: A grid, instead of a length.
        wide: For float64 activations.

    Example:
        >>> import torch, fuselane
        >>> theta = torch.tensor(fuselane.theta.frequencies(64))
        >>> table = fuselane.AngleTable(theta, count=32, length=1024)
        >>> x = torch.randn(1, 1024, 4, 64)
        >>> bool((fuselane.lrpe_rotate(x, table) == fuselane.lrpe_rotate(x, theta)).all())
        True
    """

    def __init__(
        self,
        theta: Any,
        count: int,
        length: int | None = None,
        *,
        start: int = 0,
        shape: Sequence[int] | None = None,
        wide: bool = False,
    ) -> None:
        if (length is None) == (shape is None):
            raise ValueError("AngleTable: expected either length or shape")
        if length is not None and length < 0:
            raise ValueError(f"AngleTable: length is {length}, expected at least 0")
        values = theta.detach() if hasattr(theta, "detach") else theta
        values = values.tolist() if hasattr(values, "tolist") else [*values]
        rows = values if values and isinstance(values[0], (list, tuple)) else [values]
        self.theta = theta
        self._arguments = (count, length, start, None if shape is None else [*shape], wide)
        end = start + (length or 0)
        self._table = _native.Table(rows, count, start, end, [*(shape or ())], wide)
        #: What stands for it in operators.
        self.number: int = self._table.number

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return self._table.bytes

    def __repr__(self) -> str:
        count, length, start, shape, _ = self._arguments
        where = f"shape={shape}" if shape else f"start={start}, length={length}"
        return f"AngleTable(count={count}, {where}, nbytes={self.nbytes})"

    def __reduce__(self) -> Any:
        return _table, (self.theta, *self._arguments)


def _table(theta: Any, count: int, length: Any, start: int, shape: Any, wide: bool) -> AngleTable:
    return AngleTable(theta, count, length, start=start, shape=shape, wide=wide)
