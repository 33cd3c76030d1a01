"""Tests of the Python workers: `PYTHON test_worker.py`, with a Python that has the libraries.

Each worker is driven as `fuselane bench` does it. Outputs are compared with the formulas of
`docs/ops` in f64, gradients with their central differences. Libraries that are missing are skipped.
"""

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest

import numpy

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
MIB = 1 << 20
# Spacing of the numbers next to 1.
EPSILON = {"f32": 2**-23, "f16": 2**-10, "bf16": 2**-7}

ERF = numpy.vectorize(math.erf, otypes=[float])


def sigmoid(x):
    return 1 / (1 + numpy.exp(-x))


def relu(x):
    return numpy.maximum(x, 0)


def gelu_tanh(x):
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


ACTS = {
    "none": lambda x: x,
    "relu": relu,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "tanh": numpy.tanh,
    "gelu": lambda x: x * (1 + ERF(x / math.sqrt(2))) / 2,
    "gelu_tanh": gelu_tanh,
    "softplus": lambda x: numpy.log1p(numpy.exp(x)),
    "relu_squared": lambda x: relu(x) ** 2,
}


def softmax(x, dim):
    e = numpy.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def activated(op, x):
    return softmax(x, op["dim"]) if op["act"] == "softmax" else ACTS[op["act"]](x)


def reference(op, n, x, residual=0.0, gate=None, weight=1.0, theta=None):
    """The operators in f64, with loops where they are plainer."""
    kind = op["op"]
    if kind == "act":
        return ACTS[op["act"]](x)
    if kind == "softmax":
        return softmax(x, op["dim"])
    if kind == "normalize":
        q = x + residual
        factor = 1.0 if gate is None else ACTS[op["gate_act"]](gate)
        if op["gate"] == "pre":
            q = q * factor
        o = q / numpy.sqrt((q * q).mean(-1, keepdims=True) + op["eps"]) * weight
        return o * factor if op["gate"] == "post" else o
    x = activated(op, x)
    half = x.shape[-1] // 2
    if kind == "rotate":
        o = numpy.empty_like(x)
        for t, head, k in itertools.product(range(x.shape[1]), range(x.shape[2]), range(half)):
            a = t * theta[head, k]
            x1, x2 = x[:, t, head, k], x[:, t, head, k + half]
            o[:, t, head, k] = x1 * math.cos(a) - x2 * math.sin(a)
            o[:, t, head, k + half] = x1 * math.sin(a) + x2 * math.cos(a)
        return o
    assert kind == "cosine"
    angles = numpy.zeros(x.shape[1:])
    for token, at in enumerate(itertools.product(range(n), repeat=op["axes"])):
        for head, j in itertools.product(range(x.shape[1]), range(x.shape[3])):
            axis, k = divmod(j, theta.shape[1])
            angles[head, op["extra"] + token, j] = at[axis] * theta[head, k]
    return numpy.concatenate([x * numpy.cos(angles), x * numpy.sin(angles)], -1)


def differences(function, inputs, name, grad):
    """The gradient of sum(grad * function(inputs)) by one of the inputs."""
    step, point = 1e-5, inputs[name]
    gradient = numpy.empty_like(point)
    for index in numpy.ndindex(point.shape):
        values = []
        for moved in (point[index] + step, point[index] - step):
            changed = point.copy()
            changed[index] = moved
            values.append((grad * function(**inputs | {name: changed})).sum())
        gradient[index] = (values[0] - values[1]) / (2 * step)
    return gradient


def normalize(**options):
    defaults = {"residual": False, "gate": None, "gate_act": "sigmoid", "weight": True, "eps": 1e-5}
    return {"op": "normalize", **defaults, **options}


def rotate(act="none", dim=None):
    return {"op": "rotate", "act": act, "dim": dim}


def cosine(axes, extra=0, act="none", dim=None):
    return {"op": "cosine", "axes": axes, "extra": extra, "act": act, "dim": dim}


# Compiling takes seconds each, so these are the only ones for torch.compile.
FEW = [
    {"op": "act", "act": "none"},
    {"op": "act", "act": "silu"},
    {"op": "softmax", "dim": -2},
    normalize(),
    normalize(residual=True, gate="pre"),
    rotate("softmax", 1),
    cosine(2, extra=3),
]
ALL = FEW + [
    *({"op": "act", "act": act} for act in ACTS if act not in ("none", "silu")),
    {"op": "softmax", "dim": -1},
    normalize(residual=True),
    normalize(gate="pre"),
    normalize(gate="post", gate_act="silu"),
    normalize(weight=False),
    rotate(),
    rotate("silu"),
    rotate("softmax", -1),
    cosine(1),
    cosine(1, act="softmax", dim=-2),
    cosine(3, extra=1, act="silu"),
]


