"""Where a request ends: no byte of its body, and nothing behind it, is taken for the next one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.connection import connection_of
from support.serving import until

NEXT = (
    b"POST /pause HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 2\r\n\r\n{}"
)
FIRST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost:8000\r\n"
# Heads as clients send them, or as an RFC has them; the last ones are spelled as nobody does.
UPGRADES = {
    "Java": b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/20.0.1\r\n",
    "curl": b"User-Agent: curl/7.81.0\r\nAccept: */*\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    "RFC 6455": b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n",
    "RFC 9110": b"Connection: upgrade\r\nUpgrade: websocket, IRC/6.9, RTA/x11\r\n",
    "RFC 2817": b"Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
    "empty": b"Upgrade:\r\nConnection: Upgrade\r\n",
    "odd": b"uPGRADE:foo\r\nCONNECTION:\tkeep-alive ,UPGRADE\r\nUpgrade: bar\r\n",
    "not of this connection": b"Upgrade: foo\r\nConnection: keep-alive\r\n",
}
BODIES = {
    "none": (b"\r\n", b""),
    "length": (b"Content-Length: %d\r\n\r\n" % len(NEXT) + NEXT, NEXT),
    "chunks": (
        b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n"
        + (NEXT[:2] + b"\r\n%x\r\n" % (len(NEXT) - 2) + NEXT[2:])
        + b"\r\n0\r\nHost: trailer\r\n\r\n",
        NEXT,
    ),
}


class Records:
    """Answers all, and notes what was asked: path and body, or None for one that is not read."""

    def __init__(self, *, reads: bool = True) -> None:
        self.calls: list[tuple[str, bytes | None]] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self._reads = reads

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b"" if self._reads else None
        self.headers = scope["headers"]
        more = self._reads
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.calls.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


async def exchange(app: Any, *parts: bytes) -> bytes:
    """What is answered to parts that come one after the other, until the connection is closed."""
    with connection_of(app) as (connection, transport, _):
        for part in parts:
            connection.data_received(part)
            for _ in range(8):
                await asyncio.sleep(0)
        assert transport.is_closing()
        return transport.written


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("upgrade", UPGRADES)
async def test_an_upgrade_that_is_not_served_is_ignored(upgrade: str, body: str) -> None:
    """Cut anywhere, with more behind it: it is answered as usual, and is the connection's last."""
    framed, expected = BODIES[body]
    sent = FIRST + UPGRADES[upgrade] + framed
    for cut in range(1, len(sent) + 1):
        app = Records()
        answer = await exchange(app, sent[:cut], sent[cut:] + NEXT, NEXT)
        assert app.calls == [("/v1/completions", expected)], cut
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n"), cut
        assert b"\r\nconnection: close" in head, cut
        assert rest == b"4\r\ndone\r\n0\r\n\r\n", cut


async def test_a_body_that_comes_after_an_early_answer_is_dropped() -> None:
    for framed, _ in BODIES.values():
        head, _, body = framed.partition(b"\r\n\r\n")
        app = Records(reads=False)
        await exchange(app, FIRST + UPGRADES["curl"] + head + b"\r\n\r\n", body, NEXT)
        assert app.calls == [("/v1/completions", None)]


CHUNK = b"2\r\n{}\r\n0\r\n\r\n"
UNCLEAR = {
    "CONNECT": b"CONNECT /pause HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "CONNECT, a host": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n",
    "HTTP/2 at once": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.0, chunks": FIRST.replace(b"1.1", b"1.0")
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + CHUNK,
    "length and chunks": FIRST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNK,
    "chunks and length": FIRST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n" + CHUNK,
    "two lengths": FIRST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": FIRST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": FIRST + b"Content-Length: +2\r\n\r\n{}",
    "an empty length": FIRST + b"Content-Length:\r\n\r\n",
    "a length of 65 bits": FIRST + b"Content-Length: 18446744073709551618\r\n\r\n{}",
    "a folded length": FIRST + b"Content-Length: 2\r\n 0\r\n\r\n{}",
    "a space before the colon": FIRST + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNK,
    **{
        coding: FIRST + b"Transfer-Encoding: %s\r\n\r\n" % coding.encode() + CHUNK
        for coding in (
            "xchunked",
            "identity",
            "gzip",
            "gzip, chunked",
            "chunked, chunked",
            "chunked, identity",
            '"chunked"',
            "identity\r\nTransfer-Encoding: chunked",
            "chunked\r\nTransfer-Encoding: identity",
            "chunked\r\nUpgrade: foo\r\nConnection: Upgrade\r\nContent-Length: 2",
            "gzip\r\nUpgrade: foo\r\nConnection: Upgrade",
        )
    },
}


@pytest.mark.parametrize("sent", UNCLEAR.values(), ids=UNCLEAR)
async def test_what_has_no_clear_end_is_refused(sent: bytes) -> None:
    for cut in range(1, len(sent) + 1):
        app = Records()
        answer = await exchange(app, sent[:cut], sent[cut:] + NEXT, NEXT)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n"), cut
        assert answer.count(b"HTTP/1.1") == 1, cut
        assert not app.calls, cut


async def test_chunks_that_break_off_are_no_end() -> None:
    sent = FIRST + UPGRADES["curl"] + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nno size\r\n"
    app = Records()
    answer = await exchange(app, sent + NEXT)
    assert answer.startswith(b"HTTP/1.1 400")
    assert not app.calls


async def test_who_was_answered_before_it_was_asked_for_a_body_may_never_send_it() -> None:
    expects = b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(NEXT)
    app = Records(reads=False)
    answer = await exchange(app, FIRST + expects, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"\r\nconnection: close" in answer
    assert app.calls == [("/v1/completions", None)]


async def test_trailers_are_no_headers() -> None:
    app = Records()
    with connection_of(app) as (connection, transport, _):
        sent = FIRST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-Api-Key: later\r\n\r\n"
        connection.data_received(sent)
        await until(lambda: transport.written.endswith(b"0\r\n\r\n"))
    assert [name for name, _ in app.headers] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize("extra", [b"", b"Expect: 100-continue\r\n", b"Connection: keep-alive\r\n"])
async def test_http_1_0_knows_no_chunks(extra: bytes) -> None:
    first = FIRST.replace(b"1.1", b"1.0") + extra + b"Content-Length: 2\r\n\r\n{}"
    for length in ([], [(b"content-length", b"8")]):

        async def streams(scope: Any, receive: Any, send: Any, length: Any = length) -> None:
            while (await receive())["more_body"]:
                pass
            await send({"type": "http.response.start", "status": 200, "headers": length})
            for part in (b"one ", b"", b"two "):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body"})

        head, _, body = (await exchange(streams, first)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert body == b"one two "
