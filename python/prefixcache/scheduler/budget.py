"""What one step may compute, a number of tokens and on some devices a time; its chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefixcache.scheduler.state import RequestState
from prefixcache.scheduler.step_time import StepLoad, StepTimeModel

MIN_CHUNK = 8
"""Tokens of prompts in a step whose decodes alone take all its time: no prompt stands still."""

TIMES_LONGER_ALONE = 8
"""How much longer a step may take while no answer waits: short chunks make a prompt slower."""


@dataclass(slots=True)
class Chunk:
    """The next `count` tokens of a request, and guesses at those after them."""

    state: RequestState
    count: int
    is_decode: bool = False
    drafts: Sequence[int] = ()

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.state.num_computed_tokens + self.count + len(self.drafts)


class StepBudget:
    """Tokens that a step may still take, and time: `max_seconds`, if `times` knows what they cost.

    While no answer waits for its next token the step may take several times as long.
    """

    def __init__(self, max_tokens: int, max_seconds: float, times: StepTimeModel | None) -> None:
        self._tokens_left = max_tokens
        self._max_seconds = max_seconds
        self._times = times
        self._load = StepLoad()
        self._has_decodes = False
        self._has_chunk = False
        self._is_out_of_time = False

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return 0 if self._is_out_of_time else self._tokens_left

    def add_decode(self, start: int) -> None:
        """Takes one token, whatever its time: running answers go on in every step."""
        self._has_decodes = True
        self._take(start, 1)

    def take_chunk(self, start: int, wanted: int) -> int:
        """Takes the next tokens of a prompt, at least one; returns how many of those `wanted`.

        There must be room.
        """
        count = self.chunk(start, wanted)
        self._is_out_of_time = count < min(wanted, self._tokens_left)
        self._has_chunk = True
        self._take(start, count)
        return count

    def chunk(self, start: int, wanted: int) -> int:
        """What `take_chunk` would take."""
        wanted = min(wanted, self._tokens_left)
        if self._times is None:
            return wanted
        least = min(wanted, 1 if self._has_chunk else MIN_CHUNK)
        seconds = self._max_seconds * (1 if self._has_decodes else TIMES_LONGER_ALONE)
        most = self._times.most_tokens(
            self._load, start, wanted, seconds, stays_near=self._has_decodes
        )
        return max(least, most)

    def _take(self, start: int, count: int) -> None:
        if self._times is not None:
            self._load = self._load.plus(start, count)
        self._tokens_left -= count


def running_chunks(states: Iterable[RequestState], budget: StepBudget) -> list[Chunk]:
    """Decodes first, then prompts in order, as far as the budget goes."""
    decodes: list[RequestState] = []
    prefills: list[RequestState] = []
    for state in states:
        if not (state.is_full or state.is_held or state.is_loading):
            (decodes if state.decodes else prefills).append(state)
    chunks = [Chunk(state, 1, is_decode=True) for state in decodes[: budget.room]]
    for chunk in chunks:
        budget.add_decode(chunk.state.num_computed_tokens)
    for state in prefills:
        if not budget.room:
            break
        count = budget.take_chunk(state.num_computed_tokens, state.num_remaining)
        chunks.append(Chunk(state, count))
    return chunks
