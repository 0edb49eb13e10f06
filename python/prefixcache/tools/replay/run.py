"""Traces through caches of several sizes and policies, by the Rust core."""

from __future__ import annotations

import gzip
import lzma
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixcache._core import TraceReplay, replay_recording
from prefixcache.exceptions import PrefixCacheError
from prefixcache.tools.replay.replay_options import Hint
from prefixcache.tools.replay.sizes import Size
from prefixcache.tools.replay.ttft_model import TtftModel

# Called with the bytes of a trace that were read, now and then.
Progress = Callable[[int], object]
PERCENTILES = (50, 90, 99)


class ReplayError(PrefixCacheError):
    """A trace that cannot be replayed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a trace: everything but the trace and the size."""

    eviction_policy: str
    hints: tuple[Hint, ...] = ()
    model: TtftModel | None = None
    objective_ms: float | None = None
    scheduling_policy: str = "fcfs"
    max_queue_delay: float = 30.0
    snapshots: str | None = None
    """Where snapshots of states are kept; None without states."""
    snapshot_tokens: float = 0.0
    """Tokens whose keys and values take as much as a snapshot."""
    disk: Size | None = None
    """The size of a disk behind the pool."""
    disk_min_uses: int = 0
    """Uses from which a block goes there."""

    @property
    def name(self) -> str:
        """What is shown of it."""
        parts = [self.eviction_policy if self.snapshots != "marconi" else "its own"]
        if self.scheduling_policy != "fcfs":
            parts.append(self.scheduling_policy)
        if self.snapshots is not None:
            parts.append(f"snapshots: {self.snapshots}")
        if self.disk_name:
            parts.append("disk")
        return ", ".join([*parts, "hints"] if self.hints else parts)

    @property
    def disk_name(self) -> str:
        """What is shown of the disk; empty where there is none."""
        return f"disk of {self.disk} from use {self.disk_min_uses} on" if self.disk else ""

    def arguments(self, block_size: int, unique_blocks: int) -> dict[str, Any]:
        """What `TraceReplay.add` takes besides the size.

        Blocks have `block_size` tokens; `unique_blocks` are those of the trace.
        """
        arguments: dict[str, Any] = {
            "eviction_policy": self.eviction_policy,
            "hints": list(self.hints),
        }
        if self.model is not None:
            arguments |= {
                "ms_per_token": self.model.ms_per_token,
                "ms_per_request": self.model.ms_per_request,
                "objective_ms": self.objective_ms,
            }
            if self.scheduling_policy == "cache-aware":
                arguments["max_delay_ms"] = 1e3 * self.max_queue_delay
        if self.snapshots is not None:
            blocks = max(1, round(self.snapshot_tokens / block_size))
            arguments |= {"snapshots": self.snapshots, "snapshot_blocks": blocks}
        if self.disk is not None:
            blocks = self.disk.blocks(unique_blocks)
            arguments |= {"disk_blocks": blocks, "min_uses": self.disk_min_uses}
        return arguments


@dataclass(frozen=True, slots=True)
class Latency:
    """Predicted: TTFT in milliseconds by percentile, and the requests within the objective."""

    ttft_ms: dict[int, float]
    good_share: float | None
    goodput: float | None
    most_waiting: int


@dataclass(frozen=True, slots=True)
class Row:
    """One cache. Rates are of all prompts' tokens and of requests, from 0 to 1.

    Requests hit in the pool or on its disk, to which `disk_writes` blocks were written.
    """

    setting: Setting
    size: Size
    blocks: int
    hit_tokens: int
    hit_rate: float
    request_hit_rate: float
    evictions: int
    optimum: float | None
    disk_tokens: int
    disk_hit_rate: float
    disk_writes: int
    latency: Latency | None = None

    @property
    def saved_tokens(self) -> int:
        """Those that hit, wherever."""
        return self.hit_tokens + self.disk_tokens

    @property
    def saved_rate(self) -> float:
        """The share of all prompts' tokens that hit, wherever."""
        return self.hit_rate + self.disk_hit_rate


@dataclass(frozen=True, slots=True)
class Curve:
    """Token hit rates at every whole percent of the trace's blocks, from 1 to 100."""

    optimum: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TraceResult:
    """A trace and what was found in it. What needs `--bounds` is None without it."""

    path: Path
    name: str
    block_size: int
    requests: int
    input_tokens: int
    unique_blocks: int | None
    block_references: int | None
    infinite: float | None
    infinite_requests: float | None
    seconds: float
    rows: tuple[Row, ...]
    curve: Curve | None
    as_recorded: dict[str, Any] | None = None
    """Of a recording: what `replay_recording` says of its own size and policy."""


def replay_trace(
    path: Path,
    cells: Sequence[tuple[Setting, Size]],
    *,
    jobs: int,
    bounds: bool,
    cache_answers: bool,
    progress: Progress,
) -> TraceResult:
    """Runs a trace at each setting and size. Raises `ReplayError` with file and line.

    The caches run side by side. Sizes in percent need a pass before that, which counts the blocks.
    """
    start = time.perf_counter()

    def opened(*, with_history: bool) -> TraceReplay:
        return TraceReplay(
            path, threads=jobs, with_history=with_history, caches_answers=cache_answers
        )

    try:
        replay = opened(with_history=bounds)
        if num_passes(cells, bounds) == 1:
            outcomes = _pass(replay, cells, 0, progress)
        else:
            _pass(replay, (), 0, progress)
            unique = replay.history()["unique_blocks"]
            outcomes = _pass(opened(with_history=False), cells, unique, progress)
        return _result(path, cells, outcomes, replay, start, bounds=bounds)
    except (ValueError, MemoryError, RuntimeError) as error:
        raise ReplayError(str(error)) from error


