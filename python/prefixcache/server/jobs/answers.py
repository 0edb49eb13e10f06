"""Runs the requests of a job and gathers what comes back, at once or as a stream."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple, Protocol

from starlette.responses import Response

from prefixcache.diagnostics.room import Admitted
from prefixcache.server.http.errors import ApiError, error_body, failed_answer, is_unexpected
from prefixcache.server.http.json_text import json_response, json_text, object_json
from prefixcache.server.http.sse import DONE, EventStream, event, named_event, unless_disconnected
from prefixcache.server.http.workers import Workers
from prefixcache.server.jobs.diagnosis import Comparison
from prefixcache.server.jobs.job_maker import Job, JobMaker
from prefixcache.server.jobs.logprobs import TextOffsets
from prefixcache.server.options.limits import MAX_UNREAD_OUTPUTS
from prefixcache.text.chat.message import Message, MessageDelta, MessageParser
from prefixcache.types.request import NO_USE, RequestOutput, TokenLogprobs
from prefixcache.types.request import Request as EngineRequest
from prefixcache.types.weight_spans import WeightSpan, extend_spans, spans_as_json

logger = logging.getLogger(__name__)

Outputs = AsyncGenerator[list[tuple[int, RequestOutput]], None]
"""What came of a job's requests: all since the last time, with their indices."""

# Log probabilities that are written in one go.
_LONG_ANSWER = 2**16
# What Python takes for those of a token, and for each of the likeliest next to it.
_TOKEN_BYTES = 256
_TOP_BYTES = 72
_NUMBER_BYTES = 24


class TokenCounts(NamedTuple):
    """Tokens of one or more choices. A prompt counts once, with its first choice."""

    prompt: int
    completion: int
    cached: int
    written: int
    reasoning: int
    accepted: int
    refused: int
    stale: int
    from_disk: int


_NO_TOKENS = TokenCounts(0, 0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class AnswerChoice:
    """One answer as far as it has come, without log probabilities unless it `keeps_logprobs`.

    Where answers are messages, `message` is the whole of it and `delta` what the last output added.
    """

    index: int
    num_prompt_tokens: int
    new_parser: Callable[[], MessageParser] | None = None
    is_first: bool = True
    """Whether it is the first of its prompt, which was what used the cache."""
    keeps_logprobs: bool = True
    started: bool = False
    message: Message = field(default_factory=Message)
    delta: MessageDelta = field(default_factory=MessageDelta)
    content_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    parser: MessageParser | None = None
    num_reasoning_tokens: int = 0
    text: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    token_ids: list[int] = field(default_factory=list[int])
    weight_versions: list[WeightSpan] = field(default_factory=list[WeightSpan])
    text_offsets: TextOffsets = field(default_factory=TextOffsets)
    finish_reason: str | None = None
    first_token_at: float | None = None
    first: RequestOutput = field(default_factory=lambda: RequestOutput(request_id=""))
    """The output with its first token, which tells what the prompt hit."""
    last: RequestOutput = field(default_factory=lambda: RequestOutput(request_id=""))

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids)

    def shown_weights(self) -> dict[str, Any]:
        """What a choice shows, at its end, where `return_weight_versions` asks for it."""
        return {
            "weight_versions": spans_as_json(self.weight_versions),
            "hit_staleness": self.first.prompt.hit_staleness,
        }

    @property
    def counts(self) -> TokenCounts:
        """Its part of the usage."""
        prompt = self.first.prompt if self.is_first else NO_USE
        return TokenCounts(
            prompt=self.num_prompt_tokens if self.is_first else 0,
            completion=self.num_tokens,
            cached=prompt.num_cached_tokens,
            written=prompt.num_written_tokens,
            reasoning=self.num_reasoning_tokens,
            accepted=self.last.num_accepted_drafts,
            refused=self.last.num_refused_drafts,
            stale=prompt.num_cached_tokens if prompt.hit_staleness else 0,
            from_disk=prompt.num_disk_tokens,
        )

    def add(self, output: RequestOutput) -> None:
        """Takes what a step added. Raises `ApiError` when the engine failed on it."""
        if output.restarted:
            self._restart()
        ending = output.ending
        if ending.finish_reason == "error":
            raise failed_answer(ending.error, ending.error_code)
        if not self.num_tokens:
            self.first, self.first_token_at = output, time.monotonic()
        self.last = output
        self.token_ids.extend(output.token_ids)
        extend_spans(self.weight_versions, output.weight_version, len(output.token_ids))
        if self.keeps_logprobs:
            self.logprobs.extend(output.logprobs)
        self.finish_reason = ending.finish_reason
        if self.new_parser is None:
            self.text.append(output.text)
        else:
            self._read(output, self.new_parser)

    def _read(self, output: RequestOutput, new_parser: Callable[[], MessageParser]) -> None:
        """Tokens count as reasoning with the markers around it. Markup has no log probabilities."""
        parser = self.parser = self.parser or new_parser()
        reasoned, marked = parser.in_reasoning, parser.in_markup
        self.delta = parser.push(output.text, finished=output.finished)
        is_markup = (marked or parser.in_markup) and not self.delta.content
        logprobs = output.logprobs if self.keeps_logprobs and not is_markup else ()
        self.content_logprobs = self.message.add(self.delta, logprobs, finished=output.finished)
        if reasoned or parser.in_reasoning:
            self.num_reasoning_tokens += len(output.token_ids)
        calls = self.message.tool_calls
        cut = isinstance(output.ending.stop_reason, str)  # by a stop string, perhaps within a call
        if calls and self.finish_reason == "stop" and not (cut and not calls[-1].is_whole):
            self.finish_reason = "tool_calls"

    def _restart(self) -> None:
        self.text.clear()
        self.logprobs.clear()
        self.message, self.parser = Message(), None
        self.token_ids.clear()
        self.weight_versions.clear()
        self.num_reasoning_tokens = 0


