"""HTTPS: what is refused at the start, renewal while serving, and handshakes that stall."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from click.testing import CliRunner
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from uvicorn.server import ServerState

from prefixcache.cli.main import app as command
from prefixcache.server.http import tls
from prefixcache.server.http.tls import Certificates, TlsListener
from prefixcache.server.jobs.context import Lifecycle
from prefixcache.server.options.serve_options import TlsOptions
from support.serving import serving, wait_until

LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.timezone.utc)


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


class Files:
    """The files that a server is given."""

    def __init__(self, folder: Path, ca: trustme.CA) -> None:
        self.cert, self.key, self.ca = (folder / name for name in ("cert", "key", "ca"))
        self._authority = ca
        ca.cert_pem.write_to_path(self.ca)
        self.issue()

    def issue(self, **options: Any) -> trustme.LeafCert:
        leaf = self._authority.issue_cert("127.0.0.1", **options)
        self.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(self.key)
        return leaf

    @property
    def options(self) -> TlsOptions:
        return TlsOptions(ssl_certfile=self.cert, ssl_keyfile=self.key)

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)


@pytest.fixture
def files(tmp_path: Path, ca: trustme.CA) -> Files:
    return Files(tmp_path, ca)


async def echoes(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the scheme and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode() + b" " + body})


def test_https_is_spoken_and_nothing_else(files: Files) -> None:
    certificates = Certificates(files.options)
    with serving(echoes, Lifecycle(), certificates=certificates) as (_, address):
        url = address.replace("http:", "https:")
        with httpx.Client(verify=files.client(), timeout=240) as client:
            assert client.get(url).text == "https "
            long = "x" * 1_000_000
            assert client.post(url, content=long).text == f"https {long}"
        with pytest.raises(httpx.TransportError):
            httpx.get(address, timeout=240)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url, verify=ssl.create_default_context(), timeout=240)


def test_a_client_that_speaks_with_its_last_handshake_message_is_heard(files: Files) -> None:
    """Request and the end of the handshake in one packet."""
    with serving(echoes, Lifecycle(), certificates=Certificates(files.options)) as (_, address):
        host, port = address.removeprefix("http://").split(":")
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = files.client().wrap_bio(to_client, to_server, server_hostname=host)
        with socket.create_connection((host, int(port)), timeout=150) as connection:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    connection.sendall(to_server.read())
                    to_client.write(connection.recv(65536) or pytest.fail("closed"))
            tls.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            connection.sendall(to_server.read())
            while part := connection.recv(65536):
                to_client.write(part)
        assert tls.read(65536).startswith(b"HTTP/1.1 200 OK")


def test_stalled_handshakes_make_room(files: Files) -> None:
    with _stalled(files, limit_concurrency=3, timeout_read=600) as (stalled, state, url):
        assert _is_closed(stalled[0])  # the limit was met by the handshakes alone
        wait_until(lambda: len(state.connections) == 3)
        assert httpx.get(url, verify=files.client(), timeout=240).text == "https "
        assert _is_closed(stalled[1])
        wait_until(lambda: len(state.connections) == 2)


def test_stalled_handshakes_end(files: Files) -> None:
    with _stalled(files, timeout_read=0.5) as (stalled, state, _):
        assert all(map(_is_closed, stalled))
        wait_until(lambda: not state.connections)


def test_a_connection_that_fails_in_an_unknown_way_does_not_end_accepting(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([RuntimeError("not known")] * 2)

    def make_room(listener: TlsListener, newest: object) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure

    monkeypatch.setattr(TlsListener, "_make_room", make_room)
    monkeypatch.setattr("prefixcache.server.http.tls._ACCEPT_AGAIN_SECONDS", 0.01)
    certificates = Certificates(files.options)
    with serving(echoes, Lifecycle(), certificates=certificates) as (server, address):
        url = address.replace("http:", "https:")
        for _ in range(2):
            with pytest.raises(httpx.TransportError):
                httpx.get(url, verify=files.client(), timeout=240)
        assert httpx.get(url, verify=files.client(), timeout=240).text == "https "
        wait_until(lambda: not server.server_state.connections)
    assert caplog.text.count("A connection was not accepted") == 1


@contextmanager
def _stalled(
    files: Files, **options: Any
) -> Generator[tuple[list[socket.socket], ServerState, str], None, None]:
    """Four connections that say nothing, what the server knows of them, and its address."""
    certificates = Certificates(files.options)
    with (
        serving(echoes, Lifecycle(), certificates=certificates, **options) as (server, address),
        ExitStack() as stack,
    ):
        host, port = address.removeprefix("http://").split(":")
        where = host, int(port)
        stalled = [stack.enter_context(socket.create_connection(where, 150)) for _ in range(4)]
        yield stalled, server.server_state, address.replace("http:", "https:")


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


def test_a_certificate_is_renewed_while_serving_and_a_broken_one_is_not_taken(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixcache")
    certificates = Certificates(files.options)
    with serving(echoes, Lifecycle(), certificates=certificates) as (_, address):
        url = address.replace("http:", "https:")
        with httpx.Client(verify=files.client(), timeout=240) as open_before:
            first = _serial(url, open_before)
            key = files.key.read_bytes()
            files.issue()
            new_key = files.key.read_bytes()
            files.key.write_bytes(key)
            certificates.renew()
            assert _new_serial(url, files) == first
            assert "ssl_keyfile is not the key" in caplog.text
            certificates.renew()
            assert caplog.text.count("was not renewed") == 1
            files.key.unlink()
            certificates.renew()
            certificates.renew()
            assert caplog.text.count("was not renewed") == 2
            files.key.write_bytes(new_key)
            certificates.renew()
            second = _new_serial(url, files)
            assert second != first
            assert _serial(url, open_before) == first
        files.issue(not_after=LONG_AGO)
        certificates.renew()
        assert _new_serial(url, files) == second
    assert "was renewed" in caplog.text


def test_a_file_that_changes_between_two_reads_is_read_again(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer such as `cp` truncates the file first."""
    certificates, load = Certificates(files.options), tls._load_pair
    before = certificates.context

    def load_and_truncate(*arguments: Any) -> None:
        load(*arguments)
        files.cert.write_bytes(b"")

    files.issue()
    with monkeypatch.context() as patched:
        patched.setattr(tls, "_load_pair", load_and_truncate)
        certificates.renew()
    assert certificates.context is before
    assert caplog.text.count("was not renewed") == 1
    files.issue()
    certificates.renew()
    assert certificates.context is not before


