"""What is measured: an engine in this process, or a server that speaks an OpenAI API."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import httpx

from prefixcache.exceptions import EngineDeadError, PrefixCacheError
from prefixcache.tools.bench.prompts import (
    SOURCE_TEXT,
    ChatForm,
    Message,
    Prompt,
    PromptForm,
    TextForm,
    TokenForm,
)
from prefixcache.tools.bench.records import BenchmarkError, RequestFailedError, RequestRecord
from prefixcache.tools.bench.sessions import Text
from prefixcache.tools.openai_api import (
    RefusedStreamError,
    StreamError,
    cached_tokens,
    check_ending,
    check_status,
    choice_text,
    has_hit_thresholds,
    reason,
    stream_events,
)
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from prefixcache.engine.async_engine import AsyncEngine

FormName = Literal["tokens", "text", "chat"]

# Beyond OpenAI's fields, makes each answer as long as asked; servers that refuse it do without.
_EXTRAS = {"ignore_eos": True}
# What is not cached is measured too, whatever share of a prompt the server demands to be.
_NO_THRESHOLD = {"cache_hit_threshold": 0}
# Without reading or writing the cache, on servers of this project.
CACHE_OFF = {"cache_read": False, "cache_write": False}


class Target(Protocol):
    """What is measured.

    `max_model_len` is the most tokens of prompt and answer, None where that is not known. `remarks`
    say what its numbers lack.
    """

    @property
    def form(self) -> PromptForm:
        """How it takes prompts."""
        ...

    max_model_len: int | None
    remarks: tuple[str, ...]

    async def send(self, prompt: Prompt) -> RequestRecord:
        """Sends one greedy request.

        Raises `RequestFailedError`, or `BenchmarkError` where no other would be answered either.
        """
        ...

    async def reset_cache(self) -> bool:
        """Empties the prefix cache; False where that cannot be done."""
        ...


class EngineTarget:
    """An engine in this process."""

    remarks: tuple[str, ...] = ()

    def __init__(self, engine: AsyncEngine, form: TokenForm) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self.form = form
        self.max_model_len: int | None = engine.max_model_len

    async def send(self, prompt: Prompt) -> RequestRecord:
        """Times one request through the engine's own stream."""
        arrivals, token_ids, last = list[float](), list[int](), None
        token_prompt = self.form.joined(prompt.messages)
        sent = time.perf_counter()
        try:
            async for last in self._engine.generate(self._request(prompt)):
                if last.token_ids:
                    arrivals.append(time.perf_counter())
                    token_ids.extend(last.token_ids)
        except EngineDeadError as error:
            raise BenchmarkError(str(error)) from error
        except PrefixCacheError as error:
            raise RequestFailedError(str(error)) from error
        if last is None or not arrivals or last.ending.error is not None:
            error = None if last is None else last.ending.error
            raise RequestFailedError(f"The engine gave no answer: {error}")
        return RequestRecord(
            sent=sent,
            arrivals=tuple(arrivals),
            prompt_tokens=len(token_prompt),
            cached_tokens=last.prompt.num_cached_tokens,
            output_tokens=len(token_ids),
            output=tuple(token_ids),
        )

    async def reset_cache(self) -> bool:
        """Empties the prefix cache."""
        await self._engine.run(lambda control: control.reset_prefix_cache())
        return True

    def _request(self, prompt: Prompt) -> Request:
        return Request(
            request_id=f"bench-{next(self._numbers)}",
            prompt_token_ids=self.form.joined(prompt.messages),
            params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=prompt.output_len),
            cache=CacheOptions(hit_threshold=0.0),
            arrival_time=time.monotonic(),
        )


class HttpTarget:
    """A server that speaks OpenAI's completions or chat API.

    `model` is the name under which it serves its model, `fields` join every request's body.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        form: PromptForm,
        *,
        max_model_len: int | None = None,
        fields: Mapping[str, Any] | None = None,
        is_ours: bool = False,
    ) -> None:
        self._client = client
        self._fields = dict(_EXTRAS if fields is None else fields)
        self.model = model
        self.form = form
        self.max_model_len = max_model_len
        self.is_ours = is_ours
        self.remarks: tuple[str, ...] = ()

    def with_fields(self, fields: Mapping[str, Any]) -> HttpTarget:
        """The same server, asked with further fields."""
        made = HttpTarget(
            self._client,
            self.model,
            self.form,
            max_model_len=self.max_model_len,
            fields=self._fields | dict(fields),
            is_ours=self.is_ours,
        )
        made.remarks = self.remarks
        return made

    async def send(self, prompt: Prompt) -> RequestRecord:
        """Times one streamed request."""
        answer = _StreamedAnswer()
        sent = time.perf_counter()
        try:
            async for event in stream_events(self._client, self.form.path, self._body(prompt)):
                answer.add(time.perf_counter(), event)
        except StreamError as error:
            raise RequestFailedError(str(error)) from error
        except httpx.HTTPError as error:
            raise BenchmarkError(f"{self._client.base_url} is gone: {reason(error)}") from error
        if not answer.arrivals or not answer.is_whole:
            raise RequestFailedError("The stream ended before its answer.")
        usage = answer.usage
        return RequestRecord(
            sent=sent,
            arrivals=tuple(answer.arrivals),
            prompt_tokens=usage.get("prompt_tokens") or self.form.count(prompt.messages),
            cached_tokens=cached_tokens(usage),
            output_tokens=usage.get("completion_tokens") or len(answer.arrivals),
            output=answer.output,
        )

    async def ask(self, prompt: Prompt) -> dict[str, Any]:
        """The usage of a request that is not streamed; empty where none is reported."""
        body = self._body(prompt)
        del body["stream"], body["stream_options"]
        answer = await post_json(self._client, self.form.path, body)
        return answer.get("usage") or {}

    async def reset_cache(self) -> bool:
        """Empties the prefix cache of a server that has vLLM's endpoint for it."""
        try:
            reply = await self._client.post("/reset_prefix_cache")
        except httpx.HTTPError as error:
            raise BenchmarkError(f"{self._client.base_url} is gone: {reason(error)}") from error
        return reply.is_success

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "model": self.model,
            **self.form.body(prompt),
            "max_tokens": prompt.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(_NO_THRESHOLD if self.is_ours else {}),
            **self._fields,
        }


