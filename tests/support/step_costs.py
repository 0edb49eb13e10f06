"""A pytest plugin: what a step costs is given: no schedule depends on how busy the machine is.

Costs decide how long chunks of prompts are, whether tokens are guessed, and whether a block is
read from a disk. Tests that bring a clock of their own measure with it.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest

from prefixcache.engine.engine import Engine
from prefixcache.types.step_plan import StepPlan

_STEP_SECONDS, _TOKEN_SECONDS = 1e-3, 1e-6
"""As a tiny model takes on an idle machine."""


@pytest.fixture(scope="session", autouse=True)
def _step_costs_are_given() -> Generator[None, None, None]:
    measure = Engine._observe_time

    def observe(self: Engine, plan: StepPlan, since: float) -> None:
        if self._clock is time.perf_counter:
            seconds = _STEP_SECONDS + _TOKEN_SECONDS * plan.num_tokens
            self._last_read = self._clock()
            self._scheduler.observe_time(plan, seconds)
        else:
            measure(self, plan, since)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_observe_time", observe)
        yield
