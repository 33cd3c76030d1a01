"""NumPy, JAX and whatever speaks DLPack."""

import ml_dtypes
import numpy as np
import pytest
import torch
from plain import assert_close

import fuselane

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def as_torch(array):
    array = np.asarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def functions():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 6, 16)), rng.standard_normal(16)
    q, theta = rng.standard_normal((2, 5, 2, 16)), rng.random((2, 8))
    return {
        "act": (fuselane.act, [x]),
        "softmax": (lambda x: fuselane.softmax(x, 1), [x]),
        "rms_norm": (fuselane.rms_norm, [x, w]),
        "layer_norm": (fuselane.layer_norm, [x, w, w]),
        "residual": (lambda x, r: fuselane.rms_norm(x, residual=r, return_residual=True)[1], [x, x]),
        "gate": (lambda x, g: fuselane.normalize(x, gate=g), [x, x]),
        "rotate": (lambda q, t: fuselane.lrpe_rotate(q, t, 3, "silu"), [q, theta]),
        "cosine": (lambda q, t: fuselane.lrpe_cosine(q, t, layout="bnhd", shape=(5,)), [q, np.tile(theta, 2)]),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("name", functions())
def test_numpy(name, dtype):
    function, arrays = functions()[name]
    arrays = [a.astype(dtype) for a in arrays]
    o = function(*arrays)
    assert type(o) is np.ndarray and o.dtype == dtype
    want = function(*map(as_torch, arrays))
    assert torch.equal(as_torch(o), want)


def test_numpy_views_and_readonly():
    x = np.arange(48, dtype=np.float32).reshape(6, 8)
    x.flags.writeable = False
    assert np.array_equal(fuselane.act(x.T, "relu"), x.T)
    assert np.array_equal(fuselane.act(x[::2, 2:], "relu"), x[::2, 2:])
    assert np.array_equal(fuselane.act(x[::-1], "relu"), x[::-1])
    o = fuselane.act(x, "relu")
    o += 1  # ours, and writable
    assert not np.shares_memory(o, x)
    assert fuselane.act(np.float32(-1.0), "relu") == 0
    assert fuselane.act(np.empty((0, 4), np.float32)).shape == (0, 4)


def test_numpy_numbers_lists_and_frequencies():
    x = np.random.default_rng(0).standard_normal((1, 5, 1, 8)).astype(np.float32)
    theta = fuselane.theta.frequencies(8)
    want = fuselane.lrpe_rotate(torch.from_numpy(x), theta, 3).numpy()
    for form in (theta, np.float32(theta), np.float32([theta])):
        assert np.array_equal(fuselane.lrpe_rotate(x, form, np.int64(3)), want)
    table = fuselane.AngleTable(theta, count=4, length=10)
    assert np.array_equal(fuselane.lrpe_rotate(x, table, 3), want)
    y = np.full((2, 4), -np.inf, np.float32)
    assert not fuselane.softmax(y, zero_masked_rows=np.True_).any()
    with pytest.raises(TypeError, match="normalize: weight is a list"):
        fuselane.rms_norm(x, [1.0] * 8)
    with pytest.raises(TypeError, match="lrpe_rotate: positions is a list"):
        fuselane.lrpe_rotate(x, theta, positions=[0, 1, 2, 3, 4])
    with pytest.raises(TypeError, match="softmax: dim is a NoneType, expected a whole number"):
        fuselane.softmax(x, None)


def test_results_outlive_the_call():
    x = np.random.default_rng(0).standard_normal((600, 1000)).astype(np.float32)
    kept = [fuselane.act(x, "relu") for _ in range(5)]
    view = kept[0][5:, 5:]
    del kept
    for _ in range(5):
        fuselane.act(-x, "relu")
    assert np.array_equal(view, np.maximum(x, 0)[5:, 5:])


def test_numpy_errors():
    x = np.zeros((3, 4), np.float32)
    with pytest.raises(TypeError, match="act: x has dtype int64"):
        fuselane.act(np.arange(3))
    with pytest.raises(TypeError, match="act: x has dtype complex64"):
        fuselane.act(x * 1j)
    with pytest.raises(ValueError, match="byte order"):
        fuselane.act(x.astype(">f4"))
    with pytest.raises(ValueError, match=r"normalize: weight has shape \[3\]"):
        fuselane.rms_norm(x, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="strides"):
        fuselane.act(np.zeros(4, np.dtype([("a", "f4"), ("b", "i1")]))["a"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", functions())
def test_jax(name, dtype):
    jax = pytest.importorskip("jax")
    function, arrays = functions()[name]
    arrays = [jax.numpy.asarray(a, dtype=dtype) for a in arrays]
    o = function(*arrays)
    assert isinstance(o, jax.Array) and o.dtype == dtype
    want = function(*(as_torch(a) for a in arrays))
    assert torch.equal(as_torch(o), want)


class Foreign:
    """An array of a library that we know nothing of, but that it speaks DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __array_namespace__(self):
        return Foreign

    shape = property(lambda self: self.tensor.shape)

    @staticmethod
    def from_dlpack(block):
        return Foreign(torch.from_dlpack(block))


def test_dlpack():
    x = torch.randn(4, 16).t()
    o = fuselane.softmax(Foreign(x), 0)
    assert isinstance(o, Foreign) and torch.equal(o.tensor, fuselane.softmax(x, 0))


def test_dlpack_from_another_device():
    class Elsewhere(Foreign):
        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(ValueError, match="another device.*expected the CPU"):
        fuselane.act(Elsewhere(torch.randn(3)))


def test_close_to_the_truth():
    x = np.random.default_rng(0).standard_normal((5, 33))
    assert_close(torch.from_numpy(fuselane.softmax(x)), torch.softmax(torch.from_numpy(x), -1), 8)
