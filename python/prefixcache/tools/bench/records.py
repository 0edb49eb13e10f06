"""What is known of requests that were sent, and the errors by which a request or a run ends.

All times are seconds of `time.perf_counter`. TTFT is counted from the moment a request is sent, so
it holds the server's queue but not the client's own limit on concurrency.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from prefixcache.exceptions import PrefixCacheError


class BenchmarkError(PrefixCacheError):
    """The benchmark cannot go on."""


class RequestFailedError(BenchmarkError):
    """One request failed; others may go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One answered request.

    `arrivals` are the times at which output arrived, the first token's first. `output` is what
    came: token ids or text. `cached_tokens` is None where the server does not report it. `session`
    and `turn` say which request it was.
    """

    sent: float
    arrivals: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    output: tuple[int, ...] | str
    session: str = ""
    turn: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.arrivals[-1] - self.sent

    @property
    def inter_token(self) -> list[float]:
        """Seconds between outputs after the first."""
        return [after - before for before, after in itertools.pairwise(self.arrivals)]

    @property
    def mean_inter_token(self) -> float:
        """Seconds a token after the first; 0 for an answer of one token."""
        return (self.latency - self.ttft) / max(1, self.output_tokens - 1)


@dataclass(slots=True)
class Run:
    """What one run of a workload gave. `error` is what ended it before its end.

    `failures` are the errors of requests that failed. `too_long` counts those that were not sent
    because they exceed the model's context.
    """

    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    failures: list[str] = field(default_factory=list[str])
    too_long: int = 0
    error: str | None = None


# As vLLM names them; `tpot`, the mean time a token after the first, is what is meant by `itl` too.
_METRICS: Mapping[str, Callable[[RequestRecord], float]] = {
    "ttft": attrgetter("ttft"),
    "itl": attrgetter("mean_inter_token"),
    "tpot": attrgetter("mean_inter_token"),
    "e2el": attrgetter("latency"),
}


def parse_objectives(items: Sequence[str]) -> dict[str, float]:
    """Seconds by metric of `METRIC:MILLISECONDS` each. Raises `ValueError`."""
    objectives = dict[str, float]()
    for item in items:
        name, _, limit = item.partition(":")
        if name not in _METRICS:
            raise ValueError(f"must be of {', '.join(_METRICS)}, as in ttft:500, got {item!r}")
        objectives[name] = _milliseconds(item, limit) / 1e3
    return objectives


def _milliseconds(item: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"must tell milliseconds above 0, as in ttft:500, got {item!r}")
    return value


def is_good(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether the request kept within every objective."""
    return all(_METRICS[name](record) <= limit for name, limit in objectives.items())
