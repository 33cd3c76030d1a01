"""`python -m fuselane.bench` runs, and keeps what it promises. Times are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

OPERATORS = [
    "act silu",
    "softmax",
    "rms_norm",
    "layer_norm",
    "normalize, gate",
    "lrpe_rotate",
    "lrpe_cosine",
]
QUICK = ["--mib", "1", "--rounds", "2", "--batch", "3", "--tiny", "2x8"]


def bench(*arguments: str, code: int = 0) -> tuple[str, str]:
    command = [sys.executable, "-m", "fuselane.bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def positive(figures: dict[str, Any]) -> bool:
    return all(0 < figure["least"] <= figure["median"] for figure in figures.values())


def test_figures(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    stdout, stderr = bench(*QUICK, "--json", str(path))
    assert "\r" not in stderr, "progress is for terminals"
    result = json.loads(path.read_text())
    assert result["settings"]["mib"] == 1 and result["settings"]["tiny"] == [2, 8]
    for fact in ("cpu", "threads", "python", "torch", "fuselane"):
        assert result["machine"][fact]
    modes = ["no_grad", "grad", "forward_backward"]
    found = [(record["operator"], record["mode"]) for record in result["tiny"]]
    assert found == [(operator, mode) for operator in OPERATORS for mode in modes]
    for record in result["tiny"]:
        assert [*record["us"]] == ["fuselane", "torch"] and positive(record["us"]), record
        assert record["operator"] in stdout
    found = [(record["operator"], record["mode"]) for record in result["large"]]
    assert found == [(o, mode) for o in OPERATORS for mode in ("forward", "backward")]
    for record in result["large"]:
        assert [*record["ms"]] == ["fuselane", "torch", "copy"] and positive(record["ms"]), record
        assert record["bytes"] >= 2 << 20
        assert record["of_copy"]["copy"] == pytest.approx(1)
        rate = record["bytes"] / record["ms"]["fuselane"]["median"] / 1e6
        assert record["gb_s"]["fuselane"] == pytest.approx(rate)


def test_a_part() -> None:
    stdout, _ = bench(*QUICK, "--mib", "0", "--threads", "1", "rms", "lrpe")
    assert "1 threads" in stdout and "Large" not in stdout
    assert "rms_norm" in stdout and "lrpe_cosine" in stdout and "softmax" not in stdout


def test_wrong_command_lines() -> None:
    for arguments in (["--mib", "much"], ["--rounds", "0"], ["--tiny", "8x7"], ["conv"]):
        _, stderr = bench(*arguments, code=2)
        assert "usage: python -m fuselane.bench" in stderr
    stdout, _ = bench("--help")
    assert "--json" in stdout and "--compile" in stdout


def test_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "fuselane.bench"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stdout == ""
    assert "needs PyTorch" in done.stderr and "Traceback" not in done.stderr
