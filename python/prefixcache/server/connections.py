"""Connections that cannot be held for ever, nor all be held by one client.

uvicorn waits without end for a request's head and body, and takes any number of connections and any
length of a head. Here a request must come in time; where there are too many connections, the one
whose request has been awaited longest makes room.
"""

from __future__ import annotations

from asyncio import BaseTransport, TimerHandle
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from prefixcache.server.errors import ApiError, error_response

# A body may take longer than the time to read when it comes at this pace.
_LEAST_BYTES_A_SECOND = 1024
_MAX_HEAD_BYTES = 64 * 2**10
# Around a body: its head, what frames its chunks, and trailers.
_MAX_FRAMING_BYTES = 2**20


class Awaited(Protocol):
    """A connection whose request has not come in full."""

    def make_room(self, newer: object) -> None:
        """Ends it, since there are too many with `newer`, which may be itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one server's connections, and those whose request has not come in full.

    `read_seconds` is the time for a request's head to come, and then for its body, which may take
    longer while it keeps coming.
    """

    most: int
    read_seconds: float
    awaited: dict[Awaited, None] = field(default_factory=dict["Awaited", None])


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 over one connection, within `limits`."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._timer: TimerHandle | None = None
        self._in_head = True
        self._num_framing_bytes = 0
        self._num_body_bytes = 0

    def connection_made(self, transport: BaseTransport) -> None:
        """Takes the connection, if need be in the place of another."""
        super().connection_made(cast("Any", _WhileOpen(transport)))
        self._await_request()
        self._start_timer()
        if len(self.connections) > self._limits.most:
            next(iter(self._limits.awaited)).make_room(self)

    def make_room(self, newer: object) -> None:
        """Closes this connection, on which nothing was asked yet."""
        if newer is self:
            error = ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "Too many connections are open.")
            self._end(error, {"Retry-After": "1"})
        else:
            self._forget_request()
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what waits for the connection."""
        self._forget_request()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses what has come."""
        self._num_framing_bytes += len(data)
        super().data_received(data)
        most = _MAX_HEAD_BYTES if self._in_head else _MAX_FRAMING_BYTES
        if self._num_framing_bytes > most and not self.transport.is_closing():
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._end(ApiError(status, f"The request's head is longer than {most} bytes."))

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        super().on_message_begin()
        self._in_head = True
        self._start_timer()

    def on_headers_complete(self) -> None:
        """The head has come; the application is called."""
        super().on_headers_complete()
        self._in_head = False
        self._start_timer()

    def on_body(self, body: bytes) -> None:
        """A part of the body has come."""
        self._num_framing_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has come in full."""
        super().on_message_complete()
        self._num_framing_bytes = 0
        self._stop_timer()
        if not self.cycle.response_complete:
            self._limits.awaited.pop(self, None)

    def on_response_complete(self) -> None:
        """The answer has gone out; uvicorn bounds the wait for the next request's first byte."""
        super().on_response_complete()
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
        """Whether it is not the client who is late."""
        if self._is_answered() or self._in_head:
            return not self._is_answered()  # a pipelined request waits for the answer before it
        keeps_coming = self._num_body_bytes >= self._limits.read_seconds * _LEAST_BYTES_A_SECOND
        return keeps_coming or self.flow.read_paused

    def _is_answered(self) -> bool:
        """Whether no request is waiting for its answer or the rest of it."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or cycle.response_complete

    def _end(self, error: ApiError, headers: Mapping[str, str] | None = None) -> None:
        """Closes the connection, with an answer where that cannot be taken for another's."""
        self._forget_request()
        if self._is_answered() if self._in_head else not self.cycle.response_started:
            response = error_response(error, {"Connection": "close", **(headers or {})})
            lines = [b"%s: %s\r\n" % header for header in response.raw_headers]
            head = b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n"])
            self.transport.write(head + bytes(response.body))
        self.transport.close()


class _WhileOpen:
    """A transport that drops what is written once it is closing, as the event loops do loudly."""

    def __init__(self, transport: BaseTransport) -> None:
        self._transport: Any = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
