"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from prefixcache.exceptions import InvalidRequestError
from prefixcache.request import RequestOutput, TokenLogprobs
from prefixcache.sampling_params import SamplingParams
from prefixcache.server.answers import Choice, answer
from prefixcache.server.body import parse_fields, parse_object, read_body
from prefixcache.server.context import Call, new_call
from prefixcache.server.job_maker import Job, JobMaker, fields_named, sampling_params
from prefixcache.server.logprobs import chat_logprobs, prompt_logprobs
from prefixcache.server.protocol import ChatFields, ChatRequest
from prefixcache.token_ids import TokenIds
from prefixcache.tokenization.chat_template import ChatTemplate
from prefixcache.tokenization.tokenizer import Tokenizer


def chat_router(maker: JobMaker) -> APIRouter:
    """The endpoint, for one served model."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request)
        fields = await maker.workers.run(
            len(body), lambda: parse_fields(parse_object(body), ChatRequest)
        )
        with fields_named(chat_names(fields)):
            job = await chat_job(maker, fields, len(body), new_call(request, "chatcmpl"))
            form = ChatForm(maker.served.tokenizer, fields)
            return await answer(request, maker, job, form, fields)

    return router


async def chat_prompt(
    maker: JobMaker, fields: ChatFields, size: int, *, add_special_tokens: bool
) -> TokenIds:
    """Token ids of the messages in the model's own form of a chat. `size` is the body's."""
    template = maker.served.tokenizer.chat_template
    if template is None:
        raise InvalidRequestError(
            "This model has no chat template; use /v1/completions.", param="messages"
        )
    text = await maker.workers.run(size, lambda: _rendered(template, fields))
    return await maker.encode(text, param="messages", add_special_tokens=add_special_tokens)


def _rendered(template: ChatTemplate, fields: ChatFields) -> str:
    continued = bool(fields.continue_final_message)
    prompted = fields.add_generation_prompt
    return template.render(
        fields.plain_messages(),
        add_generation_prompt=not continued if prompted is None else prompted,
        continue_final_message=continued,
        variables=fields.chat_template_kwargs,
    )


def chat_names(fields: ChatRequest) -> dict[str, str]:
    """Names of this endpoint for what the engine calls otherwise."""
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if fields.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


async def chat_job(maker: JobMaker, fields: ChatRequest, size: int, call: Call) -> Job:
    """The requests of a chat, checked; errors name fields as `chat_names` renames them.

    `size` is that of the body.
    """
    maker.check_model(fields.model)
    params = _params(maker, fields)
    special = fields.add_special_tokens is True
    prompt = await chat_prompt(maker, fields, size, add_special_tokens=special)
    given = fields.max_completion_tokens is not None or fields.max_tokens is not None
    return await maker.job(fields, [prompt], params, call=call, fit_max_tokens=not given)


def _params(maker: JobMaker, fields: ChatRequest) -> SamplingParams:
    max_tokens = fields.max_completion_tokens
    if max_tokens is None:
        max_tokens = fields.max_tokens
    if max_tokens is None:
        max_tokens = maker.served.generation.max_new_tokens
    logprobs = _num_logprobs(fields)
    return sampling_params(fields, maker.served, max_tokens=max_tokens, logprobs=logprobs)


def _num_logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


class ChatForm:
    """OpenAI's `chat.completion` objects."""

    def __init__(self, tokenizer: Tokenizer, fields: ChatRequest) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = _num_logprobs(fields)
        self._num_prompt_logprobs = fields.prompt_logprobs

    def response(self, job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
        """The whole answer, without `usage`."""
        body = {
            **_head(job, "chat.completion"),
            "choices": [self._whole(choice) for choice in choices],
        }
        scored = choices[0].prompt_logprobs
        if self._num_prompt_logprobs is not None and scored is not None:
            body["prompt_logprobs"] = prompt_logprobs(
                scored, self._num_prompt_logprobs, self._tokenizer
            )
        return body

    def chunks(self, job: Job, choice: Choice, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The role once, then text; nothing while text is held back."""
        if not choice.started:
            choice.started = True
            yield self._chunk(job, choice, {"role": "assistant", "content": ""}, None)
        logprobs = self._logprobs(output.logprobs)
        if output.text or logprobs or output.finished:
            yield self._chunk(job, choice, {"content": output.text}, logprobs)

    def last_chunk(self, job: Job) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""
        return {**_head(job, "chat.completion.chunk"), "choices": []}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _chunk(
        self, job: Job, choice: Choice, delta: dict[str, str], logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        ended = "role" not in delta
        shown = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason if ended else None,
            "stop_reason": choice.stop_reason if ended else None,
        }
        return {**_head(job, "chat.completion.chunk"), "choices": [shown]}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._num_logprobs is None or not logprobs:
            return None
        return chat_logprobs(logprobs, self._num_logprobs, self._tokenizer)


def _head(job: Job, kind: str) -> dict[str, Any]:
    return {"id": job.call.id, "object": kind, "created": job.created, "model": job.model}
