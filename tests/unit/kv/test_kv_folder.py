"""The folder of `--kv-cache-dir`: who may use it, how large it becomes, and damaged files."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner

from fakes.fake_cache import make_cache
from prefixcache._core import KVFile, PrefixCache
from prefixcache.cli.main import app
from prefixcache.exceptions import OutOfMemoryError
from prefixcache.kv.kv_folder import FileLayout, KeptFile, KVFolder, open_kept_file
from prefixcache.kv.retention import Retention
from prefixcache.runner.cpu.file_memory import FileMemory
from prefixcache.scheduler.loading import Reads

_BLOCK_BYTES = 4096
_NUM_BLOCKS = 8


def layout(kind: str = "one", max_blocks: int = _NUM_BLOCKS) -> FileLayout:
    return FileLayout(
        facts={"kind": kind},
        num_tensors=2,
        block_bytes=_BLOCK_BYTES,
        max_blocks=max_blocks,
        block_tokens=16,
    )


def opened(folder: Path, wanted: FileLayout | None = None, most: int | None = None) -> KeptFile:
    file = open_kept_file(folder, wanted or layout(), _NUM_BLOCKS, most)
    assert file is not None
    return file


def cache_in(file: KeptFile, weights: str = "blake3:a") -> tuple[PrefixCache, tuple[int, int]]:
    cache = PrefixCache(_NUM_BLOCKS, 16, weights=weights, retention_budget=0.3, model="m")
    return cache, cache.keep_in(file.core)


def memories(file: KeptFile) -> list[FileMemory]:
    return [FileMemory(file, tensor, _NUM_BLOCKS * _BLOCK_BYTES) for tensor in range(2)]


def compute(
    cache: PrefixCache,
    file: KeptFile,
    tokens: np.ndarray,
    salt: str | None = None,
    priority: int | None = None,
    owner: str = "",
) -> list[int]:
    """Fills the blocks of a prompt with numbers of its tokens, and publishes them."""
    sequence = cache.new_sequence(tokens, cache_salt=salt)
    if priority is not None:
        sequence.set_hints(owner, [(0, None, priority, 3600.0)])
    assert cache.commit_prefix_plan(sequence, 0, len(tokens)) == 0
    for memory in memories(file):
        rows = memory.rows(_NUM_BLOCKS)
        for place, block in enumerate(sequence.block_table()):
            rows[block] = tokens[16 * place] % 251
    cache.mark_blocks_filled([sequence], [len(tokens)])
    blocks = sequence.block_table()
    cache.release([sequence])
    return blocks


def wait_until_kept(file: KeptFile, count: int) -> None:
    while file.core.counts()["kept"] < count:
        pass


def hits(cache: PrefixCache, tokens: np.ndarray) -> int:
    sequence = cache.new_sequence(tokens)
    asked = cache.count_prefix_hits(sequence)
    taken = cache.commit_prefix_plan(sequence, asked, 16)
    cache.release([sequence])
    return taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def prompt() -> np.ndarray:
    return np.arange(64, dtype=np.uint32)


def test_blocks_are_found_by_the_next_cache(folder, prompt):
    file = opened(folder)
    cache, found = cache_in(file)
    assert found == (0, 0)
    blocks = compute(cache, file, prompt)
    wait_until_kept(file, 4)
    del cache
    file.close()
    file = opened(folder)
    cache, found = cache_in(file)
    assert found == (4, 0)
    assert hits(cache, prompt) == 64
    assert file.core.counts() == {"kept": 0, "checked": 4, "failed": 0, "failed_syncs": 0}
    assert [memories(file)[0].rows(_NUM_BLOCKS)[block, 7] for block in blocks] == [0, 16, 32, 48]
    cache.validate()


def restarted_with_damage(folder, prompt, number: int) -> tuple[KeptFile, PrefixCache]:
    """A second life after one that kept the prompt's blocks, of which that number was damaged."""
    file = opened(folder)
    cache, _ = cache_in(file)
    blocks = compute(cache, file, prompt)
    wait_until_kept(file, 4)
    del cache
    memories(file)[1].rows(_NUM_BLOCKS)[blocks[number], 5] ^= 1
    file.close()
    file = opened(folder)
    return file, cache_in(file)[0]


def test_a_long_hit_is_read_before_its_commit(folder, prompt):
    """Blocks that are damaged end the wait too."""
    file, cache = restarted_with_damage(folder, prompt, 3)
    sequence = cache.new_sequence(prompt)
    assert not cache.reads_first(sequence, 64, 4)
    while cache.reads_first(sequence, 64, 0):
        while file.core.num_asked:
            pass
    assert file.core.counts()["checked"] == 3
    assert hits(cache, prompt) == 48
    assert file.core.counts()["failed"] == 1


