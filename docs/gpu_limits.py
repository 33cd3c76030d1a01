"""Writes the tables of gpu_limits.md.

    python3 docs/gpu_limits.py           # Python 3.11, nothing to install

Shapes and published times are those of crates/fuselane-bench/cases. Bytes are counted as
`Case::moved_bytes` does, which is checked against every row of docs/benchmarks/results.csv.
"""

import csv
import math
import re
import tomllib
from pathlib import Path

DOCS = Path(__file__).resolve().parent
CASES = DOCS.parent / "crates/fuselane-bench/cases"
# Data sheets, bytes per second.
A800, H100 = 2.039e12, 3.35e12
BF16, F32 = 2, 4


class Case:
    def __init__(self, file, case):
        self.table, self.op = case["table"], case["operator"]
        self.batch, self.heads, self.dim = file["batch"], file.get("heads", 1), file["dim"]
        self.n = max(case.get("sizes") or file["sizes"])

    def name(self, mode):
        return self.table.format(metric="speed", mode=mode, dtype="bf16")

    def tokens(self, n):
        return self.op.get("extra", 0) + n ** self.op.get("axes", 1)

    def tensor(self, n):
        """Bytes of x."""
        return self.batch * self.heads * self.tokens(n) * self.dim * BF16

    def bytes(self, mode, n):
        """What a call has to read and write, each once."""
        x, op, forward = self.tensor(n), self.op, mode == "fwd"
        kind = op["op"]
        if kind == "normalize":
            gate, weight = "gate" in op, self.dim * BF16
            tensors = 2 + gate + op.get("residual", False) + (0 if forward else 1 + gate)
            statistics = self.batch * n * F32
            return tensors * x + (1 if forward else 2) * weight + statistics
        if kind in ("act", "softmax"):
            return 0 if op.get("act") == "none" else (2 if forward else 3) * x
        needs_x = forward or op.get("act", "none") != "none"
        if kind == "rotate":
            return (2 + needs_x - forward) * x + self.heads * self.dim // 2 * F32
        e = 2 ** math.ceil(math.log2(math.ceil(self.dim / op["axes"])))
        return (3 + needs_x - forward) * x + self.heads * e * F32

    def cache(self, n):
        """The published kernels' kept angles: one f32 per head, token and feature."""
        return self.heads * self.tokens(n) * self.dim * F32

    def accumulated(self, n):
        """Adding each gradient of tensor size to an existing one: two reads, one write."""
        return 3 * self.tensor(n) * (1 + ("gate" in self.op) + self.op.get("residual", False))

    def second_read(self, mode, n):
        """What a softmax over the sequence reads again."""
        return self.tensor(n) * (1 if mode == "fwd" else 2) if self.op.get("dim", -1) != -1 else 0


def cases(name):
    file = tomllib.loads((CASES / f"{name}.toml").read_text())
    return [Case(file, case) for case in file["case"]]


def rows(path):
    with open(path) as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


PUBLISHED = {(row["table"], int(row["n"])): row for row in rows(CASES / "published.csv")}


def line(label, mode, bytes, extra, fused, row, limits):
    """One row of a table. `extra` is what accumulation adds, `row` has the peers' times (or not),
    `limits` are those that the fused time is compared with."""

    def of(bytes):
        return " / ".join(f"{bytes / limit / fused * 1e5:.0f} %" for limit in limits)

    return [
        label, "forward" if mode == "fwd" else "backward", f"{bytes / 1e9:.2f}",
        f"{bytes / A800 * 1e3:.2f}", f"{bytes / H100 * 1e3:.2f}", f"{fused:.2f}",
        *(f"{float(row[peer]):.2f}" if row else "" for peer in ("eager", "compiled")),
        of(bytes), "" if mode == "fwd" else of(bytes + extra),
    ]  # fmt: skip


def table(name, labels, limits):
    gpus = " / ".join("A800" if limit == A800 else "H100" for limit in limits)
    head = ["operator", "pass", "GB", "A800: limit, ms", "H100: limit, ms", "fused, ms"]
    head += ["eager, ms", "compile, ms", f"fused: of {gpus} limit", "with accumulation"]
    out = [head, ["---", "---"] + ["---:"] * 8]
    for case, label in zip(cases(name), labels, strict=True):
        for mode in ("fwd", "bwd") if label else ():
            n = case.n
            row = PUBLISHED[case.name(mode), n]
            bytes, extra = case.bytes(mode, n), 0 if mode == "fwd" else case.accumulated(n)
            out.append(line(label, mode, bytes, extra, float(row["fused"]), row, limits))
            if again := case.second_read(mode, n):
                twice = f"{label}, second reads counted"
                out.append(line(twice, mode, bytes + again, extra, float(row["fused"]), {}, limits))
            if row["fused_cached"]:
                cached, bytes = float(row["fused_cached"]), bytes + case.cache(n)
                out.append(line(f"{label}, cached", mode, bytes, extra, cached, {}, limits))
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n" for cells in out)


def check():
    """Bytes are those that the program counts."""
    ours = {case.name(mode): (case, mode) for file in CASES.glob("*.toml")
            for case in cases(file.stem) for mode in ("fwd", "bwd")}  # fmt: skip
    counted = 0
    for row in rows(DOCS / "benchmarks/results.csv"):
        if row["metric"] == "speed" and row["bytes"]:
            case, mode = ours[row["table"]]
            assert case.bytes(mode, int(row["n"])) == int(row["bytes"]), (row["table"], row["n"])
            counted += 1
    assert counted > 300, counted


def main():
    check()
    grids = [(1, "32768"), (2, "128²"), (3, "32³")]
    tables = {
        "act": table("act", ["relu", "sigmoid", "silu", None, "softmax over features",
                             "softmax over the sequence"], [H100]),
        "srmsnorm": table("srmsnorm", ["with residual", "without"], [H100]),
        "normalize_with_gate": table("normalize_with_gate", ["gate pre", "gate post"], [A800]),
        "lrpe_rotate": table("lrpe_rotate", ["none", "silu", "softmax over features",
                                             "softmax over the sequence"], [H100, A800]),
        "md_lrpe_cosine": table("md_lrpe_cosine", [
            f"{axes}d, {tokens} tokens" if not extra else f"{axes}d, 10 + {tokens} tokens"
            for axes, tokens in grids for extra in (0, 10)], [A800]),
    }  # fmt: skip
    path = DOCS / "gpu_limits.md"
    text = path.read_text()
    for name, lines in tables.items():
        mark = re.compile(rf"(<!-- gpu_limits.py: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = mark.subn(lambda match: f"{match[1]}\n{lines}\n{match[2]}", text)
        assert found == 1, name
    path.write_text(text)


if __name__ == "__main__":
    main()
