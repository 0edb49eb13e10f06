"""When pinned memory may be written again, or read."""

from __future__ import annotations

import torch


class Fence:
    """Keeps the host from pinned memory that a copy to or from the device still reads or writes.

    Copies to a CPU are done when they return, so there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Returns when all copies before the last `mark` are done."""
        if self._event is not None:
            self._event.synchronize()

    def mark(self) -> None:
        """Remembers the copies that were started until now."""
        if self._event is not None:
            self._event.record()
