"""Sleep, pause, new weights and the cache's numbers through HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.fake_runner import StepGate
from prefixcache.engine.async_engine import AsyncEngine
from support.serving import MODEL, client_of, metric, serve_folder

Checkpoint = Callable[..., Path]
PROMPT = [*range(20, 60)]


class Server:
    def __init__(self, client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        self.client = client
        self.engine = engine
        self.gate = StepGate(engine._engine._steps._runner)

    async def post(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.post(path, **options)

    async def get(self, path: str) -> Any:
        response = await self.client.get(path)
        assert response.status_code == 200
        return response.json()

    async def page(self) -> str:
        return (await self.client.get("/metrics")).text

    async def ask(self, max_tokens: int = 8, **fields: Any) -> httpx.Response:
        body = {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        return await self.post("/v1/completions", json=body)

    async def text(self, **fields: Any) -> str:
        response = await self.ask(**fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    async def in_flight(self, **fields: Any) -> asyncio.Task[httpx.Response]:
        """A request that has some tokens when the engine pauses; the engine stays paused."""
        self.gate.hold_after(4)
        task = asyncio.create_task(self.ask(max_tokens=400, **fields))
        await self.gate.until_held()
        paused = await self.gate.open_for(self.engine, self.post("/pause"))
        assert paused.status_code == 200
        assert not task.done()
        return task

    async def resumed(self, task: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> Any:
        assert (await self.post("/resume")).status_code == 200
        return await task


@pytest.fixture
def folders(tiny_checkpoint: Checkpoint) -> tuple[Path, Path]:
    return tiny_checkpoint(), tiny_checkpoint(seed=8)


@pytest.fixture
async def server(folders: tuple[Path, Path]) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        yield await _serve(stack, folders[0])


async def _serve(stack: AsyncExitStack, folder: Path) -> Server:
    app, engine = serve_folder(folder)
    stack.push_async_callback(engine.shutdown)
    return Server(await stack.enter_async_context(client_of(app)), engine)


async def _text_of(folder: Path, **fields: Any) -> str:
    async with AsyncExitStack() as stack:
        return await (await _serve(stack, folder)).text(**fields)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


async def test_new_weights_from_disk(server: Server, folders: tuple[Path, Path]) -> None:
    old = await server.text()
    response = await server.post(
        "/update_weights_from_disk", json={"model_path": str(folders[1]), "load_format": "auto"}
    )
    assert response.status_code == 200
    body = response.json()
    assert (body["success"], body["weight_version"]) == (True, 1)
    paths = (await server.get("/openapi.json"))["paths"]
    described = paths["/update_weights_from_disk"]["post"]["responses"]["200"]["content"]
    assert set(described["application/json"]["schema"]["required"]) == body.keys()
    assert await server.text() == await _text_of(folders[1]) != old
    assert (await server.get("/prefix_cache/stats"))["hit_tokens"] == 0


async def test_a_whole_answer_begins_again(server: Server, folders: tuple[Path, Path]) -> None:
    task = await server.in_flight(logprobs=1)
    await server.post("/update_weights_from_disk", json={"model_path": str(folders[1])})
    answer = (await server.resumed(task)).json()
    assert answer["choices"][0]["text"] == await _text_of(folders[1], max_tokens=400)
    assert answer["usage"]["completion_tokens"] == 400
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 400


async def test_a_stream_ends_with_an_error_that_says_why(server, folders):
    task = await server.in_flight(stream=True)
    await server.post("/update_weights_from_disk", json={"model_path": str(folders[1])})
    lines = (await server.resumed(task)).text.split("\n\n")
    error = json.loads(lines[-3].removeprefix("data: "))["error"]
    assert error["code"] == "weights_replaced"
    assert "weights were replaced" in error["message"]
    assert lines[-2] == "data: [DONE]"
    stats = await server.get("/prefix_cache/stats")
    assert stats["blocks_in_use"] == 0


@pytest.mark.parametrize("field", [{"mode": "abort"}, {"abort_all_requests": True}])
async def test_aborted_answers_say_so(server, folders, field):
    task = await server.in_flight()
    await server.post("/update_weights_from_disk", json={"model_path": str(folders[1]), **field})
    answer = (await server.resumed(task)).json()
    assert answer["choices"][0]["finish_reason"] == "abort"


async def test_a_broken_path_is_400_and_the_old_weights_serve(server, tmp_path):
    old = await server.text()
    deep = tmp_path / "deep"
    deep.mkdir()
    (deep / "config.json").write_text("[" * 100_000)
    for path in (tmp_path, tmp_path / "none", deep, "x" * 300, "~nobody-on-this-machine"):
        response = await server.post("/update_weights_from_disk", json={"model_path": str(path)})
        error = error_of(response, 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", "model_path")
    assert await server.text() == old
    assert (await server.get("/prefix_cache/stats"))["hits"] == 1


@pytest.mark.parametrize("options", [{}, {"params": {"level": 2}}, {"json": {"level": 2}}])
async def test_sleep_and_wake_up(server: Server, options: dict[str, Any]) -> None:
    old = await server.text()
    assert (await server.post("/sleep", **options)).status_code == 200
    assert await server.get("/is_sleeping") == {"is_sleeping": True}
    refused = await server.ask()
    error = error_of(refused, 503)
    assert refused.headers["Retry-After"] == "5"
    assert error["type"] == "service_unavailable_error"
    assert "asleep" in error["message"]
    assert error_of(await server.ask(stream=True), 503)
    assert (await server.client.get("/health")).status_code == 200
    await server.post("/wake_up", params={"tags": ["weights"]})
    assert await server.get("/is_sleeping") == {"is_sleeping": True}
    await server.post("/wake_up", json={"tags": ["kv_cache"]})
    assert await server.get("/is_sleeping") == {"is_sleeping": False}
    assert await server.text() == old
    assert (await server.get("/prefix_cache/stats"))["hit_tokens"] == 0


UPDATE = "/update_weights_from_disk"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(("/sleep", {"level": level}, "level") for level in (3, 0, True, "1", 1.5)),
    *(("/sleep", {"mode": mode}, "mode") for mode in ("keep", 1)),
    ("/wake_up", {"tags": "weights"}, "tags"),
    ("/wake_up", {"tags": ["kv"]}, "tags[0]"),
    ("/pause", {"mode": "wait"}, "mode"),
    (UPDATE, {}, "model_path"),
    *((UPDATE, {"model_path": path}, "model_path") for path in (5, "x" * 4097)),
    (UPDATE, {"model_path": "x", "mode": "swap"}, "mode"),
    (UPDATE, {"model_path": "x", "mode": "keep", "abort_all_requests": True}, "mode"),
    (UPDATE, {"model_path": "x", "load_format": "pt"}, "load_format"),
    *(
        (UPDATE, {"model_path": "x", "weight_version": tag}, "weight_version")
        for tag in ("", 7, "a\n", "t" * 257)
    ),
    (UPDATE, {"model_path": "x", "flush_cache": False}, "flush_cache"),
    *((f"/sleep?level={level}", {}, "level") for level in ("one", "3", "")),
    ("/sleep?mode=keep", {}, "mode"),
]


async def test_wrong_options_are_named(server: Server) -> None:
    for path, body, param in WRONG:
        error = error_of(await server.post(path, **({"json": body} if body else {})), 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", param), path
    assert await server.get("/is_sleeping") == {"is_sleeping": False}
    assert (await server.get("/prefix_cache/stats"))["weight_version"] == 0


async def test_a_body_that_is_no_json_is_refused(server: Server) -> None:
    headers = {"content-type": "application/json"}
    response = await server.post("/sleep", content=b"{", headers=headers)
    assert error_of(response, 400)["code"] == "invalid_json"


async def test_the_numbers_are_those_of_the_metrics(server: Server) -> None:
    for _ in range(3):
        await server.text()
    stats = await server.get("/prefix_cache/stats")
    page = (await server.client.get("/metrics")).text
    assert stats["queried_tokens"] == metric(page, "prefix_cache_queries_total") == 120
    assert stats["hit_tokens"] == metric(page, "prefix_cache_hits_total") == 64
    assert (stats["queries"], stats["hits"], stats["recent_queries"]) == (3, 2, 3)
    assert stats["recent_hit_ratio"] == pytest.approx(64 / 120)
    assert stats["num_blocks"] == 200
    assert stats["blocks_in_use"] + stats["free_blocks"] == 199


async def test_a_rollout_over_three_updates_is_labelled_token_by_token(
    server: Server, folders: tuple[Path, Path]
) -> None:
    """With the mode that the request chose, whatever the update says."""
    asked = {"on_weight_update": "keep", "return_weight_versions": True, "return_token_ids": True}
    server.gate.hold_after(4)
    task = asyncio.create_task(server.ask(max_tokens=400, **asked))
    for step in range(3):
        await server.gate.until_held()
        body = {"model_path": str(folders[(step + 1) % 2]), "weight_version": f"step-{step + 1}"}
        update = server.post("/update_weights_from_disk", json=body)
        assert (await server.gate.open_for(server.engine, update)).status_code == 200
        if step < 2:
            server.gate.hold_after(3)
    (choice,) = (await task).json()["choices"]
    spans = choice["weight_versions"]
    assert [one["version"] for one in spans] == [0, "step-1", "step-2", "step-3"]
    assert spans[0]["start"] == 0
    assert [one["start"] for one in spans[1:]] == [one["end"] for one in spans[:-1]]
    assert spans[-1]["end"] == len(choice["token_ids"]) == 400


async def test_a_stream_ends_with_its_labels_and_others_have_none(server: Server) -> None:
    for path, more in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        body = {"max_tokens": 3, "ignore_eos": True, "return_weight_versions": True, **more}
        for stream in (False, True):
            response = await server.post(path, json={**body, "stream": stream})
            texts = [one[6:] for one in response.text.splitlines() if one.startswith("data: {")]
            found = json.loads(texts[-1]) if stream else response.json()
            (choice,) = found["choices"]
            assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 3}], (
                path,
                stream,
            )
            assert choice["hit_staleness"] == 0
            del body["return_weight_versions"]
            assert "weight_versions" not in (await server.post(path, json=body)).text
            body["return_weight_versions"] = True


async def test_usage_and_metrics_tell_how_old_hits_are(folders: tuple[Path, Path]) -> None:
    async with AsyncExitStack() as stack:
        app, engine = serve_folder(folders[0], max_weight_staleness=2, diagnostics_memory=1 << 20)
        stack.push_async_callback(engine.shutdown)
        server = Server(await stack.enter_async_context(client_of(app)), engine)
        await server.text()
        body = {"model_path": str(folders[1])}
        assert (await server.post("/update_weights_from_disk", json=body)).status_code == 200
        old = (await server.ask(return_weight_versions=True, cache_diagnostics=True)).json()
        cached = old["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        assert old["usage"]["prompt_tokens_details"]["stale_cached_tokens"] == cached
        assert old["choices"][0]["hit_staleness"] == 1
        page = await server.page()
        assert metric(page, "prefix_cache_stale_hits_total") == cached
        assert 'updates="1"' in page
        new = (await server.ask(max_weight_staleness=0)).json()
        assert "stale_cached_tokens" not in new["usage"]["prompt_tokens_details"]
        assert new["choices"][0]["text"] == await _text_of(folders[1])
