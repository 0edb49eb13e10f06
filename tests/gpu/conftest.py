"""Everything here needs a CUDA device; without one each test is skipped and counted.

Tests marked `jit` use shapes without a prebuilt kernel, which take minutes to compile: they come
last, and `-m "not jit"` leaves them out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.checkpoints import tiny_checkpoint  # noqa: F401 (a fixture: the parent's conftest is not read)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)
    items.sort(key=lambda item: item.get_closest_marker("jit") is not None)


@pytest.fixture
def device() -> torch.device:
    """The current GPU."""
    return torch.device("cuda", torch.cuda.current_device())
