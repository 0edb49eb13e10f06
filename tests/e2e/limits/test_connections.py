"""Half-open connections, slow bodies, endless heads, and more connections than are allowed."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket
import threading
from contextlib import ExitStack
from itertools import product
from typing import Any

import httpx
import pytest
import uvicorn

from prefixcache.exceptions import ConfigError
from prefixcache.server import serve
from prefixcache.server.http.connections import Connection, ConnectionLimits
from support.connection import connection_of
from support.serving import running, until, wait_until

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
CLOSED = b"Connection: close\r\n"


async def reads_all(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of bytes of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        more = message["more_body"]
    await respond(send, str(size).encode())


async def respond(send: Any, body: bytes, status: int = 200) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def connect(address: str, sent: bytes = b"") -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=150)
    connection.sendall(sent)
    return connection


def read_until(connection: socket.socket, end: bytes) -> None:
    """Reads what ends so, in however many parts it comes."""
    found = b""
    while not found.endswith(end):
        part = connection.recv(65536)
        assert part, found
        found += part


def rest(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection, which must happen."""
    parts: list[bytes] = []
    with connection:
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST",
        POST + b"X-Slow: ",
        POST + b"Content-Length: 9\r\n\r\nhalf",
        POST + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
def test_a_request_that_does_not_come_is_not_awaited_for_ever(sent: bytes) -> None:
    with running(reads_all, timeout_read=0.5, timeout_keep_alive=60) as address:
        head, _, body = rest(connect(address, sent)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout")
    assert b"connection: close" in head.lower()
    assert b"did not come in time" in body


def test_two_hundred_half_open_connections_go_away_and_harm_nobody() -> None:
    with running(reads_all, timeout_read=1) as address, ExitStack() as stack:
        half_open = [stack.enter_context(connect(address, POST)) for _ in range(200)]
        # A machine that is busy for a second makes this client late too.
        wait_until(lambda: httpx.post(address, content=b"12345", timeout=240).text == "5")
        assert all(b"408" in rest(connection) for connection in half_open)


def test_clients_close_an_idle_connection_before_the_server_does() -> None:
    """A request that is sent while the server closes is lost. OpenAI's client is httpx."""
    expiry = httpx.Limits().keepalive_expiry
    assert expiry is not None
    assert serve.ServeOptions().timeout_keep_alive > 2 * expiry


def _until_closed(connection: socket.socket) -> bytes:
    parts = b""
    try:
        while part := connection.recv(65536):
            parts += part
    except ConnectionResetError:
        pass
    connection.close()
    return parts


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"X-Many: a\r\n" * 10_000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X-Trailer: a\r\n" * 100_000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: " + b"a" * 2_000_000,
    ],
)
def test_an_endless_head_is_refused(sent: bytes) -> None:
    with running(reads_all, timeout_read=60) as address:
        connection = connect(address)
        try:
            connection.sendall(sent)
            answer = _until_closed(connection)
        except (BrokenPipeError, ConnectionResetError):  # closed before all of it was sent
            answer = b""
    assert answer.startswith(b"HTTP/1.1 431") or not answer


def test_a_long_body_is_no_head() -> None:
    pieces = [b"a" * 1000] * 3000
    with running(reads_all) as address, httpx.Client(base_url=address, timeout=240) as client:
        assert client.post("/", content=b"".join(pieces)).text == "3000000"
        assert client.post("/", content=iter(pieces)).text == "3000000"
        for _ in range(100):  # one connection, whose heads together are longer than one may be
            assert client.get("/", headers={"X-Long": "a" * 16_000}).text == "0"


class Streams:
    """Answers that end when a test says so."""

    def __init__(self) -> None:
        self.num_open = 0
        self.may_end = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.num_open += 1
        while not self.may_end:
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"done"})
        self.num_open -= 1


