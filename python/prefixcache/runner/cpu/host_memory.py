"""The memory below the KV tensors of a CPU: reserved, and given by the system page by page."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixcache.runner.reserved_memory import round_up

# Python's mmap names this one from 3.13 on.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_CHUNK = 1 << 30
_LEAST_GRANULES = 32


class HostMemory:
    """A private anonymous mapping: the system gives out a page when it is first written.

    Of a shared one the system keeps the content, and so the memory, when pages are given back.
    `address` is that of the first of the reserved bytes.
    """

    def __init__(self, num_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._pages = mmap.mmap(-1, round_up(num_bytes, page_bytes) + page_bytes, flags=flags)
        start = np.frombuffer(self._pages, np.uint8).ctypes.data
        self._offset = -start % page_bytes
        self.address, self._num_bytes = start + self._offset, num_bytes
        if page_bytes > mmap.PAGESIZE:
            self._pages.madvise(mmap.MADV_HUGEPAGE)

    def rows(self, count: int) -> npt.NDArray[np.uint8]:
        """The reserved bytes in `count` equal rows, good while this object lives."""
        numbers = np.frombuffer(self._pages, np.uint8, self._num_bytes, self._offset)
        return numbers.reshape(count, -1)

    def provide(self, end: int) -> None:
        """Nothing to do: pages come as they are written."""

    def give_back(self, begin: int, end: int) -> int:
        """See `ReservedMemory`. The last granule may go on behind the last page."""
        end = min(end, round_up(self._num_bytes, self.page_bytes))
        mapped = num_resident_bytes(self.address + begin, end - begin)
        self._pages.madvise(mmap.MADV_DONTNEED, self._offset + begin, end - begin)
        return mapped

    def num_mapped_bytes(self) -> int:
        """See `ReservedMemory`. Asks the system, in time linear in the reserved pages."""
        return num_resident_bytes(self.address, self._num_bytes)


def num_resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of a mapping that are in memory; `address` is that of a page. Asks the system."""
    chunks = range(0, num_bytes, _CHUNK)
    return sum(_num_resident(address + at, min(_CHUNK, num_bytes - at)) for at in chunks)


def _num_resident(address: int, num_bytes: int) -> int:
    pages = np.empty(-(-num_bytes // mmap.PAGESIZE), np.uint8)
    place = (ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))
    if ctypes.CDLL(None, use_errno=True).mincore(*place, ctypes.c_void_p(pages.ctypes.data)) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return int((pages & 1).sum()) * mmap.PAGESIZE


def host_page_bytes(block_bytes: int, num_tensors: int, max_blocks: int) -> int:
    """The size of pages for tensors whose blocks have `block_bytes`: huge ones where they help.

    They are touched in a third of the time and given back in a twentieth. But memory then comes and
    goes in runs of blocks that fill a huge page in every tensor, so there must be many of these.
    """
    huge = _huge_page_bytes()
    if huge is None:
        return mmap.PAGESIZE
    granule_bytes = huge // math.gcd(huge, block_bytes) * block_bytes * num_tensors
    enough = _LEAST_GRANULES * granule_bytes <= max_blocks * block_bytes * num_tensors
    return huge if enough else mmap.PAGESIZE


def _huge_page_bytes() -> int | None:
    """The size of the system's huge pages where a program can ask for them, else None."""
    try:
        if "[never]" in (_HUGE_PAGES / "enabled").read_text():
            return None
        return int((_HUGE_PAGES / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return None
