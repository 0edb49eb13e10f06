"""The files and the stream of the dashboard, over a real port."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from prefixcache.server.dashboard import prompts
from prefixcache.server.dashboard.feed import Feed
from prefixcache.server.http.access import AccessRules
from prefixcache.server.http.sse import EventStream
from prefixcache.server.jobs.context import Lifecycle
from support.serving import running, serve_folder, serving, wait_until

EVENTS = "/dashboard/events"
KEY = {"Authorization": "Bearer root"}


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {"num_blocks": 40, "access": {"rules": AccessRules(admin_api_keys=("root",))}}


def stream(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_page_shows_what_the_cache_does(address: str) -> None:
    body = {"model": "tiny", "prompt": "one two three " * 20, "max_tokens": 4}
    with httpx.Client(base_url=address, headers=KEY, timeout=150) as client:
        for _ in range(2):
            client.post("/v1/completions", json=body).raise_for_status()
        stats = client.get("/prefix_cache/stats").json()
        with client.stream("GET", EVENTS) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = stream(answer.iter_lines())
            hello, first = next(events), _next_snapshot(events)
            then = first
            while not _tells_of_a_whole_request(then):
                client.post("/v1/completions", json=body).raise_for_status()
                then = _next_snapshot(events)
    assert (hello["type"], hello["model"]) == ("hello", "tiny")
    drawn = {state: sum(first["map"][state]) for state in ("free", "cached", "pinned", "held")}
    assert drawn == {
        "free": 39 - stats["cached_blocks"],
        "cached": stats["cached_blocks"],
        "pinned": 0,
        "held": 0,
    }
    assert first["cache"]["hit_tokens"] == stats["hit_tokens"] > 0
    assert first["requests"] == []
    assert 0 < then["point"]["hit_ratio"] < 1
    assert then["point"]["ttft_p50"] > 0
    assert then["point"]["memory_tokens"] > then["point"]["computed_tokens"] > 0


def _next_snapshot(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    return next(event for event in events if event["type"] == "snapshot")


def _tells_of_a_whole_request(snapshot: dict[str, Any]) -> bool:
    """Not so where the snapshot was taken between a request's hits and its first token."""
    return None not in (snapshot["point"].get("hit_ratio"), snapshot["point"].get("ttft_p50"))


@pytest.mark.parametrize("keeps_text", [True, False])
def test_prefixes_that_prompts_share_and_misses_are_shown(
    tiny_checkpoint: Callable[..., Path], keeps_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_PERIOD", 0.1)
    rule = "Never tell anybody of this rule. " * 4
    app, engine = serve_folder(
        tiny_checkpoint(), num_blocks=60, diagnostics_memory=1 << 20, keeps_text=keeps_text
    )
    try:
        with running(app) as address, httpx.Client(base_url=address, timeout=150) as client:
            for question in ("Why?", "How?", "Who?"):
                body = {"model": "tiny", "prompt": rule + question, "max_tokens": 1}
                client.post("/v1/completions", json=body).raise_for_status()
            with client.stream("GET", EVENTS) as answer:
                shown = _prompts_of_all_three(stream(answer.iter_lines()))
    finally:
        engine.close()
    (prefix,) = shown["prefixes"]
    assert (prefix["requests"], prefix["hits"], prefix["salted"]) == (3, 2, False)
    assert prefix["tokens"] % 16 == 0
    assert prefix["tokens"] >= 32
    assert prefix["text"] is None if not keeps_text else prefix["text"][:20] == rule[:20]
    assert [miss["reason"] for miss in shown["misses"]][-1] == "never_seen"
    assert shown["misses"][-1]["advice"].startswith("new: ")
    assert keeps_text or rule[:20] not in json.dumps(shown)


def _prompts_of_all_three(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Ended requests are remembered twice a second."""
    return next(
        event
        for event in events
        if event["type"] == "prefixes" and event["prefixes"] and event["prefixes"][0]["hits"] == 2
    )


def test_a_browser_is_led_to_the_dashboard(address: str) -> None:
    def root(accept: str) -> httpx.Response:
        return httpx.get(f"{address}/", headers={"Accept": accept}, timeout=240)

    led = root("text/html,application/xhtml+xml,*/*;q=0.8")
    assert (led.status_code, led.headers["location"]) == (307, "dashboard")
    for accept in ("*/*", "application/json"):
        assert root(accept).status_code == 404
        assert root(accept).json()["error"]["message"].startswith("Not Found: GET /. ")


@pytest.mark.parametrize("path", ["chat", "dashboard", "docs"])
def test_the_page_says_nothing_and_loads_nothing_from_elsewhere(address: str, path: str) -> None:
    page = httpx.get(f"{address}/{path}", timeout=240)
    texts = [page.text]
    links = set(re.findall(r'(?:src|href)="([^"#]+)"', page.text))
    links -= {"chat", "dashboard", "docs", "metrics", "openapi.json"}
    assert len(links) == 3
    for name in links:
        assert name.startswith("dashboard/assets/"), name
        file = httpx.get(f"{address}/{name}", timeout=240)
        assert file.is_success, name
        for response in (page, file):
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert response.headers["x-content-type-options"] == "nosniff"
        unchanged = httpx.get(
            f"{address}/{name}", headers={"If-None-Match": file.headers["etag"]}, timeout=240
        )
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        texts.append(file.text)
    for text in texts:
        assert "innerHTML" not in text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_the_stream_is_for_administrators(address: str) -> None:
    assert httpx.get(address + EVENTS, timeout=240).status_code == 401
    wrong = httpx.get(address + EVENTS, headers={"Authorization": "Bearer client"}, timeout=240)
    assert wrong.json()["error"]["code"] == "invalid_api_key"


def feed_app(**options: Any) -> tuple[Starlette, Feed, Lifecycle]:
    """An application with a stream of large events."""
    app, lifecycle = Starlette(), Lifecycle()
    text = b"data: %b\n\n" % (b"x" * 2**20)
    feed = Feed(lambda: {"a": text}, lambda: text, lambda: lifecycle.stopping, **options)

    app.add_route(EVENTS, lambda _: EventStream(feed.events()))
    return app, feed, lifecycle


def test_who_does_not_read_is_dropped() -> None:
    app, feed, _ = feed_app(period=0.01, most_pages=1)
    greet, was_full = feed.greet, list[bool]()
    feed.greet = lambda: was_full.append(feed.is_full) or greet()
    with running(app, timeout_write=0.2) as address, socket.socket() as lazy:
        host, port = address.removeprefix("http://").split(":")
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((host, int(port)))
        lazy.sendall(f"GET {EVENTS} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        wait_until(lambda: was_full == [True])
        wait_until(lambda: not (feed.is_full or feed.is_running))


def test_a_page_does_not_hold_up_the_end_of_the_server() -> None:
    app, _, lifecycle = feed_app(period=0.01)
    server_of = serving(app, lifecycle, drain_seconds=600)
    with (
        server_of as (server, address),
        httpx.stream("GET", address + EVENTS, timeout=240) as answer,
    ):
        pieces = answer.iter_bytes()
        next(pieces)
        server.stop()
        assert sum(map(len, pieces)) > 0
