"""Around every HTTP request: its id, one line in the log, and an answer even to what went wrong."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixcache.config.checked import shortened
from prefixcache.exceptions import InvalidRequestError, RequestTimeoutError
from prefixcache.server.http.access import Caller
from prefixcache.server.http.body import (
    Fields,
    RequestFields,
    parse_fields,
    parse_object,
    read_body,
)
from prefixcache.server.http.byte_budget import Body, ByteBudget, KeptLogprobs
from prefixcache.server.http.errors import (
    error_response,
    server_stopping,
    speaks_anthropic,
    stream_error,
)
from prefixcache.server.http.request_log import CLIENT_LEFT, Outcome, log_request
from prefixcache.server.http.sse import unless_disconnected
from prefixcache.server.http.tracing import Tracing
from prefixcache.server.http.workers import Workers
from prefixcache.server.options.limits import ServerLimits

T = TypeVar("T")

# Unknown fields that a warning names.
_MOST_NAMED = 10
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class Lifecycle:
    """Whether the server is about to end: it answers what it has begun, and takes nothing more.

    `at_once` it cuts that too, and waits for nothing.
    """

    stopping: bool = False
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request: the id of its answer, who asks from where, and what the log is to tell.

    The answer must be complete at `deadline`, in seconds of `time.monotonic`. `body` is kept until
    it has been turned into requests of the engine. `logprobs` counts those that are kept.
    """

    id: str
    caller: Caller
    receive: Receive
    address: str | None = None
    logprobs: KeptLogprobs
    outcome: Outcome = field(default_factory=Outcome)
    deadline: float | None = None
    body: Body | None = None

    async def within_bounds(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client leaves, or at the deadline.

        Raises `ClientDisconnect`, and `RequestTimeoutError`. The body must have been read.
        """
        seconds = None if self.deadline is None else self.deadline - time.monotonic()
        try:
            bounded = asyncio.wait_for(work, seconds)
            return await unless_disconnected(self.receive, bounded)
        except asyncio.TimeoutError:
            raise RequestTimeoutError() from None

    def release_body(self) -> None:
        """The body has been turned into requests."""
        if self.body is not None:
            self.body.release()


def new_call(request: Request, prefix: str) -> Call:
    """The answer's id tells the request's own."""
    state = request.state
    return Call(
        id=f"{prefix}-{state.request_id}",
        caller=state.caller,
        receive=request.receive,
        address=None if request.client is None else request.client.host,
        outcome=state.outcome,
        deadline=state.deadline,
        body=state.body,
        logprobs=state.logprobs,
    )


async def read_parsed(
    request: Request, workers: Workers, parse: Callable[[dict[str, Any]], tuple[Fields, T]]
) -> tuple[Fields, T, int]:
    """What `parse` makes of a body, its fields first, and how many bytes it has.

    Lets the answer's head name the unknown fields. Raises `InvalidRequestError` where there are
    some and the server is strict.
    """
    body = await read_body(request)
    fields, made = await workers.run(len(body), lambda: parse(parse_object(body)))
    tell_unknown(request, fields)
    return fields, made, len(body)


async def read_fields(
    request: Request, workers: Workers, model: type[Fields]
) -> tuple[Fields, int]:
    """The checked fields of a body, and how many bytes it has; see `read_parsed`."""
    fields, _, size = await read_parsed(
        request, workers, lambda values: (parse_fields(values, model), None)
    )
    return fields, size


def tell_unknown(request: Request, fields: RequestFields) -> None:
    """Lets the answer's head name the unknown fields; see `read_parsed`."""
    unknown = fields.unknown_fields()
    if not unknown:
        return
    if request.state.strict:
        raise InvalidRequestError(
            f"{shortened(unknown[0])} is unknown here, and --strict rejects unknown fields.",
            param=unknown[0],
            code="unknown_parameter",
        )
    names = ", ".join(map(shortened, unknown[:_MOST_NAMED]))
    more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
    # A header holds no line breaks, and of characters those of ASCII for certain.
    warning = f"unknown fields: {names}{more}".encode("unicode_escape").decode()
    request.state.outcome.warn(warning)


class RequestContext:
    """ASGI middleware. The id is the client's `X-Request-Id` where that is usable."""

    def __init__(
        self,
        app: ASGIApp,
        lifecycle: Lifecycle,
        limits: ServerLimits,
        *,
        strict: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._request_seconds = limits.request_seconds
        self._budget = ByteBudget(limits.body_bytes)
        self._strict = strict
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        outcome, body, logprobs = Outcome(), Body(self._budget), KeptLogprobs(self._budget)
        seconds = self._request_seconds
        state = {
            "request_id": request_id,
            "outcome": outcome,
            "strict": self._strict,
            "deadline": None if seconds is None else time.monotonic() + seconds,
            "body": body,
            "logprobs": logprobs,
        }
        scope.setdefault("state", {}).update(state)
        answer = _SentAnswer(scope, receive, send, request_id, outcome)
        begun = time.perf_counter()
        try:
            await self._answer(scope, receive, answer)
        finally:
            body.release()
            logprobs.release()
            status = outcome.failed_status or answer.final_status
            seconds = time.perf_counter() - begun
            log_request(scope, status, seconds, outcome)
            if self._tracing is not None:
                self._tracing.record(scope, status, seconds, outcome)

    async def _answer(self, scope: Scope, receive: Receive, answer: _SentAnswer) -> None:
        try:
            if self._lifecycle.stopping:
                raise server_stopping()
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001 - the last resort: `fail` logs it
            await answer.fail(error)
        except asyncio.CancelledError:  # the time to finish answers is over
            await answer.fail(server_stopping())


@dataclass(slots=True)
class _SentAnswer:
    """Adds the id to the answer's head, and remembers its status and whether all of it was sent."""

    _scope: Scope
    _receive: Receive
    _send: Send
    _request_id: str
    _outcome: Outcome
    _status: int | None = None
    _streams_events: bool = False
    _complete: bool = False

    @property
    def final_status(self) -> int:
        """The status sent, or nginx's status for a client who left before the end."""
        return self._status if self._status is not None and self._complete else CLIENT_LEFT

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._request_id
            if speaks_anthropic(self._scope):
                headers["Request-Id"] = self._request_id  # where Anthropic's clients read it
            if self._outcome.warning:
                headers["X-Prefixcache-Warning"] = self._outcome.warning
            self._status = message["status"]
            self._streams_events = headers.get("content-type", "").startswith("text/event-stream")
        await self._send(message)
        self._complete = message["type"] == "http.response.body" and not message.get("more_body")

    async def fail(self, error: Exception) -> None:
        """Sends the error, as an event where those have begun.

        Any other answer cut short closes the connection.
        """
        response = error_response(error, self._scope)
        if self._status is None:
            await response(self._scope, self._receive, self.send)
            return
        self._status = response.status_code
        if self._streams_events and not self._complete:
            body = stream_error(
                error, self._scope["path"], self._request_id, self._outcome.num_events
            )
            await self.send({"type": "http.response.body", "body": body, "more_body": False})


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
