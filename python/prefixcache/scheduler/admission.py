"""May this waiting request start now, and with how much of the prefix cache?"""

from __future__ import annotations

from enum import Enum, auto

from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.state import RequestState


class Verdict(Enum):
    """What became of a request that asked to start."""

    STARTED = auto()
    NO_ROOM = auto()


class Admission:
    """Starts a request when its whole prompt fits: hits first, new blocks for the rest.

    Slots for all known tokens, in whole blocks, are taken at once, so that two long prompts that
    arrive together cannot each hold half of the pool and preempt one another. The two counters
    count first starts alone, not the returns of preempted requests.
    """

    def __init__(self, cache: CacheManager, *, enable_prefix_caching: bool) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._enabled = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def start(self, state: RequestState) -> Verdict:
        """Takes blocks for the request; on `NO_ROOM` nothing has changed."""
        hits = self._usable_hits(state)
        num_new = -(-(state.num_tokens - hits) // self._block_size) * self._block_size
        taken = self._cache.commit(state.request_id, hits, num_new)
        if taken is None:
            return Verdict.NO_ROOM
        state.num_slots = taken + num_new
        state.num_computed_tokens = state.num_published_tokens = taken
        if state.num_cached_tokens is None:
            state.num_cached_tokens = taken
            self._count(state.num_tokens, taken)
        return Verdict.STARTED

    def _count(self, queried: int, hit: int) -> None:
        if self._enabled:
            self.num_queried_tokens += queried
            self.num_hit_tokens += hit

    def _usable_hits(self, state: RequestState) -> int:
        """Hit tokens in whole blocks that leave at least the last token to compute."""
        if not (self._enabled and state.request.cache.read):
            return 0
        limit = state.num_tokens - 1
        if state.prompt_logprobs_due:
            limit = state.num_prompt_logprobs
        matched = self._cache.count_hits(state.request_id)
        return min(matched, limit) // self._block_size * self._block_size
