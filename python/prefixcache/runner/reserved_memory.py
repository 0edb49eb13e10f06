"""The memory below KV tensors: address space that is reserved once, whose pages come and go.

A tensor keeps its address whatever becomes of its pages, so nothing has to be bound again.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from prefixcache.exceptions import OutOfMemoryError

# Python's mmap names this one from 3.13 on.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_CHUNK = 1 << 30
_LEAST_GRANULES = 32


class ReservedMemory(Protocol):
    """Address space of one tensor. Offsets and sizes are bytes; pages are `page_bytes` long.

    Pages that were provided read as zeros until they are written. Those given back must neither be
    read nor written until they are provided again.
    """

    page_bytes: int

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The reserved bytes from the first one on as a tensor, good while this object lives."""
        ...

    def provide(self, end: int) -> None:
        """Makes all bytes before `end` usable. Raises `OutOfMemoryError`."""
        ...

    def give_back(self, begin: int, end: int) -> int:
        """Hands whole pages back to the system, content and all; the bytes that it had given."""
        ...

    def num_mapped_bytes(self) -> int:
        """Bytes that the system has given pages for."""
        ...


class HostMemory:
    """A private anonymous mapping: the system gives out a page when it is first written.

    Of a shared one the system keeps the content, and so the memory, when pages are given back.
    """

    def __init__(self, num_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._pages = mmap.mmap(-1, _round_up(num_bytes, page_bytes) + page_bytes, flags=flags)
        address = torch.frombuffer(self._pages, dtype=torch.uint8).data_ptr()
        self._offset = -address % page_bytes
        self._address, self._num_bytes = address + self._offset, num_bytes
        if page_bytes > mmap.PAGESIZE:
            self._pages.madvise(mmap.MADV_HUGEPAGE)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `ReservedMemory`."""
        count = math.prod(shape)
        return torch.frombuffer(self._pages, dtype=dtype, count=count, offset=self._offset).view(
            *shape
        )

    def provide(self, end: int) -> None:
        """Nothing to do: pages come as they are written."""

    def give_back(self, begin: int, end: int) -> int:
        """See `ReservedMemory`."""
        mapped = _resident_bytes(self._address + begin, end - begin)
        self._pages.madvise(mmap.MADV_DONTNEED, self._offset + begin, end - begin)
        return mapped

    def num_mapped_bytes(self) -> int:
        """See `ReservedMemory`. Asks the system, in time linear in the reserved pages."""
        chunks = range(0, self._num_bytes, _CHUNK)
        return sum(
            _resident_bytes(self._address + at, min(_CHUNK, self._num_bytes - at)) for at in chunks
        )


def _resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of a mapping that have a page; `address` is that of a page."""
    pages = (ctypes.c_ubyte * (-(-num_bytes // mmap.PAGESIZE)))()
    if _libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return int((torch.frombuffer(pages, dtype=torch.uint8) & 1).sum()) * mmap.PAGESIZE


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


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


class CudaMemory:
    """CUDA address space, backed granule by granule with memory that the driver maps there.

    `driver` is cuda-python's module of the driver API, `view` makes a tensor of bytes at an
    address, and `synchronize` waits until the device uses none of the memory.
    """

    def __init__(
        self,
        num_bytes: int,
        device: int,
        driver: Any,
        *,
        view: Callable[[int, int], Tensor] | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._driver = driver
        self._view = view or _cuda_view
        self._synchronize = synchronize or torch.cuda.synchronize
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page_bytes = int(
            self._call(driver.cuMemGetAllocationGranularity, self._properties, minimum)
        )
        self._num_bytes = _round_up(num_bytes, self.page_bytes)
        self._address = int(
            self._call(driver.cuMemAddressReserve, self._num_bytes, self.page_bytes, 0, 0)
        )
        self._handles: dict[int, Any] = {}

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `ReservedMemory`. The first granule must have been provided."""
        count = math.prod(shape) * dtype.itemsize
        return self._view(self._address, count).view(dtype).view(*shape)

    def provide(self, end: int) -> None:
        """See `ReservedMemory`."""
        for page in range(-(-end // self.page_bytes)):
            if page not in self._handles:
                self._map(page)

    def give_back(self, begin: int, end: int) -> int:
        """See `ReservedMemory`."""
        pages = range(begin // self.page_bytes, end // self.page_bytes)
        mapped = [page for page in pages if page in self._handles]
        if mapped:
            self._synchronize()
        for page in mapped:
            self._unmap(page)
        return len(mapped) * self.page_bytes

    def num_mapped_bytes(self) -> int:
        """See `ReservedMemory`."""
        return len(self._handles) * self.page_bytes

    def close(self) -> None:
        """Gives everything back, the address space too."""
        self.give_back(0, self._num_bytes)
        if self._address:
            self._call(self._driver.cuMemAddressFree, self._address, self._num_bytes)
            self._address = 0

    def __del__(self) -> None:
        if getattr(self, "_handles", None) is not None:
            self.close()

    def _map(self, page: int) -> None:
        """Backs a granule, zeroed; on an error nothing of it stays behind."""
        driver, size = self._driver, self.page_bytes
        address = self._address + page * size
        handle = self._call(driver.cuMemCreate, size, self._properties, 0)
        try:
            self._call(driver.cuMemMap, address, size, 0, handle, 0)
        except OutOfMemoryError:
            self._call(driver.cuMemRelease, handle)
            raise
        self._handles[page] = handle
        try:
            self._call(driver.cuMemSetAccess, address, size, [self._access()], 1)
        except OutOfMemoryError:
            self._unmap(page)
            raise
        self._view(address, size).zero_()

    def _unmap(self, page: int) -> None:
        size = self.page_bytes
        self._call(self._driver.cuMemUnmap, self._address + page * size, size)
        self._call(self._driver.cuMemRelease, self._handles.pop(page))

    def _access(self) -> Any:
        access = self._driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's value, if it has one. Raises `OutOfMemoryError` naming a failed call."""
        error, *values = function(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise OutOfMemoryError(f"{function.__name__} failed: {error!r}")
        return values[0] if values else None


def _cuda_view(address: int, num_bytes: int) -> Tensor:
    """Bytes of CUDA memory as a tensor that does not own them."""
    interface = {
        "shape": (num_bytes,),
        "typestr": "|u1",
        "data": (address, False),
        "version": 2,
    }
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")


def cuda_driver(device: torch.device) -> Any | None:
    """cuda-python's driver module, where it is installed and the device can map memory."""
    try:
        driver: Any = import_module("cuda.bindings.driver")
    except ImportError:
        return None
    supported = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    error, value = driver.cuDeviceGetAttribute(supported, device.index or 0)
    return driver if error == driver.CUresult.CUDA_SUCCESS and value else None


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
