"""The memory below KV tensors on CUDA: reserved addresses, and granules that the driver maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from prefixcache.exceptions import OutOfMemoryError
from prefixcache.runner.reserved_memory import round_up


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
        self._num_bytes = round_up(num_bytes, self.page_bytes)
        self._address = int(
            self._call(driver.cuMemAddressReserve, self._num_bytes, self.page_bytes, 0, 0)
        )
        self._handles: dict[int, Any] = {}

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Reserved bytes from the first one on. The first granule must have been provided."""
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
