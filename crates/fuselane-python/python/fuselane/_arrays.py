"""NumPy arrays, and those of every library that speaks DLPack: without gradients, without copies, and
back as the kind that came."""

from __future__ import annotations

import sys
from operator import index
from typing import Any, Callable, NoReturn

from . import _native

_NUMPY_DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64")


def call(operator: str, name: str, arguments: list[Any], like: Any) -> list[Any]:
    """Runs an operator. Arguments that are arrays are described to it; results become arrays of the
    kind that `like` is. `operator` is the function's name, for errors."""
    if not _is_numpy(like) and not hasattr(like, "__dlpack__"):
        _refuse(operator, "x", like)
    kept: list[Any] = []  # what the descriptions point to
    parameters = _native.parameters(name)
    described = [
        _describe(operator, parameter, kind, argument, kept)
        for (parameter, kind), argument in zip(parameters, arguments)
    ]
    return [_like(block, like) for block in _native.call(name, described)]


def _describe(operator: str, name: str, kind: str, x: Any, kept: list[Any]) -> Any:
    """An argument as the compiled half takes it."""
    if kind in _NUMBERS:
        try:
            return _NUMBERS[kind](x)
        except (TypeError, ValueError):
            got = f"{operator}: {name} is a {type(x).__name__}"
            raise TypeError(f"{got}, expected {_EXPECTED[kind]}") from None
    if x is None and kind == "optional tensor":
        return None
    if _is_numpy(x):
        return _describe_numpy(operator, name, x, kept)
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        _refuse(operator, name, x)
    device = x.__dlpack_device__()
    if int(device[0]) != 1:
        raise ValueError(
            f"{operator}: {name} is on another device (DLPack's number {int(device[0])}), expected "
            "the CPU, the only one for now"
        )
    capsule = x.__dlpack__()
    kept.append(capsule)
    return _native.describe(capsule)


#: How numbers are taken: as Python's own, whatever library they come from.
_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "int": index,
    "float": float,
    "flag": bool,
    "ints": lambda x: [index(item) for item in x],
}
_EXPECTED = {"int": "a whole number", "float": "a number", "flag": "a bool", "ints": "whole numbers"}


def _refuse(operator: str, name: str, x: Any) -> NoReturn:
    raise TypeError(
        f"{operator}: {name} is a {type(x).__name__}, expected a PyTorch tensor, a NumPy array, or an "
        "array of a library that speaks DLPack"
    )


def _is_numpy(x: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, (numpy.ndarray, numpy.generic))


def _describe_numpy(
    operator: str, name: str, x: Any, kept: list[Any]
) -> tuple[int, str, Any, tuple[int, ...]]:
    import numpy

    x = numpy.asarray(x)
    size = x.dtype.itemsize
    if not x.dtype.isnative and x.dtype.name in _NUMPY_DTYPES:
        raise ValueError(
            f"{operator}: {name} has the other byte order ({x.dtype.str}), expected this machine's: "
            "call .astype(x.dtype.newbyteorder('=')) on it"
        )
    if not size or not x.flags.aligned or any(stride % size for stride in x.strides):
        raise ValueError(
            f"{operator}: {name} has strides of {x.strides} bytes, expected multiples of its "
            f"element size {size}, aligned to it: call .copy() on it"
        )
    kept.append(x)
    return x.ctypes.data, x.dtype.name, x.shape, tuple(stride // size for stride in x.strides)


def _like(block: Any, like: Any) -> Any:
    """Results as arrays of the kind that `like` is."""
    if _is_numpy(like):
        import numpy

        array = numpy.asarray(block)
        # NumPy gets bfloat16 as integers.
        return array.view(numpy.asarray(like).dtype) if block.dtype == "bfloat16" else array
    namespace = getattr(like, "__array_namespace__", None)
    if namespace is not None:
        library = namespace()
    else:
        library = sys.modules[type(like).__module__.partition(".")[0]]
    if not hasattr(library, "from_dlpack"):
        raise TypeError(f"{library.__name__} has no from_dlpack, which results come back through")
    return library.from_dlpack(block)
