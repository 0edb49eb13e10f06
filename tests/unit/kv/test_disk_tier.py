"""Blocks that memory has no room for, on a disk: what goes there, what comes back, and failures."""

from __future__ import annotations

import itertools
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from disk_lives import BLOCK_BYTES, MIB, SCOPE, TENSORS, Tiered, keys_of
from prefixcache.events import wire
from prefixcache.events.config import KVEventsConfig
from prefixcache.events.publisher import EventPublisher
from prefixcache.kv.events import CacheEvents
from prefixcache.kv.tiers import disk_tier
from prefixcache.kv.tiers.disk_store import FILE_NAME, DiskStore
from support.repeatable import bounded


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


VALUE_BYTES = TENSORS * BLOCK_BYTES + 8


def evicted(tiered: Tiered, first: int = 100) -> list[bytes]:
    """The hashes of a prompt that was computed and then evicted."""
    hashes = tiered.compute(first)
    tiered.compute(first + 1000)
    tiered.settle()
    return hashes


def test_evicted_blocks_come_back_as_they_were(make):
    tiered = make()
    hashes = evicted(tiered)
    assert tiered.count(hashes) == 7
    assert tiered.load(hashes) == [100 + i for i in range(7)]


def test_the_next_process_finds_them(make):
    first = make()
    hashes = evicted(first)
    first.tier.close()
    second = make()
    second.until(lambda: second.count(hashes) == 7)
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
    assert first.count(hashes) == 0
    first.tier.forget()
    again = evicted(first, 300)
    assert first.count(again) == 7
    first.tier.close()
    second = make()
    second.until(lambda: second.count(again) == 7)
    assert second.count(hashes) == 0


def test_a_clear_does_not_wait_for_a_disk_that_hangs(make, monkeypatch):
    first, go = make(), threading.Event()
    hashes, get = evicted(first), DiskStore.get
    monkeypatch.setattr(DiskStore, "get", lambda *given: go.wait(600) and get(*given))
    load = first.tier.load([1], keys_of(hashes[:1]))
    first.cache.clear_cache_index()
    assert first.count(hashes) == 0
    first.tier.forget()
    second = make()
    second.until(lambda: second.tier._is_listed)
    assert second.count(hashes) == 0
    assert not load.is_done
    go.set()
    again = evicted(first, 300)
    assert first.load(again) == [(300 + i) % 251 for i in range(7)]


def test_a_clear_waits_a_bounded_time_and_says_so(make, monkeypatch, caplog):
    tiered, go = make(), threading.Event()
    void, clear = tiered.tier._clearing._void_store, DiskStore.clear
    hashes = evicted(tiered)
    monkeypatch.setattr(disk_tier, "_FORGET_SECONDS", 0.01)
    monkeypatch.setattr(tiered.tier._clearing, "_void_store", lambda: go.wait(600) and void())
    monkeypatch.setattr(DiskStore, "clear", lambda store: go.wait(600) and clear(store))
    tiered.cache.clear_cache_index()
    tiered.tier.forget()
    assert "may find what was cleared" in caplog.text
    assert tiered.count(hashes) == 0
    go.set()
    tiered.until(tiered.tier._clearing._is_void)
    second = make()
    second.until(lambda: second.tier._is_listed)
    assert second.count(hashes) == 0


def test_blocks_go_there_from_their_second_use_on(make):
    tiered = make(min_uses=2)
    hashes = evicted(tiered)
    assert tiered.staged == 0
    assert tiered.staging.counts()["skipped"] == 7
    assert evicted(tiered) == hashes  # computed twice
    assert tiered.count(hashes) == 7


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
    queued = counts["staged"] - counts["dropped"]
    assert queued == MIB // VALUE_BYTES
    assert counts["dropped"] > 0


