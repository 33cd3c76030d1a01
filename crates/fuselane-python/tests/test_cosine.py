import plain
import pytest
import torch
from plain import DTYPES, assert_encoding

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
    # Activations of 16 bits are exact to a fifth of a unit in the last place.
    floor = max(1e-5, torch.finfo(dtype).eps / 4) if "act" in case else 1e-5
    assert_encoding(fuselane.lrpe_cosine, plain.cosine, x, theta, case, dtype, floor)


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
