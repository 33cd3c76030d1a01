"""How fast the operators are from Python, beside PyTorch: ``python -m fuselane.bench``.

Tiny calls show what a call costs, in microseconds; large tensors show how much of the machine's
copy speed is reached. Whoever is compared takes turns with the others, round by round, so that
whatever else the machine does falls on all of them.

Results are where each library puts them by default: ours in the pool's memory, PyTorch's in memory
that the system may have to hand out anew. `fuselane bench` (the program) measures both ways.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence

try:
    import torch
    import torch.nn.functional as F
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit("fuselane.bench needs PyTorch, to compare with it: install the package torch first")

import fuselane

from ._torch.register import FALLBACK_REASON

OURS, EAGER, COMPILED, COPY = "fuselane", "torch", "compile", "copy"
EPS = 1e-6

#: Calls in a batch of a tiny measurement; a round is several batches, of which the fastest counts.
BATCH, BATCHES = 100, 5
#: The features of large tensors; for encodings, heads and the features of one.
FEATURES, HEADS, HEAD_FEATURES = 1024, 8, 128
#: Rounds of a large measurement: at least, and no new one is begun after so many seconds.
LEAST_ROUNDS, ROW_SECONDS = 3, 1.0
#: Calls that take less than this many seconds are preceded by one that is not timed: it brings
#: data back into the caches, and threads of the other library may still be spinning.
SETTLED = 0.02
#: Rows of a large tensor whose results are compared.
COMPARED_ROWS = 64

DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}


def wide(x: torch.Tensor) -> torch.Tensor:
    """In float32. PyTorch's own functions do so inside; what is put together of several has to."""
    return x if x.dtype == torch.float32 else x.float()


def eager_gated(x: Any, weight: Any, gate: Any) -> Any:
    q = wide(x) * torch.sigmoid(wide(gate))
    return F.rms_norm(q, x.shape[-1:], wide(weight), EPS).to(x.dtype)


def eager_rotate(x: Any, theta: Any) -> Any:
    x1, x2 = wide(x).chunk(2, -1)
    angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None, None] * theta
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).to(x.dtype)


def eager_cosine(x: Any, theta: Any) -> Any:
    angles = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * theta[:, None]
    wide_x = wide(x)
    return torch.cat([wide_x * angles.cos(), wide_x * angles.sin()], -1).to(x.dtype)


def ours_gated(x: Any, weight: Any, gate: Any) -> Any:
    return fuselane.normalize(x, weight, gate=gate, eps=EPS, scale=1.0)


@dataclass(frozen=True)
class Operator:
    """What is measured: the same function, ours and PyTorch's."""

    name: str
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    #: After x: weight and bias are parameters, gate is like x, theta are frequencies.
    inputs: tuple[str, ...]
    #: How many times the bytes of x a forward and a backward have to read and write.
    moved: tuple[int, int]
    #: (batch, tokens, heads, features), (batch, heads, tokens, features), or rows of features.
    layout: str = "rows"


OPERATORS = [
    Operator("act silu", fuselane.act, F.silu, (), (2, 3)),
    Operator(
        "softmax",
        functools.partial(fuselane.softmax, dim=-1),
        functools.partial(torch.softmax, dim=-1),
        (),
        (2, 3),
    ),
    Operator(
        "rms_norm",
        functools.partial(fuselane.rms_norm, eps=EPS),
        lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, EPS),
        ("weight",),
        (2, 3),
    ),
    Operator(
        "layer_norm",
        functools.partial(fuselane.layer_norm, eps=EPS),
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        ("weight", "bias"),
        (2, 3),
    ),
    Operator("normalize, gate", ours_gated, eager_gated, ("weight", "gate"), (3, 5)),
    Operator("lrpe_rotate", fuselane.lrpe_rotate, eager_rotate, ("theta",), (2, 2), "bnhd"),
    Operator("lrpe_cosine", fuselane.lrpe_cosine, eager_cosine, ("theta",), (3, 3), "bhnd"),
]


