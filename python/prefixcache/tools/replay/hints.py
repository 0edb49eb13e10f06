"""Hints that hold for every prompt of a trace, as users write them."""

from __future__ import annotations

import re

Hint = tuple[int, int | None, int, float | None]

_FORM = re.compile(r"(\d{1,9}):(\d{0,9})=(\d{1,3})(?::(\d+(?:\.\d+)?))?")


def parse_hint(text: str) -> Hint:
    """Start, end, priority and TTL in seconds of `START:END=PRIORITY[:SECONDS]`.

    Raises `ValueError`.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"must be START:END=PRIORITY[:SECONDS], as in 0:2000=80, got {text!r}")
    start, end, priority, ttl = found.groups()
    return int(start), int(end) if end else None, int(priority), float(ttl) if ttl else None
