"""Two configurations side by side, and one sentence: what to buy, what to switch."""

from __future__ import annotations

import shlex
from dataclasses import replace

import click

from prefixcache.exceptions import FieldError
from prefixcache.tools.replay.replay_options import ReplayOptions
from prefixcache.tools.replay.run import Row, TraceResult

# The flags that --compare may change; the others hold for both.
_FLAGS = click.Command(
    "--compare",
    params=[
        click.Option(["--sizes"]),
        click.Option(["--eviction-policy"]),
        click.Option(["--hint"], multiple=True),
        click.Option(["--scheduling-policy"]),
        click.Option(["--disk-memory"]),
        click.Option(["--disk-cache-min-uses"], type=int),
        click.Option(["--max-queue-delay"], type=float),
    ],
    add_help_option=False,
)
_LISTED = ("sizes", "eviction_policy")

# A change that saves less than this share of the computed tokens, or of the TTFT, is none.
_NOTABLE = 0.02


def compared(options: ReplayOptions) -> ReplayOptions:
    """The other configuration. Raises `FieldError`."""
    assert options.compare is not None
    try:
        given = _FLAGS.make_context("--compare", shlex.split(options.compare)).params
    except (ValueError, click.UsageError) as error:
        raise FieldError("compare", f"takes some of replay's flags: {error}") from None
    changes = {name: value for name, value in given.items() if value not in (None, ())}
    if not changes:
        raise FieldError("compare", "takes flags with their values, as in '--sizes 20%'.")
    for name in changes.keys() & _LISTED:
        changes[name] = tuple(changes[name].split(","))
    try:
        return replace(options, compare=None, **changes)
    except FieldError as error:
        raise FieldError("compare", f"{error.field} {error.problem}") from None


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
        before, after = (trace.input_tokens - row.saved_tokens for row in (one, other))
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
    if before.disk_name != after.disk_name:
        found.append(after.disk_name or "no disk")
    return ", ".join(found)


def _effect(trace: TraceResult, one: Row, other: Row) -> str:
    before, after = (trace.input_tokens - row.saved_tokens for row in (one, other))
    less = (before - after) / max(before, 1)
    text = (
        f"token hits {100 * one.saved_rate:.1f} % -> {100 * other.saved_rate:.1f} %, "
        f"{100 * abs(less):.1f} % {'fewer' if less >= 0 else 'more'} prompt tokens to compute"
    )
    if one.latency and other.latency:
        p50, p99 = (
            f"{one.latency.ttft_ms[at]:,.0f} -> {other.latency.ttft_ms[at]:,.0f} ms"
            for at in (50, 99)
        )
        text += f", predicted TTFT p50 {p50}, p99 {p99}"
    return text
