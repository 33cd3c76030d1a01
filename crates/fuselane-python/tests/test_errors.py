"""That bad calls are refused with an error that says what came and what was expected."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fuselane

X = torch.randn(3, 8)
Q = torch.randn(2, 5, 2, 8)

CASES = [
    (ValueError, "act: x has stride 2 .*contiguous", lambda: fuselane.act(X[:, ::2])),
    (TypeError, "act: x has dtype int64, expected float32", lambda: fuselane.act(torch.arange(3))),
    (TypeError, "act: x has dtype complex64", lambda: fuselane.act(X + 1j)),
    (TypeError, "act: x has dtype bool", lambda: fuselane.act(X > 0)),
    (TypeError, "act: x is a list, expected a PyTorch tensor", lambda: fuselane.act([1.0])),
    (TypeError, "act: x is a NoneType", lambda: fuselane.act(None)),
    (TypeError, "normalize: x is a list", lambda: fuselane.normalize([1.0])),
    (TypeError, "lrpe_rotate: x is a list", lambda: fuselane.lrpe_rotate([1.0], [1.0])),
    (ValueError, "act: act is 'Silu'.*did you mean 'silu'", lambda: fuselane.act(X, "Silu")),
    (ValueError, "act: act is None", lambda: fuselane.act(X, None)),
    (ValueError, "act: dim is missing", lambda: fuselane.act(X, "softmax")),
    (ValueError, "act: x has layout torch.sparse_coo", lambda: fuselane.act(X.to_sparse())),
    (ValueError, "act: x has 9 dimensions, expected at most 8", lambda: fuselane.act(X.view(3, 8, *[1] * 7))),
    (ValueError, "softmax: dim is 2", lambda: fuselane.softmax(X, 2)),
    (ValueError, r"normalize: weight has shape \[3\], expected \[8\]", lambda: fuselane.rms_norm(X, X[:, 0])),
    (TypeError, "normalize: weight is a list, expected a tensor", lambda: fuselane.rms_norm(X, [1.0])),
    (ValueError, "normalize: residual has shape", lambda: fuselane.rms_norm(X, residual=X[:2])),
    (TypeError, "normalize: gate has dtype f64, expected f32", lambda: fuselane.normalize(X, gate=X.double())),
    (ValueError, "normalize: groups is 3", lambda: fuselane.normalize(X, num_groups=3)),
    (ValueError, "normalize: groups is -2", lambda: fuselane.group_norm(X, -2)),
    (ValueError, "normalize: groups is 0", lambda: fuselane.normalize(X, num_groups=0)),
    (ValueError, "normalize: eps is -1", lambda: fuselane.rms_norm(X, eps=-1.0)),
    (ValueError, "normalize: gate_act is 'swish'", lambda: fuselane.normalize(X, gate=X, gate_act="swish")),
    (ValueError, "normalize: gate_pos is 'mid'", lambda: fuselane.normalize(X, gate=X, gate_pos="mid")),
    (ValueError, "normalize: x has no dimensions", lambda: fuselane.rms_norm(torch.tensor(1.0))),
    (ValueError, "lrpe_rotate: x has shape", lambda: fuselane.lrpe_rotate(X, torch.rand(4))),
    (ValueError, "rotate: theta has 5 frequencies, expected at most 4", lambda: fuselane.lrpe_rotate(Q, torch.rand(5))),
    (ValueError, "lrpe_rotate: dim is 2", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), act="softmax", dim=2)),
    (ValueError, "lrpe_rotate: dim is -1 with act 'silu'", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), act="silu", dim=-1)),
    (ValueError, "lrpe_rotate: layout is 'nbhd'", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), layout="nbhd")),
    (ValueError, "rotate: positions", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), positions=torch.arange(4))),
    (TypeError, "rotate: positions has dtype float32", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), positions=torch.rand(5))),
    (ValueError, "rotate: sequences|rotate: cu_seqlens", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), cu_seqlens=torch.tensor([0, 9]))),
    (ValueError, "rotate: cu_seqlens has -1", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), cu_seqlens=torch.tensor([-1, 5]))),
    (ValueError, "lrpe_rotate: shape is given with positions", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), shape=(5,), positions=torch.arange(5))),
    (ValueError, "cosine: ", lambda: fuselane.lrpe_cosine(Q, torch.rand(3))),
    (ValueError, "cosine: ", lambda: fuselane.lrpe_cosine(Q, torch.rand(8), shape=(3, 3))),
    (ValueError, "lrpe_rotate: pairs is -5", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), pairs=-5)),
    (ValueError, "lrpe_rotate: offset is 3 with positions", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), 3, positions=torch.arange(5))),
    (TypeError, "lrpe_rotate: positions is a list", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), positions=[0, 1, 2, 3, 4])),
    (TypeError, "lrpe_rotate: cu_seqlens is a list", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), cu_seqlens=[0, 5])),
    (TypeError, "lrpe_rotate: ", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), 1.5)),
    (ValueError, "rotate: cu_seqlens has shape", lambda: fuselane.lrpe_rotate(Q, torch.rand(4), cu_seqlens=torch.tensor([[0, 5]]))),
    (TypeError, "softmax: ", lambda: fuselane.softmax(X, None)),
    (TypeError, "softmax: ", lambda: fuselane.softmax(X, 1.0)),
    (TypeError, "normalize: weight is a int", lambda: fuselane.rms_norm(X, 8)),
    (TypeError, "normalize: weight is a tuple", lambda: fuselane.rms_norm(X, (8,), X[0])),
    (TypeError, "normalize: residual is a list", lambda: fuselane.rms_norm(X, None, [1])),
    (TypeError, "normalize: ", lambda: fuselane.rms_norm(X, eps=None)),
    (TypeError, "normalize: ", lambda: fuselane.group_norm(X, 2.0)),
    (ValueError, "normalize: weight is on meta, expected cpu", lambda: fuselane.rms_norm(X, torch.ones(8, device="meta"))),
    (ValueError, "AngleTable: length is -4", lambda: fuselane.AngleTable([1.0], 1, -4)),
    (ValueError, "LrpeRotate: head_dim is 7", lambda: fuselane.nn.LrpeRotate(7)),
    (ValueError, "theta: dim is 3", lambda: fuselane.theta.frequencies(3)),
    (ValueError, "theta: scaling is .ntkk.", lambda: fuselane.theta.frequencies(4, scaling="ntkk")),
    (ValueError, "AngleTable: expected either", lambda: fuselane.AngleTable([1.0], 1)),
    (ValueError, "set_num_threads: n is 0", lambda: fuselane.set_num_threads(0)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
def test_refused(case):
    kind, text, call = case
    with pytest.raises(kind, match=text) as caught:
        call()
    assert type(caught.value) is kind


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
def test_refused_with_gradients(case):
    global X, Q
    kind, text, call = case
    old = X, Q
    X, Q = X.clone().requires_grad_(), Q.clone().requires_grad_()
    try:
        with pytest.raises(kind, match=text):
            call()
    finally:
        X, Q = old


def test_other_devices():
    with FakeTensorMode():
        x = torch.empty(3, 8, device="cuda")
        for call in (
            lambda: fuselane.act(x),
            lambda: fuselane.softmax(x),
            lambda: fuselane.rms_norm(x),
            lambda: fuselane.lrpe_rotate(x.view(1, 3, 1, 8), torch.empty(4, device="cuda")),
        ):
            with pytest.raises(ValueError, match="x is on cuda.*expected the CPU"):
                call()


def test_a_mixture_of_devices():
    with FakeTensorMode():
        x, w = torch.empty(3, 8), torch.empty(8, device="cuda")
        with pytest.raises(ValueError, match="weight is on cuda"):
            fuselane.rms_norm(x, w)


def test_errors_of_others_are_not_ours():
    def refuse(x):
        return fuselane.lrpe_rotate(x, torch.rand(4), cu_seqlens=torch.tensor([0, 9]))

    with pytest.raises(Exception):
        torch.compile(refuse, backend="aot_eager")(Q)

    def fail(tensor):
        raise RuntimeError("disk full")

    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(fail, lambda t: t):
        with pytest.raises(RuntimeError, match="disk full"):
            fuselane.act(x)


def test_zero_dimensional_tensors_are_numbers():
    theta = torch.rand(4)
    assert torch.equal(fuselane.lrpe_rotate(Q, theta, torch.tensor(5)), fuselane.lrpe_rotate(Q, theta, 5))


def test_the_call_after_an_error_works():
    with pytest.raises(ValueError):
        fuselane.rms_norm(X, X[:, 0])
    assert fuselane.rms_norm(X).shape == X.shape