class _StreamedAnswer:
    """One streamed answer, as its events come in."""

    def __init__(self) -> None:
        self.arrivals = list[float]()
        self.usage = dict[str, Any]()
        self.is_whole = False
        self._texts = list[str]()
        self._token_ids = list[int]()

    @property
    def output(self) -> tuple[int, ...] | str:
        """Token ids where they were reported, else text."""
        return tuple(self._token_ids) or "".join(self._texts)

    def add(self, at: float, event: dict[str, Any]) -> None:
        """Takes one event. Text, ids, or the end of an answer without either are its arrivals."""
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            text = choice_text(choice)
            if choice.get("finish_reason") is not None:
                check_ending(choice["finish_reason"])
                self.is_whole = True
            self._token_ids += choice.get("token_ids") or ()
            self._texts.append(text)
            if text or choice.get("token_ids") or (self.is_whole and not self.arrivals):
                self.arrivals.append(at)


async def connect(
    client: httpx.AsyncClient, model: str | None = None, form: FormName | None = None
) -> HttpTarget:
    """Asks the server at the client's base address what it serves, and how it takes prompts.

    Without a `form` the first that it takes, of token ids, text and chat. Raises `BenchmarkError`.
    """
    card = await _card(client, model)
    forms: Sequence[FormName] = (form,) if form else get_args(FormName)
    refused = ""
    for name, fields in itertools.product(forms, (_EXTRAS, {})):
        target = await _connect_as(client, card, name, fields)
        if isinstance(target, HttpTarget):
            return target
        refused = target
    raise BenchmarkError(f"{client.base_url} takes no prompts: {refused}")


async def _connect_as(
    client: httpx.AsyncClient, card: dict[str, Any], name: FormName, fields: Mapping[str, Any]
) -> HttpTarget | str:
    """The target, or why the server does not take such requests."""
    try:
        target = HttpTarget(
            client,
            str(card["id"]),
            await _form(client, name, str(card["id"])),
            max_model_len=card.get("max_model_len"),
            fields=fields,
            is_ours=has_hit_thresholds(card),
        )
        return await _tried(target)
    except RequestFailedError as error:
        return str(error)


async def _card(client: httpx.AsyncClient, model: str | None) -> dict[str, Any]:
    """The entry of `/v1/models`: the one of that name, else the first."""
    try:
        reply = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise BenchmarkError(f"No server answers at {client.base_url}: {reason(error)}") from error
    if reply.is_error and model is not None:
        return {"id": model}
    answer = _json(reply)
    try:
        cards = {str(card["id"]): card for card in answer["data"]}
    except (TypeError, KeyError):
        cards = {}
    if not cards:
        raise BenchmarkError(f"{reply.request.url} names no model: {reply.text[:200]!r}")
    name = next(iter(cards)) if model is None else model
    if name not in cards:
        names = ", ".join(cards)
        raise BenchmarkError(f"{client.base_url} does not serve {model}; it serves {names}.")
    return cards[name]


async def _form(client: httpx.AsyncClient, name: FormName, model: str) -> PromptForm:
    if name != "tokens":
        return TextForm() if name == "text" else ChatForm()
    body = {"model": model, "prompt": SOURCE_TEXT, "add_special_tokens": False}
    tokens = (await post_json(client, "/tokenize", body)).get("tokens")
    if not tokens:
        raise RequestFailedError("/tokenize returns no tokens.")
    return TokenForm(tokens)


async def _tried(target: HttpTarget) -> HttpTarget:
    """The target, once a short answer has shown that it works, and how long words are."""
    form = target.form
    prompt = _words(form, 100)
    record = await target.send(prompt)
    if isinstance(form, TokenForm) and isinstance(record.output, str):
        raise RequestFailedError("Answers to token ids come without theirs.")
    if isinstance(form, TextForm):
        await _calibrate(target, form)
    return target


async def _calibrate(target: HttpTarget, form: TextForm) -> None:
    """Sets how many tokens a word has, from the usage of two prompts."""
    few = (await target.ask(_words(form, 100))).get("prompt_tokens")
    many = (await target.ask(_words(form, 300))).get("prompt_tokens")
    if few and many and many > few:
        form.tokens_per_word = (many - few) / 200
    else:
        target.remarks += ("The server reports no usage: a word counts as one token.",)


def _words(form: PromptForm, count: int) -> Prompt:
    content = form.draw([Text("hello", count)], "hello")
    return Prompt((Message("user", content),), 2, continues=True)


async def post_json(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Any:
    """The answer to one request. Raises `RequestFailedError` or `BenchmarkError`."""
    try:
        return _json(await client.post(path, json=body))
    except httpx.HTTPError as error:
        raise BenchmarkError(f"{client.base_url} is gone: {reason(error)}") from error


def _json(reply: httpx.Response) -> Any:
    try:
        check_status(reply)
        return reply.json()
    except RefusedStreamError as error:
        raise RequestFailedError(str(error)) from error
    except ValueError as error:
        raise RequestFailedError(f"{reply.request.url} answers no JSON.") from error
