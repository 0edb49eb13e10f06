"""The prefix cache, by request id: the one place that talks to the Rust core's cache.

Every call is one for the whole batch, never one per block.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache.config.engine_config import EvictionPolicy
from prefixcache.core import PrefixCache
from prefixcache.core import Sequence as CoreSequence
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.kv.events import CacheEvents
from prefixcache.kv.kv_folder import KeptFile
from prefixcache.kv.prompt_groups import PromptGroups
from prefixcache.kv.retention import Retention
from prefixcache.kv.specs import GroupKind
from prefixcache.kv.tiers.disk_tier import DiskTier
from prefixcache.metrics import FileCounts
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.step_plan import StepPlan
from prefixcache.types.token_ids import TokenIds

Blocks = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

_LOGGED_COUNTERS = ("evictions", "pins", "demotions", "pinned_evictions", "hints_demoted")

EVICTED_CAUSES = (1, 3, 4, 5)
"""Why blocks go that nobody chose: room was needed, a full LRU list, a smaller pool, the bound on
what may be cached."""

HASH_FORMAT = "prefixcache v2"
"""Names what docs/reference/hashing.md specifies; other bytes need another format."""


class PrefixLocation(NamedTuple):
    """Where the leading full blocks of a prompt lie: tokens in memory, and on a disk after them."""

    memory_tokens: int
    disk_tokens: int


class MissingBlocks(NamedTuple):
    """Blocks of a request without content: the key and the place in its table of each."""

    blocks: list[int]
    keys: list[bytes]
    places: list[int]


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """What the cache had of a prompt at one moment.

    `hit_tokens` in leading full blocks hit; `whole_tokens` do as far as full attention needs them,
    whatever windows need, and are 0 without full attention.
    """

    hit_tokens: int
    whole_tokens: int
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


@dataclass(slots=True)
class _Older:
    """A request's tokens under weights of versions that it may hit; `first` is one block."""

    most: float
    first: CoreSequence
    sequences: dict[int, CoreSequence] = field(default_factory=dict[int, CoreSequence])


