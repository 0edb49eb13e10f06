"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from prefixcache.exceptions import (
    EngineDeadError,
    EngineHaltedError,
    InvalidRequestError,
    ModelLoadError,
    OutOfMemoryError,
    PrefixCacheError,
    QueueFullError,
)

logger = logging.getLogger(__name__)

# Told to clients as 503. What lacks memory or weights here is an engine that could not wake up.
_UNAVAILABLE = (
    EngineDeadError,
    EngineHaltedError,
    ModelLoadError,
    OutOfMemoryError,
    QueueFullError,
)


class ApiError(PrefixCacheError):
    """An error with an HTTP status of its own."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def server_stopping() -> ApiError:
    """503 for what comes, or is not finished, when the server ends."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "The server is shutting down. Send the request again.",
        code="server_stopping",
    )


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error. What was not raised on purpose shows nothing of itself."""
    status, message = _status_and_message(error)
    body = {
        "message": message,
        "type": _type_of(status),
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }
    return status, {"error": body}


def error_response(
    error: Exception, headers: Mapping[str, str] | None = None, *, request_id: str = ""
) -> JSONResponse:
    """The error as an answer; logs what nobody expected."""
    status, body = error_body(error)
    if is_unexpected(error):
        logger.error("The request %s failed.", request_id, exc_info=error)
    response = JSONResponse(body, status_code=status, headers=dict(headers or {}))
    if isinstance(error, QueueFullError):
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def is_unexpected(error: Exception) -> bool:
    """Whether clients are told nothing of the error, so that it belongs into the log."""
    return not isinstance(error, (ApiError, InvalidRequestError, *_UNAVAILABLE))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answers an unknown route or method, where FastAPI would in a form of its own."""
    error = cast("HTTPException", error)
    status = HTTPStatus(error.status_code)
    message = f"{status.phrase}: {request.method} {request.url.path}"
    return error_response(ApiError(status, message), error.headers)


def _status_and_message(error: Exception) -> tuple[int, str]:
    if isinstance(error, ApiError):
        return error.status, str(error)
    if isinstance(error, InvalidRequestError):
        return HTTPStatus.BAD_REQUEST, str(error)
    if isinstance(error, _UNAVAILABLE):
        return HTTPStatus.SERVICE_UNAVAILABLE, str(error)
    return HTTPStatus.INTERNAL_SERVER_ERROR, "The server failed to answer; its log says why."


def _type_of(status: int) -> str:
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "service_unavailable_error"
    return "invalid_request_error" if status < 500 else "internal_server_error"
