"""Values by key on a disk, for KV caches of any engine.

What comes back is what was put, or it is a miss; never more bytes than the bound, never later than
the deadline.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from prefixcache_store import _store
from prefixcache_store._store import StoreInUseError

__all__ = ["Store", "StoreInUseError"]


class Store:
    """Values by key in files of `folder`, of at most `max_bytes` on the disk. Any thread.

    Keys are bytes of any length; the store knows nothing of weights, so whoever calls puts a
    digest of all that values depend on in front. Buffers are whatever `numpy.frombuffer` takes:
    contiguous memory of any shape, such as a memoryview, a bytearray or an array. Values of whole
    pages (4096 bytes) that begin with a page go past the system's cache.

    A full, failing or late disk raises nothing: values are not kept, or missed. `threads` of them
    read and as many write. The folder is made with mode 0700. What an earlier process left is
    found; the values used longest ago are removed where the bound is smaller now.

    Raises `StoreInUseError` if another process or store has the folder, `OSError` if it cannot be
    used, and `ValueError` of every call once it is closed.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, *, threads: int = 2) -> None:
        self._store = _store.Store(folder, max_bytes, threads)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which values are there, from memory. A later `get_into` may miss them all the same."""
        return self._store.contains(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Counts values as used now, from memory, until the folder is opened again."""
        self._store.touch(keys)

    def put(
        self, keys: Sequence[bytes], buffers: Sequence[Any], timeout: float | None = None
    ) -> list[bool]:
        """Keeps the bytes of buffers; which are kept when it returns.

        What is there already is not written again. The buffers do not change until it returns,
        which is after `timeout` seconds at the latest: what is not written by then is not kept.
        Raises `ValueError` for an empty key or buffer, or other numbers of them.
        """
        arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        return self._store.put(keys, _places(arrays), arrays, timeout)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[Any], timeout: float | None = None
    ) -> list[bool]:
        """Reads values into buffers; which of these hold their value now, its checksum compared.

        The others hold anything: their values are not there, have another length, are damaged
        (these are removed) or late. Without a `timeout` it reads straight into the buffers and
        takes as long as the disk. With one, in seconds, it returns by then, and nothing writes to
        the buffers later: values go through memory of the store first, since a system that reads
        cannot be stopped. Raises `ValueError` for an empty key or buffer, other numbers of them,
        and buffers that are read-only or overlap.
        """
        arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        if not all(array.flags.writeable for array in arrays):
            raise ValueError("a buffer is read-only")
        return self._store.get_into(keys, _places(arrays), arrays, timeout)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forgets values. Raises `OSError` where a file cannot be removed."""
        self._store.remove(keys)

    def clear(self) -> None:
        """Forgets all values. Raises `OSError` where a file cannot be removed."""
        self._store.clear()

    @property
    def bound(self) -> int:
        """The most bytes on the disk."""
        return self._store.bound

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk, of values that are being written too: each file in whole pages, and
        a page for its name.
        """
        return self._store.num_bytes

    def __len__(self) -> int:
        return len(self._store)

    def counts(self) -> dict[str, int]:
        """Lifetime counts of values.

        hits, misses, late (after a `timeout`), damaged, failed (the disk or the bound refused
        them), written, evicted.
        """
        return self._store.counts()

    def close(self) -> None:
        """Gives the folder back, once calls of other threads and late ones have ended."""
        self._store.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _places(arrays: Sequence[np.ndarray[Any, Any]]) -> list[tuple[int, int]]:
    return [(array.__array_interface__["data"][0], array.nbytes) for array in arrays]
