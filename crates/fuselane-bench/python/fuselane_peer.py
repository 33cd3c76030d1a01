"""The Python package `fuselane` on tensors of PyTorch: what a call through it costs beside one of
the Rust library.

`FUSELANE_PYTHON_PACKAGE` may name the folder that has the package, if it is not installed.
"""

import os
import sys

import numpy
import torch

from job import Unsupported
from torch_peer import Loaded

if os.environ.get("FUSELANE_PYTHON_PACKAGE"):
    sys.path.insert(0, os.environ["FUSELANE_PYTHON_PACKAGE"])

import fuselane  # noqa: E402: it may be in that folder


def act(job, x):
    return fuselane.act(x, job["operator"]["act"])


def softmax(job, x):
    return fuselane.softmax(x, job["operator"]["dim"])


def normalize(job, x, residual=None, gate=None, weight=None):
    options = job["operator"]
    return fuselane.normalize(
        x,
        weight,
        residual=residual,
        gate=gate,
        gate_act=options["gate_act"],
        gate_pos=options["gate"] or "pre",
        eps=options["eps"],
        scale=1.0,
    )


def rotate(job, x, theta):
    options = job["operator"]
    return fuselane.lrpe_rotate(x, theta, act=options["act"], dim=options["dim"])


def cosine(job, x, theta):
    options = job["operator"]
    grid = [job["n"]] * options["axes"]
    return fuselane.lrpe_cosine(
        x, theta, grid, options["extra"], act=options["act"], dim=options["dim"]
    )


OPERATORS = {f.__name__: f for f in (act, softmax, normalize, rotate, cosine)}


class Fuselane:
    """The package. Results come from its pool, which is on in both regimes, as it is for the Rust
    library: it is the package's default, and what `fresh` is about."""

    def versions(self):
        return {
            "numpy": numpy.__version__,
            "torch": torch.__version__,
            "fuselane": fuselane.__version__,
        }

    def load(self, job):
        operator = OPERATORS.get(job["operator"]["op"])
        if operator is None:
            raise Unsupported(f"no operator {job['operator']['op']!r}")
        torch.set_num_threads(job["threads"])
        fuselane.set_num_threads(job["threads"])
        return Loaded(job, operator)

    def forget(self):
        pass

    def trim(self):
        fuselane.pool.trim()
