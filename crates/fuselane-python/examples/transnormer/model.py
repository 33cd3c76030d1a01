"""A small language model in the manner of TransNormer: linear attention, without a softmax.

The model is written once. Its operators come from one of two sets with the same parameters:
``FUSED`` has the modules of fuselane, ``PLAIN`` has the same formulas in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuselane

SYMBOLS = 256  # text is read as bytes


# ---- the operators, twice --------------------------------------------------------------------
#
# The plain ones are what this model needs, and no more: options that fuselane's modules are given
# below, such as the activation, are fixed here and go into ``**fixed``.


class PlainSRMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps)``, for the sum of x and the residual."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(
        self, x: Tensor, residual: Tensor | None = None, return_residual: bool = False
    ) -> Any:
        total = x if residual is None else x + residual
        o = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + self.eps)
        return (o, total) if return_residual else o


class PlainGatedRMSNorm(nn.Module):
    """An RMS norm of each group of features, times a weight and ``silu(gate)``."""

    def __init__(self, width: int, num_groups: int, eps: float = 1e-6, **fixed: str) -> None:
        super().__init__()
        self.num_groups, self.eps = num_groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        groups = x.unflatten(-1, (self.num_groups, -1))
        o = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return o.flatten(-2) * self.weight.to(x.dtype) * F.silu(gate)


class PlainLrpeCosine(nn.Module):
    """``[silu(x) cos A, silu(x) sin A]`` with the angles A = position * theta."""

    theta: Tensor

    def __init__(self, head_dim: int, base: float = 10000.0, **fixed: str) -> None:
        super().__init__()
        self.register_buffer("theta", base ** -(torch.arange(head_dim)[None] / head_dim))

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        positions = torch.arange(offset, offset + x.shape[-2])
        angles = positions[:, None] * self.theta
        y = F.silu(x)
        return torch.cat([y * angles.cos().to(x.dtype), y * angles.sin().to(x.dtype)], -1)


@dataclass(frozen=True)
class Operators:
    """The classes that a model is made of."""

    name: str
    SRMSNorm: Any
    GatedRMSNorm: Any
    LrpeCosine: Any
    Act: Any


FUSED = Operators(
    "fused",
    fuselane.nn.SRMSNorm,
    fuselane.nn.GatedRMSNorm,
    fuselane.nn.LrpeCosine,
    fuselane.nn.Act,
)
PLAIN = Operators(
    "unfused",
    PlainSRMSNorm,
    PlainGatedRMSNorm,
    PlainLrpeCosine,
    lambda act: {"silu": nn.SiLU}[act](),
)


# ---- linear attention ------------------------------------------------------------------------


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """Causal attention without a softmax, in time that is linear in the number of tokens.

    Token t gets ``o_t = sum over s <= t of decay^(t - s) (q_t . k_s) v_s``. In other words, there
    is a matrix ``S_t = decay S_(t-1) + k_t^T v_t``, the state, and ``o_t = q_t S_t``. Within a
    chunk of tokens the sum is taken as it stands, with a mask; what came before is in the state.

    Only powers of decay from 0 upward occur, so that nothing overflows; the state is float32.

    Args:
        q, k: (batch, heads, tokens, features)
        v: (batch, heads, tokens, values)
        decay: (heads), above 0 and at most 1, where nothing is forgotten.
        state: (batch, heads, features, values), from the call for the tokens before these.
        chunk: Tokens in a chunk. The result does not depend on it, but for rounding.

    Returns:
        The output, like v, and the state after the last token.
    """
    if state is None:
        batch, heads, _, features = k.shape
        state = torch.zeros(batch, heads, features, v.shape[-1])
    decay = decay.float()[:, None, None]
    i = torch.arange(min(chunk, q.shape[2]))
    since = i[:, None] - i
    mask = (decay ** since.clamp(min=0) * (since >= 0)).to(q.dtype)  # (heads, chunk, chunk)
    from_start = (decay ** (i[:, None] + 1)).to(q.dtype)  # (heads, chunk, 1)
    outputs = []
    for q, k, v in zip(q.split(chunk, 2), k.split(chunk, 2), v.split(chunk, 2)):
        n = q.shape[2]
        within = (q @ k.mT * mask[:, :n, :n]) @ v
        before = q @ state.to(q.dtype) * from_start[:, :n]
        outputs.append(within + before)
        to_end = mask[:, n - 1, :n, None]  # decay^(n - 1 - i)
        state = decay**n * state + k.mT @ (v * to_end)
    return torch.cat(outputs, 2), state


# ---- the model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """The size of a model."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    decay: bool = True
    dtype: torch.dtype = torch.float32


