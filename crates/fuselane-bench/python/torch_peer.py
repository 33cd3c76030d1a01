"""PyTorch, eager and compiled: each operator as a PyTorch user would write it.

Built-in functions where there are any. They take 16-bit inputs as they are, and widen inside. Where
an operator is put together of several, 16-bit inputs are widened to f32 first and the result is
rounded once, which is what fuselane computes.
"""

import os
import shutil
import warnings

import numpy
import torch
import torch._functorch.config
import torch.nn.functional as F

from job import Unsupported, elements, input_names, map_input, open_input, sampled, trained

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

ACTS = {
    "none": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "relu_squared": lambda x: F.relu(x).square(),
}


def act(job, x):
    return ACTS[job["operator"]["act"]](x)


def softmax(job, x):
    return torch.softmax(x, job["operator"]["dim"])


def normalize(job, x, residual=None, gate=None, weight=None):
    options, features = job["operator"], x.shape[-1:]
    if residual is None and gate is None:
        return F.rms_norm(x, features, weight, options["eps"])
    q = x.float()
    if residual is not None:
        q = q + residual.float()
    if gate is not None:
        gate = ACTS[options["gate_act"]](gate.float())
    if options["gate"] == "pre":
        q = q * gate
    o = F.rms_norm(q, features, weight if weight is None else weight.float(), options["eps"])
    if options["gate"] == "post":
        o = o * gate
    return o.to(x.dtype)


def rotate(job, x, theta):
    x1, x2 = activated(job, x).chunk(2, -1)
    positions = torch.arange(x.shape[1], dtype=torch.float32)
    angles = positions[:, None, None] * theta  # (n, h, d/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).to(x.dtype)


def cosine(job, x, theta):
    options = job["operator"]
    axis = torch.arange(job["n"], dtype=torch.float32)
    grid = torch.meshgrid(*[axis] * options["axes"], indexing="ij")
    angles = torch.cat([at.reshape(-1, 1) * theta[:, None] for at in grid], -1)
    angles = angles[..., : x.shape[-1]]
    angles = F.pad(angles, (0, 0, options["extra"], 0))  # (h, extra + n^axes, d)
    x_ = activated(job, x)
    return torch.cat([x_ * angles.cos(), x_ * angles.sin()], -1).to(x.dtype)


def activated(job, x):
    """What rotate and cosine apply first, in f32."""
    options = job["operator"]
    if options["act"] == "softmax":
        return torch.softmax(x, options["dim"], dtype=torch.float32)
    return ACTS[options["act"]](x.float())


OPERATORS = {f.__name__: f for f in (act, softmax, normalize, rotate, cosine)}


class Torch:
    def __init__(self, compiled):
        self.compiled = compiled
        # A backward is run again and again from one forward, so it may not use up the forward's
        # buffers for its own results.
        torch._functorch.config.donated_buffer = False

    def versions(self):
        return {"numpy": numpy.__version__, "torch": torch.__version__}

    def load(self, job):
        operator = OPERATORS.get(job["operator"]["op"])
        if operator is None:
            raise Unsupported(f"no operator {job['operator']['op']!r}")
        if self.compiled and shutil.which(os.environ.get("CXX", "g++")) is None:
            raise Unsupported("torch.compile needs a C++ compiler: install g++, or name one in CXX")
        torch.set_num_threads(job["threads"])
        return Loaded(job, operator, self.compiled)

    def forget(self):
        if self.compiled:
            torch._dynamo.reset()

    def trim(self):
        pass  # it keeps no memory of its own


class Loaded:
    """A job whose inputs are in memory, and the function that is to be called with them."""

    def __init__(self, job, operator, compiled=False):
        self.mode = job["mode"]
        self.inputs = {spec["name"]: read(spec, job["mapped"]) for spec in job["inputs"]}
        self.names = names = input_names(job)
        for name in trained(names):
            self.inputs[name].requires_grad_()

        def forward(*inputs):
            return operator(job, **dict(zip(names, inputs)))

        self.function = forward
        if compiled:
            self.function = torch.compile(forward, fullgraph=True, dynamic=False)

    def forward(self):
        return self.function(*(self.inputs[name] for name in self.names))

    def call(self):
        return Forward(self) if self.mode == "fwd" else Backward(self)


class Call:
    """A call that can be made again and again. Each drops the outputs of the last one first."""

    def __init__(self, loaded):
        self.loaded = loaded
        self.outputs = {}

    def sample(self, output, samples):
        flat = self.outputs[output].detach().reshape(-1)
        return torch.cat([flat[part].float() for part in sampled(samples, flat.numel())]).numpy()


class Forward(Call):
    """Without gradients: nothing is kept for a backward. That is the faster form, by far for some
    compiled functions (a relu that is to be differentiated also writes a mask)."""

    def run(self):
        self.outputs = {}
        with torch.no_grad():
            self.outputs = {"o": self.loaded.forward()}


class Backward(Call):
    """The backward alone: gradients are made anew each time, and not accumulated."""

    def __init__(self, loaded):
        super().__init__(loaded)
        self.o = loaded.forward()
        self.trained = trained(loaded.names)

    def run(self):
        self.outputs = {}
        inputs = [self.loaded.inputs[name] for name in self.trained]
        grad = self.loaded.inputs["grad"]
        gradients = torch.autograd.grad(self.o, inputs, grad, retain_graph=True)
        self.outputs = {"d" + name: value for name, value in zip(self.trained, gradients)}


def read(spec, mapped):
    dtype, shape = DTYPES[spec["dtype"]], spec["shape"]
    if mapped:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the memory is read-only: nothing writes inputs
            return torch.frombuffer(map_input(spec), dtype=dtype).reshape(shape)
    tensor = torch.empty(shape, dtype=dtype)
    left = memoryview(tensor.view(torch.uint8).numpy()).cast("B")[: elements(spec) * dtype.itemsize]
    with open_input(spec) as file:
        while left:
            # Linux reads 2 GiB at most at a time.
            count = file.readinto(left)
            if not count:
                raise EOFError(f"input {spec['name']} ({spec['path']}) became shorter")
            left = left[count:]
    return tensor
