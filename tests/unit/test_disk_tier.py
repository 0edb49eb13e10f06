"""Blocks that memory has no room for, on a disk: what goes there, what comes back, and failures."""

from __future__ import annotations

import itertools
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from prefixcache._core import BlockStaging, PrefixCache
from prefixcache.events import wire
from prefixcache.events.config import KVEventsConfig
from prefixcache.events.publisher import EventPublisher
from prefixcache.kv.events import CacheEvents
from prefixcache.kv.tiers.disk_store import FILE_NAME, DiskStore
from prefixcache.kv.tiers.disk_tier import DiskTier, block_key

NUM_BLOCKS, BLOCK_BYTES, TENSORS = 8, 4096, 2
MIB = 1 << 20
SCOPE = b"s" * 16


class Tiered:
    """A cache of seven blocks of 16 tokens, and a disk behind it."""

    def __init__(
        self, folder: Path, *, min_uses: int = 1, weights: str = "blake3:a", starts: bool = True
    ) -> None:
        self.kv = np.zeros((TENSORS, NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        addresses = [tensor.ctypes.data for tensor in self.kv]
        self.staging = BlockStaging(addresses, BLOCK_BYTES, NUM_BLOCKS, MIB, min_uses, self.kv)
        self.cache = PrefixCache(NUM_BLOCKS, 16, weights=weights, retention_budget=1.0)
        self.cache.stage_evicted(self.staging)
        self.now = 0.0
        self.tier = DiskTier(
            self.staging,
            partial(DiskStore, folder, 8 * MIB, SCOPE),
            block_bytes=TENSORS * BLOCK_BYTES,
            name=str(folder),
            clock=lambda: self.now,
        )
        if starts:
            self.tier.start()

    def compute(
        self, first: int, num_blocks: int = 7, salt: str | None = None, **hints: int
    ) -> list[bytes]:
        """Fills the blocks of a prompt with numbers of its tokens; its hashes."""
        tokens = [first + i for i in range(16 * num_blocks)]
        sequence = self.cache.new_sequence(tokens, cache_salt=salt)
        if hints:
            sequence.set_hints("", [(0, None, hints["priority"], None)])
        assert self.cache.commit_prefix_plan(sequence, 0, 16 * num_blocks) == 0
        for place, block in enumerate(sequence.block_table()):
            self.kv[:, block] = (first + place) % 251
        self.cache.mark_blocks_filled([sequence], [16 * num_blocks])
        self.cache.release([sequence])
        return sequence.block_hashes()

    def settle(self) -> None:
        """All that waits is written."""
        failures = self.tier.counts().failures
        self.tier.nudge()
        while self.staging.has_staged or self.tier.counts().written < self.staged:
            assert self.tier.counts().failures == failures

    @property
    def staged(self) -> int:
        return self.staging.counts()["staged"]

    def load(self, hashes: list[bytes]) -> list[int]:
        """Numbers of the first bytes of the blocks that came back."""
        load = self.tier.load(range(1, 1 + len(hashes)), hashes)
        while not load.is_done:
            self.tier.wait([load], 1)
        return self.kv[1, 1 : 1 + load.num_loaded, 0].tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Tiered]]:
    made: list[Tiered] = []

    def one(**options: int | str) -> Tiered:
        made.append(Tiered(folder, **options))
        return made[-1]

    yield one
    for each in made:
        each.tier.close()


def evicted(tiered: Tiered, first: int = 100) -> list[bytes]:
    """The hashes of a prompt that was computed and then evicted."""
    hashes = tiered.compute(first)
    tiered.compute(first + 1000)
    tiered.settle()
    return hashes


def test_evicted_blocks_come_back_as_they_were(make):
    tiered = make()
    hashes = evicted(tiered)
    assert tiered.tier.count(hashes) == 7
    assert tiered.load(hashes) == [100 + i for i in range(7)]


def test_the_next_process_finds_them(make):
    first = make()
    hashes = evicted(first)
    first.tier.close()
    second = make()
    while second.tier.count(hashes) < 7:
        pass
    assert second.load(hashes[2:5]) == [102, 103, 104]


@pytest.mark.parametrize("weights", ["tag:a", "count:1:blake3:a"])
def test_blocks_of_weights_without_a_digest_stay_in_memory(make, weights):
    tiered = make(weights=weights)
    evicted(tiered)
    assert tiered.staged == 0


def test_a_clear_is_one_for_the_next_process_too(make):
    first = make()
    hashes = evicted(first)
    first.cache.clear_cache_index()
    first.tier.forget()
    assert first.tier.count(hashes) == 0
    again = evicted(first, 300)
    assert first.tier.count(again) == 7
    first.tier.close()
    second = make()
    while second.tier.count(again) < 7:
        pass
    assert second.tier.count(hashes) == 0


def test_blocks_go_there_from_their_second_use_on(make):
    tiered = make(min_uses=2)
    hashes = evicted(tiered)
    assert tiered.staged == 0
    assert tiered.staging.counts()["skipped"] == 7
    assert evicted(tiered) == hashes  # computed twice
    assert tiered.tier.count(hashes) == 7


@pytest.mark.parametrize(("priority", "count"), [(80, 7), (0, 0)])
def test_a_hint_decides(make, priority, count):
    tiered = make(min_uses=2 if count else 1)
    tiered.compute(100, priority=priority)
    tiered.compute(1000, priority=90)
    assert tiered.staged == count


def test_what_the_queue_has_no_room_for_is_dropped(folder):
    tiered = Tiered(folder, starts=False)
    for first in range(0, 40_000, 200):
        tiered.compute(first)
    counts = tiered.staging.counts()
    assert counts["staged"] * (TENSORS * BLOCK_BYTES + 8) <= MIB
    assert counts["dropped"] > 0


