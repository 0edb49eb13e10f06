"""What an operator does to the server meanwhile, and what breaks in it."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from soak.faults import DISK, inject
from soak.lives import Life, Lives, Span
from soak.tally import Tally
from soak.wire import ask

_FAULT_SECONDS = 20
# Requests that a fault has failed hear of it a little later.
_ECHO_SECONDS = 2


class Operator:
    """Gives one command after the other, each kind as often as the others.

    `folders` hold the sets of weights, by name. The cache's size stays within `sizes` blocks.
    `points` are what fails.
    """

    def __init__(
        self,
        lives: Lives,
        tally: Tally,
        folders: dict[str, Path],
        broken: Path,
        sizes: tuple[int, int],
        points: Sequence[str],
        key: str,
        choose: random.Random,
    ) -> None:
        self._lives = lives
        self._tally = tally
        self._folders = folders
        self._broken = broken
        self._sizes = sizes
        self._points = points
        self._key = key
        self._choose = choose
        self._number = 0
        self._left: list[Callable[[Life], Awaitable[None]]] = []

    async def give_one(self) -> None:
        """The next command."""
        life = self._lives.current
        if life is None or life.ending is not None:
            return
        if not self._left:
            self._left = [*[self._fault] * 3, *_commands(self)]
            self._choose.shuffle(self._left)
        command = self._left.pop()
        self._tally.commands[command.__name__.strip("_").replace("_", " ")] += 1
        await command(life)

    async def call(self, life: Life, path: str, body: Any = None, *, wanted: int = 200) -> Any:
        """A command over HTTP; another status than `wanted` is a violation."""
        head, content = await ask(life.port, "POST", path, self._key, body, seconds=120)
        if head.status != wanted and life.ending is None:
            self._tally.blame("a command failed", path=path, status=head.status, body=content)
        return json.loads(content) if content else None

    async def resize(self, life: Life, num_blocks: int) -> None:
        head, content = await ask(
            life.port, "POST", "/prefix_cache/resize", self._key, {"num_blocks": num_blocks}
        )
        if head.status not in (200, 202):
            self._tally.blame("a resize failed", status=head.status, body=content)

    # Commands.

    async def _update_weights(self, life: Life) -> None:
        name = self._choose.choice(sorted(self._folders))
        mode = self._choose.choice(("recompute", "recompute", "abort"))
        body = {"model_path": str(self._folders[name]), "mode": mode}
        life.weights.append(Span(name, time.monotonic()))
        with life.disturbed("weights", mode):
            await self.call(life, "/update_weights_from_disk", body)
            await asyncio.sleep(0.2)  # until the last affected request has been judged
        for span in life.weights[:-1]:
            span.ended = span.ended or time.monotonic()

    async def _update_from_a_broken_file(self, life: Life) -> None:
        await self.call(
            life, "/update_weights_from_disk", {"model_path": str(self._broken)}, wanted=400
        )

    async def _update_from_a_failing_disk(self, life: Life) -> None:
        """Reading breaks off after some weights were replaced: the old ones must come back."""
        name = self._choose.choice(sorted(self._folders))
        fault = self._inject(DISK)
        with life.disturbed("weights"):
            body = {"model_path": str(self._folders[name])}
            head, content = await ask(
                life.port, "POST", "/update_weights_from_disk", self._key, body
            )
        if (head.status < 400 or fault.exists()) and life.ending is None:
            self._tally.blame("a failing disk went unnoticed", status=head.status, body=content)
        fault.unlink(missing_ok=True)

    async def _reset(self, life: Life) -> None:
        await self.call(life, "/reset_prefix_cache")

    async def _resize(self, life: Life) -> None:
        await self.resize(life, self._choose.randint(*self._sizes))

    async def _pause(self, life: Life) -> None:
        await self.call(life, f"/pause?mode={self._choose.choice(('keep', 'recompute'))}")
        await asyncio.sleep(self._choose.uniform(0, 0.5))
        await self.call(life, "/resume")

    async def _sleep(self, life: Life) -> None:
        level = self._choose.choice((1, 1, 2))
        with life.disturbed("sleep", *(["weights"] if level == 2 else [])):
            await self.call(life, f"/sleep?level={level}")
            await asyncio.sleep(self._choose.uniform(0, 0.5))
            await self.call(life, "/wake_up")
            await asyncio.sleep(0.2)

    async def _fault(self, life: Life) -> None:
        """Lets one call fail, and waits until it has."""
        fault = self._inject(self._choose.choice(self._points))
        with life.disturbed("fault"):
            deadline = time.monotonic() + _FAULT_SECONDS
            while fault.exists() and time.monotonic() < deadline and life.ending is None:
                await asyncio.sleep(0.05)
            fault.unlink(missing_ok=True)
            await asyncio.sleep(_ECHO_SECONDS)

    def _inject(self, point: str) -> Path:
        self._number += 1
        self._tally.commands[f"injected: {point}"] += 1
        return inject(self._lives.faults, point, self._number)


def _commands(operator: Operator) -> list[Callable[[Life], Awaitable[None]]]:
    return [
        operator._update_weights,
        operator._update_weights,
        operator._update_from_a_broken_file,
        operator._update_from_a_failing_disk,
        operator._reset,
        operator._resize,
        operator._resize,
        operator._pause,
        operator._sleep,
    ]


def break_copy(folder: Path, target: Path) -> Path:
    """A copy of a model whose weight file ends too early."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return target
