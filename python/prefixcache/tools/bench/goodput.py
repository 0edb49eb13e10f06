"""What a request must fulfil to count as served well, as `--goodput` names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from prefixcache.tools.bench.records import RequestRecord

# As vLLM names them; `tpot`, the mean time a token after the first, is what is meant by `itl` too.
_METRICS: Mapping[str, Callable[[RequestRecord], float]] = {
    "ttft": attrgetter("ttft"),
    "itl": attrgetter("mean_inter_token"),
    "tpot": attrgetter("mean_inter_token"),
    "e2el": attrgetter("latency"),
}


def parse_objectives(items: Sequence[str]) -> dict[str, float]:
    """Seconds by metric of `METRIC:MILLISECONDS` each. Raises `ValueError`."""
    objectives = dict[str, float]()
    for item in items:
        name, _, limit = item.partition(":")
        if name not in _METRICS:
            raise ValueError(f"must be of {', '.join(_METRICS)}, as in ttft:500, got {item!r}")
        objectives[name] = _milliseconds(item, limit) / 1e3
    return objectives


def _milliseconds(item: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"must tell milliseconds above 0, as in ttft:500, got {item!r}")
    return value


def is_good(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether the request kept within every objective."""
    return all(_METRICS[name](record) <= limit for name, limit in objectives.items())
