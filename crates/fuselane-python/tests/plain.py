"""The operators in plain PyTorch, as the truth: in float64, one line after the other."""

import torch
import torch.nn.functional as F

ACTS = {
    "none": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "relu_squared": lambda x: F.relu(x).square(),
}

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def normalize(
    x,
    weight=None,
    bias=None,
    residual=None,
    gate=None,
    gate_act="sigmoid",
    gate_pos="pre",
    c=1.0,
    eps=1e-6,
    use_mean=False,
    num_groups=1,
    return_residual=False,
    scale=None,
    one_plus_weight=False,
):
    p = total = x if residual is None else x + residual
    g = None if gate is None else ACTS[gate_act](gate)
    if g is not None and gate_pos == "pre":
        p = p * g
    q = p.unflatten(-1, (num_groups, -1))
    if scale is None:
        scale = c / q.shape[-1] ** 0.5
    if use_mean:
        q = q - q.mean(-1, keepdim=True)
    o = (scale * q / (q.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    if weight is not None:
        o = o * (1 + weight if one_plus_weight else weight)
    if bias is not None:
        o = o + bias
    if g is not None and gate_pos == "post":
        o = o * g
    return (o, total) if return_residual else o


def activated(x, act, dim):
    return torch.softmax(x, dim) if act == "softmax" else ACTS[act](x)


def coordinates(tokens, offset=0, positions=None, cu_seqlens=None, shape=None, l=0):
    """(axes, batch or 1, tokens)"""
    if shape is not None:
        axes = [torch.arange(n, dtype=torch.float64) for n in shape]
        grid = torch.stack([g.flatten() for g in torch.meshgrid(*axes, indexing="ij")])
        return F.pad(grid, (l, 0))[:, None]
    if positions is not None:
        at = positions.double()
        at = at[None] if at.dim() == 1 else at
    elif cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        at = torch.cat([torch.arange(b - a, dtype=torch.float64) for a, b in zip(ends, ends[1:])])
        at = at[None] + offset
    else:
        at = torch.arange(tokens - l, dtype=torch.float64)[None] + offset
    if l and positions is None:
        at = F.pad(at, (l, 0))
    elif l:
        at = torch.cat([torch.zeros_like(at[:, :l]), at[:, l:]], 1)
    return at[None]


def angles(theta, tokens, count, **where):
    """(batch or 1, tokens, heads or 1, count)"""
    theta = theta if theta.dim() == 2 else theta[None]
    at = coordinates(tokens, **where)
    a = at[..., None, None] * theta  # axes, batch, tokens, heads, e
    a = torch.cat([*a], -1)
    if a.shape[-1] == 1:
        a = a.expand(*a.shape[:-1], count)
    return a[..., :count]


def rotate(
    x, theta, offset=0, act="none", dim=None, layout="bnhd", interleaved=False, rotary_dim=False,
    pairs=None, **where,
):  # fmt: skip
    y = activated(x, act, dim)
    if layout == "bhnd":
        y = y.transpose(1, 2)
    d = y.shape[-1]
    axes = len(where["shape"]) if where.get("shape") is not None else 1
    columns = theta.shape[-1]
    if pairs is None:
        pairs = d // 2 if columns == 1 else min(columns * axes, d // 2)
    a = angles(theta, y.shape[1], pairs, offset=offset, **where)
    k = torch.arange(pairs)
    first, second = (2 * k, 2 * k + 1) if interleaved else (k, k + (pairs if rotary_dim else d // 2))
    y1, y2 = y[..., first], y[..., second]
    o = y.clone()
    o[..., first] = y1 * a.cos() - y2 * a.sin()
    o[..., second] = y1 * a.sin() + y2 * a.cos()
    return o.transpose(1, 2) if layout == "bhnd" else o


def cosine(x, theta, shape=None, l=0, act="none", dim=None, layout="bhnd", **where):
    y = activated(x, act, dim)
    if layout == "bhnd":
        y = y.transpose(1, 2)
    a = angles(theta, y.shape[1], y.shape[-1], shape=shape, l=l, **where)
    o = torch.cat([y * a.cos(), y * a.sin()], -1)
    return o.transpose(1, 2) if layout == "bhnd" else o


def assert_close(got, want, ulps=2.0, floor=2e-6):
    """Within some units in the last place of got's dtype, of each element or of `floor`."""
    assert got.shape == want.shape
    eps = torch.finfo(got.dtype).eps
    got, want = got.detach().double(), want.detach().double()
    bound = ulps * eps * want.abs() + (floor if eps > 1e-10 else 1e-12)
    off = (got - want).abs() - bound
    both_nan = got.isnan() & want.isnan()
    same = got == want
    assert bool(((off <= 0) | both_nan | same).all()), f"off by {off.nan_to_num().max().item():.3e}"


def assert_encoding(encode, truth, x, theta, case, dtype, floor):
    """Values and gradients of an encoding of x rounded to dtype, beside the truth, in float64."""
    x = x.to(dtype).requires_grad_()
    theta = theta.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    o = encode(x, theta, **case)
    grad = torch.randn(o.shape).to(dtype)
    dx, dtheta = torch.autograd.grad(o, [x, theta], grad)
    exact = [t.detach().double().requires_grad_() for t in (x, theta)]
    want = truth(*exact, **case)
    wants = torch.autograd.grad(want, exact, grad.double())
    assert o.dtype == dtype
    assert_close(o, want, 2, floor)
    assert_close(dx, wants[0], 2, floor)
    assert_close(dtheta, wants[1], 16, floor * (1 + wants[1].abs().max().item()))
