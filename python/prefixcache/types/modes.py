"""Words of the engine's commands. Plain data: clients and servers need them without an engine."""

from __future__ import annotations

from typing import Literal

InFlightMode = Literal["keep", "recompute", "abort"]
SleepMode = Literal["recompute", "abort"]
MemoryTag = Literal["weights", "kv_cache"]