def test_blocks_are_written_ahead_once_more_are_there_than_the_queue_holds_or_are_free(folder):
    tiered = Tiered(folder, queue_bytes=2 * VALUE_BYTES, starts=False)
    tiered.compute(100, num_blocks=4)
    assert not tiered.staging.has_staged
    tiered.cache.resize(6)
    assert tiered.staging.has_staged
    assert len(tiered.staging.take(9, 0)) == 4
    assert not tiered.staging.has_staged


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_evicted_is_on_the_disk_or_was_dropped(folder, seed, is_slow, kept):
    """The queue holds two blocks, and the disk works between the calls: whenever it can, or not."""
    choose = random.Random(seed)
    file = folder.with_name("kept") if kept else None
    tiered = Tiered(folder, queue_bytes=2 * VALUE_BYTES, starts=False, kept=file)
    numbers = dict[bytes, int]()

    def compute(first: int, num_blocks: int) -> None:
        hashes = tiered.compute(first, num_blocks)
        numbers.update((key, (first + place) % 251) for place, key in enumerate(hashes))

    def work() -> None:
        while tiered.tier._has_work() and not (is_slow and choose.random() < 0.4):
            tiered.tier._work()

    for number in range(bounded(200, 5000)):
        if choose.random() < 0.02 or len(numbers) > 300:  # The disk has room for 400.
            tiered.cache.clear_cache_index()
            numbers.clear()
        # Prompts that come again leave blocks free, and then more is put off than the queue holds.
        prompt = choose.randrange(40) if is_slow else number
        compute(1000 * prompt, choose.randint(1, 7) if numbers else 7)
        work()
    tiered.compute(9_000_000)
    tiered.tier.start()
    tiered.tier.nudge()
    tiered.until(lambda: not tiered.tier._has_work())
    on_disk = [key for key in numbers if tiered.count([key])]
    dropped = tiered.tier.counts().dropped
    assert (dropped > 0) == is_slow
    assert len(numbers) - len(on_disk) <= dropped
    for first in range(0, len(on_disk), 7):
        some = on_disk[first : first + 7]
        assert tiered.load(some) == [numbers[key] for key in some]
    tiered.tier.close()


def test_a_load_ends_at_a_damaged_block_and_all_damaged_ones_of_it_are_removed(make, folder):
    """Block 3 and 5 are damaged, 4 is missing, and each is read in a run of its own."""
    tiered = make()
    tiered.tier._run_blocks = 2
    hashes = evicted(tiered)
    keys = keys_of(hashes[3:6])
    with sqlite3.connect(folder / FILE_NAME) as db:
        of_key = "id = (SELECT id FROM blocks WHERE substr(key, 25) = ?)"
        for key in keys[::2]:
            wrong = "CAST(substr(value, 1, 500) || x'77' || substr(value, 502) AS BLOB)"
            db.execute(f"UPDATE data SET value = {wrong} WHERE {of_key}", [key])
        db.execute(f"DELETE FROM blocks WHERE {of_key}", keys[1:2])
    db.close()
    assert tiered.load(hashes) == [100, 101, 102]
    assert [tiered.count([block_hash]) for block_hash in hashes] == [1, 1, 1, 0, 0, 0, 1]
    assert tiered.tier.counts().damaged == 2
    assert evicted(tiered) == hashes
    assert tiered.load(hashes) == [100 + i for i in range(7)]


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


def test_a_smaller_size_at_the_next_start_holds_from_then_on(make, folder):
    first = make()
    for prompt in range(2000, 60_000, 1000):
        first.compute(prompt)
        first.settle()
    first.tier.close()
    DiskStore(folder, 4 * MIB, SCOPE).close()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4 * MIB
    second = make()
    second.until(lambda: second.tier._is_listed)
    assert second.tier.counts().stored > 100
    second.check(58_000)


