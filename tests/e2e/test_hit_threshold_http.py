"""`cache_hit_threshold` through HTTP: vLLM #24520's plan of four requests, and bad values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import MODEL, client_of, events, serve_folder

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
    app, engine = serve_folder(tiny_checkpoint(), global_cache_hit_threshold=0.8)
    miss, hit = [*range(100, 180)], [*SHARED, *range(100, 140)]
    try:
        async with client_of(app) as client:
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
    finally:
        engine.close()
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
    app, engine = serve_folder(tiny_checkpoint())
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    try:
        async with client_of(app) as client:
            stream = await client.post(
                "/v1/completions", json=body(SHARED, cache_hit_threshold=1.0, stream=True)
            )
            answered = await client.post(
                "/v1/chat/completions", json={**chat, "cache_hit_threshold": 0.5}
            )
            chosen = await client.post(
                "/v1/completions", json=body(SHARED, cache_hit_threshold=0.5, n=2)
            )
    finally:
        engine.close()
    (last,) = [e for e in events(stream.text) if e["choices"][0]["finish_reason"]]
    assert last["choices"][0]["finish_reason"] == "cache_threshold"
    assert "".join(e["choices"][0]["text"] for e in events(stream.text)) == ""
    assert answered.json()["choices"][0]["finish_reason"] == "cache_threshold"
    assert [c["finish_reason"] for c in chosen.json()["choices"]] == ["cache_threshold"] * 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("value", ["-0.01", "1.01", "NaN", "true", '"0.5"', "[]"])
async def test_wrong_thresholds_name_the_field(
    tiny_checkpoint: Callable[..., Path], path: str, value: str
) -> None:
    app, engine = serve_folder(tiny_checkpoint())
    fields = {"model": MODEL, "prompt": "x"}
    if "chat" in path:
        fields = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    text = json.dumps(fields)[:-1] + f', "cache_hit_threshold": {value}}}'
    try:
        async with client_of(app) as client:
            response = await client.post(
                path, content=text, headers={"Content-Type": "application/json"}
            )
    finally:
        engine.close()
    assert response.status_code == 400
    assert value == "NaN" or response.json()["error"]["param"] == "cache_hit_threshold"
