"""Fused transformer operators on the CPU, forward and backward, at memory speed.

Functions take tensors of PyTorch (with autograd and ``torch.compile``), arrays of NumPy, and those
of every library that speaks DLPack (without gradients), in float32, float16, bfloat16 and float64,
and give back their own kind:

================================  ===============================================================
:func:`act`                       relu, sigmoid, silu, gelu and others
:func:`softmax`                   and :func:`log_softmax`, over any dimension
:func:`normalize`                 with the presets :func:`rms_norm`, :func:`srms_norm`,
                                  :func:`layer_norm`, :func:`group_norm`; residual, gate, weight
                                  and bias fused in
:func:`lrpe_rotate`               rotary position encoding, with an activation fused in
:func:`lrpe_cosine`               cosine position encoding, with an activation fused in
================================  ===============================================================

:mod:`fuselane.nn` has modules, :mod:`fuselane.theta` frequencies, :mod:`fuselane.pool` the memory of
results, and :mod:`fuselane.transformers` swaps the layers of Hugging Face models.

    >>> import torch, fuselane
    >>> x = torch.randn(4, 1024, dtype=torch.bfloat16, requires_grad=True)
    >>> o = fuselane.rms_norm(x, torch.ones(1024))
    >>> o.sum().backward()
    >>> x.grad.shape
    torch.Size([4, 1024])
"""

from __future__ import annotations

import os as _os
import sys as _sys

from . import _backend, _native, pool, theta
from ._ops.act import act
from ._ops.cosine import lrpe_cosine
from ._ops.normalize import group_norm, layer_norm, normalize, rms_norm, srms_norm
from ._ops.rotate import lrpe_rotate
from ._ops.softmax import log_softmax, softmax
from .theta import AngleTable

__version__: str = _native.VERSION

__all__ = [
    "AngleTable",
    "act",
    "get_num_threads",
    "group_norm",
    "layer_norm",
    "log_softmax",
    "lrpe_cosine",
    "lrpe_rotate",
    "normalize",
    "pool",
    "rms_norm",
    "set_num_threads",
    "softmax",
    "srms_norm",
    "theta",
]


def get_num_threads() -> int:
    """How many threads a large call uses.

    That is what :func:`set_num_threads` said last; before, ``FUSELANE_NUM_THREADS`` of the
    environment, or as many as PyTorch uses at the time, or all that the process may have.

    Example:
        >>> import fuselane
        >>> fuselane.get_num_threads() > 0
        True
    """
    return _native.num_threads()


def set_num_threads(n: int) -> None:
    """Sets how many threads a large call uses. Results do not depend on it.

    Example:
        >>> import fuselane
        >>> n = fuselane.get_num_threads()
        >>> fuselane.set_num_threads(1)
        >>> fuselane.get_num_threads()
        1
        >>> fuselane.set_num_threads(n)
    """
    if n < 1:
        raise ValueError(f"set_num_threads: n is {n}, expected at least 1")
    _native.set_num_threads(n)


def __getattr__(name: str) -> object:
    # These need PyTorch, and are imported when they are first used.
    if name in ("nn", "transformers"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if hasattr(_os, "register_at_fork"):
    # A forked child has none of its parent's threads.
    _os.register_at_fork(after_in_child=_native.after_fork)

if "torch" in _sys.modules:
    _backend.load()
