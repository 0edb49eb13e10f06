"""HTTPS: certificates that are checked at the start and renewed while the server runs."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from prefixcache.config.logs import RecurringError
from prefixcache.exceptions import FieldError
from prefixcache.server.http.connections import Connection, ConnectionLimits
from prefixcache.server.options.serve_options import TlsOptions

logger = logging.getLogger(__name__)

# Between two looks at the files.
_WATCH_SECONDS = 5
# For a client to answer when the server ends a connection.
_CLOSE_SECONDS = 2
# After a connection that could not be accepted.
_ACCEPT_AGAIN_SECONDS = 1
_BACKLOG = 2048
# OpenSSL's names, by which an error tells more than "PEM lib".
_WRONG_KEY = "KEY_VALUES_MISMATCH"

_State = tuple[tuple[int, int, int], ...]


class Certificates:
    """The certificate, key and CAs of `options`; `context` is what new connections use.

    Raises `FieldError` for files that cannot be read, do not belong together, or have expired.
    """

    def __init__(self, options: TlsOptions) -> None:
        self._options = options
        self._state = self._look()
        self._problem = ""
        self.context = _context(options)

    def renew(self) -> None:
        """Takes files that have changed; where they are wrong the old ones go on being used."""
        try:
            state = self._look()
            if state == self._state:
                return
            self._state = state
            self.context = _context(self._options)
        except Exception as error:  # noqa: BLE001 - such as a file that changes while it is read
            if str(error) != self._problem:
                logger.error("The TLS certificate was not renewed, the old one stays: %s", error)
            self._problem = str(error)
        else:
            self._problem = ""
            logger.info("The TLS certificate was renewed from %s.", self._options.ssl_certfile)

    async def watch(self) -> None:
        """Renews them for ever; files are read in a thread."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            await asyncio.to_thread(self.renew)

    def _look(self) -> _State:
        """What tells one version of the files from another. Raises `FieldError`."""
        return tuple(_status(name, path) for name, path in self._options.files)


class TlsListener:
    """Accepts connections at a socket; each is a `Connection` once TLS is agreed on.

    Until then it counts as one whose request is awaited: it has `read_seconds`, and makes room for
    others. The event loops' own servers would keep it from both. The context is that of the moment,
    so that a renewal needs no other listener. Stands where uvicorn has an `asyncio.Server`.
    """

    def __init__(
        self,
        sock: socket.socket,
        new_connection: Callable[..., Connection],
        certificates: Certificates,
        limits: ConnectionLimits,
        connections: set[Any],
    ) -> None:
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._new_connection = new_connection
        self._certificates = certificates
        self._limits = limits
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._failing = RecurringError(logger, "A connection was not accepted.")
        self._accepting = self._loop.create_task(self._accept_all(sock))

    def close(self) -> None:
        """Accepts no more; the caller closes the socket."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Returns when nothing is accepted any more."""
        await asyncio.wait([self._accepting])

    async def _accept_all(self, sock: socket.socket) -> None:
        while True:
            await self._accept(sock)

    async def _accept(self, sock: socket.socket) -> None:
        """Whatever goes wrong, the next client is to be served."""
        try:
            accepted, _ = await self._loop.sock_accept(sock)
            self._begin(accepted)
            await asyncio.sleep(0)  # accepting may not wait at all, and others have their turn
        except OSError as error:  # no file is left, or the client is gone
            logger.debug("A connection was not accepted: %s", error)
            await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
        except Exception as error:  # noqa: BLE001 - logged
            self._failing.log(error)
            await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)

    def _begin(self, accepted: socket.socket) -> None:
        pending = _Pending(accepted)
        self._connections.add(pending)
        self._limits.awaited[pending] = None
        try:
            self._make_room(pending)
        except BaseException:
            pending.shutdown()
            self._forget(pending)
            raise
        if pending.is_open:
            pending.task = self._loop.create_task(self._shake_hands(pending, accepted))
            pending.task.add_done_callback(lambda _: self._forget(pending))
        else:
            self._forget(pending)

    def _make_room(self, newest: _Pending) -> None:
        if len(self._connections) > self._limits.most:
            next(iter(self._limits.awaited)).make_room(newest)

    async def _shake_hands(self, pending: _Pending, accepted: socket.socket) -> None:
        # Else the connection would count twice, and another would make room for it.
        forget = partial(self._forget, pending)
        # Any: `ssl_shutdown_timeout` is in uvloop and, from 3.11 on, in asyncio.
        connect: Any = self._loop.connect_accepted_socket
        try:
            await connect(
                partial(self._new_connection, before_made=forget),
                accepted,
                ssl=self._certificates.context,
                ssl_handshake_timeout=self._limits.read_seconds,
                ssl_shutdown_timeout=_CLOSE_SECONDS,
            )
        except OSError as error:  # any client can cause it
            logger.debug("A TLS handshake failed: %s", error)

    def _forget(self, pending: _Pending) -> None:
        self._connections.discard(pending)
        self._limits.awaited.pop(pending, None)


