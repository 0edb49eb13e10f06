"""What is known of requests that were sent, and the errors by which a request or a run ends.

All times are seconds of `time.perf_counter`. TTFT is counted from the moment a request is sent, so
it holds the server's queue but not the client's own limit on concurrency.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

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

    `failures` are the errors of requests that failed, `too_long` counts those that were not sent
    because the model does not take so many tokens, `unsent` those of sessions that ended by either.
    """

    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    failures: list[str] = field(default_factory=list[str])
    too_long: int = 0
    unsent: int = 0
    error: str | None = None