def test_beyond_the_limit_the_longest_wait_makes_room_and_answers_go_on() -> None:
    app = Streams()
    with running(app, limit_concurrency=3) as address, ExitStack() as stack:
        idle = [stack.enter_context(connect(address, GET[:10])) for _ in range(3)]
        busy = []
        for number, oldest in enumerate(idle, 1):
            busy.append(stack.enter_context(connect(address, GET)))
            assert rest(oldest) == b""
            wait_until(lambda number=number: app.num_open == number)
        answer = rest(connect(address))
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable")
        assert b"retry-after: 1" in answer.lower()
        app.may_end = True
        for connection in busy:
            read_until(connection, b"done\r\n0\r\n\r\n")
        last = stack.enter_context(
            connect(address, GET.replace(b"\r\n\r\n", b"\r\n" + CLOSED + b"\r\n"))
        )
        assert b"done" in rest(last)
        assert rest(busy[0]) == b""


def test_connections_are_served_by_httptools_and_uvloop() -> None:
    pytest.importorskip("uvloop")
    loops: list[str] = []

    async def tells(scope: Any, receive: Any, send: Any) -> None:
        loops.append(type(asyncio.get_running_loop()).__module__)
        await respond(send, b"")

    with running(tells) as address:
        assert httpx.get(address, timeout=240).is_success
    assert loops == ["uvloop"]
    assert Connection.__mro__[1].__module__ == "uvicorn.protocols.http.httptools_impl"


class UntilDisconnected:
    """Answers that end when their client leaves, or may end; those of /stream begin at once."""

    def __init__(self) -> None:
        self.num_begun = self.num_left = 0
        self.may_end = False
        self.cycle: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.cycle = receive.__self__
        while (await receive())["more_body"]:
            pass
        leaving = asyncio.create_task(_disconnected(receive))
        stream = scope["path"] == "/stream"
        if stream:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        self.num_begun += 1
        while not (leaving.done() or self.may_end):
            await asyncio.sleep(0.001)
        if leaving.done():
            self.num_left += 1
        elif stream:
            await send({"type": "http.response.body", "body": b"done"})
        else:
            await respond(send, b"done")
        leaving.cancel()


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# Requests whose answers are slow, by the form of their bodies.
REQUESTS = {
    "none": GET,
    "length": POST + b"Content-Length: 4\r\n\r\nbody",
    "long": POST + b"Content-Length: 200000\r\n\r\n" + b"x" * 200_000,
    "chunked": POST + b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
    "HTTP/1.0": GET.replace(b"1.1", b"1.0"),
}
# What is sent behind one before its answer is out.
BEHIND = {
    "one": GET,
    "two": GET + GET,
    "health": GET.replace(b"/ ", b"/health "),
    "a part": GET[:10],
    "a body": REQUESTS["length"],
    "chunked": REQUESTS["chunked"],
    "no HTTP": b"\0\1\2",
}
AT_ONCE_AND_LATER = [False, True]


def _ask(app: UntilDisconnected, address: str, first: bytes, behind: bytes, *, later: bool) -> Any:
    """A connection whose first request is being answered, and more was sent behind it."""
    num_begun = app.num_begun
    connection = connect(address, first if later else first + behind)
    wait_until(lambda: app.num_begun > num_begun)
    if later:
        connection.sendall(behind)
    return connection


NOTHING_OR_LONG = {"nothing": b"", "a long body": REQUESTS["long"] + b"x" * 200_000}


