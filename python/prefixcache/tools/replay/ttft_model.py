"""How long a prompt takes, learnt from what `prefixcache bench` measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache.config.checked import is_object

_LEAST_REQUESTS = 8

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TtftModel:
    """Milliseconds from the start of a prefill to the first token, linear in the tokens."""

    ms_per_token: float
    ms_per_request: float
    source: str

    def __str__(self) -> str:
        return (
            f"{self.ms_per_token:.4g} ms a computed token and {self.ms_per_request:.3g} ms a "
            f"request ({self.source})"
        )


def read_model(path: Path) -> TtftModel:
    """The model of a file of `prefixcache bench --output`, or of the two numbers themselves.

    Raises `ValueError` with the file and what is wrong with it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is no JSON") from None
    if not is_object(content):
        raise ValueError(f"{path} must hold an object")
    if "ms_per_token" in content:
        return _stated(path, content)
    try:
        return _fitted(path, content)
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{path} is no file of `prefixcache bench --output`") from None


def _stated(path: Path, content: dict[str, Any]) -> TtftModel:
    numbers = [content.get("ms_per_token"), content.get("ms_per_request", 0)]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e9:
            raise ValueError(f"{path}: ms_per_token and ms_per_request must be milliseconds from 0")
    per_token, per_request = map(float, numbers)  # pyright: ignore[reportArgumentType]
    return TtftModel(per_token, per_request, f"stated in {path.name}")


def _fitted(path: Path, content: dict[str, Any]) -> TtftModel:
    """A line through the requests that were computed alone."""
    computed, ttft = _lone_requests(path, content)
    if len(computed) < _LEAST_REQUESTS:
        raise ValueError(
            f"{path}: only {len(computed)} requests were computed alone, {_LEAST_REQUESTS} are "
            "needed; measure with --concurrency 1"
        )
    per_token, per_request = _line(computed, ttft)
    source = f"least squares over {len(computed)} requests of {path.name}"
    return TtftModel(per_token, per_request, source)


def _lone_requests(path: Path, content: dict[str, Any]) -> tuple[_Array, _Array]:
    columns = [
        _alone(run["requests"])
        for variant in content.get("variants", ())
        for run in variant.get("runs", ())
        if {"sent", "ttft", "prompt_tokens", "cached_tokens"} <= run.get("requests", {}).keys()
    ]
    if not columns:
        raise ValueError(
            f"{path} has no requests with sent, ttft, prompt_tokens and cached_tokens, which "
            "`prefixcache bench --output` writes; or state ms_per_token in it"
        )
    computed, ttft = np.concatenate(columns, axis=1)
    return computed, ttft


def _alone(requests: dict[str, list[float]]) -> _Array:
    """Computed tokens and milliseconds of the requests that waited for no other one."""
    names = ("sent", "ttft", "prompt_tokens", "cached_tokens")
    sent, ttft, prompt, cached = (np.array(requests[name], np.float64) for name in names)
    order = np.argsort(sent, kind="stable")
    sent, ttft, computed = sent[order], ttft[order], (prompt - cached)[order]
    ends = np.maximum.accumulate(sent + ttft)
    after_others = np.concatenate([[True], sent[1:] >= ends[:-1]])
    before_others = np.concatenate([sent[1:] >= (sent + ttft)[:-1], [True]])
    # Of a server that does not tell its hits, and of a failed request, numbers are missing.
    alone = after_others & before_others & np.isfinite(computed) & np.isfinite(ttft)
    return np.stack([computed[alone], 1e3 * ttft[alone]])


def _line(computed: _Array, ttft: _Array) -> tuple[float, float]:
    """Slope and intercept, neither of them negative."""
    if np.ptp(computed) > 0:
        slope, intercept = np.polyfit(computed, ttft, 1)
        if slope > 0 and intercept >= 0:
            return float(slope), float(intercept)
    return float(np.sum(computed * ttft) / max(np.sum(computed * computed), 1)), 0.0
