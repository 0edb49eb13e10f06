"""Steps whose results are still on the device."""

from __future__ import annotations

from collections.abc import Callable

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


class TokenCopies:
    """Sampled token ids on their way to the host, by one asynchronous copy a step.

    At most two copies are under way: the third start reuses the first one's memory.
    """

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._slots = [
            _Slot(
                torch.zeros(max_seqs, dtype=torch.int64, pin_memory=pinned),
                torch.cuda.Event() if pinned else None,
            )
            for _ in range(2)
        ]
        self._next = 0

    def start(self, token_ids_R: Tensor) -> Callable[[], list[int]]:
        """Starts the copy; the result waits for its end and returns the ids."""
        slot = self._slots[self._next]
        self._next = 1 - self._next
        return slot.start(token_ids_R)


class _Slot:
    def __init__(self, host: Tensor, done: torch.cuda.Event | None) -> None:
        self._host = host
        self._done = done

    def start(self, token_ids_R: Tensor) -> Callable[[], list[int]]:
        count = len(token_ids_R)
        self._host[:count].copy_(token_ids_R, non_blocking=True)
        if self._done is not None:
            self._done.record()
        return lambda: self._read(count)

    def _read(self, count: int) -> list[int]:
        if self._done is not None:
            self._done.synchronize()
        return self._host[:count].tolist()
