"""Reads the KV events of one replica in their order, so that nothing is lost unnoticed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from prefixcache.events.wire import (
    END_OF_REPLAY,
    Event,
    SnapshotEnd,
    SnapshotHeader,
    decode_batch,
    decode_sequence,
    decode_snapshot,
    encode_sequence,
)

_logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 0.25
"""How often a reader that waits looks whether it was closed."""

_HEARTBEAT_MILLISECONDS = 5_000
"""A connection that is silent for twice this long is opened again, and checked for lost batches."""


@dataclass(frozen=True, slots=True)
class Update:
    """Events that follow what was read before; with them the state is that after `sequence`.

    With `restarted`, forget what was known of the replica first. `snapshot` is then the header of
    the snapshot whose blocks follow in updates of the same `sequence`; None where there is none:
    what follows is then a part of what is cached.
    """

    sequence: int
    events: Sequence[Event] = ()
    restarted: bool = False
    snapshot: SnapshotHeader | None = None


@dataclass(frozen=True, slots=True)
class _Message:
    sequence: int
    payload: bytes


class EventReader:
    """Iterates over the updates of the publisher at `endpoint`; blocks while there are none.

    A gap in the sequence is closed by a replay. Where that does not reach back, and where another
    process publishes at `endpoint`, the reader starts again: from a snapshot, or from what the
    replay still has. It looks for lost batches when it connects again, and after `check_seconds`
    without a batch.

    `snapshot` gives the body of `GET /prefix_cache/snapshot`, in pieces. What it raises is logged,
    and the reader starts without.

    One thread iterates; any may call `close`. A payload that is no batch of events raises
    `ValueError`.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        snapshot: Callable[[], Iterable[bytes]] | None = None,
        *,
        topic: str = "",
        check_seconds: float = 5.0,
        reply_seconds: float = 5.0,
    ) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._snapshot = snapshot
        self._topic = topic
        self._check_seconds = check_seconds
        self._reply_seconds = reply_seconds
        self._closed = threading.Event()
        # The last batch read; its payload tells one publisher's from another's with that sequence.
        # Without a sequence any batch may follow, without a payload any with the next sequence.
        self._last: int | None = None
        self._last_payload: bytes | None = None
        self._last_live = -1
        # A snapshot has no payload to compare: a replay of the next process may seem to follow it.
        # A batch that was sent live does not: before one of the next process, that one connects.
        self._snapshot_is_proven = True

    def close(self) -> None:
        """Ends the iteration within a quarter of a second."""
        self._closed.set()

    def __iter__(self) -> Iterator[Update]:
        connected = False
        with _subscription(self._endpoint, self._topic) as (live, monitor):
            while not self._closed.is_set():
                self._wait(self._check_seconds, live, monitor)
                message = self._receive(live)
                if _was_connected(monitor):
                    # What was sent in between is lost, and another process may publish here now.
                    while message is not None:  # some may come from the process before
                        message = self._receive(live)
                    self._last_live = -1
                    is_known = bool(self._last_payload) and self._snapshot_is_proven
                    yield from self._check() if is_known else self._restart()
                    connected = True
                elif message is not None:
                    yield from self._take(message)
                elif connected and self._replay_endpoint:
                    yield from self._check_idle()

    def _wait(self, seconds: float, *sockets: zmq.Socket[bytes]) -> bool:
        """Whether one of them has something to read; False when nothing came, and when closed."""
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        until = time.monotonic() + seconds
        while not self._closed.is_set() and (left := until - time.monotonic()) > 0:
            if poller.poll(int(min(left, _CLOSE_SECONDS) * 1000)):
                return True
        return False

    def _receive(self, live: zmq.Socket[bytes]) -> _Message | None:
        """What was sent next, if it is here."""
        if not live.poll(0):
            return None
        frames = live.recv_multipart()
        if len(frames) != 3:
            raise ValueError(f"{self._endpoint} sent {len(frames)} frames instead of 3")
        return _Message(decode_sequence(frames[1]), frames[2])

    def _take(self, message: _Message) -> Generator[Update]:
        """What is new up to `message`, which was sent just now."""
        # A publisher counts up. (A proxy between hides that another one connected.)
        began_again = message.sequence <= self._last_live
        self._last_live = message.sequence
        if began_again:
            yield from self._restart()
        elif self._is_beyond(message):
            yield from self._check()
        if self._follows(message):
            self._snapshot_is_proven = True
            yield self._read(message)

    def _is_beyond(self, message: _Message) -> bool:
        """Whether batches between the last one and `message` are missing."""
        return self._last is not None and message.sequence > self._last + 1

    def _check(self) -> Generator[Update]:
        """What was sent since the last batch, or a new start where that cannot be had."""
        if not (yield from self._replay()) and not self._closed.is_set():
            yield from self._restart()

    def _check_idle(self) -> Generator[Update]:
        """What was sent since the last batch. No answer is no reason to forget anything."""
        if (yield from self._replay()) is False:
            yield from self._restart()

    def _restart(self) -> Generator[Update]:
        self._last = self._last_payload = None
        if not (yield from self._read_snapshot()):
            yield Update(-1, restarted=True)
        yield from self._replay()

    def _read_snapshot(self) -> Generator[Update, None, bool]:
        if self._snapshot is None:
            return False
        try:
            parts = decode_snapshot(self._snapshot())
            header = cast(SnapshotHeader, next(parts))
            yield Update(header.sequence, restarted=True, snapshot=header)
            for part in parts:
                if not isinstance(part, SnapshotHeader | SnapshotEnd):
                    yield Update(header.sequence, [part])
        except Exception:
            _logger.warning("No snapshot with the KV events of %s", self._endpoint, exc_info=True)
            return False
        self._last, self._snapshot_is_proven = header.sequence, False
        return True

    def _replay(self) -> Generator[Update, None, bool | None]:
        """Reads what follows the last batch from the replay.

        True where it begins there, False where it does not; None where nothing was answered.
        """
        if self._replay_endpoint is None:
            return None
        is_known = None
        with _replay_socket(self._replay_endpoint) as socket:
            socket.send_multipart([b"", encode_sequence(self._first_wanted())])
            while (message := self._replayed(socket)) is not None:
                if is_known is None and self._is_last(message):
                    is_known = True
                elif self._follows(message):
                    # Behind a snapshot there is no payload to compare.
                    is_known = is_known or self._last_payload is None
                    if not is_known:
                        return False
                    yield self._read(message)
                else:
                    return False
        return is_known

    def _first_wanted(self) -> int:
        if self._last is None:
            return 0
        return self._last + 1 if self._last_payload is None else self._last

    def _replayed(self, socket: zmq.Socket[bytes]) -> _Message | None:
        """The next batch of a replay; None at its end, and when nothing comes any more."""
        if not self._wait(self._reply_seconds, socket):
            return None
        *_, sequence, payload = socket.recv_multipart()
        return None if sequence == END_OF_REPLAY else _Message(decode_sequence(sequence), payload)

    def _follows(self, message: _Message) -> bool:
        return self._last is None or message.sequence == self._last + 1

    def _is_last(self, message: _Message) -> bool:
        return message.sequence == self._last and message.payload == self._last_payload

    def _read(self, message: _Message) -> Update:
        try:
            events = decode_batch(message.payload).events
        except msgspec.DecodeError as error:
            batch = f"batch {message.sequence} of {self._endpoint}"
            raise ValueError(f"{batch} has not the form of vLLM's events: {error}") from error
        self._last, self._last_payload = message.sequence, message.payload
        return Update(message.sequence, events)


@contextmanager
def _subscription(
    endpoint: str, topic: str
) -> Generator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A socket that connects to `endpoint`, again and again, and one that tells when it did."""
    context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
    with context.socket(zmq.SUB) as live:
        live.setsockopt(zmq.LINGER, 0)
        live.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MILLISECONDS)
        live.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MILLISECONDS)
        live.setsockopt_string(zmq.SUBSCRIBE, topic)
        with live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            live.connect(endpoint)
            yield live, monitor


def _was_connected(monitor: zmq.Socket[bytes]) -> bool:
    """Whether a connection was made since this was asked last."""
    connected = False
    while monitor.poll(0):
        recv_monitor_message(monitor)
        connected = True
    return connected


@contextmanager
def _replay_socket(endpoint: str) -> Generator[zmq.Socket[bytes]]:
    """One for each replay, so that no answer of another is in it."""
    context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)  # the publisher's buffer bounds what comes
        socket.connect(endpoint)
        yield socket
