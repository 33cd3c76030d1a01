"""The wheel, in an environment that has nothing else.

``cargo xtask test`` builds it and names it in ``FUSELANE_WHEEL``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WHEEL = os.environ.get("FUSELANE_WHEEL", "")
LARGEST = 5_000_000

pytestmark = pytest.mark.skipif(
    not WHEEL,
    reason="FUSELANE_WHEEL does not name a wheel: `cargo xtask wheel` builds one and prints its path",
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel alone."""
    folder = tmp_path_factory.mktemp("clean") / "environment"
    run(sys.executable, "-m", "venv", folder)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    # Without an index: what the wheel needs has to be in it.
    run(python, "-m", "pip", "install", "--quiet", "--no-index", WHEEL)
    return python


def run(python: str | Path, *arguments: str | Path) -> str:
    """What a call of Python prints. It sees no variables and packages but its own."""
    command = [python, "-I", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


def test_one_wheel_for_all_versions_of_python() -> None:
    tags = Path(WHEEL).stem.split("-")[2:]
    assert tags[:2] == ["cp39", "abi3"]
    with zipfile.ZipFile(WHEEL) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Tag: cp39-abi3-" in wheel.read(name).decode()


def test_what_is_in_it() -> None:
    with zipfile.ZipFile(WHEEL) as wheel:
        names = wheel.namelist()
    assert "fuselane/__init__.py" in names
    assert "fuselane/py.typed" in names
    native = [name for name in names if name.startswith("fuselane/_native.") and name[-4:] != ".pyi"]
    assert len(native) == 1, native
    assert "fuselane/_native.pyi" in names
    assert [name for name in names if name.endswith("LICENSE-MIT")]
    assert not [name for name in names if "sbom" in name], "these name the folder of the build"
    folders = {name.split("/")[0].split("-")[0] for name in names}
    assert folders == {"fuselane"}, names
    assert not [name for name in names if "__pycache__" in name or "test" in name]


def test_size() -> None:
    size = Path(WHEEL).stat().st_size
    assert size < LARGEST, f"{size} bytes"


def test_import_needs_no_other_library(python: Path) -> None:
    code = """
import importlib.util
assert importlib.util.find_spec("numpy") is None
assert importlib.util.find_spec("torch") is None
import fuselane
print(fuselane.__version__, fuselane.get_num_threads() > 0)
"""
    version = Path(WHEEL).stem.split("-")[1]
    assert run(python, "-c", code) == f"{version} True"


def test_version_is_that_of_the_metadata(python: Path) -> None:
    code = """
import importlib.metadata, fuselane
assert importlib.metadata.version("fuselane") == fuselane.__version__
"""
    run(python, "-c", code)


def test_numpy_is_enough(python: Path) -> None:
    numpy = pytest.importorskip("numpy")
    # Put in the path at the end, as the folder may hold other libraries too.
    code = f"""
import sys
sys.path.append({str(Path(numpy.__file__).parents[1])!r})
import numpy, fuselane
o = fuselane.act(numpy.array([-1.0, 2.0], dtype="float32"), "relu")
assert type(o) is numpy.ndarray and o.dtype == "float32", o
assert "torch" not in sys.modules
print(*o.tolist())
"""
    assert run(python, "-c", code) == "0.0 2.0"