@pytest.mark.parametrize(
    "behind", (BEHIND | NOTHING_OR_LONG).values(), ids=BEHIND | NOTHING_OR_LONG
)
def test_a_request_ends_with_its_connection(behind: bytes) -> None:
    app = UntilDisconnected()
    with running(app) as address:
        cases = product(("/", "/stream"), REQUESTS.values(), AT_ONCE_AND_LATER, (False, True))
        for number, (path, request, later, reset) in enumerate(cases, 1):
            first = request.replace(b"/ ", path.encode() + b" ", 1)
            connection = _ask(app, address, first, behind, later=later)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1" + b"\0" * 7)
            connection.close()
            wait_until(lambda number=number: app.num_left == number, seconds=120)
            assert app.num_begun == number


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_an_answer_before_which_more_is_sent_is_whole_and_the_last(behind: bytes) -> None:
    app = UntilDisconnected()
    with running(app) as address:
        cases = product(("/", "/stream"), REQUESTS.values(), AT_ONCE_AND_LATER)
        for number, (path, request, later) in enumerate(cases, 1):
            first = request.replace(b"/ ", path.encode() + b" ", 1)
            app.may_end = False
            connection = _ask(app, address, first, behind, later=later)
            wait_until(lambda: not app.cycle.keep_alive)
            app.may_end = True
            head, _, body = _until_closed(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            in_chunks = path == "/stream" and request is not REQUESTS["HTTP/1.0"]
            assert body == (b"4\r\ndone\r\n0\r\n\r\n" if in_chunks else b"done")
            assert path == "/stream" or b"connection: close" in head
            assert app.num_begun == number


@pytest.mark.parametrize("num_before", [0, 1])
def test_what_is_no_http_is_refused(num_before: int) -> None:
    with running(reads_all) as address:
        connection = connect(address)
        for _ in range(num_before):
            connection.sendall(GET)
            read_until(connection, b"\r\n\r\n0")
        connection.sendall(b"\0\1\2")
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert json.loads(body)["error"]["message"] == "Invalid HTTP request received."


def test_who_waits_for_each_answer_keeps_the_connection() -> None:
    with running(reads_all) as address:
        client = http.client.HTTPConnection(address.removeprefix("http://"), timeout=150)
        client.connect()
        used = client.sock
        for body in (None, b"body", iter([b"bo", b"dy"]), b"x" * 200_000) * 2:
            client.request("POST", "/", body, encode_chunked=True)
            client.getresponse().read()
            assert client.sock is used
        client.close()


async def test_a_second_request_that_does_not_come_is_not_awaited_for_ever() -> None:
    with connection_of(reads_all) as (connection, transport, clock):
        connection.data_received(GET)
        await until(lambda: transport.written.endswith(b"\r\n\r\n0"))
        connection.data_received(POST)
        clock.fire()
        assert transport.closed
        _, _, second = transport.written.partition(b"\r\n\r\n0")
        assert second.startswith(b"HTTP/1.1 408 Request Timeout")


async def test_a_refused_body_is_not_read_for_ever() -> None:
    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b"no", 401)

    with connection_of(refuses) as (connection, transport, clock):
        connection.data_received(POST + b"Content-Length: 1000000000\r\n\r\n")
        await until(lambda: transport.written.endswith(b"no"))
        connection.data_received(b"x" * 4096)  # more than is asked of a body that is wanted
        assert not transport.closed
        clock.fire()
        assert transport.closed
        assert transport.written.startswith(b"HTTP/1.1 401")
        assert b"408" not in transport.written


async def test_a_body_that_keeps_coming_may_take_its_time() -> None:
    with connection_of(reads_all) as (connection, transport, clock):
        connection.data_received(POST + b"Content-Length: 9000\r\n\r\n")
        for _ in range(3):
            await asyncio.sleep(0)
            connection.data_received(b"x" * 2048)
            clock.fire()
            assert not transport.closed
        connection.data_received(b"x" * 2047)
        clock.fire()
        assert transport.closed
        assert transport.written.startswith(b"HTTP/1.1 408")


async def test_a_client_is_not_late_while_the_server_is() -> None:
    """Nobody reads the body, so that reading is paused."""
    streams = Streams()
    with connection_of(streams) as (connection, transport, clock):
        connection.data_received(POST + b"Content-Length: 900000\r\n\r\n" + b"x" * 100_000)
        clock.fire()
        clock.fire()
        assert not transport.closed
    streams.may_end = True


