"""Offline generation: the server's engine without the server.

    from prefixcache import LLM, SamplingParams

    llm = LLM("smollm2-135m-instruct")
    for result in llm.generate(["Hello,", "Once upon a time"], SamplingParams(max_tokens=32)):
        print(result.outputs[0].text)
    llm.control.reset_prefix_cache()  # as sleep, wake_up, update_weights_from_disk and the others

Names and shapes are those that vLLM's users expect.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from prefixcache.config.checked import shown
from prefixcache.config.engine_config import DEFAULT_MODEL, EngineConfig
from prefixcache.config.vllm_flags import without_vllm_flags
from prefixcache.engine.build import build
from prefixcache.engine.control import Control
from prefixcache.engine.pool_watch import WATCH_SECONDS, PoolWatch, adjust_pool
from prefixcache.engine.request_rules import CheckedParts, CheckedRequest
from prefixcache.engine.weights.weights_push import Chunk
from prefixcache.exceptions import PrefixCacheError, wrong
from prefixcache.text.chat.message import Message
from prefixcache.text.chat.parser_names import ReasoningParserName, ToolCallParserName
from prefixcache.text.chat.plan import ChatFormat, ChatPlan
from prefixcache.text.chat.tools import read_tool_use
from prefixcache.text.tokenization.tokenizer import with_bad_words
from prefixcache.types.modes import InFlightMode
from prefixcache.types.pooling import Pooling
from prefixcache.types.request import (
    CacheOptions,
    FinishReason,
    Request,
    RequestOutput,
    TokenLogprobs,
)
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import TokenIds, as_token_ids
from prefixcache.types.weight_spans import WeightSpan, extend_spans

T = TypeVar("T")
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
Prompt = str | Sequence[int] | TokenIds | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token at one position; `rank` 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice of an answer. `logprobs` has one dict a token, by token id.

    `weight_versions` says which tokens came from which weights.
    Of a chat, `text` is the answer as it was generated, and `message` what it says: content,
    reasoning, and calls of tools. `pooled` is what `SamplingParams.pooling` asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | Literal["tool_calls"] | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    message: Message | None = None
    weight_versions: list[WeightSpan] = field(default_factory=list[WeightSpan])
    pooled: npt.NDArray[np.float32] | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class GenerationResult:
    """A prompt and its choices. `num_cached_tokens` is that of the first choice."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether all choices are complete."""
        return all(output.finished for output in self.outputs)


