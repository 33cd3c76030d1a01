"""What all tests need: the same numbers in each run."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