async def test_a_request_has_more_time_after_the_server_was_held_up() -> None:
    with connection_of(reads_all) as (connection, transport, clock):
        connection.data_received(GET[:10])
        clock.now = 5.0  # a timer was due at 0
        clock.fire()
        assert not transport.closed
        clock.now = 0.0
        clock.fire()
        assert transport.closed
        assert transport.written.startswith(b"HTTP/1.1 408 ")


async def test_an_answer_that_is_read_slowly_may_take_its_time_and_an_unread_one_not() -> None:
    streams = Streams()
    streams.may_end = True
    with connection_of(streams) as (connection, transport, clock):
        connection.data_received(GET)
        await until(lambda: transport.written.endswith(b"0\r\n\r\n"))
        transport.num_unread = 200_000
        connection.pause_writing()
        for _ in range(3):
            transport.num_unread -= 30 * 1024
            clock.fire()
            assert not transport.aborted
        connection.resume_writing()
        connection.pause_writing()
        transport.num_unread -= 30 * 1024 - 1
        clock.fire()
        assert transport.aborted


async def test_what_is_left_of_an_answer_when_it_is_complete_must_be_read_too() -> None:
    streams = Streams()
    streams.may_end = True
    with connection_of(streams) as (connection, transport, clock):
        transport.num_unread = 5000
        connection.data_received(GET)
        await until(lambda: transport.written.endswith(b"0\r\n\r\n"))
        clock.fire()  # uvicorn's, for the time between two requests
        clock.fire()
        assert transport.aborted


def test_a_stream_that_nobody_reads_is_cut_and_others_go_on() -> None:
    ended = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/short":
            await respond(send, b"short")
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await _next(receive, send))["type"] != "http.disconnect":
            pass
        ended.set()

    with running(endless, timeout_write=0.2) as address:
        reader = connect(address, GET)
        assert httpx.get(f"{address}/short", timeout=240).text == "short"
        assert ended.wait(60)
        reader.close()


async def _next(receive: Any, send: Any) -> Any:
    """Sends more until that waits for the client, and then what the client says."""
    leaving = asyncio.ensure_future(receive())
    while not leaving.done():
        await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})
        await asyncio.sleep(0)
    return await leaving


def test_lost_clients_are_noticed_by_the_system() -> None:
    probed: list[tuple[int, int]] = []

    async def tells(scope: Any, receive: Any, send: Any) -> None:
        transport = receive.__self__.transport
        own = transport.get_extra_info("socket")
        alive = own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probed.append((alive, own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)))
        await respond(send, b"")

    with running(tells, timeout_write=7) as address:
        assert httpx.get(address, timeout=240).is_success
    assert probed == [(1, 7000)]


def test_who_left_is_not_written_to(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio complains of every write after the first few; the answer's events came at once."""
    left, done = threading.Event(), threading.Event()

    async def bursts(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        left.wait(60)  # the loop is held, and cannot see the client leave
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        done.set()

    limits = ConnectionLimits(most=9, read_seconds=20, write_seconds=30)
    config = serve.server_config(bursts, serve.ServeOptions(), limits)
    config.port, config.loop = 0, "asyncio"
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    connection = connect(f"http://127.0.0.1:{port}", GET)
    connection.recv(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    left.set()
    assert done.wait(60)
    server.should_exit = True
    thread.join()
    assert "socket.send" not in caplog.text


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, [(2304, 4096)]),
        (1024, resource.RLIM_INFINITY, [(2304, resource.RLIM_INFINITY)]),
        (4096, 4096, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
        (1024, 2000, ConfigError),
    ],
)
def test_that_many_connections_may_be_open(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, expected: Any
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(serve.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(serve.resource, "setrlimit", lambda _, pair: limits.append(pair))
    if expected is ConfigError:
        with pytest.raises(ConfigError, match="--limit-concurrency 1744"):
            serve._allow_open_files(2048)
    else:
        serve._allow_open_files(2048)
        assert limits == expected
