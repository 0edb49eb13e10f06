"""A day at a server, recorded and replayed: the replay counts what clients were sent."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from prefixcache._core import replay_recording
from prefixcache.cli.main import app
from prefixcache.text.tokenization.tokenizer import Tokenizer
from support.serving import MODEL, metric, served_folder

HINTS = [{"start": 0, "end": 64, "priority": 85, "ttl_s": 0.05}]


class Day:
    """Clients of every kind."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client = client
        self._choose = random.Random(seed)
        self._system = [self._choose.randrange(5, 300) for _ in range(64)]

    def _post(self, prompt: list[int], max_tokens: int, **fields: Any) -> Awaitable[httpx.Response]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        body |= {"temperature": 0, "return_token_ids": True}
        return self._client.post("/v1/completions", json=body | fields)

    async def ask(self, prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        answer = await self._post(prompt, max_tokens, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def converse(self, turns: int, **fields: Any) -> None:
        """Each turn's prompt is the one before with its answer and something new."""
        prompt = list(self._system)
        for _ in range(turns):
            prompt += [self._choose.randrange(5, 300) for _ in range(self._choose.randrange(30))]
            answer = await self.ask(prompt, self._choose.randrange(4, 40), **fields)
            prompt += answer["choices"][0]["token_ids"]

    async def leave(self) -> None:
        """Asks for a long answer and goes away at once, or after some of it."""
        request = self._post(self._system, 100)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(request, self._choose.choice([0.01, 0.05, 0.1]))

    async def post(self, path: str, **body: Any) -> None:
        await asyncio.sleep(self._choose.random() / 20)
        answer = await self._client.post(path, json=body)
        assert answer.status_code in (200, 202), answer.text

    async def pass_by(self, size: int) -> None:
        for part in range(2):
            await asyncio.gather(
                *(self.converse(3, cache_salt=salt) for salt in ["a", "b", None, None]),
                *(self.converse(2, retention=HINTS) for _ in range(2)),
                *(self.leave() for _ in range(3)),
                self.post("/prefix_cache/resize", num_blocks=(size - 20, size)[part]),
                self.post("/reset_prefix_cache"),
            )


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("llama", {}),
        ("llama", {"record_trace_max_size": 4096, "retention_budget": 0.05}),
        ("gemma3", {"num_blocks": 140, "pin_swa_tokens": True, "pin_min_drop_size": 0}),
    ],
    ids=["full", "parts", "hybrid"],
)
async def test_a_replay_counts_what_the_server_counted(
    tiny_checkpoint, tmp_path, seed, model, flags
):
    path = tmp_path / "day.jsonl"
    flags = {"num_blocks": 90, "block_size": 8, "max_num_seqs": 8, "record_trace": path} | flags
    async with served_folder(tiny_checkpoint(model), **flags) as (client, _):
        assert metric((await client.get("/metrics")).text, "trace_recording") == 1
        day, stats = Day(client, seed), {"evictions": 0}
        while not stats["evictions"]:
            await day.pass_by(flags["num_blocks"])
            while (stats := (await client.get("/prefix_cache/stats")).json())["blocks_in_use"]:
                await asyncio.sleep(0.01)
    found = replay_recording(path)
    assert found["difference"] is None
    assert (found["agrees"], found["ended"], found["unchecked_events"]) == (True, "end", 0)
    live, replayed = found["live"], found["replayed"]
    assert live == replayed
    assert replayed["evictions"] == stats["evictions"] > 0
    assert replayed["pins"] == stats["pins"]
    # The cache counts a request each time it starts, the server's own counts the first start alone.
    # A preempted request starts again unless its client has left.
    assert replayed["queries"] >= stats["queried_tokens"]
    again = replayed["queries"] > stats["queried_tokens"]
    assert stats["preemptions"] > 0 or not again
    assert again or replayed["hits"] == stats["hit_tokens"]
    assert replayed["hits"] > 0
    if "record_trace_max_size" in flags:
        assert found["parts"] > 1
    check_command(path, replayed)


def check_command(path: Path, replayed: dict[str, int]) -> None:
    """`prefixcache replay` reads the recording as a trace, and says what its own calls count."""
    output = path.with_name("results.json")
    shown = CliRunner().invoke(app, ["replay", str(path), "--output", str(output)]).output
    counted = f"{replayed['hits']:,} of {replayed['queries']:,}"
    assert shown.replace("\n", " ").count(counted) == 2, shown
    (trace,) = json.loads(output.read_text())["traces"]
    assert trace["requests"] > 20
    assert 0 < trace["rows"][-1]["hit_rate"] <= trace["infinite"] < 1


async def test_without_the_flag_nothing_is_recorded(tiny_checkpoint: Callable[..., Path]) -> None:
    async with served_folder(tiny_checkpoint()) as (client, _):
        assert "trace_recording" not in (await client.get("/metrics")).text


async def test_who_wrote_which_tokens_of_a_chat(tiny_checkpoint, tmp_path):
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "critic", "content": [{"type": "text", "text": "And of Norway? Ask twice."}]},
    ]
    path, folder = tmp_path / "day.jsonl", tiny_checkpoint()
    roles = {"records_roles": True}
    async with served_folder(folder, record_trace=path, served=roles) as (client, _):
        body: dict[str, Any] = {"messages": messages, "max_tokens": 1}
        for fields in ({}, {"truncate_prompt_tokens": 20}):
            answer = await client.post("/v1/chat/completions", json=body | fields)
            assert answer.status_code == 200, answer.text
        await client.post("/v1/completions", json={"prompt": "One", "max_tokens": 1})
        tokens = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    lines = map(json.loads, path.read_text().splitlines())
    chat, cut, completion = (line.get("roles", []) for line in lines if line.get("e") == "add")
    assert [role for role, _, _ in chat] == ["system", "user", "assistant", "other"]
    tokenizer = Tokenizer.from_folder(folder)
    texts = [tokenizer.decode(tokens[start:end]) for _, start, end in chat]
    assert texts[:3] == [one["content"] for one in messages[:3]]
    assert texts[3] == "And of Norway? Ask twice."
    dropped = len(tokens) - 20
    moved = [[role, max(0, start - dropped), end - dropped] for role, start, end in chat]
    assert cut == [one for one in moved if one[2] > 0] != chat
    assert completion == []
