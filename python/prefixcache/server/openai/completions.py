"""`POST /v1/completions`."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from prefixcache.diagnostics.spans import PromptSource
from prefixcache.exceptions import wrong
from prefixcache.server.http.body import parse_fields
from prefixcache.server.http.routes import CHOICES, EVENT, PROMPT, Router, describes
from prefixcache.server.jobs.answers import AnswerChoice, answer
from prefixcache.server.jobs.caching import openai_controls, prompt_caching
from prefixcache.server.jobs.context import Call, new_call, read_parsed
from prefixcache.server.jobs.encode import EncodedPrompts, parse_prompts
from prefixcache.server.jobs.field_names import fields_named
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.jobs.logprobs import ScoredToken, completion_logprobs, prompt_logprobs
from prefixcache.server.jobs.params import check_num_sequences, sampling_params
from prefixcache.server.openai.chunk_form import ChunkForm, head
from prefixcache.server.openai.protocol import CompletionRequest
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.types.request import RequestOutput, TokenLogprobs
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import TokenIds

_DEFAULT_MAX_TOKENS = 16


def completions_router(maker: JobMaker) -> Router:
    """The endpoint, for one served model."""
    router = Router()

    @router.post("/v1/completions")
    @describes(
        "Goes on with texts.",
        CHOICES,
        models=(CompletionRequest,),
        properties={"prompt": PROMPT},
        example={"prompt": "The capital of Japan is", "max_tokens": 8, "temperature": 0},
        events=EVENT,
    )
    async def create_completion(request: Request) -> Response:
        job, form, stream = await _asked(maker, request)
        return await answer(maker, job, form, stream=stream)

    return router


async def _asked(maker: JobMaker, request: Request) -> tuple[Job, CompletionForm, bool]:
    """What a body asks, and nothing of the body itself but for prompts to echo."""
    fields, prompts, _ = await read_parsed(request, maker.workers, parse_completion)
    job = await completion_job(maker, fields, prompts, new_call(request, "cmpl"))
    form = CompletionForm(maker.served.tokenizer, fields, prompts if fields.echo else ())
    return job, form, bool(fields.stream)


def parse_completion(values: dict[str, Any]) -> tuple[CompletionRequest, list[str | TokenIds]]:
    """The fields of a body, and its prompts."""
    fields = parse_fields(values, CompletionRequest)
    return fields, parse_prompts(fields.prompt)


async def completion_job(
    maker: JobMaker, fields: CompletionRequest, prompts: Sequence[str | TokenIds], call: Call
) -> Job:
    """The requests of a completion, checked."""
    model = maker.check_model(fields.model)
    params, kept = _params(maker, fields), maker.encoder.num_kept(fields)
    check_num_sequences(len(prompts), params.n)
    prompts = await _stripped(maker, prompts)
    controls = openai_controls((), fields.prompt_cache_options, fields.prompt_cache_retention)
    caching = prompt_caching(controls, ())
    encoded = await encode_prompts(maker, prompts, fields.add_special_tokens is not False, kept)
    sources = [PromptSource(prompt) if isinstance(prompt, str) else None for prompt in prompts]
    made = EncodedPrompts(encoded, caching, sources=sources)
    return await maker.job(fields, made, params, model=model, call=call)


async def _stripped(maker: JobMaker, prompts: Sequence[str | TokenIds]) -> Sequence[str | TokenIds]:
    """The prompts without the lines that the server leaves out."""
    lines = maker.served.header_lines
    if not lines.patterns:
        return prompts
    return await maker.workers.run(
        sum(map(len, prompts)),
        lambda: [
            lines.stripped(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
        ],
    )


async def encode_prompts(
    maker: JobMaker, prompts: Sequence[str | TokenIds], special: bool, kept: int | None
) -> list[TokenIds]:
    """The token ids of all prompts, of each its last `kept` ones where that is given."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = await maker.encoder.encode_all(
        texts, param="prompt", add_special_tokens=special, last=kept
    )
    following = iter(encoded)
    first = slice(None if kept is None else -kept, None)
    return [next(following) if isinstance(prompt, str) else prompt[first] for prompt in prompts]


def _params(maker: JobMaker, fields: CompletionRequest) -> SamplingParams:
    default = maker.served.generation.max_new_tokens or _DEFAULT_MAX_TOKENS
    max_tokens = fields.most_tokens(default)
    params = sampling_params(fields, maker.served, max_tokens=max_tokens, logprobs=fields.logprobs)
    if fields.echo and params.prompt_logprobs is None and params.logprobs is not None:
        params = dataclasses.replace(params, prompt_logprobs=params.logprobs)
    return _with_best_of(params, fields)


