"""Words of the engine's commands. Plain data: clients and servers need them without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

InFlightMode = Literal["keep", "recompute", "abort"]
SleepMode = Literal["recompute", "abort"]
# vLLM's words of an engine: the second is that of level 1, the third that of level 2.
SleepState = Literal["awake", "weights_offloaded", "discard_all"]
MemoryTag = Literal["weights", "kv_cache"]


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """The weights as they are kept: types and formats of blocks, and bytes of memory.

    `mapped_bytes` of them were mapped from a file at the start; 0 once any was replaced.
    """

    formats: tuple[str, ...]
    bytes: int
    mapped_bytes: int = 0
