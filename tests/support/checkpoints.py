"""Tiny models as a fixture."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint("qwen3", dtype=...)`: the folder, made once a session; do not change it."""
    from support.tiny_models import make_checkpoint

    @cache
    def make(architecture: str = "smollm2", **arguments: Any) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **arguments)

    return make