class Inputs:
    """The tensors of a call."""

    def __init__(self, operator: Operator, rows: int, shape: tuple[int, int], dtype: Any) -> None:
        """`shape` is that of a row: heads and features."""
        heads, features = shape
        generator = torch.Generator().manual_seed(1)

        def random(*lengths: int) -> Any:
            return torch.randn(*lengths, generator=generator).to(dtype)

        if operator.layout == "rows":
            features *= heads
            self.shape: tuple[int, ...] = (rows, features)
            self.rows_at = 0
        elif operator.layout == "bnhd":
            self.shape = (1, rows, heads, features)
            self.rows_at = 1
        else:
            self.shape = (1, heads, rows, features)
            self.rows_at = 2
        angles = features // 2 if operator.layout == "bnhd" else features
        of = {
            "weight": lambda: random(features),
            "bias": lambda: random(features),
            "gate": lambda: random(*self.shape),
            "theta": lambda: torch.tensor([fuselane.theta.frequencies(2 * angles)] * heads),
        }
        self.names = ("x", *operator.inputs)
        self.tensors = [random(*self.shape), *(of[name]() for name in operator.inputs)]
        doubled = 2 if operator.layout == "bhnd" else 1
        self.grad = random(*self.shape[:-1], self.shape[-1] * doubled)

    def first(self) -> list[Any]:
        """Those of the first rows only."""
        rows = min(self.shape[self.rows_at], COMPARED_ROWS)
        pairs = zip(self.names, self.tensors)
        return [t.narrow(self.rows_at, 0, rows) if n in ("x", "gate") else t for n, t in pairs]

    def plain(self) -> list[Any]:
        """As in inference: only parameters could have a gradient."""
        parameters = ("weight", "bias")
        pairs = zip(self.names, self.tensors)
        return [t.detach().requires_grad_(name in parameters) for name, t in pairs]

    def trained(self) -> list[Any]:
        """As in training: all but frequencies get a gradient."""
        pairs = zip(self.names, self.tensors)
        return [t.detach().requires_grad_(name != "theta") for name, t in pairs]


class Progress:
    """One line on standard error that says what goes on, if somebody looks at it."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def say(self, text: str) -> None:
        if self.shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def turns(names: Sequence[str], rounds: Iterator[int]) -> Iterator[str]:
    """Who is next: another one begins each round, and every other round goes backwards."""
    for r in rounds:
        order = [*names[r // 2 % len(names) :], *names[: r // 2 % len(names)]]
        yield from order if r % 2 == 0 else reversed(order)


def batch_seconds(call: Callable[[], Any], calls: int) -> float:
    """The mean time of a call."""
    begin = time.perf_counter()
    for _ in itertools.repeat(None, calls):
        call()
    return (time.perf_counter() - begin) / calls


def time_tiny(calls: dict[str, Callable[[], Any]], rounds: int, batch: int) -> dict[str, Any]:
    """The median over rounds of the fastest batch, and how far rounds are apart."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        batch_seconds(call, batch)
    for name in turns([*calls], iter(range(rounds))):
        times[name].append(min(batch_seconds(calls[name], batch) for _ in range(BATCHES)))
    return {name: summary(values, 1e6) for name, values in times.items()}


