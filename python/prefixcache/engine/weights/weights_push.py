"""New weights that a trainer sends while requests are served.

They gather in memory of their own (`StagedTensors`) and replace the old ones between two steps, all
or none, when the trainer says that it has sent everything. Until then the old weights serve, and
whatever goes wrong, the trainer's death included, costs nothing but that memory: it is freed by
`abort`, by the next update that begins, and when nothing has come for a while.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from prefixcache.config.checked import shown
from prefixcache.engine.commands import blaming
from prefixcache.engine.weight_versions import check_tag
from prefixcache.engine.weights.staged import StagedTensors, as_chunk
from prefixcache.exceptions import wrong
from prefixcache.models.arrays import given_array
from prefixcache.types.modes import InFlightMode

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 60.0
_MAX_TIMEOUT = 3600.0
_SHM_PREFIX = "prefixcache-"
_READ_AT_ONCE = 1 << 20

Chunk = Mapping[str, Any] | bytes | bytearray | memoryview
"""Tensors by name (numpy arrays, torch tensors), or the bytes of a file of safetensors."""


class WeightsPush:
    """One update at a time; any thread may call. `stage` and `replace` are commands of `Control`.

    An update has an id, which every call but `begin` names. One that ended, was aborted, timed out
    or was followed by another `begin` is not known any more.
    """

    def __init__(self, stage: Callable[[], StagedTensors], replace: Callable[..., int]) -> None:
        self._stage = stage
        self._replace = replace
        self._lock = threading.RLock()
        self._id: str | None = None
        self._staged: StagedTensors | None = None
        self._timeout = DEFAULT_TIMEOUT
        self._timer: threading.Timer | None = None

    @property
    def staged_bytes(self) -> int:
        """Memory of the update that is open; 0 without one."""
        staged = self._staged
        return 0 if staged is None else staged.num_bytes

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not ended."""
        return self._staged is not None

    def begin(self, timeout: float = DEFAULT_TIMEOUT) -> str:
        """Opens an update, and aborts one that is open; its id.

        It is aborted by itself when nothing has come for `timeout` seconds, at most an hour.
        """
        _check_timeout(timeout)
        with self._lock:
            self._close("was followed by another one")
            self._staged = self._stage()
            self._id, self._timeout = uuid.uuid4().hex, timeout
            self._await_next()
            return self._id

    def add(self, update_id: str, chunk: Chunk) -> int:
        """Adds a chunk of new weights; how many tensors it has.

        Raises `InvalidRequestError` for a tensor with a wrong name, shape or type, and for one that
        has come before. The chunk is refused with it, and the update stays open.
        """
        return self.add_pieces(update_id, _pieces(chunk))

    def add_pieces(self, update_id: str, pieces: Iterable[bytes | memoryview]) -> int:
        """`add` for the bytes of a file of safetensors, piece by piece."""
        with self._open(update_id) as staged, blaming("chunk", prefix="chunk: "):
            return staged.add(pieces)

    def add_shared(self, update_id: str, shm_name: str) -> int:
        """`add` for a file of safetensors in the shared memory of this machine, /dev/shm.

        Its name begins with "prefixcache-", and it belongs to the user that the engine runs as. It
        is copied and removed.
        """
        return self.add_pieces(update_id, _shared_pieces(_shared_path(shm_name)))

    def end(
        self,
        update_id: str,
        *,
        digest: str | None = None,
        weight_version: str | None = None,
        mode: InFlightMode = "recompute",
        full: bool = True,
    ) -> int:
        """Replaces the weights by what has come; their version.

        `digest` is what `weights_digest` makes of the tensors that were sent: others are refused.
        Unless `full` is false every tensor of the model must have come. `mode` says what happens to
        the requests in flight. Raises `InvalidRequestError`; the old weights serve on then, and the
        update is over where the digest is wrong, else it stays open.
        """
        check_tag(weight_version)
        with self._open(update_id) as staged:
            if not staged.names:
                raise wrong("update_id", "names an update of which no chunk has come")
            if digest is not None and not full:
                raise wrong("digest", "is of all weights, so full must not be false")
            computed = staged.digest() if full else None
            if digest is not None and digest.lower() != computed:
                self._close("has another digest than was said")
                raise wrong(
                    "digest", f"{shown(digest)} is not that of what has come, which is {computed}"
                )
            version = self._replace(
                staged, mode, digest=computed, weight_version=weight_version, full=full
            )
            self._close(None)
            return version

    def touch(self, update_id: str) -> None:
        """Something of the update is on its way: the timeout begins again."""
        with self._open(update_id):
            pass

    def abort(self, update_id: str) -> None:
        """Gives up what has come."""
        with self._open(update_id):
            self._close("was aborted")

    def receive(self, chunks: Chunk | Iterable[Chunk], timeout: float, **end: Any) -> int:
        """A whole update; whatever the chunks raise aborts it."""
        update_id = self.begin(timeout)
        try:
            for chunk in _listed(chunks):
                self.add(update_id, chunk)
            return self.end(update_id, **end)
        except BaseException:
            with self._lock:
                if self._id == update_id:
                    self._close("failed")
            raise

    @contextmanager
    def _open(self, update_id: str) -> Generator[StagedTensors, None, None]:
        with self._lock:
            if self._staged is None or update_id != self._id:
                raise wrong(
                    "update_id",
                    "names no open update: it has ended, was aborted, timed out, or was followed "
                    "by another one",
                )
            self._stop_timer()
            try:
                yield self._staged
            finally:
                if self._id == update_id:
                    self._await_next()

    def _await_next(self) -> None:
        self._stop_timer()
        self._timer = threading.Timer(self._timeout, self._time_out, [self._id])
        self._timer.daemon = True
        self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self, update_id: str) -> None:
        with self._lock:
            if self._id == update_id:
                self._close(f"timed out: nothing came for {self._timeout:g} s")

    def _close(self, why: str | None) -> None:
        self._stop_timer()
        if self._staged is None:
            return
        self._staged.close()
        self._staged = self._id = None
        if why is not None:
            logger.warning("An update of the weights %s; the old ones serve on.", why)


