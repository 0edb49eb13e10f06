"""Memory over CUDA's virtual memory calls, against a driver that knows what may follow what."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from prefixcache.config.engine_config import EngineConfig
from prefixcache.exceptions import ConfigError, OutOfMemoryError
from prefixcache.runner.torch import device as runner_device
from prefixcache.runner.torch.cuda_memory import CudaMemory

GRANULE = 4096
SUCCESS, FAILED = 0, 2


class FakeDriver:
    """The calls of the driver API that are used, over host memory, each checked for misuse.

    New memory holds garbage, as a device's may. `failing` names a call that fails, from its
    `successes`-th on.
    """

    CUresult = SimpleNamespace(CUDA_SUCCESS=SUCCESS)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self) -> None:
        self.space: np.ndarray | None = None
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.num_made = 0
        self.failing = ""
        self.successes = 0
        self.log: list[str] = []

    def CUmemAllocationProp(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    def CUmemAccessDesc(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(location=None, flags=None)

    def _fails(self, name: str) -> bool:
        self.log.append(name)
        if name != self.failing:
            return False
        self.successes -= 1
        return self.successes < 0

    def cuMemGetAllocationGranularity(self, prop, option):  # noqa: N802
        assert (prop.type, prop.location.type, prop.location.id) == (1, 1, 3)
        return SUCCESS, GRANULE

    def cuMemAddressReserve(self, size, alignment, address, flags):  # noqa: N802
        assert size % GRANULE == 0
        assert (alignment, address, flags) == (GRANULE, 0, 0)
        self.space = np.full(size, 0xCD, dtype=np.uint8)
        return SUCCESS, self.space.ctypes.data

    def cuMemAddressFree(self, address, size):  # noqa: N802
        assert not self.mapped, "freed while something is mapped"
        assert self.space is not None
        assert (address, size) == (self.space.ctypes.data, self.space.size)
        self.space = None
        return (SUCCESS,)

    def cuMemCreate(self, size, prop, flags):  # noqa: N802
        assert size == GRANULE
        if self._fails("create"):
            return FAILED, 0
        self.num_made += 1
        self.handles.add(self.num_made)
        return SUCCESS, self.num_made

    def cuMemMap(self, address, size, offset, handle, flags):  # noqa: N802
        assert size == GRANULE
        assert offset == flags == 0
        assert handle in self.handles
        assert handle not in self.mapped.values()
        assert address not in self.mapped
        if self._fails("map"):
            return (FAILED,)
        self.mapped[address] = handle
        self._at(address)[:] = 0xCD
        return (SUCCESS,)

    def cuMemSetAccess(self, address, size, descriptions, count):  # noqa: N802
        assert address in self.mapped
        assert size == GRANULE
        assert [one.flags for one in descriptions] == [3] * count == [3]
        if self._fails("access"):
            return (FAILED,)
        self.accessible.add(address)
        return (SUCCESS,)

    def cuMemUnmap(self, address, size):  # noqa: N802
        assert size == GRANULE
        self.log.append("unmap")
        del self.mapped[address]
        self.accessible.discard(address)
        self._at(address)[:] = 0xAB
        return (SUCCESS,)

    def cuMemRelease(self, handle):  # noqa: N802
        assert handle not in self.mapped.values(), "released while it is mapped"
        self.handles.remove(handle)
        return (SUCCESS,)

    def _at(self, address: int) -> np.ndarray:
        assert self.space is not None
        begin = address - self.space.ctypes.data
        return self.space[begin : begin + GRANULE]

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Asks for the first granule alone, as CUDA does that looks at the address."""
        assert self.space is not None
        assert address in self.accessible
        begin = address - self.space.ctypes.data
        return torch.from_numpy(self.space[begin : begin + num_bytes])


def memory_of(driver: FakeDriver, num_bytes: int) -> CudaMemory:
    synchronize = lambda: driver.log.append("synchronize")  # noqa: E731
    return CudaMemory(num_bytes, 3, driver, view=driver.view, synchronize=synchronize)


def test_granules_come_zeroed_and_go_without_moving_the_tensor() -> None:
    driver = FakeDriver()
    memory = memory_of(driver, 10 * GRANULE - 100)
    memory.provide(2 * GRANULE + 1)
    assert memory.num_mapped_bytes() == 3 * GRANULE == len(driver.handles) * GRANULE
    tensor = memory.tensor((9 * 1024,), torch.float32)
    assert not tensor[: 3 * 1024].any()
    tensor[: 3 * 1024] = 1.0
    memory.provide(9 * GRANULE)
    assert tensor[: 3 * 1024].all()
    assert not tensor[3 * 1024 :].any()
    assert memory.give_back(GRANULE, 9 * GRANULE) == 8 * GRANULE
    assert memory.num_mapped_bytes() == GRANULE
    assert driver.log.index("synchronize") < driver.log.index("unmap")
    assert memory.give_back(GRANULE, 9 * GRANULE) == 0
    memory.provide(2 * GRANULE)
    assert tensor[:1024].all()
    assert not tensor[1024 : 2 * 1024].any()
    memory.close()
    assert not driver.handles
    assert driver.space is None


@pytest.mark.parametrize("call", ["create", "map", "access"])
def test_a_driver_that_has_no_memory_leaves_nothing_half_done(call: str) -> None:
    driver = FakeDriver()
    memory = memory_of(driver, 8 * GRANULE)
    memory.provide(GRANULE)
    driver.failing, driver.successes = call, 2
    with pytest.raises(OutOfMemoryError, match=r"cuMem\w+ failed: 2"):
        memory.provide(8 * GRANULE)
    assert len(driver.handles) == len(driver.mapped) == len(driver.accessible) == 3
    assert memory.num_mapped_bytes() == 3 * GRANULE
    driver.failing = ""
    memory.provide(8 * GRANULE)
    assert len(driver.accessible) == 8


def test_the_real_driver_has_the_calls_that_are_used() -> None:
    """Where cuda-python is installed; without a GPU no more can be asked of it."""
    driver = pytest.importorskip("cuda.bindings.driver")
    assert all(hasattr(driver, name) for name in vars(FakeDriver) if name.startswith(("cu", "CU")))
    assert driver.CUresult.CUDA_SUCCESS == SUCCESS
    assert driver.CUmemAllocationProp().location.id == 0
    assert hasattr(driver.CUmemAllocationType, "CU_MEM_ALLOCATION_TYPE_PINNED")
    assert hasattr(driver.CUmemLocationType, "CU_MEM_LOCATION_TYPE_DEVICE")
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert minimum == 0
    assert hasattr(driver.CUmemAccess_flags, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")


def test_only_elastic_flags_ask_for_mapping_and_they_say_what_is_lacking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, driver = torch.device("cuda", 3), FakeDriver()
    elastic = EngineConfig.from_flags(min_free_memory="1GiB")
    monkeypatch.setattr(runner_device, "cuda_driver", lambda device: driver)
    assert runner_device._reserve(EngineConfig(), device) is None
    reserve = runner_device._reserve(elastic, device)
    assert reserve is not None
    assert reserve(9 * GRANULE).page_bytes == GRANULE
    monkeypatch.setattr(runner_device, "cuda_driver", lambda device: None)
    with pytest.raises(ConfigError, match=r"min_free_memory need.* CUDA device .*pip install"):
        runner_device._reserve(elastic, device)
