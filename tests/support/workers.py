"""A pytest plugin: what makes the workers of a run, each a process of its own, quicker, and quiet.

What the tests import makes a million objects, which no collection frees: it looks at none of them.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

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


@atexit.register
def _drop_triton_leak_report() -> None:
    """At its end nanobind lists hundreds of objects that triton never frees.

    Registered before triton's own handlers, this runs after them.
    """
    if "triton._C.libtriton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport, config: pytest.Config
) -> tuple[str, str, str] | None:
    """Dots are progress for a terminal; in a log, which gets them at the end, they say nothing."""
    if config.get_verbosity() < 0 and not sys.stdout.isatty():
        if report.skipped and not hasattr(report, "wasxfail"):
            return "skipped", "", "SKIPPED"
        if report.passed and report.when == "call":
            return "passed", "", "PASSED"
    return None
