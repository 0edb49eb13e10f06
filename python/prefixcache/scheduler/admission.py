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

    Slots for all known tokens are taken at once, so that two long prompts that arrive together
    cannot each hold half of the pool and preempt one another.
    """

    def __init__(self, cache: CacheManager, *, enable_prefix_caching: bool) -> None:
        self._cache = cache
        self._enabled = enable_prefix_caching

    def start(self, state: RequestState) -> Verdict:
        """Takes blocks for the request; on `NO_ROOM` nothing has changed."""
        hits = self._usable_hits(state)
        taken = self._cache.commit(state.request_id, hits, state.num_tokens - hits)
        if taken is None:
            return Verdict.NO_ROOM
        state.num_slots = taken + state.num_tokens - hits
        state.num_computed_tokens = state.num_published_tokens = taken
        if state.num_cached_tokens is None:
            state.num_cached_tokens = taken
        return Verdict.STARTED

    def _usable_hits(self, state: RequestState) -> int:
        """Hit tokens in whole blocks that leave at least the last token to compute."""
        if not (self._enabled and state.request.cache.read):
            return 0
        limit = state.num_tokens - 1
        if state.prompt_logprobs_due:
            limit = state.num_prompt_logprobs
        matched = self._cache.count_hits(state.request_id)
        return min(matched, limit) // self._cache.block_size * self._cache.block_size
