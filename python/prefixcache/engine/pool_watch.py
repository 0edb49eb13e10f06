"""A thread that lets an engine's cache take its size while nobody calls the engine."""

from __future__ import annotations

import logging
import threading
import weakref

from prefixcache.config.logs import SHOWS_ERROR, RecurringError
from prefixcache.engine.control import Control
from prefixcache.engine.engine import Engine
from prefixcache.exceptions import EngineDeadError

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""Seconds between two looks at what is to be done."""


class PoolWatch:
    """A thread that asks an engine's `SelfSizing` once a second and does what it says.

    It looks during steps and waits for none unless something is to be done. While somebody else
    has `turn`, he steps the engine and calls `adjust_pool`. The engine may be collected; that ends
    it, as does `close` or the engine's death.
    """

    def __init__(
        self, engine: Engine, control: Control, turn: threading.RLock | None = None
    ) -> None:
        self._engine, self._control = weakref.ref(engine), weakref.ref(control)
        self._turn = turn or threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefixcache-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; what it does now is done first."""
        self._closing.set()

    def _run(self) -> None:
        failing = RecurringError(logger, "The KV cache keeps its size for now.", SHOWS_ERROR)
        while not self._closing.wait(WATCH_SECONDS):
            engine, control = self._engine(), self._control()
            if engine is None or control is None:
                return
            if self._turn.acquire(blocking=False):
                try:
                    adjust_pool(engine, control)
                except EngineDeadError:
                    return
                except Exception as error:  # noqa: BLE001 - logged
                    failing.log(error)
                finally:
                    self._turn.release()
            del engine, control


def adjust_pool(engine: Engine, control: Control) -> None:
    """Does what the engine's `SelfSizing` says now, unless the engine sleeps or is updated."""
    sizing = engine.self_sizing
    if sizing is None or control.is_sleeping or control.is_updating:
        return
    change = sizing.choose(engine.idle_seconds)
    if change is not None:
        control.adjust_pool(change)