class _Pending:
    """A connection before its handshake is done, as uvicorn and `ConnectionLimits` know them."""

    def __init__(self, accepted: socket.socket) -> None:
        self._accepted = accepted
        self.is_open = True
        self.task: asyncio.Task[None] | None = None

    @property
    def transport(self) -> _Pending:
        return self

    def make_room(self, newer: object) -> None:  # noqa: ARG002 - nobody hears HTTP before TLS
        self.shutdown()

    def shutdown(self) -> None:
        self.is_open = False
        if self.task is None:
            self._accepted.close()
        else:
            self.task.cancel()

    def abort(self) -> None:
        self.shutdown()


def _status(name: str, path: Path) -> tuple[int, int, int]:
    try:
        with path.open("rb"):
            status = path.stat()
    except OSError as error:
        raise FieldError(name, f"cannot read {path}: {error.strerror}.") from None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _context(options: TlsOptions) -> ssl.SSLContext:
    """What a server needs to speak TLS 1.2 or newer. Raises `FieldError`."""
    certfile = cast("Path", options.ssl_certfile)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _check_certificates("ssl_certfile", certfile)
    _load_pair(context, certfile, options.ssl_keyfile)
    _check_validity(context, certfile)
    if options.ssl_ca_certs is not None:
        _check_certificates("ssl_ca_certs", options.ssl_ca_certs)
        context.load_verify_locations(options.ssl_ca_certs)
        context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    return context


def _check_certificates(name: str, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError:
        raise FieldError(name, f"holds no certificate in PEM: {path}.") from None


def _load_pair(context: ssl.SSLContext, certfile: Path, keyfile: Path | None) -> None:
    has_asked = False

    def password() -> str:
        nonlocal has_asked
        has_asked = True
        return ""

    try:
        context.load_cert_chain(certfile, keyfile, password)
    except (OSError, ValueError) as error:
        path = keyfile or certfile
        problem = f"holds no key in PEM that can be used: {path}."
        if has_asked:
            problem = (
                f"holds an encrypted key, for which there is no way to give the password: {path}."
            )
        elif isinstance(error, ssl.SSLError) and error.reason == _WRONG_KEY:
            problem = f"is not the key of the certificate in {certfile}."
        raise FieldError("ssl_keyfile" if keyfile else "ssl_certfile", problem) from None


def _check_validity(server: ssl.SSLContext, certfile: Path) -> None:
    """Shakes hands with a client that trusts the certificate, unless it is not valid today."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certfile)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        while not _advance(asking):
            _advance(answering)
    except ssl.SSLCertVerificationError as error:
        raise FieldError("ssl_certfile", f"is not valid: {error.verify_message}.") from None
    except ssl.SSLError as error:
        raise FieldError("ssl_certfile", f"cannot be used: {error.reason}.") from None


def _advance(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
