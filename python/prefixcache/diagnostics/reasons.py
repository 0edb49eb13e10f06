"""Why the first missing block was not cached, from what the cache and the history know."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from prefixcache.diagnostics.evictions import DISCARDED, EvictedBlock, EvictedBlocks
from prefixcache.diagnostics.history import (
    EvictedContent,
    Miss,
    MissReason,
    Pressure,
    PromptHistory,
    RememberedPrompt,
    TokenIds,
)
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.cache_reader import PrefixLookup
from prefixcache.types.request import CacheScope

# Of the rest of an earlier prompt this many short pieces are looked for in the new one.
_NUM_PIECES = 16
_PIECE_TOKENS = 8


_Found = tuple[RememberedPrompt, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt whose miss is to be explained, and how it was or would be sent.

    `hit_tokens` and `window_missed_tokens` are those of its admission; None where it was not sent,
    and what the cache has now counts. It arrived and was started then, in seconds of
    `time.monotonic`: only prompts that arrived before, and blocks that were evicted before, have to
    do with it. `reads` is whether it may read the cache, `num_unscored` is as in `SamplingParams`.
    """

    token_ids: TokenIds
    scope: CacheScope
    reads: bool = True
    num_unscored: int | None = None
    hit_tokens: int | None = None
    window_missed_tokens: int = 0
    arrival: float = math.inf
    started_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Explanation:
    """A miss, and the earlier prompt that shares the most with the one asked about, if any.

    `first_block` are the tokens of the first full block that did not hit, None where it is not
    full. `disk_tokens` from there on lie on a disk. `shared_tokens` lead both prompts.
    """

    prompt_tokens: int
    miss: Miss
    first_block: range | None
    nearest: RememberedPrompt | None
    shared_tokens: int
    disk_tokens: int = 0

    def __str__(self) -> str:
        """One sentence."""
        return _SENTENCES[self.miss.reason].format(
            tokens=self._tokens(),
            hit=self.miss.hit_tokens,
            evicted=_eviction_in_words(self.miss.detail),
        )

    def _tokens(self) -> str:
        block = self.first_block
        return "" if block is None else f"tokens {block.start} to {block.stop - 1}"