def test_a_damaged_block_ends_the_load_and_is_removed(make, folder):
    tiered = make()
    hashes = evicted(tiered)
    with sqlite3.connect(folder / FILE_NAME) as db:
        key = SCOPE + bytes(8) + block_key(hashes[3])
        (value,) = db.execute(
            "SELECT value FROM data JOIN blocks USING (id) WHERE key = ?", [key]
        ).fetchone()
        wrong = value[:500] + bytes([value[500] ^ 1]) + value[501:]
        db.execute("UPDATE data SET value = ? WHERE value = ?", [wrong, value])
    db.close()
    assert tiered.load(hashes) == [100, 101, 102]
    assert tiered.tier.count(hashes) == 3
    assert tiered.tier.counts().damaged == 1


def test_the_folder_is_the_users_alone_and_bounded(make, folder):
    tiered = make()
    evicted(tiered)
    for first in range(2000, 100_000, 1000):
        tiered.compute(first)
        tiered.settle()
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert size <= 8 * MIB
    counts = tiered.tier.counts()
    assert counts.written > counts.stored > 4 * MIB // (2 * TENSORS * BLOCK_BYTES)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())


class Reported:
    """What readers of KV events know of a cache and its disk."""

    def __init__(self, tiered: Tiered) -> None:
        self._sockets = mock.Mock()
        events = CacheEvents(tiered.cache, ("full",), tiered.staging)
        self._publisher = EventPublisher(events, self._sockets, KVEventsConfig(), model="tiny")

    def blocks(self) -> dict[str, set[int]]:
        """Hashes by medium, after all events so far; a snapshot has the same."""
        _, *stored, end = wire.decode_snapshot(iter(self._publisher.snapshot().next_part, b""))
        batches = [wire.decode_batch(call.args[1]) for call in self._sockets.send.mock_calls]
        known = _held([event for batch in batches for event in batch.events])
        assert _held(stored) == known
        assert isinstance(end, wire.SnapshotEnd)
        assert end.num_blocks == sum(map(len, known.values()))
        return known


def _held(events: list[Any]) -> dict[str, set[int]]:
    held: dict[str, set[int]] = {"GPU": set(), "DISK": set()}
    for event in events:
        if isinstance(event, wire.AllBlocksCleared):
            held = {medium: set() for medium in held}
        elif isinstance(event, wire.BlockStored):
            held[event.medium] |= set(event.block_hashes)
        else:
            held[event.medium] -= set(event.block_hashes)
    return held


def short(*hashes: list[bytes]) -> set[int]:
    return {int.from_bytes(one[-8:], "big") for one in itertools.chain(*hashes)}


def test_kv_events_tell_what_the_disk_has(make):
    tiered = make()
    reported = Reported(tiered)
    first, second = tiered.compute(100), tiered.compute(1100)
    tiered.settle()
    assert reported.blocks() == {"GPU": short(second), "DISK": short(first)}
    tiered.compute(3000, salt="mine")
    last = tiered.compute(5000)
    tiered.settle()
    assert tiered.tier.counts().stored == 21
    on_disk = short(first, second)
    assert reported.blocks() == {"GPU": short(last), "DISK": on_disk}
    tiered.staging.remove_stored([block_key(first[0])])
    assert reported.blocks()["DISK"] == on_disk - short(first[:1])
    tiered.staging.clear_stored()  # As when the disk fails.
    assert reported.blocks() == {"GPU": short(last), "DISK": set()}
    tiered.staging.add_stored([block_key(one) for one in second], tiered.staging.era)
    assert reported.blocks()["DISK"] == short(second)
    tiered.cache.clear_cache_index()
    assert reported.blocks() == {"GPU": set(), "DISK": set()}


def test_a_reader_that_lost_all_hears_again_what_the_disk_has(make, monkeypatch):
    tiered = make()
    reported = Reported(tiered)
    first = evicted(tiered)
    reported.blocks()
    late = [("cleared", 0, None, [], [])]
    monkeypatch.setattr(CacheEvents, "take", lambda *_: [late.pop()] if late else [])
    none = mock.Mock(num_blocks=0, take=lambda _: [])
    monkeypatch.setattr(CacheEvents, "snapshot", lambda _: none)
    assert reported.blocks() == {"GPU": set(), "DISK": short(first)}


def test_blocks_of_an_earlier_process_are_reported_once_they_were_used(make):
    first = make()
    hashes = evicted(first)
    first.tier.close()
    second = make()
    reported = Reported(second)
    while second.tier.count(hashes) < 7:
        pass
    assert reported.blocks()["DISK"] == set()
    assert evicted(second) == hashes
    assert reported.blocks()["DISK"] == short(hashes)


def test_a_failing_disk_makes_the_tier_idle_until_it_is_back(make, folder, caplog):
    tiered = make()
    hashes = evicted(tiered)
    (folder / FILE_NAME).write_bytes(b"damaged" * 1000)
    assert tiered.load(hashes) == []
    assert tiered.tier.count(hashes) == 0
    assert caplog.text.count("is idle") == 1
    tiered.compute(5000)
    tiered.now += 100
    hashes = evicted(tiered, 7000)
    assert tiered.load(hashes) == [(7000 + i) % 251 for i in range(7)]


def test_a_killed_process_leaves_what_it_wrote(folder):
    code = f"""
import os, signal, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from pathlib import Path
from test_disk_tier import Tiered, evicted
tiered = Tiered(Path({str(folder)!r}))
evicted(tiered)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ))
    store = DiskStore(folder, 8 * MIB, SCOPE)
    assert len(list(store.keys())) >= 7
    store.close()
