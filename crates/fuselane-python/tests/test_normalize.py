import itertools

import plain
import pytest
import torch
from plain import DTYPES, assert_close

import fuselane

#: All options that change the formula, each alone and in pairs.
CASES = [
    {},
    {"weight": True},
    {"weight": True, "bias": True, "use_mean": True},
    {"weight": True, "one_plus_weight": True},
    {"residual": True},
    {"residual": True, "return_residual": True},
    {"residual": True, "return_residual": True, "weight": True, "use_mean": True},
    {"num_groups": 4, "weight": True},
    {"num_groups": 2, "use_mean": True, "bias": True},
    {"c": 3.0},
    {"scale": 0.5, "eps": 0.1},
    *(
        {"gate": True, "gate_pos": pos, "gate_act": act, "residual": residual, "weight": weight}
        for pos, act, residual, weight in itertools.product(
            ["pre", "post"], ["sigmoid", "silu", "gelu"], [False, True], [False, True]
        )
    ),
    {"gate": True, "gate_pos": "post", "weight": True, "bias": True, "use_mean": True, "num_groups": 2},
    {"gate": True, "residual": True, "return_residual": True, "weight": True, "bias": True},
]


def tensors_of(case, shape, dtype, requires_grad=True):
    """The tensors of a case, and its other options."""
    made, options = {}, {}
    for name, value in case.items():
        if name in ("residual", "gate") and value:
            made[name] = torch.randn(shape).to(dtype)
        elif name in ("weight", "bias") and value:
            made[name] = torch.randn(shape[-1]).to(torch.float64 if dtype == torch.float64 else torch.float32)
        elif name not in ("residual", "gate", "weight", "bias"):
            options[name] = value
    made = {"x": torch.randn(shape).to(dtype), **made}
    return {name: t.requires_grad_(requires_grad) for name, t in made.items()}, options


def flat(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, dtype):
    tensors, options = tensors_of(case, (3, 5, 24), dtype)
    outputs = flat(fuselane.normalize(**tensors, **options))
    grads = [torch.randn(3, 5, 24).to(dtype) for _ in outputs]
    got = torch.autograd.grad(outputs, [*tensors.values()], grads)
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    want = flat(plain.normalize(**exact, **options))
    wants = torch.autograd.grad(want, [*exact.values()], [g.double() for g in grads])
    for o, w in zip(outputs, want):
        assert o.dtype == dtype
        assert_close(o, w, 8, 1e-5)
    # Gradients are sums with cancellation: what counts is the size of the terms. The sum that is
    # kept for the backward is rounded to the dtype; gates of 16 bits are exact to a fifth of a
    # unit in the last place.
    eps = torch.finfo(dtype).eps
    floor = 8 * eps if case.get("return_residual") else max(2e-5, eps / 8 if "gate" in case else 0)
    for (name, t), d, w in zip(tensors.items(), got, wants):
        assert d.dtype == t.dtype and d.shape == t.shape, name
        assert_close(d, w, 8, floor * (1 + w.abs().max().item()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck(case):
    tensors, options = tensors_of(case, (2, 3, 8), torch.float64)
    names = [*tensors]

    def call(*values):
        return fuselane.normalize(**dict(zip(names, values)), **options)

    assert torch.autograd.gradcheck(call, tuple(tensors.values()))


@pytest.mark.parametrize("name", ["x", "weight", "bias", "residual", "gate"])
def test_one_gradient_alone(name):
    case = {"weight": True, "bias": True, "residual": True, "gate": True, "gate_pos": "post"}
    tensors, options = tensors_of(case, (4, 16), torch.float32)
    every = dict(zip(tensors, torch.autograd.grad(
        fuselane.normalize(**tensors, **options).square().sum(), [*tensors.values()]
    )))
    fixed = {other: t.detach() for other, t in tensors.items()}
    one = fixed[name].requires_grad_()
    (alone,) = torch.autograd.grad(fuselane.normalize(**fixed, **options).square().sum(), one)
    assert torch.equal(alone, every[name])


def test_presets():
    x, w, b, r = torch.randn(4, 16), torch.randn(16), torch.randn(16), torch.randn(4, 16)
    F = torch.nn.functional
    assert_close(fuselane.rms_norm(x, w), F.rms_norm(x.double(), (16,), w.double(), 1e-6), 8)
    assert_close(fuselane.srms_norm(x), F.rms_norm(x.double(), (16,), None, 1e-6), 8)
    want = F.layer_norm(x.double(), (16,), w.double(), b.double())
    assert_close(fuselane.layer_norm(x, w, b), want, 8, 1e-5)
    want = F.group_norm(x.double(), 4, w.double(), b.double())
    assert_close(fuselane.group_norm(x, 4, w, b), want, 8, 1e-5)
    o, total = fuselane.rms_norm(x, w, r, return_residual=True)
    assert torch.equal(total, x + r) and torch.equal(o, fuselane.rms_norm(x + r, w))
    o, same = fuselane.rms_norm(x, w, return_residual=True)
    assert same is x


def test_exact_residual():
    """The backward reads x and the residual, as where the sum is not returned."""
    x, w, r, grad = (torch.randn(*shape, dtype=torch.bfloat16) for shape in [(64, 48), (48,), (64, 48), (64, 48)])

    def gradients(**options):
        tensors = [t.clone().requires_grad_() for t in (x, w, r)]
        o = fuselane.rms_norm(*tensors, **options)
        return torch.autograd.grad(o[0] if options else o, tensors, grad)

    want = gradients()
    exact = gradients(return_residual=True, exact_residual=True)
    rounded = gradients(return_residual=True)
    assert all(map(torch.equal, exact, want))
    assert not torch.equal(rounded[0], want[0])


def test_the_seeds_c():
    x = torch.randn(3, 64)
    o = fuselane.normalize(x, c=5.0, eps=0.0)
    assert torch.allclose(o.norm(dim=-1), torch.full((3,), 5.0))


def test_only_the_sum_is_used():
    x, r = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    _, total = fuselane.rms_norm(x, residual=r, return_residual=True)
    total.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 8)) and torch.equal(r.grad, torch.ones(3, 8))


def test_strided_and_broadcast():
    x = torch.randn(6, 5, 16).transpose(0, 1)[1:, ::2]
    gate = torch.randn(1, 1, 16).expand(4, 3, 16)
    o = fuselane.normalize(x, gate=gate)
    assert_close(o, plain.normalize(x.double(), gate=gate.double()), 8, 1e-5)


def test_mean_far_above_deviation():
    x = 1e4 + torch.randn(4, 256)
    want = torch.nn.functional.layer_norm(x.double(), (256,))
    assert_close(fuselane.layer_norm(x), want, 64, 1e-5)
