"""The blocks of each request, by request id. Every call is one for the whole batch."""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from prefixcache.core import Sequence as CoreSequence
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.kv.cache_reader import CacheReader
from prefixcache.kv.cache_settings import CacheSettings
from prefixcache.kv.cache_size import CacheSize
from prefixcache.kv.hints import Hints
from prefixcache.kv.kv_folder import KeptFile
from prefixcache.kv.pins import Pins
from prefixcache.kv.recordings.recording import CacheRecorder, NotRecorded
from prefixcache.kv.retention import Retention
from prefixcache.kv.tiers.disk_tier import DiskTier
from prefixcache.kv.versions import CacheVersions
from prefixcache.types.request import Request
from prefixcache.types.step_plan import StepPlan

logger = logging.getLogger(__name__)


class MissingBlocks(NamedTuple):
    """Blocks of a request without content: the key and the place in its table of each."""

    blocks: list[int]
    keys: list[bytes]
    places: list[int]


class CacheManager:
    """One core sequence per request: its tokens, block hashes and block tables.

    A group of full attention keeps a request's blocks until its end; one with a window gives back
    what is behind it. What is evicted goes to `disk`, where there is one. What older weights
    computed is kept `max_weight_staleness` updates long, see `CacheVersions`. With `merge_twins`
    blocks with the same content become one.

    One thread makes all calls, the first to change something or the last to adopt the core; any may
    read attributes, and `reader`. Errors of the core pass through: `ValueError` names an argument,
    `RuntimeError` tells of misuse. `num_released_blocks` counts those that no request held any more
    after one gave its blocks back.
    """

    def __init__(
        self,
        settings: CacheSettings,
        *,
        retention: Retention | None = None,
        merge_twins: bool = False,
        max_weight_staleness: int = 0,
        disk: DiskTier | None = None,
        recorder: CacheRecorder | NotRecorded | None = None,
    ) -> None:
        core = settings.make_core()
        recorder = recorder or NotRecorded()
        self.core = core
        self.block_size = settings.block_size
        self.arithmetic = settings.arithmetic
        self.groups = tuple(settings.groups)
        self.has_windows = bool(settings.windows)
        self.has_states = "state" in settings.groups
        self.disk = disk
        self.file: KeptFile | None = None
        self.num_merged_blocks = 0
        self.num_released_blocks = 0
        self._settings = settings
        self._recorder = recorder
        self._merge_twins = merge_twins
        self._retention = retention or Retention()
        pins = Pins(
            core,
            recorder,
            enabled=self._retention.pin and self.has_windows,
            max_share=self._retention.pin_max_share,
        )
        self._pins = pins
        self.size = CacheSize(core, recorder, pins, most_blocks=settings.most_blocks)
        self.hints = Hints(core, recorder, pins, most_blocks=settings.most_blocks)
        self.reader = CacheReader(core, settings, disk)
        self.versions = CacheVersions(
            core, settings, recorder, pins, disk, max_staleness=max_weight_staleness
        )
        self._sequences: dict[str, CoreSequence] = {}
        self._unhashed: set[str] = set()
        recorder.begin(core, settings, self._retention, merges=merge_twins)

    def start_tiers(self, file: KeptFile | None = None) -> None:
        """Lets what is evicted go to the disk from now on.

        With a `file`, in which the pool's KV lies, also restores what that has kept, and keeps
        there what is published; ends pins that are more than the rules of today allow. Before the
        first request.
        """
        staging = None if self.disk is None else self.disk.staging
        if file is not None:
            file.restore(self.core, staging)
            self._pins.end_beyond_share()
            self.file = file
        elif staging is not None:
            self.core.stage_evicted(staging)
        if self.disk is not None:
            self.disk.start()

    def close(self, *, waits: bool = True) -> None:
        """Ends what runs along with the cache: a recording, a disk tier. From any thread.

        It `waits` for the disk a few seconds at most.
        """
        self._recorder.close()
        if self.disk is not None:
            self.disk.close(waits=waits)

    def sequence(self, request_id: str) -> CoreSequence:
        """The request's tokens and blocks; another one after `start` or `count_hits`."""
        return self._sequences[request_id]

    def start(self, request: Request, *, hashed: bool = True) -> None:
        """Makes the request known and hashes its prompt's full blocks.

        One that is not `hashed` gets slots alone: it finds nothing and publishes nothing.
        """
        name = request.request_id
        is_new = name not in self._sequences
        sequence = self._sequences[name] = self.core.new_sequence(
            request.prompt_token_ids if hashed else (),
            cache_salt=request.cache.salt,
            hashes=request.hashes if hashed else None,
        )
        self.versions.forget(name)
        if hashed:
            self.versions.start(request)
            if self.has_windows:
                self._retention.apply(sequence, request)
            self.hints.start(request, sequence)
        else:
            self._unhashed.add(name)
        if is_new:
            self._recorder.note_requests(1)
            self._recorder.note_now("add", request=request, hashed=hashed)
        else:
            self._recorder.note_now("restart", request_id=name)

    def count_hits(self, request_id: str, max_tokens: int) -> int:
        """Leading tokens of the request that hit, in full blocks. Only reads.

        With windows the longest length up to `max_tokens` that does: a shorter one need not hit.
        Without them every shorter one does, so the answer may exceed `max_tokens`.
        """
        sequence, hits = self.versions.choose(request_id, self._sequences[request_id], max_tokens)
        self._sequences[request_id] = sequence
        return hits

    def add_junction(self, request_id: str, hit_tokens: int, max_tokens: int) -> int:
        """Lets later requests begin where full attention's hits end and windows could not follow.

        `hit_tokens` is what `count_hits` said for `max_tokens`. Returns the tokens between, which
        were lost to the windows; the request computes them and keeps the window after them.
        """
        if not self.has_windows:
            return 0
        sequence = self._sequences[request_id]
        end = self.core.count_whole_hits(sequence, max_tokens)
        if end <= hit_tokens:
            return 0
        self._add_anchor(request_id, end)
        return end - hit_tokens

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
        self._recorder.note_now("anchor", request_id=request_id, at=position)

    def block_hash(self, request_id: str, index: int) -> bytes | None:
        """The hash that names the request's full block and all before it; None past the last."""
        return next(iter(self._sequences[request_id].block_hashes(index, index + 1)), None)

    def commit_missing(
        self, request_id: str, hit_tokens: int, num_tokens: int, chunk: int
    ) -> MissingBlocks | None:
        """`commit`, with new blocks in the places of what `hit_tokens` need and memory lacks.

        Returns these; they are to be filled, and then marked as filled.
        """
        at_once = self._window_slots(hit_tokens, chunk) or num_tokens
        sequence = self._sequences[request_id]
        missing = self.core.commit_missing(sequence, hit_tokens, num_tokens, at_once)
        return None if missing is None else MissingBlocks(*missing)

    def commit(self, request_id: str, hit_tokens: int, num_tokens: int, chunk: int) -> int | None:
        """Allocates the first `hit_tokens` in the cache and slots for `num_tokens` more.

        These are computed at most `chunk` at a time, so groups with a window get only as many slots
        at once as the request will ever hold in them; `ensure_slots` gives them the next ones. With
        states `chunk` is what the first step computes, which has to end in a block.
        Returns the hit tokens, or None when blocks are lacking; then nothing has changed.
        """
        self._recorder.tick()
        sequence = self._sequences[request_id]
        at_once = self._window_slots(hit_tokens, chunk)
        hits = self.core.commit_prefix_plan(sequence, hit_tokens, num_tokens, at_once)
        if hits is None:
            logger.debug("Request %s waits: too few free blocks.", request_id)
            return None
        if hits < hit_tokens:
            # A block that another process left was damaged.
            self.core.release([sequence])
            return self.commit(request_id, hits, num_tokens + hit_tokens - hits, chunk)
        self.versions.settle(request_id)
        logger.debug("Request %s hits %d tokens in the cache.", request_id, hits)
        self._recorder.note("start", request_id=request_id, hit=hits, new=num_tokens, chunk=at_once)
        return hits

    def _window_slots(self, hit_tokens: int, chunk: int) -> int | None:
        """Slots after the hits that groups with a window get at once; None where there are none.

        All that the prompt will hold at once, the core's `most_blocks` in each group: were some of
        it left to others until it is needed, this request would be preempted for it. Of several
        windows the smallest one counts, so that no group gets more than it will need. Blocks of
        states stand where chunks end, which is known for the first one alone.
        """
        if not self.has_windows:
            return None
        size = self.block_size
        if self.has_states:
            return -(-chunk // size) * size
        smallest = min(self._settings.windows)
        chunk_blocks, window_blocks = -(-chunk // size), -(-(smallest - 1) // size)
        # One block is kept below the window, and a chunk may begin within a block.
        return (chunk_blocks + 2) * size + max(0, window_blocks * size - hit_tokens)

    def ensure_slots(self, wanted: Sequence[tuple[str, int]]) -> int:
        """Slots in every group for each request's first tokens up to a number, in order.

        Returns how many leading requests have theirs; the others are unchanged.
        """
        if not wanted:
            return 0
        self._recorder.tick()
        sequences = self._of([request_id for request_id, _ in wanted])
        served = self.core.ensure_slots(sequences, [upto for _, upto in wanted])
        if served:
            self._recorder.note("slots", wanted=wanted[:served])
        return served

    def keep_snapshots(self, starts: Sequence[tuple[str, int]]) -> None:
        """Gives blocks to the snapshots of states that are worth keeping, from a token on.

        Before the step that computes this token of each request, once slots for it are there.
        """
        self._recorder.tick()
        sequences = self._of([request_id for request_id, _ in starts])
        self.core.keep_snapshots(sequences, [start for _, start in starts])
        self._recorder.note("snapshots", starts=starts)

    def append_tokens(self, sampled: Mapping[str, int]) -> None:
        """Adds one sampled token to each request."""
        hashed = sampled
        if self._unhashed:
            hashed = {name: sampled[name] for name in sampled if name not in self._unhashed}
        self.core.append_tokens(self._of(hashed), list(hashed.values()))
        self._recorder.note("tokens", sampled=sampled)

    def mark_filled(self, request_ids: Sequence[str], upto: Sequence[int]) -> Mapping[int, int]:
        """Publishes each request's full blocks below `upto` tokens, whose KV is there now.

        A block whose content another one has already is given up for that one, if these are merged.
        Returns how many blocks of which of the requests others held in every group already.
        """
        self._recorder.tick()
        sequences = self._of(request_ids)
        duplicates = self.core.mark_blocks_filled(sequences, list(upto))
        if self._merge_twins:
            now = self.core.weight_version
            # Newer weights than its chain's computed other bits.
            duplicates = [row for row in duplicates if sequences[row[0]].weight_version == now]
            for sequence, group, index, _ in duplicates:
                self.core.replace_block(sequences[sequence], group, index)
            self.num_merged_blocks += len(duplicates)
            if duplicates:
                logger.debug("%d blocks with the same content were merged.", len(duplicates))
        self._recorder.note("publish", request_ids=request_ids, upto=upto)
        if not duplicates:
            return {}
        # Of states few places have a block.
        groups = {group for group, kind in enumerate(self.groups) if kind != "state"}
        held = Counter((place, index) for place, group, index, _ in duplicates if group in groups)
        return Counter(place for (place, _), n in held.items() if n == len(groups))

    def drop_unneeded(self, computed: Sequence[tuple[str, int]]) -> None:
        """Gives back the blocks that no token from the given one on needs, request by request.

        The tokens before are computed, in no step in flight, and were published, if they ever are.
        """
        self._recorder.tick()
        self._recorder.note("drop", wanted=computed)
        sequences = self._of([request_id for request_id, _ in computed])
        self.core.drop_unneeded(sequences, [upto for _, upto in computed])
        self._pins.keep_share()

    def release(self, request_ids: Sequence[str]) -> None:
        """Gives the blocks back; the requests stay known and can be committed again."""
        self._recorder.tick()
        self._release(request_ids)
        self._recorder.note("preempt", request_ids=request_ids)
        self._pins.keep_share()
        for request_id in request_ids:
            logger.debug("Request %s gives its blocks back and waits.", request_id)

    def free(self, request_ids: Sequence[str], *, ended_well: Collection[str] = ()) -> None:
        """Gives the blocks back and forgets the requests.

        Those that `ended_well` came to the end of their answers; where pins are on, the blocks
        that their anchors need are pinned.
        """
        self._recorder.tick()
        self._recorder.note("end", request_ids=tuple(request_ids), well=frozenset(ended_well))
        ended = dict(zip(request_ids, self._of(request_ids), strict=True))
        held = {name: ended[name] for name in ended if ended[name].is_committed}
        self._pins.pin_anchors([held[name] for name in ended_well if name in held])
        self._release(list(held))
        self.hints.groups.leave(ended)
        self._pins.keep_share()
        for request_id in ended:
            del self._sequences[request_id]
            self.versions.forget(request_id)
            self._unhashed.discard(request_id)
            logger.debug("Request %s ends and gives its blocks back.", request_id)
        self._recorder.note_requests(-len(ended))
        self._recorder.count()

    def _release(self, request_ids: Sequence[str]) -> None:
        free = self.core.num_free_blocks
        self.core.release(self._of(request_ids))
        self.hints.groups.note_released(request_ids, self._sequences)
        self.num_released_blocks += self.core.num_free_blocks - free

    def free_all(self) -> None:
        """Gives all blocks back and forgets all requests, whatever was left half done."""
        self.free(list(self._sequences))
        self._unhashed.clear()

    def held_blocks(self, first: int) -> list[int]:
        """The blocks from `first` on that requests hold, in no order."""
        tables = (
            sequence.block_table(group)
            for sequence in self._sequences.values()
            for group in range(len(self.groups))
        )
        return [block for table in tables for block in table if block >= first]

    def fill(self, plan: StepPlan, buffers: Sequence[BlockTableBuffers]) -> None:
        """Writes the step's block tables and slots into the runner's buffers, one set a group."""
        sequences = self._of([scheduled.request_id for scheduled in plan.sequences])
        starts = [scheduled.start for scheduled in plan.sequences]
        counts = [scheduled.num_tokens for scheduled in plan.sequences]
        for group, tables in enumerate(buffers):
            tables.fill(self.core, sequences, starts, counts, group)

    def _of(self, request_ids: Iterable[str]) -> list[CoreSequence]:
        sequences = self._sequences
        return [sequences[request_id] for request_id in request_ids]
