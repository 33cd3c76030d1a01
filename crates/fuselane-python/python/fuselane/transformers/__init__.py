"""Swaps layers of Hugging Face transformers models on the CPU for fuselane's.

    >>> import torch, fuselane.transformers  # doctest: +SKIP
    >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
    >>> model = LlamaForCausalLM(LlamaConfig())  # doctest: +SKIP
    >>> model = fuselane.transformers.patch(model)  # doctest: +SKIP
    >>> fuselane.transformers.patched(model)  # doctest: +SKIP
    Swapped(rms_norm=65, rotary=1, activation=32)

RMS norms, rotary embeddings and the activations of gated MLPs are swapped, in models of Llama,
Mistral, Qwen2, Qwen3, Gemma, Gemma2 and Gemma3. Parameters, buffers and the names in a
``state_dict`` stay as they are, so optimizers and checkpoints do not notice. Layers that cannot be
swapped are left alone, and so is a swapped layer that later gets tensors of another device: it runs
the code that it had before.

``python -m fuselane.transformers`` measures the step time of a small model with and without.
"""

from __future__ import annotations

import functools
import importlib
import logging
import weakref
from typing import Any, Iterator, NamedTuple, TypeVar

import torch

from ._layers import FAMILIES, Activation, Fused, RmsNorm, Rotary, reason_to_skip, swap, swap_back

__all__ = ["Swapped", "patch", "patched", "unpatch"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: What `patch` was told to swap in instances of a class.
_OPTIONS: weakref.WeakKeyDictionary[type, dict[str, bool]] = weakref.WeakKeyDictionary()


class Swapped(NamedTuple):
    """How many layers of a model are swapped."""

    rms_norm: int
    rotary: int
    activation: int


def patch(
    model_or_class: _T, *, rms_norm: bool = True, rotary: bool = True, activation: bool = True
) -> _T:
    """Swaps layers of a model, or of every model that is made of a class from now on.

    To patch again changes nothing but what it adds. What was swapped, and what was left alone and
    why, is logged (level info, logger ``fuselane.transformers``); :func:`patched` counts it.

    Gradients of gradients are not supported by the swapped layers.

    Args:
        model_or_class: A model, such as one from ``AutoModelForCausalLM.from_pretrained``; or a
            class, such as ``LlamaForCausalLM``.
        rms_norm: Whether to swap RMS norms.
        rotary: Whether to swap rotary embeddings. Those whose frequencies change with the length of
            the input (dynamic, longrope) or that scale queries and keys (yarn) are left alone.
        activation: Whether to swap activations of gated MLPs.

    Returns:
        The model or class itself.

    Raises:
        ValueError: If there is nothing to swap.
        ImportError: If transformers is not installed.
    """
    _require_transformers()
    options = {"rms_norm": rms_norm, "rotary": rotary, "activation": activation}
    if isinstance(model_or_class, type):
        _patch_class(model_or_class, options)
    else:
        _patch_model(model_or_class, options)
        if not any(patched(model_or_class)):
            raise ValueError(
                f"patch: nothing to swap in {type(model_or_class).__name__}, "
                f"expected a model of {_families()} on the CPU"
            )
    return model_or_class


def unpatch(model_or_class: _T) -> _T:
    """Undoes :func:`patch`: a model computes what it did before, to the bit.

    For a class, models that are made from now on are not patched; those that were stay so.

    Returns:
        The model or class itself.
    """
    _require_transformers()
    if isinstance(model_or_class, type):
        _unpatch_class(model_or_class)
    else:
        for module in _modules(model_or_class, "unpatch"):
            if isinstance(module, Fused):
                swap_back(module)
    return model_or_class


def patched(model: Any) -> Swapped:
    """How many layers of a model are swapped now."""
    modules = [*_modules(model, "patched")]
    kinds = (RmsNorm, Rotary, Activation)
    return Swapped(*(sum(isinstance(module, kind) for module in modules) for kind in kinds))


def _patch_model(model: Any, options: dict[str, bool]) -> None:
    before = patched(model)
    left: list[str] = []
    for name, kind, module, parent in _candidates(model):
        if not options[kind]:
            continue
        reason = reason_to_skip(kind, module, parent)
        if reason is None:
            swap(kind, module)
        else:
            left.append(f"{name} ({reason})")
    now = patched(model)
    counts = ", ".join(f"{n - old} {kind}" for n, old, kind in zip(now, before, Swapped._fields))
    _log.info(
        "%s: swapped %s; left alone: %s", type(model).__name__, counts, ", ".join(left) or "nothing"
    )


def _candidates(model: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """(name, kind, module, parent) of all layers that look as if they could be swapped."""
    for path, parent in model.named_modules():
        for name, module in parent.named_children():
            if isinstance(module, Fused):
                continue
            class_name = type(module).__name__
            if name == "act_fn":
                kind = "activation"
            elif class_name.endswith("RMSNorm"):
                kind = "rms_norm"
            elif class_name.endswith("RotaryEmbedding"):
                kind = "rotary"
            else:
                continue
            yield f"{path}.{name}" if path else name, kind, module, parent


def _patch_class(cls: type, options: dict[str, bool]) -> None:
    if not issubclass(cls, torch.nn.Module):
        raise TypeError(f"patch: got the class {cls.__name__}, expected a model or a class of them")
    if not any(base.__module__ in FAMILIES for base in cls.__mro__):
        raise ValueError(
            f"patch: nothing to swap in {cls.__name__}, expected a class of {_families()}; "
            "of a model that holds one of these, patch the instance"
        )
    if cls.forward is torch.nn.Module.forward:
        raise ValueError(
            f"patch: {cls.__name__} is only a base of models, "
            "expected a class such as LlamaForCausalLM"
        )
    if cls in _OPTIONS:
        old = _OPTIONS[cls]
        _OPTIONS[cls] = {kind: old[kind] or options[kind] for kind in options}
        return
    _OPTIONS[cls] = options
    if not hasattr(vars(cls).get("__init__"), "_fuselane_owner"):
        _wrap_init(cls)


def _wrap_init(cls: type) -> None:
    """Patches each model of a class (or of one that inherits from it) as soon as it is made."""
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Somebody may have wrapped this in turn, and still call it after an unpatch.
        if cls in _OPTIONS:
            _patch_model(self, _OPTIONS[cls])

    __init__._fuselane_owner = cls  # type: ignore[attr-defined]
    __init__._fuselane_own = "__init__" in vars(cls)  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]


def _unpatch_class(cls: type) -> None:
    if _OPTIONS.pop(cls, None) is None:
        return
    wrapper = vars(cls).get("__init__")
    if getattr(wrapper, "_fuselane_owner", None) is not cls:
        return  # wrapped by somebody else since: ours does nothing from now on
    if wrapper._fuselane_own:
        cls.__init__ = wrapper.__wrapped__  # type: ignore[misc]
    else:
        del cls.__init__  # it was inherited


def _modules(model: Any, caller: str) -> Any:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{caller}: got {type(model).__name__}, expected a model")
    return model.modules()


def _families() -> str:
    *names, last = FAMILIES.values()
    return f"{', '.join(names)} or {last}"


def _require_transformers() -> None:
    try:
        importlib.import_module("transformers")  # the top-level one, and not this module
    except ImportError as error:
        raise ImportError(
            "fuselane.transformers needs Hugging Face transformers: pip install transformers"
        ) from error
