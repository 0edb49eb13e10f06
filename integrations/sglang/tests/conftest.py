"""Fixtures; without SGLang all tests here are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip(
    "sglang", reason="SGLang is not installed: `make sglang` makes an environment with it"
)

if TYPE_CHECKING:
    from controller import Controller


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    """Starts a cache controller over `tmp_path`; keywords are options of its storage."""
    from controller import Controller

    started: list[Controller] = []

    def begin(**options: Any) -> Controller:
        started.append(Controller(tmp_path, **options))
        return started[-1]

    yield begin
    for controller in started:
        controller.close()
