"""Fixtures; without vLLM all tests here are skipped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip(
    "vllm", reason="vLLM is not installed: `make vllm` makes an environment with it"
)

if TYPE_CHECKING:
    from engine import Engine


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from engine import write_model

    return write_model(tmp_path / "model")


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine over `tmp_path / "kv"`; keywords are options of its tier."""
    from engine import Engine, configure, transfer_config

    engines: list[Engine] = []

    def begin(**tier: Any) -> Engine:
        engines.append(Engine(configure(model, transfer_config(tmp_path / "kv", **tier))))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()