def time_large(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # memory, threads, compiled code
    begin = time.perf_counter()

    def counted() -> Iterator[int]:
        for r in range(rounds):
            if r >= LEAST_ROUNDS and time.perf_counter() - begin > ROW_SECONDS:
                return
            yield r

    for name in turns([*calls], counted()):
        if not times[name] or times[name][-1] < SETTLED:
            calls[name]()
        times[name].append(batch_seconds(calls[name], 1))
    return {name: summary(values, 1e3) for name, values in times.items()}


def summary(seconds: list[float], unit: float) -> dict[str, float]:
    median = statistics.median(seconds)
    spread = (max(seconds) - min(seconds)) / median if median else 0.0
    return {"median": median * unit, "least": min(seconds) * unit, "spread": spread}


def functions(operator: Operator, compiled: bool) -> dict[str, Callable[..., Any]]:
    found = {OURS: operator.ours, EAGER: operator.eager}
    if compiled:
        torch._dynamo.reset()
        found[COMPILED] = torch.compile(operator.eager, fullgraph=True, dynamic=False)
    return found


def compare(operator: Operator, inputs: Inputs) -> None:
    """Fast and wrong is no result. Of all rows of ours, the first are compared."""
    with torch.no_grad():
        theirs = operator.eager(*inputs.first()).float()
        ours = operator.ours(*inputs.tensors)
        ours = ours.narrow(inputs.rows_at, 0, theirs.shape[inputs.rows_at]).float()
    # Both round at least once, and angles of later tokens differ more.
    bound = 8 * torch.finfo(inputs.tensors[0].dtype).eps + 1e-3
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not error < bound:
        why = f"{operator.name} differs from PyTorch's by {error:.2g}: not timed"
        sys.exit(f"fuselane.bench: {why}")


def there_and_back(f: Callable[..., Any], tensors: list[Any], grad: Any) -> Callable[[], Any]:
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    return lambda: torch.autograd.grad(f(*tensors), trained, grad)


def back(f: Callable[..., Any], tensors: list[Any], grad: Any) -> Callable[[], Any]:
    """The backward alone."""
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    o = f(*tensors)
    return lambda: torch.autograd.grad(o, trained, grad, retain_graph=True)


def tiny(operator: Operator, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, features = args.tiny
    inputs = Inputs(operator, rows, (1, features), torch.float32)
    compare(operator, inputs)
    plain, trained = inputs.plain(), inputs.trained()
    all_functions = functions(operator, args.compile)
    records = []
    for mode in ("no_grad", "grad", "forward_backward"):
        calls: dict[str, Callable[[], Any]] = {}
        for name, function in all_functions.items():
            if mode == "forward_backward":
                calls[name] = there_and_back(function, trained, inputs.grad)
            else:
                tensors = plain if mode == "no_grad" else trained
                calls[name] = functools.partial(function, *tensors)
        with torch.set_grad_enabled(mode != "no_grad"):
            us = time_tiny(calls, args.rounds, args.batch)
        record = {"operator": operator.name, "mode": mode, "shape": [*inputs.shape]}
        records.append({**record, "dtype": "f32", "us": us})
    return records


def large(operator: Operator, args: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = DTYPES[args.dtype]
    size = args.mib << 20
    rows = size // (dtype.itemsize * HEADS * HEAD_FEATURES)
    inputs = Inputs(operator, rows, (HEADS, HEAD_FEATURES), dtype)
    compare(operator, inputs)
    trained = inputs.trained()
    source = inputs.tensors[0]
    target = torch.empty_like(source)
    all_functions = functions(operator, args.compile)
    records = []
    for mode, moved in zip(("forward", "backward"), operator.moved):
        calls: dict[str, Callable[[], Any]] = {}
        for name, function in all_functions.items():
            if mode == "forward":
                calls[name] = functools.partial(function, *inputs.plain())
            else:
                calls[name] = back(function, trained, inputs.grad)
        calls[COPY] = functools.partial(target.copy_, source)
        with torch.set_grad_enabled(mode != "forward"):
            ms = time_large(calls, args.rounds)
        nbytes = source.nbytes * moved
        copied = 2 * source.nbytes / ms[COPY]["median"]
        rates = {
            name: (2 * source.nbytes if name == COPY else nbytes) / value["median"] / 1e6
            for name, value in ms.items()
        }
        records.append(
            {
                "operator": operator.name,
                "mode": mode,
                "shape": [*inputs.shape],
                "dtype": args.dtype,
                "bytes": nbytes,
                "ms": ms,
                "gb_s": rates,
                "of_copy": {name: rate * 1e6 / copied for name, rate in rates.items()},
            }
        )
    return records


def table(heads: list[str], lines: list[list[str]]) -> str:
    """The first column to the left, numbers to the right."""
    rows = [heads, *lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    text = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(text)


def tiny_table(records: list[dict[str, Any]]) -> str:
    titles = {"no_grad": "no grad", "grad": "with grad", "forward_backward": "fwd + bwd"}
    names = [*records[0]["us"]]
    shape = " x ".join(str(length) for length in records[0]["shape"])
    lines = []
    for record in records:
        us = record["us"]
        cells = [f"{us[name]['median']:.2f}" for name in names]
        ratio = us[EAGER]["median"] / us[OURS]["median"]
        lines.append([f"{record['operator']}, {titles[record['mode']]}", *cells, f"{ratio:.2f}"])
    heading = f"Tiny calls ({shape} float32), microseconds; ratio: torch over fuselane\n"
    return heading + table(["operator", *names, "ratio"], lines)


def large_table(records: list[dict[str, Any]], mib: int) -> str:
    names = [name for name in records[0]["ms"] if name != COPY]
    heads = ["operator"]
    for name in names:
        heads += [f"{name} ms", "GB/s", "of copy"]
    lines = []
    for record in records:
        cells = [f"{record['operator']}, {record['mode']}"]
        for name in names:
            cells.append(f"{record['ms'][name]['median']:.2f}")
            cells.append(f"{record['gb_s'][name]:.1f}")
            cells.append(f"{record['of_copy'][name]:.2f}")
        lines.append([*cells, f"{record['gb_s'][COPY]:.1f}"])
    heading = (
        f"Large tensors ({mib} MiB {records[0]['dtype']}); GB/s of what has to be read and "
        "written, each once,\nand that over the rate of a copy into memory that is used again\n"
    )
    return heading + table([*heads, "copy GB/s"], lines)


def warn_of_load() -> None:
    """Times on a busy machine are not worth much."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cpus = os.cpu_count() or 1
    if load > 0.5 * cpus:
        text = f"the machine is busy (load {load:.1f} on {cpus} CPUs): times will be noisy"
        print(f"fuselane.bench: {text}", file=sys.stderr)


def facts() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            models = [line for line in file if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    except OSError:
        pass  # not Linux
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "threads": fuselane.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fuselane": fuselane.__version__,
        "fallback_reason": FALLBACK_REASON,
    }


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    def count(text: str) -> int:
        if not text.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
        return int(text)

    def positive(text: str) -> int:
        if count(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
        return int(text)

    def rows_and_features(text: str) -> tuple[int, int]:
        rows, _, features = text.partition("x")
        if positive(features) % 2:
            raise argparse.ArgumentTypeError("features are odd, which cannot be turned in pairs")
        return positive(rows), int(features)

    parser = argparse.ArgumentParser(
        prog="python -m fuselane.bench",
        description="Times the operators beside PyTorch: tiny calls, in microseconds, and large "
        "tensors, beside the machine's copy. Takes less than a minute.",
    )
    names = [operator.name for operator in OPERATORS]
    parser.add_argument(
        "operators",
        nargs="*",
        metavar="OPERATOR",
        help=f"only those whose names begin so, of {'; '.join(names)}",
    )
    parser.add_argument(
        "--mib", type=count, default=64, metavar="N",
        help="size of a large tensor; 0 leaves them out [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of large tensors [%(default)s]"
    )
    parser.add_argument(
        "--tiny", type=rows_and_features, default=(8, 64), metavar="ROWSxFEATURES",
        help="size of a tiny tensor [8x64]",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=positive, default=9, metavar="N", help="rounds of each [%(default)s]"
    )
    parser.add_argument(
        "--batch", type=positive, default=BATCH, metavar="N",
        help="calls of a tiny tensor at a time [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--threads", type=positive, metavar="N", help="threads, of both libraries")
    parser.add_argument(
        "--compile", action="store_true",
        help="also PyTorch's functions through torch.compile, which takes some minutes more",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    wanted = tuple(args.operators) or ""
    args.chosen = [operator for operator in OPERATORS if operator.name.startswith(wanted)]
    unknown = [text for text in args.operators if not any(name.startswith(text) for name in names)]
    if unknown:
        parser.error(f"no operator {unknown[0]!r}, expected some of: {'; '.join(names)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    # The same for both, whoever was asked.
    fuselane.set_num_threads(torch.get_num_threads())
    if args.compile:
        from torch._functorch import config

        # A backward that is run again may not use up what its forward has kept.
        config.donated_buffer = False
    result: dict[str, Any] = {"machine": facts(), "settings": {}, "tiny": [], "large": []}
    for name in ("mib", "dtype", "tiny", "rounds", "batch", "compile"):
        result["settings"][name] = getattr(args, name)
    machine = result["machine"]
    print(
        f"fuselane {machine['fuselane']}, torch {machine['torch']}, python {machine['python']}, "
        f"{machine['threads']} threads, {machine['cpu']}",
        flush=True,
    )
    if FALLBACK_REASON is not None:
        print(f"calls go through Python kernels: {FALLBACK_REASON}")
    warn_of_load()
    progress = Progress()
    gc.disable()  # its pauses would fall on whoever comes along
    for part, measure in (("tiny", tiny), ("large", large)):
        if part == "large" and args.mib == 0:
            continue
        for at, operator in enumerate(args.chosen):
            progress.say(f"{part}: {operator.name} ({at + 1} of {len(args.chosen)})")
            result[part] += measure(operator, args)
            gc.collect()
        progress.say("")
        text = tiny_table(result[part]) if part == "tiny" else large_table(result[part], args.mib)
        print(f"\n{text}", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
