"""What goes between the ingress and the replicas: plain data that pickles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixcache.core import BlockHashes
from prefixcache.exceptions import PrefixCacheError
from prefixcache.ray_serve.replicas.replica_state import ReplicaState
from prefixcache.types.request import Request, RequestOutput


@dataclass(slots=True, kw_only=True)
class RoutedJob:
    """The requests of one HTTP request, and what the router needs to send them to one replica.

    They must be answered within `seconds_left`: clocks of machines differ. `command_number` is
    that of the last command that the ingress knows of. `hashes` are those of each prompt, as
    `BlockHashes.state` gives them, for each arithmetic that replicas have, so that they need not
    hash again. `actual_hits` are tokens of the prompt that replicas were found to have cached, by
    their ids. The router fills `expected_hits` in: what it believes of the one that it chose, which
    says no where it has far less, unless the job `takes_stale` ones. It wants to know when the
    prompts are `computed`.
    """

    requests: Sequence[Request]
    seconds_left: float | None = None
    command_number: int = 0
    hashes: Mapping[str, Sequence[bytes]] = field(default_factory=dict[str, Sequence[bytes]])
    actual_hits: Mapping[str, int] = field(default_factory=dict[str, int])
    expected_hits: Mapping[str, int] = field(default_factory=dict[str, int])
    takes_stale: bool = False
    computed: Callable[[], object] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the first prompt, by which the job is routed."""
        return len(self.requests[0].prompt_token_ids)

    def short_hashes(self) -> dict[str, npt.NDArray[np.uint64]]:
        """The hashes of the first prompt's full blocks, as KV events name them, by arithmetic."""
        return {
            arithmetic: BlockHashes.from_state(first).short()
            for arithmetic, (first, *_) in self.hashes.items()
        }


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first thing that a replica says of a job that it takes, and the last command it did."""

    replica: str
    state: ReplicaState


@dataclass(frozen=True, slots=True)
class Stale:
    """The replica has far less of the prompt than was believed: `hit_tokens`. It does nothing."""

    replica: str
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """What came since the last chunk, each with the index of its request.

    `now` is the replica's time when it was sent, by the clock of `RequestOutput.started_at`.
    """

    outputs: list[tuple[int, RequestOutput]]
    now: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The job ended with an error that was raised on purpose."""

    error: PrefixCacheError


Chunk = Accepted | Stale | Outputs | Failed
