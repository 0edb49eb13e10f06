"""The publisher: takes events from the cache, in a background thread, and sends them as batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from prefixcache.config.logs import RecurringError
from prefixcache.events.config import KVEventsConfig
from prefixcache.events.form import CacheSnapshot, WireForm
from prefixcache.events.sockets import EventSockets
from prefixcache.events.wire import DISK_MEDIUM, EventBatch, encode
from prefixcache.kv.events import CacheEvents, CoreEvent
from prefixcache.metrics import PREFIX

logger = logging.getLogger(__name__)

# How long an event waits at most before it is sent.
_PERIOD = 0.01
# So that turning a batch into bytes keeps the interpreter from the step loop for a fraction of a
# millisecond.
_BLOCKS_AT_ONCE = 512
# Batches of a replay between two looks for new events.
_REPLAYED_AT_ONCE = 64
_MOST_REPLAYS = 256
# The most memory of batches that can be sent again.
_MOST_BUFFER_BYTES = 256 * 2**20
_CLOSE_SECONDS = 5


class EventPublisher:
    """Publishes what a cache stores and removes, from a thread of its own, until it is closed.

    `model` is the name that snapshots tell. Batches are numbered from 0 on.
    """

    def __init__(
        self, events: CacheEvents, sockets: EventSockets, config: KVEventsConfig, *, model: str
    ) -> None:
        self._events = events
        self._sockets = sockets
        self._model = model
        self._form = WireForm(events.block_size, events.groups)
        self._buffer = _ReplayBuffer(config.buffer_steps)
        # Who is sent what was sent before, and how far that is: the next sequence.
        self._replays: dict[bytes, int] = {}
        self._next = 0
        self._num_blocks = {"stored": 0, "removed": 0, "cleared": 0}
        self._num_replays = 0
        self._failing = RecurringError(logger, "KV events could not be published.")
        self._is_failing = False
        self._publishing = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    @property
    def endpoints(self) -> dict[str, str | None]:
        """Where consumers connect to."""
        sockets = self._sockets
        return {"endpoint": sockets.endpoint, "replay_endpoint": sockets.replay_endpoint}

    def start(self) -> None:
        """Begins to publish."""
        self._thread.start()

    def snapshot(self) -> CacheSnapshot:
        """What is cached now, once all batches so far are sent. From any thread; takes a while."""
        with self._publishing:
            self._publish_all()
            # The cache's thread may have received more meanwhile, in the place of this reader.
            while (copy := self._events.snapshot()) is None:
                self._publish_all()
            return CacheSnapshot(
                copy,
                self._events.on_disk(),
                self._form,
                sequence=self._next - 1,
                root_hash=self._events.root_hash,
                model=self._model,
            )

    def families(self) -> Iterator[Metric]:
        """What `/metrics` tells of events. From any thread."""
        yield GaugeMetricFamily(
            PREFIX + "kv_events_publishing",
            "1 while KV events are published, 0 while that fails and once it has stopped.",
            value=int(self._thread.is_alive() and not self._is_failing),
        )
        blocks = CounterMetricFamily(
            PREFIX + "kv_event_blocks", "Blocks that KV events reported.", labels=["type"]
        )
        for kind in ("stored", "removed"):
            blocks.add_metric([kind], self._num_blocks[kind])
        yield blocks
        counters = {
            "batches": ("Batches of KV events that were published.", self._next),
            "replays": ("Replays of KV events that were asked for.", self._num_replays),
            "overflows": (
                "Batches of KV events at which a consumer had hwm waiting, and began to miss.",
                self._sockets.num_overflows,
            ),
        }
        for name, (documentation, value) in counters.items():
            yield CounterMetricFamily(PREFIX + "kv_event_" + name, documentation, value=value)

    def close(self) -> None:
        """Sends what there is, and ends."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._try(self._go_round)
        self._try(self._publish_rest)

    def _try(self, action: Callable[[], None]) -> None:
        """Whatever fails is tried again a moment later, and logged once."""
        try:
            action()
            self._is_failing = False
        except Exception as error:  # noqa: BLE001 - logged
            self._is_failing = True
            self._failing.log(error)
            self._closing.wait(_PERIOD)

    def _go_round(self) -> None:
        self._answer_replays()
        with self._publishing:
            is_idle = not self._publish()
        if is_idle:
            self._sockets.wait(_PERIOD)

    def _publish_rest(self) -> None:
        with self._publishing:
            self._publish_all()

    def _publish_all(self) -> None:
        while self._publish():
            pass

    def _publish(self) -> bool:
        """Sends the oldest events as a batch; whether there were any."""
        on_disk = self._events.take_of_disk(_BLOCKS_AT_ONCE)
        events = self._events.take(_BLOCKS_AT_ONCE)
        if not on_disk and not events:
            return False
        sequence, self._next = self._next, self._next + 1
        try:
            self._send(sequence, on_disk, events)
        except Exception:
            self._buffer.skip()
            raise
        return True

    def _send(
        self, sequence: int, on_disk: Sequence[CoreEvent], events: Sequence[CoreEvent]
    ) -> None:
        sent = [self._form.event(event, DISK_MEDIUM) for event in on_disk]
        sent += [self._form.event(event) for event in events]
        payload = encode(EventBatch(time.time(), sent, 0))
        for kind, _, _, hashes, _ in [*on_disk, *events]:
            self._num_blocks[kind] += len(hashes)
            if kind == "cleared":
                self._events.report_disk_again()
        self._sockets.send(sequence, payload)
        self._buffer.append(payload)

    def _answer_replays(self) -> None:
        for client, start in self._sockets.replay_requests():
            if client in self._replays or len(self._replays) < _MOST_REPLAYS:
                self._num_replays += 1
                self._replays[client] = start
        sent = {client: self._go_on(client, start) for client, start in self._replays.items()}
        self._replays = {client: start for client, start in sent.items() if start is not None}

    def _go_on(self, client: bytes, start: int) -> int | None:
        """Sends the next part of a replay, as far as its client takes it; None at its end."""
        with self._publishing:
            batches = self._buffer.batches(start, _REPLAYED_AT_ONCE)
        try:
            for sequence, payload in batches:
                if not self._sockets.replay(client, sequence, payload):
                    return sequence
                start = sequence + 1
            is_over = len(batches) < _REPLAYED_AT_ONCE and self._sockets.end_replay(client)
        except ConnectionError:
            return None
        return None if is_over else start


class _ReplayBuffer:
    """The last `most` batches, up to a bound of memory. One thread at a time."""

    def __init__(self, most: int) -> None:
        self._batches: deque[bytes] = deque()
        self._most = most
        self._bytes = 0
        self._next = 0

    def append(self, payload: bytes) -> None:
        """Adds the next batch, in the place of the oldest ones."""
        self._batches.append(payload)
        self._bytes += len(payload)
        self._next += 1
        while len(self._batches) > self._most or self._bytes > _MOST_BUFFER_BYTES:
            self._bytes -= len(self._batches.popleft())

    def skip(self) -> None:
        """The next batch is lost. None before it is kept, so that readers of them begin again."""
        self._batches.clear()
        self._bytes = 0
        self._next += 1

    def batches(self, start: int, most: int) -> list[tuple[int, bytes]]:
        """Up to `most` batches from the sequence `start` on, or from the first that is left."""
        first = self._next - len(self._batches)
        begin = min(max(start, first), self._next)  # peers may ask for any
        batches = islice(self._batches, begin - first, begin - first + most)
        return list(zip(range(begin, begin + most), batches, strict=False))
