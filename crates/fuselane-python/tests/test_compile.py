"""`torch.compile`, `torch.export`, fake tensors, and what `torch.library.opcheck` asks of operators."""

import pytest
import torch
from calls import NAMES, calls
from torch._subclasses.fake_tensor import FakeTensorMode

import fuselane

OPS = torch.ops.fuselane
NORM = (3, False, False, 1.0, 1e-6)


def samples():
    x, w, g = torch.randn(3, 4, 8), torch.randn(8), torch.randn(3, 4, 8)
    turned = torch.randn(4, 8, 3).permute(2, 0, 1)
    rstd = torch.rand(3, 4, 1)
    q, theta = torch.randn(2, 5, 2, 8), torch.rand(2, 4)
    spots = torch.arange(5)
    return [
        ("act", (x, 3)),
        ("act", (turned, 1)),
        ("act", (x[::2, 1:], 1)),
        ("act", (torch.randn(2, 1, 8).expand(2, 3, 8), 2)),
        ("act_backward", (g, x, 3, False)),
        ("act_backward", (g, x.sigmoid(), 2, True)),
        ("softmax", (x, -1, False, False)),
        ("softmax", (turned, 1, True, False)),
        ("softmax_backward", (g, x.softmax(-1), -1, False, False)),
        ("normalize", (x, None, None, None, None, *NORM, False, 1)),
        ("normalize", (turned.contiguous(), w, w, x, g, *NORM, True, 2)),
        ("normalize_keeping", (x, w, None, g, None, *NORM, False, 1, True)),
        ("normalize_keeping", (x, w, w, None, g, *NORM, True, 2, False)),
        (
            "normalize_backward",
            (g, None, x, w, None, None, g, rstd, None, *NORM, False, 1, True, True, True, False),
        ),
        (
            "normalize_backward",
            (g, g, x, w, w, None, None, rstd, rstd, *NORM, True, 1, False, False, True, True),
        ),
        ("rotate", (q, theta, None, None, 0, 0, 3, [], 0, False, False, False, -1)),
        ("rotate", (q, theta, spots, None, 0, 10, 0, [], 0, False, True, False, 2)),
        ("rotate_backward", (q, q, theta, None, None, 0, 3, 0, [5], 0, False, False, False, -1, True, True)),
        ("rotate_backward", (q, None, theta, None, None, 0, 0, 0, [], 0, False, False, False, -1, True, False)),
        ("cosine", (q.transpose(1, 2), torch.rand(1, 8), None, None, 0, 0, 0, [], 1, True)),
        ("cosine_backward", (torch.randn(2, 2, 5, 16), None, torch.rand(1, 8), None, None, 0, 0, 0, [], 0, True, True, False)),
        ("cosine_backward", (torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 8), torch.rand(2, 8), None, None, 0, 3, 0, [5], 0, True, False, True)),
    ]  # fmt: skip


def test_every_operator_is_checked():
    from fuselane import _native

    assert {name for name, _ in samples()} == {s.partition("(")[0] for s in _native.schemas()}


@pytest.mark.parametrize("index", range(len(samples())))
def test_opcheck(index):
    name, arguments = samples()[index]
    torch.library.opcheck(getattr(OPS, name).default, arguments)
    # And with inputs that require gradients, as a Function passes them.
    arguments = [
        a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in arguments
    ]
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(OPS, name).default, tuple(arguments), test_utils=utils)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compile(name, dynamic):
    function, tensors = calls()[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    grad = torch.randn_like(function(*tensors))
    want = function(*tensors)
    wants = torch.autograd.grad(want, tensors, grad)
    got = compiled(*tensors)
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got, tensors, grad), wants):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(compiled(*tensors), want)


