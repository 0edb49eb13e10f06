"""`POST /prefix_cache/probe`: bodies of every endpoint, their validation, what it tells."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.serving import MODEL, served_folder

PROBE = "/prefix_cache/probe"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
PROMPT = list(range(10, 90))
TEXT = "The same question asked twice is answered from the blocks that are there, so ask."
CHATTED = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "temperature": 0}


@pytest.fixture
async def client(tiny_checkpoint: Callable[..., Path]) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with served_folder(tiny_checkpoint()) as (client, _):
        yield client


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}


async def counts(client: httpx.AsyncClient, fields: dict[str, Any]) -> tuple[int, int]:
    response = await client.post(PROBE, json=fields)
    assert response.status_code == 200, response.text
    reply = response.json()
    assert list(reply) == ["prompt_tokens", "cached_tokens"]
    return reply["prompt_tokens"], reply["cached_tokens"]


async def usage(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> tuple[int, int]:
    response = await client.post(path, json=fields)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, body([*PROMPT, 5])),
        (COMPLETIONS, body(TEXT)),
        (COMPLETIONS, body([TEXT, [*PROMPT, 5]])),
        (COMPLETIONS, body(TEXT, n=3, temperature=1, seed=1)),
        (COMPLETIONS, body(TEXT, cache_salt="mine")),
        (CHAT, CHATTED),
    ],
)
async def test_a_probe_tells_what_the_next_answer_uses(client, path, fields):
    length, cached = await counts(client, fields)
    assert cached == 0
    assert await usage(client, path, fields) == (length, 0)
    probed = await counts(client, fields)
    assert probed[1] > 0
    assert await usage(client, path, fields) == probed
    assert await counts(client, {**fields, "cache_salt": "other"}) == (length, 0)
    assert await counts(client, {**fields, "cache_read": False}) == (length, 0)


async def test_a_prompt_that_is_cached_to_its_end(client: httpx.AsyncClient) -> None:
    """The probe counts its last block too, of which the next request computes the last token."""
    await usage(client, COMPLETIONS, body(PROMPT))
    assert await counts(client, body(PROMPT)) == (80, 80)
    assert await usage(client, COMPLETIONS, body(PROMPT)) == (80, 64)


async def test_a_threshold_is_met_by_what_was_probed(client: httpx.AsyncClient) -> None:
    await usage(client, COMPLETIONS, body(PROMPT))
    length, cached = await counts(client, body([*PROMPT, *range(200, 220)]))
    ratio = cached / (length // 16 * 16)
    for threshold, reason in ((ratio, "length"), (ratio + 0.01, "cache_threshold")):
        fields = body([*PROMPT, *range(200, 220)], cache_hit_threshold=threshold, cache_write=False)
        answer = (await client.post(COMPLETIONS, json=fields)).json()
        assert answer["choices"][0]["finish_reason"] == reason
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


# Each is refused by another check: of fields, options, lengths and items, in every API.
WRONG: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, body(TEXT, model="another")),
    (COMPLETIONS, body(TEXT, cache_salt=5)),
    (COMPLETIONS, body(TEXT, max_tokens=-2)),
    (COMPLETIONS, body(TEXT, guided_regex="(")),
    (COMPLETIONS, body([[]])),
    (COMPLETIONS, body([1, 10**6])),
    (COMPLETIONS, body(list(range(200)) * 3)),
    (COMPLETIONS, {"model": MODEL}),
    (CHAT, {**CHATTED, "logit_bias": {"1000000": 1}}),
    (CHAT, {**CHATTED, "cache_hit_threshold": 1.5}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}),
    (RESPONSES, {"input": 7}),
    (RESPONSES, {"input": TEXT, "previous_response_id": "resp_x"}),
    (RESPONSES, {"input": TEXT, "tools": [{"type": "function", "name": "no name"}]}),
]


async def test_a_wrong_body_gets_the_endpoints_own_error(client: httpx.AsyncClient) -> None:
    for path, fields in WRONG:
        probed = await client.post(PROBE, json=fields)
        expected = await client.post(path, json=fields)
        assert expected.status_code in (400, 404), fields
        assert (probed.status_code, probed.json()) == (expected.status_code, expected.json())


async def test_an_engine_that_sleeps_or_is_gone_says_so(tiny_checkpoint):
    async with served_folder(tiny_checkpoint()) as (client, engine):
        await engine.run(lambda control: control.sleep())
        asleep = await client.post(PROBE, json=body(PROMPT))
        await engine.run(lambda control: control.wake_up())
        assert await counts(client, body(PROMPT)) == (80, 0)
        engine.close()
        gone = await client.post(PROBE, json=body(PROMPT))
    assert (asleep.status_code, gone.status_code) == (503, 503)
    assert asleep.json()["error"]["code"] == "engine_asleep"
