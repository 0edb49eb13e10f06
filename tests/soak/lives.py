"""The processes of the server, one after the other, and what was done to each, and when."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from soak.faults import INJECTED

_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_COMMAND = (sys.executable, "-m", "soak.faulty_server")
_START_SECONDS = 120
_END_SECONDS = 60


@dataclass(slots=True)
class Span:
    """From when to when something was so; open at its end while it goes on."""

    kind: str
    begun: float
    ended: float | None = None

    def meets(self, begun: float, ended: float) -> bool:
        return self.begun <= ended and (self.ended is None or begun <= self.ended)


@dataclass(slots=True)
class Life:
    """One process. `weights` tell which folder's may have been in use, `disturbances` what else."""

    process: subprocess.Popen[str]
    port: int
    log: Path
    begun: float
    weights: list[Span]
    disturbances: list[Span] = field(default_factory=list)
    ending: float | None = None
    was_killed: bool = False
    num_served: int = 0

    def weights_between(self, begun: float, ended: float) -> set[str]:
        return {span.kind for span in self.weights if span.meets(begun, ended)}

    def was_disturbed(self, kind: str, begun: float, ended: float) -> bool:
        return any(span.kind == kind and span.meets(begun, ended) for span in self.disturbances)

    @contextmanager
    def disturbed(self, *kinds: str) -> Iterator[None]:
        """While this is open, and not after, requests may notice it."""
        spans = [Span(kind, time.monotonic()) for kind in kinds]
        self.disturbances += spans
        try:
            yield
        finally:
            for span in spans:
                span.ended = time.monotonic()

    def is_over(self) -> bool:
        return self.process.poll() is not None


class Lives:
    """Starts, stops and kills the server of one of the `folders`, which are models by name.

    `faults` is the folder of its faults, `logs` gets a log of each process.
    """

    def __init__(
        self, folders: Mapping[str, Path], flags: Sequence[str | Path], faults: Path, logs: Path
    ) -> None:
        self._folders = folders
        self._flags = flags
        self._logs = logs
        self.faults = faults
        self.past: list[Life] = []
        self.current: Life | None = None

    async def start(self, weights: str) -> Life:
        """Raises `RuntimeError` with the end of the log when the server does not come up."""
        for file in self.faults.iterdir():
            file.unlink()
        log = self._logs / f"server-{len(self.past) + 1}.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*_COMMAND, self.faults, "serve", self._folders[weights], *self._flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        port = await asyncio.wait_for(asyncio.to_thread(_port_of, process), _START_SECONDS)
        if port is None:
            raise RuntimeError(f"The server did not start:\n{log.read_text()[-2000:]}")
        now = time.monotonic()
        self.current = Life(process, port, log, now, [Span(weights, now)])
        return self.current

    async def stop(self) -> int:
        """Ends it by SIGTERM; its exit status."""
        return await self._end(signal.SIGTERM)

    async def kill(self) -> int:
        """Ends it by SIGKILL."""
        assert self.current is not None
        self.current.was_killed = True
        return await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals) -> int:
        life = self.current
        assert life is not None
        life.ending = time.monotonic()
        life.process.send_signal(number)
        status = await asyncio.to_thread(life.process.wait, _END_SECONDS)
        if life.process.stdout is not None:
            life.process.stdout.close()
        self.past.append(life)
        self.current = None
        return status

    def kill_left_over(self) -> None:
        """For when the soak itself fails."""
        if self.current is not None:
            self.current.process.kill()
            self.current.process.wait()


def unexpected_tracebacks(log: Path) -> list[str]:
    """The last lines of tracebacks, with those they were raised from, that no fault explains."""
    chains: list[list[str]] = []
    in_traceback, is_chained = False, False
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("Traceback"):
            if not is_chained:
                chains.append([])
            in_traceback, is_chained = True, False
        elif in_traceback and line and not line.startswith((" ", "\t")):
            in_traceback = False
            chains[-1].append(line)
        elif line in _CHAINED:
            is_chained = True
    return [chain[-1] for chain in chains if not any(INJECTED in line for line in chain)]


def _port_of(process: subprocess.Popen[str]) -> int | None:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"curl http://127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    return None
