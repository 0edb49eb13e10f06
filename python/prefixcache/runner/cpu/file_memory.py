"""The memory below a KV tensor that lies in a file, mapped shared: see `kv/kv_folder.py`."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from prefixcache.exceptions import OutOfMemoryError
from prefixcache.kv.kv_folder import KeptFile
from prefixcache.runner.cpu.host_memory import num_resident_bytes
from prefixcache.runner.reserved_memory import round_up


class FileMemory:
    """A part of the file. Its bytes are those that another process left there.

    Memory that was given back is a hole, and must be provided before it is written: what a full
    disk cannot hold would end the process.
    """

    page_bytes = mmap.PAGESIZE

    def __init__(self, file: KeptFile, tensor: int, num_bytes: int) -> None:
        self._file, self._tensor, self._num_bytes = file, tensor, num_bytes
        self._start = file.core.tensor_at(tensor)
        self._pages = file.maps[tensor]
        self.address = np.frombuffer(self._pages, np.uint8).ctypes.data

    def rows(self, count: int) -> npt.NDArray[np.uint8]:
        """The bytes in `count` equal rows, good while this object lives."""
        return np.frombuffer(self._pages, np.uint8, self._num_bytes).reshape(count, -1)

    def fill_hole(self, begin: int, end: int) -> None:
        """Writes zeros where the file has nothing between these offsets, whole pages.

        The system gives pages out in large parts then. Faults would take one after the other, six
        times as long.
        """
        start, length = self._start + begin, end - begin
        descriptor = self._file.descriptor
        with suppress(OSError):  # It is as slow as it was.
            if _first_data(descriptor, start) >= start + length:
                os.pwrite(descriptor, bytes(length), start)

    def provide(self, end: int) -> None:
        """See `ReservedMemory`."""
        try:
            self._file.allocate(self._tensor, end)
        except OSError as error:
            raise OutOfMemoryError(
                f"{self._file.path} cannot have {end} bytes more on its disk: {error}"
            ) from error

    def give_back(self, begin: int, end: int) -> int:
        """See `ReservedMemory`. A file system that cannot gives nothing back."""
        end = min(end, round_up(self._num_bytes, self.page_bytes))  # there the next tensor begins
        given = num_resident_bytes(self.address + begin, end - begin)
        return given if self._file.give_back(self._start + begin, end - begin) else 0

    def num_mapped_bytes(self) -> int:
        """See `ReservedMemory`: what of the file is in memory."""
        return num_resident_bytes(self.address, self._num_bytes)


def _first_data(descriptor: int, start: int) -> int:
    """Where the first bytes from `start` on lie that are no hole of the file."""
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.fstat(descriptor).st_size