def test_inductor():
    norm = fuselane.nn.RMSNorm(32)
    linear = torch.nn.Linear(32, 32)
    rotate = fuselane.nn.LrpeRotate(8)

    def model(x):
        h = rotate(linear(norm(x)).unflatten(-1, (4, 8)))
        return (fuselane.act(h.flatten(-2)) + x).sum(-1)

    x = torch.randn(2, 5, 32, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True)
    parameters = [x, norm.weight, linear.weight]
    want, got = model(x), compiled(x)
    assert torch.allclose(got, want, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(got.sum(), parameters), torch.autograd.grad(want.sum(), parameters)
    ):
        assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_no_recompile_for_each_length(name):
    function, tensors = calls()[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    compiled(*tensors).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for scale in (2, 3, 4, 5):
            function, tensors = calls(scale=scale)[name]
            o = compiled(*tensors)
            assert torch.equal(o, function(*tensors))
            o.sum().backward()


def test_no_recompile_for_each_offset():
    theta = torch.rand(1, 4)

    def step(x, offset):
        return fuselane.lrpe_rotate(x, theta, offset)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    x = torch.randn(1, 1, 2, 8)
    compiled(x, 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for offset in range(3, 12):
            assert torch.equal(compiled(x, offset), step(x, offset))


def test_tables_compile():
    table = fuselane.AngleTable(torch.rand(1, 4), count=4, length=16)
    x = torch.randn(1, 16, 2, 8, requires_grad=True)
    compiled = torch.compile(fuselane.lrpe_rotate, fullgraph=True, backend="aot_eager")
    o = compiled(x, table)
    assert torch.equal(o, fuselane.lrpe_rotate(x, table))
    o.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_meta_and_fake(name):
    function, tensors = calls()[name]
    want = function(*tensors)
    o = function(*(t.detach().to("meta") for t in tensors))
    assert o.device.type == "meta" and o.shape == want.shape and o.dtype == want.dtype
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in tensors]
        o = function(*fake)
        assert o.shape == want.shape and o.stride() == want.stride()
        grads = torch.autograd.grad(o, fake, torch.ones_like(o))
    assert [g.shape for g in grads] == [t.shape for t in tensors]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = fuselane.nn.RMSNorm(16)
        self.linear = torch.nn.Linear(16, 16)
        self.act = fuselane.nn.Act("silu")

    def forward(self, x):
        return x + self.act(self.linear(self.norm(x)))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    block = Block()
    x = torch.randn(3, 5, 16)
    length = torch.export.Dim("length", min=2, max=100)
    program = torch.export.export(block, (x,), dynamic_shapes=({1: length},), strict=strict)
    graphs = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert any("fuselane.act" in name for name in names), names
    for n in (5, 9):
        x = torch.randn(3, n, 16)
        assert torch.allclose(program.module()(x), block(x), atol=1e-6)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_function_transforms_are_refused(transform):
    """Better than a gradient that is silently missing."""
    x = torch.randn(3, 4, requires_grad=True)
    runs = {
        "vmap": lambda: torch.func.vmap(fuselane.act)(x),
        "grad": lambda: torch.func.grad(lambda x: fuselane.act(x).sum())(x),
        "jvp": lambda: torch.func.jvp(fuselane.act, (x,), (x,)),
    }
    with pytest.raises(NotImplementedError, match="act: .*torch.func"):
        runs[transform]()


def test_tangents_are_refused():
    x = torch.randn(3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
        with pytest.raises(NotImplementedError, match="act: a tensor carries a tangent"):
            fuselane.act(dual)
        assert fuselane.act(x).shape == (3,)


def test_subclasses_and_modes_see_operators():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        fuselane.act(torch.randn(3))
    assert "fuselane.act.default" in seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fuselane.act(torch.randn(3))
    assert "fuselane::act" in [event.key for event in profile.key_averages()]


def test_jit_trace_sees_operators():
    traced = torch.jit.trace(fuselane.act, torch.randn(3), check_trace=False)
    x = torch.randn(5)
    assert torch.equal(traced(x), fuselane.act(x))
