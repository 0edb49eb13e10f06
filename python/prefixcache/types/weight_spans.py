"""Which weights which tokens of an answer came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ShownVersion = int | str
"""What callers call weights: the tag of their update, or the count of updates."""


@dataclass(slots=True)
class WeightSpan:
    """Tokens `start` to before `end` of an answer came from the weights `version`."""

    version: ShownVersion
    start: int
    end: int


def extend_spans(spans: list[WeightSpan], version: ShownVersion | None, count: int) -> None:
    """Adds `count` tokens at the end; None where nobody knows their version, which adds nothing."""
    if version is None or not count:
        return
    end = spans[-1].end if spans else 0
    if not spans or spans[-1].version != version:
        spans.append(WeightSpan(version, end, end))
    spans[-1].end = end + count


def spans_as_json(spans: Sequence[WeightSpan]) -> list[dict[str, object]]:
    """The spans as vLLM words them."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]
