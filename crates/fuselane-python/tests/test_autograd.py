"""What a PyTorch user does with gradients."""

import pytest
import torch
from calls import NAMES, calls
from torch.utils.checkpoint import checkpoint

import fuselane


@pytest.fixture(params=NAMES)
def call(request):
    return calls()[request.param]


def gradients(function, tensors, grad=None):
    o = function(*tensors)
    return torch.autograd.grad(o, tensors, torch.ones_like(o) if grad is None else grad)


def test_no_grad_and_inference_mode(call):
    function, tensors = call
    want = function(*tensors).detach()
    with torch.no_grad():
        o = function(*tensors)
    assert not o.requires_grad and torch.equal(o, want)
    with torch.inference_mode():
        o = function(*tensors)
    assert o.is_inference() and torch.equal(o, want)


def test_gradients_of_any_strides(call):
    function, tensors = call
    o = function(*tensors)
    grad = torch.randn(1).expand_as(o)
    want = gradients(function, tensors, grad.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(gradients(function, tensors, grad), want))
    grad = torch.randn_like(o)
    want = gradients(function, tensors, grad)
    turned = grad.transpose(-1, -2).contiguous().transpose(-1, -2)
    wide = torch.stack([grad, grad], -1)[..., 0]
    for other in (turned, wide):
        assert not other.is_contiguous()
        assert all(torch.equal(a, b) for a, b in zip(gradients(function, tensors, other), want))


def test_checkpoint(call):
    function, tensors = call
    want = gradients(function, tensors)
    o = checkpoint(function, *tensors, use_reentrant=False)
    got = torch.autograd.grad(o, tensors, torch.ones_like(o))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_hooks_and_retain_graph(call):
    function, tensors = call
    want = gradients(function, tensors)
    seen = []
    handles = [t.register_hook(lambda g: seen.append(1) or 2 * g) for t in tensors]
    o = function(*tensors)
    for _ in range(2):
        torch.autograd.backward(o, torch.ones_like(o), retain_graph=True)
    assert len(seen) == 2 * len(tensors)
    assert all(torch.allclose(t.grad, 4 * w) for t, w in zip(tensors, want))
    for handle in handles:
        handle.remove()


def test_double_backward_is_refused(call):
    function, tensors = call
    o = function(*tensors)
    grads = torch.autograd.grad(o.square().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        sum(grad.sum() for grad in grads).backward()


def test_double_backward_through_what_was_kept_is_refused():
    """Where the incoming gradient is a constant, the second derivative comes from x alone."""
    for act in ("silu", "sigmoid", "gelu"):
        x = torch.randn(4, requires_grad=True)
        (g,) = torch.autograd.grad(fuselane.act(x, act).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            g.sum().backward()
    x = torch.randn(3, 8, requires_grad=True)
    (g,) = torch.autograd.grad(fuselane.rms_norm(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        g.sum().backward()
    with pytest.raises(RuntimeError):
        torch.autograd.functional.hessian(lambda v: fuselane.act(v).sum(), torch.randn(3))


def test_a_sum_that_nothing_needs_requires_no_gradient():
    x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    o, total = fuselane.rms_norm(x, weight, x, return_residual=True)
    assert o.requires_grad and not total.requires_grad
    o.sum().backward()
    assert weight.grad is not None


def test_backward_twice_is_refused(call):
    function, tensors = call
    o = function(*tensors)
    o.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        o.sum().backward()


def test_inputs_changed_in_place_are_noticed():
    x = torch.randn(3, 4, requires_grad=True)
    y = x * 1
    o = fuselane.act(y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_results_may_be_changed_in_place():
    x = torch.randn(3, 4, requires_grad=True)
    o = fuselane.act(x)
    o.mul_(2)
    o.sum().backward()
    assert torch.equal(x.grad, gradients(lambda x: fuselane.act(x), [x], 2 * torch.ones(3, 4))[0])


def test_autocast():
    linear = torch.nn.Linear(16, 16)
    norm = fuselane.nn.RMSNorm(16)
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        h = linear(x)
        assert fuselane.act(h).dtype == torch.bfloat16
        assert norm(h).dtype == torch.bfloat16
        # A stream of residuals in float32.
        o, total = norm(h, x, return_residual=True)
    assert o.dtype == torch.float32 and total.dtype == torch.float32
    o.sum().backward()
    assert linear.weight.grad is not None and norm.weight.grad is not None


def test_large_gradients_match_small_ones():
    """Large results come from the pool and run on several threads."""
    x = torch.randn(2048, 512, requires_grad=True)
    w = torch.randn(512, requires_grad=True)
    grad = torch.randn(2048, 512)
    o = fuselane.rms_norm(x, w)
    o.backward(grad)
    parts = [fuselane.rms_norm(p, w) for p in x.detach().split(64)]
    assert torch.equal(o, torch.cat(parts))
    small = x.detach()[:64].requires_grad_()
    (dx,) = torch.autograd.grad(fuselane.rms_norm(small, w), small, grad[:64])
    assert torch.equal(x.grad[:64], dx)
