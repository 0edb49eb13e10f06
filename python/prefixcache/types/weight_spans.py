"""Which weights which tokens of an answer came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

ShownVersion = int | str
"""What callers call weights: the tag of their update, or the count of updates."""


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start` to before `end` of an answer came from the weights `version`."""

    version: ShownVersion
    start: int
    end: int


def extend_spans(spans: list[WeightSpan], version: ShownVersion | None, count: int) -> None:
    """Adds `count` tokens at the end; None where nobody knows their version, which adds nothing."""
    if version is None or not count:
        return
    last = spans[-1] if spans else WeightSpan(version, 0, 0)
    if spans and last.version == version:
        spans[-1] = replace(last, end=last.end + count)
    else:
        spans.append(WeightSpan(version, last.end, last.end + count))


def spans_as_json(spans: Sequence[WeightSpan]) -> list[dict[str, object]]:
    """The spans as vLLM words them."""
    return [{"version": one.version, "start": one.start, "end": one.end} for one in spans]
