"""Connections that cannot be held for ever, nor all be held by one client.

uvicorn waits without end for a request's head and body, and for clients who read nothing, and takes
any number of connections and any length of a head. Here a request must come in time, and an answer
be read in time; where there are too many connections, the one whose request has been awaited
longest makes room. A connection has one request at a time, which ends with it: where another is
sent before the answer is out, the answer is the last.
"""

from __future__ import annotations

import socket
from asyncio import AbstractEventLoop, BaseTransport, TimerHandle, Transport
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from prefixcache.server.http.errors import ApiError, error_response
from prefixcache.server.http.framing import (
    LastRequestError,
    RequestParser,
    check_framing,
    is_last,
    without_chunks,
)

# A body may take longer than the time to read when it comes at this pace, and so may an answer.
_LEAST_BYTES_A_SECOND = 1024
# Seconds that a timer of an event loop that goes on is never late.
_HELD_UP = 0.5
_MAX_HEAD_BYTES = 64 * 2**10
# Around a body: its head, what frames its chunks, and trailers.
_MAX_FRAMING_BYTES = 2**20
# Whether a silent client is still there: seconds to the first probe and between two, their number.
_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class Awaited(Protocol):
    """A connection whose request has not come in full."""

    def make_room(self, newer: object) -> None:
        """Ends it, since there are too many with `newer`, which may be itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one server's connections, and those whose request has not come in full.

    `read_seconds` is the time for a request's head to come, and then for its body, which may take
    longer while it keeps coming. `write_seconds` is the time for a client to read what waits for
    it, which may take longer while it keeps reading.
    """

    most: int
    read_seconds: float
    write_seconds: float
    awaited: dict[Awaited, None] = field(default_factory=dict["Awaited", None])


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 over one connection, within `limits`.

    `before_made` is called when the connection is open, which under TLS is after the handshake.
    """

    def __init__(
        self,
        *arguments: Any,
        limits: ConnectionLimits,
        before_made: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.parser = RequestParser(self)
        self._limits = limits
        self._before_made = before_made
        self._timer: TimerHandle | None = None
        self._in_head = True
        self._num_framing_bytes = 0
        self._num_body_bytes = 0

    def connection_made(self, transport: BaseTransport) -> None:
        """Takes the connection, if need be in the place of another."""
        self._before_made()
        super().connection_made(cast("Any", _WhileOpen(transport)))
        self._reading = _ReadingClient(self.transport, self.loop, self._limits.write_seconds)
        _notice_lost_clients(transport.get_extra_info("socket"), self._limits.write_seconds)
        self._await_request()
        self._start_timer()
        if len(self.connections) > self._limits.most:
            next(iter(self._limits.awaited)).make_room(self)

    def make_room(self, newer: object) -> None:
        """Closes this connection, on which nothing was asked yet."""
        if newer is self:
            status, message = HTTPStatus.SERVICE_UNAVAILABLE, "Too many connections are open."
            self._end(ApiError(status, message, retry_after=1))
        else:
            self._forget_request()
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what waits for the connection."""
        self._forget_request()
        self._reading.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses what has come.

        What comes before an answer is out is thrown away, but read: a transport that does not read
        does not tell that the client has left.
        """
        if self.transport.is_closing():
            return
        if self._is_answering():
            self.cycle.keep_alive = False
            return
        self._num_framing_bytes += len(data)
        super().data_received(data)
        most = _MAX_HEAD_BYTES if self._in_head else _MAX_FRAMING_BYTES
        if self._num_framing_bytes > most and not self.transport.is_closing():
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._end(ApiError(status, f"The request's head is longer than {most} bytes."))

    def pause_writing(self) -> None:
        """The client reads more slowly than the answer comes; the application waits."""
        super().pause_writing()
        self._reading.start()

    def resume_writing(self) -> None:
        """The client has read what waited."""
        super().resume_writing()
        self._reading.stop()

    def send_400_response(self, msg: str) -> None:
        """The parser refused what has come, or was stopped at a pipelined request."""
        if not self._is_answering():
            self._end(ApiError(HTTPStatus.BAD_REQUEST, msg))

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        if self._is_answering():
            self.cycle.keep_alive = False
            raise LastRequestError
        super().on_message_begin()
        self._in_head = True
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come. Trailers are dropped: no proxy has checked them."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head has come; the application is called."""
        version = self.parser.get_http_version()
        check_framing(self.parser.get_method(), version, self.headers)
        super().on_headers_complete()
        self._in_head = False
        if is_last(self.headers):
            self.cycle.keep_alive = False
        if version == "1.0":
            without_chunks(self.cycle)
        self._start_timer()

    def on_body(self, body: bytes) -> None:
        """A part of the body has come."""
        self._num_framing_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has come in full; of one with `Upgrade` its head."""
        if not self.parser.should_upgrade():
            self.on_request_complete()

    def on_request_complete(self) -> None:
        """The request has come in full."""
        super().on_message_complete()
        self._num_framing_bytes = 0
        self._stop_timer()
        if not self.cycle.response_complete:
            self._limits.awaited.pop(self, None)

    def on_response_complete(self) -> None:
        """The answer has gone out; uvicorn bounds the wait for the next request's first byte."""
        super().on_response_complete()
        if not self._reading.is_timed and self.transport.get_write_buffer_size():
            self._reading.start()
        if self._is_answered() and not self.transport.is_closing():
            self._await_request()

    def _await_request(self) -> None:
        self._limits.awaited[self] = None

    def _forget_request(self) -> None:
        self._limits.awaited.pop(self, None)
        self._stop_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._num_body_bytes = 0
        self._timer = self.loop.call_later(self._limits.read_seconds, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        if self._may_go_on():
            self._start_timer()
        else:
            self._end(ApiError(HTTPStatus.REQUEST_TIMEOUT, "The request did not come in time."))

    def _may_go_on(self) -> bool:
        """Whether it is not the client who is late.

        An event loop that was held up runs timers before it reads what came meanwhile.
        """
        was_held_up = self._timer is not None and self.loop.time() > self._timer.when() + _HELD_UP
        if was_held_up:
            return True
        if self._is_answered():
            return False
        keeps_coming = self._num_body_bytes >= self._limits.read_seconds * _LEAST_BYTES_A_SECOND
        return keeps_coming or self.flow.read_paused

    def _is_answered(self) -> bool:
        """Whether no request is waiting for its answer or the rest of it."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or cycle.response_complete

    def _is_answering(self) -> bool:
        """Whether a request has come in full and its answer has not gone out."""
        return not (self._is_answered() or self.cycle.more_body)

    def _end(self, error: ApiError) -> None:
        """Closes the connection, with an answer where that cannot be taken for another's."""
        self._forget_request()
        if self._in_head or not self.cycle.response_started:
            response = error_response(error)
            response.headers["Connection"] = "close"
            lines = [b"%s: %s\r\n" % header for header in response.raw_headers]
            head = b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n"])
            self.transport.write(head + bytes(response.body))
        self.transport.close()


class _ReadingClient:
    """Ends a connection whose client reads too little of what waits for it, in `seconds`."""

    def __init__(self, transport: Transport, loop: AbstractEventLoop, seconds: float) -> None:
        self._transport = transport
        self._loop = loop
        self._seconds = seconds
        self._timer: TimerHandle | None = None
        self._num_unread_bytes = 0

    @property
    def is_timed(self) -> bool:
        return self._timer is not None

    def start(self) -> None:
        """Times how much it reads from here on."""
        self.stop()
        self._num_unread_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._seconds, self._on_timer)

    def stop(self) -> None:
        """Nothing waits for it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        """Waits on for who reads; for others what they did not read is thrown away."""
        unread = self._transport.get_write_buffer_size()
        num_read = self._num_unread_bytes - unread
        if not unread:
            self._timer = None
        elif num_read >= self._seconds * _LEAST_BYTES_A_SECOND:
            self.start()
        else:
            self._transport.abort()


def _notice_lost_clients(connection: socket.socket | None, seconds: float) -> None:
    """Lets the system end a connection whose other end is gone, or takes nothing for so long.

    Without it a client that vanished while it waited would hold its place for ever.
    """
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {**_PROBES, "TCP_USER_TIMEOUT": max(int(seconds * 1000), 1)}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _WhileOpen:
    """A transport that drops what is written once it is closing, as the event loops do loudly."""

    def __init__(self, transport: BaseTransport) -> None:
        self._transport: Any = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
