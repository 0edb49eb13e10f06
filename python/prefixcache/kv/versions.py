"""Which weights cached blocks were computed with, and which of them requests may hit."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from prefixcache.core import PrefixCache
from prefixcache.core import Sequence as CoreSequence
from prefixcache.kv.cache_settings import CacheSettings
from prefixcache.kv.pins import Pins
from prefixcache.kv.recordings.recording import CacheRecorder, NotRecorded
from prefixcache.kv.tiers.disk_tier import DiskTier
from prefixcache.types.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Older:
    """A request's tokens under weights of versions that it may hit; `first` is one block."""

    max_staleness: float
    first: CoreSequence
    sequences: dict[int, CoreSequence] = field(default_factory=dict[int, CoreSequence])


class CacheVersions:
    """Versions of one cache's weights.

    What older weights computed is kept for requests that allow it, up to `max_staleness` updates
    back, or without end (-1). `num_resets` counts what made all that was published before
    unfindable.
    """

    def __init__(
        self,
        core: PrefixCache,
        settings: CacheSettings,
        recorder: CacheRecorder | NotRecorded,
        pins: Pins,
        disk: DiskTier | None,
        *,
        max_staleness: int,
    ) -> None:
        self._core = core
        self._recorder = recorder
        self._pins = pins
        self._disk = disk
        self._max_staleness = _bound(max_staleness)
        self._has_full_attention = "full" in settings.groups
        self._has_windows = bool(settings.windows)
        self._older: dict[str, _Older] = {}
        self.num_resets = 0

    def reset(self) -> None:
        """Forgets all cached prefixes; running requests keep their blocks."""
        self._recorder.tick()
        self._recorder.note("reset")
        self.num_resets += 1
        self._core.clear_cache_index()
        self._forget_stale()
        logger.debug("All cached prefixes are forgotten.")

    def begin(self, weights: str | None = None) -> int:
        """`renew`, but what may be stale stays, for requests that allow it."""
        if not self._max_staleness:
            return self.renew(weights)
        return self._core.new_weight_version(weights, keep=True)

    def renew(self, weights: str | None = None) -> int:
        """`reset`, and nothing computed so far can be found or published from now on.

        Hashes call the weights `weights`, or by the version's digits. Returns their number.
        """
        self._recorder.tick()
        self._recorder.note("weights")
        self.num_resets += 1
        version = self._core.new_weight_version(weights)
        self._forget_stale()
        return version

    def _forget_stale(self) -> None:
        """Ends pins of content that cannot be hit any more, and forgets it on a disk."""
        self._pins.end_all()
        if self._disk is not None:
            self._disk.forget()
        self._recorder.count()

    def start(self, request: Request) -> None:
        """Lets the request hit what older weights computed, as far as it allows that."""
        allowed = request.cache.max_weight_staleness
        most = self._max_staleness
        if allowed is not None:
            most = min(_bound(allowed), most)
        if most:
            tokens = request.prompt_token_ids[: self._core.block_size]
            first = self._core.new_sequence(tokens, cache_salt=request.cache.salt)
            self._older[request.request_id] = _Older(most, first)

    def choose(
        self, request_id: str, sequence: CoreSequence, max_tokens: int
    ) -> tuple[CoreSequence, int]:
        """The sequence on which the request is to stand, and how many of its tokens hit.

        That is the one under whose weights most of it hits, the newest of such. What it computes it
        publishes in their chain, so that the age of a block is that of the oldest one that it
        stands on. Each version's hashes are computed once, and none where not even the first block
        is cached.
        """
        older = self._older.get(request_id)
        if older is None:
            return sequence, self._count_hits(sequence, max_tokens)
        now, computed = self._core.weight_version, older.sequences
        older.sequences = {}
        best, most = sequence, -1
        for version in range(now, int(max(now - older.max_staleness, 0)) - 1, -1):
            first = older.first.at_version(version)
            if first is None:
                break  # it was forgotten, and so were all before it
            if version < now and self._is_absent(first):
                continue
            candidate = computed.get(version) or sequence.at_version(version)
            assert candidate is not None
            older.sequences[version] = candidate
            hits = self._count_hits(candidate, max_tokens)
            if hits > most:
                best, most = candidate, hits
            if hits >= max_tokens:
                break
        return best, most

    def _count_hits(self, sequence: CoreSequence, max_tokens: int) -> int:
        return self._core.count_prefix_hits(sequence, max_tokens if self._has_windows else None)

    def _is_absent(self, first: CoreSequence) -> bool:
        """Whether a sequence of one block has no hit; false where only windows could tell."""
        block = self._core.block_size
        return self._has_full_attention and not self._core.count_whole_hits(first, block)

    def staleness(self, sequence: CoreSequence) -> int:
        """How many updates of the weights ago those were current that the sequence stands on."""
        return self._core.weight_version - sequence.weight_version

    def settle(self, request_id: str) -> None:
        """The request holds blocks; other versions of it are not needed now."""
        if request_id in self._older:
            self._older[request_id].sequences = {}

    def forget(self, request_id: str) -> None:
        """The request has ended, or begins again."""
        self._older.pop(request_id, None)


def _bound(staleness: int) -> float:
    return math.inf if staleness < 0 else staleness
