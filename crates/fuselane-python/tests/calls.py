"""One call of each operator, for the tests that all of them have to pass."""

import torch

import fuselane


def calls(dtype=torch.float32, scale=1):
    """Name: (function, tensors that get gradients)."""

    def leaf(*shape):
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    n = 6 * scale
    return {
        "act": (lambda x: fuselane.act(x, "silu"), [leaf(4, n, 16)]),
        "softmax": (lambda x: fuselane.softmax(x, -1), [leaf(4, n, 16)]),
        "softmax over tokens": (lambda x: fuselane.softmax(x, 1), [leaf(4, n, 16)]),
        "log_softmax": (lambda x: fuselane.log_softmax(x, -1), [leaf(4, n, 16)]),
        "rms_norm": (fuselane.rms_norm, [leaf(4, n, 16), leaf(16)]),
        "layer_norm": (fuselane.layer_norm, [leaf(4, n, 16), leaf(16), leaf(16)]),
        "residual": (
            lambda x, w, r: torch.cat(fuselane.rms_norm(x, w, r, return_residual=True)),
            [leaf(4, n, 16), leaf(16), leaf(4, n, 16)],
        ),
        "gate": (
            lambda x, w, g: fuselane.normalize(x, w, gate=g, gate_act="silu", gate_pos="post"),
            [leaf(4, n, 16), leaf(16), leaf(4, n, 16)],
        ),
        "rotate": (
            lambda x, t: fuselane.lrpe_rotate(x, t, act="silu"),
            [leaf(2, n, 2, 16), leaf(2, 8)],
        ),
        "cosine": (
            lambda x, t: fuselane.lrpe_cosine(x, t, act="softmax", dim=-1),
            [leaf(2, 2, n, 16), leaf(1, 16)],
        ),
        "cosine on a grid": (
            lambda x, t: fuselane.lrpe_cosine(x, t, shape=(2, x.shape[2] // 2)),
            [leaf(2, 2, n, 16), leaf(1, 8)],
        ),
    }


NAMES = [*calls()]
