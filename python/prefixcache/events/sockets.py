"""The sockets of the publisher: PUB for batches, ROUTER for replays."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import suppress

import zmq

from prefixcache.events.config import KVEventsConfig
from prefixcache.events.wire import END_OF_REPLAY, decode_sequence, encode_sequence
from prefixcache.exceptions import FieldError

logger = logging.getLogger(__name__)

# What one consumer of a replay may have waiting for it, in batches: it gets the next as it reads.
_REPLAY_HWM = 256
_REQUESTS_AT_ONCE = 64
# The most bytes that a peer may send in one frame: a replay's sequence, or a topic that it wants.
_MAX_REQUEST_BYTES = 64
_MAX_TOPIC_BYTES = 1024
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.ENODEV)


class EventSockets:
    """Sends batches and answers to replays; takes its endpoints as it is made.

    An address of this machine is bound, one of another machine is connected to, where one consumer
    gathers the events of many servers. Raises `FieldError` for what can be neither. One thread at a
    time calls `send`, one `replay_requests` and `replay`. `endpoint` and `replay_endpoint` are what
    consumers connect to. `num_overflows` counts the batches at which a consumer was found with as
    much waiting for it as may: libzmq then passes it over, and tells nobody, until it has read.
    A peer that sends a frame longer than any that means something is disconnected.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self.num_overflows = 0
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.set_hwm(config.hwm)
            self._publisher.setsockopt(zmq.MAXMSGSIZE, _MAX_TOPIC_BYTES)
            # So that a send tells where a consumer's queue is full.
            self._publisher.setsockopt(zmq.XPUB_NODROP, 1)
            self.endpoint = _open(self._publisher, "endpoint", config.endpoint)
            self._router = self._context.socket(zmq.ROUTER)
            self._router.set_hwm(_REPLAY_HWM)
            self._router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self.replay_endpoint = _open(
                    self._router, "replay_endpoint", config.replay_endpoint
                )
        except BaseException:
            self.close()
            raise

    def send(self, sequence: int, payload: bytes) -> None:
        """Publishes a batch; waits for nobody."""
        frames = (self._topic, encode_sequence(sequence), payload)
        if self._send(frames):
            return
        self.num_overflows += 1
        self._publisher.setsockopt(zmq.XPUB_NODROP, 0)
        self._publisher.send_multipart(frames, zmq.NOBLOCK)
        self._publisher.setsockopt(zmq.XPUB_NODROP, 1)

    def _send(self, frames: tuple[bytes, ...]) -> bool:
        """Whether all consumers have room for a message; else none gets it."""
        for _ in range(2):
            with suppress(zmq.Again):
                self._publisher.send_multipart(frames, zmq.NOBLOCK)
                return True
            # Looks at once at what consumers have read, as a send does only every millisecond.
            self._publisher.getsockopt(zmq.EVENTS)
        return False

    def wait(self, seconds: float) -> None:
        """Returns when somebody asks for a replay, or after that time."""
        self._router.poll(int(1000 * seconds))

    def replay_requests(self) -> Iterator[tuple[bytes, int]]:
        """Some of those who ask for a replay, and from which sequence on.

        Whoever asks faster than that is read may not keep the publisher from publishing.
        """
        for _ in range(_REQUESTS_AT_ONCE):
            if not self._router.poll(0):
                return
            frames = self._router.recv_multipart(zmq.NOBLOCK)
            try:
                client, _, start = frames
                yield client, decode_sequence(start)
            except ValueError:
                logger.debug("A replay of KV events was asked for in a wrong form.")

    def replay(self, client: bytes, sequence: int, payload: bytes) -> bool:
        """Sends a batch again; False where the client has too much waiting for it.

        Raises `ConnectionError` where it is gone.
        """
        return self._answer(client, encode_sequence(sequence), payload)

    def end_replay(self, client: bytes) -> bool:
        """Says that there is no more; as `replay`."""
        return self._answer(client, END_OF_REPLAY, b"")

    def _answer(self, client: bytes, sequence: bytes, payload: bytes) -> bool:
        try:
            self._router.send_multipart((client, b"", sequence, payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise ConnectionError("the consumer is gone") from None
        return True

    def close(self) -> None:
        """Ends the connections; what consumers have not read by now is lost to them."""
        self._context.destroy(linger=0)


def _open(socket: zmq.Socket[bytes], key: str, endpoint: str) -> str:
    """Binds or connects; the endpoint by which consumers reach it."""
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno not in _NOT_HERE or endpoint.endswith("*"):
            problem = f"cannot take the {key} {endpoint}: {_reason(error)}."
            raise FieldError("kv_events_config", problem) from None
        logger.info("KV events: %s is another machine's and is connected to.", endpoint)
        socket.connect(endpoint)
        return endpoint
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _reason(error: zmq.ZMQError) -> str:
    """Without the address, which pyzmq adds to some."""
    return os.strerror(error.errno) if error.errno else str(error)
