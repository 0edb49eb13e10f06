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
    first, other = trace.rows
    gain = _gain(trace, first, other)
    change = _change(first, other)
    effect = _effect(trace, first, other)
    if gain >= _NOTABLE:
        return f"{trace.name}: {change}: {effect}."
    if gain <= -_NOTABLE:
        return f"{trace.name}: do not {change}: {effect}."
    return f"{trace.name}: {change} only if it is free: {effect}."


def _gain(trace: TraceResult, first: Row, other: Row) -> float:
    """The share that is saved: of the predicted TTFT p50, without one of computed tokens."""
    if first.latency and other.latency:
        before, after = (row.latency.ttft_ms[50] for row in (first, other) if row.latency)
    else:
        before, after = (trace.input_tokens - row.saved_tokens for row in (first, other))
    return (before - after) / max(before, 1)


def _change(first: Row, other: Row) -> str:
    parts = list[str]()
    if other.blocks > first.blocks:
        parts.append(f"buy {other.blocks / first.blocks:.3g} times the cache memory")
    elif other.blocks < first.blocks:
        parts.append(f"sell cache memory down to {other.blocks / first.blocks:.3g} times")
    if other.setting != first.setting:
        parts.append(f"switch to {_switched(first, other)}")
    return " and ".join(parts) or "keep what is there"


def _switched(first: Row, other: Row) -> str:
    before, after = first.setting, other.setting
    changes = list[str]()
    if before.eviction_policy != after.eviction_policy:
        changes.append(after.eviction_policy)
    if before.scheduling_policy != after.scheduling_policy:
        changes.append(f"{after.scheduling_policy} scheduling")
    elif before.max_queue_delay != after.max_queue_delay:
        changes.append(f"a queue delay of {after.max_queue_delay:g} s")
    if before.hints != after.hints:
        changes.append("these hints" if after.hints else "no hints")
    if before.disk_name != after.disk_name:
        changes.append(after.disk_name or "no disk")
    return ", ".join(changes)


def _effect(trace: TraceResult, first: Row, other: Row) -> str:
    before, after = (trace.input_tokens - row.saved_tokens for row in (first, other))
    less = (before - after) / max(before, 1)
    text = (
        f"token hits {100 * first.saved_rate:.1f} % -> {100 * other.saved_rate:.1f} %, "
        f"{100 * abs(less):.1f} % {'fewer' if less >= 0 else 'more'} prompt tokens to compute"
    )
    if first.latency and other.latency:
        p50, p99 = (
            f"{first.latency.ttft_ms[at]:,.0f} -> {other.latency.ttft_ms[at]:,.0f} ms"
            for at in (50, 99)
        )
        text += f", predicted TTFT p50 {p50}, p99 {p99}"
    return text
