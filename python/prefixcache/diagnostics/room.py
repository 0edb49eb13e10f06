"""What one engine's diagnostics remember, and who may ask it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from prefixcache.diagnostics.evictions import EvictedBlocks, EvictionReader, Evictions
from prefixcache.diagnostics.history import PromptHistory, RememberedPrompt
from prefixcache.diagnostics.reasons import Asked, Explanation, Reasons
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.metrics import labelled_counter

# Seconds for which reasons are looked up without a chance for others to have the interpreter.
_LONGEST_TURN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What became of a prompt when its request was started, `started_at` in `time.monotonic`.

    `disk_tokens` of the hits came from a disk. Of one that `is_refused` too little was cached:
    nothing was computed. The others are as in `Asked`.
    """

    hit_tokens: int
    started_at: float
    disk_tokens: int = 0
    window_missed_tokens: int = 0
    reads: bool = True
    num_unscored: int | None = None
    is_refused: bool = False


class CacheDiagnostics:
    """Remembers the prompts and the evicted blocks of a cache, and explains misses out of them.

    At most `max_bytes`: half for prompts that were answered, a quarter for those in flight, the
    rest for evicted blocks. From any thread; `begin` and `end` take a microsecond or so.
    Reasons of ended requests are looked up when evictions are read, twice a second or on demand;
    `miss_counts` counts these. With `keeps_text` False nobody gives it texts.
    """

    def __init__(
        self,
        cache: CacheManager,
        evictions: EvictionReader,
        max_bytes: int,
        *,
        caches_prefixes: bool,
        keeps_text: bool,
    ) -> None:
        self.keeps_text = keeps_text
        self.block_size = cache.block_size
        self.history = PromptHistory(max_bytes // 2)
        self.miss_counts: Counter[str] = Counter()
        self._evictions = EvictedBlocks(max_bytes // 4)
        self._in_flight = _InFlight(max_bytes // 4)
        self._reader = evictions
        self._reasons = Reasons(
            cache, self.history, self._evictions, caches_prefixes=caches_prefixes
        )
        evictions.listen(self._take)

    def families(self) -> Iterator[Metric]:
        """The counts as a metric."""
        yield labelled_counter(
            "prefix_cache_misses",
            "Requests that missed, by the reason why their first missing block was not cached.",
            "reason",
            dict(self.miss_counts),
        )

    def begin(self, name: str, prompt: RememberedPrompt) -> None:
        """A prompt goes to the engine; `name` is unique. Where memory is short it is forgotten."""
        self._in_flight.add(name, prompt)

    def end(self, name: str, admitted: Admitted | None) -> None:
        """Its request has ended; None where nothing was computed, and so nothing remembered."""
        self._in_flight.end(name, admitted)

    def settle(self) -> None:
        """Takes in what was evicted and which requests ended until now."""
        self._reader.read()

    def explain(self, asked: Asked, *, sees_all: bool) -> Explanation:
        """Why the prompt misses or missed; see `Reasons.explain`. Call `settle` before."""
        return self._reasons.explain(asked, sees_all=sees_all)

    def _take(self, evictions: Evictions) -> None:
        self._evictions.add(evictions)
        begun = time.perf_counter()
        for prompt, admitted in self._in_flight.take_ended():
            self._remember(prompt, admitted)
            if time.perf_counter() - begun > _LONGEST_TURN:
                time.sleep(0)  # lets the step loop have the interpreter
                begun = time.perf_counter()

    def _remember(self, prompt: RememberedPrompt, admitted: Admitted) -> None:
        miss = self.explain(asked_of(prompt, admitted), sees_all=True).miss
        self.miss_counts[miss.reason] += 1
        if admitted.is_refused:
            return
        kept = dataclasses.replace(
            prompt,
            cached_tokens=admitted.hit_tokens,
            disk_cached_tokens=admitted.disk_tokens,
            miss=miss,
        )
        self.history.remember(kept)


def asked_of(prompt: RememberedPrompt, admitted: Admitted) -> Asked:
    """The question why a prompt missed that was sent."""
    return Asked(
        token_ids=prompt.token_ids,
        scope=prompt.scope,
        reads=admitted.reads,
        num_unscored=admitted.num_unscored,
        hit_tokens=admitted.hit_tokens,
        window_missed_tokens=admitted.window_missed_tokens,
        arrival=prompt.arrival,
        started_at=admitted.started_at,
    )


@dataclass(slots=True)
class _Kept:
    prompt: RememberedPrompt
    size: int
    admitted: Admitted | None = None


class _InFlight:
    """Prompts of requests that have not ended, or whose end was not looked at yet.

    Of these the text counts: the tokens are the requests' own as long as they run.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._ended: deque[str] = deque()

    def add(self, name: str, prompt: RememberedPrompt) -> None:
        size = prompt.num_own_bytes
        with self._lock:
            self._kept[name] = _Kept(prompt, size)
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= oldest.size

    def end(self, name: str, admitted: Admitted | None) -> None:
        with self._lock:
            kept = self._kept.get(name)
            if kept is None:
                return
            if admitted is None:
                del self._kept[name]
                self._num_bytes -= kept.size
                return
            kept.admitted = admitted
            self._ended.append(name)

    def take_ended(self) -> list[tuple[RememberedPrompt, Admitted]]:
        """Those that have ended, which are forgotten here."""
        taken: list[tuple[RememberedPrompt, Admitted]] = []
        with self._lock:
            while self._ended:
                kept = self._kept.pop(self._ended.popleft(), None)
                if kept is not None and kept.admitted is not None:
                    self._num_bytes -= kept.size
                    taken.append((kept.prompt, kept.admitted))
        return taken
