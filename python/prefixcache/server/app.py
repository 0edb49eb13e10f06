"""The ASGI application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from prefixcache.server.admin.admin import admin_router
from prefixcache.server.admin.health import health_router
from prefixcache.server.admin.model_cards import models_router
from prefixcache.server.admin.model_dirs import ModelDirs
from prefixcache.server.admin.weights_push import weights_push_router
from prefixcache.server.anthropic.messages import messages_router
from prefixcache.server.cache.kv_events import kv_events_router
from prefixcache.server.cache.misses import misses_router
from prefixcache.server.cache.probe import probe_router
from prefixcache.server.dashboard.routes import dashboard_router
from prefixcache.server.dashboard.samples import Samples
from prefixcache.server.http.access import AccessCheck, AccessRules
from prefixcache.server.http.errors import on_http_exception
from prefixcache.server.http.tracing import Tracing
from prefixcache.server.jobs.context import Lifecycle, RequestContext
from prefixcache.server.jobs.job_maker import JobMaker
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.openai.chat import chat_router
from prefixcache.server.openai.completions import completions_router
from prefixcache.server.openai.embeddings import embeddings_router
from prefixcache.server.openai.rerank import rerank_router
from prefixcache.server.openai.response_store import ResponseStore
from prefixcache.server.openai.responses import responses_router
from prefixcache.server.openai.tokenize import tokenize_router
from prefixcache.server.openapi import DescribedApp
from prefixcache.server.options.limits import ServerLimits
from prefixcache.server.options.serve_options import CrossOrigin
from prefixcache.server.options.version import VERSION

if TYPE_CHECKING:
    from prefixcache.diagnostics.room import CacheDiagnostics
    from prefixcache.engine.async_engine import AsyncEngine
    from prefixcache.events.publisher import EventPublisher

# Headers of answers that pages of other origins may read, besides those that they always may.
_SHOWN_TO_PAGES = ("Retry-After", "X-Request-Id", "X-Prefixcache-Warning")


def create_app(
    engine: AsyncEngine,
    served: ServedModel,
    *,
    rules: AccessRules | None = None,
    model_dirs: ModelDirs | None = None,
    lifecycle: Lifecycle | None = None,
    limits: ServerLimits | None = None,
    flags: Mapping[str, Any] | None = None,
    tracing: Tracing | None = None,
    diagnostics: CacheDiagnostics | None = None,
    events: EventPublisher | None = None,
    samples: Samples | None = None,
) -> DescribedApp:
    """The application that serves `engine`; who made the engine shuts it down.

    `rules` say who may use it, `model_dirs` where new weights come from, `lifecycle` whether the
    server is about to end, `limits` what requests may take together, `tracing` where their
    traces go, `diagnostics` remember why prompts missed, and `events` are published by somebody
    and `samples` kept. Administrators are shown the `flags`.
    """
    maker = JobMaker(engine=engine, served=served, diagnostics=diagnostics)
    lifecycle = lifecycle or Lifecycle()
    responses = ResponseStore()
    app = client_app(maker, responses)
    app.include_router(misses_router(maker, responses))
    app.include_router(health_router(engine, served, flags or {}, events))
    app.include_router(kv_events_router(events, maker.workers))
    app.include_router(dashboard_router(engine, maker, lifecycle, samples or Samples(engine)))
    app.include_router(admin_router(engine, model_dirs or ModelDirs()))
    app.include_router(weights_push_router(engine))
    guard(
        app,
        rules or AccessRules(),
        lifecycle=lifecycle,
        limits=limits or ServerLimits(),
        strict=served.strict,
        tracing=tracing,
    )
    return app


def client_app(maker: JobMaker, responses: ResponseStore) -> DescribedApp:
    """An application with what clients ask of the served model, and with nothing around it.

    Answers of `/v1/responses` are kept among `responses`.
    """
    app = DescribedApp(title="prefixcache", version=VERSION)
    app.include_router(completions_router(maker))
    app.include_router(chat_router(maker))
    app.include_router(responses_router(maker, responses))
    app.include_router(messages_router(maker))
    app.include_router(embeddings_router(maker))
    app.include_router(rerank_router(maker))
    app.include_router(tokenize_router(maker))
    app.include_router(probe_router(maker, responses))
    app.include_router(models_router(maker))
    return app


def guard(
    app: Starlette,
    rules: AccessRules,
    *,
    lifecycle: Lifecycle,
    limits: ServerLimits,
    strict: bool,
    tracing: Tracing | None = None,
) -> None:
    """Puts around the application what every request passes: its context, and who may ask."""
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_middleware(AccessCheck, rules=rules)
    app.add_middleware(
        RequestContext, lifecycle=lifecycle, limits=limits, strict=strict, tracing=tracing
    )
    if rules.cross_origin.allowed_origins:
        _let_pages_in(app, rules.cross_origin)


def _let_pages_in(app: Starlette, allowed: CrossOrigin) -> None:
    """Around all else: browsers send no key with a preflight, and pages are to read errors too."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=allowed.allowed_origins,
        allow_methods=allowed.allowed_methods,
        allow_headers=allowed.allowed_headers,
        allow_credentials=allowed.allow_credentials,
        expose_headers=_SHOWN_TO_PAGES,
    )
