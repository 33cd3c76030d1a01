"""JAX on the CPU: each operator as a JAX user would write it, compiled by XLA.

16-bit inputs of norms and encodings are widened to f32 first and the result is rounded once, as in
`torch_peer.py`; XLA fuses the conversions.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402: after the choice of the platform
import jax.numpy as jnp
import jaxlib
import ml_dtypes
import numpy

from job import Unsupported, cpus, input_names, map_input, sampled, trained

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": numpy.float16, "f32": numpy.float32}

ACTS = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "softplus": jax.nn.softplus,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}


def act(job, x):
    return ACTS[job["operator"]["act"]](x)


def softmax(job, x):
    return jax.nn.softmax(x, axis=job["operator"]["dim"])


def normalize(job, x, residual=None, gate=None, weight=None):
    options = job["operator"]
    q = x.astype(jnp.float32)
    if residual is not None:
        q = q + residual
    if gate is not None:
        gate = ACTS[options["gate_act"]](gate.astype(jnp.float32))
    if options["gate"] == "pre":
        q = q * gate
    o = q * jax.lax.rsqrt(jnp.mean(jnp.square(q), -1, keepdims=True) + options["eps"])
    if weight is not None:
        o = o * weight
    if options["gate"] == "post":
        o = o * gate
    return o.astype(x.dtype)


def rotate(job, x, theta):
    x1, x2 = jnp.split(activated(job, x), 2, axis=-1)
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    angles = positions[:, None, None] * theta  # (n, h, d/2)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).astype(x.dtype)


def cosine(job, x, theta):
    options = job["operator"]
    axis = jnp.arange(job["n"], dtype=jnp.float32)
    grid = jnp.meshgrid(*[axis] * options["axes"], indexing="ij")
    angles = jnp.concatenate([at.reshape(-1, 1) * theta[:, None] for at in grid], -1)
    angles = angles[..., : x.shape[-1]]
    angles = jnp.pad(angles, ((0, 0), (options["extra"], 0), (0, 0)))  # (h, extra + n^axes, d)
    x_ = activated(job, x)
    return jnp.concatenate([x_ * jnp.cos(angles), x_ * jnp.sin(angles)], -1).astype(x.dtype)


def activated(job, x):
    """What rotate and cosine apply first, in f32."""
    options = job["operator"]
    x = x.astype(jnp.float32)
    if options["act"] == "softmax":
        return jax.nn.softmax(x, axis=options["dim"])
    return ACTS[options["act"]](x)


OPERATORS = {f.__name__: f for f in (act, softmax, normalize, rotate, cosine)}


class Jax:
    def versions(self):
        modules = {"numpy": numpy, "jax": jax, "jaxlib": jaxlib}
        return {name: module.__version__ for name, module in modules.items()}

    def load(self, job):
        if job["operator"]["op"] not in OPERATORS:
            raise Unsupported(f"no operator {job['operator']['op']!r}")
        if job["threads"] != len(cpus()):
            raise RuntimeError(f"this worker has {len(cpus())} threads")
        return Loaded(job)

    def forget(self):
        jax.clear_caches()

    def trim(self):
        pass  # it keeps no memory of its own


class Loaded:
    """A job whose inputs are in memory."""

    def __init__(self, job):
        self.mode = job["mode"]
        self.inputs = {spec["name"]: read(spec) for spec in job["inputs"]}
        self.names = names = input_names(job)
        operator = OPERATORS[job["operator"]["op"]]

        def function(inputs):
            return operator(job, **inputs)

        def forward(inputs):
            """With what the backward needs, the pullback, as a second result."""
            fixed = {name: inputs[name] for name in names if name not in trained(names)}
            varied = {name: inputs[name] for name in trained(names)}
            return jax.vjp(lambda varied: function(varied | fixed), varied)

        self.function = jax.jit(function)
        self.forward = jax.jit(forward)
        self.backward = jax.jit(lambda pullback, grad: pullback(grad)[0])

    def call(self):
        return Forward(self) if self.mode == "fwd" else Backward(self)


class Call:
    """A call that can be made again and again. Each drops the outputs of the last one first."""

    def __init__(self, loaded):
        self.loaded = loaded
        self.inputs = {name: loaded.inputs[name] for name in loaded.names}
        self.outputs = {}

    def sample(self, output, samples):
        flat = numpy.asarray(self.outputs[output]).reshape(-1)
        parts = [flat[part].astype(numpy.float32) for part in sampled(samples, flat.size)]
        return numpy.concatenate(parts)


class Forward(Call):
    def run(self):
        self.outputs = {}
        self.outputs = {"o": self.loaded.function(self.inputs).block_until_ready()}


class Backward(Call):
    """The backward alone, from a forward that was run before."""

    def __init__(self, loaded):
        super().__init__(loaded)
        self.o, self.pullback = jax.block_until_ready(loaded.forward(self.inputs))

    def run(self):
        self.outputs = {}
        gradients = self.loaded.backward(self.pullback, self.loaded.inputs["grad"])
        jax.block_until_ready(gradients)
        self.outputs = {"d" + name: value for name, value in gradients.items()}


def read(spec):
    """A copy in JAX's own memory, also of a job that asks for mapped inputs: JAX has no arrays on
    memory that is not its own. It copies from the mapped file, so there is one copy only."""
    array = numpy.frombuffer(map_input(spec), dtype=DTYPES[spec["dtype"]]).reshape(spec["shape"])
    return jax.block_until_ready(jax.device_put(array, may_alias=False))
