"""Two configurations side by side, and one sentence: what to buy, what to switch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefixcache.config.checked import shown
from prefixcache.exceptions import FieldError
from prefixcache.tools.replay.replay_options import ReplayOptions
from prefixcache.tools.replay.run import Row, TraceResult

# The flags that --compare may change; the others hold for both.
_LISTED = ("sizes", "eviction_policy")
_SINGLE: Mapping[str, Any] = {"scheduling_policy": str, "max_queue_delay": float}

# A change that saves less than this share of the computed tokens, or of the TTFT, is none.
_NOTABLE = 0.02


def compared(options: ReplayOptions) -> ReplayOptions:
    """The other configuration. Raises `FieldError`."""
    assert options.compare is not None
    try:
        words = shlex.split(options.compare)
    except ValueError as error:
        raise FieldError("compare", f"cannot be read: {error}.") from None
    changes = dict[str, Any]()
    for flag, value in _pairs(words):
        name = flag.removeprefix("--").replace("-", "_")
        if name in _LISTED:
            changes[name] = tuple(value.split(","))
        elif name == "hint":
            changes[name] = (*changes.get(name, ()), value)
        elif name in _SINGLE:
            changes[name] = _read(flag, value, _SINGLE[name])
        else:
            known = ", ".join(f"--{one.replace('_', '-')}" for one in (*_LISTED, "hint", *_SINGLE))
            raise FieldError("compare", f"takes {known}, got {shown(flag)}.")
    try:
        return replace(options, compare=None, **changes)
    except FieldError as error:
        raise FieldError("compare", f"{error.field} {error.problem}") from None


def _read(flag: str, value: str, kind: type[Any]) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise FieldError("compare", f"{flag} must be a number, got {shown(value)}.") from None


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    """Flags and their values, of `--flag value` and `--flag=value`."""
    split = [part for word in words for part in _parts(word)]
    if not split or len(split) % 2:
        raise FieldError("compare", "takes flags, each with its value, as in '--sizes 20%'.")
    return list(zip(split[::2], split[1::2], strict=True))


def _parts(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") and "=" in word else [word]


def verdict(trace: TraceResult) -> str:
    """What the second of a trace's two rows brings, in one sentence."""
    one, other = trace.rows
    gain = _gain(trace, one, other)
    change = _change(one, other)
    effect = _effect(trace, one, other)
    if gain >= _NOTABLE:
        return f"{trace.name}: {change}: {effect}."
    if gain <= -_NOTABLE:
        return f"{trace.name}: do not {change}: {effect}."
    return f"{trace.name}: {change} only if it is free: {effect}."


def _gain(trace: TraceResult, one: Row, other: Row) -> float:
    """The share that is saved: of the predicted TTFT p50, without one of computed tokens."""
    if one.latency and other.latency:
        before, after = (row.latency.ttft_ms[50] for row in (one, other) if row.latency)
    else:
        before, after = (trace.input_tokens - row.hit_tokens for row in (one, other))
    return (before - after) / max(before, 1)


def _change(one: Row, other: Row) -> str:
    parts = list[str]()
    if other.blocks > one.blocks:
        parts.append(f"buy {other.blocks / one.blocks:.3g} times the cache memory")
    elif other.blocks < one.blocks:
        parts.append(f"sell cache memory down to {other.blocks / one.blocks:.3g} times")
    if other.setting != one.setting:
        parts.append(f"switch to {_switched(one, other)}")
    return " and ".join(parts) or "keep what is there"


def _switched(one: Row, other: Row) -> str:
    before, after = one.setting, other.setting
    found = list[str]()
    if before.eviction_policy != after.eviction_policy:
        found.append(after.eviction_policy)
    if before.scheduling_policy != after.scheduling_policy:
        found.append(f"{after.scheduling_policy} scheduling")
    elif before.max_queue_delay != after.max_queue_delay:
        found.append(f"a queue delay of {after.max_queue_delay:g} s")
    if before.hints != after.hints:
        found.append("these hints" if after.hints else "no hints")
    return ", ".join(found)


def _effect(trace: TraceResult, one: Row, other: Row) -> str:
    before, after = (trace.input_tokens - row.hit_tokens for row in (one, other))
    less = (before - after) / max(before, 1)
    text = (
        f"token hits {100 * one.hit_rate:.1f} % -> {100 * other.hit_rate:.1f} %, "
        f"{100 * abs(less):.1f} % {'fewer' if less >= 0 else 'more'} prompt tokens to compute"
    )
    if one.latency and other.latency:
        p50, p99 = (
            f"{one.latency.ttft_ms[at]:,.0f} -> {other.latency.ttft_ms[at]:,.0f} ms"
            for at in (50, 99)
        )
        text += f", predicted TTFT p50 {p50}, p99 {p99}"
    return text
