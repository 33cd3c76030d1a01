"""Modules, with the parameters and the names in a state dict that PyTorch's own have, so that they swap
in.

    >>> import torch, fuselane
    >>> ours, theirs = fuselane.nn.RMSNorm(64), torch.nn.RMSNorm(64)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
"""

from __future__ import annotations

from typing import Any, Sequence

import torch

from ._names import ACTS, unknown
from ._ops.act import act as _act
from ._ops.cosine import lrpe_cosine as _lrpe_cosine
from ._ops.normalize import options_of, run
from ._ops.rotate import lrpe_rotate as _lrpe_rotate
from .theta import frequencies

__all__ = ["Act", "GatedRMSNorm", "LayerNorm", "LrpeCosine", "LrpeRotate", "RMSNorm", "SRMSNorm"]


class Act(torch.nn.Module):
    """An activation, as :func:`fuselane.act`.

    Args:
        act: Its name, or ``"softmax"`` with the dimension ``dim``.

    Example:
        >>> import torch, fuselane
        >>> fuselane.nn.Act("relu")(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """

    def __init__(self, act: str = "silu", dim: int | None = None) -> None:
        super().__init__()
        if act not in ACTS and act != "softmax":
            unknown("Act", "act", act, [*ACTS, "softmax"])
        if (act == "softmax") != (dim is not None):
            raise ValueError(f"Act: act is {act!r} and dim is {dim}, expected dim with softmax, only")
        self.act, self.dim = act, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _act(x, self.act, self.dim)

    def extra_repr(self) -> str:
        return repr(self.act) if self.dim is None else f"{self.act!r}, dim={self.dim}"


class _Norm(torch.nn.Module):
    """A norm over the last dimensions, which are taken as one."""

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None
    use_mean = False
    one_plus_weight = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        weight: bool,
        bias: bool,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        shape = [normalized_shape] if isinstance(normalized_shape, int) else [*normalized_shape]
        if not shape:
            raise ValueError(f"{type(self).__name__}: normalized_shape is empty, expected a dimension")
        self.normalized_shape: tuple[int, ...] = tuple(shape)
        self.eps = eps
        self.elementwise_affine = weight
        for name, there in (("weight", weight), ("bias", bias)):
            value = torch.empty(shape, device=device, dtype=dtype) if there else None
            self.register_parameter(name, None if value is None else torch.nn.Parameter(value))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of 1, biases of 0."""
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        """Normalizes x, or x + residual, which is returned too if asked for."""
        options = options_of(self._eps(x), self.use_mean, one_plus_weight=self.one_plus_weight)
        return self._run(x, residual, None, options, return_residual)

    def _flat(self, x: torch.Tensor | None) -> torch.Tensor | None:
        count = len(self.normalized_shape)
        if x is None:
            return None
        if x.shape[x.dim() - count :] != self.normalized_shape:
            raise ValueError(
                f"{type(self).__name__}: x has shape {[*x.shape]}, expected "
                f"[*, {', '.join(map(str, self.normalized_shape))}]"
            )
        return x if count == 1 else x.flatten(-count)

    def _run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        gate: torch.Tensor | None,
        options: tuple[Any, ...],
        return_residual: bool,
    ) -> Any:
        flat = self._flat(x)
        weight = None if self.weight is None else self.weight.reshape(-1)
        bias = None if self.bias is None else self.bias.reshape(-1)
        residual, gate = self._flat(residual), self._flat(gate)
        o = run(flat, weight, bias, residual, gate, options, return_residual)
        if len(self.normalized_shape) == 1:
            return o
        return tuple(t.view(x.shape) for t in o) if return_residual else o.view(x.shape)

    def _eps(self, x: torch.Tensor) -> float:
        if self.eps is not None:
            return self.eps
        return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class RMSNorm(_Norm):
    """``weight * x / sqrt(mean(x^2) + eps)``: what :class:`torch.nn.RMSNorm` is, with a residual.

    Args:
        normalized_shape: The last dimension, or the last dimensions.
        eps: Added to the mean square; None is the smallest step at 1 of the dtype that is computed in
            (float32, or float64 for that), as PyTorch has it.
        elementwise_affine: Whether there is a weight.
        one_plus_weight: Multiplies by 1 + weight, as Gemma does; the weight begins with 0 then.

    Example:
        >>> import torch, fuselane
        >>> norm = fuselane.nn.RMSNorm(64, eps=1e-6)
        >>> x, residual = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
        >>> o, total = norm(x, residual, return_residual=True)
        >>> torch.equal(total, x + residual)
        True
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        one_plus_weight: bool = False,
    ) -> None:
        self.one_plus_weight = one_plus_weight
        super().__init__(normalized_shape, eps, elementwise_affine, False, device, dtype)

    def reset_parameters(self) -> None:
        """Weights that change nothing."""
        super().reset_parameters()
        if self.one_plus_weight and self.weight is not None:
            torch.nn.init.zeros_(self.weight)


class SRMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps)``: without parameters.

    Example:
        >>> import torch, fuselane
        >>> fuselane.nn.SRMSNorm(2, eps=0.0)(torch.tensor([2.0, -2.0]))
        tensor([ 1., -1.])
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-6) -> None:
        super().__init__(normalized_shape, eps, False, False)


class LayerNorm(_Norm):
    """What :class:`torch.nn.LayerNorm` is, with a residual.

    Example:
        >>> import torch, fuselane
        >>> fuselane.nn.LayerNorm(2, eps=0.0)(torch.tensor([5.0, 9.0])).tolist()
        [-1.0, 1.0]
    """

    use_mean = True

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        with_bias = elementwise_affine and bias
        super().__init__(normalized_shape, eps, elementwise_affine, with_bias, device, dtype)

    def forward(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        return super().forward(input, residual, return_residual)


class GatedRMSNorm(_Norm):
    """An RMS norm with a gate: ``norm(x * g(gate))`` or ``norm(x) * g(gate)``.

    Args:
        normalized_shape: The last dimension, or the last dimensions.
        eps: Added to the mean square.
        gate_act: The activation g.
        gate_pos: ``"pre"`` or ``"post"`` the normalization.
        num_groups: The last dimension is normalized in so many groups.
        elementwise_affine: Whether there is a weight.

    Example:
        >>> import torch, fuselane
        >>> norm = fuselane.nn.GatedRMSNorm(64, gate_act="silu", gate_pos="post")
        >>> norm(torch.randn(2, 5, 64), torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        gate_act: str = "sigmoid",
        gate_pos: str = "pre",
        num_groups: int = 1,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if gate_act not in ACTS:
            unknown("GatedRMSNorm", "gate_act", gate_act, [*ACTS])
        if gate_pos not in ("pre", "post"):
            unknown("GatedRMSNorm", "gate_pos", gate_pos, ["pre", "post"])
        super().__init__(normalized_shape, eps, elementwise_affine, False, device, dtype)
        self.gate_act, self.gate_pos, self.num_groups = gate_act, gate_pos, num_groups

    def forward(
        self,
        x: torch.Tensor,
        gate: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        _, _, *rest = options_of(self._eps(x), num_groups=self.num_groups)
        options = (ACTS[self.gate_act], self.gate_pos == "post", *rest)
        return self._run(x, residual, gate, options, return_residual)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gate_act={self.gate_act!r}, gate_pos={self.gate_pos!r}"


class _Encoding(torch.nn.Module):
    """What the encodings share: frequencies, learned or not, under the name ``theta``."""

    theta: torch.Tensor

    def __init__(
        self,
        count: int,
        num_heads: int,
        base: float,
        learned: bool,
        act: str,
        dim: int | None,
        layout: str,
    ) -> None:
        super().__init__()
        self._frequencies = (count, num_heads, base)
        theta = torch.empty(num_heads, count, dtype=torch.float32)
        if learned:
            self.theta = torch.nn.Parameter(theta)
        else:
            self.register_buffer("theta", theta)
        self.reset_parameters()
        self.act, self.dim, self.layout = act, dim, layout

    def reset_parameters(self) -> None:
        """The frequencies that it began with."""
        count, num_heads, base = self._frequencies
        with torch.no_grad():
            self.theta.copy_(torch.tensor([frequencies(2 * count, base)] * num_heads))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Frequencies of 16 bits would put tokens in wrong places: they stay as wide as they are.
        wide = self.theta.detach().clone()
        super()._apply(fn, recurse)
        if self.theta.dtype in (torch.float16, torch.bfloat16):
            self.theta.data = wide.to(self.theta.device)
        return self

    def extra_repr(self) -> str:
        heads, count = self.theta.shape
        return f"{count} frequencies, {heads} heads, act={self.act!r}, layout={self.layout!r}"


class LrpeRotate(_Encoding):
    """Rotary position encoding, as :func:`fuselane.lrpe_rotate`.

    Args:
        head_dim: Features of a head; even.
        num_heads: Rows of theta; 1 for all heads alike.
        base: Frequencies are ``base^(-2k / head_dim)``.
        learned: Whether theta is trained.
        act, dim, layout, interleaved: As for the function.

    Example:
        >>> import torch, fuselane
        >>> rotate = fuselane.nn.LrpeRotate(64)
        >>> rotate(torch.randn(2, 10, 4, 64), offset=100).shape
        torch.Size([2, 10, 4, 64])
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        base: float = 10000.0,
        learned: bool = False,
        act: str = "none",
        dim: int | None = None,
        layout: str = "bnhd",
        interleaved: bool = False,
    ) -> None:
        if head_dim % 2:
            raise ValueError(f"LrpeRotate: head_dim is {head_dim}, expected an even number")
        super().__init__(head_dim // 2, num_heads, base, learned, act, dim, layout)
        self.interleaved = interleaved

    def forward(
        self,
        x: torch.Tensor,
        offset: int = 0,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _lrpe_rotate(
            x,
            self.theta,
            offset,
            self.act,
            self.dim,
            positions=positions,
            cu_seqlens=cu_seqlens,
            layout=self.layout,
            interleaved=self.interleaved,
        )


class LrpeCosine(_Encoding):
    """Cosine position encoding, as :func:`fuselane.lrpe_cosine`; it doubles the features.

    Args:
        head_dim: Features of a head.
        num_heads: Rows of theta; 1 for all heads alike.
        axes: Dimensions of the grid that tokens stand on; 1 is a sequence.
        base: Frequencies are ``base^(-k / e)``, k below e, the features of an axis.
        learned: Whether theta is trained.
        act, dim, layout: As for the function.

    Example:
        >>> import torch, fuselane
        >>> encode = fuselane.nn.LrpeCosine(64, axes=2)
        >>> encode(torch.randn(2, 4, 1 + 8 * 8, 64), shape=(8, 8), l=1).shape
        torch.Size([2, 4, 65, 128])
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        axes: int = 1,
        base: float = 10000.0,
        learned: bool = False,
        act: str = "none",
        dim: int | None = None,
        layout: str = "bhnd",
    ) -> None:
        super().__init__(-(-head_dim // axes), num_heads, base, learned, act, dim, layout)

    def forward(
        self,
        x: torch.Tensor,
        shape: Sequence[int] | None = None,
        l: int = 0,  # noqa: E741: the name of the published tables
        offset: int = 0,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _lrpe_cosine(
            x,
            self.theta,
            shape,
            l,
            self.act,
            self.dim,
            offset=offset,
            positions=positions,
            cu_seqlens=cu_seqlens,
            layout=self.layout,
        )