def _with_best_of(params: SamplingParams, fields: CompletionRequest) -> SamplingParams:
    """As many choices as are computed; their log probabilities say which are the best."""
    best_of = fields.best_of
    if best_of is None or best_of == params.n:
        return params
    if best_of < params.n:
        raise wrong("best_of", f"({best_of}) must not be less than n ({params.n})")
    if fields.stream:
        raise wrong(
            "best_of",
            "above n cannot be streamed: which choices are the best is known at their end",
        )
    with fields_named({"n": "best_of"}):
        return dataclasses.replace(params, n=best_of, logprobs=params.logprobs or 0)


def _best(job: Job, choices: Sequence[AnswerChoice], n: int) -> list[AnswerChoice]:
    """The likeliest `n` choices of each prompt; those that were cut off come last."""
    if n == job.params.n:
        return [*choices]
    size = job.params.n
    groups = [choices[begin : begin + size] for begin in range(0, len(choices), size)]
    best = [heapq.nlargest(n, group, key=_rank) for group in groups]
    return [choice for group in best for choice in group]


def _rank(choice: AnswerChoice) -> tuple[bool, float]:
    mean = sum(token.logprob for token in choice.logprobs) / max(len(choice.logprobs), 1)
    return choice.last.ended_well, mean


class CompletionForm(ChunkForm):
    """OpenAI's `text_completion` objects."""

    chunk_kind = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, fields: CompletionRequest, prompts: Sequence[str | TokenIds]
    ) -> None:
        super().__init__(tokenizer, fields)
        self._prompts = prompts
        self._echo = bool(fields.echo)
        self._n = fields.n or 1
        self._is_cut = fields.truncate_prompt_tokens is not None
        self._num_logprobs = fields.logprobs

    def response(self, job: Job, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """The object of the best choices."""
        best = _best(job, choices, self._n)
        shown = [{**self._whole(job, choice), "index": i} for i, choice in enumerate(best)]
        return {**head(job, self.chunk_kind), "choices": shown}

    def chunks(
        self, job: Job, choice: AnswerChoice, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """One chunk, or none while text is held back."""
        shown = self._choice(job, choice, output.text, output.logprobs, output.token_ids)
        if any(map(shown.get, ("text", "logprobs", "token_ids"))) or output.finished:
            choice.started = True
            yield {**head(job, self.chunk_kind), "choices": [shown]}

    def _whole(self, job: Job, choice: AnswerChoice) -> dict[str, Any]:
        text = "".join(choice.text)
        shown = self._choice(job, choice, text, choice.logprobs, choice.token_ids)
        if self._num_prompt_logprobs is not None and choice.first.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(
                choice.first.prompt_logprobs, self._num_prompt_logprobs, self._tokenizer
            )
        return shown

    def _choice(
        self,
        job: Job,
        choice: AnswerChoice,
        text: str,
        logprobs: Sequence[TokenLogprobs],
        token_ids: Sequence[int],
    ) -> dict[str, Any]:
        """A choice with new text and log probabilities, behind the prompt's if that is echoed."""
        tokens: list[ScoredToken] = [(scored.token_id, scored) for scored in logprobs]
        index = choice.index // job.params.n
        if self._echo and not choice.started:
            text = self._echoed(job, index) + text
            prompt = job.prompts[index].tolist()
            tokens = [*zip(prompt, choice.first.prompt_logprobs or (), strict=False), *tokens]
        shown: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.last.ending.stop_reason,
        }
        if self._tells_ids:
            shown["prompt_token_ids"] = None if choice.started else job.prompts[index].tolist()
            shown["token_ids"] = [*token_ids]
        if self._tells_weights and choice.finish_reason is not None:
            shown |= choice.shown_weights()
        return shown

    def _echoed(self, job: Job, index: int) -> str:
        prompt = self._prompts[index]
        if isinstance(prompt, str) and not self._is_cut:
            return prompt
        return self._tokenizer.decode(job.prompts[index].tolist())

    def _logprobs(
        self, choice: AnswerChoice, tokens: Sequence[ScoredToken]
    ) -> dict[str, Any] | None:
        if self._num_logprobs is None or not tokens:
            return None
        return completion_logprobs(
            tokens, self._num_logprobs, self._tokenizer, offsets=choice.text_offsets
        )
