"""What goes between the ingress and the replicas: plain data that pickles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefixcache.exceptions import PrefixCacheError
from prefixcache.request import Request, RequestOutput


@dataclass(slots=True, kw_only=True)
class RoutedJob:
    """The requests of one HTTP request, and what the router needs to send them to one replica.

    They must be answered within `seconds_left`: clocks of machines differ. `command_number` is
    that of the last command that the ingress knows of. `affinity` is a key whose requests go to one
    replica as long as nothing speaks against it. `actual_hits` are tokens of the prompt that
    replicas were found to have cached, by their ids. The router fills `expected_hits` in: what it
    believes of the one that it chose, which says no where it has far less, unless the job
    `takes_stale` ones.
    """

    requests: Sequence[Request]
    seconds_left: float | None = None
    command_number: int = 0
    affinity: str | None = None
    actual_hits: Mapping[str, int] = field(default_factory=dict[str, int])
    expected_hits: Mapping[str, int] = field(default_factory=dict[str, int])
    takes_stale: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the first prompt, by which the job is routed."""
        return len(self.requests[0].prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first thing that a replica says of a job that it takes."""

    replica: str


@dataclass(frozen=True, slots=True)
class Stale:
    """The replica has far less of the prompt than was believed: `hit_tokens`. It does nothing."""

    replica: str
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """What came since the last part, each with the index of its request.

    `now` is the replica's time when it was sent, by the clock of `RequestOutput.started_at`.
    """

    outputs: list[tuple[int, RequestOutput]]
    now: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The job ended with an error that was raised on purpose."""

    error: PrefixCacheError


Part = Accepted | Stale | Outputs | Failed
