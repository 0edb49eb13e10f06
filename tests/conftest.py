"""Fixtures every test room uses. Torch is imported by tests, after `workers` set its threads."""

from __future__ import annotations

import logging
from collections.abc import Generator

import pytest

pytest_plugins = [
    "support.repeatable",
    "support.workers",
    "support.checkpoints",
]


@pytest.fixture(autouse=True)
def _log_level_as_before() -> Generator[None, None, None]:
    """Commands set the level of the whole process, in which other tests look at the log."""
    logger = logging.getLogger("prefixcache")
    level = logger.level
    yield
    if logger.level != level:  # setting it makes all loggers forget what they have found out
        logger.setLevel(level)
