"""A publisher of KV events that drops messages, forgets batches and starts again on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import zmq

from prefixcache.events.reader import EventReader, Update
from prefixcache.events.wire import (
    END_OF_REPLAY,
    SNAPSHOT_VERSION,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    KVGroup,
    SnapshotEnd,
    SnapshotHeader,
    decode_sequence,
    encode,
    encode_sequence,
)
from support.serving import wait_until


class Held:
    """The hashes that hit after some events."""

    def __init__(self) -> None:
        self.hashes: frozenset[int] = frozenset()

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.hashes |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                # A reader of a process that has just ended may not know what the next one removes.
                self.hashes -= set(event.block_hashes)
            else:
                self.hashes = frozenset()


def stored(*hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [0] * len(hashes), 1, None, "GPU", None)


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(list(hashes), "GPU")


class FakePublisher:
    """Has what a real one has, without a cache: `held` is what its events add up to."""

    def __init__(self) -> None:
        self._context = zmq.Context.instance()
        self.endpoint = self.replay_endpoint = "tcp://127.0.0.1:*"
        self.num_snapshots = 0
        self._open()

    def _open(self) -> None:
        self._live = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for socket in (self._live, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
        self.endpoint = _bind(self._live, self.endpoint)
        self.replay_endpoint = _bind(self._replay, self.replay_endpoint)
        # Who holds it publishes several batches between which no replay comes.
        self.lock = threading.RLock()
        self._buffer: list[tuple[int, bytes]] = []
        self._next = 0
        self.held = Held()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve_replays, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._live.close()
        self._replay.close()

    def start_again(self) -> None:
        """What another process does that takes the place of one that was killed."""
        self.close()
        self._open()

    def publish(self, *events: Event, lost: bool = False, forgets: bool = False) -> None:
        """Sends a batch unless it is `lost`. One that `forgets` has no batches before it."""
        with self.lock:
            payload = encode(EventBatch(time.time(), list(events), 0))
            sequence, self._next = self._next, self._next + 1
            self.held.apply(events)
            if forgets:
                self._buffer.clear()
            self._buffer.append((sequence, payload))
        if not lost:
            self._live.send_multipart([b"", encode_sequence(sequence), payload])

    def snapshot(self) -> list[bytes]:
        with self.lock:
            self.num_snapshots += 1
            header = SnapshotHeader(
                SNAPSHOT_VERSION, self._next - 1, "00", "tiny", 1, [KVGroup("full_attention")]
            )
            parts = [header, *map(stored, self.held.hashes), SnapshotEnd(len(self.held.hashes))]
        return [encode(part) for part in parts]

    def _serve_replays(self) -> None:
        while not self._stopped.is_set():
            if self._replay.poll(20):
                client, _, first = self._replay.recv_multipart()
                with self.lock:
                    batches = [
                        batch for batch in self._buffer if batch[0] >= decode_sequence(first)
                    ]
                for sequence, payload in batches:
                    self._replay.send_multipart([client, b"", encode_sequence(sequence), payload])
                self._replay.send_multipart([client, b"", END_OF_REPLAY, b""])


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    wait_until(lambda: _is_bound(socket, endpoint))
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _is_bound(socket: zmq.Socket[bytes], endpoint: str) -> bool:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:  # the port of a socket closed just now is not free at once
        return False
    return True


class Follower:
    """What a reader knows; `restarts` are the updates with which it started again."""

    def __init__(self, reader: EventReader) -> None:
        self.reader = reader
        self.held = Held()
        self.restarts: list[Update] = []
        self.sequences: list[int] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for update in self.reader:
                if update.restarted:
                    self.restarts.append(update)
                    self.held = Held()
                self.held.apply(update.events)
                self.sequences.append(update.sequence)
        except Exception as error:  # noqa: BLE001 - `following` raises it
            self.error = error

    def stop(self) -> None:
        self.reader.close()
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def following(reader: EventReader) -> Generator[Follower, None, None]:
    """A thread that reads; what it raised is raised at the end."""
    follower = Follower(reader)
    try:
        yield follower
    finally:
        follower.stop()
    if follower.error is not None:
        raise follower.error
