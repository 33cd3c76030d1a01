"""The layers that are swapped in.

A layer is swapped by giving it another class, one that inherits from its own and has another
`forward`. So its parameters, buffers, hooks and place in the model stay as they are, `isinstance`
holds, a copy or a pickle of the model keeps the swap, and to swap back is to give it its class
back.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable

import torch

from .. import _backend, act, lrpe_rotate, rms_norm

_backend.load()  # now, and not while a compiler traces the first call

#: Modeling files whose layers are known, and the prefix of the classes in them.
FAMILIES = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}": name
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")
}

#: Activations, by module and class: the name of ours, for an instance that computes the same.
_ACTIVATIONS = {
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
    ("transformers.activations", "PytorchGELUTanh"): "gelu_tanh",
    ("transformers.activations", "NewGELUActivation"): "gelu_tanh",
    ("transformers.activations", "ReLUSquaredActivation"): "relu_squared",
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("torch.nn.modules.activation", "ReLU"): "relu",
}

#: Rotary embeddings whose frequencies stay the same, whatever the input.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


class Fused:
    """What all swapped layers inherit from, besides the class that they had."""

    original: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so a pickle cannot name it.
        return (_empty, (self.original, _kind(self)), *super().__reduce_ex__(protocol)[2:])


class RmsNorm(Fused):
    one_plus_weight: bool
    eps_name: str

    def forward(self, x: Any) -> Any:
        if x.device.type != "cpu":
            return super().forward(x)  # type: ignore[misc]
        weight = self.weight  # type: ignore[attr-defined]
        eps = getattr(self, self.eps_name)
        if x.dtype != weight.dtype and not self.one_plus_weight:
            # A weight wider than x (as within autocast) widens the result; but not in Gemma.
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        return rms_norm(x, weight, eps=eps, one_plus_weight=self.one_plus_weight)


class Activation(Fused):
    fused_act: str

    def forward(self, input: Any) -> Any:
        if input.device.type != "cpu":
            return super().forward(input)  # type: ignore[misc]
        return act(input, self.fused_act)


class Rotary(Fused):
    """Gives attention the positions and the frequencies, instead of cosines and sines of angles.

    Attention hands the two on to the function `apply_rotary_pos_emb` of its modeling file. That one
    is replaced by ours, which knows them by their dtype: positions are integers, and cosines never
    are. Both are plain tensors, which go through compilers, checkpointing and hooks like any other.
    """

    modeling: Any

    def forward(self, x: Any, position_ids: Any, layer_type: Any = None) -> Any:
        types = () if layer_type is None else (layer_type,)
        if (
            x.device.type != "cpu"
            or position_ids.is_floating_point()
            or position_ids.dim() != 2
            # Another library may have put its own function in the place of ours.
            or not hasattr(self.modeling.apply_rotary_pos_emb, "_fuselane_original")
        ):
            return super().forward(x, position_ids, *types)  # type: ignore[misc]
        inv_freq = getattr(self, f"{layer_type}_inv_freq" if types else "inv_freq")
        return position_ids, inv_freq.float()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _use_dispatcher(self)


def reason_to_skip(kind: str, module: Any, parent: Any) -> str | None:
    """Why a layer has to stay as it is; None if it can be swapped."""
    cls = type(module)
    if "forward" in vars(module):
        return "its forward is replaced by somebody else"
    if kind == "activation":
        tensors = [*parent.parameters()]
    else:
        tensors = [*module.parameters(), *module.buffers()]
        for tensor in tensors:
            # Such as those that are spread over several processes.
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                return f"has a {type(tensor).__name__}"
    for tensor in tensors:
        # Weights that are yet to be loaded are on the device meta.
        if tensor.device.type not in ("cpu", "meta"):
            return f"on {tensor.device}"
    if kind == "activation":
        return None if _act_name(module) else f"{cls.__name__} is unknown"
    family = FAMILIES.get(cls.__module__)
    expected = {"rms_norm": "RMSNorm", "rotary": "RotaryEmbedding"}[kind]
    if family is None or cls.__name__ != family + expected:
        return f"{cls.__name__} is unknown"
    if kind == "rms_norm":
        known = hasattr(module, _eps_name(family)) and hasattr(module, "weight")
        return None if known else f"{cls.__name__} of this version of transformers is unknown"
    return _reason_to_skip_rotary(module, parent)


def _reason_to_skip_rotary(module: Any, parent: Any) -> str | None:
    modeling = type(module).__module__
    unknown = f"{type(module).__name__} of this version of transformers is unknown"
    known = hasattr(sys.modules[modeling], "apply_rotary_pos_emb") and hasattr(module, "rope_type")
    if not known:
        return unknown
    # What it returns goes to all attention layers: they have to call the function of its file.
    for name, layer in parent.named_modules():
        if name.endswith("self_attn") and type(layer).__module__ != modeling:
            return f"{type(layer).__name__} is unknown"
    # Gemma3 has one set of frequencies for each type of layer.
    types = module.rope_type
    named = {"": types} if isinstance(types, str) else {f"{key}_": types[key] for key in types}
    for prefix, rope_type in named.items():
        if rope_type not in _FIXED_ROPE:
            return f"rope_type {rope_type}"
        scaling = getattr(module, f"{prefix}attention_scaling", None)
        if scaling is None or not hasattr(module, f"{prefix}inv_freq"):
            return unknown
        if scaling != 1:
            return f"attention_scaling {scaling}"
    return None


def swap(kind: str, module: Any) -> None:
    """Swaps a layer, which :func:`reason_to_skip` has nothing against."""
    module.__class__ = _fused_class(type(module), kind, _act_name(module))
    if kind == "rotary":
        _use_dispatcher(module)


def swap_back(module: Any) -> None:
    if isinstance(module, Rotary):
        _leave_dispatcher(module)
    module.__class__ = module.original


@functools.lru_cache(maxsize=None)
def _fused_class(cls: type, kind: str, act_name: str | None) -> type:
    body: dict[str, Any] = {"original": cls, "__doc__": cls.__doc__}
    if kind == "rms_norm":
        base: type = RmsNorm
        family = FAMILIES[cls.__module__]
        body["one_plus_weight"] = family.startswith("Gemma")
        body["eps_name"] = _eps_name(family)
    elif kind == "rotary":
        base = Rotary
        body["modeling"] = sys.modules[cls.__module__]
    else:
        base = Activation
        body["fused_act"] = act_name
    # transformers looks for "RMSNorm" and "RotaryEmbedding" in names when it initialises weights.
    return type(f"Fuselane{cls.__name__}", (base, cls), body)


def _kind(module: Any) -> str:
    if isinstance(module, RmsNorm):
        return "rms_norm"
    return "rotary" if isinstance(module, Rotary) else "activation"


def _empty(original: type, kind: str) -> Any:
    """A swapped layer without its state, for pickle and copy."""
    cls = _fused_class(original, kind, _ACTIVATIONS.get((original.__module__, original.__name__)))
    return cls.__new__(cls)


def _eps_name(family: str) -> str:
    return "eps" if family.startswith("Gemma") else "variance_epsilon"


def _act_name(module: Any) -> str | None:
    cls = type(module)
    if getattr(module, "inplace", False):
        return None
    return _ACTIVATIONS.get((cls.__module__, cls.__name__))


#: The swapped rotary embeddings that are alive, by modeling file. When there are none any more, the
#: file gets its function back.
_ROTARIES: dict[str, weakref.WeakSet[Any]] = {}


def _use_dispatcher(module: Any) -> None:
    modeling = module.modeling
    _ROTARIES.setdefault(modeling.__name__, weakref.WeakSet()).add(module)
    current = modeling.apply_rotary_pos_emb
    if not hasattr(current, "_fuselane_original"):
        modeling.apply_rotary_pos_emb = _dispatcher(current)


def _leave_dispatcher(module: Any) -> None:
    modeling = module.modeling
    users = _ROTARIES[modeling.__name__]
    users.discard(module)
    current = modeling.apply_rotary_pos_emb
    if not users and hasattr(current, "_fuselane_original"):
        modeling.apply_rotary_pos_emb = current._fuselane_original


def _dispatcher(original: Callable[..., Any]) -> Callable[..., Any]:
    """`apply_rotary_pos_emb` for a modeling file: ours for swapped models, else `original`."""

    @functools.wraps(original)
    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if cos.is_floating_point():
            return original(q, k, cos, sin, *args, **kwargs)
        positions, inv_freq = cos, sin
        layout = {1: "bhnd", 2: "bnhd"}.get(kwargs.get("unsqueeze_dim", 1))
        if args or layout is None or q.device.type != "cpu":
            cos, sin = _cos_sin(positions, inv_freq, q.dtype)
            return original(q, k, cos, sin, *args, **kwargs)
        if positions.shape[0] == 1:
            positions = positions[0]  # the same for the whole batch
        return tuple(
            lrpe_rotate(x, inv_freq, positions=positions, layout=layout) for x in (q, k)
        )

    apply_rotary_pos_emb._fuselane_original = original  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _cos_sin(positions: Any, inv_freq: Any, dtype: Any) -> Any:
    """What the rotary embedding would have given, for layers on another device."""
    angles = positions[..., None].float() * inv_freq.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
