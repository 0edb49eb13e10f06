"""Errors as answers: in OpenAI's form, and at Anthropic's endpoints in theirs.

`{"error": {"message", "type", "param", "code"}}` and
`{"type": "error", "error": {"type", "message"}, "request_id"}`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from prefixcache.config.checked import shortened
from prefixcache.exceptions import (
    EngineDeadError,
    EngineHaltedError,
    InvalidRequestError,
    ModelLoadError,
    OutOfMemoryError,
    PrefixCacheError,
    QueueFullError,
    RateLimitError,
    RequestTimeoutError,
    SlowReaderError,
)
from prefixcache.server.http.sse import DONE, event, named_event
from prefixcache.types.request import ErrorCode

logger = logging.getLogger(__name__)

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
MODELS_PATH = "/v1/models"
OLLAMA_PREFIX = "/api/"
_NO_OLLAMA = (
    "Ollama's API is not served. OpenAI's is: send chats to /v1/chat/completions and texts to "
    "/v1/completions; /v1/models lists the model."
)
# Paths that clients of both APIs ask.
_SHARED = (MODELS_PATH, "/prefix_cache/")

# What lacks memory or weights here is an engine that could not wake up.
_STATUSES: dict[type[PrefixCacheError], HTTPStatus] = {
    EngineDeadError: HTTPStatus.SERVICE_UNAVAILABLE,
    EngineHaltedError: HTTPStatus.SERVICE_UNAVAILABLE,
    InvalidRequestError: HTTPStatus.BAD_REQUEST,
    ModelLoadError: HTTPStatus.SERVICE_UNAVAILABLE,
    OutOfMemoryError: HTTPStatus.SERVICE_UNAVAILABLE,
    QueueFullError: HTTPStatus.SERVICE_UNAVAILABLE,
    RateLimitError: HTTPStatus.TOO_MANY_REQUESTS,
    RequestTimeoutError: HTTPStatus.GATEWAY_TIMEOUT,
    SlowReaderError: HTTPStatus.REQUEST_TIMEOUT,
}

# By status, as OpenAI and as Anthropic call it, where it is not just an invalid request.
_INVALID = "invalid_request_error"
_TYPES: dict[int, tuple[str, str]] = {
    HTTPStatus.UNAUTHORIZED: (_INVALID, "authentication_error"),
    HTTPStatus.FORBIDDEN: (_INVALID, "permission_error"),
    HTTPStatus.NOT_FOUND: (_INVALID, "not_found_error"),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: (_INVALID, "request_too_large"),
    HTTPStatus.TOO_MANY_REQUESTS: ("rate_limit_error", "rate_limit_error"),
    HTTPStatus.SERVICE_UNAVAILABLE: ("service_unavailable_error", "overloaded_error"),
    HTTPStatus.GATEWAY_TIMEOUT: ("timeout_error", "timeout_error"),
}

_MOST_CHARACTERS = 2000
_MOST_PARAM_CHARACTERS = 256
_GROWING_SECONDS = 5
# Until an engine that sleeps or died may have been called back or restarted.
_UNAVAILABLE_SECONDS = 5


class ApiError(PrefixCacheError):
    """An error with an HTTP status of its own; clients may come again in `retry_after` seconds.

    Its answer has the `headers`.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = headers


def server_stopping() -> ApiError:
    """503 for what comes, or is not finished, when the server ends."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "The server is shutting down. Send the request again.",
        code="server_stopping",
        retry_after=1,
        headers={"Connection": "close"},
    )


def failed_answer(error: str | None, code: ErrorCode | None) -> ApiError:
    """The error of an answer that ended with `finish_reason` "error"."""
    message = f"The answer could not be computed: {error}"
    if code == "grammar_limit":
        return ApiError(HTTPStatus.BAD_REQUEST, message, code=code)
    if code == "insufficient_kv_cache":  # it was enough once, and may be so again
        status, seconds = HTTPStatus.SERVICE_UNAVAILABLE, _GROWING_SECONDS
        return ApiError(status, message, code=code, retry_after=seconds)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message)


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error. What was not raised on purpose shows nothing of itself."""
    status, message = _status_and_message(error)
    param = getattr(error, "param", None)
    body = {
        "message": message,
        "type": _types_of(status)[0],
        "param": None if param is None else shortened(param, _MOST_PARAM_CHARACTERS),
        "code": getattr(error, "code", None),
    }
    return status, {"error": body}


