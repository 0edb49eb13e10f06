"""Lets in who knows a key."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from prefixcache.server.errors import ApiError, error_response

# What watches a server has no key; nothing here tells of anybody's requests.
_OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class ApiKeyCheck:
    """ASGI middleware: 401 without one of `keys` as bearer token, before the body is read."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on or answers it."""
        if self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            HTTPStatus.UNAUTHORIZED,
            "Send the server's API key as `Authorization: Bearer KEY`.",
            code="invalid_api_key",
        )
        await error_response(error, _CHALLENGE)(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        return scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._is_known(scope)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # as it came: header values are bytes
        # All are compared, each in constant time: how long it took tells nothing of a key.
        matches = [secrets.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)