class Choices(list[AnswerChoice]):
    """The answers of a job."""

    def __init__(self, job: Job, *, keeps_logprobs: bool = True) -> None:
        n, new_parser = job.params.n, job.new_parser
        super().__init__(
            AnswerChoice(
                index,
                len(request.prompt_token_ids),
                new_parser,
                is_first=index % n == 0,
                keeps_logprobs=keeps_logprobs,
            )
            for index, request in enumerate(job.requests)
        )
        self._counts = _NO_TOKENS
        self._counted = [_NO_TOKENS] * len(self)
        self._changed = {*range(len(self))}

    def add(self, index: int, output: RequestOutput) -> None:
        """Adds an output to a choice. Raises `ApiError` when the engine failed on it."""
        self._changed.add(index)
        self[index].add(output)

    @property
    def counts(self) -> TokenCounts:
        """Tokens of all choices; those of choices that changed since the last call are new."""
        for index in self._changed:
            now, before = self[index].counts, self._counted[index]
            parts = zip(self._counts, now, before, strict=True)
            self._counts = TokenCounts(*(total + new - old for total, new, old in parts))
            self._counted[index] = now
        self._changed.clear()
        return self._counts


class AnswerForm(Protocol):
    """How an endpoint words its answers, at once or as the events of a stream.

    `is_named` says whether an event's name is its `type`. Then the first events tell what
    diagnostics found, and the last ones repeat the answer.
    """

    is_named: ClassVar[bool]

    def body(self, job: Job, choices: Choices) -> dict[str, Any]:
        """The whole answer."""
        ...

    def begin(self, job: Job) -> Iterable[dict[str, Any]]:
        """Events before the first output."""
        ...

    def events(
        self, job: Job, choices: Choices, index: int, output: RequestOutput
    ) -> Iterable[dict[str, Any]]:
        """Events when `output` was added to the choice of that index."""
        ...

    def end(self, job: Job, choices: Choices) -> Iterable[dict[str, Any]]:
        """Events when all choices are complete."""
        ...

    def failed(self, job: Job, error: Exception) -> dict[str, Any]:
        """The event of an answer that failed."""
        ...


async def answer(
    maker: JobMaker, job: Job, form: AnswerForm, *, stream: bool, size: int = 0
) -> Response:
    """The answer as a whole, or a stream of events. `size` is of what it repeats of the request.

    What is wrong with the request is raised here, at once. Callers hold nothing of the body any
    more, which does not count as kept from here on.
    """
    if not stream:
        work = _whole_body(maker, job, form, size)
        return json_response(await unless_disconnected(job.call.receive, work))
    outputs = await _outputs(maker, job)
    return EventStream(_to_the_end(_events(outputs, job, form, maker.workers), job, form))


