import pytest
import torch
from plain import ACTS, DTYPES, assert_close

import fuselane


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_values_and_gradients(act, dtype):
    x = (4 * torch.randn(5, 37)).to(dtype).requires_grad_()
    grad = torch.randn(5, 37).to(dtype)
    o = fuselane.act(x, act)
    (dx,) = torch.autograd.grad(o, x, grad)
    exact = x.detach().double().requires_grad_()
    want = ACTS[act](exact)
    (dwant,) = torch.autograd.grad(want, exact, grad.double())
    assert o.dtype == dtype and dx.dtype == dtype
    assert_close(o, want, 8)
    # From the rounded output, where PyTorch does so too.
    floor = torch.finfo(dtype).eps * grad.abs().max().item() if act in ("sigmoid", "tanh") else 0
    assert_close(dx, dwant, 8, max(floor, 1e-5))


@pytest.mark.parametrize("act", [act for act in ACTS if act != "none"])
def test_gradcheck(act):
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: fuselane.act(x, act), x)


@pytest.mark.parametrize("act", ["relu", "sigmoid", "tanh"])
def test_the_output_is_all_that_is_kept(act):
    kept = []
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        o = fuselane.act(x, act)
    assert [t.data_ptr() for t in kept] == [o.data_ptr()]


def test_none_is_the_tensor_itself():
    x = torch.randn(3)
    assert fuselane.act(x, "none") is x


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1:, 3:],
        lambda x: x[::2],
        lambda x: x[:1].expand(4, -1),
        lambda x: x[0, 0],
        lambda x: x[:0],
        lambda x: x[None, :, None],
        lambda x: x.reshape(2, 4, 4, 4).permute(0, 3, 1, 2),
    ],
)
def test_views(view):
    base = torch.randn(8, 16)
    x = view(base)
    grad = torch.randn(x.shape)
    leaf = x.detach().requires_grad_()
    assert leaf.stride() == x.stride()
    o = fuselane.act(leaf, "silu")
    o.backward(grad)
    assert o.stride() == torch.empty_like(x).stride()
    exact = x.detach().double().requires_grad_()
    want = torch.nn.functional.silu(exact)
    want.backward(grad.double())
    assert_close(o, want, 4)
    assert_close(leaf.grad, exact.grad, 8)


def test_a_softmax_by_its_dimension():
    x = torch.randn(3, 4)
    assert torch.equal(fuselane.act(x, dim=0), fuselane.softmax(x, 0))
    assert torch.equal(fuselane.act(x, "softmax", dim=-1), fuselane.softmax(x, -1))


@pytest.mark.parametrize("elements", [1, 15, 17, 9215, 9217, (1 << 18) + 3, (1 << 20) + 5])
def test_sizes(elements):
    x = torch.randn(elements).bfloat16()
    assert_close(fuselane.act(x, "sigmoid"), torch.sigmoid(x.double()), 1)


def test_special_values():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, 1e-40, -1e-40])
    assert_close(fuselane.act(x, "relu"), torch.relu(x), 0, 0)
    assert_close(fuselane.act(x, "sigmoid"), torch.sigmoid(x), 2)
