"""May this waiting request start now, and with how much of the prefix cache?"""

from __future__ import annotations

import logging
from collections import Counter
from enum import Enum, auto

from prefixcache.config.engine_config import SchedulerConfig
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.budget import StepBudget
from prefixcache.scheduler.hit_counter import HitCounter
from prefixcache.scheduler.in_flight import InFlight
from prefixcache.scheduler.loading import LoadPlan, Loads, Reads
from prefixcache.scheduler.state import RequestState

logger = logging.getLogger(__name__)


class Verdict(Enum):
    """What became of a request that asked to start."""

    STARTED = auto()
    NO_ROOM = auto()
    WAITS_FOR_BLOCKS = auto()
    BELOW_THRESHOLD = auto()


class Admission:
    """Starts a request when its whole prompt fits: hits first, new blocks for the rest.

    Slots for all known tokens, in whole blocks, are taken at once, so that two long prompts that
    arrive together cannot each hold half of the pool and preempt one another; in groups with a
    window, slots for all that the prompt will hold at once. `counter` counts
    first starts alone, not the returns of preempted requests; `num_below_threshold` counts by whose
    threshold it was, "request" or "global"; `num_stale_tokens` counts hits that older weights had
    computed, by how many updates older they were; `num_window_missed_tokens` counts what full
    attention had in the cache and the windows did not.
    """

    def __init__(
        self,
        cache: CacheManager,
        config: SchedulerConfig,
        in_flight: InFlight | None,
        loads: Loads | None,
        reads: Reads,
        *,
        enable_prefix_caching: bool,
    ) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._max_chunk = config.limits().max_num_batched_tokens
        self._in_flight = in_flight
        self._loads = loads
        self._reads = reads
        self._global_threshold = config.global_cache_hit_threshold
        self._hit_tiers = config.cache_hit_threshold_tiers
        self.enabled = enable_prefix_caching
        self.counter = HitCounter()
        self.num_window_missed_tokens = 0
        self.num_stale_tokens: Counter[int] = Counter()
        self.num_below_threshold: Counter[str] = Counter(request=0, **{"global": 0})

    def start(self, state: RequestState, budget: StepBudget) -> Verdict:
        """Takes blocks for the request; on any verdict but `STARTED` it holds none.

        `budget`, which is not spent, is what the step may compute.
        """
        most = self._most_hits(state)
        matched = self._matched_tokens(state, most)
        # Blocks beyond the most it may take are computed in any case.
        if matched < most and self._must_wait(state, matched):
            return Verdict.WAITS_FOR_BLOCKS
        hits = min(matched, most)
        if self._is_below_threshold(state, hits):
            if state.num_cached_tokens is None:
                state.num_cached_tokens = hits
                self._note_window_misses(state, self._lost_to_windows(state, matched, most))
            return Verdict.BELOW_THRESHOLD
        if self._reads.must_wait(state, hits):
            return Verdict.WAITS_FOR_BLOCKS
        plan = None
        if self._loads is not None and self._may_read(state):
            plan = self._loads.plan(state, hits, most)
            if plan is not None and plan.is_sooner and self._start_load(state, plan, budget):
                self._note_start(state, hits, 0)
                return Verdict.STARTED
        lost = self._lost_to_windows(state, matched, most)
        taken = self._cache.commit(state.request_id, hits, *self._new_slots(state, hits, budget))
        if taken is None:
            return Verdict.NO_ROOM
        if self._loads is not None and plan is not None and not plan.is_sooner:
            self._loads.note_refused()
        self._note_start(state, taken, lost)
        return Verdict.STARTED

    def _new_slots(self, state: RequestState, hits: int, budget: StepBudget) -> tuple[int, int]:
        """The slots that a request takes in addition to its hits, and what it computes at once."""
        num_left = state.num_tokens - hits
        num_new = -(-num_left // self._block_size) * self._block_size
        chunk = budget.chunk(hits, num_left) if self._cache.has_states else self._max_chunk
        return num_new, chunk

    def _start_load(self, state: RequestState, plan: LoadPlan, budget: StepBudget) -> bool:
        """Takes the blocks of a hit that is to be loaded; false when they are lacking."""
        assert self._loads is not None
        slots = self._new_slots(state, plan.upto, budget)
        missing = self._cache.commit_missing(state.request_id, plan.upto, *slots)
        if missing is None:
            return False
        self._loads.begin(state, plan, missing, counts=state.num_cached_tokens is None)
        return True

    def _note_start(self, state: RequestState, taken: int, lost: int) -> None:
        """Notes what it took from the cache, and what was lost to windows on its first start."""
        state.skips_disk = False
        state.num_slots = self._cache.num_slots(state.request_id)
        state.num_computed_tokens = state.num_published_tokens = taken
        state.num_resets = self._cache.num_resets
        if state.num_cached_tokens is None:
            state.num_cached_tokens = taken
            self._note_window_misses(state, lost)
            state.hit_staleness = self._cache.staleness(state.request_id) if taken else 0
            if self.enabled:
                self.counter.add(state.num_tokens, taken)
                if state.hit_staleness:
                    self.num_stale_tokens[state.hit_staleness] += taken

    def _note_window_misses(self, state: RequestState, lost: int) -> None:
        state.num_window_missed_tokens = lost
        self.num_window_missed_tokens += lost

    def count_hits(self, state: RequestState) -> int:
        """Tokens that the request would take from the cache if it started now."""
        most = self._most_hits(state)
        return min(self._matched_tokens(state, most), most)

    def _most_hits(self, state: RequestState) -> int:
        """Tokens in full blocks that may be hits: at least the last token is left to compute."""
        limit = state.num_prompt_logprobs if state.prompt_logprobs_due else state.num_tokens - 1
        return limit // self._block_size * self._block_size

    def _matched_tokens(self, state: RequestState, most: int) -> int:
        """Tokens in leading full blocks that are cached and may be read; see `count_hits`."""
        if not self._may_read(state):
            return 0
        return self._cache.count_hits(state.request_id, most)

    def _lost_to_windows(self, state: RequestState, matched: int, most: int) -> int:
        """Tokens that could be read but for their windows, which the request computes again."""
        if matched >= most or not self._may_read(state):
            return 0
        return self._cache.add_junction(state.request_id, matched, most)

    def _may_read(self, state: RequestState) -> bool:
        return self.enabled and state.request.cache.read

    def _must_wait(self, state: RequestState, matched: int) -> bool:
        if self._in_flight is None or not state.request.cache.read:
            return False
        return self._in_flight.must_wait(state, matched)

    def _is_below_threshold(self, state: RequestState, usable: int) -> bool:
        own = state.request.cache.hit_threshold
        threshold, source = (self._global_threshold, "global") if own is None else (own, "request")
        if not threshold or state.request.params.max_tokens == 0:  # asked for to be computed
            return False
        if "disk" in (state.request.cache.hit_tiers or self._hit_tiers):
            most = self._most_hits(state) if self._may_read(state) else 0
            usable = max(usable, self._cache.count_with_disk(state.request_id, most)[0])
        ratio = self._share_of_hits(state, usable)
        if ratio >= threshold:
            return False
        self.num_below_threshold[source] += 1
        logger.info(
            "Request %s ends: cache hit ratio %.4f is below the %s threshold of %.4f.",
            state.request_id,
            ratio,
            source,
            threshold,
        )
        return True

    def _share_of_hits(self, state: RequestState, usable: int) -> float:
        """Of the tokens in full blocks that could be hits; 0 where there are none.

        The last token never is one. A request without such tokens is refused at its first start, so
        none returns.
        """
        most = (state.num_tokens - 1) // self._block_size * self._block_size
        return usable / most if most else 0.0
