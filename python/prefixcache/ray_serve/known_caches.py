"""What a router knows of the replicas' caches: it reads their KV events, each in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from prefixcache.config.logs import RecurringError
from prefixcache.events.reader import EventReader, Update
from prefixcache.events.wire import DISK_MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Event
from prefixcache.routing import PrefixRouting

logger = logging.getLogger(__name__)

Snapshot = Callable[[], Iterable[bytes]]

# From a failure to a new start.
_AGAIN_SECONDS = 10.0


class KnownCaches:
    """Tells a `PrefixRouting` what replicas store and lose. From any thread."""

    def __init__(self, routing: PrefixRouting) -> None:
        self._routing = routing
        self._readers: dict[str, _CacheReader] = {}

    def read(self, replica: str, endpoints: Mapping[str, Any], snapshot: Snapshot) -> None:
        """Begins to read the events of a replica that the routing has, unless that has begun."""
        if replica not in self._readers:
            self._readers[replica] = _CacheReader(self._routing, replica, endpoints, snapshot)

    def forget(self, replica: str) -> None:
        """Reads no more of a replica."""
        reader = self._readers.pop(replica, None)
        if reader is not None:
            reader.close()

    def knows(self, replica: str) -> bool:
        """Whether all that the replica has cached is known, but for what happened just now."""
        reader = self._readers.get(replica)
        return reader is not None and reader.is_complete


class _CacheReader:
    """Reads the events of one replica until it is closed."""

    def __init__(
        self,
        routing: PrefixRouting,
        replica: str,
        endpoints: Mapping[str, Any],
        snapshot: Snapshot,
    ) -> None:
        self.is_complete = False
        self._routing = routing
        self._replica = replica
        self._new_reader = partial(
            EventReader, endpoints["endpoint"], endpoints["replay_endpoint"], snapshot=snapshot
        )
        self._events = self._new_reader()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-event-reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the reading, in a moment."""
        self._closed.set()
        self._events.close()

    def _run(self) -> None:
        failing = RecurringError(logger, f"The events of {self._replica} cannot be read.")
        while not self._closed.is_set():
            try:
                self._read()
            except Exception as error:  # noqa: BLE001 - until the next start the replica is asked
                if not self._closed.is_set():
                    failing.log(error)
            self.is_complete = False
            if not self._closed.wait(_AGAIN_SECONDS):
                self._events = self._new_reader()
                if self._closed.is_set():  # `close` may have met the one before
                    self._events.close()

    def _read(self) -> None:
        for update in self._events:
            if self._closed.is_set():
                return
            self._take(update)

    def _take(self, update: Update) -> None:
        if update.restarted:
            self._routing.clear(self._replica)
            # Its blocks follow within milliseconds; without it some will never be reported.
            self.is_complete = update.snapshot is not None
        for event in update.events:
            self._note(event)

    def _note(self, event: Event) -> None:
        """One group of layers stands for all: of a model with windows the first one.

        Blocks on a disk are left out: those that are hit are in memory soon.
        """
        if isinstance(event, AllBlocksCleared):
            self._routing.clear(self._replica)
        elif event.group_idx or event.medium == DISK_MEDIUM:
            return
        elif isinstance(event, BlockStored):
            self._routing.stored(self._replica, _hashes(event))
        else:
            self._routing.removed(self._replica, _hashes(event))


def _hashes(event: BlockStored | BlockRemoved) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(event.block_hashes, np.uint64)
