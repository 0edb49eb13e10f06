"""The thread that writes a recording into its files: see docs/reference/recording.md.

Whatever goes wrong here ends the recording and nothing else.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from prefixcache._core import BlockPseudonyms
from prefixcache.exceptions import FieldError
from prefixcache.kv.trace_lines import VERSION, Event, TraceLines, line
from prefixcache.metrics import PREFIX

logger = logging.getLogger(__name__)

MAX_EVENTS = 1 << 16
MAX_PROMPT_TOKENS = 1 << 26

_PERIOD = 0.1
_EVENTS_AT_ONCE = 32
_CLOSE_SECONDS = 10.0


class TraceWriter:
    """One recording and its thread: `begin` starts it, `close` ends it.

    The file is made at once, under the next free name where there is one already: `path` says
    which. Raises `FieldError` where it cannot be made.
    """

    def __init__(self, path: Path, max_size: int) -> None:
        self._parts = RecordFile(path, "record_trace", max_size)
        self.path = self._parts.path
        self._events: deque[Event] = deque()
        self._tokens_put = self._tokens_taken = 0
        # Of C, so that `close` may be called while garbage is collected in the middle of any call.
        self._closing = SimpleQueue[None]()
        self._reason: str | None = None
        self._lines: TraceLines
        self._thread = threading.Thread(target=self._run, name="trace-recording", daemon=True)

    @property
    def is_recording(self) -> bool:
        """Whether all that happens is recorded still. From any thread."""
        return self._reason is None

    def families(self) -> Iterator[Metric]:
        """What `/metrics` tells of the recording. From any thread."""
        yield GaugeMetricFamily(
            PREFIX + "trace_recording",
            "1 while --record-trace records, 0 once that has stopped.",
            value=int(self.is_recording),
        )
        yield CounterMetricFamily(
            PREFIX + "trace_recording_bytes",
            "Bytes that --record-trace has written.",
            value=self._parts.num_bytes,
        )

    def begin(self, header: Mapping[str, Any], key: bytes) -> None:
        """Starts to write; the header is what a replay needs to make the same cache.

        Blocks are named by hashes under the `key` of 32 bytes.
        """
        pseudonyms = BlockPseudonyms(key, header["block_size"])
        self._lines = TraceLines(pseudonyms)
        known = {"prefixcache_trace": VERSION, "recording": secrets.token_hex(8)}
        self._parts.header = {**known, "start": time.time(), **header}
        logger.info("What the prefix cache is asked for is recorded in %s.", self.path)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queues an event; from the one thread that changes the cache."""
        if self._reason is not None:
            return
        if event[0] == "add":
            self._tokens_put += len(event[2]["request"].prompt_token_ids)
        waiting = self._tokens_put - self._tokens_taken
        if len(self._events) >= MAX_EVENTS or waiting > MAX_PROMPT_TOKENS:
            self._stop("more waits to be written than may")
        else:
            self._events.append(event)

    def close(self) -> None:
        """Writes what waits, and the last line. Also while garbage is collected."""
        self._closing.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def _stop(self, reason: str) -> None:
        """Ends the recording before its time."""
        logger.error("The recording %s has stopped: %s. Serving goes on.", self.path, reason)
        self._reason = reason

    def _run(self) -> None:
        try:
            self._parts.begin()
            while not (self._is_closed() or self._reason):
                self._write_waiting()
            self._write_waiting()
            last_ms = self._lines.last_ms
            self._reason = self._reason or "end"
            self._parts.write([line({"e": "stop", "t": last_ms, "reason": self._reason})])
        except OSError as error:
            self._stop(error.strerror or str(error))
        except Exception as error:
            logger.exception("A recording failed.")
            self._stop(repr(error))
        finally:
            self._parts.close()
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
        self._parts.check()

    def _write_some(self) -> None:
        """Writes a few events, or all up to the next counters, after which a part may end."""
        lines: list[str] = []
        kind = ""
        for _ in range(min(_EVENTS_AT_ONCE, len(self._events))):
            event = self._events.popleft()
            kind = event[0]
            if kind == "add":
                self._tokens_taken += len(event[2]["request"].prompt_token_ids)
            lines.append(self._lines.of(event))
            if kind == "counters":
                break
        self._parts.write(lines)
        if kind == "counters":
            self._parts.rotate(self._lines.last_ms)


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

    def rotate(self, now: int) -> None:
        """Goes on in the next part if this one is large enough. Raises `OSError`."""
        if self._size < self._max_size:
            return
        following = _create(_part_path(self.path, self._part + 1))
        self.write([line({"e": "next", "t": now})])
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
