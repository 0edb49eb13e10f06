"""What any thread may read of a cache while another one changes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from prefixcache.core import PrefixCache
from prefixcache.core import Sequence as CoreSequence
from prefixcache.kv.cache_settings import CacheSettings
from prefixcache.kv.events import CacheEvents
from prefixcache.kv.tiers.disk_tier import DiskTier
from prefixcache.types.request import Request
from prefixcache.types.token_ids import TokenIds


class PrefixLocation(NamedTuple):
    """Where the leading full blocks of a prompt lie: tokens in memory, and on a disk after them."""

    memory_tokens: int
    disk_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """What the cache had of a prompt at one moment.

    `hit_tokens` in leading full blocks hit; `full_attention_tokens` do as far as full attention
    needs them, whatever windows need, and are 0 without full attention.
    """

    hit_tokens: int
    full_attention_tokens: int
    has_states: bool
    _sequence: CoreSequence
    _num_groups: int
    _disk: DiskTier | None

    def disk_blocks(self, index: int) -> int:
        """Full blocks of the prompt that lie on a disk: leading ones from this one on."""
        return 0 if self._disk is None else self._disk.count(self._sequence.block_hashes(index))

    def names(self, index: int) -> list[tuple[bytes, int]]:
        """Hash and group of a full block of the prompt in each group; empty past the last."""
        hashes = self._sequence.block_hashes(index, index + 1)
        return [(block_hash, group) for block_hash in hashes for group in range(self._num_groups)]


class CacheReader:
    """Reads that hash a prompt again and wait for nobody, as nobody waits for them."""

    def __init__(self, core: PrefixCache, settings: CacheSettings, disk: DiskTier | None) -> None:
        self._core = core
        self._groups = settings.groups
        self._has_windows = bool(settings.windows)
        self._disk = disk

    def probe(self, request: Request) -> int:
        """Leading tokens of the prompt that hit now, in full blocks."""
        hashes = self._core.compute_block_hashes(
            request.prompt_token_ids, cache_salt=request.cache.salt
        )
        return self._core.probe(hashes, self._hit_limit(request.prompt_token_ids))

    def locate_prefix(self, token_ids: TokenIds, salt: str | None) -> PrefixLocation:
        """Where the prefix of a prompt lies now; a step may change it."""
        sequence = self._core.new_sequence(token_ids, cache_salt=salt)
        memory, both = self._core.count_prefix_hits(sequence), 0
        if self._disk is not None:
            both, _ = self._core.count_tiered_hits(sequence, self._disk.staging)
        return PrefixLocation(memory, max(0, both - memory))

    def look_up(self, token_ids: TokenIds, salt: str | None) -> PrefixLookup:
        """What is cached of a prompt now."""
        sequence = self._core.new_sequence(token_ids, cache_salt=salt)
        most = self._hit_limit(token_ids)
        return PrefixLookup(
            hit_tokens=self._core.count_prefix_hits(sequence, most),
            full_attention_tokens=self._core.count_whole_hits(sequence, most),
            has_states="state" in self._groups,
            _sequence=sequence,
            _num_groups=len(self._groups),
            _disk=self._disk,
        )

    def _hit_limit(self, token_ids: TokenIds) -> int | None:
        """All but the last token. Without windows none is needed, as shorter hits are hits too."""
        return len(token_ids) - 1 if self._has_windows else None

    def keep_events(self) -> CacheEvents:
        """What is stored and removed from now on: before anything is cached, by the writer."""
        staging = None if self._disk is None else self._disk.staging
        return CacheEvents(self._core, self._groups, staging)
