"""Behind Caddy and nginx, as Debian has them, a client sends no request that they have not seen."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.serving import running, wait_until

pytestmark = pytest.mark.long
NEXT = (
    b"POST /pause HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 2\r\n\r\n{}"
)
# Empty lines before a request are skipped: wherever the body is cut, a request begins behind it.
BODY = (b"\r\n" * 400 + NEXT) * 9000
CADDYFILE = """
{{
    admin off
    auto_https off
}}
http://127.0.0.1:{port} {{
    reverse_proxy 127.0.0.1:{server}
}}
"""
NGINX = """
daemon off;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 64m;
    upstream prefixcache {{ server 127.0.0.1:{server}; keepalive 4; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://prefixcache;
            proxy_http_version 1.1;
            proxy_request_buffering off;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection {connection};
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        }}
    }}
}}
"""
# By name: the program, its configuration, and its arguments before the configuration's path.
PROXIES: dict[str, tuple[str, str, list[str]]] = {
    "Caddy": ("caddy", CADDYFILE, ["run", "--adapter", "caddyfile", "--config"]),
    "nginx": ("nginx", NGINX, ["-e", "stderr", "-c"]),
}


class Seen:
    """Answers without reading the body, and notes who asked for which path."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        by_proxy = any(name == b"x-forwarded-for" for name, _ in scope["headers"])
        self.calls.append((scope["path"], by_proxy))
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"none"})


@contextmanager
def _proxy(name: str, server: str, folder: Path, connection: str) -> Iterator[tuple[str, int]]:
    program, configuration, arguments = PROXIES[name]
    path = shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install {program}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = free.getsockname()
    file = folder / "configuration"
    file.write_text(
        configuration.format(
            port=where[1], server=server.rpartition(":")[2], folder=folder, connection=connection
        )
    )
    environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with subprocess.Popen([path, *arguments, str(file)], env=environment) as process:
        try:
            wait_until(lambda: process.poll() is not None or _listens(where))
            yield where
        finally:
            process.terminate()


def _listens(where: tuple[str, int]) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(where) == 0


def _send(where: tuple[str, int], upgrade: bytes) -> None:
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(BODY)
    with socket.create_connection(where, 120) as connection:
        try:
            connection.sendall(head + upgrade + length + BODY)
            connection.recv(65536)
        except OSError:  # the answer came before all was sent
            pass


@pytest.mark.parametrize(
    ("name", "connection"),
    [("Caddy", ""), ("nginx", '""'), ("nginx", '"upgrade"'), ("nginx", "$http_connection")],
)
def test_a_body_is_no_request_of_this_machine(name: str, connection: str, tmp_path: Path) -> None:
    app = Seen()
    with running(app) as server, _proxy(name, server, tmp_path, connection) as where:
        for word in [b"foo", b"websocket", b"h2c"] * 4:
            num_before = len(app.calls)
            _send(where, b"Connection: Upgrade\r\nUpgrade: %s\r\n" % word)
            wait_until(lambda num_before=num_before: len(app.calls) > num_before)
    assert set(app.calls) == {("/v1/nothing", True)}