class Reasons:
    """Explains misses of one cache.

    `caches_prefixes` is False where the cache is off.
    """

    def __init__(
        self,
        cache: CacheManager,
        history: PromptHistory,
        evictions: EvictedBlocks,
        *,
        caches_prefixes: bool,
    ) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._caches_prefixes = caches_prefixes
        self._history = history
        self._evictions = evictions

    def explain(self, asked: Asked, *, sees_all: bool) -> Explanation:
        """The reason, as whoever asks may know it: only with `sees_all` other salts are named.

        Takes time that grows with the prompt, and lets go of the interpreter for most of it.
        """
        lookup = self._cache.reader.look_up(asked.token_ids, asked.scope.salt)
        hit = self._hit_tokens(asked, lookup)
        own, best = self._nearest(asked, sees_all=sees_all)
        end = hit + self._block_size
        seen = next((match for match in (own, best) if match is not None and match[1] >= end), None)
        reason, detail = self._why(asked, lookup, hit, None if seen is None else seen[0])
        if reason == "never_seen" and best is not None and _differs(asked.token_ids, *best):
            reason = "different_text"
        return Explanation(
            prompt_tokens=len(asked.token_ids),
            miss=Miss(hit, reason, detail),
            first_block=range(hit, end) if end <= len(asked.token_ids) else None,
            nearest=None if best is None else best[0],
            shared_tokens=best[1] if best else 0,
            disk_tokens=self._disk_tokens(asked, lookup, hit) if reason == "on_disk" else 0,
        )

    def _disk_tokens(self, asked: Asked, lookup: PrefixLookup, hit: int) -> int:
        on_disk = lookup.disk_blocks(hit // self._block_size) * self._block_size
        return min(on_disk, self._full_blocks(_most_hits(asked)) - hit)

    def _hit_tokens(self, asked: Asked, lookup: PrefixLookup) -> int:
        if asked.hit_tokens is not None:
            return asked.hit_tokens
        reads = self._caches_prefixes and asked.reads
        return min(lookup.hit_tokens, self._full_blocks(_most_hits(asked))) if reads else 0

    def _full_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._block_size * self._block_size

    def _nearest(self, asked: Asked, *, sees_all: bool) -> tuple[_Found, _Found]:
        """Of what was sent under the same salt, and of all that may be known."""
        nearest = partial(self._history.nearest, asked.token_ids, asked.scope, before=asked.arrival)
        own = nearest()
        everything = nearest(sees_all=True) if sees_all else None
        best = everything if everything and (own is None or everything[1] > own[1]) else own
        return own, best

    def _why(
        self, asked: Asked, lookup: PrefixLookup, hit: int, seen: RememberedPrompt | None
    ) -> tuple[MissReason, EvictedContent | None]:
        """The reason; `seen` is an earlier prompt that has the whole block, if there is one."""
        if not self._caches_prefixes:
            return "cache_off", None
        if not asked.reads:
            return "cache_read_off", None
        if hit >= self._full_blocks(len(asked.token_ids) - 1):
            return "tail", None
        if hit >= self._full_blocks(_most_hits(asked)):
            return "prompt_logprobs", None
        reach = hit if asked.hit_tokens is not None else lookup.full_attention_tokens
        if asked.window_missed_tokens or reach > hit:
            return _lost(lookup), None
        return self._why_gone(asked, lookup, hit, seen)

    def _why_gone(
        self, asked: Asked, lookup: PrefixLookup, hit: int, seen: RememberedPrompt | None
    ) -> tuple[MissReason, EvictedContent | None]:
        """The reason why the cache does not have the block behind the first `hit` tokens."""
        evictions = self._evictions_of(lookup, hit // self._block_size)
        in_time = [eviction for eviction in evictions if _went_by(eviction, asked.started_at)]
        evicted = max(in_time, key=lambda eviction: eviction.time, default=None)
        # A block that was evicted only since then went to the disk later too.
        if len(in_time) == len(evictions) and lookup.disk_blocks(hit // self._block_size):
            return "on_disk", None
        if seen is not None and seen.scope.salt == asked.scope.salt:
            forgotten = self._forgotten(seen, evicted)
            if forgotten is not None:
                return forgotten, None
        if evicted is not None:
            return _explained(evicted, lookup)
        reason = self._why_not_there(asked, hit + self._block_size, seen)
        if reason != "evicted":
            return reason, None
        # The prompt's own blocks fell behind the window since, which hides that earlier ones had.
        if any(eviction.cause == DISCARDED for eviction in evictions):
            return _lost(lookup), None
        return reason, EvictedContent()

    def _why_not_there(self, asked: Asked, end: int, seen: RememberedPrompt | None) -> MissReason:
        """The reason for a block of which no eviction is known."""
        if seen is None:
            return "never_seen"
        if seen.scope.salt != asked.scope.salt:
            return "another_salt"
        return "write_refused" if seen.write_upto < end else "evicted"

    def _evictions_of(self, lookup: PrefixLookup, index: int) -> list[EvictedBlock]:
        """The last eviction of the block in each group that evicted it."""
        blocks = (self._evictions.find(name, group) for name, group in lookup.names(index))
        return [block for block in blocks if block is not None]

    def _forgotten(self, seen: RememberedPrompt, evicted: EvictedBlock | None) -> MissReason | None:
        """Whether everything was forgotten after the prompt was seen, and before the block went."""
        if self._evictions.new_weights_at > seen.arrival:
            return "weights_changed"
        if evicted is not None and evicted.time > seen.arrival:
            return None
        return "cleared" if self._evictions.cleared_at > seen.arrival else None


_SENTENCES: Mapping[MissReason, str] = {
    "never_seen": "The block of {tokens} has not been seen after this prefix.",
    "different_text": "An earlier prompt has other text within or before the block of {tokens}.",
    "evicted": "The block of {tokens} was cached and is gone: {evicted}.",
    "on_disk": "The block of {tokens} is on the disk, which is read only where computing is "
    "predicted to take longer.",
    "another_salt": "The block of {tokens} was sent under another cache salt alone.",
    "weights_changed": "The block of {tokens} was computed with other weights.",
    "cleared": "The block of {tokens} was cached before the cache was cleared.",
    "window_lost": "What a sliding window or a convolution needs before the end of {tokens} is not "
    "kept.",
    "no_state": "No state is kept there: keys and values of more tokens are cached, but the last "
    "state is the one after {hit}.",
    "write_refused": "The block of {tokens} was sent before, and not to be written to the cache.",
    "tail": "All full blocks hit that may: what follows the first {hit} tokens fills none, or ends "
    "with the last token, which is always computed.",
    "prompt_logprobs": "Log probabilities of the prompt need all of it computed.",
    "cache_read_off": "The request has cache_read false.",
    "cache_off": "The prefix cache is off.",
}
_PRESSURES: Mapping[Pressure, str] = {
    "capacity": "evicted to make room",
    "shrunk_cache": "dropped when the cache shrank",
    "cached_limit": "dropped for the limit on cached blocks",
    "unknown": "evicted, longer ago than is remembered",
}


def _eviction_in_words(evicted: EvictedContent | None) -> str:
    if evicted is None or evicted.ago_s is None or evicted.age_s is None or evicted.idle_s is None:
        return _PRESSURES["unknown"]
    return (
        f"{_PRESSURES[evicted.pressure]} {evicted.ago_s:.1f} s ago, {evicted.age_s:.1f} s after it "
        f"was computed and {evicted.idle_s:.1f} s after its last use"
    )


def _most_hits(asked: Asked) -> int:
    """The last token is computed in any case, and what log probabilities are wanted of."""
    last = len(asked.token_ids) - 1
    return last if asked.num_unscored is None else min(asked.num_unscored, last)


def _went_by(evicted: EvictedBlock, before: float) -> bool:
    """Whether the block may have been evicted then.

    A request discards blocks behind its own windows, but evicts none that it holds.
    """
    return (evicted.time if evicted.cause == DISCARDED else evicted.since) <= before


def _lost(lookup: PrefixLookup) -> MissReason:
    return "no_state" if lookup.has_states else "window_lost"


def _explained(evicted: EvictedBlock, lookup: PrefixLookup) -> tuple[MissReason, EvictedContent]:
    detail = EvictedContent(
        pressure=evicted.pressure,
        ago_s=max(0.0, time.monotonic() - evicted.time),
        age_s=evicted.age_s,
        idle_s=evicted.idle_s,
        hits=evicted.hits,
    )
    return _lost(lookup) if evicted.cause == DISCARDED else "evicted", detail


def _differs(token_ids: TokenIds, earlier: RememberedPrompt, shared: int) -> bool:
    """Whether most of what follows in the earlier prompt follows here too, behind other text."""
    rest, earlier_rest = token_ids[shared:], earlier.token_ids[shared:]
    if len(earlier_rest) < 2 * _PIECE_TOKENS or not len(rest):
        return False
    last = len(earlier_rest) - _PIECE_TOKENS
    starts = np.unique(np.linspace(1, last, _NUM_PIECES, dtype=np.int64)).tolist()
    text = rest.tobytes()
    differing = sum(
        text.find(earlier_rest[start : start + _PIECE_TOKENS].tobytes()) >= 0 for start in starts
    )
    return 2 * differing > len(starts)