def _check_timeout(value: object) -> None:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
    if not 0 < number <= _MAX_TIMEOUT:
        raise wrong("timeout", f"must be seconds up to {_MAX_TIMEOUT:.0f}, got {shown(value)}")


def weights_digest(chunks: Chunk | Iterable[Chunk]) -> str:
    """What names weights by their content, in hexadecimal: the `digest` of an update with them.

    The same as that of a folder that has these tensors, in these types, as safetensors.
    """
    staged = StagedTensors(lambda _: None, 1 << 62)
    try:
        for chunk in _listed(chunks):
            with blaming("chunk", prefix="chunk: "):
                staged.add(_pieces(chunk))
        return staged.digest()
    finally:
        staged.close()


def _listed(chunks: Chunk | Iterable[Chunk]) -> Iterable[Chunk]:
    """One chunk alone is one of one."""
    if isinstance(chunks, (Mapping, bytes, bytearray, memoryview)):
        return [cast("Chunk", chunks)]
    return chunks


def _pieces(chunk: Chunk) -> list[bytes | memoryview]:
    if isinstance(chunk, Mapping):
        with blaming("chunk", prefix="chunk: "):
            return as_chunk({name: given_array(name, array) for name, array in chunk.items()})
    return [memoryview(chunk)]


def _shared_path(shm_name: object) -> str:
    name = shm_name if isinstance(shm_name, str) else ""
    if not name.startswith(_SHM_PREFIX) or "/" in name or "\0" in name or len(name) > 255:
        raise wrong("shm_name", f"must begin with {_SHM_PREFIX!r} and name a file of /dev/shm")
    return f"/dev/shm/{name}"


def _shared_pieces(path: str) -> Iterator[bytes]:
    """The bytes of a file in shared memory, which is removed. A mapped one could be cut short."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise wrong("shm_name", f"cannot be opened: {error.strerror}") from error
    with os.fdopen(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise wrong("shm_name", "must be a file of the user that the engine runs as")
        os.unlink(path)
        while piece := file.read(_READ_AT_ONCE):
            yield piece


__all__ = ["DEFAULT_TIMEOUT", "Chunk", "WeightsPush", "weights_digest"]
