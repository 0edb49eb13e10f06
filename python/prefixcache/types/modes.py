"""Words of the engine's commands. Plain data: clients and servers need them without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

InFlightMode = Literal["keep", "recompute", "abort"]
SleepMode = Literal["recompute", "abort"]
MemoryTag = Literal["weights", "kv_cache"]


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """The weights as they are kept: types and formats of blocks, and bytes of memory."""

    formats: tuple[str, ...]
    bytes: int
