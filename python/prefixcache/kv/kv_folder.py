"""The folder of `--kv-cache-dir`: one file for each layout of KV, which outlives its process.

Whoever can write to the folder could put KV into answers, and whoever can read it sees what was
asked.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from prefixcache._core import (
    BlockStaging,
    KVFile,
    derive_digest,
    describe_kv_file,
    hash_file_ranges,
)
from prefixcache.config.private_folder import STAT_BLOCK, FileState, NotUsableError, PrivateFolder
from prefixcache.core import PrefixCache
from prefixcache.metrics import FileCounts

logger = logging.getLogger(__name__)

_SUFFIX = ".kv"
_MOST_SERVERS = 16
_DISK_PAGE = 4096
_COMMIT_BYTES = 4 << 20
"""What a request's start may read of blocks that nobody has read yet: a millisecond or two."""
_EXTENT_BYTES = 1 << 16
"""What a file system may count for its own records of where a file lies."""


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _DISK_PAGE) * _DISK_PAGE


def _digest(facts: Mapping[str, object]) -> bytes:
    return derive_digest("prefixcache kv file v1", json.dumps(dict(facts), sort_keys=True).encode())


def kv_file_name(facts: Mapping[str, object], number: int = 0) -> str:
    """The file of KV of these facts; where a server has it, another takes the next number."""
    return f"{_digest(facts).hex()[:16]}-{number}{_SUFFIX}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """The KV that one file holds: `facts` are all that its bytes depend on besides the hashes.

    The pool may have `max_blocks`, of which each takes `block_bytes` of every tensor. With KV
    events the file keeps the `block_tokens` tokens of each too.
    """

    facts: Mapping[str, object]
    num_tensors: int
    block_bytes: int
    max_blocks: int
    block_tokens: int = 0

    @property
    def digest(self) -> bytes:
        """Stands for the facts, 32 bytes."""
        return _digest(self.facts)

    @property
    def about(self) -> str:
        """The facts for people."""
        return ", ".join(f"{name} {value}" for name, value in self.facts.items())

    @property
    def capacity(self) -> int:
        """Blocks that a new file has room for: enough for a pool that has another size tomorrow."""
        return min(1 << 24, 1 << (2 * self.max_blocks - 1).bit_length())

    @property
    def num_bytes(self) -> int:
        """The most bytes that the pool takes on the disk."""
        table = 4096 + self.capacity * (64 + 40 + 24 + 4 * self.block_tokens)
        tensor = _whole_pages(self.max_blocks * self.block_bytes)
        return _whole_pages(table) + tensor * self.num_tensors + _EXTENT_BYTES


@cache
def program_digest() -> str:
    """Stands for the kernels: others may round in another way. From the file that they are in."""
    spec = find_spec("prefixcache._core")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin)
    (digest,) = hash_file_ranges(path, [(0, path.stat().st_size)], 1)
    return digest.hex()[:16]


class KeptFile:
    """A locked file with KV tensors and their records; see `KVFile`.

    Tensors are numbered from 0. Once it is prepared, `maps` has the bytes of each that the pool may
    have, mapped shared. `num_restored` and `num_dropped` are the blocks of the file that this
    process found at its start, and those that it could not use. A request's start compares at most
    `commit_blocks` of them with their checksums itself.
    """

    def __init__(self, descriptor: int, path: Path, layout: FileLayout) -> None:
        self.path = path
        self.descriptor = descriptor
        self._num_tensors = layout.num_tensors
        self.commit_blocks = _COMMIT_BYTES // (layout.num_tensors * layout.block_bytes)
        self._num_failed_syncs = 0
        is_new = os.fstat(descriptor).st_size == 0
        self.core = KVFile(
            descriptor,
            layout.digest,
            layout.num_tensors,
            layout.block_bytes,
            layout.capacity if is_new else layout.max_blocks,
            layout.about[:2000],
            layout.block_tokens,
        )
        self.maps: list[mmap.mmap] = []
        self.num_restored = self.num_dropped = 0
        self.can_give_back = True

    def restore(self, cache: PrefixCache, staging: BlockStaging | None) -> None:
        """Gives the cache what the file has kept, and keeps there what is published."""
        self.num_restored, self.num_dropped = cache.keep_in(self.core, staging)

    def prepare(self, layout: FileLayout, num_blocks: int) -> None:
        """Gives the blocks space on the disk, takes that of others, and maps all.

        Raises `OSError` and `ValueError`.
        """
        used, most = num_blocks * layout.block_bytes, self.core.capacity * layout.block_bytes
        begin, mapped = _whole_pages(used), layout.max_blocks * layout.block_bytes
        for tensor in range(layout.num_tensors):
            start = self.core.tensor_at(tensor)
            try:
                self.core.punch(start + begin, max(0, most - begin))
            except OSError:
                self.can_give_back = False
            self.allocate(tensor, used)
            self.maps.append(mmap.mmap(self.descriptor, mapped, offset=start))

    def allocate(self, tensor: int, num_bytes: int) -> None:
        """Gives the first bytes of a tensor space on the disk.

        Raises `OSError`, where the disk has no room for as much of every tensor before anything is
        taken: a file system that allocates half of it would leave the disk full.
        """
        lacks = num_bytes * self._num_tensors - os.fstat(self.descriptor).st_blocks * STAT_BLOCK
        disk = os.fstatvfs(self.descriptor)
        free = disk.f_bavail * disk.f_frsize
        if lacks > free and disk.f_blocks:  # Not all file systems say what they have.
            raise OSError(f"it needs {lacks} bytes more, and the disk has {free}")
        self.core.allocate(self.core.tensor_at(tensor), num_bytes)

    def give_back(self, start: int, num_bytes: int) -> bool:
        """Gives bytes back to the disk; false, and never again, where the file system does not."""
        try:
            if self.can_give_back:
                self.core.punch(start, num_bytes)
        except OSError as error:
            logger.warning("%s stays as large as it is: %s.", self.path, error)
            self.can_give_back = False
        return self.can_give_back

    def counts(self) -> FileCounts:
        """What became of its blocks. From any thread."""
        counts = self.core.counts()
        self._log_failed_syncs(counts["failed_syncs"])
        return FileCounts(
            restored=self.num_restored,
            dropped=self.num_dropped,
            kept=counts["kept"],
            checked=counts["checked"],
            failed=counts["failed"],
            failed_syncs=counts["failed_syncs"],
        )

    def _log_failed_syncs(self, count: int) -> None:
        if count > self._num_failed_syncs:
            self._num_failed_syncs = count
            logger.warning(
                "%s: the disk did not take that its blocks were forgotten. After a power loss they "
                "could be found again.",
                self.path,
            )

    def close(self) -> None:
        """Lets another process have the file. Nothing may use its memory any more."""
        self._log_failed_syncs(self.core.counts()["failed_syncs"])
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # `core` has a descriptor of its own
        os.close(self.descriptor)


class KVFolder(PrivateFolder):
    """An open folder of such files. A file is locked while a process has it."""

    suffixes = (_SUFFIX,)

    def open(self, layout: FileLayout, num_blocks: int, most_bytes: int | None) -> KeptFile:
        """The file of this layout, with space for a pool of `num_blocks` blocks.

        With all others it takes at most `most_bytes`; otherwise one other file may stay.
        """
        name, descriptor = self._lock_own(layout)
        try:
            self._make_room(name, layout.num_bytes, most_bytes)
            file = self._read(name, descriptor, layout)
            file.prepare(layout, num_blocks)
            os.utime(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return file

    def describe(self, name: str, *, reads: bool) -> FileState:
        """See `PrivateFolder`: its blocks, and what they are of."""
        descriptor = self.lock(name)
        if descriptor is None:
            return FileState("in use by a server")
        try:
            header = describe_kv_file(descriptor)
            valid, damaged = KVFile(descriptor, **header).survey(reads=reads)
        finally:
            os.close(descriptor)
        checked = f", {damaged} of them damaged" if reads else ""
        return FileState(f"{valid} blocks{checked}; {header['about']}", is_damaged=damaged > 0)

    def _lock_own(self, layout: FileLayout) -> tuple[str, int]:
        for number in range(_MOST_SERVERS):
            name = kv_file_name(layout.facts, number)
            descriptor = self.lock(name, create=True)
            if descriptor is not None:
                return name, descriptor
        raise NotUsableError(f"{_MOST_SERVERS} other servers use it already")

    def _read(self, name: str, descriptor: int, layout: FileLayout) -> KeptFile:
        """The file, begun again where what is in it cannot be used."""
        path = self.path / name
        try:
            return KeptFile(descriptor, path, layout)
        except ValueError as error:
            logger.warning("%s starts empty: %s.", path, error)
        os.ftruncate(descriptor, 0)
        return KeptFile(descriptor, path, layout)

    def _make_room(self, own: str, num_bytes: int, most_bytes: int | None) -> None:
        """Removes files of other layouts, those that were begun longest ago first."""
        others = [info for info in self.files() if info.name != own]
        if most_bytes is None:
            room = self.make_room(others, sum(info.num_bytes for info in others), most_files=1)
        else:
            room = self.make_room(others, most_bytes - num_bytes)
        if room < 0:
            raise NotUsableError("other servers' files take the room of --kv-cache-dir-size")


def open_kept_file(
    folder: Path, layout: FileLayout, num_blocks: int, most_bytes: int | None
) -> KeptFile | None:
    """The file for the pool; None, with a line in the log, where there can be none."""
    try:
        opened = KVFolder(folder)
        try:
            return opened.open(layout, num_blocks, most_bytes)
        finally:
            opened.close()
    except (NotUsableError, OSError, ValueError) as error:
        logger.warning("The KV cache is kept in memory alone, not in %s: %s.", folder, error)
        return None
