"""What Linux says of the machine."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def machine_memory() -> tuple[int, int]:
    """Bytes of memory: all, and those that could still be allocated without swapping."""
    lines = [line.split() for line in _MEMINFO.read_text().splitlines()]
    kib = {words[0]: int(words[1]) for words in lines}
    return kib["MemTotal:"] << 10, kib["MemAvailable:"] << 10
