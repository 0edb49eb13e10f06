"""May this waiting request start now, and with how much of the prefix cache?"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from enum import Enum, auto

from prefixcache.config.engine_parts.scheduler_config import SchedulerConfig
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.budget import StepBudget
from prefixcache.scheduler.in_flight import InFlight
from prefixcache.scheduler.loading import Loads, Reads
from prefixcache.scheduler.null_objects import NoLoads, NoSharing
from prefixcache.scheduler.slots import Slots
from prefixcache.scheduler.state import RequestState
from prefixcache.types.request import CacheOptions, Request

logger = logging.getLogger(__name__)


_RECENT_REQUESTS = 1000


class AdmissionResult(Enum):
    """What became of a request that asked to start."""

    STARTED = auto()
    NO_ROOM = auto()
    WAITS_FOR_BLOCKS = auto()
    BELOW_THRESHOLD = auto()


class HitCounter:
    """Counts requests that were looked up, hits among them, and the tokens of both.

    `queries` and `hits` count requests, `queried_tokens` and `hit_tokens` tokens, all over the
    counter's lifetime. The recent ratio is that of the last `window` requests.
    """

    def __init__(self, window: int = _RECENT_REQUESTS) -> None:
        self.queries = 0
        self.hits = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)

    def add(self, queried: int, hit: int) -> None:
        """Counts one request of `queried` tokens, `hit` of them cached."""
        self.queries += 1
        self.hits += 1 if hit else 0
        self.queried_tokens += queried
        self.hit_tokens += hit
        self._recent.append((queried, hit))

    @property
    def num_recent(self) -> int:
        """Requests in the window."""
        return len(self._recent)

    @property
    def recent_ratio(self) -> float:
        """Cached share of the tokens in the window, 0 to 1; 0 when it is empty."""
        recent = self._recent.copy()  # another thread may add to it meanwhile
        queried = sum(queried for queried, _ in recent)
        return sum(hit for _, hit in recent) / queried if queried else 0.0


class PrefixHits:
    """What requests have in the prefix cache, which is `enabled` or has nothing for anybody."""

    def __init__(self, cache: CacheManager, *, enabled: bool) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self.enabled = enabled

    def start(self, request: Request) -> None:
        """Makes the request known; hashes are needed only to find blocks and to be found."""
        shares = request.cache.read or request.cache.write
        self._cache.start(request, hashed=self.enabled and shares)

    def write_limit(self, cache: CacheOptions) -> int:
        """Tokens, in full blocks, up to which a request may publish."""
        if not (self.enabled and cache.write):
            return 0
        most = sys.maxsize if cache.write_upto is None else cache.write_upto
        return most // self._block_size * self._block_size

    def count(self, state: RequestState) -> int:
        """Tokens that the request would get from the cache if it started now."""
        most = self.most(state)
        return min(self.matched(state, most), most)

    def most(self, state: RequestState) -> int:
        """Tokens in full blocks that may be hits: at least the last token is left to compute."""
        if not self._may_read(state):
            return 0
        limit = state.num_prompt_logprobs if state.prompt_logprobs_due else state.num_tokens - 1
        return limit // self._block_size * self._block_size

    def matched(self, state: RequestState, most: int) -> int:
        """Tokens in leading full blocks that are cached, more than `most` at times."""
        return self._cache.count_hits(state.request_id, most) if self._may_read(state) else 0

    def prefix_name(self, state: RequestState, num_tokens: int) -> bytes | None:
        """What names the request's first tokens, in full blocks and more than none."""
        return self._cache.block_hash(state.request_id, num_tokens // self._block_size - 1)

    def _may_read(self, state: RequestState) -> bool:
        return self.enabled and state.request.cache.read


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
        hits: PrefixHits,
        sharing: InFlight | NoSharing,
        reads: Reads,
        loads: Loads | NoLoads,
        slots: Slots,
    ) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._hits = hits
        self._sharing = sharing
        self._reads = reads
        self._loads = loads
        self._slots = slots
        self._global_threshold = config.global_cache_hit_threshold
        self._hit_tiers = config.cache_hit_threshold_tiers
        self.enabled = hits.enabled
        self.counter = HitCounter()
        self.num_window_missed_tokens = 0
        self.num_stale_tokens: Counter[int] = Counter()
        self.num_below_threshold: Counter[str] = Counter(request=0, **{"global": 0})

    def start(self, state: RequestState, budget: StepBudget) -> AdmissionResult:
        """Takes blocks for the request; on any result but `STARTED` it holds none.

        `budget`, which has room, is what the step may compute.
        """
        most = self._hits.most(state)
        matched = self._hits.matched(state, most)
        # Blocks beyond the most it may take are computed in any case.
        if matched < most and self._sharing.must_wait(state, matched):
            return AdmissionResult.WAITS_FOR_BLOCKS
        hits = min(matched, most)
        if self._is_below_threshold(state, hits, most):
            if state.num_cached_tokens is None:
                state.num_cached_tokens = hits
                self._note_window_misses(state, self._lost_to_windows(state, matched, most))
            return AdmissionResult.BELOW_THRESHOLD
        plan = self._loads.plan(state, hits, most)
        upto = plan.upto if plan is not None and plan.is_sooner else hits
        if self._reads.must_wait(state, upto):
            return AdmissionResult.WAITS_FOR_BLOCKS
        if (
            plan is not None
            and plan.is_sooner
            and plan.loads.begin(state, plan, *self._slots.of_start(state, plan.upto, budget))
        ):
            self._note_start(state, hits, 0)
            return AdmissionResult.STARTED
        lost = self._lost_to_windows(state, matched, most)
        taken = self._cache.commit(
            state.request_id, hits, *self._slots.of_start(state, hits, budget)
        )
        if taken is None:
            return AdmissionResult.NO_ROOM
        if plan is not None and not plan.is_sooner:
            plan.loads.note_refused()
        self._note_start(state, taken, lost)
        return AdmissionResult.STARTED

    def _note_start(self, state: RequestState, taken: int, lost: int) -> None:
        """Notes what it took from the cache, and what was lost to windows on its first start."""
        state.skips_disk = False
        sequence = self._cache.sequence(state.request_id)
        state.num_slots = sequence.num_ready_slots
        state.num_computed_tokens = state.num_published_tokens = taken
        state.num_resets = self._cache.versions.num_resets
        if state.num_cached_tokens is None:
            state.num_cached_tokens = taken
            self._note_window_misses(state, lost)
            state.hit_staleness = self._cache.versions.staleness(sequence) if taken else 0
            if self.enabled:
                self.counter.add(state.num_tokens, taken)
                if state.hit_staleness:
                    self.num_stale_tokens[state.hit_staleness] += taken

    def _note_window_misses(self, state: RequestState, lost: int) -> None:
        state.num_window_missed_tokens = lost
        self.num_window_missed_tokens += lost

    def _lost_to_windows(self, state: RequestState, matched: int, most: int) -> int:
        """Tokens that could be read but for their windows, which the request computes again."""
        return self._cache.add_junction(state.request_id, matched, most) if matched < most else 0

    def _is_below_threshold(self, state: RequestState, usable: int, most: int) -> bool:
        own = state.request.cache.hit_threshold
        threshold, source = (self._global_threshold, "global") if own is None else (own, "request")
        if not threshold or state.request.params.max_tokens == 0:  # asked for to be computed
            return False
        if "disk" in (state.request.cache.hit_tiers or self._hit_tiers):
            usable = max(usable, self._loads.count(state.request_id, most)[0])
        # The last token is never a hit. A request that has no full block before it is refused at
        # its first start, so none returns.
        full = (state.num_tokens - 1) // self._block_size * self._block_size
        ratio = usable / full if full else 0.0
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
