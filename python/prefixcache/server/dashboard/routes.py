"""The pages for browsers, their files, and the stream that the dashboard reads.

The pages and their files say nothing of the cache and are open to all, since a browser sends no key
with an address that somebody typed. The stream is the administrator's, `/openapi.json` and what the
chat sends are the clients': the pages ask for the key and send it as every client does, in a
header.
"""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from prefixcache.server.dashboard.feed import Feed
from prefixcache.server.dashboard.samples import Samples
from prefixcache.server.dashboard.view import View
from prefixcache.server.http.errors import ApiError
from prefixcache.server.http.routes import Router
from prefixcache.server.http.sse import EventStream
from prefixcache.server.jobs.context import Lifecycle

if TYPE_CHECKING:
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.server.jobs.job_maker import JobMaker

DASHBOARD_PATH = "/dashboard"
_PAGES = {"index.html": DASHBOARD_PATH, "chat.html": "/chat", "docs.html": "/docs"}
_FILES = Path(__file__).with_name("page")
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOR_BROWSERS = (
    "Not Found: GET /. Browsers find a dashboard here; the API is under /v1, and /openapi.json "
    "describes it."
)
# Nothing from elsewhere, no script or style but the page's own files, and no text as markup:
# browsers that know trusted types refuse to make any of a string.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def dashboard_router(
    engine: AsyncEngine, maker: JobMaker, lifecycle: Lifecycle, samples: Samples
) -> Router:
    """The endpoints, for one engine of which somebody keeps `samples`."""
    router = Router()
    diagnostics = maker.diagnostics
    history = None if diagnostics is None else diagnostics.history
    view = View(engine, maker.served, samples, history)
    feed = Feed(view.take, view.greet, lambda: lifecycle.stopping)
    for file in sorted(_FILES.iterdir()):
        if file.suffix in _MEDIA_TYPES:
            _serve(router, _PAGES.get(file.name, f"{DASHBOARD_PATH}/assets/{file.name}"), file)

    @router.route("/", "GET", "HEAD", include_in_schema=False)
    async def root(request: Request) -> Response:
        """Leads browsers to the dashboard; HEAD tells others that a server listens."""
        if request.method == "HEAD":
            return Response()
        if "text/html" not in request.headers.get("accept", ""):
            raise ApiError(HTTPStatus.NOT_FOUND, _FOR_BROWSERS)
        return RedirectResponse(DASHBOARD_PATH.removeprefix("/"))

    # It never ends by itself, and is for this page: no client is to be made for it.
    @router.get(f"{DASHBOARD_PATH}/events", include_in_schema=False)
    async def dashboard_events() -> Response:
        """The cache now, about once a second, as server-sent events."""
        if engine.dead is not None:
            raise engine.dead
        if feed.is_full:
            message = "Too many pages of the dashboard are open; close one."
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="too_many_pages")
        return EventStream(feed.events())

    return router


def _serve(router: Router, path: str, file: Path) -> None:
    """Answers with a file, which is read now and does not change while the server runs."""
    content = file.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(content, headers=headers, media_type=_MEDIA_TYPES[file.suffix])

    router.route(path, "GET", "HEAD", include_in_schema=False)(answer)
