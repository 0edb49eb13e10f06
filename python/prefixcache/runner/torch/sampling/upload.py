"""Numbers of a step on their way to the device: all of them in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.runner.torch.typed import from_numpy

Field = Callable[[Tensor], Tensor]


class Upload:
    """Arrays of 8-byte numbers, collected on the host and copied together.

    `integers`, `int32` and `floats` return what picks their array out of the tensor that `send`
    makes.
    """

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.int64]] = []
        self._size = 0

    def integers(self, values: Sequence[int] | npt.NDArray[np.integer]) -> Field:
        """Adds an array that is int64 on the device."""
        place = self._add(np.asarray(values, dtype=np.int64))
        return lambda sent: sent[place]

    def int32(self, values: npt.NDArray[np.int32]) -> Field:
        """Adds an array that is int32 on the device, two of them a number."""
        padded = np.zeros(len(values) + len(values) % 2, dtype=np.int32)
        padded[: len(values)] = values
        place = self._add(padded.view(np.int64))
        return lambda sent: sent[place].view(torch.int32)[: len(values)]

    def floats(self, values: Sequence[float]) -> Field:
        """Adds an array that is float64 on the device, by its bits."""
        place = self._add(np.asarray(values, dtype=np.float64).view(np.int64))
        return lambda sent: sent[place].view(torch.float64)

    def send(self, device: torch.device) -> Tensor:
        """Starts the copy; pinned, so that nothing waits for the device."""
        if device.type == "cpu":
            return from_numpy(np.concatenate([*self._arrays, _NOTHING]))
        host = torch.empty(self._size, dtype=torch.int64, pin_memory=device.type == "cuda")
        np.concatenate([*self._arrays, _NOTHING], out=host.numpy())
        return host.to(device, non_blocking=True)

    def _add(self, array: npt.NDArray[np.int64]) -> slice:
        place = slice(self._size, self._size + len(array))
        self._arrays.append(array)
        self._size = place.stop
        return place


_NOTHING = np.empty(0, dtype=np.int64)
