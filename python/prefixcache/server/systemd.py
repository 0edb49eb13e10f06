"""What the server reports to systemd, if started with `Type=notify`; see sd_notify(3)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping

from prefixcache.config.logs import RecurringError
from prefixcache.exceptions import EngineDeadError

logger = logging.getLogger(__name__)


class Notifier:
    """Tells systemd of the server's start, its end, and that its step loop is alive.

    `loop_passes` returns once the step loop has come round, and raises `EngineDeadError` when it
    never will again: nothing is reported then, and systemd restarts the server after `WatchdogSec`.
    Does nothing where `environment` names no socket.
    """

    def __init__(
        self,
        loop_passes: Callable[[], Awaitable[None]],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._loop_passes = loop_passes
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog_seconds = _watchdog_seconds(environment)
        self._watchdog: asyncio.Task[None] | None = None

    def ready(self, status: str) -> None:
        """The server answers from now on. Called in the event loop, which then tells the rest."""
        self._report(f"READY=1\nSTATUS={status}")
        if self._address and self._watchdog_seconds is not None:
            self._watchdog = asyncio.create_task(self._keep_alive(self._watchdog_seconds))

    def stopping(self) -> None:
        """The server takes nothing more. The watchdog goes on until open answers have ended."""
        self._report("STOPPING=1\nSTATUS=open answers end")

    async def _keep_alive(self, seconds: float) -> None:
        """Three times in the time that systemd waits."""
        failing = RecurringError(logger, "It is not known whether the step loop is alive.")
        while True:
            try:
                await self._loop_passes()
                self._report("WATCHDOG=1")
            except EngineDeadError as error:
                self._report(f"STATUS={error}".splitlines()[0])
                return
            except Exception as error:  # noqa: BLE001 - logged
                failing.log(error)
            await asyncio.sleep(seconds / 3)

    def _report(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(state.encode(), self._address)
        except OSError as error:
            logger.warning("%s could not be reported to systemd: %s", state.splitlines()[0], error)


def _address(name: str) -> str:
    """Where `@` stands for the null byte of a socket without a file."""
    return f"\0{name[1:]}" if name.startswith("@") else name


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """None where systemd does not wait for this process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    is_meant = environment.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
    return int(microseconds) / 1e6 if is_meant and microseconds.isdecimal() else None
