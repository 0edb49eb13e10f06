"""What `prefixcache replay` is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import MinLen

from prefixcache.config.checked import Checked, NonNegativeFloat, PositiveInt, shown
from prefixcache.config.engine_parts.flag_values import ByteSize
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError
from prefixcache.tools.replay.sizes import Size, parse_size, parse_sizes

EvictionPolicy = Literal["lru", "reuse-queue"]
SchedulingPolicy = Literal["fcfs", "cache-aware"]

Snapshots = Literal["anchors", "ends", "every", "marconi"]

Hint = tuple[int, int | None, int, float | None]
"""Start, end, priority and TTL in seconds, for every prompt of a trace."""

_HINT = re.compile(r"(\d{1,9}):(\d{0,9})=(\d{1,3})(?::(\d+(?:\.\d+)?))?")
_GOODPUT = re.compile(r"ttft:(\d+(?:\.\d+)?)")


def parse_hint(text: str) -> Hint:
    """The hint of `START:END=PRIORITY[:SECONDS]`. Raises `ValueError`."""
    match = _HINT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be START:END=PRIORITY[:SECONDS], as in 0:2000=80, got {text!r}")
    start, end, priority, ttl = match.groups()
    return int(start), int(end) if end else None, int(priority), float(ttl) if ttl else None


def _checked(name: str, read: Callable[[], object]) -> None:
    """Raises `FieldError` where reading raises `ValueError`."""
    try:
        read()
    except ValueError as error:
        raise FieldError(name, f"{error}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(Checked):
    """Flags of `prefixcache replay`."""

    traces: Annotated[tuple[Path, ...], MinLen(1)]
    sizes: tuple[str, ...] = flag(
        ("1%..100%",),
        "Pool sizes: blocks, percent of the distinct blocks in a trace's prompts, or a range "
        "in steps of 1, 2 and 5.",
        "Replay",
        metavar="<size>[,<size>...]",
        shown="1%..100%",
        listed=True,
    )
    eviction_policy: tuple[EvictionPolicy, ...] = flag(
        ("lru",), "Eviction policies.", "Replay", shown="lru", listed=True
    )
    hint: tuple[str, ...] = flag(
        (),
        "Retention hint for a range of every prompt's tokens, instead of the trace's own: "
        "START:END=PRIORITY[:SECONDS].",
        "Replay",
        metavar="<hint>",
    )
    token_bytes: ByteSize | None = flag(
        None, "For a model with states: bytes of a token's keys and values.", "Replay"
    )
    snapshot_bytes: ByteSize | None = flag(
        None, "For a model with states: bytes of a snapshot.", "Replay"
    )
    snapshots: tuple[Snapshots, ...] = flag(
        ("anchors",),
        "Where snapshots are kept: as the server does (anchors), at the ends of prompts and "
        "answers, at each block, or as Marconi does (arXiv 2411.19379).",
        "Replay",
        shown="anchors",
        listed=True,
    )
    disk_memory: str | None = flag(
        None,
        "Size of a disk behind the pool, as in --sizes; loads count as faster than computing.",
        "Replay",
        metavar="<size>",
    )
    disk_cache_min_uses: PositiveInt = flag(
        1, "Uses from which a block is written to the disk, its computation included.", "Replay"
    )
    cache_answers: bool = flag(
        False, "Also cache the blocks that answers fill, if the trace has them.", "Replay"
    )
    bounds: bool = flag(
        True,
        "Also show the offline optimum and an unbounded cache, which takes memory for each "
        "block of the trace. Without it, sizes are in blocks.",
        "Replay",
    )
    ttft_model: Path | None = flag(
        None,
        "Predict TTFT from the milliseconds per computed token in this file of `bench --output`.",
        "Replay",
    )
    goodput: str | None = flag(
        None, "TTFT limit for the prediction, in milliseconds.", "Replay", metavar="ttft:<ms>"
    )
    scheduling_policy: SchedulingPolicy = flag(
        "fcfs", "Order of waiting requests in the prediction.", "Replay"
    )
    max_queue_delay: NonNegativeFloat = flag(
        30.0,
        "Longest time in seconds that a request may be overtaken under cache-aware scheduling.",
        "Replay",
    )
    compare: str | None = flag(
        None,
        "Flags of another configuration, in quotes, to compare with this one: "
        "'--sizes 20% --eviction-policy reuse-queue'.",
        "Replay",
    )
    jobs: PositiveInt | None = flag(None, "Threads.", "Replay", shown="a thread for each core")
    output: Path | None = flag(None, "File for the results (JSON).", "Replay")
    plot: Path | None = flag(None, "File for the curves (png, svg or pdf).", "Replay")

    def check_together(self) -> None:
        """Raises `FieldError`."""
        _checked("sizes", self.parsed_sizes)
        _checked("hint", self.parsed_hints)
        _checked("disk_memory", lambda: self.disk_size)
        self._check_disk()
        for name, sizes in (("sizes", self.parsed_sizes()), ("disk_memory", (self.disk_size,))):
            if not self.bounds and any(size is not None and size.is_percent for size in sizes):
                problem = "must be blocks with --no-bounds: percent are of what it leaves out."
                raise FieldError(name, problem)
        if self.goodput is not None and _GOODPUT.fullmatch(self.goodput) is None:
            raise FieldError("goodput", f"must be ttft:MILLISECONDS, got {shown(self.goodput)}.")
        if self.ttft_model is None:
            self._check_without_model()
        elif "marconi" in self.snapshots:
            raise FieldError("snapshots", "must not be marconi with --ttft-model.")
        if (self.token_bytes is None) != (self.snapshot_bytes is None):
            raise FieldError("snapshot_bytes", "and --token-bytes are given together.")
        if self.snapshot_bytes is None and self.snapshots != ("anchors",):
            raise FieldError("snapshots", "needs --snapshot-bytes and --token-bytes.")

    def _check_disk(self) -> None:
        if self.disk_memory is None:
            if self.disk_cache_min_uses > 1:
                raise FieldError("disk_cache_min_uses", "needs --disk-memory.")
            return
        if self.snapshot_bytes is not None:
            raise FieldError("disk_memory", "is not for models with states.")
        if self.ttft_model is not None:
            raise FieldError("disk_memory", "excludes --ttft-model, which knows no time of a load.")

    def _check_without_model(self) -> None:
        if self.goodput is not None:
            raise FieldError("goodput", "is a prediction, which needs --ttft-model.")
        if self.scheduling_policy != "fcfs":
            problem = "needs --ttft-model: nothing waits where computing takes no time."
            raise FieldError("scheduling_policy", problem)

    def parsed_sizes(self) -> tuple[Size, ...]:
        """Raises `ValueError`."""
        return parse_sizes(self.sizes)

    @property
    def disk_size(self) -> Size | None:
        """That of the disk, where there is one. Raises `ValueError`."""
        return None if self.disk_memory is None else parse_size(self.disk_memory)

    def parsed_hints(self) -> tuple[Hint, ...]:
        """Raises `ValueError`."""
        return tuple(map(parse_hint, self.hint))

    @property
    def snapshot_tokens(self) -> float | None:
        """Tokens whose keys and values take as much as a snapshot."""
        if self.snapshot_bytes is None or self.token_bytes is None:
            return None
        return self.snapshot_bytes / self.token_bytes

    @property
    def objective_ms(self) -> float | None:
        """The TTFT up to which a request counts as good."""
        return None if self.goodput is None else float(self.goodput.removeprefix("ttft:"))
