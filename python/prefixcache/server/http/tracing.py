"""A trace of each request by OpenTelemetry, which the extra `otel` installs.

Spans are made when the request has ended, of the times that the log has too: nothing is done while
it runs, and a collector that is slow or gone is a matter of the exporter's own thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from prefixcache.exceptions import FieldError, how_to_install
from prefixcache.server.http.request_log import QUIET_PATHS, Outcome, logged_path
from prefixcache.server.options.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

_FIELD = "otlp_traces_endpoint"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SCHEMES = ("http", "https", "grpc")
# For the last spans to be sent when the server ends.
_CLOSE_SECONDS = 3
_FIRST_FAILURE = 500
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


class Tracing:
    """Hands spans of requests to `exporter`, many at once in a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.version": VERSION})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "prefixcache"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("prefixcache", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace

    def record(self, scope: Scope, status: int, seconds: float, outcome: Outcome) -> None:
        """Adds the spans of a request that ends now. Whatever goes wrong is the log's alone."""
        if scope["path"] in QUIET_PATHS:
            return
        try:
            self._record(scope, status, seconds, outcome)
        except Exception:
            logger.exception("The trace of request %s is lost.", scope["state"]["request_id"])

    def close(self) -> None:
        """Sends what is left, but waits no longer than a few seconds for a collector."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def flush(self) -> None:
        """Sends what is left, and waits for it."""
        self._provider.force_flush()

    def _record(self, scope: Scope, status: int, seconds: float, outcome: Outcome) -> None:
        ended = time.time_ns()
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        root = self._tracer.start_span(
            _name(scope, outcome),
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes=_of_request(scope, status) | _of_answer(scope, outcome),
            start_time=ended - round(seconds * 1e9),
        )
        if status >= _FIRST_FAILURE:
            root.set_status(self._trace.StatusCode.ERROR)
        if root.is_recording():
            self._record_phases(self._trace.set_span_in_context(root), outcome, ended)
        root.end(ended)

    def _record_phases(self, context: Any, outcome: Outcome, now: int) -> None:
        """`queue`, `prefill` with the cache's hit, and `decode`, as far as the request came."""
        skew = now - time.monotonic_ns()  # of the clock that timed the phases
        arrived, started, first, ended = (
            None if at is None else skew + round(at * 1e9)
            for at in (
                outcome.arrived_at,
                outcome.started_at,
                outcome.first_token_at,
                outcome.ended_at,
            )
        )
        cached, prompt = outcome.num_cached_tokens, outcome.num_prompt_tokens
        self._phase("queue", context, arrived, started, {})
        computed = {"prefixcache.computed_tokens": prompt - cached}
        self._phase("prefill", context, started, first, computed)
        if cached:
            hit = {_CACHED: cached, "prefixcache.hit_ratio": cached / prompt}
            self._phase("prefix_cache_hit", context, started, started, hit)
        self._phase("decode", context, first, ended, {_OUTPUT: outcome.num_completion_tokens})

    def _phase(
        self,
        name: str,
        context: Any,
        begin: int | None,
        end: int | None,
        attributes: Mapping[str, Any],
    ) -> None:
        if begin is not None and end is not None:
            span = self._tracer.start_span(name, context, attributes=attributes, start_time=begin)
            span.end(max(begin, end))


_CACHED = "gen_ai.usage.cache_read.input_tokens"
_OUTPUT = "gen_ai.usage.output_tokens"


def tracing_to(endpoint: str) -> Tracing:
    """Traces for an OTLP collector, over gRPC unless OpenTelemetry's variables name another way.

    Raises `FieldError` for an invalid address, and where OpenTelemetry is not installed.
    """
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in _SCHEMES and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        is_address = False
    if not is_address:
        raise FieldError(_FIELD, f"must be a URL as http://localhost:4317, got {endpoint!r}.")
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "grpc")
    try:
        return Tracing(_exporter(endpoint, protocol))
    except ImportError:
        problem = f"needs OpenTelemetry: {how_to_install('otel')}."
        raise FieldError(_FIELD, problem) from None


def _exporter(endpoint: str, protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter(endpoint=endpoint)
    problem = f"is sent to by grpc or http/protobuf; {_PROTOCOLS[0]} is {protocol!r}."
    raise FieldError(_FIELD, problem)


def _route(scope: Scope) -> str | None:
    """Set by the router; a path that a client invented names no group of requests."""
    return getattr(scope.get("route"), "path", None)


def _name(scope: Scope, outcome: Outcome) -> str:
    operation = _OPERATIONS.get(scope["path"])
    if operation is not None and outcome.model:
        return f"{operation} {outcome.model}"
    route = _route(scope)
    return scope["method"] if route is None else f"{scope['method']} {route}"


def _of_request(scope: Scope, status: int) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": scope["method"],
        "url.path": logged_path(scope),
        "url.scheme": scope["scheme"],
        "http.response.status_code": status,
        "gen_ai.request.id": scope["state"]["request_id"],
    }
    client, route = scope.get("client"), _route(scope)
    if client is not None:
        attributes["client.address"] = client[0]
    if route is not None:
        attributes["http.route"] = route
    if status >= _FIRST_FAILURE:
        attributes["error.type"] = f"{status:d}"  # Python 3.10 would name it
    return attributes


def _of_answer(scope: Scope, outcome: Outcome) -> dict[str, Any]:
    operation = _OPERATIONS.get(scope["path"])
    if operation is None or not outcome.num_prompt_tokens:
        return {}
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "prefixcache",
        "gen_ai.request.model": outcome.model,
        "gen_ai.response.model": outcome.model,
        "gen_ai.response.finish_reasons": sorted(outcome.finish_reasons),
        "gen_ai.usage.input_tokens": outcome.num_prompt_tokens,
        _CACHED: outcome.num_cached_tokens,
        _OUTPUT: outcome.num_completion_tokens,
        "gen_ai.response.time_to_first_chunk": outcome.first_token_seconds,
    }
    return {name: value for name, value in attributes.items() if value is not None}
