"""A pytest plugin: how the tests of a run are spread over pytest-xdist's workers.

Tests that share something made once for their file stay in one worker; all others go wherever a
worker is free. Without workers nothing changes.

What the tests import makes a million objects, which no collection frees: it looks at none of them.
"""

from __future__ import annotations

import gc
import os

import pytest

# Tiny models gain nothing from threads, and next to other workers they lose much to waiting.
# Processes that tests start take the limit from the environment.
os.environ["OMP_NUM_THREADS"] = "1"

gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if " at 0x" in item.name:
            raise pytest.UsageError(f"{item.nodeid}: workers need ids that hold no address")
        if item.get_closest_marker("xdist_group") is None and _shares_within_its_file(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _shares_within_its_file(item: pytest.Item) -> bool:
    info = getattr(item, "_fixtureinfo", None)
    definitions = info.name2fixturedefs.values() if info else ()
    return any(one.scope in ("module", "class", "package") for many in definitions for one in many)