class Linear(nn.Linear):
    """Without bias. The weight is float32, and is used in the dtype of x."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """``norm(attention) * silu(gate)``: the norm stands where others have a softmax."""

    decay: Tensor

    def __init__(self, config: Config, ops: Operators) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.project = Linear(width, 4 * width)  # queries, keys, values, gate
        self.encode = ops.LrpeCosine(width // self.heads, act="silu", layout="bhnd")
        self.norm = ops.GatedRMSNorm(
            width, num_groups=self.heads, gate_act="silu", gate_pos="post"
        )
        self.out = Linear(width, width)
        # Some heads look at the last few tokens, others far back.
        decay = 1 - 2.0 ** -torch.linspace(2, 8, self.heads)
        self.register_buffer("decay", decay if config.decay else torch.ones(self.heads))

    def forward(self, x: Tensor, state: Tensor | None, offset: int) -> tuple[Tensor, Tensor]:
        *qkv, gate = self.project(x).chunk(4, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        q, k = self.encode(q, offset=offset), self.encode(k, offset=offset)
        o, state = linear_attention(q, k, v, self.decay, state)
        return self.out(self.norm(o.transpose(1, 2).flatten(2), gate)), state


class GatedMLP(nn.Module):
    """``(silu(gate) * up) @ down``, with gate and up from one projection."""

    def __init__(self, config: Config, ops: Operators) -> None:
        super().__init__()
        self.project = Linear(config.width, 4 * config.width)
        self.act = ops.Act("silu")
        self.down = Linear(2 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x).chunk(2, -1)
        return self.down(self.act(gate) * up)


class Block(nn.Module):
    """Attention, then the MLP, each behind a norm.

    Each norm also adds what the layer before it computed to the residual stream, in the same pass
    over memory; hence a block takes and gives both.
    """

    def __init__(self, config: Config, ops: Operators) -> None:
        super().__init__()
        self.norm1, self.attention = ops.SRMSNorm(config.width), Attention(config, ops)
        self.norm2, self.mlp = ops.SRMSNorm(config.width), GatedMLP(config, ops)

    def forward(
        self, x: Tensor, residual: Tensor | None, state: Tensor | None, offset: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, residual = self.norm1(x, residual, return_residual=True)
        x, state = self.attention(x, state, offset)
        x, residual = self.norm2(x, residual, return_residual=True)
        return self.mlp(x), residual, state


@dataclass
class State:
    """What a model remembers of the tokens so far: its size does not depend on how many."""

    layers: list[Tensor]
    tokens: int


class TransNormer(nn.Module):
    """Predicts the next byte of a text.

    Example:
        >>> model = TransNormer(Config(layers=1, width=32, heads=2))
        >>> logits, state = model(torch.tensor([[72, 101, 108]]))
        >>> logits.shape
        torch.Size([1, 3, 256])
        >>> logits, state = model(torch.tensor([[108]]), state)  # one more byte
    """

    def __init__(self, config: Config, ops: Operators = FUSED) -> None:
        super().__init__()
        self.dtype = config.dtype
        self.embed = nn.Embedding(SYMBOLS, config.width)
        self.blocks = nn.ModuleList(Block(config, ops) for _ in range(config.layers))
        self.norm = ops.SRMSNorm(config.width)
        self.head = Linear(config.width, SYMBOLS)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits (batch, tokens, 256) in float32, and the state after the last token."""
        states = state.layers if state else [None] * len(self.blocks)
        offset = state.tokens if state else 0
        x, residual, after = self.embed(tokens).to(self.dtype), None, []
        for block, before in zip(self.blocks, states):
            x, residual, s = block(x, residual, before, offset)
            after.append(s)
        logits = self.head(self.norm(x, residual)).float()
        return logits, State(after, offset + tokens.shape[1])
