"""Sizes of pools as users write them: blocks, or percent of the blocks of a trace's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The steps of a range within each power of ten.
_STEPS = (1, 2, 5)


@dataclass(frozen=True, slots=True)
class Size:
    """Blocks, or percent of a trace's blocks."""

    value: float
    is_percent: bool

    def blocks(self, unique_blocks: int) -> int:
        """In a trace of `unique_blocks`; at least one."""
        if not self.is_percent:
            return int(self.value)
        return max(1, round(unique_blocks * self.value / 100))

    def __str__(self) -> str:
        return f"{self.value:g}%" if self.is_percent else f"{int(self.value)}"


def parse_sizes(items: Sequence[str]) -> tuple[Size, ...]:
    """Sizes of `4096`, `10%` or `1%..100%` each; a range goes in steps of 1, 2 and 5.

    Raises `ValueError`.
    """
    sizes = [size for item in items for size in _parse(item)]
    return tuple(dict.fromkeys(sizes))


def _parse(item: str) -> list[Size]:
    first, dots, last = item.partition("..")
    if not dots:
        return [parse_size(item)]
    start, end = parse_size(first), parse_size(last)
    if start.is_percent != end.is_percent or start.value > end.value:
        raise ValueError(f"must rise from one size to another of its kind, got {item!r}")
    between = (float(f"{step}e{power}") for power in range(-2, 10) for step in _STEPS)
    inner = [Size(value, start.is_percent) for value in between if start.value < value < end.value]
    return list(dict.fromkeys([start, *inner, end]))


def parse_size(text: str) -> Size:
    """A size of `4096` or `10%`. Raises `ValueError`."""
    number = text.strip().removesuffix("%")
    is_percent = number != text.strip()
    try:
        value = float(number) if is_percent else int(number)
    except ValueError:
        value = 0
    if not 0 < value <= (1000 if is_percent else 2**31):
        raise ValueError(f"must be blocks or percent, as in 4096, 10% or 1%..100%, got {text!r}")
    return Size(value, is_percent)