@pytest.mark.parametrize("size", [100, 8200, 16_400])
def test_blocks_of_any_size_find_room(folder, size):
    store = DiskStore(folder, 8 * MIB, SCOPE)
    for run in range(6):
        keys = [f"{run:3} {place:5}".encode() for place in range(min(128, 4 * MIB // size))]
        store.put([(key, bytes(size)) for key in keys])
        assert store.get(keys) == [bytes(size)] * len(keys)
    store.close()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8 * MIB


def test_a_disk_with_less_room_than_the_bound_is_used_as_far_as_it_goes(make, folder, monkeypatch):
    space = mock.Mock(f_bavail=768, f_frsize=4096)
    monkeypatch.setattr("os.statvfs", lambda _: space)
    tiered = make()
    for prompt in range(2000, 60_000, 1000):
        tiered.compute(prompt)
        tiered.settle()
    counts = tiered.tier.counts()
    assert counts.written > counts.stored > 50
    assert counts.failures == 0
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 768 * 4096


def test_two_processes_may_share_the_folder(folder):
    command = [sys.executable, Path(__file__).parents[2] / "disk_lives.py", folder, "share"]
    both = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE) for number in (1, 2)]
    assert [int(one.communicate()[0]) > 200 for one in both] == [True, True]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8 * MIB


def test_the_end_does_not_wait_for_a_disk_that_hangs(make, monkeypatch, caplog):
    caplog.set_level("INFO")
    tiered, go, put = make(), threading.Event(), DiskStore.put
    monkeypatch.setattr(DiskStore, "put", lambda *given: go.wait(600) and put(*given))
    monkeypatch.setattr(disk_tier, "_QUIET_SECONDS", 0)
    monkeypatch.setattr(disk_tier, "_CLOSE_SECONDS", 0)
    hashes = tiered.compute(100)
    tiered.compute(1100)
    tiered.tier.nudge()
    tiered.tier.close(waits=False)
    assert caplog.text == ""
    tiered.tier.close()
    assert "Ctrl-C ends that at once" in caplog.text
    assert "some blocks are lost" in caplog.text
    go.set()
    monkeypatch.undo()
    tiered.tier.close()
    second = make()
    second.until(lambda: second.count(hashes) == 7)


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
    tiered.staging.remove_stored(keys_of(first[:1]))
    assert reported.blocks()["DISK"] == on_disk - short(first[:1])
    tiered.staging.clear_stored()  # As when the disk fails.
    assert reported.blocks() == {"GPU": short(last), "DISK": set()}
    tiered.staging.add_stored(keys_of(second), tiered.staging.era)
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
    second.until(lambda: second.count(hashes) == 7)
    assert reported.blocks()["DISK"] == set()
    assert evicted(second) == hashes
    assert reported.blocks()["DISK"] == short(hashes)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_another_process_kept_goes_to_the_disk_unless_it_is_damaged(make, folder, is_damaged):
    """Nobody hits it, so that whoever evicts it may be the first to read it."""
    kept = folder.with_name("kept")
    first = make(kept=kept)
    Reported(first)
    hashes = first.compute(100)
    while first.file.core.counts()["kept"] < 7:
        pass
    first.tier.close()
    if is_damaged:
        first.kv[1, :, 5] ^= 1
    first.file.close()
    second = make(kept=kept)
    assert second.num_restored == 7
    reported = Reported(second)
    second.compute(1100)
    second.tier.nudge()
    counts = second.tier.counts
    second.until(lambda: counts().written + counts().damaged == second.staged == 7)
    assert [second.count([one]) for one in hashes] == [not is_damaged] * 7
    assert reported.blocks()["DISK"] == (set() if is_damaged else short(hashes))
    if not is_damaged:
        assert second.load(hashes) == [100 + i for i in range(7)]


def test_a_failing_disk_makes_the_tier_idle_until_it_is_back(make, folder, caplog):
    tiered = make()
    hashes = evicted(tiered)
    (folder / FILE_NAME).write_bytes(b"damaged" * 1000)
    assert tiered.load(hashes) == []
    assert tiered.count(hashes) == 0
    assert caplog.text.count("is idle") == 1
    tiered.compute(5000)
    tiered.now += 100
    hashes = evicted(tiered, 7000)
    tiered.until(lambda: tiered.count(hashes) == 7)
    assert tiered.load(hashes) == [(7000 + i) % 251 for i in range(7)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("how", ["fail", "kill"])
def test_no_call_that_fails_or_is_the_last_one_leaves_anything_wrong(folder, how):
    command = [sys.executable, Path(__file__).parents[2] / "disk_lives.py", folder, how]
    done = subprocess.run(
        [*command, str(bounded(17, 1))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 200


def test_an_error_that_nobody_foresaw_ends_the_loads_and_not_the_tier(make, monkeypatch, caplog):
    tiered = make()
    hashes = evicted(tiered)
    with monkeypatch.context() as failing:
        failing.setattr(DiskStore, "get", mock.Mock(side_effect=TypeError("secret")))
        failing.setattr(DiskStore, "close", mock.Mock(side_effect=TypeError("secret")))
        assert tiered.load(hashes) == []
        tiered.until(lambda: tiered.tier.counts().failures)
    assert [r.getMessage() for r in caplog.records if "secret" in r.getMessage()] == []
    tiered.now += 100
    tiered.tier._wake()
    tiered.until(lambda: tiered.count(hashes) == 7)
    assert tiered.load(hashes) == [100 + i for i in range(7)]


def test_a_damaged_file_that_was_replaced_meanwhile_is_not_removed_again(folder):
    first = DiskStore(folder, 8 * MIB, SCOPE)
    first._db.execute("DROP TABLE data")
    (folder / FILE_NAME).rename(folder / "before")  # As removed, and its inode is not used again.
    second = DiskStore(folder, 8 * MIB, SCOPE)
    second.put([(b"key", b"value")])
    with pytest.raises(OSError, match="is damaged"):
        first.get([b"key"])
    first.close()
    assert second.get([b"key"]) == [b"value"]
    second.close()
    assert list(DiskStore(folder, 8 * MIB, SCOPE).keys()) == [b"key"]
