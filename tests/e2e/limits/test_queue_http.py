"""What a client sees of the queue: a 503 when it is full; what counts as one in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import httpx
import pytest

from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.serving import MODEL, FakeEngine, client_of, fake_app, says, served_folder, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}


def num_waiting(engine: AsyncEngine) -> float | None:
    return engine.metrics.registry.get_sample_value("prefixcache:num_requests_waiting")


async def answered(responses: Awaitable[list[httpx.Response]]) -> list[int]:
    return [response.status_code for response in await responses]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
async def test_a_full_queue_is_a_503_with_retry_after(tiny_checkpoint, path, body, stream):
    async with served_folder(tiny_checkpoint(), max_queue=2) as (client, engine):
        await engine.run(lambda control: control.pause())
        waiting = asyncio.gather(
            *(client.post("/v1/completions", json=COMPLETION) for _ in range(2))
        )
        await until(lambda: num_waiting(engine) == 2)
        refused = await client.post(path, json={**body, "stream": stream})
        await engine.run(lambda control: control.resume())
        assert await answered(waiting) == [200, 200]
        again = await client.post(path, json={**body, "stream": stream})
    assert refused.status_code == 503
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "queue_full")
    assert "2 requests wait already" in error["message"]
    assert again.status_code == 200


async def test_a_list_of_prompts_is_let_in_and_counts_by_its_batches(tiny_checkpoint):
    """20 answers of one request, 8 at a time, take three places of four."""
    body = {**COMPLETION, "prompt": [[5, 6, n] for n in range(10)], "n": 2, "temperature": 1}
    async with served_folder(tiny_checkpoint(), max_queue=4, max_num_seqs=8) as (client, engine):
        await engine.run(lambda control: control.pause())
        large = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: num_waiting(engine) == 20)
        small = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await until(lambda: num_waiting(engine) == 21)
        refused = await client.post("/v1/completions", json=COMPLETION)
        await engine.run(lambda control: control.resume())
        answers = await asyncio.gather(large, small)
    assert refused.status_code == 503
    assert [len(answer.json()["choices"]) for answer in answers] == [20, 1]


async def test_what_came_in_one_body_is_one_job(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request: says(request, "x"))
    app = fake_app(engine, tokenizer)
    body = {**COMPLETION, "prompt": [[5, 6], [7, 8]], "n": 2, "temperature": 1}
    async with client_of(app) as client:
        for _ in range(2):  # the client sends its id twice
            response = await client.post(
                "/v1/completions", json=body, headers={"X-Request-Id": "mine"}
            )
            assert response.status_code == 200
    jobs = [request.job for request in engine.requests]
    assert len(set(jobs[:4])) == len(set(jobs[4:])) == 1
    assert jobs[0] != jobs[4]
