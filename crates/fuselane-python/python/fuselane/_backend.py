"""Which library an argument belongs to.

PyTorch is not imported for users who do not use it: `Tensor` is its tensor class once somebody else
has imported it, and until then a class that nothing is an instance of.
"""

from __future__ import annotations

import sys
from typing import Any


class _Nothing:
    pass


Tensor: Any = _Nothing

#: Our operators on its tensors, from then on.
torch: Any = None


def is_tensor(x: object) -> bool:
    """Whether x is a tensor of PyTorch, which is set up for our operators if need be."""
    if isinstance(x, Tensor):
        return True
    return Tensor is _Nothing and "torch" in sys.modules and load() and isinstance(x, Tensor)


def shape_of(x: Any) -> Any:
    """The shape of a tensor or array; None if it is neither."""
    # Tracing does not like a look for what may not be there.
    return x.shape if isinstance(x, Tensor) else getattr(x, "shape", None)


def load() -> bool:
    """Defines the operators in PyTorch, if it is there."""
    global Tensor, torch
    theirs: Any = sys.modules.get("torch")
    # It may be half imported, by another thread or by an import that failed.
    if not hasattr(theirs, "Tensor") or not hasattr(theirs, "library"):
        return False
    from . import _torch

    torch = _torch
    Tensor = theirs.Tensor
    return True
