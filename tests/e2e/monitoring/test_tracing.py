"""Traces of requests: their spans, whose children they are, and that no collector is needed."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
from click.testing import CliRunner
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from prefixcache.cli.main import app as command
from prefixcache.exceptions import FieldError
from prefixcache.server.http import request_log
from prefixcache.server.http.tracing import Tracing, tracing_to
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import Request, RequestOutput
from support.serving import FakeEngine, client_of, fake_app, says, served_folder

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
COMPLETIONS = "/v1/completions"


def spans(tracing: Tracing, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    tracing.flush()
    found = exporter.get_finished_spans()
    exporter.clear()
    return list(found)


async def test_a_request_has_queue_prefill_hit_and_decode(tiny_checkpoint):
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    body = {"prompt": list(range(10, 60)), "max_tokens": 4, "ignore_eos": True, "stream": True}
    access = {"tracing": tracing}
    async with served_folder(tiny_checkpoint(), access=access) as (client, _):
        await client.post(COMPLETIONS, json=body)
        missed = spans(tracing, exporter)
        await client.post(COMPLETIONS, json=body, headers=SAMPLED | {"X-Request-Id": "mine"})
        hit = {span.name: span for span in spans(tracing, exporter)}
        for path in request_log.QUIET_PATHS:
            await client.get(path)
        await client.get("/v1/models/tiny")
        await client.get("/no/such/path")
        others = spans(tracing, exporter)
    tracing.close()
    assert {span.name for span in missed} == {
        "queue",
        "prefill",
        "decode",
        "text_completion tiny",
    }
    root = hit["text_completion tiny"]
    assert root.context.trace_id == int(TRACE, 16)
    assert root.parent is not None
    assert root.parent.span_id == int(PARENT, 16)
    assert root.attributes is not None
    assert {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.cache_read.input_tokens": 48,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "http.response.status_code": 200,
        "gen_ai.request.id": "mine",
    }.items() <= dict(root.attributes).items()
    assert root.resource.attributes["service.name"] == "prefixcache"
    phases = [hit[name] for name in ("queue", "prefill", "decode")]
    edges = [time for span in phases for time in (span.start_time, span.end_time)]
    assert edges == sorted(edges)
    assert edges[1:-1:2] == edges[2::2]
    assert root.start_time <= edges[0] <= edges[-1] <= root.end_time
    for span in (*phases, hit["prefix_cache_hit"]):
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
    assert dict(hit["prefill"].attributes or {}) == {"prefixcache.computed_tokens": 2}
    assert dict(hit["prefix_cache_hit"].attributes or {})["prefixcache.hit_ratio"] == 0.96
    assert [span.name for span in others] == ["GET /v1/models/{name:path}", "GET"]


async def test_an_unsampled_parent_and_a_broken_one(tokenizer: Tokenizer) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    app = fake_app(FakeEngine(lambda request: says(request, "hi")), tokenizer, tracing=tracing)
    async with client_of(app) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        await client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
        assert not spans(tracing, exporter)
        for broken in ("", "00-" + "g" * 32, "00-" + "0" * 32 + "-1-01", "x" * 9999):
            headers = {"traceparent": broken, "tracestate": "=,=,=" * 99}
            answer = await client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
            assert answer.is_success
            (root,) = (s for s in spans(tracing, exporter) if s.name.startswith("text_completion"))
            assert root.parent is None
    tracing.close()


async def _breaks(request: Request) -> AsyncIterator[RequestOutput]:
    yield RequestOutput(request_id=request.request_id, token_ids=(3,), text="one")
    raise ZeroDivisionError("of canary-7f3a")


async def test_failures_are_errors_without_their_messages(tokenizer: Tokenizer) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    app = fake_app(FakeEngine(_breaks), tokenizer, tracing=tracing)
    async with client_of(app) as client:
        await client.post(COMPLETIONS, json={"prompt": "canary-7f3a"})
        refused = await client.post(COMPLETIONS, json={"prompt": 5})
    found = spans(tracing, exporter)
    tracing.close()
    failed, wrong = (span for span in found if span.kind.name == "SERVER")
    assert failed.status.status_code is StatusCode.ERROR
    assert dict(failed.attributes or {})["error.type"] == "500"
    assert (refused.status_code, wrong.status.status_code) == (400, StatusCode.UNSET)
    assert "canary" not in "".join(span.to_json() for span in found)


class _Stuck(SpanExporter):
    """A collector that does not answer, and then fails."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_end.wait(30)
        raise ConnectionError


async def test_a_collector_that_is_gone_harms_nobody(tokenizer, monkeypatch, caplog):
    monkeypatch.setattr("prefixcache.server.http.tracing._CLOSE_SECONDS", 0.1)
    exporter = _Stuck()
    tracing = Tracing(exporter)
    app = fake_app(FakeEngine(lambda request: says(request, "hi")), tokenizer, tracing=tracing)
    async with client_of(app) as client:
        for _ in range(200):
            assert (await client.get("/v1/models")).is_success
        tracing.close()
        monkeypatch.setattr(tracing, "_record", lambda *_: 1 / 0)
        assert (await client.get("/v1/models")).is_success
        assert "is lost" in caplog.text
    exporter.may_end.set()


@pytest.mark.parametrize(
    "endpoint", ["localhost:4317", "4317", "http://", "ftp://a", "http://a:b", "http://[::1", ""]
)
def test_what_is_no_collector_is_refused(endpoint: str) -> None:
    flags = ["--otlp-traces-endpoint", endpoint]
    result = CliRunner().invoke(command, ["serve", "/no/such/model", "--port", "0", *flags])
    assert result.exit_code == 2
    assert "error: --otlp-traces-endpoint must be a URL" in result.stderr


def test_protocols_are_opentelemetrys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for protocol in ("grpc", "http/protobuf"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
        tracing_to("http://127.0.0.1:9").close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier pigeon")
    with pytest.raises(FieldError, match="grpc or http/protobuf"):
        tracing_to("http://127.0.0.1:9")


@pytest.mark.parametrize("lacking", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp"])
def test_without_the_extra_the_error_says_what_to_install(monkeypatch, lacking):
    for name in [name for name in sys.modules if name.startswith(lacking)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, lacking, None)
    with pytest.raises(FieldError, match=r"otlp_traces_endpoint.*pip install '\.\[otel\]'"):
        tracing_to("http://localhost:4317")
