"""A router in plain Python computes, from what `/version` tells, the hashes that the server has."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixcache.core import PrefixCache
from prefixcache.engine.async_engine import AsyncEngine
from reference.prefix_hashes import block_hashes, scoped
from serving import MODEL, client_of, serve_folder

PROMPT = list(range(10, 130))


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path]) -> Path:
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
    told = (await client.get("/version")).json()["prefix_hash"]
    assert told["format"] == "prefixcache v2"
    root = scoped(bytes.fromhex(told["root_hash"]), cache_salt=salt)
    return block_hashes(root, told["block_size"], PROMPT)


async def cached(
    client: httpx.AsyncClient, engine: AsyncEngine, salt: str | None = None
) -> list[bytes]:
    """The hashes under which the server has cached the prompt."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    response = await client.post("/v1/completions", json={**body, "cache_salt": salt})
    assert response.status_code == 200, response.text
    core: PrefixCache = engine._engine._cache._cache
    hashes = core.compute_block_hashes(PROMPT, cache_salt=salt)
    assert core.probe(hashes) == len(PROMPT) // core.block_size * core.block_size
    return [hashes.to_bytes(index) for index in range(len(hashes))]


@pytest.mark.parametrize("salt", [None, "", "häßlich"])
async def test_a_router_computes_the_hashes_that_the_server_has(
    served: tuple[httpx.AsyncClient, AsyncEngine], salt: str | None
) -> None:
    client, engine = served
    hashes = await routed(client, salt)
    assert len(hashes) == 7
    assert hashes == await cached(client, engine, salt)


async def test_new_weights_have_another_root(
    served: tuple[httpx.AsyncClient, AsyncEngine], folder: Path
) -> None:
    client, engine = served
    old = await routed(client)
    response = await client.post("/update_weights_from_disk", json={"model_path": str(folder)})
    assert response.status_code == 200, response.text
    new = await routed(client)
    assert not set(old) & set(new)
    assert new == await cached(client, engine)
    response = await client.post("/reset_prefix_cache")
    assert response.status_code == 200, response.text
    assert await routed(client) == new


async def test_two_servers_of_one_model_agree_on_the_root(
    served: tuple[httpx.AsyncClient, AsyncEngine], folder: Path
) -> None:
    """The root depends on nothing but what makes KV valid."""
    app, engine = serve_folder(folder)
    try:
        async with client_of(app) as other:
            assert await routed(other) == await routed(served[0])
    finally:
        engine.close()
