"""Steps whose results are still on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.step_plan import SequenceOutput


class PendingStep:
    """A submitted step. Its results are fetched once, when they are needed.

    `is_known` tells that `outputs` need not wait. Otherwise the next step may be submitted before,
    with this one's tokens named by their places.
    """

    def __init__(self, fetch: Callable[[], list[SequenceOutput]], *, is_known: bool) -> None:
        self.is_known = is_known
        self._fetch = fetch

    def outputs(self) -> list[SequenceOutput]:
        """One output for each sequence of the plan; waits until the device has computed them."""
        return self._fetch()


class ResultCopies:
    """Sampled tokens, and what is told about them, on their way to the host: one copy a step.

    At most two copies are under way: the third start reuses the first one's memory.
    """

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self._slots = deque(_Slot(max_seqs, device) for _ in range(2))

    def start(self, results: Tensor) -> Callable[[], npt.NDArray[np.int64]]:
        """Starts the copy of int64 numbers; the result waits for its end and returns them."""
        self._slots.rotate()
        return self._slots[0].start(results)


class _Slot:
    """Host memory for one copy: enough for tokens alone, and more once more is asked for."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._host = self._memory(size)
        self._done = torch.cuda.Event() if self._on_cuda else None

    def start(self, results: Tensor) -> Callable[[], npt.NDArray[np.int64]]:
        if len(results) > len(self._host):
            self._host = self._memory(len(results))
        host = self._host[: len(results)]
        host.copy_(results, non_blocking=True)
        if self._done is not None:
            self._done.record()
        return lambda: self._read(host)

    def _read(self, host: Tensor) -> npt.NDArray[np.int64]:
        if self._done is not None:
            self._done.synchronize()
        return host.numpy()

    def _memory(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=self._on_cuda)