async def _events(
    outputs: Outputs, job: Job, form: AnswerForm, workers: Workers
) -> AsyncGenerator[bytes, None]:
    choices = Choices(job, keeps_logprobs=form.is_named)
    write = named_event if form.is_named else event

    async def events_of(index: int, output: RequestOutput) -> Iterable[bytes]:
        if form.is_named:
            await _explain(workers, job, choices)
        events = form.events(job, choices, index, output)

        def texts() -> list[bytes]:
            return [*map(write, events)]

        # Log probabilities of a prompt come all in one event.
        size = len(output.prompt_logprobs or ()) * (1 + (job.params.prompt_logprobs or 0))
        return await workers.run(size, texts) if size else texts()

    with _noted_for_the_log(job, choices):
        for opening in form.begin(job):
            yield write(opening)
        async with aclosing(_batches(job, outputs, choices, events_of)) as batches:
            async for batch in batches:
                yield batch
    await _explain(workers, job, choices)
    size = _size(job, choices) if form.is_named else 0
    if last := await workers.run(size, lambda: b"".join(map(write, form.end(job, choices)))):
        yield last


async def _batches(
    job: Job,
    outputs: Outputs,
    choices: Choices,
    events_of: Callable[[int, RequestOutput], Awaitable[Iterable[bytes]]],
) -> AsyncGenerator[bytes, None]:
    """The events of each batch of outputs as one piece; those before an error come before it."""
    async with aclosing(outputs):
        async for batch in outputs:
            written: list[bytes] = []
            try:
                for index, output in batch:
                    _raise_if_void(output)
                    _add(job, choices, index, output)
                    written += await events_of(index, output)
            except Exception:
                if written:
                    yield b"".join(written)
                raise
            if written:
                yield b"".join(written)


async def _to_the_end(
    events: AsyncGenerator[bytes, None], job: Job, form: AnswerForm
) -> AsyncGenerator[bytes, None]:
    """The events, also that of an error where they fail."""
    try:
        async with aclosing(events):
            async for text in events:
                yield text
    except Exception as error:
        if is_unexpected(error):
            logger.exception("The stream %s failed.", job.call.id)
        job.call.outcome.failed_status = error_body(error)[0]
        failed = form.failed(job, error)
        yield named_event(failed) if form.is_named else event(failed)
    if not form.is_named:
        yield DONE


async def gathered(maker: JobMaker, job: Job) -> Choices:
    """All answers, when they have ended. Raises `ApiError` when the engine failed on one."""
    choices = Choices(job)
    with _noted_for_the_log(job, choices):
        async with aclosing(await _outputs(maker, job)) as outputs:
            async for batch in outputs:
                for index, output in batch:
                    _add(job, choices, index, output)
    job.call.logprobs.complete()
    return choices


def _add(job: Job, choices: Choices, index: int, output: RequestOutput) -> None:
    """Adds an output, and counts what is kept of it. Raises `ApiError`."""
    choice = choices[index]
    if not (output.logprobs or output.prompt_logprobs or output.restarted or output.finished):
        choices.add(index, output)
        return
    before = _logprob_bytes(choice)
    choices.add(index, output)
    job.call.logprobs.add(_logprob_bytes(choice) - before)


def _logprob_bytes(choice: AnswerChoice) -> int:
    """About what its log probabilities take; those of a kind have equally many likeliest tokens.

    So does the JSON text of what was pooled.
    """
    pooled = choice.last.ending.pooled
    size = 0 if pooled is None else _NUMBER_BYTES * len(pooled)
    for kept in (choice.logprobs, choice.first.prompt_logprobs):
        if kept:
            num_top = 0 if kept[-1] is None else len(kept[-1].top_token_ids)
            size += len(kept) * (_TOKEN_BYTES + _TOP_BYTES * num_top)
    return size


async def _outputs(maker: JobMaker, job: Job) -> Outputs:
    """Hands the job to the engine."""
    outputs = await maker.engine.generate_batches(
        job.requests, deadline=job.call.deadline, max_unread=MAX_UNREAD_OUTPUTS
    )
    if job.diagnosis is not None:
        job.diagnosis.begin()
    job.sources.clear()
    job.call.release_body()
    return outputs


async def _whole_body(maker: JobMaker, job: Job, form: AnswerForm, repeated: int) -> bytes:
    choices = await gathered(maker, job)
    await _explain(maker.workers, job, choices)
    size = _size(job, choices)

    def body() -> bytes:
        write = json_text if size < _LONG_ANSWER else object_json
        return write(form.body(job, choices))

    return await maker.workers.run(size + repeated, body)


