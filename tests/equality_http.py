"""Recorded dialogues through HTTP: the cache, the batch and preemption change no bit of an answer.

`python tests/equality_http.py` asks a server without prefix caching one request at a time, which
computes with the default model's weights dequantized, where all others keep them quantized. Two
servers with it then get the same requests, shuffled, in waves of random size: one with room for
everything, one whose small pool and short steps force evictions, preemptions and chunks. A few
requests go to `LLM` as well. Every text and every log probability must be the same number. With
`--cpu-activations int8`, whose numbers are others, the first server keeps blocks as well.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, get_args

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prefixcache import LLM, SamplingParams
from prefixcache.config.engine_config import DEFAULT_MODEL, Activations
from prefixcache.llm import CompletionOutput
from prefixcache.models.conversion import dequantize_folder
from prefixcache.models.hub import resolve_model
from prefixcache.tools.bench.servers import run_server
from support.dialogues import read_dialogues, requests_of
from support.serving import metric

Body = dict[str, Any]
Reply = dict[str, Any]

MAX_WAVE = 16
NUM_TOP = 5
# Holds the longest dialogue and little else.
TIGHT = {"num_blocks": 320, "max_model_len": 4608, "max_num_batched_tokens": 384}
NUM_LLM = 6
_VARIES = ("id", "created", "usage")
_SAMPLING = {f.name for f in fields(SamplingParams)} - {"logprobs", "prompt_logprobs"}

Scored = tuple[str, list[tuple[float, list[float]]]]


@dataclass(frozen=True, slots=True)
class Options:
    """What is sent, and the flags of all servers; `lone_model` is what the first one serves."""

    dialogues: int = 40
    requests: int | None = None
    tokens: int = 8
    seed: int = 0
    flags: dict[str, Any] = field(default_factory=dict)
    lone_model: str = DEFAULT_MODEL

    def bodies(self) -> list[Body]:
        """The requests, greedy and seeded, of all dialogues turn by turn."""
        chats = read_dialogues()[: self.dialogues]
        messages = [request for chat in chats for request in requests_of(chat)]
        return [self._body(i, m) for i, m in enumerate(messages[: self.requests])]

    def _body(self, index: int, messages: list[dict[str, Any]]) -> Body:
        # Recorded results of tools lack the ids of their calls, which an API asks for.
        sent = [m | {"role": "user"} if m["role"] == "tool" else m for m in messages]
        body: Body = {
            "messages": sent,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": NUM_TOP,
        }
        if index % 3 == 1:
            body |= {"temperature": 0.8, "top_p": 0.95, "seed": index}
        if index % 12 == 4:
            body |= {"n": 2, "min_p": 0.02, "presence_penalty": 0.5}
        if index % 48 == 3:
            body |= {"prompt_logprobs": 1}
        return body


@dataclass(slots=True, kw_only=True)
class Counts:
    """What was compared with the lone cold answers, and what really happened meanwhile."""

    outputs: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    llm_outputs: int = 0
    preemptions: int = 0
    differences: int = 0

    def add(self, replies: Sequence[Reply], expected: Sequence[Reply]) -> None:
        """Compares all that a reply says but its name and its time."""
        for reply, right in zip(replies, expected, strict=True):
            usage = reply["usage"]
            self.outputs += len(reply["choices"])
            self.tokens += usage["completion_tokens"]
            self.prompt_tokens += usage["prompt_tokens"]
            self.hit_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            self.differences += _answer(reply) != _answer(right)

    def __str__(self) -> str:
        return (
            f"{self.outputs} outputs ({self.tokens} tokens) and {self.llm_outputs} of LLM "
            f"compared, "
            f"{self.hit_tokens} of {self.prompt_tokens} prompt tokens hit, "
            f"{self.preemptions} preemptions, {self.differences} differences"
        )


def _answer(reply: Reply) -> Reply:
    return {name: value for name, value in reply.items() if name not in _VARIES}


class Connection:
    """Sends bodies to one server and counts them on a progress bar."""

    def __init__(self, client: httpx.AsyncClient, progress: Progress, title: str) -> None:
        self._client = client
        self._progress = progress
        self._title = title

    async def one_by_one(self, bodies: Sequence[Body]) -> list[Reply]:
        task = self._progress.add_task(self._title, total=len(bodies))
        return [await self._ask(body, task) for body in bodies]

    async def in_waves(self, bodies: Sequence[Body], choose: random.Random) -> list[Reply]:
        """All at random places of a random order, as many at a time as chance has it."""
        task = self._progress.add_task(self._title, total=len(bodies))
        order = choose.sample(range(len(bodies)), len(bodies))
        replies: dict[int, Reply] = {}
        while order:
            size = choose.randint(1, MAX_WAVE)
            wave, order = order[:size], order[size:]
            urgent = [bodies[i] | {"priority": choose.randint(-1, 1)} for i in wave]
            answered = await asyncio.gather(*(self._ask(body, task) for body in urgent))
            replies |= zip(wave, answered, strict=True)
        return [replies[i] for i in range(len(bodies))]

    async def preemptions(self) -> int:
        page = await self._client.get("/metrics")
        return int(metric(page.text, "num_preemptions_total"))

    async def _ask(self, body: Body, task: Any) -> Reply:
        response = await self._client.post("/v1/chat/completions", json=body)
        if response.is_error:
            raise RuntimeError(f"{response.status_code}: {response.text}")
        self._progress.advance(task)
        return response.json()


@asynccontextmanager
async def connection(
    flags: dict[str, Any], progress: Progress, title: str
) -> AsyncGenerator[Connection, None]:
    """A server started for this, on loopback, ended afterwards."""
    async with (
        run_server({"model": DEFAULT_MODEL, "scheduling_policy": "priority", **flags}) as address,
        httpx.AsyncClient(base_url=address, timeout=None) as client,
    ):
        yield Connection(client, progress, title)


async def lone_answers(options: Options, bodies: Sequence[Body], progress: Progress) -> list[Reply]:
    """Without the cache, and never two requests in one batch."""
    flags = {"model": options.lone_model, "served_model_name": DEFAULT_MODEL, **options.flags}
    flags["enable_prefix_caching"] = False
    async with connection(flags, progress, "cache off, one by one") as server:
        return await server.one_by_one(bodies)


async def compare_servers(options: Options, progress: Progress) -> Counts:
    """Replays the requests with the cache on, twice, and asks `LLM` a few."""
    bodies, counts = options.bodies(), Counts()
    expected = await lone_answers(options, bodies, progress)
    choose = random.Random(options.seed)
    for title, flags in (("cache on", {}), ("cache on, small pool", TIGHT)):
        async with connection(options.flags | flags, progress, title) as server:
            counts.add(await server.in_waves(bodies, choose), expected)
            counts.preemptions += await server.preemptions()
    some = choose.sample(range(len(bodies)), min(len(bodies), NUM_LLM))
    compare_llm(options, [bodies[i] for i in some], [expected[i] for i in some], counts)
    return counts


def compare_llm(
    options: Options, bodies: Sequence[Body], expected: Sequence[Reply], counts: Counts
) -> None:
    """Asks `LLM` the same, all together."""
    llm = LLM(DEFAULT_MODEL, **options.flags)
    messages, params = [b["messages"] for b in bodies], [_params(b) for b in bodies]
    results = llm.chat(messages, params, use_tqdm=False)
    for result, reply in zip(results, expected, strict=True):
        for output, choice in zip(result.outputs, reply["choices"], strict=True):
            counts.llm_outputs += 1
            counts.differences += _of_llm(output) != _of_server(choice)


def _params(body: Body) -> SamplingParams:
    known = {name: body[name] for name in body if name in _SAMPLING}
    return SamplingParams(**known, logprobs=NUM_TOP)


def _of_llm(output: CompletionOutput) -> Scored:
    """Text, and of each token its log probability and the highest ones."""
    scores = [[one.logprob for one in by_id.values()] for by_id in output.logprobs or ()]
    return output.text, [(one[0], sorted(one, reverse=True)[:NUM_TOP]) for one in scores]


def _of_server(choice: dict[str, Any]) -> Scored:
    tokens = choice["logprobs"]["content"]
    scores = [(t["logprob"], [top["logprob"] for top in t["top_logprobs"]]) for t in tokens]
    return choice["message"]["content"], scores


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dialogues", type=int, default=40)
    parser.add_argument("--requests", type=int, help="of these dialogues, at most")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--seed", type=int, default=0, help="of orders and waves")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--no-batch-invariant", action="store_true", help="to see it fail")
    parser.add_argument("--cpu-activations", default="exact", choices=get_args(Activations))
    given = parser.parse_args()
    flags: dict[str, object] = {"dtype": given.dtype, "cpu_activations": given.cpu_activations}
    if given.no_batch_invariant:
        flags |= {"batch_invariant": False, "attention": "torch"}
    return Options(given.dialogues, given.requests, given.tokens, seed=given.seed, flags=flags)


def main() -> None:
    options = parse_options()
    if options.flags["cpu_activations"] != "exact":
        run(options)
    with TemporaryDirectory() as dequantized:
        dtype = str(options.flags["dtype"])
        dequantize_folder(resolve_model(DEFAULT_MODEL), Path(dequantized), dtype)
        run(replace(options, lone_model=dequantized))


def run(options: Options) -> NoReturn:
    """Compares, and ends the process."""
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        counts = asyncio.run(compare_servers(options, progress))
    console.print(str(counts), highlight=False)
    raise SystemExit(counts.differences > 0)


if __name__ == "__main__":
    main()
