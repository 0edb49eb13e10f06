"""In the places of parts that a scheduler does without: nothing asks whether it has them."""

# ruff: noqa: ARG002, D102 - what a method is for says the class that does something.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prefixcache.scheduler.budget import Chunk
from prefixcache.scheduler.state import RequestState
from prefixcache.types.step_plan import StepPlan


class NoLoads:
    """`Loads` without a disk."""

    num_tokens = 0

    def count(self, request_id: str, max_tokens: int) -> tuple[int, int]:
        return 0, 0

    def plan(self, state: RequestState, hits: int, most: int) -> None: ...
    def collect(self) -> tuple[()]:
        return ()

    def cancel(self, state: RequestState) -> None: ...
    def clear(self) -> None: ...
    def wait(self, seconds: float) -> bool:
        return False

    def observe_time(self, plan: StepPlan, seconds: float) -> None: ...
    def counts(self) -> None: ...


class NoSharing:
    """`InFlight` where each request computes all that is not cached."""

    num_waits = 0

    def __len__(self) -> int:
        return 0

    def clear(self) -> None: ...
    def must_wait(self, state: RequestState, matched_tokens: int) -> bool:
        return False

    def foresee(self) -> None: ...
    def advance(self, state: RequestState) -> None: ...
    def leave(self, request_id: str) -> bool:
        return False

    def next_step(self) -> None: ...


class NoDrafts:
    """`Drafter` where nothing is guessed."""

    allows_ahead = True

    def propose(
        self, chunks: Sequence[Chunk], room: int, allocate: Callable[[RequestState, int], int]
    ) -> None: ...
    def observe(self, accepted: Mapping[str, int]) -> None: ...
    def observe_time(self, plan: StepPlan, seconds: float) -> None: ...
    def forget(self, state: RequestState) -> None: ...
    def end(self, state: RequestState) -> None: ...
    def clear(self) -> None: ...
    def counts(self) -> None: ...
