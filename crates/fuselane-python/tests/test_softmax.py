import pytest
import torch
from plain import DTYPES, assert_close

import fuselane


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [-1, 0, 1, -3, 2])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_values_and_gradients(name, dim, dtype):
    x = (3 * torch.randn(3, 17, 33)).to(dtype).requires_grad_()
    grad = torch.randn(3, 17, 33).to(dtype)
    o = getattr(fuselane, name)(x, dim)
    (dx,) = torch.autograd.grad(o, x, grad)
    exact = x.detach().double().requires_grad_()
    want = getattr(torch, name)(exact, dim)
    (dwant,) = torch.autograd.grad(want, exact, grad.double())
    assert_close(o, want, 4)
    # From the rounded output, so that the sum over it is off by what rounding left.
    eps = torch.finfo(dtype).eps
    assert_close(dx, dwant, 16, 4 * eps)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradcheck(name, dim):
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: getattr(fuselane, name)(x, dim), x)


def test_transposed_input_keeps_its_strides():
    x = torch.randn(6, 5, 4).transpose(0, 2)
    o = fuselane.softmax(x, 1)
    assert o.stride() == x.stride()
    assert_close(o, torch.softmax(x.double(), 1), 4)


def test_masked_rows():
    x = torch.full((2, 4), -float("inf"))
    assert fuselane.softmax(x, -1).isnan().all()
    x.requires_grad_()
    o = fuselane.softmax(x, -1, zero_masked_rows=True)
    o.sum().backward()
    assert torch.equal(o, torch.zeros(2, 4)) and torch.equal(x.grad, torch.zeros(2, 4))


def test_empty():
    assert fuselane.softmax(torch.empty(0, 4), 0).shape == (0, 4)
