"""The operators on PyTorch's tensors: one file each, with what tracing needs to know (shapes, dtypes
and strides of results) and the gradient.

Each operator is one of PyTorch's own dispatcher, so that `torch.compile`, `torch.export`, fake tensors
and profilers see it. An `autograd.Function` is put around it where a gradient is needed, and only
there, since that costs more than the call itself.
"""

from . import register  # isort: skip: the others look the operators up
from .act import act
from .cosine import cosine
from .normalize import normalize
from .rotate import rotate
from .softmax import softmax

__all__ = ["act", "cosine", "normalize", "register", "rotate", "softmax"]