def test_what_a_commit_may_read_itself_is_bounded(folder):
    """4 MiB, as docs/guides/disk.md says."""
    file = opened(folder)
    assert file.commit_blocks * 2 * _BLOCK_BYTES == 4 << 20
    cache = mock.Mock(file=file)
    cache.sequence.return_value = mock.sentinel.sequence
    assert Reads(cache, mock.Mock()).must_wait(mock.Mock(), 64)
    asked = cache.core.reads_first
    asked.assert_called_once_with(mock.sentinel.sequence, 64, file.commit_blocks)


def test_a_reset_that_the_disk_does_not_take_is_logged(folder, caplog):
    file = opened(folder)
    counts = file.core.counts() | {"failed_syncs": 1}
    file.core = mock.Mock(counts=lambda: counts)
    for _ in range(2):
        assert file.counts().failed_syncs == 1
    assert caplog.text.count("the disk did not take") == 1


def test_a_damaged_block_ends_the_hits_and_is_dropped(folder, prompt):
    file, cache = restarted_with_damage(folder, prompt, 2)
    assert hits(cache, prompt) == 32
    assert file.core.counts()["failed"] == 1
    assert cache.count_prefix_hits(cache.new_sequence(prompt)) == 32
    cache.validate()


def test_what_was_cleared_or_is_not_named_by_content_is_not_found(folder, prompt):
    file = opened(folder)
    cache, _ = cache_in(file)
    compute(cache, file, prompt)
    wait_until_kept(file, 4)
    cache.clear_cache_index()
    compute(cache, file, prompt[:32])
    wait_until_kept(file, 6)
    del cache
    file.close()
    file = opened(folder)
    cache, found = cache_in(file)
    assert found[0] == 2
    cache.new_weight_version("tag:mine")
    compute(cache, file, prompt)
    del cache
    file.close()
    file = opened(folder)
    cache, found = cache_in(file)
    assert found[0] == 0
    cache.new_weight_version("quantized:ab:blake3:cd")
    compute(cache, file, prompt)
    wait_until_kept(file, 4)
    del cache
    file.close()
    assert cache_in(opened(folder), "tag:other")[1][0] == 0
    assert cache_in(opened(folder, layout("other")))[1][0] == 0


def test_a_reader_of_events_is_given_what_was_restored(folder, prompt):
    """Parents first, with their tokens; no salted block, and none of a process without events."""
    file = opened(folder)
    cache, _ = cache_in(file)
    cache.keep_events()
    compute(cache, file, prompt)
    compute(cache, file, prompt[:32], salt="mine")
    stored = cache.take_events(100)
    assert [event[0] for event in stored] == ["stored"]
    wait_until_kept(file, 6)
    cache.resize(6)  # The salted blocks stood first in line.
    del cache
    file.close()
    for _ in range(2):
        file = opened(folder)
        cache, found = cache_in(file)
        assert found[0] >= 4
        cache.keep_events()
        assert cache.snapshot_events() is None
        assert cache.take_events(100) == stored
        snapshot = cache.snapshot_events()
        assert snapshot is not None
        assert snapshot.take(100) == stored
        del cache
        file.close()
    cache, _ = cache_in(opened(folder))
    cache.clear_cache_index()
    cache.keep_events()
    assert cache.take_events(100) == []


def test_what_was_computed_without_events_is_not_reported(folder, prompt):
    file = opened(folder)
    cache, _ = cache_in(file)
    compute(cache, file, prompt)
    wait_until_kept(file, 4)
    del cache
    file.close()
    cache, found = cache_in(opened(folder))
    assert found == (4, 0)
    cache.keep_events()
    assert cache.take_events(100) == []
    assert hits(cache, prompt) == 64


@pytest.mark.parametrize(
    ("retention", "pinned"),
    [
        (Retention(pin=True, pin_max_share=0.9), 4),
        (Retention(pin=True, pin_max_share=0.3), 2),
        (Retention(), 0),
    ],
)
def test_pins_of_an_earlier_life_follow_the_rules_of_this_one(folder, prompt, retention, pinned):
    file = opened(folder)
    cache, _ = cache_in(file)
    compute(cache, file, prompt)
    assert cache.pin(cache.new_sequence(prompt), 64) == 4
    wait_until_kept(file, 4)
    del cache
    file.close()
    windows = [("sliding_window", 64)]
    manager = make_cache(
        _NUM_BLOCKS, 16, weights="blake3:a", groups=windows, retention=retention, model="m"
    )
    manager.start_tiers(opened(folder))
    assert manager.core.stats()["pinned_blocks"] == pinned