def anthropic_error(error: Exception, request_id: str) -> dict[str, Any]:
    """The body of an error as Anthropic's clients read it, and its event in a stream."""
    status, message = _status_and_message(error)
    too_long = getattr(error, "code", None) == "context_length_exceeded"
    if too_long and getattr(error, "param", None) != "max_tokens":
        message = f"prompt is too long: {message}"  # clients look for Anthropic's words
    inner = {"type": _types_of(status)[1], "message": message}
    return {"type": "error", "error": inner, "request_id": request_id}


def stream_error(error: Exception, path: str, request_id: str, num_events: int) -> bytes:
    """The end of a stream of `path` that fails after `num_events` events."""
    if is_anthropic(path):
        return named_event(anthropic_error(error, request_id))
    body = error_body(error)[1]
    if path == RESPONSES_PATH:
        fields = {"type": "error", "sequence_number": num_events}
        return named_event(
            fields | {name: body["error"][name] for name in ("code", "message", "param")}
        )
    return event(body) + DONE


def speaks_anthropic(scope: Scope) -> bool:
    """Whether errors of a request have Anthropic's form: by its path, or where APIs share that by
    its header.
    """
    path = scope["path"]
    return is_anthropic(path) or (path.startswith(_SHARED) and has_anthropic_header(scope))


def is_anthropic(path: str) -> bool:
    """Whether a path is of Anthropic's API alone."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def has_anthropic_header(scope: Scope) -> bool:
    """Whether the header is there that every request to Anthropic's API has."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def error_response(error: Exception, scope: Scope | None = None) -> JSONResponse:
    """The error as an answer, in the form of who asks; logs what nobody expected."""
    status, body = error_body(error)
    request_id = "" if scope is None else scope["state"]["request_id"]
    if scope is not None and speaks_anthropic(scope):
        body = anthropic_error(error, request_id)
    if is_unexpected(error):
        logger.error("The request %s failed.", request_id, exc_info=error)
    response = JSONResponse(body, status_code=status, headers=getattr(error, "headers", None))
    retry_after = getattr(error, "retry_after", None)
    if retry_after is None and status == HTTPStatus.SERVICE_UNAVAILABLE:
        retry_after = _UNAVAILABLE_SECONDS
    if retry_after is not None:
        response.headers["Retry-After"] = str(retry_after)
    if status == HTTPStatus.GATEWAY_TIMEOUT:  # clients of OpenAI and Anthropic would send it again
        response.headers["X-Should-Retry"] = "false"
    return response


def is_unexpected(error: Exception) -> bool:
    """Whether clients learn nothing of the error, so that it belongs into the log."""
    return _status(error) is None


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answers an unknown route or method, which Starlette does in plain text."""
    error = cast("HTTPException", error)
    status = HTTPStatus(error.status_code)
    message, code = f"{status.phrase}: {request.method} {request.url.path}", None
    headers = dict(error.headers or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(sorted(_methods(request.scope)))
    if status == HTTPStatus.NOT_FOUND and request.url.path.startswith(OLLAMA_PREFIX):
        message, code = f"{message}. {_NO_OLLAMA}", "unsupported_endpoint"
    return error_response(ApiError(status, message, code=code, headers=headers), request.scope)


def _methods(scope: Scope) -> set[str]:
    """Those of all routes that answer the path; Starlette names those of the first."""
    routes = (route for route in scope["app"].routes if isinstance(route, Route))
    matching = (route for route in routes if route.matches(scope)[0] is not Match.NONE)
    return set[str]().union(*(route.methods or () for route in matching))


def _status_and_message(error: Exception) -> tuple[int, str]:
    """An error may quote of a request whatever it likes: it is cut to a bounded length."""
    status = _status(error)
    if status is None:
        message = "The server failed to answer; its log says why."
        return HTTPStatus.INTERNAL_SERVER_ERROR, message
    return status, shortened(str(error), _MOST_CHARACTERS)


def _status(error: Exception) -> HTTPStatus | None:
    """None for what was not raised on purpose."""
    if isinstance(error, ApiError):
        return error.status
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), None)


def _types_of(status: int) -> tuple[str, str]:
    usual = (_INVALID, _INVALID) if status < 500 else ("internal_server_error", "api_error")
    return _TYPES.get(status, usual)
