import copy
import pickle

import pytest
import torch
from plain import assert_close

import fuselane
from fuselane import nn


def same(ours, theirs, *shape):
    """That a module of ours takes the place of PyTorch's: names, values and gradients."""
    theirs = theirs.double()
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    ours.load_state_dict({k: v.float() for k, v in theirs.state_dict().items()})
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    x = torch.randn(*shape, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    ours(x).square().sum().backward()
    theirs(exact).square().sum().backward()
    assert_close(ours(x), theirs(exact), 16, 1e-5)
    assert_close(x.grad, exact.grad, 32, 1e-3)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert_close(p.grad, q.grad, 32, 1e-3)


@pytest.mark.parametrize("shape", [16, (4, 16)])
def test_norms_swap_in(shape):
    same(nn.RMSNorm(shape, eps=1e-5), torch.nn.RMSNorm(shape, eps=1e-5), 3, 4, 16)
    same(nn.RMSNorm(shape), torch.nn.RMSNorm(shape, eps=torch.finfo(torch.float32).eps), 3, 4, 16)
    same(nn.LayerNorm(shape), torch.nn.LayerNorm(shape), 3, 4, 16)
    same(nn.LayerNorm(shape, bias=False), torch.nn.LayerNorm(shape, bias=False), 3, 4, 16)
    theirs = torch.nn.LayerNorm(shape, elementwise_affine=False)
    same(nn.LayerNorm(shape, elementwise_affine=False), theirs, 3, 4, 16)


def test_signatures_are_those_of_pytorch():
    import inspect

    for name in ("RMSNorm", "LayerNorm"):
        theirs = [*inspect.signature(getattr(torch.nn, name)).parameters]
        ours = [*inspect.signature(getattr(nn, name)).parameters]
        assert ours[: len(theirs)] == theirs


def test_residuals_and_gates():
    x, r, g = torch.randn(3, 2, 5, 16)
    o, total = nn.SRMSNorm(16)(x, r, return_residual=True)
    assert torch.equal(total, x + r) and torch.equal(o, fuselane.srms_norm(x, r))
    norm = nn.GatedRMSNorm(16, gate_act="silu", gate_pos="post", num_groups=2)
    want = fuselane.normalize(
        x, norm.weight, gate=g, gate_act="silu", gate_pos="post", num_groups=2, scale=1.0
    )
    assert torch.equal(norm(x, g), want)
    gemma = nn.RMSNorm(16, one_plus_weight=True)
    assert torch.equal(gemma.weight, torch.zeros(16))
    assert torch.equal(gemma(x), fuselane.rms_norm(x, eps=torch.finfo(x.dtype).eps))


def test_encodings():
    x = torch.randn(2, 6, 4, 8)
    rotate = nn.LrpeRotate(8, num_heads=4, learned=True, act="silu")
    assert torch.equal(rotate(x, offset=3), fuselane.lrpe_rotate(x, rotate.theta, 3, "silu"))
    rotate(x).sum().backward()
    assert rotate.theta.grad.shape == (4, 4) and [*rotate.state_dict()] == ["theta"]
    x = torch.randn(2, 4, 7, 9)
    cosine = nn.LrpeCosine(9, axes=2)
    assert cosine.theta.shape == (1, 5)
    want = fuselane.lrpe_cosine(x, cosine.theta, shape=(2, 3), l=1)
    assert torch.equal(cosine(x, shape=(2, 3), l=1), want)


MODULES = [
    nn.Act("gelu"),
    nn.Act("softmax", dim=-1),
    nn.RMSNorm(8),
    nn.SRMSNorm(8),
    nn.LayerNorm(8),
    nn.GatedRMSNorm(8),
    nn.LrpeRotate(8),
    nn.LrpeCosine(8),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_copies(module):
    x = torch.randn(2, 3, 4, 8)
    want = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), want)
    assert repr(module).startswith(type(module).__name__)
    assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    module.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_default_eps_is_that_of_pytorch(dtype):
    x = (0.01 * torch.randn(3, 16)).to(dtype)
    want = torch.nn.RMSNorm(16)(x.float())
    got = nn.RMSNorm(16)(x).float()
    assert torch.allclose(got, want, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)


def test_frequencies_stay_wide():
    rotate = nn.LrpeRotate(64, learned=True).bfloat16()
    cosine = torch.nn.Sequential(nn.LrpeCosine(64)).half()[0]
    assert rotate.theta.dtype == torch.float32 == cosine.theta.dtype
    assert torch.equal(rotate.theta, nn.LrpeRotate(64).theta) and rotate.theta.requires_grad
    assert nn.LrpeRotate(64).double().theta.dtype == torch.float64
    empty = nn.LrpeRotate(64).to_empty(device="cpu")
    empty.reset_parameters()
    assert torch.equal(empty.theta, nn.LrpeRotate(64).theta)


def test_bad_options():
    with pytest.raises(ValueError, match="Act: act is 'sillu'.*did you mean 'silu'"):
        nn.Act("sillu")
    with pytest.raises(ValueError, match="Act: .*expected dim with softmax"):
        nn.Act("softmax")
    with pytest.raises(ValueError, match=r"RMSNorm: x has shape \[3, 7\], expected \[\*, 8\]"):
        nn.RMSNorm(8)(torch.randn(3, 7))
    with pytest.raises(ValueError, match="GatedRMSNorm: gate_pos is 'mid'"):
        nn.GatedRMSNorm(8, gate_pos="mid")
