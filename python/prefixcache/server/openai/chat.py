"""`POST /v1/chat/completions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from prefixcache.diagnostics.spans import PromptSource
from prefixcache.exceptions import InvalidRequestError, wrong
from prefixcache.server.http.routes import CHOICES, EVENT, QUESTION, Router, describes
from prefixcache.server.jobs.answers import AnswerChoice, answer
from prefixcache.server.jobs.caching import (
    CachingControls,
    Place,
    changed_behind,
    marked_parts,
    openai_controls,
)
from prefixcache.server.jobs.context import Call, new_call, read_fields
from prefixcache.server.jobs.field_names import fields_named
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.jobs.logprobs import chat_logprobs, prompt_logprobs
from prefixcache.server.jobs.params import sampling_params
from prefixcache.server.jobs.sampling_fields import PromptCacheOptions, ResponseCacheOptions
from prefixcache.server.jobs.served_model import ServedModel
from prefixcache.server.openai.chunk_form import ChunkForm, head
from prefixcache.server.openai.protocol import ChatFields, ChatRequest
from prefixcache.text.chat.message import Message, MessageDelta, ToolCallDelta
from prefixcache.text.chat.plan import ChatPlan
from prefixcache.text.chat.tools import shown_tool
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import RequestOutput, TokenLogprobs
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.structured_output import StructuredOutput
from prefixcache.types.token_ids import TokenIds


def chat_router(maker: JobMaker) -> Router:
    """The endpoint, for one served model."""
    router = Router()

    @router.post("/v1/chat/completions")
    @describes(
        "Answers a chat.",
        CHOICES,
        models=(ChatRequest,),
        example={"messages": QUESTION, "max_tokens": 8, "temperature": 0},
        events=EVENT,
    )
    async def create_chat_completion(request: Request) -> Response:
        job, form, stream, names = await _asked(maker, request)
        with fields_named(names):
            return await answer(maker, job, form, stream=stream)

    return router


async def _asked(maker: JobMaker, request: Request) -> tuple[Job, ChatForm, bool, dict[str, str]]:
    """What a body asks, and nothing of the body itself."""
    fields, size = await read_fields(request, maker.workers, ChatRequest)
    names = chat_names(fields)
    with fields_named(names):
        job = await chat_job(maker, fields, size, new_call(request, "chatcmpl"))
        return job, ChatForm(maker.served.tokenizer, fields), bool(fields.stream), names


async def count_chat(maker: JobMaker, fields: ChatRequest, size: int) -> int:
    """How many tokens the prompt of a chat has; `size` is that of the body."""
    maker.check_model(fields.model)
    return len(await chat_tokens(maker, fields, size))


async def chat_tokens(
    maker: JobMaker, fields: ChatFields, size: int, *, add_special_tokens: bool = False
) -> TokenIds:
    """The prompt of a chat; `size` is that of the body."""
    plan, _ = await maker.workers.run(size, lambda: _planned(maker.served, fields, size))
    encode = maker.encoder.encode
    return await encode(plan.prompt, param="messages", add_special_tokens=add_special_tokens)


def _planned(
    served: ServedModel,
    fields: ChatFields,
    size: int,
    structured_output: StructuredOutput | None = None,
    changed: Place | None = None,
) -> tuple[ChatPlan, PromptSource]:
    """The messages in the model's own form of a chat, how it answers, and what the prompt is of.

    There is other text behind a `changed` block. `size` is that of the body.
    """
    if served.tokenizer.chat_template is None:
        raise InvalidRequestError(
            "This model has no chat template; use /v1/completions.", param="messages"
        )
    messages, tool_use = fields.plain_messages(), fields.tool_use()
    messages = served.header_lines.stripped_messages(messages)
    if changed is not None:
        messages, specs = changed_behind(changed, messages, [tool.spec for tool in tool_use.tools])
        tools = tuple(shown_tool(index, spec) for index, spec in enumerate(specs))
        tool_use = dataclasses.replace(tool_use, tools=tools)
    continued = bool(fields.continue_final_message)
    prompted = fields.add_generation_prompt
    plan = served.chat.plan(
        messages,
        tool_use=tool_use,
        structured_output=structured_output,
        add_generation_prompt=not continued if prompted is None else prompted,
        continue_final_message=continued,
        variables=fields.template_variables(),
    )
    tools = [tool.spec for tool in tool_use.tools]
    return plan, PromptSource(plan.prompt, messages, tools, size)


def chat_names(fields: ChatRequest) -> dict[str, str]:
    """Names of this endpoint for what the engine calls otherwise."""
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if fields.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


async def chat_job(
    maker: JobMaker,
    fields: ChatRequest,
    size: int,
    call: Call,
    controls: CachingControls | None = None,
) -> Job:
    """The requests of a chat, checked; errors name fields as `chat_names` renames them.

    `size` is that of the body. `controls` stand in for those that the fields hold.
    """
    model = maker.check_model(fields.model)
    params, kept = _params(maker, fields), maker.encoder.num_kept(fields)
    planned = partial(_planned, maker.served, fields, size, params.structured_output)

    def read() -> tuple[ChatPlan, PromptSource, CachingControls]:
        plan, source = planned()
        return plan, source, controls or chat_controls(fields, fields.prompt_cache_options)

    plan, source, controls = await maker.workers.run(size, read)
    special = fields.add_special_tokens is True
    encoded = await maker.encoder.encode_chat(
        source,
        controls,
        lambda changed: planned(changed)[0].prompt,
        add_special_tokens=special,
        last=kept,
    )
    if fields.prediction is not None and (text := fields.prediction.text):
        predicted = await maker.encoder.encode(text, param="prediction", add_special_tokens=False)
        encoded = encoded._replace(prediction=predicted)
    params = plan.applied_to(params)
    return await maker.job(
        fields, encoded, params, model=model, call=call, new_parser=plan.new_parser
    )


def chat_controls(
    fields: ChatRequest, options: PromptCacheOptions | ResponseCacheOptions | None
) -> CachingControls:
    """What a chat asks of the cache, by the breakpoints in it and these `options`."""
    marked = marked_parts(message.content for message in fields.messages)
    return openai_controls(marked, options, fields.prompt_cache_retention)


def _params(maker: JobMaker, fields: ChatRequest) -> SamplingParams:
    max_tokens = fields.most_tokens(maker.served.generation.max_new_tokens)
    logprobs = _num_logprobs(fields)
    return sampling_params(fields, maker.served, max_tokens=max_tokens, logprobs=logprobs)


def _num_logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise wrong("top_logprobs", "needs logprobs to be true")
    return None


class ChatForm(ChunkForm):
    """OpenAI's `chat.completion` objects."""

    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, fields: ChatRequest) -> None:
        super().__init__(tokenizer, fields)
        self._num_logprobs = _num_logprobs(fields)
        self._tells_reasoning = fields.include_reasoning is not False

    def response(self, job: Job, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """The object of all choices."""
        body: dict[str, Any] = {
            **head(job, "chat.completion"),
            "choices": [self._whole(choice) for choice in choices],
        }
        scored = choices[0].first.prompt_logprobs
        if self._num_prompt_logprobs is not None and scored is not None:
            body["prompt_logprobs"] = prompt_logprobs(
                scored, self._num_prompt_logprobs, self._tokenizer
            )
        if self._tells_ids:
            body["prompt_token_ids"] = job.prompts[0].tolist()
        return body

    def chunks(
        self, job: Job, choice: AnswerChoice, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """The role once, then text; nothing while text is held back."""
        if not choice.started:
            choice.started = True
            first = self._chunk(job, choice, {"role": "assistant", "content": ""}, None)
            if self._tells_ids:
                first["prompt_token_ids"] = job.prompts[0].tolist()
            yield first
        logprobs, delta = self._logprobs(output.logprobs), choice.delta
        if not self._tells_reasoning:
            delta = dataclasses.replace(delta, reasoning="")
        if delta or logprobs or output.finished or self._tells_ids:
            shown = _delta(delta, has_calls=bool(choice.message.tool_calls))
            chunk = self._chunk(job, choice, shown, logprobs)
            if self._tells_ids:
                chunk["choices"][0]["token_ids"] = [*output.token_ids]
            yield chunk

    def _whole(self, choice: AnswerChoice) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": choice.index,
            "message": _message(choice.message, with_reasoning=self._tells_reasoning),
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.last.ending.stop_reason,
        }
        if self._tells_ids:
            shown["token_ids"] = [*choice.token_ids]
        if self._tells_weights:
            shown |= choice.shown_weights()
        return shown

    def _chunk(
        self, job: Job, choice: AnswerChoice, delta: dict[str, Any], logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        ended = "role" not in delta
        shown = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason if ended else None,
            "stop_reason": choice.last.ending.stop_reason if ended else None,
        }
        if self._tells_weights and ended and choice.finish_reason is not None:
            shown |= choice.shown_weights()
        return {**head(job, self.chunk_kind), "choices": [shown]}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._num_logprobs is None or not logprobs:
            return None
        return chat_logprobs(logprobs, self._num_logprobs, self._tokenizer)


def _message(message: Message, *, with_reasoning: bool) -> dict[str, Any]:
    """`content` is null where the answer holds nothing but calls or reasoning."""
    content, reasoning = message.content, message.reasoning
    said = content or not (message.tool_calls or reasoning)
    shown: dict[str, Any] = {
        "role": "assistant",
        "content": content if said else None,
        "refusal": None,
        **_reasoning(reasoning if with_reasoning else ""),
    }
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return shown


def _delta(delta: MessageDelta, *, has_calls: bool) -> dict[str, Any]:
    shown: dict[str, Any] = _reasoning(delta.reasoning)
    if delta.content or not (delta.reasoning or has_calls):
        shown["content"] = delta.content
    if delta.tool_calls:
        shown["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return shown


def _reasoning(text: str) -> dict[str, Any]:
    """Under the name that vLLM took to, and the older one that most clients read."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
