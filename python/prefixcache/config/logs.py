"""How the log is written: as text or JSON, to stderr or a file.

Nothing of a request's text may come into it unless the operator asks. Messages of exceptions quote
what they were raised on, so they are left out; types and places in the code stay.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, Literal

from prefixcache.exceptions import FieldError

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

# `extra` of a record whose exception comes from a device or a file, and quotes no request.
SHOWS_ERROR: Mapping[str, bool] = {"shows_error": True}

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LOGGED_COUNTS = frozenset(10**power for power in range(1, 10))
_WITHHELD = "(its message may quote a request: --log-prompts shows it)"


def set_up_logging(
    level: LogLevel,
    form: LogFormat = "text",
    *,
    file: Path | None = None,
    shows_prompts: bool = False,
) -> None:
    """Lets the process write its log. Raises `FieldError` for a file that cannot be written."""
    handler = log_handler(form, file=file, shows_prompts=shows_prompts)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("prefixcache").setLevel(level.upper())


def log_handler(
    form: LogFormat, *, file: Path | None = None, shows_prompts: bool = False
) -> logging.Handler:
    """What writes records. Raises `FieldError` for a file that cannot be written."""
    handler = logging.StreamHandler(sys.stderr) if file is None else _opened(file)
    handler.setFormatter((_Json if form == "json" else _Text)(shows_errors=shows_prompts))
    return handler


def with_fields(**fields: Any) -> dict[str, Any]:
    """`extra` of a record: members of a line of JSON; `message` replaces the record's text."""
    return {"fields": fields}


class RecurringError:
    """Writes an error that comes again and again to a log once with its stack, then how often."""

    def __init__(
        self, logger: logging.Logger, message: str, extra: Mapping[str, bool] | None = None
    ) -> None:
        self._logger = logger
        self._message = message
        self._extra = extra
        self._last = ""
        self._count = 0

    def log(self, error: Exception) -> None:
        """Another error than the last one is new. Counts that are powers of ten are logged."""
        if repr(error) != self._last:
            self._last, self._count = repr(error), 0
            self._logger.error(self._message, exc_info=error, extra=self._extra)
        self._count += 1
        if self._count in _LOGGED_COUNTS:
            self._logger.error("%s It has failed %d times.", self._message, self._count)


def json_line(logger_name: str, message: str, **fields: Any) -> str:
    """A line in the form of the JSON log, for what is printed whatever the log's level and file."""
    record = logging.LogRecord(logger_name, logging.INFO, "", 0, message, None, None)
    vars(record).update(with_fields(**fields))
    return _Json(shows_errors=False).format(record)


def _opened(file: Path) -> logging.Handler:
    try:
        return _LogFile(file, encoding="utf-8")
    except (OSError, ValueError) as error:  # the latter for a null character
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise FieldError("log_file", f"cannot be written: {file}: {reason}.") from None


class _LogFile(WatchedFileHandler):
    """A file that may be rotated. Where it cannot be written nobody's request fails."""

    _num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        before = self._num_lost
        try:
            super().emit(record)
        except Exception:  # noqa: BLE001 - reported on stderr
            self.handleError(record)
        if before and self._num_lost == before:
            _report(f"The log {self.baseFilename} is written again; {before} lines were lost.")
            self._num_lost = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Tells stderr once when the file can no longer be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if not self._num_lost:
            _report(f"The log {self.baseFilename} cannot be written: {error.strerror}.")
        self._num_lost += 1


def _report(line: str) -> None:
    with suppress(OSError, AttributeError):  # a full disk too, or none at all
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class _Text(logging.Formatter):
    """A line of text, and the stack of an exception."""

    def __init__(self, *, shows_errors: bool) -> None:
        super().__init__(_TEXT, datefmt="%H:%M:%S")
        self._shows_errors = shows_errors

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        text = self.formatMessage(record)
        error = _error_of(record)
        if error is None:
            return text
        return f"{text}\n{error_stack(error, shown=self._shows_errors or _is_shown(record))}"


class _Json(logging.Formatter):
    """An object in one line: time, level, logger, message, fields, an error's type and stack."""

    def __init__(self, *, shows_errors: bool) -> None:
        super().__init__()
        self._shows_errors = shows_errors

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        error = _error_of(record)
        if error is not None:
            line["error_type"] = type(error).__name__
            shown = self._shows_errors or _is_shown(record)
            line["stack"] = error_stack(error, shown=shown)
        return json.dumps(line, default=str)


def _error_of(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def _is_shown(record: logging.LogRecord) -> bool:
    return getattr(record, "shows_error", False)


def error_stack(error: BaseException, *, shown: bool) -> str:
    """The stack of an exception and of those that led to it, with their messages if `shown`."""
    if shown:
        return "".join(traceback.format_exception(error)).rstrip()
    return "\nwhich led to\n".join(map(_stack, reversed(list(_chain(error)))))


def _stack(error: BaseException) -> str:
    places = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    return f"{places}\n{name} {_WITHHELD}".lstrip("\n")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        hidden = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or hidden
