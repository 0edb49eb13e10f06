"""What the chunks of a step need of the cache."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.budget import Chunk, StepBudget
from prefixcache.scheduler.state import RequestState


class Slots:
    """Slots for chunks, in full blocks: once a block is held, its slots cost nothing more.

    A request starts with the slots that `max_chunk` tokens at once need. With `ends_in_blocks` each
    chunk of a prompt needs a block where it ends, for a state that later requests may begin with.
    Guesses leave at least `num_spare` free blocks to others.
    """

    def __init__(
        self, cache: CacheManager, *, max_chunk: int, ends_in_blocks: bool, num_spare: int
    ) -> None:
        self._cache = cache
        self._max_chunk = max_chunk
        self._ends_in_blocks = ends_in_blocks
        self._num_spare = num_spare

    def of_start(self, state: RequestState, hits: int, budget: StepBudget) -> tuple[int, int]:
        """The slots that a request gets in addition to its hits, and what it computes at once."""
        num_left = state.num_tokens - hits
        chunk = budget.chunk(hits, num_left) if self._ends_in_blocks else self._max_chunk
        return self._full_blocks(num_left), chunk

    def lacking(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks that need more than their requests have."""
        if self._ends_in_blocks:
            return [c for c in chunks if c.end > c.state.num_slots or not c.is_decode]
        return [chunk for chunk in chunks if chunk.end > chunk.state.num_slots]

    def allocate(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Gives slots to chunks, in order; returns those for which blocks are lacking."""
        wanted = [(chunk.state.request_id, self._full_blocks(chunk.end)) for chunk in chunks]
        served = self._cache.ensure_slots(wanted)
        for chunk, (_, upto) in zip(chunks[:served], wanted, strict=False):
            chunk.state.num_slots = upto
        return chunks[served:]

    def can_begin(self, chunk: Chunk) -> bool:
        """Whether there is a block where a request's first chunk ends.

        Admission may have meant another chunk. Otherwise the next step computes it, for which
        requests are preempted.
        """
        wanted = [(c.state.request_id, self._full_blocks(c.end)) for c in self.lacking([chunk])]
        return not wanted or self._cache.ensure_slots(wanted) == 1

    def allocate_for_drafts(self, state: RequestState, wanted: int) -> int:
        """How many of the `wanted` tokens after the next one have slots, or get them.

        What a few blocks are left for is not known yet, so guesses do not get these.
        """
        has_room = self._cache.core.num_free_blocks > self._num_spare
        size = self._cache.block_size
        # Block by block, since each may be where a state has to be kept.
        most = self._full_blocks(state.num_tokens + wanted)
        for upto in range(state.num_slots + size, most + 1, size):
            if not (has_room and self._cache.ensure_slots([(state.request_id, upto)])):
                break
            state.num_slots = upto
        return min(wanted, state.num_slots - state.num_tokens)

    def keep_snapshots(self, chunks: Sequence[Chunk]) -> None:
        """Lets chunks of prompts keep the states that later requests may begin with."""
        if self._ends_in_blocks:
            parts = (chunk.state for chunk in chunks if not chunk.is_decode)
            starts = [(state.request_id, state.num_computed_tokens) for state in parts]
            if starts:
                self._cache.keep_snapshots(starts)

    def _full_blocks(self, num_tokens: int) -> int:
        size = self._cache.block_size
        return -(-num_tokens // size) * size
