"""Answers through Ray Serve are those of one server, whatever happens to replicas and ingress."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from cluster import (
    COMMANDS,
    GREEDY,
    INGRESS,
    REPLICA,
    Cluster,
    Traffic,
    all_completions,
    bodies_of,
    completion,
    prompt,
    said,
    streamed,
    until,
)


async def test_answers_are_those_of_one_server(cluster: Cluster, one_server: str) -> None:
    bodies = [
        *bodies_of(4),
        *bodies_of(2, logprobs=3, temperature=0.9, seed=7),
        *bodies_of(2, n=2, temperature=0.8, seed=3),
        {**GREEDY, "prompt": "The same question asked twice", "max_tokens": 9, "echo": True},
        {**GREEDY, "prompt": [prompt(1), prompt(2, 33)], "max_tokens": 5},
        {**GREEDY, "prompt": prompt(3), "max_tokens": 10**6},
        {**GREEDY, "prompt": prompt(3), "max_tokens": 9, "cache_salt": "mine"},
        {**GREEDY, "prompt": "", "max_tokens": 9},
        {**GREEDY, "prompt": prompt(9), "max_tokens": 9, "cache_hit_threshold": 1.0},
        {**GREEDY, "prompt": "[", "max_tokens": 30, "guided_json": {"type": "integer"}},
        {**GREEDY, "prompt": "[", "max_tokens": 30, "guided_json": {"type": "nothing"}},
        {**GREEDY, "model": "another", "prompt": "x"},
    ]
    for body in bodies * 2:
        ours, theirs = (
            await completion(cluster.address, **body),
            await completion(one_server, **body),
        )
        assert ours.status_code == theirs.status_code
        assert said(ours) == said(theirs)


async def test_a_prompt_goes_where_its_prefix_lies(cluster: Cluster) -> None:
    cluster.post("/reset_prefix_cache")
    # So short that one replica holds all six, if they are sent to it: an evicted one stays so.
    bodies = [{**GREEDY, "max_tokens": 4, "prompt": prompt(index, 300)} for index in range(6)]
    first = await all_completions(cluster.address, bodies)

    async def num_cached() -> list[int]:
        """Of each prompt, at the replica that it is sent to; leaves the caches as they are."""
        again = [await completion(cluster.address, cache_write=False, **body) for body in bodies]
        assert [said(one) for one in again] == [said(one) for one in first]
        return [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for one in again]

    # The router learns what is cached where a moment after the answers, and sends a request
    # elsewhere while a replica is too busy to say how busy it is. If it did not learn, all six
    # would go to the right one of three replicas once in 729 times, and never three times on end.
    on_end = 0
    while on_end < 3:
        on_end = on_end + 1 if await num_cached() == [288] * 6 else 0
        await asyncio.sleep(0.1)
    stats = httpx.get(f"{cluster.address}/prefix_cache/stats", timeout=240).json()["replicas"]
    assert len(stats) == 3
    assert all(one["queried_tokens"] for one in stats.values())


async def test_a_stream_is_that_of_one_server(cluster: Cluster, one_server: str) -> None:
    body = {**bodies_of(1)[0], "stream": True, "stream_options": {"include_usage": True}}
    found = []
    for address in (cluster.address, one_server):
        async with httpx.AsyncClient(timeout=240) as client:
            found.append((await client.post(f"{address}/v1/completions", json=body)).text)
    texts = [streamed(text.splitlines()) for text in found]
    assert texts[0] == texts[1]
    assert texts[0][0]
    assert all(text.endswith("data: [DONE]\n\n") for text in found)


async def test_who_leaves_takes_the_work_along(cluster: Cluster) -> None:
    body = {**bodies_of(1)[0], "max_tokens": 1800, "ignore_eos": True, "stream": True}
    url = f"{cluster.address}/v1/completions"
    async with (
        httpx.AsyncClient(timeout=240) as client,
        client.stream("POST", url, json=body) as answer,
    ):
        async for _ in answer.aiter_lines():
            break
    await until(lambda: _load(cluster) == 0)


def _load(cluster: Cluster) -> int:
    return httpx.get(f"{cluster.address}/load", timeout=240).json()["server_load"]


def _generated(cluster: Cluster) -> float:
    page = httpx.get(f"{cluster.address}/metrics", timeout=240).text
    return sum(map(float, re.findall(r"generation_tokens_total{.*} (\S+)", page)))


async def test_new_weights_reach_all_and_no_answer_mixes_them(
    cluster: Cluster, model: Path, other_weights: Path
) -> None:
    bodies = bodies_of(4)
    old = [said(one) for one in await all_completions(cluster.address, bodies)]
    with Traffic(cluster.address, bodies) as traffic:
        await until(lambda: len(traffic.answers) > 0)
        path = str(other_weights)
        answer = await asyncio.to_thread(cluster.post, "/update_weights_from_disk", model_path=path)
        assert answer.status_code == 200, answer.text
        num_before = len(traffic.answers)
        new = [said(one) for one in await all_completions(cluster.address, bodies)]
        await until(lambda: len(traffic.answers) > num_before + 2 * len(bodies))
    assert all(a != b for a, b in zip(old, new, strict=True))
    assert len({one["prefix_hash"]["root_hash"] for one in cluster.replicas()}) == 1
    for index, one in traffic.answers:
        assert isinstance(one, httpx.Response)
        assert said(one) in (old[index], new[index])
    # Each thread had at most one answer in flight when the command returned.
    late = traffic.answers[num_before + len(bodies) :]
    assert all(said(one) == new[index] for index, one in late)  # type: ignore[arg-type]

    # A replica that starts afterwards has the weights too.
    cluster.kill(REPLICA)
    await until(lambda: len(cluster.processes(REPLICA)) == 3)
    await asyncio.to_thread(cluster.wait_for_replicas, 3)
    answers = await all_completions(cluster.address, bodies * 3)
    assert [said(one) for one in answers] == new * 3

    missing = await asyncio.to_thread(
        cluster.post, "/update_weights_from_disk", model_path="/nowhere"
    )
    assert missing.status_code == 400
    back = await asyncio.to_thread(cluster.post, "/update_weights_from_disk", model_path=str(model))
    assert back.status_code == 200
    assert [said(one) for one in await all_completions(cluster.address, bodies)] == old


async def test_sleep_and_pause_are_of_all(cluster: Cluster) -> None:
    body = bodies_of(1)[0]
    before = said(await completion(cluster.address, **body))
    assert cluster.post("/sleep", level=2).status_code == 200
    asleep = [(await completion(cluster.address, **body)).status_code for _ in range(6)]
    assert asleep == [503] * 6
    assert httpx.get(f"{cluster.address}/ready", timeout=240).status_code == 503
    assert cluster.post("/wake_up").status_code == 200
    assert said(await completion(cluster.address, **body)) == before
    assert cluster.post("/pause", mode="nonsense").status_code == 400
    assert cluster.post("/pause").status_code == 200
    waiting = asyncio.create_task(completion(cluster.address, **body))
    await until(lambda: _load(cluster) == 1)
    assert not waiting.done()
    assert cluster.post("/resume").status_code == 200
    assert said(await waiting) == before


async def test_a_killed_replica_costs_no_answer(cluster: Cluster) -> None:
    bodies = bodies_of(6, max_tokens=60, ignore_eos=True)
    expected = [said(one) for one in await all_completions(cluster.address, bodies)]
    with Traffic(cluster.address, bodies) as traffic:
        await until(lambda: len(traffic.answers) > 0)
        killed = cluster.kill(REPLICA)
        num_before = len(traffic.answers)
        await until(lambda: len(traffic.answers) > num_before + 2 * len(bodies))
    for index, one in traffic.answers:
        assert isinstance(one, httpx.Response)
        assert said(one) == expected[index]
    await until(lambda: len(pids := cluster.processes(REPLICA)) == 3 and killed not in pids)
    await asyncio.to_thread(cluster.wait_for_replicas, 3)


async def test_a_killed_replica_ends_streams_with_an_error(cluster: Cluster) -> None:
    # So long that each replica has streams in flight at any time.
    bodies = bodies_of(6, max_tokens=900, ignore_eos=True)
    cluster.post("/reset_prefix_cache")  # else a replica that is new here may get none of them
    expected = [said(one)[0]["text"] for one in await all_completions(cluster.address, bodies)]
    with Traffic(cluster.address, bodies, stream=True) as traffic:
        # Until a stream was cut: those of the busiest replica may end before it is killed, and
        # another replica takes a stream that sent nothing yet.
        while not any(_is_cut(one) for _, one in list(traffic.answers)):
            begun = _generated(cluster) + 20 * len(bodies)
            await until(lambda begun=begun: _generated(cluster) > begun)
            killed = cluster.kill_busiest()
            ended = len(traffic.answers) + len(bodies)
            await until(lambda ended=ended: len(traffic.answers) > ended)
            await until(lambda gone=killed: gone not in cluster.processes(REPLICA))
            await asyncio.to_thread(cluster.wait_for_replicas, 3)
    for index, one in traffic.answers:
        assert isinstance(one, httpx.Response)
        text, error = streamed(one.text.splitlines())
        assert expected[index].startswith(text)
        assert error is not None or text == expected[index]
    await until(lambda: len(cluster.processes(REPLICA)) == 3)


def _is_cut(answer: httpx.Response | Exception) -> bool:
    return isinstance(answer, httpx.Response) and streamed(answer.text.splitlines())[1] is not None


@pytest.mark.parametrize("deployment", [INGRESS, COMMANDS])
async def test_a_killed_ingress_comes_back(cluster: Cluster, deployment: str) -> None:
    bodies = bodies_of(3)
    expected = [said(one) for one in await all_completions(cluster.address, bodies)]
    with Traffic(cluster.address, bodies) as traffic:
        await until(lambda: len(traffic.answers) > 0)
        killed = cluster.kill(deployment)
        await until(
            lambda: len(pids := cluster.processes(deployment)) == 1 and killed not in pids, 180
        )
        await asyncio.to_thread(cluster.wait_for_replicas, 3)
        num_before = len(traffic.answers)
        await until(lambda: len(traffic.answers) > num_before + 2 * len(bodies))
    for index, one in traffic.answers:
        if isinstance(one, httpx.Response) and one.is_success:
            assert said(one) == expected[index]
    for index, one in traffic.answers[num_before + len(bodies) :]:
        assert isinstance(one, httpx.Response)
        assert said(one) == expected[index]
    reset = await asyncio.to_thread(cluster.post, "/reset_prefix_cache")
    assert reset.status_code == 200


CHAT = {**GREEDY, "messages": [{"role": "user", "content": "Which one?"}], "max_tokens": 6}
ASKED: list[tuple[str, str, dict[str, object]]] = [
    ("post", "/v1/completions", {**GREEDY, "prompt": prompt(5), "max_tokens": 6}),
    ("post", "/v1/chat/completions", CHAT),
    ("post", "/v1/messages", CHAT),
    ("post", "/v1/messages/count_tokens", {"model": "tiny", "messages": CHAT["messages"]}),
    ("post", "/v1/responses", {**GREEDY, "input": "Which one?", "max_output_tokens": 6}),
    ("post", "/v1/responses/input_tokens", {"model": "tiny", "input": "Which one?"}),
    ("post", "/v1/embeddings", {"model": "tiny", "input": "Which one?"}),
    ("post", "/v1/rerank", {"model": "tiny", "query": "Which?", "documents": ["One."]}),
    ("post", "/score", {"model": "tiny", "text_1": "Which?", "text_2": "One."}),
    ("post", "/tokenize", {"model": "tiny", "prompt": "Which one?"}),
    ("post", "/detokenize", {"model": "tiny", "tokens": prompt(5, 20)}),
    ("post", "/prefix_cache/warm", {**GREEDY, "prompt": prompt(6, 320)}),
    ("post", "/prefix_cache/probe", {**GREEDY, "prompt": prompt(6, 320)}),
    ("get", "/v1/models", {}),
    ("get", "/v1/models/{name}", {}),
    ("get", "/v1/responses/{response_id}", {}),
    ("get", "/v1/responses/{response_id}/input_items", {}),
    ("delete", "/v1/responses/{response_id}", {}),
]
# Of one server, or of all replicas as they are: other tests give them and ask for them.
OF_THE_SERVER = {
    *("/health", "/is_paused", "/is_sleeping", "/load", "/metrics", "/pause", "/ping", "/ready"),
    *("/prefix_cache/resize", "/prefix_cache/stats", "/reset_prefix_cache", "/resume"),
    *("/server_info", "/sleep", "/update_weights_from_disk", "/version", "/wake_up"),
}


def lasting(value: object) -> object:
    """An answer without what is drawn, or read from a clock."""
    if isinstance(value, list):
        return [lasting(one) for one in value]
    if not isinstance(value, dict):
        return value
    drawn = ("id", "created", "created_at", "completed_at")
    return {key: lasting(one) for key, one in value.items() if key not in drawn}


async def test_every_endpoint_answers_as_one_server_does(cluster: Cluster, one_server: str) -> None:
    cluster.post("/reset_prefix_cache")
    httpx.post(f"{one_server}/reset_prefix_cache", timeout=240)
    async with httpx.AsyncClient(timeout=240) as client:
        described = (await client.get(f"{cluster.address}/openapi.json")).json()["paths"]
        assert {path for _, path, _ in ASKED} | OF_THE_SERVER == set(described)
        for method, path, body in ASKED:
            url = path.format(name="tiny", response_id="resp_none")
            sent = {"json": body} if body else {}
            ours = await client.request(method, f"{cluster.address}{url}", **sent)
            theirs = await client.request(method, f"{one_server}{url}", **sent)
            assert ours.status_code == theirs.status_code, (path, ours.text, theirs.text)
            assert lasting(ours.json()) == lasting(theirs.json()), path
