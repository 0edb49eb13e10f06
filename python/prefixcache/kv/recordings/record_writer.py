"""The thread that writes a recording into its files: see docs/reference/recording.md.

Whatever goes wrong here ends the recording and nothing else.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Generic, TypeVar

from prefixcache.exceptions import FieldError

Event = TypeVar("Event")

logger = logging.getLogger(__name__)

MAX_EVENTS = 1 << 16
MAX_TOKENS = 1 << 26

_PERIOD = 0.1
_EVENTS_AT_ONCE = 32


class RecordWriter(ABC, Generic[Event]):
    """One recording and its thread: `begin` starts it, `close` ends it.

    The file is made at once, under the next free name where there is one already: `path` says
    which. Raises `FieldError`, which names the `flag`, where it cannot be made.
    """

    close_seconds: ClassVar[float | None] = None
    """How long `close` waits for the disk."""

    def __init__(self, path: Path, flag: str, max_size: float = math.inf) -> None:
        self._file = RecordFile(path, flag, max_size)
        self.path = self._file.path
        self._events: deque[Event] = deque()
        self._tokens_put = self._tokens_written = 0
        # Of C, so that `close` may be called while garbage is collected in the middle of any call.
        self._closing = SimpleQueue[None]()
        self._reason: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"{flag}-writer", daemon=True)

    @property
    def is_recording(self) -> bool:
        """Whether all that happens is recorded still. From any thread."""
        return self._reason is None

    @abstractmethod
    def line_of(self, event: Event) -> str:
        """The event as it stands in the file; called in the thread, in order."""

    @abstractmethod
    def num_tokens(self, event: Event) -> int:
        """How many tokens wait in memory with the event."""

    def may_end_part(self, event: Event) -> bool:
        """Whether the file may end behind the event, for the next one to begin."""
        del event
        return False

    def end_line(self, **why: str) -> str:
        """The last line of a file; without `why` the recording goes on in the next one."""
        del why
        return ""

    def begin(self, header: Mapping[str, Any]) -> None:
        """Starts to write, the header first."""
        self._file.header = dict(header)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queues an event; from one thread."""
        if self._reason is not None:
            return
        self._tokens_put += self.num_tokens(event)
        waiting = self._tokens_put - self._tokens_written
        if len(self._events) >= MAX_EVENTS or waiting > MAX_TOKENS:
            self._stop("more waits to be written than may")
        else:
            self._events.append(event)

    def close(self) -> None:
        """Writes what waits, and the last line. Also while garbage is collected."""
        self._closing.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(self.close_seconds)

    def _stop(self, reason: str) -> None:
        """Ends the recording before its time."""
        logger.error("The recording %s has stopped: %s. Serving goes on.", self.path, reason)
        self._reason = reason

    def _run(self) -> None:
        try:
            self._file.begin()
            while not (self._is_closed() or self._reason):
                self._write_waiting()
            self._write_waiting()
            self._reason = self._reason or "end"
            self._file.write([self.end_line(reason=self._reason)])
        except OSError as error:
            self._stop(error.strerror or str(error))
        except Exception as error:
            logger.exception("A recording failed.")
            self._stop(repr(error))
        finally:
            self._file.close()
            # `put` adds no more, now that there is a reason.
            self._events.clear()

    def _is_closed(self) -> bool:
        """Whether that is so within a short time."""
        try:
            self._closing.get(timeout=_PERIOD)
        except Empty:
            return False
        return True

    def _write_waiting(self) -> None:
        """Writes the events that are there; after a few of them the step loop may run."""
        while self._events:
            self._write_some()
            time.sleep(0)
        self._file.check()

    def _write_some(self) -> None:
        """Writes a few events, or all up to one behind which a part may end."""
        lines: list[str] = []
        ends_part = False
        while self._events and len(lines) < _EVENTS_AT_ONCE and not ends_part:
            event = self._events.popleft()
            self._tokens_written += self.num_tokens(event)
            lines.append(self.line_of(event))
            ends_part = self.may_end_part(event)
        self._file.write(lines)
        if ends_part:
            self._file.rotate(self.end_line)


def check_folder(path: Path, flag: str) -> None:
    """Raises `FieldError` where no file can be made at the path: before a model is loaded."""
    if not path.parent.is_dir():
        raise FieldError(flag, f"must be in a folder that exists, not {path.parent}.")
    if path.is_dir():
        raise FieldError(flag, f"must be a file, and {path} is a folder.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise FieldError(flag, f"cannot be made: {path.parent} may not be written.")


class RecordFile:
    """The files of a recording, one after the other, each with the header first.

    Only their user may read them, and no file that is there is touched. Raises `FieldError`, which
    names the `flag`, where the first one cannot be made.
    """

    def __init__(self, path: Path, flag: str, max_size: float = math.inf) -> None:
        self.header: dict[str, Any] = {}
        self.num_bytes = 0
        self._max_size = max_size
        self._part = 0
        self._size = 0
        try:
            self.path, self._file = _create_free(path)
        except OSError as error:
            raise FieldError(flag, f"cannot be made: {path}: {error.strerror}.") from error

    def begin(self) -> None:
        """Writes the header of a new file."""
        self._size = 0
        self.write([line(self.header | {"part": self._part})])

    def write(self, lines: Iterable[str]) -> None:
        """Appends whole lines. Raises `OSError`."""
        rest = memoryview("".join(lines).encode())
        while rest:
            written = os.write(self._file, rest)
            self._size += written
            self.num_bytes += written
            rest = rest[written:]

    def rotate(self, end_line: Callable[[], str]) -> None:
        """Goes on in the next part if this one is large enough. Raises `OSError`."""
        if self._size < self._max_size:
            return
        following = _create(_part_path(self.path, self._part + 1))
        self.write([end_line()])
        os.close(self._file)
        self._file = following
        self._part += 1
        self.begin()

    def check(self) -> None:
        """Raises `OSError` if somebody has deleted the file: nobody would find what is written."""
        if not os.fstat(self._file).st_nlink:
            raise OSError("the file was deleted")

    def close(self) -> None:
        """Closes the last file, which may be when the system finds that it was not written."""
        try:
            os.close(self._file)
        except OSError as error:
            logger.error("The recording %s may lack its end: %s.", self.path, error.strerror)


def line(fields: Mapping[str, Any]) -> str:
    """A whole line of a recording."""
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _free_path(path: Path) -> Path:
    """The path, or the next one with a number whose name nothing has yet."""
    number, candidate = 1, path
    while os.path.lexists(candidate) or os.path.lexists(_part_path(candidate, 1)):
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


def _create_free(path: Path) -> tuple[Path, int]:
    """A new file under the next free name, also while others make theirs. Raises `OSError`."""
    while True:
        free = _free_path(path)
        with suppress(FileExistsError):
            return free, _create(free)


def _part_path(path: Path, part: int) -> Path:
    return path.with_name(f"{path.name}.{part}")


def _create(path: Path) -> int:
    """A new file that its user alone may read. Raises `OSError` where there is one already."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
