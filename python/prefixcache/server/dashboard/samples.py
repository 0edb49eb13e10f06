"""The last ten minutes of an engine, kept whether or not a page is open."""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

from prefixcache.config.logs import RecurringError
from prefixcache.exceptions import EngineDeadError
from prefixcache.server.dashboard.rates import POINT_FIELDS, Look, look_at, point

if TYPE_CHECKING:
    from prefixcache.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

_PERIOD = 5.0
NUM_SAMPLES = 120


class Samples:
    """A point of the charts for every five seconds, the last 120 of them: about 25 KB.

    One thread at a time calls `add`, any thread `points`.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._before: Look | None = None
        self._rows: deque[array[float]] = deque(maxlen=NUM_SAMPLES)

    async def keep(self) -> None:
        """Adds points until it is cancelled or the engine has died; goes on after a failure."""
        failed = RecurringError(logger, "A point of the dashboard's history could not be added.")
        while True:
            try:
                await asyncio.to_thread(self.add)
            except EngineDeadError:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, a later point may come
                failed.log(error)
            await asyncio.sleep(_PERIOD)

    def add(self) -> None:
        """Adds what happened since the last call; the first call adds nothing."""
        before = self._before
        self._before = now = look_at(self._engine)
        if before is not None and now.time > before.time:
            shown = point(before, now, self._engine.metrics.time_to_first_token.bounds)
            self._rows.append(
                array("d", (math.nan if value is None else value for value in shown.values()))
            )

    def points(self) -> list[dict[str, Any]]:
        """The points, the oldest first."""
        return [
            {
                name: None if math.isnan(value) else value
                for name, value in zip(POINT_FIELDS, row, strict=True)
            }
            for row in self._rows.copy()
        ]