def test_priorities_of_earlier_lives_keep_their_owners_and_their_ends(folder):
    """Two of seven blocks for each owner; each life raises as many."""
    prompts = [np.arange(32, dtype=np.uint32) + 100 * life for life in range(3)]
    for prompt, owner in zip(prompts, ["one", "other", "one"], strict=True):
        file = opened(folder)
        cache, _ = cache_in(file)
        compute(cache, file, prompt, priority=95, owner=owner)
        wait_until_kept(file, 2)
        del cache
        file.close()
    file = opened(folder)
    cache, found = cache_in(file)
    assert found == (6, 0)
    cache.set_time(0.0)
    assert cache.stats()["hinted_blocks"] == 4

    def fill(first: int) -> list[int]:
        for number in range(first, first + 7):
            compute(cache, file, np.arange(16, dtype=np.uint32) + 1000 * number)
        return [hits(cache, prompt) for prompt in prompts]

    assert fill(1) == [0, 32, 32]
    cache.set_time(3601.0)
    assert cache.demote_expired() == 4
    assert fill(8) == [0, 0, 0]


def test_keeping_is_once_and_before_the_first_use(folder, prompt):
    file = opened(folder)
    cache, _ = cache_in(file)
    with pytest.raises(RuntimeError):
        cache.keep_in(file.core)
    used = PrefixCache(_NUM_BLOCKS, 16, model="m")
    used.commit_prefix_plan(used.new_sequence(prompt), 0, 16)
    with pytest.raises(RuntimeError):
        used.keep_in(file.core)
    shared = PrefixCache(_NUM_BLOCKS, 16, threads="shared", model="m")
    with pytest.raises(ValueError, match="single_writer"):
        shared.keep_in(file.core)


def test_folders_that_are_made_above_may_be_used_too(tmp_path):
    opened(tmp_path / "outer" / "kept")
    opened(tmp_path / "outer")


def test_a_file_in_use_is_left_to_its_process(folder):
    one, other = opened(folder), opened(folder)
    assert one.path != other.path
    one.close()
    again = opened(folder)
    assert again.path == one.path


def test_the_oldest_files_go_first(folder):
    for age, kind in enumerate(["oldest", "older", "old"]):
        file = opened(folder, layout(kind), 1 << 40)
        file.close()
        os.utime(file.path, (1000 + age, 1000 + age))
    names = {info.name for info in KVFolder(folder).files()}
    assert len(names) == 3
    room = sum(info.num_bytes for info in KVFolder(folder).files()) + (1 << 16)
    file = opened(folder, layout("new"), room)
    left = [info.name for info in KVFolder(folder).files()]
    assert len(left) == 3
    assert len(names & {*left}) == 2
    assert sum(info.num_bytes for info in KVFolder(folder).files()) <= room
    file.close()
    opened(folder, layout("new"))
    assert len(KVFolder(folder).files()) == 2


def test_files_of_others_that_leave_no_room_mean_no_file(folder, caplog):
    one = opened(folder, layout("one"))
    size = one.path.stat().st_blocks * 512
    assert open_kept_file(folder, layout("other"), _NUM_BLOCKS, size + 100) is None
    assert "take the room" in caplog.text


def spoil(folder: Path) -> dict[str, Callable[[], object]]:
    target = folder.parent / "elsewhere"

    def link() -> None:
        target.mkdir(mode=0o700)
        folder.symlink_to(target)

    def a_file() -> None:
        folder.write_text("")

    def open_to_others() -> None:
        folder.mkdir(mode=0o755)

    def linked_file() -> None:
        opened(folder).close()
        (own,) = folder.iterdir()
        own.unlink()
        target.write_text("precious")
        own.symlink_to(target)

    def a_pipe() -> None:
        opened(folder).close()
        (own,) = folder.iterdir()
        own.unlink()
        os.mkfifo(own, 0o600)

    def readable_file() -> None:
        opened(folder).close()
        (own,) = folder.iterdir()
        own.chmod(0o644)

    return {
        function.__name__: function
        for function in (link, a_file, open_to_others, linked_file, a_pipe, readable_file)
    }


@pytest.mark.parametrize("what", spoil(Path()))
def test_what_is_not_the_users_own_is_not_used(what, folder, caplog):
    spoil(folder)[what]()
    assert open_kept_file(folder, layout(), _NUM_BLOCKS, None) is None
    assert "kept in memory alone" in caplog.text


def test_a_file_of_another_user_is_not_used(folder, caplog, monkeypatch):
    opened(folder).close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert open_kept_file(folder, layout(), _NUM_BLOCKS, None) is None
    assert "belongs to another user" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "random", "version", "larger"])