class LLM:
    """A model with its engine, driven by the calling thread: any, but one at a time.

    Flags are those of `vllm serve`: see `EngineConfig`, `CacheConfig` and `SchedulerConfig` in
    `prefixcache.config`; `num_gpu_blocks_override` is another name of `num_blocks`. Those
    of vLLM's `LLM` that mean nothing here, as `tensor_parallel_size=1`, set nothing. Raises
    `ConfigError` for a wrong flag and `ModelLoadError` when the model cannot be loaded. How the
    model calls tools and reasons is read from its chat template unless a parser is named.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        tool_call_parser: ToolCallParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
        **flags: Any,
    ) -> None:
        config = EngineConfig.from_flags(model=model, **without_vllm_flags(flags))
        built = build(config)
        self._has_priorities = config.scheduler.scheduling_policy == "priority"
        self._engine = built.engine
        self._tokenizer = built.tokenizer
        self._chat = ChatFormat(
            built.tokenizer, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
        )
        self._generation = built.model.generation
        self._numbers = itertools.count()
        self._calls = itertools.count()
        self._turn = threading.RLock()
        self._control = self._engine.control_for(self._run_here)
        self._next_look = 0.0
        self._watch = None
        if self._engine.self_sizing is not None:
            self._watch = PoolWatch(self._engine, self._control, self._turn)

    @property
    def control(self) -> Control:
        """The commands, `llm.control.sleep(1)`, and the engine's state and statistics.

        Until `wake_up`, `resume` or `end_weight_update`, `generate` raises `EngineHaltedError`.
        """
        return self._control

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and answer together."""
        return self._engine.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` use when they are given nothing: the model's own defaults."""
        options = self._generation.sampling_options()
        if self._generation.max_new_tokens is not None:
            options["max_tokens"] = self._generation.max_new_tokens
        return SamplingParams(**options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_options: CacheOptions | Sequence[CacheOptions] | None = None,
    ) -> list[GenerationResult]:
        """Answers all prompts together; the results are in the prompts' order.

        A prompt is a text, token ids (a list or an array), or a dict with "prompt" or
        "prompt_token_ids", and with "cache_salt" where it has a salt of its own.
        Without `sampling_params` the model's own defaults hold (`get_default_sampling_params`).
        An answer ends with the context ("length"), whatever `max_tokens` says.
        Raises `InvalidRequestError` before anything is computed when one of them is wrong, and
        `EngineHaltedError` while the model sleeps, is paused, or waits for the end of an update.
        """
        self._control.raise_if_halted()
        many = _as_list(prompts)
        params = _for_each(sampling_params, len(many), "sampling_params")
        if priority is not None and not self._has_priorities:
            raise wrong("priority", "needs scheduling_policy='priority'")
        priorities = _for_each(0 if priority is None else priority, len(many), "priority")
        options = _for_each(cache_options or CacheOptions(), len(many), "cache_options")
        call = f"call-{next(self._calls)}"  # one job: its prompts start in their order
        parts = CheckedParts()
        jobs = [
            self._job(call, parts, *arguments)
            for arguments in zip(many, params, priorities, options, strict=True)
        ]
        self._run(jobs, show_progress=use_tqdm)
        return [job.result for job in jobs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        cache_options: CacheOptions | Sequence[CacheOptions] | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """The embedding [E] of each prompt, of length 1: its last token's hidden state.

        It is what `/v1/embeddings` answers; models of other poolings mean nothing by it. Raises
        what `generate` does, and `PrefixCacheError` where a prompt has none.
        """
        params = SamplingParams(max_tokens=0, temperature=0, pooling=Pooling())
        results = self.generate(prompts, params, use_tqdm=use_tqdm, cache_options=cache_options)
        return [_embedding(result.outputs[0]) for result in results]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        cache_options: CacheOptions | Sequence[CacheOptions] | None = None,
    ) -> list[GenerationResult]:
        """Answers one conversation or several, rendered by the model's chat template.

        Each choice of a result has its `message`. `tools` and what follows are as in OpenAI's API
        and for all conversations; `chat_template_kwargs` reach the template. The rest is as in
        `generate`.
        """
        single = isinstance(next(iter(messages), None), Mapping)
        many = cast("Sequence[Sequence[Mapping[str, Any]]]", [messages] if single else messages)
        use = read_tool_use(tools, tool_choice, parallel=parallel_tool_calls)
        given = list(_for_each(sampling_params, len(many), "sampling_params"))
        plans = [
            self._chat.plan(
                conversation,
                tool_use=use,
                structured_output=None if params is None else params.structured_output,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation, params in zip(many, given, strict=True)
        ]
        prompts = [
            self._tokenizer.encode(plan.prompt, add_special_tokens=False, param="messages")
            for plan in plans
        ]
        results = self.generate(
            prompts,
            [
                plan.applied_to(params or self.get_default_sampling_params())
                for plan, params in zip(plans, given, strict=True)
            ],
            use_tqdm=use_tqdm,
            priority=priority,
            cache_options=cache_options,
        )
        for plan, result in zip(plans, results, strict=True):
            _read_messages(plan, result)
        return results

    def receive_weights(
        self,
        chunks: Chunk | Iterable[Chunk],
        mode: InFlightMode = "recompute",
        *,
        weight_version: str | None = None,
        digest: str | None = None,
        full: bool = True,
    ) -> int:
        """New weights in chunks, all or none of which replace the old: `Control.receive_weights`.

        Raises `InvalidRequestError` for tensors that are not of this model and for another digest
        than `weights_digest` gives for them; the old weights serve on.
        """
        return self.control.receive_weights(
            chunks, mode, weight_version=weight_version, digest=digest, full=full
        )

    def probe(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        cache_options: CacheOptions | Sequence[CacheOptions] | None = None,
    ) -> list[int]:
        """How many leading tokens of each prompt are cached now, in full blocks.

        Changes nothing, and may be called from another thread while `generate` runs. `generate`
        would take them all, but always computes a prompt's last token. Raises what `generate` does.
        """
        many = _as_list(prompts)
        options = _for_each(cache_options or CacheOptions(), len(many), "cache_options")
        return [self._probe(*arguments) for arguments in zip(many, options, strict=True)]

    def _run_here(self, command: Callable[[], T]) -> T:
        """The thread that calls a command becomes the one that steps."""
        with self._turn:
            self._engine.adopt_loop()
            return command()

    def _probe(self, prompt: Prompt, cache: CacheOptions) -> int:
        _, token_ids = self._encode(prompt)
        params = SamplingParams(max_tokens=1)
        return self._engine.probe(
            Request(
                request_id="",
                prompt_token_ids=token_ids,
                params=params,
                cache=_salted(cache, prompt),
            )
        )

    def _job(
        self,
        call: str,
        parts: CheckedParts,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        cache: CacheOptions,
    ) -> _Generation:
        text, token_ids = self._encode(prompt)
        cache = _salted(cache, prompt)
        params = self.get_default_sampling_params() if params is None else params
        params = params.shortened(params.most_tokens(self.max_model_len - len(token_ids)))
        params = with_bad_words(params, self._tokenizer)
        number = str(next(self._numbers))
        requests = [
            Request(
                request_id=f"{number}-{choice}",
                prompt_token_ids=token_ids,
                params=params.for_choice(choice),
                cache=cache,
                priority=priority,
                arrival_time=time.monotonic(),
                job_id=call,
                choices=(number, params.n) if params.n > 1 else None,
            )
            for choice in range(params.n)
        ]
        checked = [self._engine.check(request, parts) for request in requests]
        outputs = [
            CompletionOutput(choice, logprobs=None if params.logprobs is None else [])
            for choice in range(params.n)
        ]
        return _Generation(checked, GenerationResult(number, text, token_ids.tolist(), outputs))

    def _encode(self, prompt: Prompt) -> tuple[str | None, TokenIds]:
        if isinstance(prompt, Mapping):
            for key in prompt.keys() - _PROMPT_KEYS:
                raise wrong("prompt", f"has {shown(key)}, which is not read")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), as_token_ids(prompt["prompt_token_ids"])
            prompt = cast("str", prompt.get("prompt"))
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        return None, as_token_ids(prompt)

    def _run(self, jobs: Sequence[_Generation], *, show_progress: bool) -> None:
        """Steps until all jobs are done; no request is left in the engine, even after an error."""
        places = {
            checked.request.request_id: (job.result, job.result.outputs[choice])
            for job in jobs
            for choice, checked in enumerate(job.requests)
        }
        with self._turn:
            self._engine.adopt_loop()
            try:
                for job in jobs:
                    for checked in job.requests:
                        self._engine.add(checked)
                self._collect(places, show_progress)
                while self._engine.has_work():  # memory that is still to go back
                    self._engine.step()
            except BaseException:  # Ctrl-C may come at any line
                self._engine.forget_all()
                raise

    def _collect(
        self, places: Mapping[str, tuple[GenerationResult, CompletionOutput]], show_progress: bool
    ) -> None:
        with tqdm(
            desc="Generating",
            total=len(places),
            leave=False,
            disable=None if show_progress else True,
        ) as bar:
            while self._engine.has_unfinished():
                self._adjust_pool()
                outputs = [*self._engine.take_outputs(), *self._engine.step()]
                for output in outputs:
                    self._add(output, *places[output.request_id])
                bar.update(sum(output.finished for output in outputs))

    def _adjust_pool(self) -> None:
        """Does between two steps what the watch does while nothing is generated."""
        if self._watch is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + WATCH_SECONDS
            adjust_pool(self._engine, self._control)

    def _add(self, new: RequestOutput, result: GenerationResult, choice: CompletionOutput) -> None:
        if new.restarted:
            _restart(choice)
        choice.text += new.text
        extend_spans(choice.weight_versions, new.weight_version, len(new.token_ids))
        choice.token_ids.extend(new.token_ids)
        if choice.logprobs is not None:
            choice.logprobs.extend(self._by_id(logprobs) for logprobs in new.logprobs)
        ending = new.ending
        choice.finish_reason, choice.stop_reason = ending.finish_reason, ending.stop_reason
        choice.error, choice.pooled = ending.error, ending.pooled
        if new.prompt_logprobs is not None:
            result.prompt_logprobs = [
                None if logprobs is None else self._by_id(logprobs)
                for logprobs in new.prompt_logprobs
            ]
        if choice.index == 0:
            result.num_cached_tokens = new.prompt.num_cached_tokens

    def _by_id(self, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        """The token taken first, then the likeliest ones."""
        ranked = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        taken = self._logprob(logprobs.token_id, logprobs.logprob, logprobs.rank)
        by_id = {logprobs.token_id: taken}
        for rank, (token_id, value) in enumerate(ranked, start=1):
            by_id.setdefault(token_id, self._logprob(token_id, value, rank))
        return by_id

    def _logprob(self, token_id: int, value: float, rank: int) -> Logprob:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return Logprob(value, rank, text)


@dataclass(frozen=True, slots=True)
class _Generation:
    requests: list[CheckedRequest]
    result: GenerationResult


def _embedding(output: CompletionOutput) -> npt.NDArray[np.float32]:
    if output.pooled is None:
        raise PrefixCacheError(f"There is no embedding: {output.error or output.finish_reason}")
    return output.pooled


def _restart(choice: CompletionOutput) -> None:
    """The weights were replaced: the answer begins again."""
    choice.text = ""
    choice.token_ids.clear()
    choice.weight_versions.clear()
    if choice.logprobs is not None:
        choice.logprobs.clear()


def _read_messages(plan: ChatPlan, result: GenerationResult) -> None:
    for choice in result.outputs:
        choice.message = Message()
        choice.message.add(plan.new_parser().push(choice.text, finished=True))
        if choice.message.tool_calls and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"


def _salted(cache: CacheOptions, prompt: Prompt) -> CacheOptions:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    return cache if salt is None else dataclasses.replace(cache, salt=salt)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [cast("Prompt", prompts)]
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _for_each(value: Any, count: int, name: str) -> Iterator[Any]:
    """One value for all, or a list of as many."""
    if not isinstance(value, Sequence):
        return itertools.repeat(value, count)
    values = cast("Sequence[Any]", value)
    if len(values) != count:
        raise wrong(name, f"has {len(values)} entries for {count} prompts")
    return iter(values)
