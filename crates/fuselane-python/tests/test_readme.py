"""The examples of the README files, run."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
READMES = [HERE.parent / "README.md", HERE.parents[2] / "README.md"]


def blocks():
    for path in READMES:
        for i, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)):
            yield pytest.param(block, id=f"{path.parent.name}-{i}")


@pytest.mark.parametrize("block", [*blocks()])
def test_block(block):
    names = {}
    exec("import torch, fuselane", names)
    if re.search(r"\bpatch\(model\)", block):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
        )
        names["model"] = transformers.LlamaForCausalLM(config)
    exec(block, names)


def test_both_have_examples():
    assert len([*blocks()]) >= 3
