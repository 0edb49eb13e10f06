"""A server whose KV events are published: what its endpoints tell, and to whom."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from prefixcache.config.engine_config import EngineConfig
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.engine.build import build
from prefixcache.events import wire
from prefixcache.events.config import KVEventsConfig
from prefixcache.events.start import event_sockets, publishing
from prefixcache.server.app import create_app
from prefixcache.server.jobs.served_model import ServedModel
from support.serving import MODEL, client_of, metric

LOCAL = "tcp://127.0.0.1:*"
CONFIG = KVEventsConfig(enable_kv_cache_events=True, endpoint=LOCAL, replay_endpoint=LOCAL)
PROMPT = [5 + i % 200 for i in range(100)]
SECRET = [250] * 100


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Callable[..., Path]) -> Generator[Starlette]:
    flags = {"dtype": "float32", "device": "cpu", "num_blocks": 200}
    config = EngineConfig.from_flags(model=str(tiny_checkpoint("gemma3")), **flags)
    with ExitStack() as stack:
        sockets = stack.enter_context(event_sockets(CONFIG))
        built = build(config)
        events = stack.enter_context(publishing(built.engine, sockets, CONFIG, model="gemma"))
        engine = stack.enter_context(closing(AsyncEngine(built.engine)))
        served = ServedModel(names=(MODEL,), tokenizer=built.tokenizer)
        yield create_app(engine, served, events=events)


async def ask(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = await client.post("/v1/completions", json=body | fields)
    assert answer.status_code == 200, answer.text


async def snapshot(client: httpx.AsyncClient) -> tuple[Any, list[wire.BlockStored], Any]:
    answer = await client.get("/prefix_cache/snapshot")
    assert answer.status_code == 200, answer.text
    header, *events, end = wire.decode_snapshot([answer.content])
    assert all(isinstance(event, wire.BlockStored) for event in events)
    return header, events, end  # type: ignore[return-value]


async def test_a_snapshot_tells_what_is_cached_under_no_salt(server: Starlette) -> None:
    async with client_of(server) as client:
        await ask(client, SECRET, cache_salt="mine")
        await ask(client, PROMPT)
        header, events, end = await snapshot(client)
        info = (await client.get("/server_info")).json()
        page = (await client.get("/metrics")).text
        stats = (await client.get("/prefix_cache/stats")).json()
    assert header.root_hash == info["prefix_hash"]["root_hash"]
    assert (header.model, header.block_size) == ("gemma", 16)
    assert {one.kv_cache_spec_kind for one in header.groups} == {
        "full_attention",
        "sliding_window",
    }
    for event in events:
        group = header.groups[event.group_idx or 0]
        assert event.kv_cache_spec_kind == group.kv_cache_spec_kind
        assert event.kv_cache_spec_sliding_window == group.kv_cache_spec_sliding_window
        assert not set(event.token_ids) & set(SECRET)
    full = [one for one in events if one.kv_cache_spec_kind == "full_attention"]
    assert [token for one in full for token in one.token_ids][:96] == PROMPT[:96]
    assert 0 < end.num_blocks < stats["cached_blocks"]
    endpoints = info["kv_events"]
    assert all(one.startswith("tcp://127.0.0.1:") for one in endpoints.values())
    assert metric(page, "kv_event_batches_total") == header.sequence + 1
    assert metric(page, "kv_events_publishing") == 1


async def test_a_reset_leaves_an_empty_snapshot(server: Starlette) -> None:
    async with client_of(server) as client:
        await ask(client, PROMPT)
        before, _, _ = await snapshot(client)
        await client.post("/reset_prefix_cache")
        header, events, end = await snapshot(client)
    assert (events, end.num_blocks) == ([], 0)
    assert header.sequence > before.sequence


async def test_a_snapshot_is_the_administrators(server: Starlette) -> None:
    async with client_of(server, "192.0.2.7") as client:
        answer = await client.get("/prefix_cache/snapshot")
    assert answer.status_code in (401, 403)


async def test_without_events_there_is_no_snapshot(client: httpx.AsyncClient) -> None:
    answer = await client.get("/prefix_cache/snapshot")
    assert answer.status_code == 400
    assert "--kv-events-config" in answer.json()["error"]["message"]
    assert (await client.get("/server_info")).json()["kv_events"] is None
