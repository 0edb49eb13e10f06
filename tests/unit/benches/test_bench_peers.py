"""The bench against servers of other makes: what they refuse, leave out and break off."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from prefixcache.cli.main import app
from prefixcache.tools.bench.prompts import ChatForm, Message, Prompt, TextForm, TokenForm
from prefixcache.tools.bench.records import BenchmarkError, RequestFailedError
from prefixcache.tools.bench.servers import http_target
from prefixcache.tools.bench.targets import HttpTarget, connect
from prefixcache.types.token_ids import as_token_ids

TEXT = Prompt((Message("user", " a b c"),), 4)


@dataclass
class Peer:
    """A server of OpenAI's API that answers "ok" to everything, and what it is like.

    A word of a prompt has `tokens_per_word` tokens. It refuses the fields `refused`, knows the
    `paths`, and closes all connections from the request `dies_at` on.
    """

    paths: tuple[str, ...] = ("/v1/completions", "/v1/chat/completions")
    refused: tuple[str, ...] = ()
    tells_usage: bool = True
    streams_usage: bool = True
    cached_tokens: int | None = None
    tokens_per_word: float = 1.5
    dies_at: int | None = None
    key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        said = body.get("prompt") or " ".join(one["content"] for one in body["messages"])
        usage: dict[str, Any] = {
            "prompt_tokens": round(len(said.split()) * self.tokens_per_word),
            "completion_tokens": body["max_tokens"],
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """An answer of one word a token."""
        is_chat = path.endswith("/chat/completions")
        texts = [" ok"] * body["max_tokens"]
        shown = [{"delta": {"content": text}} if is_chat else {"text": text} for text in texts]
        first = [{"delta": {"role": "assistant", "content": ""}}] if is_chat else []
        choices = [*first, *shown, {"text": "", "finish_reason": "length"}]
        events: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
        if self.tells_usage and self.streams_usage:
            events.append({"choices": [], "usage": self.usage(body)})
        return events


class _Handler(BaseHTTPRequestHandler):
    peer: Peer

    def do_GET(self) -> None:
        key, given = self.peer.key, self.headers.get("Authorization")
        models = {"object": "list", "data": [{"id": "a-model"}, {"id": "another"}]}
        self._answer(200 if key is None or given == f"Bearer {key}" else 401, models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path not in self.peer.paths:
            return self._answer(404, {"detail": "Not Found"})
        refused = [name for name in self.peer.refused if name in body]
        if refused or not isinstance(body.get("prompt", ""), str):
            return self._answer(400, {"error": {"message": f"unknown {refused}"}})
        self.peer.asked.append(body)
        if self.peer.dies_at is not None and len(self.peer.asked) > self.peer.dies_at:
            self.close_connection = True
            self.connection.close()
            return None
        if self.path == "/reset_prefix_cache":
            return self._answer(200, {})
        if not body.get("stream"):
            usage = {"usage": self.peer.usage(body)} if self.peer.tells_usage else {}
            return self._answer(200, {"choices": [{"text": " ok"}], **usage})
        events = [json.dumps(event) for event in self.peer.events(self.path, body)]
        text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        return self._send(200, text.encode(), "text/event-stream")

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Says nothing."""


@contextmanager
def served(peer: Peer) -> Generator[str, None, None]:
    """The peer's address."""
    handler = type("Handler", (_Handler,), {"peer": peer})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_peer_without_token_prompts_gets_text() -> None:
    with served(Peer(refused=("ignore_eos",))) as url:
        async with http_target(f"{url}/v1") as target:
            assert (type(target.form), target.model) == (TextForm, "a-model")
            assert isinstance(target.form, TextForm)
            assert target.form.tokens_per_word == pytest.approx(1.5)
            record = await target.send(TEXT)
            assert not await target.reset_cache()
    assert (record.prompt_tokens, record.output_tokens, record.output) == (4, 4, " ok" * 4)
    assert (record.cached_tokens, len(record.arrivals)) == (None, 4)


async def test_a_peer_of_chats_gets_messages() -> None:
    peer = Peer(paths=("/v1/chat/completions",), cached_tokens=2)
    with served(peer) as url:
        async with http_target(url, model="another") as target:
            assert (type(target.form), target.model) == (ChatForm, "another")
            record = await target.send(TEXT)
    assert (record.cached_tokens, record.output, len(record.arrivals)) == (2, " ok" * 4, 4)
    assert peer.asked[-1]["messages"] == [{"role": "user", "content": " a b c"}]
    assert peer.asked[-1]["ignore_eos"] is True


@pytest.mark.parametrize(("whole", "tokens"), [(True, 4), (False, 3)], ids=["usage", "none"])
async def test_without_usage_in_streams_tokens_are_counted_here(whole: bool, tokens: int) -> None:
    with served(Peer(tells_usage=whole, streams_usage=False)) as url:
        async with http_target(url) as target:
            record = await target.send(TEXT)
    assert (record.prompt_tokens, record.output_tokens) == (tokens, 4)
    assert bool(target.remarks) != whole


