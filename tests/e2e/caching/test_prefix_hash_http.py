"""A router in plain Python computes, from what `/version` tells, the hashes that the server has."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixcache.core import PrefixCache
from prefixcache.engine.async_engine import AsyncEngine
from reference.prefix_hashes import block_hashes, scoped
from support.serving import MODEL, client_of, serve_folder
from support.tiny_models import edit_config

Checkpoint = Callable[..., Path]
PROMPT = list(range(10, 130))


@pytest.fixture
def folder(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint()


@pytest.fixture
async def served(folder: Path) -> AsyncGenerator[tuple[httpx.AsyncClient, AsyncEngine], None]:
    app, engine = serve_folder(folder)
    try:
        async with client_of(app) as client:
            yield client, engine
    finally:
        engine.close()


async def routed(client: httpx.AsyncClient, salt: str | None = None) -> list[bytes]:
    """The hashes of the prompt as a router computes them."""
    known = await reported(client)
    assert known["format"] == "prefixcache v2"
    root = scoped(bytes.fromhex(known["root_hash"]), cache_salt=salt)
    return block_hashes(root, known["block_size"], PROMPT)


async def cached(
    client: httpx.AsyncClient, engine: AsyncEngine, salt: str | None = None
) -> list[bytes]:
    """The hashes under which the server has cached the prompt."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    response = await client.post("/v1/completions", json={**body, "cache_salt": salt})
    assert response.status_code == 200, response.text
    core: PrefixCache = engine._engine._cache.core
    hashes = core.compute_block_hashes(PROMPT, cache_salt=salt)
    assert core.probe(hashes) == len(PROMPT) // core.block_size * core.block_size
    return [hashes.to_bytes(index) for index in range(len(hashes))]


@pytest.mark.parametrize("salt", [None, "", "häßlich"])
async def test_a_router_computes_the_hashes_that_the_server_has(served, salt):
    client, engine = served
    hashes = await routed(client, salt)
    assert len(hashes) == 7
    assert hashes == await cached(client, engine, salt)


async def test_new_weights_have_another_root(served, folder, tiny_checkpoint):
    client, engine = served
    old = await routed(client)
    await cached(client, engine)
    answer = await updated(client, tiny_checkpoint(seed=8))
    assert answer["root_hash"] == (await reported(client))["root_hash"]
    new = await routed(client)
    assert not set(old) & set(new)
    assert new == await cached(client, engine)
    response = await client.post("/reset_prefix_cache")
    assert response.status_code == 200, response.text
    assert await routed(client) == new
    await updated(client, folder)
    assert await routed(client) == old
    core = engine._engine._cache.core
    assert core.probe(core.compute_block_hashes(PROMPT)) == 0
    assert old == await cached(client, engine)


async def updated(client: httpx.AsyncClient, folder: Path, **options: Any) -> dict[str, Any]:
    body = {"model_path": str(folder), **options}
    response = await client.post("/update_weights_from_disk", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def reported(client: httpx.AsyncClient) -> dict[str, Any]:
    return (await client.get("/version")).json()["prefix_hash"]


async def test_servers_agree_on_the_root_of_the_same_content(
    served, folder, tiny_checkpoint, tmp_path
):
    """Neither a path nor what was served before is part of it, but what the model computes is."""
    client, next_folder = served[0], tiny_checkpoint(seed=8)
    copy = shutil.copytree(folder, tmp_path / "copy")
    app, engine = serve_folder(copy)
    try:
        async with client_of(app) as other:
            assert await reported(other) == await reported(client)
            await updated(other, next_folder)
            assert await reported(other) != await reported(client)
            for tag in (None, "step-1"):
                answers = [
                    await updated(one, next_folder, weight_version=tag) for one in (other, client)
                ]
                assert await reported(other) == await reported(client)
            assert [one["weight_version"] for one in answers] == ["step-1", "step-1"]
            assert answers[0]["weights_name"] == "tag:step-1"
            refused = {"model_path": str(folder), "weight_version": "step-1"}
            response = await client.post("/update_weights_from_disk", json=refused)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "weight_version"
            assert "'step-1' is the tag of other weights" in error["message"]
            assert await reported(other) == await reported(client)
    finally:
        engine.close()
    edit_config(copy, rms_norm_eps=0.5)
    app, engine = serve_folder(copy)
    try:
        async with client_of(app) as other:
            await updated(client, folder)
            mine, theirs = await reported(client), await reported(other)
            assert mine["weights_name"] == theirs["weights_name"]
            assert mine["root_hash"] != theirs["root_hash"]
    finally:
        engine.close()
