"""From the fields of a body to requests of the engine: the one validation both endpoints share."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from prefixcache.config import GenerationDefaults
from prefixcache.exceptions import InvalidRequestError, RequestTooLargeError
from prefixcache.request import CacheOptions, Request
from prefixcache.sampling_params import SamplingParams
from prefixcache.server.access import Caller
from prefixcache.server.backend import EngineClient, ServedModel
from prefixcache.server.context import Call
from prefixcache.server.defaults import usual_values
from prefixcache.server.errors import model_not_found
from prefixcache.server.protocol import SamplingFields
from prefixcache.tokenization.tokenizer import Tokenizer

MAX_SEQUENCES = 4096
MAX_PRIORITY = 2**31 - 1
_LONG_TEXT = 10_000

_PASSED_ON = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks of the engine: `params.n` requests for each prompt, in order."""

    id: str
    model: str
    created: int
    prompts: tuple[Sequence[int], ...]
    params: SamplingParams
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMaker:
    """Makes jobs for one served model."""

    engine: EngineClient
    served: ServedModel

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises `ApiError` (404) when the model is another one."""
        first = self.served.names[0]
        if name is not None and name not in self.served.names:
            raise model_not_found(name, first)
        return name or first

    async def encode(self, text: str, *, param: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, off the event loop when it is long.

        Raises `RequestTooLargeError`, without encoding, for a text that can never fit.
        """
        tokenizer, limit = self.served.tokenizer, self.engine.max_model_len
        least = len(text) // tokenizer.longest_token
        if least > limit:
            raise RequestTooLargeError(
                f"The model's context length is {limit} tokens, but the text of {len(text)} "
                f"characters makes {least} or more.",
                param=param,
                code="context_length_exceeded",
            )
        if len(text) < _LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param)
        return await asyncio.to_thread(
            tokenizer.encode, text, add_special_tokens=add_special_tokens, param=param
        )

    def job(
        self,
        fields: SamplingFields,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        call: Call,
        fit_max_tokens: bool,
    ) -> Job:
        """All requests of one HTTP request.

        `fit_max_tokens` shortens `params.max_tokens`, when it is a default, to what fits.
        """
        self._check_priority(fields.priority or 0)
        if len(prompts) * params.n > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"{len(prompts)} prompts with n={params.n} are more than {MAX_SEQUENCES} answers.",
                param="n" if params.n > 1 else "prompt",
            )
        return Job(
            id=call.id,
            model=self.check_model(fields.model),
            created=int(time.time()),
            prompts=tuple(prompts),
            params=params,
            requests=tuple(self._requests(fields, prompts, params, call, fit_max_tokens)),
        )

    def _check_priority(self, priority: int) -> None:
        if priority and not self.served.priorities:
            raise InvalidRequestError(
                "priority needs a server with --scheduling-policy priority.", param="priority"
            )
        if abs(priority) > MAX_PRIORITY:
            raise InvalidRequestError(
                f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}.", param="priority"
            )

    def _requests(
        self,
        fields: SamplingFields,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        call: Call,
        fit_max_tokens: bool,
    ) -> Iterator[Request]:
        limit = self.engine.max_model_len if fit_max_tokens else None
        shared = _shared_options(fields, call.caller)
        job = f"{call.id}-{uuid.uuid4().hex[:8]}"  # clients may send one request id twice
        for prompt_index, prompt in enumerate(prompts):
            fitted = _fitted(params, prompt, limit)
            for choice in range(params.n):
                yield Request(
                    request_id=f"{job}-{prompt_index * params.n + choice}",
                    job_id=job,
                    prompt_token_ids=prompt,
                    params=fitted.for_choice(choice),
                    **shared,
                )


def sampling_params(
    fields: SamplingFields,
    generation: GenerationDefaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Checked sampling options. What the request leaves out comes from the model's defaults."""
    _check_stream_fields(fields)
    given = {name: getattr(fields, name) for name in _PASSED_ON}
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        **{**usual_values(generation), **chosen},
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=_stop_strings(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias=_logit_bias(fields.logit_bias or {}),
    )


def _check_stream_fields(fields: SamplingFields) -> None:
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed; set stream to false.", param="prompt_logprobs"
        )
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError("stream_options needs stream to be true.", param="stream_options")


@contextmanager
def fields_named(names: Mapping[str, str]) -> Generator[None, None, None]:
    """Renames fields in errors, where an endpoint calls a field by a name of its own."""
    try:
        yield
    except InvalidRequestError as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        message = str(error).replace(f"{error.param} ", f"{name} ", 1)
        raise type(error)(message, param=name, code=error.code) from None


def parse_prompts(prompt: object) -> list[str | list[int]]:
    """The prompts of a completion, each as text or as token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _bad_prompt("a string, token ids, or a list of either, and not empty")
    items = cast("list[object]", prompt)
    if _all_ids(items):
        return [cast("list[int]", items)]
    return [_one_prompt(item, index) for index, item in enumerate(items)]


def check_ids(token_ids: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    """Raises `InvalidRequestError` for ids outside the vocabulary."""
    wrong = next((i for i in token_ids if not 0 <= i < tokenizer.vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{param} holds the token id {wrong}; ids are from 0 to {tokenizer.vocab_size - 1}.",
            param=param,
        )


def _one_prompt(item: object, index: int) -> str | list[int]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _all_ids(cast("list[object]", item)):
        return cast("list[int]", item)
    raise _bad_prompt(f"a string or a list of token ids at [{index}]")


def _all_ids(items: Sequence[object]) -> bool:
    return all(type(item) is int for item in items)


def _bad_prompt(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"prompt must be {what}.", param="prompt")


def _shared_options(fields: SamplingFields, caller: Caller) -> dict[str, Any]:
    return {
        "cache": CacheOptions(
            salt=caller.own_salt(fields.cache_salt),
            read=fields.cache_read is not False,
            write=fields.cache_write is not False,
            hit_threshold=fields.cache_hit_threshold,
        ),
        "priority": fields.priority or 0,
        "arrival_time": time.monotonic(),
    }


def _fitted(params: SamplingParams, prompt: Sequence[int], limit: int | None) -> SamplingParams:
    if limit is None or params.max_tokens is None:
        return params
    room = max(limit - len(prompt), 1)
    return dataclasses.replace(params, max_tokens=min(params.max_tokens, room))


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise InvalidRequestError(
            "logit_bias must map token ids to numbers.", param="logit_bias"
        ) from None
