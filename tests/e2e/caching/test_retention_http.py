"""Retention hints over HTTP: a prefix outlives other traffic for its TTL, at the cost of its owner.

The pool's time is set by hand, so that no test waits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import pytest

from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.server.http.access import AccessRules
from support.serving import MODEL, metric, served_folder

USABLE = 60
PREFIX = [5 + i % 300 for i in range(96)]
TTL = [{"start": 0, "end": 96, "ttl_s": 600}]


async def ask(
    client: httpx.AsyncClient, prompt: list[int], *, key: str = "a", **fields: Any
) -> tuple[int, Any]:
    """The tokens that hit, and the choices."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 3}
    headers = {"Authorization": f"Bearer {key}"}
    response = await client.post("/v1/completions", json=body | fields, headers=headers)
    assert response.status_code == 200, response.text
    reply = response.json()
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"]


async def traffic(client: httpx.AsyncClient, pools: int) -> None:
    """Other prompts, as many blocks as that many pools have, in lists of ten."""
    for first in range(0, pools * USABLE // 10, 10):
        prompts = [[(first + i) % 350, *range(160)] for i in range(10)]
        await ask(client, prompts, cache_salt=f"traffic {first}", max_tokens=1)  # type: ignore[arg-type]


async def at(engine: AsyncEngine, seconds: float) -> None:
    """Sets the time that TTLs go by."""
    await engine.run(
        lambda control: control.run_between_steps(partial(control._cache.core.set_time, seconds))
    )


async def stats(client: httpx.AsyncClient) -> dict[str, Any]:
    headers = {"Authorization": "Bearer root"}
    page = (await client.get("/metrics", headers=headers)).text
    found = (await client.get("/prefix_cache/stats", headers=headers)).json()
    assert metric(page, "hinted_blocks") == found["hinted_blocks"]
    assert metric(page, "hints_demoted_total") == found["hints_demoted"]
    assert metric(page, "hints_expired_total") == found["hints_expired"]
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"retention": TTL},
        {"prompt_cache_options": {"ttl": "30m"}},
        {"prompt_cache_retention": "24h"},
    ],
)
async def test_a_prefix_outlives_ten_pools_and_goes_with_its_ttl(tiny_checkpoint, fields):
    folder = tiny_checkpoint()
    # Four at a time leave room: what runs may take every block.
    flags = {"num_blocks": USABLE + 1, "max_num_seqs": 4}
    async with served_folder(folder, **flags) as (client, engine):
        await at(engine, 0)
        _, cold = await ask(client, [*PREFIX, 7], **fields)
        await traffic(client, 10)
        assert await ask(client, [*PREFIX, 7]) == (96, cold)
        assert (await stats(client))["hinted_blocks"] >= 6
        await at(engine, 24 * 3600 + 601)
        await traffic(client, 2)
        assert await ask(client, [*PREFIX, 7]) == (0, cold)
        assert (await stats(client))["hints_expired"] >= 6


async def test_keys_over_their_budget_do_not_touch_a_third(tiny_checkpoint):
    rules = AccessRules(api_keys=("a", "b", "c"), admin_api_keys=("root",))
    folder = tiny_checkpoint()
    async with served_folder(
        folder, num_blocks=USABLE + 1, access={"rules": rules}, retention_budget=0.2
    ) as (client, _):
        _, cold = await ask(client, [*PREFIX, 7], key="c", retention=TTL)
        for number in range(15):
            for key in ("a", "b"):
                hint = [{"priority": 100}]
                prompt = [number + (200 if key == "a" else 100), *PREFIX]
                await ask(client, prompt, key=key, retention=hint)
        counted = await stats(client)
        assert counted["hints_demoted"] > USABLE
        assert counted["hinted_blocks"] <= 3 * 0.2 * USABLE
        assert await ask(client, [*PREFIX, 7], key="c") == (96, cold)


async def test_a_group_keeps_its_prompt_until_its_last_request(tiny_checkpoint: Any) -> None:
    """Of its own name and of `n`; others of that name under another key are another group."""
    rules = AccessRules(api_keys=("a", "b"), admin_api_keys=("root",))
    options = {"num_blocks": USABLE + 1, "access": {"rules": rules}, "retention_budget": 0.5}
    async with served_folder(tiny_checkpoint(), **options) as (client, _):
        group = {"group_id": "g", "group_size": 3}
        await ask(client, PREFIX, **group)
        await ask(client, PREFIX, key="b", **group)
        assert (await stats(client))["hinted_blocks"] == len(PREFIX) // 16
        await traffic(client, 2)
        assert (await ask(client, PREFIX, **group))[0] == len(PREFIX) - 16
        await ask(client, PREFIX, **group)
        await ask(client, PREFIX, key="b", group_id="g")
        assert (await stats(client))["hinted_blocks"] == len(PREFIX) // 16
        await ask(client, PREFIX, key="b", group_id="g")
        assert (await stats(client))["hinted_blocks"] == 0
        _, choices = await ask(client, [3, *PREFIX], n=5)
        assert len(choices) == 5
        assert (await stats(client))["hinted_blocks"] == 0
