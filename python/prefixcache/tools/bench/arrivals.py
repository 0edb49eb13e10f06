"""When sessions begin: as others end, as a Poisson process, or as they were recorded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prefixcache.config.checked import Checked, Count, NonNegativeFloat
from prefixcache.config.flags import flag
from prefixcache.tools.bench.sessions import Session

_DEFAULT_CONCURRENCY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig(Checked):
    """When sessions begin. Each sends one request at a time, but for what its sub-agents send."""

    concurrency: Count | None = flag(
        None,
        "Most sessions at once, where a single request is a session; 0: no limit.",
        "Benchmark",
        shown=f"{_DEFAULT_CONCURRENCY}; no limit with a rate or a trace's times",
    )
    request_rate: NonNegativeFloat = flag(
        0.0,
        "Sessions started per second on average (Poisson); 0: when others end, or as recorded.",
        "Benchmark",
    )
    time_scale: NonNegativeFloat = flag(
        1.0,
        "Factor for a trace's times: 0.1 is ten times as fast, 0 starts each request when "
        "another ends.",
        "Benchmark",
    )
    seed: Count = 0

    def schedule(self, sessions: Iterable[Session]) -> Iterator[tuple[float, Session]]:
        """Sessions, each with the seconds after the start at which it is due."""
        draw, due = random.Random(self.seed), 0.0
        for session in sessions:
            yield due if self.request_rate else session.due * self.time_scale, session
            if self.request_rate:
                due += draw.expovariate(self.request_rate)

    def limit(self, *, is_recorded: bool) -> int:
        """Most sessions at once; 0: no limit."""
        if self.concurrency is not None:
            return self.concurrency
        is_open = self.request_rate or (is_recorded and self.time_scale)
        return 0 if is_open else _DEFAULT_CONCURRENCY
