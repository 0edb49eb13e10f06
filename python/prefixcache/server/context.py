"""Around every HTTP request: its id, one line in the log, and an answer even to what went wrong."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixcache.exceptions import EngineDeadError
from prefixcache.server.access import Caller
from prefixcache.server.errors import error_response

logger = logging.getLogger(__name__)

_QUIET_PATHS = frozenset({"/health", "/metrics"})
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request: the id of its answer, and who asks."""

    id: str
    caller: Caller


def new_call(request: Request, prefix: str) -> Call:
    """The answer's id tells the request's own."""
    return Call(id=f"{prefix}-{request.state.request_id}", caller=request.state.caller)


class RequestContext:
    """ASGI middleware. The id is the client's `X-Request-Id` where that is usable."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        answer = _Answer(scope, receive, send, request_id)
        begun = time.perf_counter()
        try:
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001 - the last resort: `fail` logs it
            await answer.fail(error)
        except asyncio.CancelledError:  # the server stops
            await answer.fail(EngineDeadError("The server is shutting down."))
        finally:
            _log(scope, answer.status, time.perf_counter() - begun, request_id)


class _Answer:
    """Adds the id to the answer's head and remembers its status."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._request_id = request_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self._request_id
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Sends the error where no answer has begun; an answer cut short closes the connection."""
        response = error_response(error)
        if self.status is None:
            await response(self._scope, self._receive, self.send)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex


def _log(scope: Scope, status: int | None, seconds: float, request_id: str) -> None:
    level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
    shown = "client left" if status is None else f"{status} {HTTPStatus(status).phrase}"
    path = scope["path"].encode("unicode_escape").decode()
    logger.log(level, "%s %s: %s in %.3f s (%s)", scope["method"], path, shown, seconds, request_id)