def replay_as_recorded(path: Path) -> dict[str, Any] | None:
    """The calls of a server's recording made again; None for a trace that is none.

    Raises `ReplayError` with file and line.
    """
    try:
        return replay_recording(path) if _is_recording(path) else None
    except (ValueError, OSError, EOFError) as error:
        raise ReplayError(f"{path}: {error}") from error


def _is_recording(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(6)
    opened = {b"\x1f\x8b": gzip.open, b"\xfd7": lzma.open}.get(start[:2], open)
    with opened(path, "rb") as file:
        return b'"prefixcache_trace"' in file.readline(1 << 16)


def trace_bytes(path: Path) -> int:
    """The size of a trace's file, and of the further parts of a recording."""
    size, part = path.stat().st_size, 1
    while (further := Path(f"{path}.{part}")).exists():
        size, part = size + further.stat().st_size, part + 1
    return size


def num_passes(cells: Sequence[tuple[Setting, Size]], bounds: bool) -> int:
    """How often a trace is read."""
    sizes = [size for setting, size in cells for size in (size, setting.disk) if size is not None]
    return 2 if bounds and any(size.is_percent for size in sizes) else 1


def _pass(
    replay: TraceReplay, cells: Sequence[tuple[Setting, Size]], unique: int, progress: Progress
) -> list[dict[str, Any]]:
    """What the caches of a trace with `unique` blocks found, in one pass over it."""
    numbers = [
        replay.add(size.blocks(unique), **setting.arguments(replay.block_size, unique))
        for setting, size in cells
    ]
    before = 0
    while replay.advance():
        read = replay.bytes_read
        progress(read - before)
        before = read
    return [replay.outcome(number) for number in numbers]


def _result(
    path: Path,
    cells: Sequence[tuple[Setting, Size]],
    outcomes: Sequence[dict[str, Any]],
    replay: TraceReplay,
    start: float,
    *,
    bounds: bool,
) -> TraceResult:
    facts = replay.history() if bounds else outcomes[0]
    tokens, requests = max(facts["input_tokens"], 1), max(facts["requests"], 1)
    unique: int | None = facts.get("unique_blocks")
    sizes = [size.blocks(unique or 0) for _, size in cells]
    optimum = _optimum(replay, sizes, tokens) if bounds else [None] * len(cells)
    return TraceResult(
        path=path,
        name=replay.name,
        block_size=replay.block_size,
        requests=facts["requests"],
        input_tokens=facts["input_tokens"],
        unique_blocks=unique,
        block_references=facts.get("block_references"),
        infinite=facts["hit_tokens"] / tokens if bounds else None,
        infinite_requests=facts["hit_requests"] / requests if bounds else None,
        seconds=time.perf_counter() - start,
        # The optimum knows of no states.
        rows=tuple(
            _row(outcome, cell, blocks, None if cell[0].snapshots else best)
            for outcome, cell, blocks, best in zip(outcomes, cells, sizes, optimum, strict=True)
        ),
        curve=_curve(replay, unique, tokens) if unique else None,
    )


def _optimum(replay: TraceReplay, sizes: Sequence[int], tokens: int) -> list[float]:
    return [point["hit_tokens"] / tokens for point in replay.optimum(sizes)]


def _row(
    outcome: dict[str, Any], cell: tuple[Setting, Size], blocks: int, optimum: float | None
) -> Row:
    setting, size = cell
    return Row(
        setting=setting,
        size=size,
        blocks=blocks,
        hit_tokens=outcome["hit_tokens"],
        hit_rate=outcome["hit_tokens"] / max(outcome["input_tokens"], 1),
        request_hit_rate=outcome["hit_requests"] / max(outcome["requests"], 1),
        evictions=outcome["evictions"],
        optimum=optimum,
        disk_tokens=outcome["disk_tokens"],
        disk_hit_rate=outcome["disk_tokens"] / max(outcome["input_tokens"], 1),
        disk_writes=outcome["disk_writes"],
        latency=_latency(outcome, setting) if "end_ms" in outcome else None,
    )


def _latency(outcome: dict[str, Any], setting: Setting) -> Latency:
    good, seconds = outcome["good_requests"], (outcome["end_ms"] - outcome["start_ms"]) / 1e3
    is_judged = setting.objective_ms is not None and outcome["requests"] > 0
    return Latency(
        ttft_ms={percentile: outcome[f"ttft_ms_p{percentile}"] for percentile in PERCENTILES},
        good_share=good / outcome["requests"] if is_judged else None,
        goodput=good / seconds if is_judged and seconds > 0 else None,
        most_waiting=outcome["most_waiting"],
    )


def _curve(replay: TraceReplay, unique: int, tokens: int) -> Curve:
    sizes = [max(1, round(unique * percent / 100)) for percent in range(1, 101)]
    return Curve(tuple(_optimum(replay, sizes, tokens)))
