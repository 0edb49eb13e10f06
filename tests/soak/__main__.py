"""Runs the soak; exit status 1 when anything happened that must not."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from soak.answers import Answer
from soak.bank import answers_of, make_bank
from soak.clients import Crowd, Expected, Limits
from soak.commands import Operator, break_copy
from soak.faults import LEAK, POINTS, STORE_POINTS, inject
from soak.lives import Lives, unexpected_tracebacks
from soak.options import Options, parse_options
from soak.report import write_report
from soak.tally import OVERLOAD_ENDS, Tally
from soak.verdict import verdicts
from soak.watch import Kept, Watch
from support.tiny_models import make_checkpoint

ADMIN, KEYS = "admin-key", ("first-key", "second-key", "third-key")
_BANK_SIZE = 126
_USUAL_BLOCKS, _SIZES = 400, (240, 640)
_KEPT_BYTES = 16 << 20
_LIMITS = Limits(read_seconds=5, request_seconds=60, keep_alive_seconds=5)
_DRAIN_SECONDS = 5
# For the interpreter to take itself apart, on a machine that is busy.
_END_SECONDS = 30
_COMMON_FLAGS = ("--port", "0", "--dtype", "float32", "--served-model-name", "soak")
_QUIET_FLAGS = (*_COMMON_FLAGS, "--no-enable-prefix-caching", "--admin-api-key", ADMIN)
# Shares of the time before each of these; what comes after the restarts is one process.
_BEFORE_KILL, _BEFORE_STOP, _BEFORE_OVERLOAD = 0.06, 0.06, 0.4


class Soak:
    """One run. `folder` gets the models, the fault files and the logs."""

    def __init__(self, options: Options, folder: Path) -> None:
        self._options = options
        self._choose = random.Random(options.seed)
        self._folders = {name: folder / name for name in ("first", "second")}
        for seed, path in enumerate(self._folders.values()):
            make_checkpoint(path, options.architecture, seed=seed, max_position_embeddings=2048)
        broken = break_copy(self._folders["first"], folder / "broken")
        for name in ("faults", "logs", "quiet"):
            (folder / name).mkdir()
        self._bank = make_bank(_BANK_SIZE, self._choose)
        self.tally = Tally()
        self._quiet = Lives(self._folders, _QUIET_FLAGS, folder / "faults", folder / "quiet")
        kept = folder / "kv" if options.kv_cache_dir or options.disk_cache else None
        flags = _flags(folder, kept, options)
        limit = _KEPT_BYTES * (options.kv_cache_dir + options.disk_cache)
        self.lives = Lives(self._folders, flags, folder / "faults", folder / "logs")
        self.watch = Watch(self.lives, self.tally, ADMIN, _USUAL_BLOCKS, Kept(kept, limit))
        points = (*POINTS, *(STORE_POINTS if options.disk_cache else ()))
        self._operator = Operator(
            self.lives, self.tally, self._folders, broken, _SIZES, points, ADMIN, self._choose
        )
        # Nothing is commanded while the server is looked at.
        self._command_lock = asyncio.Lock()

    async def run(self) -> None:
        """The quiet server's answers, then all of it."""
        expected: Expected = {name: await self._quiet_answers(name) for name in self._folders}
        self._crowd = Crowd(
            self.lives, self.tally, self._bank, expected, KEYS, self._choose, _LIMITS
        )
        await self.lives.start("first")
        self.tally.begun = time.monotonic()
        self.tally.tell("traffic begins")
        self._crowd.may_ask.set()
        options = self._options
        background = [
            asyncio.create_task(self._arrivals()),
            asyncio.create_task(self._every(options.sample_every, self._sample)),
            asyncio.create_task(self._every(options.command_every, self._command)),
        ]
        try:
            await self._story()
        finally:
            for task in background:
                task.cancel()
            ended = await asyncio.gather(*background, return_exceptions=True)
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                self.tally.blame("the soak broke", error=error)

    def kill_left_over(self) -> None:
        """For when the soak itself breaks."""
        self.lives.kill_left_over()
        self._quiet.kill_left_over()

    async def _story(self) -> None:
        """What happens when."""
        await self._traffic(_BEFORE_KILL)
        await self._restart(self.lives.kill, "kill -9", {-9})
        await self._traffic(_BEFORE_STOP)
        await self._restart(self.lives.stop, "SIGTERM in mid-stream", {0})
        if self._options.plant_leak:
            inject(self.lives.faults, LEAK, 0)
        await self._traffic(_BEFORE_OVERLOAD)
        await self._overload()
        await self._traffic(1 - _BEFORE_KILL - _BEFORE_STOP - _BEFORE_OVERLOAD)
        await self._rest(trim=True)
        self.tally.tell("SIGTERM at the end")
        await self._stop(self.lives.stop, {0})

    async def _traffic(self, share: float) -> None:
        """Goes on with the traffic for so much of the time, with rests between."""
        goal = time.monotonic() + share * self._options.seconds
        while (left := goal - time.monotonic()) > 0:
            pause = self._options.quiet_every
            await asyncio.sleep(min(left, pause))
            if left > pause:
                await self._rest()

    async def _overload(self) -> None:
        """All clients at once, as fast as they are let."""
        options = self._options
        self.tally.tell(f"overload: {options.clients} clients without a pause")
        until = time.monotonic() + options.overload_seconds
        await asyncio.gather(*(self._crowd.insist(until) for _ in range(options.clients)))
        self.tally.tell(OVERLOAD_ENDS)
        await self._rest()

    async def _rest(self, *, trim: bool = False) -> None:
        async with self._command_lock:
            await self.watch.rest(self._crowd, self._operator, trim=trim)

    async def _restart(
        self, end: Callable[[], Awaitable[int]], what: str, wanted: set[int]
    ) -> None:
        self.tally.tell(what)
        await self._stop(end, wanted)
        await self.lives.start("first")
        self.tally.tell("restarted")

    async def _stop(self, end: Callable[[], Awaitable[int]], wanted: set[int]) -> None:
        begun = time.monotonic()
        status = await end()
        seconds = time.monotonic() - begun
        if status not in wanted or seconds > _DRAIN_SECONDS + _END_SECONDS:
            self.tally.blame("a bad end", status=status, seconds=seconds)
        for line in unexpected_tracebacks(self.lives.past[-1].log):
            self.tally.blame("an unexpected traceback in the log", line=line)

    async def _arrivals(self) -> None:
        """Clients come by chance, at the same rate whatever the server does."""
        visits: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(self._choose.expovariate(self._options.rate / 1.6))
            if self._crowd.num_active < self._options.clients:
                task = asyncio.create_task(self._crowd.visit())
                visits.add(task)
                task.add_done_callback(visits.discard)

    async def _sample(self) -> None:
        await self.watch.sample(self._crowd)

    async def _command(self) -> None:
        async with self._command_lock:
            life = self.lives.current
            try:
                await self._operator.give_one()
            except Exception as error:  # noqa: BLE001 - reported, and the soak goes on
                if life is not None and life.ending is None:
                    self.tally.blame("a command broke", error=error)

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await work()

    async def _quiet_answers(self, name: str) -> list[Answer]:
        """What the weights of that name say without a cache, one request at a time."""
        life = await self._quiet.start(name)
        try:
            return await answers_of(life.port, ADMIN, self._bank)
        finally:
            await self._quiet.stop()


