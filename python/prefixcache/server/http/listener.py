"""Where the server listens: a port or a Unix socket, taken before a model is loaded."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from prefixcache.exceptions import ConfigError, FieldError
from prefixcache.server.options.serve_options import ServeOptions

EVERY_ADDRESS = ("", "0.0.0.0", "::")
_BACKLOG = 2048


@contextmanager
def listening(options: ServeOptions) -> Generator[socket.socket, None, None]:
    """The socket to accept connections from; a Unix socket's file goes with it.

    Raises `FieldError` for a Unix socket and `ConfigError` for a port that cannot be had.
    """
    if options.uds is None:
        with closing(_bound_port(options)) as listener:
            yield listener
    else:
        with _unix_socket(options.uds, int(options.uds_permissions, 8)) as listener:
            yield listener


def cannot_listen(options: ServeOptions, error: Exception) -> ConfigError:
    """What to tell of a port that could not be had."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    is_of_the_port = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
    advice = (
        "--port takes another port" if is_of_the_port else "--host takes an address of this machine"
    )
    return ConfigError(f"Cannot listen on {options.host}:{options.port}: {reason}. {advice}.")


def shown_address(options: ServeOptions, listener: socket.socket) -> str:
    """The beginning of URLs for clients on this machine, without scheme."""
    if options.uds is not None:
        return "localhost"
    host = "localhost" if options.host in EVERY_ADDRESS else options.host
    return f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _bound_port(options: ServeOptions) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise cannot_listen(options, error) from error
    return listener


@contextmanager
def _unix_socket(path: Path, permissions: int) -> Generator[socket.socket, None, None]:
    """Nobody can connect before `listen`, so the permissions hold for the first client too.

    It listens at once, so that a second server finds it in use while this one loads a model;
    clients that connect meanwhile wait.
    """
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        try:
            _remove_stale(path)
            listener.bind(str(path))
            own = path.lstat()
            path.chmod(permissions)
            listener.listen(_BACKLOG)
        except FieldError:
            raise
        except (OSError, ValueError) as error:  # the latter for a null character
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            raise FieldError("uds", f"cannot listen on {path}: {reason}.") from None
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.path.samestat(own, path.lstat()):  # and not that of a server after this one
                    path.unlink()


def _remove_stale(path: Path) -> None:
    """Removes a socket whose server is gone. Raises `FieldError` for anything else at `path`."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FieldError("uds", f"names a path for a socket, and {path} is something else.")
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                return
            except BlockingIOError:  # it listens, and its queue is full
                pass
        raise FieldError("uds", f"names a socket that another process listens on: {path}.")
