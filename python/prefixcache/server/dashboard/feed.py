"""Events for all open pages: one loop makes them, and none runs while no page is open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

# Making events takes at most one fiftieth of the time, however large the cache is.
_LEAST_REST = 50


@dataclass(slots=True)
class Feed:
    """Gives each page what `look` returned last, by name, every `period` seconds.

    `greet` makes the first event of a page. A page that reads more slowly than events come misses
    some, and one that does not read at all is cut by the connection's time to write. The pages end
    when `is_stopping`. One event loop uses it; `look` runs in a thread, never twice at once.
    """

    look: Callable[[], Mapping[str, bytes]]
    greet: Callable[[], bytes]
    is_stopping: Callable[[], bool]
    period: float = 1.0
    most_pages: int = 16
    _pages: set[_Page] = field(default_factory=set["_Page"])
    _loop: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether no more pages may be opened."""
        return len(self._pages) >= self.most_pages

    @property
    def is_running(self) -> bool:
        """Whether events are being made."""
        return self._loop is not None and not self._loop.done()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Those of one page; none where `is_full`."""
        if self.is_full:
            return
        page = _Page()
        self._pages.add(page)
        try:
            if not self.is_running:
                self._loop = asyncio.create_task(self._run())
            yield self.greet()
            while text := await page.next():
                yield text
        finally:
            self._pages.discard(page)

    async def _run(self) -> None:
        try:
            while self._pages and not self.is_stopping():
                events, spent = await asyncio.to_thread(self._look_timed)
                for page in self._pages:
                    page.offer(events)
                await asyncio.sleep(max(self.period, _LEAST_REST * spent))
        except Exception:
            logger.exception("The pages of the dashboard end.")
        finally:
            for page in self._pages:
                page.end()

    def _look_timed(self) -> tuple[Mapping[str, bytes], float]:
        """The events, and the CPU seconds that they took: on a busy machine the clock says more."""
        begun = time.thread_time()
        return self.look(), time.thread_time() - begun


class _Page:
    """What one page has still to be sent: of each event the last."""

    def __init__(self) -> None:
        self._waiting: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._has_ended = False

    def offer(self, events: Mapping[str, bytes]) -> None:
        self._waiting.update(events)
        self._changed.set()

    def end(self) -> None:
        self._has_ended = True
        self._changed.set()

    async def next(self) -> bytes:
        """What has come since the last call; empty at the end."""
        await self._changed.wait()
        if self._has_ended:
            return b""
        text = b"".join(self._waiting.values())
        self._waiting.clear()
        self._changed.clear()
        return text
