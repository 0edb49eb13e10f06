"""`cache_hit_threshold` through HTTP: vLLM #24520's plan of four requests, and bad values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.serving import MODEL, events, served_folder

SHARED = list(range(10, 90))


def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}


def ending(response: httpx.Response) -> tuple[str, int, int]:
    """Finish reason, generated tokens and cached tokens of a one-choice answer."""
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["finish_reason"], usage["completion_tokens"], cached


async def test_the_plan_of_four_requests(tiny_checkpoint: Callable[..., Path]) -> None:
    miss, hit = [*range(100, 180)], [*SHARED, *range(100, 140)]
    async with served_folder(tiny_checkpoint(), global_cache_hit_threshold=0.8) as (client, _):
        ask = lambda **fields: client.post("/v1/completions", json=body(**fields))  # noqa: E731
        warm = await ask(prompt=SHARED, cache_hit_threshold=0)
        assert ending(warm) == ("length", 4, 0)
        assert ending(await ask(prompt=miss, cache_hit_threshold=0.33))[:2] == (
            "cache_threshold",
            0,
        )
        assert ending(await ask(prompt=hit, cache_hit_threshold=0.33)) == ("length", 4, 80)
        assert ending(await ask(prompt=[*SHARED, *miss]))[:2] == ("cache_threshold", 0)
        metrics = (await client.get("/metrics")).text
    assert (
        'prefixcache:cache_threshold_refusals_total{model_name="tiny",source="request"} 1.0'
        in metrics
    )
    assert (
        'prefixcache:cache_threshold_refusals_total{model_name="tiny",source="global"} 1.0'
        in metrics
    )
    assert 'prefixcache:kv_cache_usage_perc{model_name="tiny"} 0.0' in metrics


async def test_streams_and_chats_end_the_same_way(tiny_checkpoint: Callable[..., Path]) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with served_folder(tiny_checkpoint()) as (client, _):
        stream = await client.post(
            "/v1/completions", json=body(SHARED, cache_hit_threshold=1.0, stream=True)
        )
        answered = await client.post(
            "/v1/chat/completions", json={**chat, "cache_hit_threshold": 0.5}
        )
        chosen = await client.post(
            "/v1/completions", json=body(SHARED, cache_hit_threshold=0.5, n=2)
        )
    (last,) = [e for e in events(stream.text) if e["choices"][0]["finish_reason"]]
    assert last["choices"][0]["finish_reason"] == "cache_threshold"
    assert "".join(e["choices"][0]["text"] for e in events(stream.text)) == ""
    assert answered.json()["choices"][0]["finish_reason"] == "cache_threshold"
    assert [c["finish_reason"] for c in chosen.json()["choices"]] == ["cache_threshold"] * 2


MESSAGES = {"messages": [{"role": "user", "content": "hi there " * 20}], "max_tokens": 0}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": SHARED, "max_tokens": 0}),
        ("/v1/chat/completions", MESSAGES),
        ("/v1/messages", MESSAGES),
        ("/v1/responses", {"input": "hi " * 40, "prompt_cache_options": {"prewarm": True}}),
        ("/prefix_cache/warm", {"prompt": SHARED}),
    ],
)
async def test_a_prompt_alone_is_cached_whatever_the_threshold(
    tiny_checkpoint: Callable[..., Path], path: str, fields: dict[str, Any]
) -> None:
    async with served_folder(tiny_checkpoint(), global_cache_hit_threshold=0.8) as (client, _):
        answer = await client.post(path, json=fields)
        cached = (await client.post("/prefix_cache/probe", json=fields)).json()["cached_tokens"]
    assert answer.status_code == 200, answer.text
    assert cached > 0