def _flags(folder: Path, kept: Path | None, options: Options) -> list[str | Path]:
    limits = {
        "max-num-seqs": 16,
        "max-num-batched-tokens": 256,
        "max-queue": 64,
        "max-running-per-key": 10,
        "max-waiting-per-key": 24,
        "request-timeout": _LIMITS.request_seconds,
        "timeout-write": _LIMITS.read_seconds,
        "num-blocks": _USUAL_BLOCKS,
        "kv-cache-max-memory": "1GiB",
        "limit-concurrency": 2048,
        "timeout-read": _LIMITS.read_seconds,
        "timeout-keep-alive": _LIMITS.keep_alive_seconds,
        "drain-seconds": _DRAIN_SECONDS,
        "admin-api-key": ADMIN,
        "allowed-model-dirs": folder,
    }
    if options.disk_cache:
        limits |= {"disk-cache-dir": kept, "disk-cache-memory": _KEPT_BYTES}
        limits["disk-cache-min-uses"] = 1
    if options.kv_cache_dir:
        limits |= {"kv-cache-dir": kept, "kv-cache-dir-size": _KEPT_BYTES}
        limits["kv-cache-max-memory"] = _KEPT_BYTES * 3 // 4
    flags = [part for name, value in limits.items() for part in (f"--{name}", str(value))]
    keys = [part for key in KEYS for part in ("--api-key", key)]
    return [*_COMMON_FLAGS, *flags, *keys, "--kv-cache-metrics"]


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(options, Path(name))
        try:
            asyncio.run(soak.run())
        finally:
            soak.kill_left_over()
            if options.keep is not None:
                shutil.copytree(Path(name) / "logs", options.keep, dirs_exist_ok=True)
    checks = verdicts(soak.tally, soak.watch)
    for check in checks:
        print(f"{'ok  ' if check.holds else 'FAIL'}  {check.claim}: {check.found}", flush=True)
    if options.report is not None:
        write_report(options, soak.tally, soak.watch, checks)
    sys.exit(not all(check.holds for check in checks))


if __name__ == "__main__":
    main()
