import plain
import pytest
import torch
from plain import DTYPES, assert_close, assert_encoding

import fuselane

B, N, H, D = 2, 6, 3, 8

CASES = [
    {},
    {"offset": 1000},
    {"act": "silu"},
    {"act": "softmax", "dim": -1},
    {"act": "softmax", "dim": 1},
    {"act": "softmax", "dim": 2, "layout": "bhnd"},
    {"layout": "bhnd"},
    {"interleaved": True},
    {"pairs": 2},
    {"pairs": 2, "rotary_dim": True},
    {"pairs": 3, "interleaved": True, "act": "relu"},
    {"positions": torch.tensor([5, 1, 0, 7, 7, 2])},
    {"positions": torch.tensor([[0, 1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4]], dtype=torch.int32)},
    {"cu_seqlens": torch.tensor([0, 2, 2, 6])},
    {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32), "act": "sigmoid"},
    {"shape": (2, 3)},
    {"shape": (1, 2, 2), "l": 2, "act": "silu"},
    {"l": 2},
]


def call_of(case, columns):
    """x and theta of a case."""
    heads_first = case.get("layout") == "bhnd"
    x = torch.randn((B, H, N, D) if heads_first else (B, N, H, D), dtype=torch.float64)
    return x, torch.rand(H, columns, dtype=torch.float64)


def columns_of(case):
    axes = len(case["shape"]) if "shape" in case else 1
    return -(-case.get("pairs", D // 2) // axes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, dtype):
    x, theta = call_of(case, columns_of(case))
    # Angles are rounded to float32: at 1000, by 3e-5.
    floor = 1e-4 if case.get("offset") else 1e-5
    if "act" in case:  # of 16 bits, exact to a fifth of a unit in the last place before the turn
        floor = max(floor, torch.finfo(dtype).eps / 4)
    assert_encoding(fuselane.lrpe_rotate, plain.rotate, x, theta, case, dtype, floor)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck(case):
    x, theta = call_of(case, columns_of(case))
    x, theta = x.requires_grad_(), theta.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, t: fuselane.lrpe_rotate(x, t, **case), (x, theta))


@pytest.mark.parametrize("shape", [(1, 4), (H, 1), (1, 1), (4,)])
def test_forms_of_theta(shape):
    x, theta = torch.randn(B, N, H, D), torch.rand(shape)
    assert_close(fuselane.lrpe_rotate(x, theta), plain.rotate(x.double(), theta.double()), 4, 1e-5)


def test_positions_of_one_row_serve_every_batch_entry():
    x, theta, spots = torch.randn(B, N, H, D), torch.rand(4), torch.arange(3, 3 + N)
    want = fuselane.lrpe_rotate(x, theta, 3)
    assert torch.equal(fuselane.lrpe_rotate(x, theta, positions=spots[None]), want)


def test_lists_are_frequencies():
    x = torch.randn(1, 4, 1, 8)
    theta = fuselane.theta.frequencies(8)
    assert torch.equal(fuselane.lrpe_rotate(x, theta), fuselane.lrpe_rotate(x, torch.tensor(theta)))


def test_x_is_not_kept_without_an_activation():
    kept = []
    x = torch.randn(1, 4, 1, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fuselane.lrpe_rotate(x * 1, torch.rand(1, 4))
    assert all(t.shape != x.shape for t in kept)


def test_a_table_gives_the_same():
    theta = torch.rand(H, 4)
    table = fuselane.AngleTable(theta, count=4, length=N)
    x = torch.randn(B, N, H, D, requires_grad=True)
    grad = torch.randn(x.shape)
    got = fuselane.lrpe_rotate(x, table)
    want = fuselane.lrpe_rotate(x, theta)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(o, x, grad)[0] for o in (got, want)))


def test_a_table_outlives_its_name():
    x = torch.randn(1, N, H, D, requires_grad=True)
    o = fuselane.lrpe_rotate(x, fuselane.AngleTable(torch.rand(H, 4), count=4, length=N))
    o.sum().backward()
    assert x.grad is not None


def test_transposed_views():
    x = torch.randn(B, H, N, D).transpose(1, 2)
    theta = torch.rand(1, 4)
    o = fuselane.lrpe_rotate(x, theta)
    assert o.stride() == x.stride()
    assert_close(o, plain.rotate(x.double(), theta.double()), 4, 1e-5)
