"""A pytest plugin: every run draws other cases, and a failure prints how to draw them again.

Hypothesis prints a `@reproduce_failure` line and keeps failing examples in `.hypothesis`. A random
schedule takes the `seed` fixture; a failing test that used it shows the command with that seed.
With PREFIXCACHE_FIXED_CASES=1 every run draws the same cases, so that it fails by a change alone.
What a step costs is given: no schedule depends on how busy the machine is.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Generator
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from prefixcache.engine.steps import Steps
from prefixcache.types.step_plan import StepPlan

T = TypeVar("T")

FIXED = os.environ.get("PREFIXCACHE_FIXED_CASES") == "1"

# Kept in the environment, so that the workers of a run draw from the seed that its header names.
_DRAWN = "0" if FIXED else str(secrets.randbits(32))
RUN_SEED = int(os.environ.setdefault("PREFIXCACHE_TEST_SEED", _DRAWN))

LONG = os.environ.get("PREFIXCACHE_LONG_TESTS") == "1"

# `derandomize` is set because Hypothesis turns it on by itself where CI is in the environment. Its
# check for slow tests reads the clock, which a busy machine fails.
settings.register_profile(
    "prefixcache",
    deadline=None,
    derandomize=FIXED,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("prefixcache")


def bounded(usual: T, long: T) -> T:
    """How much of a proof this run does: `long` in `make test-long`, else `usual`."""
    return long if LONG else usual


def slow(*values: object) -> Any:
    """Parameters that `make test` leaves to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: object) -> Any:
    """Parameters of `make test-long` alone."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another number for each test and each run; the same for the same PREFIXCACHE_TEST_SEED."""
    return random.Random(f"{RUN_SEED} {request.node.nodeid}").getrandbits(32)


def pytest_report_header() -> str:
    return f"PREFIXCACHE_TEST_SEED={RUN_SEED} repeats this run's random schedules"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="runs in `make test-long`")
    for item in items:
        if item.get_closest_marker("long") and not LONG:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "seed" in getattr(item, "fixturenames", ()):
        command = f"PREFIXCACHE_TEST_SEED={RUN_SEED} pytest '{item.nodeid}'"
        report.sections.append(("repeat it with", command))
    return report


_STEP_SECONDS, _TOKEN_SECONDS = 1e-3, 1e-6
"""As a tiny model takes on an idle machine."""


@pytest.fixture(scope="session", autouse=True)
def _step_costs_are_given() -> Generator[None, None, None]:
    """For chunks, drafts and loads. Tests that bring a clock of their own measure with it."""
    measure = Steps._observe_time

    def observe(self: Steps, plan: StepPlan, since: float) -> None:
        if self._clock is time.perf_counter:
            seconds = _STEP_SECONDS + _TOKEN_SECONDS * plan.num_tokens
            self.last_read = self._clock()
            self._scheduler.observe_time(plan, seconds)
        else:
            measure(self, plan, since)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "_observe_time", observe)
        yield