def test_a_damaged_file_starts_empty(damage, folder, prompt, caplog):
    file = opened(folder)
    cache, _ = cache_in(file)
    compute(cache, file, prompt)
    wait_until_kept(file, 4)
    del cache
    file.close()
    wanted = layout()
    if damage == "cut":
        os.truncate(file.path, file.path.stat().st_size // 2)
    elif damage == "larger":
        wanted = layout(max_blocks=1000)
    else:
        with file.path.open("r+b") as data:
            data.seek(0 if damage == "random" else 8)
            data.write(os.urandom(4096) if damage == "random" else bytes([9]))
    file = opened(folder, wanted)
    assert "starts empty" in caplog.text
    assert cache_in(file)[1] == (0, 0)


def test_a_full_disk_means_no_file_and_no_crash(folder, caplog):
    """A limit on the size of files stands for the disk's end."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        assert open_kept_file(folder, layout(), _NUM_BLOCKS, None) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "kept in memory alone" in caplog.text
    assert cache_in(opened(folder))[1] == (0, 0)


def test_a_pool_larger_than_the_room_on_the_disk_takes_none_of_it(folder, monkeypatch, caplog):
    """ext4 keeps what it has allocated before it fails, so nothing may be asked of it."""
    monkeypatch.setattr(os, "fstatvfs", lambda _: _SmallDisk)
    assert open_kept_file(folder, layout(), _NUM_BLOCKS, None) is None
    assert "bytes more, and the disk has 8192" in caplog.text
    (path,) = folder.iterdir()
    assert path.stat().st_blocks * 512 < _NUM_BLOCKS * _BLOCK_BYTES


def test_a_pool_that_has_its_room_needs_no_more(folder, monkeypatch):
    opened(folder).close()
    monkeypatch.setattr(os, "fstatvfs", lambda _: _SmallDisk)
    memory = memories(opened(folder))[0]
    memory.provide(_NUM_BLOCKS * _BLOCK_BYTES)


class _SmallDisk:
    f_blocks, f_frsize, f_bavail = 1000, 4096, 2


class _FullDisk:
    """A file whose disk has no space left."""

    def __init__(self, core: KVFile) -> None:
        self.tensor_at = core.tensor_at

    def allocate(self, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_growing_on_a_full_disk_is_refused(folder):
    file = opened(folder)
    memory = memories(file)[0]
    memory.provide(_NUM_BLOCKS * _BLOCK_BYTES)
    file.core = _FullDisk(file.core)
    with pytest.raises(OutOfMemoryError, match="No space left"):
        memory.provide(_NUM_BLOCKS * _BLOCK_BYTES)


def test_memory_that_is_given_back_leaves_the_disk(folder):
    file = opened(folder)
    memory = memories(file)[0]
    memory.rows(_NUM_BLOCKS)[:] = 7
    before = os.fstat(file.descriptor).st_blocks
    assert memory.give_back(_BLOCK_BYTES, 5 * _BLOCK_BYTES) == 4 * _BLOCK_BYTES
    assert os.fstat(file.descriptor).st_blocks == before - 4 * _BLOCK_BYTES // 512
    memory.provide(_NUM_BLOCKS * _BLOCK_BYTES)
    assert memory.rows(_NUM_BLOCKS)[:, 0].tolist() == [7, 0, 0, 0, 0, 7, 7, 7]
    file.can_give_back = False
    assert memory.give_back(0, _BLOCK_BYTES) == 0


def test_the_command_shows_checks_and_removes(folder, prompt):
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["cache", *arguments])
        return result.exit_code, result.output

    file = opened(folder)
    cache, _ = cache_in(file)
    blocks = compute(cache, file, prompt)
    wait_until_kept(file, 4)
    code, text = run("ls", str(folder))
    assert (code, "in use by a server" in text) == (0, True)
    del cache
    file.close()
    assert "4 blocks; kind one" in run("ls", str(folder))[1]
    code, text = run("verify", str(folder))
    assert (code, "4 blocks, 0 of them damaged" in text) == (0, True)
    with file.path.open("r+b") as data:
        data.seek(file.core.tensor_at(0) + blocks[0] * _BLOCK_BYTES)
        data.write(b"x")
    code, text = run("verify", str(folder))
    assert (code, "1 of them damaged" in text) == (1, True)
    assert run("rm", str(folder), "no.kv")[0] == 1
    assert "removed" in run("rm", str(folder))[1]
    assert list(folder.iterdir()) == []
    assert run("ls", str(folder / "none"))[0] == 2


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_wrong(folder):
    script = Path(__file__).parents[2] / "killed_cache.py"
    command = [sys.executable, str(script), str(folder), "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert int(done.stdout.split()[-1]) > 100
