"""HTTP/1.1 over a socket of our own: clients of libraries are too polite for what is tried here."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


class BadReplyError(Exception):
    """What came is no HTTP answer."""


class NoReplyError(BadReplyError):
    """The connection ended, and nothing came."""


class CutReplyError(BadReplyError):
    """An answer has begun and does not end."""


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: dict[str, str]


class Wire:
    """One connection. Whoever opened it closes it, with `close` or rudely with `abort`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._headers: dict[str, str] = {}

    @classmethod
    async def open(cls, port: int, *, receive_buffer: int | None = None) -> Wire:
        """A connection to loopback; a small `receive_buffer`, in bytes, holds the sender up."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        limit = 2**16 if receive_buffer is None else receive_buffer
        return cls(*await asyncio.open_connection(sock=sock, limit=limit))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> Head:
        """Raises `BadReplyError` when the connection ends before, `NoReplyError` when at once."""
        try:
            line, *lines = (
                (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            )
        except asyncio.IncompleteReadError as error:
            kind = BadReplyError if error.partial else NoReplyError
            raise kind("the connection ended before the answer's head") from error
        pairs = (one.partition(":") for one in lines if one)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return Head(int(line.split()[1]), self._headers)

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `CutReplyError` when it is cut."""
        try:
            if "content-length" in self._headers:
                yield await self.reader.readexactly(int(self._headers["content-length"]))
                return
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CutReplyError("the connection ended inside the answer") from error

    @property
    def is_reusable(self) -> bool:
        return self._headers.get("connection", "").lower() != "close"

    def abort(self) -> None:
        """Drops the connection without a farewell."""
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


def request_bytes(method: str, path: str, key: str, body: Any = None) -> tuple[bytes, bytes]:
    """The head and the body of a request."""
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode(), content


async def ask(
    port: int, method: str, path: str, key: str, body: Any = None, seconds: float = 60
) -> tuple[Head, bytes]:
    """One request on a connection of its own, and its whole answer."""

    async def asked() -> tuple[Head, bytes]:
        wire = await Wire.open(port)
        try:
            wire.send(b"".join(request_bytes(method, path, key, body)))
            head = await wire.head()
            return head, b"".join([part async for part in wire.parts()])
        finally:
            wire.close()

    return await asyncio.wait_for(asked(), seconds)
