"""What systemd is sent, over a socket as its own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import StepGate
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.server.systemd import Notifier
from support.serving import until

WATCHDOG = "WATCHDOG=1"


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        yield receiver


def sent_to(systemd: socket.socket) -> list[str]:
    found: list[str] = []
    with suppress(BlockingIOError):
        while True:
            found.append(systemd.recv(4096).decode())
    return found


async def hear(systemd: socket.socket) -> str:
    return (await asyncio.get_running_loop().sock_recv(systemd, 4096)).decode()


async def test_the_watchdog_hears_nothing_while_the_step_loop_hangs(systemd: socket.socket) -> None:
    built, runner, _ = make_engine()
    gate, engine = StepGate(runner), AsyncEngine(built)
    # Three times in 30 ms.
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "30000"}
    begun, passed = [], []

    async def loop_passes() -> None:
        begun.append(1)
        await engine.loop_passes()
        passed.append(1)

    notifier = Notifier(loop_passes, environment)
    notifier.ready("well")
    assert await hear(systemd) == "READY=1\nSTATUS=well"
    assert [await hear(systemd) for _ in range(3)] == [WATCHDOG] * 3
    gate.hold_after()
    async with aclosing(engine.generate(make_request())) as outputs:
        asking = asyncio.ensure_future(anext(outputs))
        await gate.until_held()
        await until(lambda: len(begun) > len(passed))
        assert len(sent_to(systemd)) + 3 == len(passed)
        gate.open()
        await asking
        assert await hear(systemd) == WATCHDOG
    notifier.stopping()
    await engine.shutdown()
    sent = await hear(systemd)
    while sent == WATCHDOG:
        sent = await hear(systemd)
    assert sent.startswith("STOPPING=1")
    while sent.startswith(("STOPPING", WATCHDOG)):
        sent = await hear(systemd)
    assert sent == "STATUS=The engine was shut down."


async def test_the_watchdog_goes_on_after_a_failure_that_nobody_expected(systemd, caplog):
    failures = iter([OSError("once"), OSError("once")])

    async def loop_passes() -> None:
        if (failure := next(failures, None)) is not None:
            raise failure

    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "30000"}
    Notifier(loop_passes, environment).ready("well")
    assert (await hear(systemd)).startswith("READY=1")
    assert await hear(systemd) == WATCHDOG
    assert caplog.text.count("not known whether the step loop is alive") == 1


@pytest.mark.parametrize("pid", ["", "1"])
async def test_only_the_process_that_is_meant_is_watched(systemd: socket.socket, pid: str) -> None:
    asked = asyncio.Event()

    async def loop_passes() -> None:
        asked.set()

    environment = {
        "NOTIFY_SOCKET": systemd.getsockname(),
        "WATCHDOG_USEC": "1000000",
        "WATCHDOG_PID": pid or str(os.getpid()),
    }
    Notifier(loop_passes, environment).ready("well")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asked.is_set() == (not pid)


async def test_nothing_is_sent_without_systemd(systemd: socket.socket) -> None:
    notifier = Notifier(lambda: asyncio.sleep(0), {"WATCHDOG_USEC": "30000"})
    notifier.ready("well")
    notifier.stopping()
    await asyncio.sleep(0)
    assert sent_to(systemd) == []
