"""What is measured of a server: its process, its metrics, and what is left when it is quiet."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from soak.census import Census, ask_census, census_of_process
from soak.clients import Crowd
from soak.commands import Operator
from soak.lives import Life, Lives
from soak.tally import Tally
from soak.wire import BadReplyError, ask

_BUSY, _LEAKED = LEFT_OVER = ("an idle server has requests or blocks", "blocks are lost")
# The server hears of a client who left when it writes to it or reads from it.
_SETTLE_SECONDS = 15
_CENSUS_SECONDS = 30
_SETTLED = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}


@dataclass(frozen=True, slots=True)
class _Seen:
    """A process of the server at a moment. Memory in bytes."""

    at: float
    life: int
    rss: int
    mapped: int
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample(_Seen):
    """The server under traffic; `health_seconds` is what a probe took."""

    running: int
    waiting: int
    usage: float
    queried: int
    hits: int
    health_seconds: float
    active_clients: int
    load_average: float


@dataclass(frozen=True, slots=True)
class Rest(_Seen):
    """The server when it has nothing to do, with its cache reset and at its usual size."""

    served: int
    census: Census = field(repr=False)


@dataclass(slots=True)
class Kept:
    """The folder of the cache, if there is one: its limit, and the most seen, in bytes.

    `disk` has what each process said last of its disk tier.
    """

    folder: Path | None
    limit: int
    most: int = 0
    disk: dict[int, dict[str, float]] = field(default_factory=dict)

    def look(self) -> int:
        """Bytes on the disk."""
        size = 0
        for file in [] if self.folder is None else self.folder.glob("*"):
            with suppress(FileNotFoundError):  # A clear removes one.
                size += file.stat().st_blocks * 512
        self.most = max(self.most, size)
        return size

    def note(self, life: int, page: dict[str, float]) -> None:
        """Takes from a page of metrics what it says of a disk tier."""
        names = [name for name in page if name.startswith("disk_") and name.endswith("_total")]
        if names:
            self.disk[life] = {name: page[name] for name in names}

    def disk_counts(self) -> Counter[str]:
        """The counters of the disk tiers of all processes."""
        total = Counter[str]()
        for counts in self.disk.values():
            total.update({name[: -len("_total")]: int(value) for name, value in counts.items()})
        return total


class Watch:
    """Samples the server of now, and looks at what is left over when its clients pause."""

    def __init__(self, lives: Lives, tally: Tally, key: str, usual_blocks: int, kept: Kept) -> None:
        self._lives = lives
        self._tally = tally
        self._key = key
        self._usual_blocks = usual_blocks
        self._num_counted = 0
        self.kept = kept
        self.samples: list[Sample] = []
        self.rests: list[Rest] = []
        self.trimmed: Rest | None = None

    async def sample(self, crowd: Crowd) -> None:
        """One more sample; none while there is no server to ask."""
        life = self._lives.current
        if life is None or life.ending is not None:
            return
        if (size := self.kept.look()) > self.kept.limit:
            self._tally.blame("the folder of the cache is too large", size=size)
        try:
            process = psutil.Process(life.process.pid)
            begun = time.monotonic()
            await ask(life.port, "GET", "/health", "")
            seconds = time.monotonic() - begun
            page = await self._metrics(life)
            self.kept.note(len(self._lives.past), page)
        except (BadReplyError, OSError, asyncio.TimeoutError, psutil.Error) as error:
            if life.ending is None:
                self._tally.blame("the server does not tell how it is", error=error)
            return
        self.samples.append(
            Sample(
                at=self._tally.now,
                life=len(self._lives.past),
                **_of_process(process),
                mapped=int(page["kv_cache_mapped_bytes"]),
                running=int(page["num_requests_running"]),
                waiting=int(page["num_requests_waiting"]),
                usage=page["kv_cache_usage_perc"],
                queried=int(page["prefix_cache_queries_total"]),
                hits=int(page["prefix_cache_hits_total"]),
                health_seconds=seconds,
                active_clients=crowd.num_active,
                load_average=os.getloadavg()[0],
            )
        )

    async def rest(self, crowd: Crowd, operator: Operator, *, trim: bool = False) -> None:
        """Lets the clients pause and counts what is left over; `trim` counts again after a trim."""
        crowd.may_ask.clear()
        crowd.hurry.set()
        try:
            while crowd.num_active:
                await asyncio.sleep(0.02)
            life = self._lives.current
            if life is not None and life.ending is None:
                self.rests.append(await self._look(life, operator))
                if trim:
                    self.trimmed = await self._count(life, trim=True)
        finally:
            crowd.hurry.clear()
            crowd.may_ask.set()

    async def _look(self, life: Life, operator: Operator) -> Rest:
        await self._expect_settled(life)
        await operator.resize(life, self._usual_blocks)
        await operator.call(life, "/reset_prefix_cache")
        await self._expect_no_blocks(life)
        return await self._count(life)

    async def _count(self, life: Life, *, trim: bool = False) -> Rest:
        page = await self._metrics(life)
        process = psutil.Process(life.process.pid)
        resident = _of_process(process)
        self._num_counted += 1
        answer = ask_census(self._lives.faults, self._num_counted, trim=trim)
        deadline = time.monotonic() + _CENSUS_SECONDS
        while not answer.exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        census = json.loads(answer.read_text()) | census_of_process(process.pid)
        answer.unlink()
        return Rest(
            at=self._tally.now,
            life=len(self._lives.past),
            mapped=int(page["kv_cache_mapped_bytes"]),
            served=life.num_served,
            census=census,
            **(_of_process(process) if trim else resident),
        )

    async def _expect_settled(self, life: Life) -> None:
        deadline = time.monotonic() + _SETTLE_SECONDS
        left: dict[str, float] = {}
        while time.monotonic() < deadline:
            page = await self._metrics(life)
            left = {name: page[name] for name, none in _SETTLED.items() if page[name] != none}
            if not left:
                return
            await asyncio.sleep(0.1)
        self._tally.blame(_BUSY, left=left)

    async def _expect_no_blocks(self, life: Life) -> None:
        _, content = await ask(life.port, "GET", "/prefix_cache/stats", self._key)
        stats: dict[str, Any] = json.loads(content)
        leaked = stats["blocks_in_use"], stats["num_blocks"] - 1 - stats["free_blocks"]
        if leaked != (0, 0) or stats["num_blocks"] != self._usual_blocks:
            self._tally.blame(_LEAKED, stats=stats)

    async def _metrics(self, life: Life) -> dict[str, float]:
        head, content = await ask(life.port, "GET", "/metrics", self._key)
        if head.status != 200:  # It stops.
            raise BadReplyError(content)
        return {
            sample.name.partition(":")[2]: sample.value
            for family in text_string_to_metric_families(content.decode())
            for sample in family.samples
        }


def _of_process(process: psutil.Process) -> dict[str, int]:
    with process.oneshot():
        return {
            "rss": process.memory_info().rss,
            "files": process.num_fds(),
            "threads": process.num_threads(),
        }


def longest_life(rests: Sequence[Rest]) -> list[Rest]:
    """Those of the process that was looked at most often."""
    lives = [rest.life for rest in rests]
    longest = max(lives, key=lives.count)
    return [rest for rest in rests if rest.life == longest]
