"""Every error the package raises on purpose.

PrefixCacheError
├── InvalidRequestError      the caller's input is wrong; names the field
│   └── RequestTooLargeError the request can never fit; has the numbers
├── GrammarError             an answer cannot follow its grammar
│   └── SlowGrammarError     it takes longer to compile than was allowed
├── ConfigError              a flag or a model's configuration is wrong
│   ├── FieldError           names the flag or field
│   │   └── SeveralFieldsError  has the errors of several
│   └── UnsupportedModelError
├── ModelLoadError           weights are missing, broken or could not be fetched
├── OutOfMemoryError         the requested cache does not fit into memory
├── QueueFullError           too many requests wait; says when to retry
├── RateLimitError           too many requests of one client wait; says when to retry
├── RequestTimeoutError      the answer took too long
├── SlowReaderError          the client did not read its answer
├── EngineHaltedError        the engine sleeps or is paused, until it is resumed
└── EngineDeadError          the engine stopped; nothing can be served any more
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class PrefixCacheError(Exception):
    """Base of all errors raised on purpose by this package."""


class InvalidRequestError(PrefixCacheError, ValueError):
    """The caller's input is wrong.

    `param` names the offending field, as the OpenAI error object does.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def wrong(field: str, problem: str, code: str | None = None) -> InvalidRequestError:
    """The error of a request's field whose `problem` continues the sentence after its name."""
    return InvalidRequestError(f"{field} {problem}.", param=field, code=code)


def how_to_install(extra: str) -> str:
    """The end of a sentence on an extra of this package that is not installed."""
    return f"run pip install '.[{extra}]' in a checkout of prefixcache"


class RequestTooLargeError(InvalidRequestError):
    """The request needs more tokens or blocks than the engine will ever have."""


class GrammarError(PrefixCacheError):
    """A grammar is wrong, or an answer cannot follow it any further."""


class SlowGrammarError(GrammarError):
    """A grammar takes longer to compile than was allowed this time."""


class ConfigError(PrefixCacheError, ValueError):
    """A flag or a model's configuration is wrong."""


class FieldError(ConfigError):
    """The value of one field or flag is wrong. `problem` continues the sentence after its name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem

    @property
    def errors(self) -> tuple[FieldError, ...]:
        """One error for each wrong value."""
        return (self,)


class SeveralFieldsError(FieldError):
    """Several values are wrong; its text has a line for each."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        super().__init__(errors[0].field, errors[0].problem)
        self.args = ("\n".join(map(str, errors)),)
        self._errors = tuple(errors)

    @property
    def errors(self) -> tuple[FieldError, ...]:
        """One error for each wrong value."""
        return self._errors


def collect(calls: Iterable[Callable[[], T]]) -> list[T]:
    """The results of all calls. Raises `FieldError` with the errors of all that fail."""
    errors = list[FieldError]()

    def tried(call: Callable[[], T]) -> Iterator[T]:
        try:
            yield call()
        except FieldError as error:
            errors.extend(error.errors)

    results = [result for call in calls for result in tried(call)]
    if errors:
        raise joined(errors)
    return results


def joined(errors: Sequence[FieldError]) -> FieldError:
    """All of these as one error; there is at least one."""
    return SeveralFieldsError(errors) if errors[1:] else errors[0]


class UnsupportedModelError(ConfigError):
    """The model's architecture or a feature of it is not supported."""


class ModelLoadError(PrefixCacheError):
    """Weights are missing, broken or could not be fetched."""


class OutOfMemoryError(PrefixCacheError, MemoryError):
    """The requested cache does not fit into memory."""


class QueueFullError(PrefixCacheError, RuntimeError):
    """Too many requests wait already. Retry in `retry_after` seconds."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimitError(PrefixCacheError, RuntimeError):
    """Too many requests of this client wait already. Retry in `retry_after` seconds."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeoutError(PrefixCacheError, TimeoutError):
    """The time for a request was over before its last token; its work was cancelled."""

    code = "request_timeout"

    def __init__(self) -> None:
        super().__init__(
            "The answer took longer than this server lets one take; its work was cancelled."
        )


class SlowReaderError(PrefixCacheError, RuntimeError):
    """A stream was read so slowly that its work was cancelled."""

    code = "slow_reader"


class EngineHaltedError(PrefixCacheError, RuntimeError):
    """The engine sleeps or is paused, until it is resumed."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class EngineDeadError(PrefixCacheError, RuntimeError):
    """The engine stopped after an error; restart the server."""
