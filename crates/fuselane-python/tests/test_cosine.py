import plain
import pytest
import torch
from plain import DTYPES, assert_close

import fuselane

B, H, N, D = 2, 3, 6, 5

CASES = [
    {},
    {"offset": 7},
    {"act": "silu"},
    {"act": "softmax", "dim": -1},
    {"act": "softmax", "dim": -2},
    {"act": "softmax", "dim": 1, "layout": "bnhd"},
    {"layout": "bnhd"},
    {"l": 2},
    {"shape": (6,)},
    {"shape": (2, 3)},
    {"shape": (2, 2), "l": 2, "act": "relu"},
    {"shape": (1, 2, 3), "act": "softmax", "dim": -1},
    {"positions": torch.tensor([5, 1, 0, 7, 7, 2])},
    {"cu_seqlens": torch.tensor([0, 2, 6])},
]


def call_of(case):
    bnhd = case.get("layout") == "bnhd"
    axes = len(case["shape"]) if "shape" in case else 1
    x = torch.randn((B, N, H, D) if bnhd else (B, H, N, D), dtype=torch.float64)
    return x, torch.rand(H, -(-D // axes), dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, dtype):
    x, theta = call_of(case)
    x = x.to(dtype).requires_grad_()
    theta = theta.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    o = fuselane.lrpe_cosine(x, theta, **case)
    grad = torch.randn(o.shape).to(dtype)
    dx, dtheta = torch.autograd.grad(o, [x, theta], grad)
    exact = [t.detach().double().requires_grad_() for t in (x, theta)]
    want = plain.cosine(*exact, **case)
    wants = torch.autograd.grad(want, exact, grad.double())
    # Activations of 16 bits are exact to a fifth of a unit in the last place.
    floor = max(1e-5, torch.finfo(dtype).eps / 4) if "act" in case else 1e-5
    assert_close(o, want, 2, floor)
    assert_close(dx, wants[0], 2, floor)
    assert_close(dtheta, wants[1], 16, floor * (1 + wants[1].abs().max().item()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck(case):
    x, theta = call_of(case)
    x, theta = x.requires_grad_(), theta.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, t: fuselane.lrpe_cosine(x, t, **case), (x, theta))


def test_a_table_gives_the_same():
    theta = torch.rand(1, 3)
    table = fuselane.AngleTable(theta, count=D, shape=(2, 3))
    x = torch.randn(B, H, 6, D)
    assert torch.equal(
        fuselane.lrpe_cosine(x, table, shape=(2, 3)), fuselane.lrpe_cosine(x, theta, shape=(2, 3))
    )