async def test_what_a_peer_does_not_serve_is_reported() -> None:
    with served(Peer(paths=())) as url:
        with pytest.raises(BenchmarkError, match=r"takes no prompts.*404"):
            async with http_target(url):
                pytest.fail("a server without endpoints was connected to")
        with pytest.raises(BenchmarkError, match="does not serve nothing; it serves a-model"):
            async with http_target(url, model="nothing"):
                pytest.fail("a model that is not served was found")


def bench(url: str, folder: Path, *arguments: str) -> Any:
    sizes = ["--prefix-len", "30", "--suffix-len", "5", "--output-len", "3", "--concurrency", "2"]
    files = ["--output", str(folder / "r.json"), "--plot", str(folder / "p.png")]
    files += ["--html", str(folder / "p.html")]
    return CliRunner().invoke(app, ["bench", "--base-url", url, *sizes, *files, *arguments])


@pytest.mark.parametrize("workload", ["shared-prefix", "multi-turn", "documents", "agents"])
def test_every_workload_runs_against_a_peer(tmp_path: Path, workload: str) -> None:
    peer = Peer()
    small = ["--num-requests", "4", "--num-sessions", "3", "--turns", "3", "--repeats", "1"]
    with served(peer) as url:
        result = bench(url, tmp_path, "--workload", workload, *small)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    (variant,) = found["variants"]
    assert (variant["name"], variant["median"]["hit_rate"]) == ("as served", None)
    assert "not reported" in result.stdout
    assert "cannot be emptied" in result.stdout
    assert "hits not reported" not in result.stdout
    assert "not reported" in (tmp_path / "p.html").read_text()
    if workload == "multi-turn":
        later = [body["prompt"] for body in peer.asked if body["prompt"].count(" ok ok ok") == 2]
        assert len(later) == 3


def test_a_server_that_dies_leaves_what_was_measured(tmp_path: Path) -> None:
    with served(Peer(dies_at=9)) as url:
        one_by_one = (
            "--concurrency",
            "1",
        )  # a concurrent one would be lost too
        result = bench(url, tmp_path, "--num-requests", "20", "--repeats", "2", *one_by_one)
    assert result.exit_code == 1
    assert "is gone" in result.stderr
    assert "TTFT p50" in result.stdout
    found = json.loads((tmp_path / "r.json").read_text())
    (run,) = found["variants"][0]["runs"]
    # The other four of the nine are how it was connected to, and the warm-up.
    assert run["requests"]["output_tokens"] == [3] * 5
    assert "is gone" in found["errors"][0]
    assert "is gone" in (tmp_path / "p.html").read_text()


def test_a_key_is_sent_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prefixcache", "bench", "--api-key", "k3y", "--api-key=k3y"])
    with served(Peer(key="k3y")) as url:
        result = bench(url, tmp_path, "--num-requests", "1", "--repeats", "1", "--api-key", "k3y")
        assert result.exit_code == 0, result.output
        without = bench(url, tmp_path, "--num-requests", "1")
    assert (without.exit_code, "401" in without.stderr) == (1, True)
    written = [file.read_text(errors="replace") for file in tmp_path.iterdir()]
    assert any("bench --api-key ..." in text for text in written)
    assert "k3y" not in "".join([result.output, *written])


def test_nobody_at_the_address_is_an_error(tmp_path: Path) -> None:
    with served(Peer()) as url:
        pass
    result = bench(url, tmp_path)
    assert result.exit_code == 1
    assert f"No server answers at {url}" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def answering(text: str) -> HttpTarget:
    """A server that streams this text whatever is asked."""
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    client = httpx.AsyncClient(transport=transport, base_url="http://server")
    return HttpTarget(client, "m", TokenForm([1]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('data: {"error": {"message": "the engine stopped"}}\n\n', "the engine stopped"),
        ('data: {"choices": [{"text": "a"}]}\n\n', "ended before its answer"),
        (
            'data: {"choices": [{"text": "", "finish_reason": "cache_threshold"}]}\n\n',
            "ended an answer with cache_threshold",
        ),
        ("data: [DONE]\n\n", "ended before its answer"),
        ("", "ended before its answer"),
        ("data: {never\n\n", "no JSON"),
        ("data: [1]\n\n", "no JSON object"),
    ],
)
async def test_a_broken_stream_fails_its_request(text: str, message: str) -> None:
    with pytest.raises(RequestFailedError, match=message):
        await answering(text).send(Prompt((Message("user", as_token_ids([1])),), 4))


@pytest.mark.parametrize("content", ["{}", "[]", '{"data": [{}]}', '{"data": 5}', "no JSON"])
async def test_a_server_that_is_none_is_reported(content: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=content))
    client = httpx.AsyncClient(transport=transport, base_url="http://server")
    with pytest.raises(BenchmarkError, match="server"):
        await connect(client)


def test_a_server_that_dies_between_runs_leaves_them_too(tmp_path: Path) -> None:
    with served(Peer(dies_at=6, paths=("/v1/completions", "/reset_prefix_cache"))) as url:
        result = bench(url, tmp_path, "--num-requests", "1", "--repeats", "2")
    assert (result.exit_code, "is gone" in result.stderr) == (1, True)
    first, second = json.loads((tmp_path / "r.json").read_text())["variants"][0]["runs"]
    assert (first["requests"]["output_tokens"], second["requests"]["output_tokens"]) == ([3], [])
