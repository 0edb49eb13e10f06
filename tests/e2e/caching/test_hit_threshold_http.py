"""`cache_hit_threshold` through HTTP: vLLM #24520's plan of four requests, and bad values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.fake_runner import StepGate
from prefixcache.engine.async_engine import AsyncEngine
from support.serving import MODEL, client_of, events, serve_folder, served_folder

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


FIRST = {"prompt": list(range(200, 208)), "max_tokens": 24, "ignore_eos": True}
SECOND = {"prompt": list(range(100, 108)), "max_tokens": 24, "ignore_eos": True}


async def preempted(
    client: httpx.AsyncClient, engine: AsyncEngine, first: dict[str, Any], second: dict[str, Any]
) -> httpx.Response:
    """What "second" gets, which makes way for "first" in a pool of 36 tokens.

    Its prompt is cached, and it asks for all of it.
    """
    await client.post("/v1/completions", json=body(**{**SECOND, "max_tokens": 1}))
    await engine.run(lambda control: control.pause())
    before = engine.control.prefix_cache_stats()
    asked = list[asyncio.Task[httpx.Response]]()
    for fields in ({**FIRST, **first}, {**SECOND, **second}):
        asked.append(asyncio.create_task(client.post("/v1/completions", json=body(**fields))))
        await until_waiting(engine, len(asked))  # the one that came last makes way
    await engine.run(lambda control: control.resume())
    answered = [await one for one in asked]
    stats = engine.control.prefix_cache_stats()
    assert stats.preemptions == before.preemptions + 1
    assert stats.blocks_in_use == 0
    assert ending(answered[0])[0] == "length"
    return answered[1]


async def until_waiting(engine: AsyncEngine, count: int) -> None:
    name = "prefixcache:num_requests_waiting"
    while engine.metrics.registry.get_sample_value(name) != count:
        await asyncio.sleep(0.001)


SMALL_POOL = {"num_blocks": 10, "block_size": 4, "max_model_len": 36}


async def test_a_preempted_request_whose_blocks_were_recycled_goes_back_to_the_router(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    asked = {"cache_hit_threshold": 1.0}
    usage_wanted = {"stream": True, "stream_options": {"include_usage": True}}
    async with served_folder(tiny_checkpoint(), **SMALL_POOL) as (client, engine):
        lone = (await client.post("/v1/completions", json=body(**SECOND))).json()
        whole = await preempted(client, engine, {}, asked)
        stream = await preempted(client, engine, {}, {**asked, **usage_wanted})
    text = lone["choices"][0]["text"]
    assert ending(whole) == ("cache_threshold", 9, 4)
    sent = whole.json()["choices"][0]["text"]
    assert sent
    assert text.startswith(sent)
    assert whole.json()["usage"]["total_tokens"] == 8 + 9
    *chunks, last, usage = events(stream.text)
    assert last["choices"][0]["finish_reason"] == "cache_threshold"
    assert "".join(e["choices"][0]["text"] for e in [*chunks, last]) == sent
    assert usage["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("stream", [False, True])
async def test_after_a_sleep_and_a_weight_update_a_router_can_tell(tiny_checkpoint, stream):
    """What was sent under weights that stay counts; under others it is void."""
    app, engine = serve_folder(tiny_checkpoint())
    gate = StepGate(engine._engine._runner)
    asked = body(**{**SECOND, "max_tokens": 60}, cache_hit_threshold=0.3, stream=stream)
    answers = []
    try:
        async with client_of(app) as client:
            other = str(tiny_checkpoint(seed=11))
            for change in (
                lambda control: control.sleep(),
                lambda control: control.update_weights_from_disk(other),
            ):
                warm = body(list(range(100, 140)), cache_hit_threshold=0.0)
                await client.post("/v1/completions", json=warm)
                gate.hold_after(3)
                asked["prompt"] = list(range(100, 140))
                task = asyncio.create_task(client.post("/v1/completions", json=asked))
                await gate.until_held()
                await gate.open_for(engine, engine.run(change))
                await engine.run(lambda control: control.wake_up())
                answers.append(await task)
    finally:
        gate.open()
        engine.close()
    slept, updated = answers
    if not stream:
        assert ending(slept)[:2] == ("cache_threshold", 4)
        assert ending(updated)[:2] == ("cache_threshold", 0)
        assert updated.json()["choices"][0]["text"] == ""
        return
    assert events(slept.text)[-1]["choices"][0]["finish_reason"] == "cache_threshold"
    assert events(updated.text)[-1]["error"]["code"] == "weights_replaced"
