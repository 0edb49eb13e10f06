"""A pytest plugin: what makes the workers of a run, each a process of its own, quicker.

What the tests import makes a million objects, which no collection frees: it looks at none of them.
"""

from __future__ import annotations

import gc
import os

import pytest

# Tiny models gain nothing from threads, and next to other workers they lose much to waiting.
# Processes that tests start take the limit from the environment.
os.environ["OMP_NUM_THREADS"] = "1"
# Each HTTP client would read all authorities' certificates, which takes 30 ms; no test needs one.
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)

gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if " at 0x" in item.name:
            raise pytest.UsageError(f"{item.nodeid}: workers need ids that hold no address")
