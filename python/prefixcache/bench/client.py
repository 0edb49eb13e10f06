"""Clients that send prompts and time the tokens that come back.

All times are seconds of `time.perf_counter`. TTFT is counted from the moment a request is sent, so
it holds the server's queue but not the client's own limit on concurrency.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from prefixcache.bench.workloads import SOURCE_TEXT, LoadConfig, Prompt
from prefixcache.exceptions import PrefixCacheError
from prefixcache.request import CacheOptions, Request
from prefixcache.sampling_params import SamplingParams
from prefixcache.token_ids import TokenIds, as_token_ids

if TYPE_CHECKING:
    from prefixcache.engine.async_engine import AsyncEngine


class BenchmarkError(PrefixCacheError):
    """A request of the benchmark failed, so its numbers would mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One answered request.

    `arrivals` are the times at which output arrived, the first token's first. `output` is what
    came: token ids in process, text over HTTP.
    """

    sent: float
    arrivals: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output: tuple[int, ...] | str

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.arrivals[-1] - self.sent

    @property
    def inter_token(self) -> list[float]:
        """Seconds between outputs after the first."""
        return [after - before for before, after in itertools.pairwise(self.arrivals)]


class Target(Protocol):
    """What is measured."""

    async def token_pool(self) -> list[int]:
        """Token ids that prompts may be drawn from."""
        ...

    async def send(self, prompt: Prompt) -> RequestRecord:
        """Sends one greedy request that ends at its length only. Raises `BenchmarkError`."""
        ...

    async def reset_cache(self) -> None:
        """Empties the prefix cache."""
        ...


async def drive(
    target: Target,
    prompts: Sequence[Prompt],
    load: LoadConfig,
    on_done: Callable[[], None] = lambda: None,
) -> list[RequestRecord]:
    """Sends all prompts as `load` says; records come in the prompts' order."""
    gate = asyncio.Semaphore(load.concurrency or len(prompts))
    start = time.perf_counter()

    async def send(prompt: Prompt, due: float) -> RequestRecord:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        async with gate:
            record = await target.send(prompt)
        on_done()
        return record

    due = load.arrivals(len(prompts))
    return await _gather(
        [asyncio.ensure_future(send(*pair)) for pair in zip(prompts, due, strict=True)]
    )


async def _gather(tasks: list[asyncio.Future[RequestRecord]]) -> list[RequestRecord]:
    """The first failure ends the others too."""
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class EngineTarget:
    """An engine in this process."""

    def __init__(self, engine: AsyncEngine, encode: Callable[[str], TokenIds]) -> None:
        self._engine = engine
        self._encode = encode
        self._numbers = itertools.count()

    async def token_pool(self) -> list[int]:
        """Tokens of plain English words in the model's vocabulary."""
        return self._encode(SOURCE_TEXT).tolist()

    async def send(self, prompt: Prompt) -> RequestRecord:
        """Times one request through the engine's own stream."""
        request = self._request(prompt)
        sent = time.perf_counter()
        arrivals, token_ids, last = list[float](), list[int](), None
        async for last in self._engine.generate(request):
            if last.token_ids:
                arrivals.append(time.perf_counter())
                token_ids.extend(last.token_ids)
        if last is None or last.finish_reason != "length":
            raise BenchmarkError(f"{request.request_id} did not run to its length: {last}")
        return RequestRecord(
            sent=sent,
            arrivals=tuple(arrivals),
            prompt_tokens=len(prompt.token_ids),
            cached_tokens=last.num_cached_tokens,
            output_tokens=len(token_ids),
            output=tuple(token_ids),
        )

    async def reset_cache(self) -> None:
        """Empties the prefix cache."""
        await self._engine.run(lambda control: control.reset_prefix_cache())

    def _request(self, prompt: Prompt) -> Request:
        return Request(
            request_id=f"bench-{next(self._numbers)}",
            prompt_token_ids=as_token_ids(prompt.token_ids),
            params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=prompt.output_len),
            cache=CacheOptions(salt=prompt.cache_salt),
            arrival_time=time.monotonic(),
        )


class HttpTarget:
    """A server that speaks the OpenAI completions API with token-id prompts and `ignore_eos`.

    `model` is the name under which it serves its model.
    """

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self.model = model

    @classmethod
    async def connect(cls, client: httpx.AsyncClient) -> HttpTarget:
        """Asks the server at the client's base address for the model it serves."""
        try:
            response = await client.get("/v1/models")
        except httpx.HTTPError as error:
            raise BenchmarkError(f"No server answers at {client.base_url}: {error}") from error
        return cls(client, _json(response)["data"][0]["id"])

    async def token_pool(self) -> list[int]:
        """Tokens of plain English words, by the server's own tokenizer."""
        body = {"model": self.model, "prompt": SOURCE_TEXT, "add_special_tokens": False}
        return _json(await self._client.post("/tokenize", json=body))["tokens"]

    async def send(self, prompt: Prompt) -> RequestRecord:
        """Times one streamed completion."""
        arrivals, texts, usage = list[float](), list[str](), dict[str, Any]()
        sent = time.perf_counter()
        async for event in self._events(prompt):
            if event["choices"]:
                arrivals.append(time.perf_counter())
                texts.append(event["choices"][0]["text"])
            usage = event.get("usage") or usage
        if usage.get("completion_tokens") != prompt.output_len:
            raise BenchmarkError(f"Asked for {prompt.output_len} tokens, the usage says {usage}.")
        return RequestRecord(
            sent=sent,
            arrivals=tuple(arrivals),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            output_tokens=usage["completion_tokens"],
            output="".join(texts),
        )

    async def reset_cache(self) -> None:
        """Empties the prefix cache."""
        _check(await self._client.post("/reset_prefix_cache"))

    async def _events(self, prompt: Prompt) -> AsyncIterator[dict[str, Any]]:
        """Server-sent events of one completion, each an object with `choices`."""
        async with self._client.stream("POST", "/v1/completions", json=self._body(prompt)) as reply:
            if reply.is_error:
                await reply.aread()
                _check(reply)
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    yield _event(line)

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        salt = {} if prompt.cache_salt is None else {"cache_salt": prompt.cache_salt}
        return salt | {
            "model": self.model,
            "prompt": prompt.token_ids,
            "max_tokens": prompt.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _event(line: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "choices" not in event:
        raise BenchmarkError(f"The server sent an error: {event}")
    return event


def _check(response: httpx.Response) -> None:
    if response.is_error:
        raise BenchmarkError(
            f"{response.request.method} {response.request.url}: {response.status_code} "
            f"{response.text}"
        )


def _json(response: httpx.Response) -> Any:
    _check(response)
    return response.json()
