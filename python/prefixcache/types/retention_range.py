"""Retention hints: which tokens of a request are worth keeping, how much, and for how long.

A hint orders eviction and does nothing else: it holds no block, refuses no request and changes no
answer. What it raises counts against the budget of the client that gave it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from prefixcache.config.checked import is_count, shown
from prefixcache.exceptions import InvalidRequestError, wrong

DEFAULT_PRIORITY = 35
TTL_PRIORITY = 60
MAX_PRIORITY = 100
MAX_RANGES = 32
MAX_TTL_SECONDS = 366 * 24 * 3600


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """Tokens `start` to `end` of a request; without an `end` to the end of its answer.

    `priority` is from 0 to 100, the greater the later evicted. It holds for `ttl_s` seconds from
    the last use, or without end; then it is the default again, 35. Left out it is 60 with a TTL,
    and 35 without one. Values are checked where they come together, in `CacheOptions`.
    """

    start: int = 0
    end: int | None = None
    priority: int | None = None
    ttl_s: float | None = None

    @property
    def chosen_priority(self) -> int:
        """The priority, or what stands for it where it is left out."""
        if self.priority is not None:
            return self.priority
        return DEFAULT_PRIORITY if self.ttl_s is None else TTL_PRIORITY


def check_ranges(ranges: Sequence[RetentionRange]) -> None:
    """Raises `InvalidRequestError` naming the field, as retention[2].ttl_s.

    There are at most 32; they begin at 0 or later, hold a token or more, and do not overlap.
    """
    if len(ranges) > MAX_RANGES:
        raise wrong(
            "retention", f"may have at most {MAX_RANGES} ranges, got {len(ranges)}", code="too_long"
        )
    for index, hint in enumerate(ranges):
        _check_range(hint, f"retention[{index}]")
    _check_disjoint(ranges)


def check_within(ranges: Sequence[RetentionRange], num_tokens: int) -> None:
    """Raises `InvalidRequestError` for a range that leaves a prompt of `num_tokens` tokens."""
    for index, hint in enumerate(ranges):
        name, value = ("start", hint.start) if hint.end is None else ("end", hint.end)
        if value > num_tokens:
            raise _wrong(
                f"retention[{index}].{name}",
                f"leaves the prompt, which has {num_tokens} tokens",
                getattr(hint, name),
            )


def clipped(ranges: Iterable[RetentionRange], num_tokens: int) -> tuple[RetentionRange, ...]:
    """What of the ranges lies in a prompt of `num_tokens` tokens, or in its answer."""
    ends = ((hint, None if hint.end is None else min(hint.end, num_tokens)) for hint in ranges)
    return tuple(
        replace(hint, end=end)
        for hint, end in ends
        if hint.start < (num_tokens + 1 if end is None else end)
    )


def _check_range(hint: object, field: str) -> None:
    if not isinstance(hint, RetentionRange):
        raise _wrong(field, "must be a RetentionRange", hint)
    if not is_count(hint.start):
        raise _wrong(f"{field}.start", "must be an integer, 0 or more", hint.start)
    if hint.end is not None and not (is_count(hint.end) and hint.end > hint.start):
        raise _wrong(f"{field}.end", f"must be an integer above start ({hint.start})", hint.end)
    if hint.priority is not None and not (
        is_count(hint.priority) and hint.priority <= MAX_PRIORITY
    ):
        problem = f"must be an integer from 0 to {MAX_PRIORITY}"
        raise _wrong(f"{field}.priority", problem, hint.priority)
    if hint.ttl_s is not None and not _is_ttl(hint.ttl_s):
        problem = f"must be seconds above 0, at most {MAX_TTL_SECONDS}"
        raise _wrong(f"{field}.ttl_s", problem, hint.ttl_s)


def _check_disjoint(ranges: Sequence[RetentionRange]) -> None:
    order = sorted(range(len(ranges)), key=lambda index: ranges[index].start)
    for before, index in itertools.pairwise(order):
        end = ranges[before].end
        if end is None or end > ranges[index].start:
            problem = f"lies in retention[{before}]: ranges must not overlap"
            raise _wrong(f"retention[{index}].start", problem, ranges[index].start)


def _is_ttl(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and 0 < value <= MAX_TTL_SECONDS


def _wrong(field: str, problem: str, value: object) -> InvalidRequestError:
    return wrong(field, f"{problem}, got {shown(value)}")
