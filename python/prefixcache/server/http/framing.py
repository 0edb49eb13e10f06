"""Where a request ends, so that no byte of its body is taken for the next one.

Otherwise a client behind a proxy could send requests that the proxy has never seen. llhttp expects
another protocol behind the head of a request with `Upgrade`, and skips its body. No upgrade is
served here, so its body is read as any other (RFC 9110, section 7.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

Headers = Sequence[tuple[bytes, bytes]]

_LENGTH = b"content-length"
_CODING = b"transfer-encoding"
# Another protocol may follow the first; a client that was answered early may not send its body.
_LAST_ON_CONNECTION = frozenset({b"expect", b"upgrade"})


class Reader(Protocol):
    """Gets a request; `headers` are those of the last head, with names in lower case."""

    headers: list[tuple[bytes, bytes]]

    def on_body(self, body: bytes) -> None:
        """A part of the body has come."""
        ...

    def on_request_complete(self) -> None:
        """A request with `Upgrade` has come in full; its `on_message_complete` comes before."""
        ...


class RequestParser(HttpRequestParser):
    """llhttp for a reader, which has the other callbacks of httptools too."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self._reader = reader
        self._body_parser: HttpRequestParser | None = None

    def feed_data(self, data: Any) -> None:
        """Parses what has come. Raises `HttpParserError`, also at the end of a last request."""
        if self._body_parser is not None:
            self._body_parser.feed_data(data)
            return
        try:
            super().feed_data(data)
        except HttpParserUpgrade as upgrade:
            body = SimpleNamespace(
                on_body=self._reader.on_body, on_message_complete=self._end_last_request
            )
            self._body_parser = HttpRequestParser(body)
            head = _framing(self._reader.headers)
            self._body_parser.feed_data(head + data[upgrade.args[0] :])

    def _end_last_request(self) -> None:
        self._reader.on_request_complete()
        raise LastRequestError


class LastRequestError(Exception):
    """Stops the parser behind a request that is the last one of its connection."""


def check_framing(method: bytes, version: str, headers: Headers) -> None:
    """Raises `HttpParserError` where somebody may see another end of the request than we do."""
    codings = [value.strip().lower() for name, value in headers if name == _CODING]
    if method == b"CONNECT" or version not in ("1.0", "1.1"):
        raise HttpParserError("No tunnels, and no other protocols, are served.")
    if codings and (version == "1.0" or codings != [b"chunked"]):
        raise HttpParserError("The body has no clear end.")


def is_last(headers: Headers) -> bool:
    """Whether no other request may follow one with these headers on its connection."""
    return any(name in _LAST_ON_CONNECTION for name, _ in headers)


def without_chunks(cycle: RequestResponseCycle) -> None:
    """Ends an answer with its connection: HTTP/1.0 knows neither chunks nor `100 Continue`."""
    send = cycle.send

    async def send_unframed(message: ASGISendEvent) -> None:
        cycle.expected_content_length = len(cast("dict[str, bytes]", message).get("body", b""))
        await send(message)

    cycle.waiting_for_100_continue = cycle.chunked_encoding = False
    cycle.send = send_unframed


def _framing(headers: Headers) -> bytes:
    """A head with what these headers, which a parser has checked, say of the body's end."""
    lines = [b"%s: %s\r\n" % header for header in headers if header[0] in (_LENGTH, _CODING)]
    return b"POST / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n"