def to_bf16(values):
    """The upper halves of f32 values, which have to be numbers of bf16."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


STORE = {
    "bf16": to_bf16,
    "f16": lambda values: values.astype("<f2"),
    "f32": lambda values: values.astype("<f4"),
}


def rounded(values, dtype):
    """The nearest numbers that the dtype has, as f64."""
    values = values.astype(numpy.float32)
    if dtype == "bf16":
        bits = values.view(numpy.uint32)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        values = (bits & 0xFFFF0000).astype(numpy.uint32).view(numpy.float32)
    if dtype == "f16":
        values = values.astype(numpy.float16)
    return values.astype(numpy.float64)


class Job:
    """A job on files, and its inputs as f64."""

    def __init__(self, folder, op, mode, dtype, threads, n=3, mapped=False):
        random = numpy.random.default_rng(5)
        batch, heads, dim = 2, 2, 8
        shape = (batch, heads, n, dim)
        if op["op"] == "normalize":
            shape = (batch, n, dim)
        if op["op"] == "rotate":
            shape = (batch, n, heads, dim)
        if op["op"] == "cosine":
            shape = (batch, heads, op["extra"] + n ** op["axes"], dim)
        shapes = {"x": shape}
        if op["op"] == "normalize":
            given = {"residual": op["residual"], "gate": op["gate"], "weight": op["weight"]}
            shapes |= {name: shape for name in ("residual", "gate") if given[name]}
            if op["weight"]:
                shapes["weight"] = (dim,)
        if op["op"] == "rotate":
            shapes["theta"] = (heads, dim // 2)
        if op["op"] == "cosine":
            least = -(-dim // op["axes"])
            shapes["theta"] = (heads, 1 << (least - 1).bit_length())
        if mode == "bwd":
            doubled = 2 if op["op"] == "cosine" else 1
            shapes["grad"] = (*shape[:-1], shape[-1] * doubled)
        self.values, inputs = {}, []
        for name, shape in shapes.items():
            of = "f32" if name == "theta" else dtype
            values = random.standard_normal(shape)
            values += 0.05 * numpy.sign(values)  # away from the kink of relu
            values = rounded(values, of)
            self.values[name] = values
            path = os.path.join(folder, name)
            STORE[of](values).tofile(path)
            inputs.append({"name": name, "dtype": of, "shape": list(shape), "path": path})
        self.n, self.operator, self.mode = n, op, mode
        self.wire = {
            "operator": op,
            "mode": mode,
            "dtype": dtype,
            "n": n,
            "threads": threads,
            "alloc": "fresh",
            "inputs": inputs,
            "mapped": mapped,
        }

    def expected(self):
        """The outputs by name."""

        def function(**inputs):
            return reference(self.operator, self.n, **inputs)

        inputs = {name: value for name, value in self.values.items() if name != "grad"}
        if self.mode == "fwd":
            return {"o": function(**inputs)}
        # The gradient of a residual is that of x, and is not asked for.
        names = [name for name in inputs if name not in ("theta", "residual")]
        grad = self.values["grad"]
        return {"d" + name: differences(function, inputs, name, grad) for name in names}


class Worker:
    THREADS = len(os.sched_getaffinity(0))

    def __init__(self, provider):
        env = os.environ | {"OMP_NUM_THREADS": str(self.THREADS)}
        pipe = subprocess.PIPE
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, WORKER, provider], env=env, stdin=pipe, stdout=pipe, stderr=self.log
        )
        self.hello = self.reply()

    def reply(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise AssertionError("the worker ended: " + self.log.read().decode())
        return json.loads(line)

    def ask(self, do, **request):
        line = json.dumps({"do": do, **request}) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        return self.reply()

    def end(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()
        return self.process.wait()


class Case:
    """What holds for every provider; mixed into a TestCase for each."""

    provider = library = None
    operators, dtypes = ALL, ("f32", "bf16", "f16")

    @classmethod
    def setUpClass(cls):
        if importlib.util.find_spec(cls.library) is None:
            raise unittest.SkipTest(f"{cls.library} is not installed")
        cls.worker = Worker(cls.provider)

    @classmethod
    def tearDownClass(cls):
        code = cls.worker.end()
        assert code == 0, f"the worker ended with {code}"

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def job(self, op, mode="fwd", dtype="f32", **more):
        return Job(self.folder.name, op, mode, dtype, self.worker.THREADS, **more)

    def answer(self, expected, do, **request):
        reply = self.worker.ask(do, **request)
        self.assertEqual(reply["is"], expected, reply)
        return reply

    def outputs(self, job):
        """What the worker computes, all of it."""
        self.answer("ready", "prepare", job=job.wire)
        expected = job.expected()
        samples = {}
        for name, value in expected.items():
            # In two parts: the first half as runs of 1, the rest in one.
            half = value.size // 2
            samples[name] = [
                {"start": 0, "length": 1, "step": 1, "count": half},
                {"start": half, "length": value.size - half, "step": 0, "count": 1},
            ]
        self.answer("written", "outputs", samples=samples, folder=self.folder.name)
        self.answer("released", "release")
        for name, value in expected.items():
            got = numpy.fromfile(os.path.join(self.folder.name, name + ".f32"), "<f4")
            yield name, got.astype(numpy.float64), value.reshape(-1)

    def check(self, job, dtype):
        for name, got, expected in self.outputs(job):
            self.assertEqual(got.shape, expected.shape)
            # The mean stands in for the terms that cancel where a value is near 0.
            scale = numpy.maximum(abs(expected), 0.5 * abs(expected).mean())
            ulps = abs(got - expected) / (EPSILON[dtype] * scale)
            bound = 32 if dtype == "f32" else 4
            if job.mode == "bwd" and job.operator["op"] in ("act", "softmax"):
                # Built-in derivatives start from outputs that were rounded to 16 bits (softmax,
                # sigmoid, tanh), or round after each step (JAX).
                bound = 32
            self.assertLess(ulps.max(), bound, name)

    def test_values(self):
        for dtype, op, mode in itertools.product(self.dtypes, self.operators, ("fwd", "bwd")):
            with self.subTest(dtype=dtype, op=op, mode=mode):
                self.check(self.job(op, mode, dtype, n=2 if op.get("axes") == 3 else 3), dtype)

    def test_mapped_inputs(self):
        self.check(self.job(normalize(), "bwd", "bf16", mapped=True), "bf16")

    def test_hello(self):
        self.assertEqual(self.worker.hello["is"], "hello")
        for name in ("python", "numpy", self.library):
            self.assertRegex(self.worker.hello["versions"][name], r"^\d+\.\d+")

    def test_times(self):
        self.answer("ready", "prepare", job=self.job({"op": "act", "act": "silu"}).wire)
        for settle in (True, False):
            times = self.answer("times", "round", calls=4, settle=settle)["ns"]
            self.assertEqual(len(times), 4)
            self.assertTrue(all(0 < ns < 10**9 for ns in times), times)
        self.answer("released", "release")

    def test_order_of_requests(self):
        job = self.job({"op": "act", "act": "silu"}).wire
        self.answer("failed", "round", calls=1, settle=False)
        self.answer("failed", "outputs", samples={}, folder=self.folder.name)
        self.answer("released", "release")
        self.answer("ready", "prepare", job=job)
        for do in ("prepare", "memory"):
            why = self.answer("failed", do, job=job)["why"]
            self.assertEqual(why, "RuntimeError: the last job is not released")
        self.answer("times", "round", calls=1, settle=False)
        self.answer("released", "release")

    def test_failures(self):
        silu = {"op": "act", "act": "silu"}
        job = self.job(silu).wire
        for do in ("prepare", "memory"):
            reply = self.answer("unsupported", do, job=job | {"operator": {"op": "attention"}})
            self.assertIn("attention", reply["why"])
            self.answer("failed", do, job=job | {"operator": {"op": "act", "act": "wave"}})
            for mapped in (False, True):
                missing = job["inputs"][0] | {"path": os.path.join(self.folder.name, "missing")}
                changed = job | {"inputs": [missing], "mapped": mapped}
                why = self.answer("failed", do, job=changed)["why"]
                self.assertRegex(why, r"^FileNotFoundError: .*missing")
                longer = job["inputs"][0] | {"shape": [10**6]}
                changed = job | {"inputs": [longer], "mapped": mapped}
                why = self.answer("failed", do, job=changed)["why"]
                self.assertRegex(why, r"^EOFError: input x .*: 384 of 4000000 bytes$")
                self.assertNotIn("\n", why)
        self.answer("failed", "dance")
        outside = {"o": [{"start": 90, "length": 10, "step": 1, "count": 1}]}
        self.answer("ready", "prepare", job=job)
        why = self.answer("failed", "outputs", samples=outside, folder=self.folder.name)["why"]
        self.assertEqual(why, "IndexError: a sample outside its output")
        self.answer("released", "release")
        self.check(self.job(silu), "f32")  # it lives

    def test_memory(self):
        path = os.path.join(self.folder.name, "big")
        numpy.ones(16 * MIB, "<f4").tofile(path)
        job = self.job({"op": "act", "act": "relu"}).wire
        job["inputs"] = [{"name": "x", "dtype": "f32", "shape": [16 * MIB], "path": path}]
        for mapped in (False, True):
            extra = self.answer("memory", "memory", job=job | {"mapped": mapped})["extra_bytes"]
            least = 64 * MIB
            # The system counts in batches of some pages per thread.
            self.assertTrue(least - MIB // 4 <= extra <= least + 8 * MIB, extra / MIB)


class TorchTest(Case, unittest.TestCase):
    provider = library = "torch"


class FuselanePythonTest(Case, unittest.TestCase):
    provider, library = "fuselane_python", "fuselane"

    @classmethod
    def setUpClass(cls):
        # Where the worker looks for it too.
        folder = os.environ.get("FUSELANE_PYTHON_PACKAGE")
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
        if importlib.util.find_spec("torch") is None:
            raise unittest.SkipTest("torch is not installed")
        super().setUpClass()

    def test_threads(self):
        job = self.job({"op": "act", "act": "silu"}).wire
        for threads in (1, self.worker.THREADS):
            self.answer("ready", "prepare", job=job | {"threads": threads})
            self.answer("released", "release")


class JaxTest(Case, unittest.TestCase):
    provider = library = "jax"


class TorchCompileTest(Case, unittest.TestCase):
    provider, library = "torch_compile", "torch"
    operators, dtypes = FEW, ("bf16",)


if __name__ == "__main__":
    unittest.main()