class CacheManager:
    """One core sequence per request: its tokens, block hashes and block tables.

    Each of the `groups` has a block table of its own over the one pool. A group of full attention
    keeps a request's blocks until its end; one with a window gives back what is behind it.

    One thread makes all calls but `probe`, `look_up`, `most_blocks` and `stats`, the first to
    change something or the last to `adopt_writer`; attributes may be read from any. `num_blocks`
    counts the null block, which no request can hold; `num_usable_blocks` does not. `has_states`
    says whether some group keeps states, of which a request has few blocks.
    `attainable_blocks` is what the pool has or can return to by itself, and `make_room` asks for a
    number of usable ones. Of at most `max_blocks` blocks the pool can be resized, and at most
    `max_cached_blocks` are cached while no request holds them. Errors of the core pass through:
    `ValueError` names an argument, `RuntimeError` tells of misuse.

    `model`, `revision`, `weights`, `kv_dtype` and `arithmetic` enter every hash, `weights` until it
    is changed. `retention_budget` is the share of the pool, 0 to 1, that the hints of one owner may
    raise. What older weights computed is kept for requests that allow it, up to
    `max_weight_staleness` updates back, or without end (-1). `num_resets` counts what made all that
    was published before unfindable, and `num_released_blocks` those that no request held any more
    after one gave its blocks back.
    """

    _keeps_groups = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        model: str,
        revision: str = "",
        weights: str | None = None,
        kv_dtype: str = "",
        arithmetic: str = "",
        groups: Sequence[GroupKind] = ("full",),
        eviction_policy: EvictionPolicy = "lru",
        retention: Retention | None = None,
        retention_budget: float = 0.2,
        merge_twins: bool = False,
        max_blocks: int | None = None,
        max_cached_blocks: int | None = None,
        max_weight_staleness: int = 0,
    ) -> None:
        self._cache = PrefixCache(
            num_blocks,
            block_size,
            model=model,
            revision=revision,
            weights=weights,
            kv_dtype=kv_dtype,
            arithmetic=arithmetic,
            groups=groups,
            eviction_policy=eviction_policy,
            retention_budget=retention_budget,
            max_blocks=max_blocks,
            max_cached_blocks=max_cached_blocks,
        )
        self.block_size = block_size
        self.arithmetic = arithmetic
        self.max_blocks = num_blocks if max_blocks is None else max_blocks
        self.attainable_blocks = num_blocks
        self.make_room: Callable[[int], bool] = lambda _: False
        self.log_pins: Callable[[], None] = lambda: None
        self.groups = tuple(groups)
        self._num_groups = len(groups)
        self._windows = [2 if kind == "state" else kind[1] for kind in groups if kind != "full"]
        self._whole_groups = {group for group, kind in enumerate(groups) if kind != "state"}
        self.has_states = len(self._whole_groups) < len(groups)
        self._retention = retention or Retention()
        self._pins = self._retention.pin and self.has_windows
        self._merge_twins = merge_twins
        self.num_merged_blocks = 0
        self.num_resets = 0
        self.num_released_blocks = 0
        self._hints_expire = False
        self.prompt_groups = PromptGroups(self._cache, max(num_blocks, max_blocks or 0))
        self._max_staleness = _bound(max_weight_staleness)
        self._older: dict[str, _Older] = {}
        self._file: KeptFile | None = None
        self.disk: DiskTier | None = None
        self._sequences: dict[str, CoreSequence] = {}
        self._unhashed: set[str] = set()
        self._logged = dict.fromkeys(_LOGGED_COUNTERS, 0)
        self._set_size(num_blocks)

    def _set_size(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_usable_blocks = num_blocks - 1
        share = self._retention.pin_max_share if self._pins else 0.0
        self._max_pinned = int(share * self.num_usable_blocks)

    @property
    def has_windows(self) -> bool:
        """Whether some group keeps less than all blocks of a request."""
        return bool(self._windows)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return self._cache.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def stats(self) -> dict[str, int]:
        """Lifetime counters of the core, and blocks by state. From any thread."""
        return self._cache.stats()

    def log_changes(self) -> None:
        """Writes to the debug log how many blocks were evicted, pinned and demoted since."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        counts = self.stats()
        changes = {name: counts[name] - logged for name, logged in self._logged.items()}
        self._logged = {name: counts[name] for name in self._logged}
        if any(changes.values()):
            text = ", ".join(f"{count} {name}" for name, count in changes.items() if count)
            logger.debug("Blocks of the cache: %s.", text.replace("_", " "))

    def resize(self, num_blocks: int) -> int:
        """Sets the number of blocks; how many above it are held by requests still.

        What is cached above is lost: `move_cached` comes before.
        """
        held = self._cache.resize(num_blocks)
        self._set_size(num_blocks)
        if self._pins:
            self._demote_beyond_share()
        return held

    def held_blocks(self, first: int) -> list[int]:
        """The blocks from `first` on that requests hold, in no order."""
        tables = (
            sequence.block_table(group)
            for sequence in self._sequences.values()
            for group in range(self._num_groups)
        )
        return [block for table in tables for block in table if block >= first]

    def move_cached(
        self, num_blocks: int, max_moves: int, copy: Callable[[Blocks, Blocks], None]
    ) -> int:
        """One slice of a shrink: moves cached blocks that are worth most below the new end.

        They take the place of blocks that would go first; `copy` copies the KV of the first blocks
        to the second ones, and when it raises the content stays where it is. From the first slice
        on no block above the new end is handed out. Returns how many were to be moved: with 0 the
        shrink is ripe for `resize`, and `resize` to the old size takes it back.
        """
        sources, targets = self._cache.begin_moves(num_blocks, max_moves)
        self._set_size(num_blocks)
        if not len(sources):
            return 0
        try:
            copy(sources, targets)
        except BaseException:
            self._cache.abort_moves()
            raise
        self._cache.finish_moves()
        return len(sources)

    def block_map(
        self, cells: int, age_bounds: Sequence[float]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Blocks by place, state and age; see the core's `block_map`. From any thread."""
        return self._cache.block_map(cells, age_bounds)

    def listen(self, capacity: int, gap_bounds: Sequence[float]) -> None:
        """Logs what is lost from now on, once: see the core's `PrefixCache.listen`."""
        self._cache.listen(capacity, gap_bounds)

    def take_evictions(self, most: int) -> dict[str, npt.NDArray[Any]]:
        """Up to `most` evictions, each one row of the arrays of the core. From any thread."""
        return self._cache.take_evictions(most)

    def keep_events(self) -> CacheEvents:
        """What is stored and removed from now on, for any thread: before anything is cached."""
        disk = None if self.disk is None else self.disk.staging
        return CacheEvents(self._cache, self.groups, disk)

    @property
    def num_missed_evictions(self) -> int:
        """Evictions for which the log had no room. From any thread."""
        return self._cache.missed_evictions

    def reuse_gaps(self) -> tuple[list[int], float]:
        """Counts of the gaps between uses by the bounds of `listen`, and their sum in seconds."""
        return self._cache.reuse_gaps()

    def keep_in(self, file: KeptFile) -> None:
        """Restores what the file has kept, and keeps there what is published from now on.

        Before the first request. The pool's KV lies in the file. Ends pins that are more than the
        rules of today allow.
        """
        file.num_restored, file.num_dropped = self._cache.keep_in(file.core)
        self._demote_beyond_share()
        self._file = file

    def stage_evicted(self, disk: DiskTier) -> None:
        """Puts what is evicted from now on to a disk. Before the first request."""
        self._cache.stage_evicted(disk.staging)
        self.disk = disk
        disk.start()

    @property
    def file_counts(self) -> FileCounts | None:
        """What became of the blocks of the file, where there is one. From any thread."""
        return None if self._file is None else self._file.counts()

    def validate(self) -> None:
        """Checks the whole structure; raises `RuntimeError` naming a broken invariant."""
        self._cache.validate()

    def adopt_writer(self) -> None:
        """Makes the calling thread the one that changes the cache, in place of another's."""
        self._cache.adopt_writer()

    def probe(self, request: Request) -> int:
        """Leading tokens of the prompt that hit now, in full blocks. From any thread.

        Hashes the prompt again and only reads, so it waits for nobody and nobody for it.
        """
        hashes = self._cache.compute_block_hashes(
            request.prompt_token_ids, cache_salt=request.cache.salt
        )
        return self._cache.probe(hashes, self._hit_limit(len(request.prompt_token_ids) - 1))

    def new_sequence(self, token_ids: TokenIds, salt: str | None) -> CoreSequence:
        """A prompt as the cache knows it, which holds no blocks. From any thread."""
        return self._cache.new_sequence(token_ids, cache_salt=salt)

    def locate_prefix(self, sequence: CoreSequence) -> PrefixLocation:
        """Where the sequence's prefix lies now; a step may change it. From any thread."""
        memory, both = self._cache.count_prefix_hits(sequence), 0
        if self.disk is not None:
            both, _ = self._cache.count_tiered_hits(sequence, self.disk.staging)
        return PrefixLocation(memory, max(0, both - memory))

    def look_up(self, token_ids: TokenIds, salt: str | None) -> PrefixLookup:
        """What is cached of a prompt now. From any thread; reads as `probe` does."""
        sequence = self.new_sequence(token_ids, salt)
        most = self._hit_limit(len(token_ids) - 1)
        return PrefixLookup(
            hit_tokens=self._cache.count_prefix_hits(sequence, most),
            whole_tokens=self._cache.count_whole_hits(sequence, most),
            has_states=self.has_states,
            _sequence=sequence,
            _num_groups=self._num_groups,
            _disk=self.disk,
        )

    def start(self, request: Request, *, hashed: bool = True) -> None:
        """Makes the request known and hashes its prompt's full blocks.

        One that is not `hashed` gets slots alone: it finds nothing and publishes nothing.
        """
        sequence = self._sequences[request.request_id] = self._cache.new_sequence(
            request.prompt_token_ids if hashed else (),
            cache_salt=request.cache.salt,
            hashes=request.hashes if hashed else None,
        )
        self._older.pop(request.request_id, None)
        asked = request.cache.max_weight_staleness
        most = self._max_staleness if asked is None else min(_bound(asked), self._max_staleness)
        if most and hashed:
            first = self._cache.new_sequence(
                request.prompt_token_ids[: self.block_size], cache_salt=request.cache.salt
            )
            self._older[request.request_id] = _Older(most, first)
        if self.has_windows and hashed:
            self._retention.apply(sequence, request)
        if hashed and request.cache.retention:
            self._set_hints(sequence, request.cache)
        if hashed and self._keeps_groups:
            self._hints_expire |= self.prompt_groups.join(request, sequence)
        if not hashed:
            self._unhashed.add(request.request_id)

    def _set_hints(self, sequence: CoreSequence, cache: CacheOptions) -> None:
        """Ranks the blocks of a new sequence as its request's hints say."""
        hints = [(r.start, r.end, r.chosen_priority, r.ttl_s) for r in cache.retention]
        sequence.set_hints(cache.retention_owner, hints)
        self._hints_expire |= any(r.ttl_s is not None for r in cache.retention)

    def demote_expired(self) -> None:
        """Gives blocks whose hints ended their default priority, a bounded number at a call."""
        if self._hints_expire:
            self.prompt_groups.end_overdue()
            self._cache.demote_expired()
            if self._pins:
                self._demote_beyond_share()  # Some stood below a hint, and count again.

    def count_hits(self, request_id: str, max_tokens: int) -> int:
        """Leading tokens of the request that hit, in full blocks. Only reads.

        With windows the longest length up to `max_tokens` that does: a shorter one need not hit.
        Without them every shorter one does, so the answer may exceed `max_tokens`.
        """
        older = self._older.get(request_id)
        if older is not None:
            return self._choose_version(request_id, older, max_tokens)
        sequence = self._sequences[request_id]
        return self._cache.count_prefix_hits(sequence, self._hit_limit(max_tokens))

    def _choose_version(self, request_id: str, older: _Older, max_tokens: int) -> int:
        """Lets the request stand on the weights under which most of it hits, the newest of such.

        What it computes it publishes in their chain, so that the age of a block is that of the
        oldest one that it stands on. Each version's hashes are computed once, and none where not
        even the first block is cached.
        """
        now = self._cache.weight_version
        given, older_sequences = self._sequences[request_id], older.sequences
        older.sequences = {}
        most = -1
        for version in range(now, int(max(now - older.most, 0)) - 1, -1):
            first = older.first.at_version(version)
            if first is None:
                break  # it was forgotten, and so were all before it
            if version < now and self._is_absent(first):
                continue
            sequence = older_sequences.get(version) or given.at_version(version)
            assert sequence is not None
            older.sequences[version] = sequence
            hits = self._cache.count_prefix_hits(sequence, self._hit_limit(max_tokens))
            if hits > most:
                most, self._sequences[request_id] = hits, sequence
            if hits >= max_tokens:
                break
        return most

    def _is_absent(self, first: CoreSequence) -> bool:
        """Whether a sequence of one block has no hit; false where only windows could tell."""
        return "full" in self.groups and not self._cache.count_whole_hits(first, self.block_size)

    def staleness(self, request_id: str) -> int:
        """How many updates of the weights ago those were current that the request stands on."""
        return self._cache.weight_version - self._sequences[request_id].weight_version

    def _hit_limit(self, max_tokens: int) -> int | None:
        return max_tokens if self._windows else None

    def add_junction(self, request_id: str, hit_tokens: int, max_tokens: int) -> int:
        """Lets later requests begin where full attention's hits end and windows could not follow.

        `hit_tokens` is what `count_hits` said for `max_tokens`. Returns the tokens between, which
        were lost to the windows; the request computes them and keeps the window after them.
        """
        if not self.has_windows:
            return 0
        sequence = self._sequences[request_id]
        whole_hits = self._cache.count_whole_hits(sequence, max_tokens)
        if whole_hits <= hit_tokens:
            return 0
        self._add_anchor(request_id, whole_hits)
        return whole_hits - hit_tokens

    def keep_for(self, request_id: str, follower_id: str) -> None:
        """Lets the follower begin where its prompt parts from the tokens of the first request."""
        if not self.has_windows:
            return
        sequence, follower = self._sequences[request_id], self._sequences[follower_id]
        usable = min(sequence.num_tokens, follower.num_tokens - 1) // self.block_size

        def parts_before(end: int) -> bool:
            return sequence.block_hashes(end - 1, end) != follower.block_hashes(end - 1, end)

        shared = bisect.bisect_left(range(1, usable + 1), True, key=parts_before)
        self._add_anchor(request_id, shared * self.block_size)

    def _add_anchor(self, request_id: str, position: int) -> None:
        """Lets later requests begin at a token of this one, behind whose window it has moved on."""
        self._sequences[request_id].add_anchor(position)

    def block_hash(self, request_id: str, index: int) -> bytes | None:
        """The hash that names the request's full block and all before it; None past the last."""
        return next(iter(self._sequences[request_id].block_hashes(index, index + 1)), None)

    def count_with_disk(self, request_id: str, max_tokens: int) -> tuple[int, int]:
        """The longest hit up to `max_tokens`, the disk's blocks counted; how many of them it needs.

        (0, 0) where the disk has nothing.
        """
        if self.disk is None or not self.disk.staging.num_stored:
            return 0, 0
        sequence = self._sequences[request_id]
        return self._cache.count_tiered_hits(sequence, self.disk.staging, max_tokens)

    def reads_first(self, request_id: str, hit_tokens: int) -> bool:
        """Whether the hit needs more of a file's blocks read than one commit may.

        They are read on another thread then: `num_reads` of them still.
        """
        if self._file is None:
            return False
        sequence = self._sequences[request_id]
        return self._cache.reads_first(sequence, hit_tokens, self._file.commit_blocks)

    @property
    def num_reads(self) -> int:
        """Blocks of a file that requests wait for."""
        return 0 if self._file is None else self._file.core.num_asked

    def commit_missing(
        self, request_id: str, hit_tokens: int, num_tokens: int, chunk: int
    ) -> MissingBlocks | None:
        """`commit`, with new blocks in the places of what `hit_tokens` need and memory lacks.

        Returns these; they are to be filled, and then marked as filled.
        """
        at_once = self._window_slots(hit_tokens, chunk) or num_tokens
        sequence = self._sequences[request_id]
        missing = self._cache.commit_missing(sequence, hit_tokens, num_tokens, at_once)
        return None if missing is None else MissingBlocks(*missing)

    def commit(self, request_id: str, hit_tokens: int, num_tokens: int, chunk: int) -> int | None:
        """Takes the first `hit_tokens` from the cache and slots for `num_tokens` more.

        These are computed at most `chunk` at a time, so groups with a window get only as many slots
        at once as the request will ever hold in them; `ensure_slots` gives them the next ones. With
        states `chunk` is what the first step computes, which has to end in a block.
        Returns the hit tokens taken, or None when blocks are lacking; then nothing has changed.
        """
        sequence = self._sequences[request_id]
        at_once = self._window_slots(hit_tokens, chunk)
        taken = self._cache.commit_prefix_plan(sequence, hit_tokens, num_tokens, at_once)
        if taken is not None and taken < hit_tokens:
            # A block that another process left was damaged.
            self._cache.release([sequence])
            return self.commit(request_id, taken, num_tokens + hit_tokens - taken, chunk)
        if taken is None:
            logger.debug("Request %s waits: too few free blocks.", request_id)
        else:
            if request_id in self._older:
                self._older[request_id].sequences = {}
            logger.debug("Request %s hits %d tokens in the cache.", request_id, taken)
        return taken

    def _window_slots(self, hit_tokens: int, chunk: int) -> int | None:
        """Slots after the hits that groups with a window get at once; None where there are none.

        All that the prompt will hold at once, `most_blocks` in each group: were some of it left to
        others until it is needed, this request would be preempted for it. Of several windows the
        smallest one counts, so that no group gets more than it will need. Blocks of states stand
        where chunks end, which is known for the first one alone.
        """
        if not self._windows:
            return None
        size = self.block_size
        if self.has_states:
            return -(-chunk // size) * size
        chunk_blocks, window_blocks = -(-chunk // size), -(-(min(self._windows) - 1) // size)
        # One block is kept below the window, and a chunk may begin within a block.
        return (chunk_blocks + 2) * size + max(0, window_blocks * size - hit_tokens)

    def num_slots(self, request_id: str) -> int:
        """Tokens of the request that have a slot in every group."""
        return self._sequences[request_id].num_ready_slots

    def ensure_slots(self, wanted: Sequence[tuple[str, int]]) -> int:
        """Slots in every group for each request's first tokens up to a number, in order.

        Returns how many leading requests have theirs; the others are unchanged.
        """
        if not wanted:
            return 0
        sequences = self._of([request_id for request_id, _ in wanted])
        return self._cache.ensure_slots(sequences, [upto for _, upto in wanted])

    def keep_snapshots(self, starts: Sequence[tuple[str, int]]) -> None:
        """Gives blocks to the snapshots of states that are worth keeping, from a token on.

        Before the step that computes this token of each request, once slots for it are there.
        """
        sequences = self._of([request_id for request_id, _ in starts])
        self._cache.keep_snapshots(sequences, [start for _, start in starts])

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that a request of `num_tokens` holds at once, in all groups together.

        That is where at most `chunk` tokens are computed between one `drop_unneeded` and the next.
        """
        return self._cache.most_blocks(num_tokens, chunk)

    def append_tokens(self, sampled: Mapping[str, int]) -> None:
        """Adds one sampled token to each request."""
        if self._unhashed:
            sampled = {name: sampled[name] for name in sampled if name not in self._unhashed}
        self._cache.append_tokens(self._of(sampled), list(sampled.values()))

    def mark_filled(self, request_ids: Sequence[str], upto: Sequence[int]) -> Mapping[int, int]:
        """Publishes each request's full blocks below `upto` tokens, whose KV is there now.

        A block whose content another one has already is given up for that one, if these are merged.
        Returns how many blocks of which of the requests others held in every group already.
        """
        sequences = self._of(request_ids)
        duplicates = self._cache.mark_blocks_filled(sequences, list(upto))
        if self._merge_twins:
            now = self._cache.weight_version
            # Newer weights than its chain's computed other bits.
            duplicates = [
                duplicate
                for duplicate in duplicates
                if sequences[duplicate[0]].weight_version == now
            ]
            for sequence, group, index, _ in duplicates:
                self._cache.replace_block(sequences[sequence], group, index)
            self.num_merged_blocks += len(duplicates)
            if duplicates:
                logger.debug("%d blocks with the same content were merged.", len(duplicates))
        if not duplicates:
            return {}
        whole_groups = self._whole_groups  # Of states few places have a block.
        held = Counter(
            (place, index) for place, group, index, _ in duplicates if group in whole_groups
        )
        return Counter(place for (place, _), n in held.items() if n == len(whole_groups))

    def drop_unneeded(self, computed: Sequence[tuple[str, int]]) -> None:
        """Gives back the blocks that no token from the given one on needs, request by request.

        The tokens before are computed, in no step in flight, and were published, if they ever are.
        """
        sequences = self._of([request_id for request_id, _ in computed])
        self._cache.drop_unneeded(sequences, [upto for _, upto in computed])
        if self._pins:
            self._demote_beyond_share()

    def release(self, request_ids: Sequence[str]) -> None:
        """Gives the blocks back; the requests stay known and can be committed again."""
        self._release(request_ids)
        for request_id in request_ids:
            logger.debug("Request %s gives its blocks back and waits.", request_id)

    def free(self, request_ids: Sequence[str], *, ended_well: Collection[str] = ()) -> None:
        """Gives the blocks back and forgets the requests.

        Those that `ended_well` came to the end of their answers; where pins are on, the blocks
        that their anchors need are pinned.
        """
        ended = dict(zip(request_ids, self._of(request_ids), strict=True))
        held = {name: ended[name] for name in ended if ended[name].is_committed}
        if self._pins:
            self._cache.pin_anchors([held[name] for name in ended_well if name in held])
        self._release(list(held))
        self.prompt_groups.leave(ended)
        if self._pins:
            self._demote_beyond_share()
        for request_id in ended:
            del self._sequences[request_id]
            self._older.pop(request_id, None)
            self._unhashed.discard(request_id)
            logger.debug("Request %s ends and gives its blocks back.", request_id)

    def _release(self, request_ids: Sequence[str]) -> None:
        free = self.num_free_blocks
        self._cache.release(self._of(request_ids))
        self.prompt_groups.note_released(request_ids, self._sequences)
        self.num_released_blocks += self.num_free_blocks - free

    def free_all(self) -> None:
        """Gives all blocks back and forgets all requests, whatever was left half done."""
        self.free(list(self._sequences))
        self._unhashed.clear()

    def _demote_beyond_share(self) -> None:
        """Ends the oldest pins where there are more than the share that may be pinned."""
        beyond = self._cache.stats()["pinned_blocks"] - self._max_pinned
        if beyond > 0:
            self._demote(beyond)

    def _demote(self, count: int) -> None:
        """Ends the oldest pins."""
        self._cache.demote(count)

    def fill(self, plan: StepPlan, buffers: Sequence[BlockTableBuffers]) -> None:
        """Writes the step's block tables and slots into the runner's buffers, one set a group."""
        sequences = self._of([scheduled.request_id for scheduled in plan.sequences])
        starts = [scheduled.start for scheduled in plan.sequences]
        counts = [scheduled.num_tokens for scheduled in plan.sequences]
        for group, tables in enumerate(buffers):
            self._cache.fill_block_tables(
                sequences,
                starts,
                counts,
                group,
                tables.indptr,
                tables.indices,
                tables.last_page_len,
                tables.slot_mapping,
                tables.first_pages,
            )

    def reset(self) -> None:
        """Forgets all cached prefixes; running requests keep their blocks."""
        self.num_resets += 1
        self._cache.clear_cache_index()
        self._forget_stale()
        logger.debug("All cached prefixes are forgotten.")

    @property
    def root_hash(self) -> bytes:
        """The 32 bytes from which the hashes of requests without a salt follow. From any thread."""
        return self._cache.root_hash()

    @property
    def weight_version(self) -> int:
        """Counts the changes of the weights."""
        return self._cache.weight_version

    @property
    def weights_name(self) -> str:
        """What every block's hash calls the weights. From any thread."""
        return self._cache.weights_name

    def next_weight_version(self, weights: str | None = None) -> int:
        """`new_weight_version`, but what may be stale stays, for requests that allow it."""
        if not self._max_staleness:
            return self.new_weight_version(weights)
        return self._cache.new_weight_version(weights, keep=True)

    def new_weight_version(self, weights: str | None = None) -> int:
        """`reset`, and nothing computed so far can be found or published from now on.

        Hashes call the weights `weights`, or by the version's digits.
        """
        self.num_resets += 1
        version = self._cache.new_weight_version(weights)
        self._forget_stale()
        return version

    def _forget_stale(self) -> None:
        """Ends pins of content that cannot be hit any more, and forgets it on a disk."""
        if self._pins:
            self._demote(self._cache.stats()["pinned_blocks"])
        if self.disk is not None:
            self.disk.forget()

    def close(self, *, waits: bool = True) -> None:
        """Ends what runs along with the cache: a recording, a disk tier. From any thread.

        It `waits` for the disk a few seconds at most.
        """
        if self.disk is not None:
            self.disk.close(waits=waits)

    def _of(self, request_ids: Iterable[str]) -> list[CoreSequence]:
        sequences = self._sequences
        return [sequences[request_id] for request_id in request_ids]


def _bound(staleness: int) -> float:
    return math.inf if staleness < 0 else staleness


def fitting_tokens(
    num_blocks: int, block_size: int, groups: Sequence[GroupKind], *, chunk: int, most: int
) -> int:
    """The tokens, up to `most`, of the longest request that a cache can hold.

    `num_blocks` counts the null block; at most `chunk` tokens at a time are computed.
    """
    # Made to count, it holds nothing.
    cache = PrefixCache(2, block_size, model="any", groups=groups)
    return bisect.bisect_right(
        range(1, most + 1), num_blocks - 1, key=lambda tokens: cache.most_blocks(tokens, chunk)
    )
