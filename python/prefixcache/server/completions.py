"""`POST /v1/completions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from prefixcache.request import RequestOutput, TokenLogprobs
from prefixcache.sampling_params import SamplingParams
from prefixcache.server.answers import Choice, answer
from prefixcache.server.body import parse_fields, parse_object, read_body
from prefixcache.server.caching import prompt_caching
from prefixcache.server.context import Call, new_call
from prefixcache.server.job_maker import (
    Job,
    JobMaker,
    caching_controls,
    check_num_sequences,
    parse_prompts,
    sampling_params,
)
from prefixcache.server.logprobs import ScoredToken, completion_logprobs, prompt_logprobs
from prefixcache.server.protocol import CompletionRequest
from prefixcache.token_ids import TokenIds
from prefixcache.tokenization.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16


def completions_router(maker: JobMaker) -> APIRouter:
    """The endpoint, for one served model."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = await read_body(request)
        fields, prompts = await maker.workers.run(len(body), partial(parse_completion, body))
        job = await completion_job(maker, fields, prompts, new_call(request, "cmpl"))
        form = CompletionForm(maker.served.tokenizer, fields, prompts)
        return await answer(request, maker, job, form, fields)

    return router


def parse_completion(body: bytes) -> tuple[CompletionRequest, list[str | TokenIds]]:
    """The fields of a body, and its prompts."""
    fields = parse_fields(parse_object(body), CompletionRequest)
    return fields, parse_prompts(fields.prompt)


async def completion_job(
    maker: JobMaker, fields: CompletionRequest, prompts: Sequence[str | TokenIds], call: Call
) -> Job:
    """The requests of a completion, checked."""
    maker.check_model(fields.model)
    params = _params(maker, fields)
    check_num_sequences(len(prompts), params.n)
    caching = prompt_caching(caching_controls(fields), ())
    encoded = await _encoded(maker, prompts, fields.add_special_tokens is not False)
    return await maker.job(
        fields,
        encoded,
        params,
        call=call,
        fit_max_tokens=fields.max_tokens is None,
        caching=caching,
    )


async def _encoded(
    maker: JobMaker, prompts: Sequence[str | TokenIds], special: bool
) -> list[TokenIds]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = await maker.encode_all(texts, param="prompt", add_special_tokens=special)
    following = iter(encoded)
    return [next(following) if isinstance(prompt, str) else prompt for prompt in prompts]


def _params(maker: JobMaker, fields: CompletionRequest) -> SamplingParams:
    max_tokens = fields.max_tokens
    if max_tokens is None:
        max_tokens = maker.served.generation.max_new_tokens or _DEFAULT_MAX_TOKENS
    params = sampling_params(fields, maker.served, max_tokens=max_tokens, logprobs=fields.logprobs)
    if fields.echo and params.prompt_logprobs is None and params.logprobs is not None:
        return dataclasses.replace(params, prompt_logprobs=params.logprobs)
    return params


class CompletionForm:
    """OpenAI's `text_completion` objects."""

    def __init__(
        self, tokenizer: Tokenizer, fields: CompletionRequest, prompts: Sequence[str | TokenIds]
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._echo = bool(fields.echo)
        self._num_logprobs = fields.logprobs
        self._num_prompt_logprobs = fields.prompt_logprobs

    def response(self, job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
        """The whole answer, without `usage`."""
        return {**_head(job), "choices": [self._whole(job, choice) for choice in choices]}

    def chunks(self, job: Job, choice: Choice, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """One chunk, or none while text is held back."""
        shown = self._choice(job, choice, output.text, output.logprobs)
        if shown["text"] or shown["logprobs"] or output.finished:
            choice.started = True
            yield {**_head(job), "choices": [shown]}

    def last_chunk(self, job: Job) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""
        return {**_head(job), "choices": []}

    def _whole(self, job: Job, choice: Choice) -> dict[str, Any]:
        shown = self._choice(job, choice, "".join(choice.text), choice.logprobs)
        if self._num_prompt_logprobs is not None and choice.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(
                choice.prompt_logprobs, self._num_prompt_logprobs, self._tokenizer
            )
        return shown

    def _choice(
        self, job: Job, choice: Choice, text: str, logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """A choice with new text and log probabilities, behind the prompt's if that is echoed."""
        tokens: list[ScoredToken] = [(known.token_id, known) for known in logprobs]
        if self._echo and not choice.started:
            index = choice.index // job.params.n
            text = self._echoed(index) + text
            prompt = job.prompts[index].tolist()
            tokens = [*zip(prompt, choice.prompt_logprobs or (), strict=False), *tokens]
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _echoed(self, index: int) -> str:
        prompt = self._prompts[index]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt.tolist())

    def _logprobs(self, choice: Choice, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if self._num_logprobs is None or not tokens:
            return None
        shown = completion_logprobs(
            tokens, self._num_logprobs, self._tokenizer, offset=choice.text_offset
        )
        choice.text_offset += sum(map(len, shown["tokens"]))
        return shown


def _head(job: Job) -> dict[str, Any]:
    return {
        "id": job.call.id,
        "object": "text_completion",
        "created": job.created,
        "model": job.model,
    }