def _serial(url: str, client: httpx.Client) -> str:
    with client.stream("GET", url) as response:
        stream = response.extensions["network_stream"]
        serial = stream.get_extra_info("ssl_object").getpeercert()["serialNumber"]
        response.read()  # so that the connection may be used again
        return serial


def _new_serial(url: str, files: Files) -> str:
    with httpx.Client(verify=files.client(), timeout=240) as client:
        return _serial(url, client)


def test_files_are_watched(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixcache.server.http.tls._WATCH_SECONDS", 0.01)
    certificates = Certificates(files.options)
    before = certificates.context
    with serving(echoes, Lifecycle(), certificates=certificates):
        files.issue()
        wait_until(lambda: certificates.context is not before)


def test_clients_show_certificates_where_they_must(files: Files, ca: trustme.CA) -> None:
    options = TlsOptions(
        ssl_certfile=files.cert, ssl_keyfile=files.key, ssl_ca_certs=files.ca, ssl_cert_reqs=2
    )
    with serving(echoes, Lifecycle(), certificates=Certificates(options)) as (_, address):
        url, client = address.replace("http:", "https:"), files.client()
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=client, timeout=240)
        ca.issue_cert("client@example.com").configure_cert(client)
        assert httpx.get(url, verify=client, timeout=240).is_success


def _encrypt(files: Files) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    how = BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))


BROKEN: dict[str, tuple[Callable[[Files], Any], str]] = {
    "another key": (
        lambda files: trustme.CA().issue_cert("a").private_key_pem.write_to_path(files.key),
        "--ssl-keyfile is not the key of the certificate in",
    ),
    "expired": (
        lambda files: files.issue(not_after=LONG_AGO),
        "--ssl-certfile is not valid: certificate has expired.",
    ),
    "no file": (lambda files: files.cert.unlink(), "--ssl-certfile cannot read"),
    "a folder": (lambda files: (files.key.unlink(), files.key.mkdir()), "--ssl-keyfile cannot"),
    "no PEM": (lambda files: files.cert.write_text("x"), "--ssl-certfile holds no certificate"),
    "no key": (lambda files: files.key.write_text("x"), "--ssl-keyfile holds no key in PEM"),
    "encrypted": (_encrypt, "--ssl-keyfile holds an encrypted key"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_no_client_could_trust_are_refused(files: Files, case: str) -> None:
    change, message = BROKEN[case]
    change(files)
    _refused(["--ssl-certfile", str(files.cert), "--ssl-keyfile", str(files.key)], message)


def _refused(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(command, ["serve", os.devnull, "--port", "0", *flags])
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ssl-keyfile", "key"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "cert", "--ssl-cert-reqs", "2"], "--ssl-cert-reqs needs --ssl-ca"),
        (["--ssl-certfile", "cert", "--ssl-cert-reqs", "3"], "--ssl-cert-reqs must be less"),
        (["--ssl-certfile", "cert", "--ssl-ca-certs", "ca"], "--ssl-ca-certs checks nobody"),
    ],
)
def test_options_that_would_do_nothing_are_refused(flags: list[str], message: str) -> None:
    _refused(flags, message)


def test_ca_certificates_are_read_at_the_start(files: Files) -> None:
    files.ca.write_text("x")
    flags = ["--ssl-certfile", str(files.cert), "--ssl-keyfile", str(files.key)]
    flags += ["--ssl-ca-certs", str(files.ca), "--ssl-cert-reqs", "1"]
    _refused(flags, "--ssl-ca-certs holds no certificate")