def usage(counts: TokenCounts) -> dict[str, Any]:
    """OpenAI's token counts."""
    shown: dict[str, Any] = {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {
            "cached_tokens": counts.cached,
            "cache_write_tokens": counts.written,
        },
    }
    if counts.stale:
        shown["prompt_tokens_details"]["stale_cached_tokens"] = counts.stale
    if counts.from_disk:
        shown["prompt_tokens_details"]["disk_cached_tokens"] = counts.from_disk
    details: dict[str, int] = {}
    if counts.reasoning:
        details["reasoning_tokens"] = counts.reasoning
    if counts.accepted or counts.refused:
        details["accepted_prediction_tokens"] = counts.accepted
        details["rejected_prediction_tokens"] = counts.refused
    if details:
        shown["completion_tokens_details"] = details
    return shown


async def _explain(workers: Workers, job: Job, choices: Sequence[AnswerChoice]) -> None:
    """Finds out what the answer is to tell of the cache, once, when prompts have been computed."""
    if job.diagnosis is not None and job.diagnosis.is_due:
        await workers.in_thread(partial(job.diagnosis.explain, _admitted(job, choices)))


def diagnosis_fields(job: Job) -> dict[str, Any]:
    """The member of an answer with `cache_diagnostics`: an explanation for each prompt."""
    if job.diagnosis is None or job.diagnosis.explanations is None:
        return {}
    return {"cache_diagnostics": job.diagnosis.explanations}


def comparison_fields(
    job: Job, name: str, worded: Callable[[Comparison], object]
) -> dict[str, Any]:
    """`diagnosis_fields`, and under `name` how the prompt compares, where that was asked for."""
    shown = diagnosis_fields(job)
    if job.diagnosis is not None and job.diagnosis.comparison is not None:
        shown[name] = worded(job.diagnosis.comparison)
    return shown


def _admitted(job: Job, choices: Sequence[AnswerChoice]) -> list[Admitted | None]:
    """What became of each prompt, which its first choice tells."""
    n = job.params.n
    return [*map(_admission, job.requests[::n], choices[::n])]


def _admission(request: EngineRequest, choice: AnswerChoice) -> Admitted | None:
    """None where the prompt was neither computed nor refused by its threshold, as far as known."""
    is_refused = choice.finish_reason == "cache_threshold" and not choice.num_tokens
    if not (choice.num_tokens or is_refused or choice.finish_reason == "length"):
        return None
    first, prompt = choice.first, choice.first.prompt
    return Admitted(
        hit_tokens=prompt.num_cached_tokens,
        disk_tokens=prompt.num_disk_tokens,
        started_at=first.started_at or request.arrival_time,
        window_missed_tokens=prompt.num_window_missed_tokens,
        reads=request.cache.read,
        num_unscored=request.params.num_unscored,
        is_refused=is_refused,
    )


@contextmanager
def _noted_for_the_log(job: Job, choices: Choices) -> Generator[None, None, None]:
    """However the answer ends, the log has what came of it."""
    try:
        yield
    finally:
        if job.diagnosis is not None:
            job.diagnosis.end(_admitted(job, choices))
        counts, outcome = choices.counts, job.call.outcome
        outcome.num_prompt_tokens = counts.prompt
        outcome.num_cached_tokens = counts.cached
        outcome.num_completion_tokens = counts.completion
        outcome.finish_reasons = {choice.finish_reason or "unfinished" for choice in choices}
        outcome.model, outcome.arrived_at = job.model, job.requests[0].arrival_time
        outcome.started_at = _first(choice.first.started_at for choice in choices)
        outcome.first_token_at = _first(choice.first_token_at for choice in choices)
        outcome.ended_at = time.monotonic()


def _first(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _raise_if_void(output: RequestOutput) -> None:
    """What was streamed before the answer began again cannot be taken back."""
    if output.restarted:
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "The weights were replaced while this answer was streamed, or its replica ended: what "
            "came of it is void. Send the request again.",
            code="weights_replaced",
        )


def _size(job: Job, choices: Sequence[AnswerChoice]) -> int:
    """A measure of what writing the answer costs."""
    most = max(job.params.logprobs or 0, job.params.prompt_logprobs or 0)
    return sum(choice.num_prompt_tokens + choice.num_tokens for choice in choices) * (1 + most)
