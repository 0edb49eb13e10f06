"""From sampled tokens to what the caller gets: text, end, log probabilities."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prefixcache.engine.weight_versions import WeightVersions
from prefixcache.metrics import Metrics
from prefixcache.scheduler.state import RequestState
from prefixcache.text.tokenization.detokenizer import IncrementalDetokenizer
from prefixcache.types.request import (
    GOES_ON,
    Ending,
    PromptUse,
    Request,
    RequestOutput,
    TokenLogprobs,
)
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SequenceOutput, StepPlan
from prefixcache.types.weight_spans import ShownVersion

if TYPE_CHECKING:
    from prefixcache.kv.recordings.request_records import RequestRecords

logger = logging.getLogger(__name__)

MakeDetokenizer = Callable[[SamplingParams], IncrementalDetokenizer]


class Answer:
    """The growing answer to one request.

    `eos_token_ids` end it, unless the request ignores them and has no grammar, and so do its stop
    ids, its stop strings, and `max_tokens`.
    """

    def __init__(
        self,
        request: Request,
        detokenizer: IncrementalDetokenizer,
        *,
        eos_token_ids: Collection[int],
        max_tokens: int,
    ) -> None:
        self.request = request
        self._detokenizer = detokenizer
        # Under a grammar they are sampled only where the answer may end; see `AnswerMatcher`.
        ignores_eos = request.params.ignore_eos and request.params.structured_output is None
        self._eos_token_ids = () if ignores_eos else eos_token_ids
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._prompt = self._unused_prompt()
        self._num_accepted_drafts = self._num_refused_drafts = 0
        self._prompt_logprobs = self._unscored()
        self._begun: float | None = None
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None

    def begin(self, now: float) -> None:
        """Its first step is submitted at `now`, in seconds of `time.monotonic`."""
        if self._begun is None:
            self._begun = now

    def restart(self, detokenizer: IncrementalDetokenizer) -> RequestOutput | None:
        """Starts again with an unused detokenizer; says so where tokens were delivered."""
        begun = self._num_tokens > 0
        self._detokenizer = detokenizer
        self._num_tokens = 0
        self._prompt = self._unused_prompt()
        self._num_accepted_drafts = self._num_refused_drafts = 0
        self._prompt_logprobs = self._unscored()
        if not begun:
            return None
        return RequestOutput(
            request_id=self.request.request_id, prompt=self._prompt, restarted=True
        )

    def add_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Takes those that follow positions `start`, `start + 1`, ...; known ones are skipped."""
        num_known = len(self._prompt_logprobs) - 1 - start
        self._prompt_logprobs.extend(logprobs[num_known:])

    def count_drafts(self, *, accepted: int = 0, refused: int = 0) -> None:
        """Counts guesses at the answer's tokens, before the tokens are pushed."""
        self._num_accepted_drafts += accepted
        self._num_refused_drafts += refused

    def push(
        self, output: SequenceOutput, state: RequestState, weight_version: ShownVersion
    ) -> RequestOutput:
        """Adds the sampled token and tells what the caller gets for it.

        `state` says what became of the prompt, `weight_version` which weights sampled the token.
        """
        if output.token_id is None:
            return self.end(Ending("error", error=output.error, error_code=output.error_code))
        token_id, is_first = output.token_id, not self._num_tokens
        if is_first:
            self._prompt = state.prompt_use()
        if not self._max_tokens:  # nothing but the prompt was asked for
            return self.end(Ending("length", pooled=output.pooled), started_at=self._begun)
        self._num_tokens += 1
        stop_id = token_id in self.request.params.stop_token_ids
        ended_by_token = stop_id or token_id in self._eos_token_ids
        text = self._detokenizer.push((token_id,), ended_by_token=ended_by_token)
        ending = GOES_ON
        if ended_by_token or self._detokenizer.stopped_by is not None:
            ending = Ending("stop", self._detokenizer.stopped_by or (token_id if stop_id else None))
        elif self._num_tokens >= self._max_tokens:
            ending = Ending("length")
        if ending is not GOES_ON and self._detokenizer.stopped_by is None:
            text += self._detokenizer.finish()
        return RequestOutput(
            request_id=self.request.request_id,
            token_ids=(token_id,),
            text=text,
            logprobs=() if output.logprobs is None else (output.logprobs,),
            prompt_logprobs=self._take_prompt_logprobs() if is_first else None,
            prompt=self._prompt,
            ending=ending,
            num_accepted_drafts=self._num_accepted_drafts,
            num_refused_drafts=self._num_refused_drafts,
            started_at=self._begun if is_first else None,
            weight_version=weight_version,
        )

    def end(
        self, ending: Ending, prompt: PromptUse | None = None, *, started_at: float | None = None
    ) -> RequestOutput:
        """The last output of an answer that no token ended. After an error no text is added.

        `prompt` is of one that was rejected.
        """
        return RequestOutput(
            request_id=self.request.request_id,
            text="" if ending.finish_reason == "error" else self._detokenizer.finish(),
            prompt_logprobs=None if self._max_tokens else self._take_prompt_logprobs(),
            prompt=self._prompt if prompt is None else prompt,
            ending=ending,
            num_accepted_drafts=self._num_accepted_drafts,
            num_refused_drafts=self._num_refused_drafts,
            started_at=started_at,
        )

    def observe(self, output: RequestOutput, now: float, metrics: Metrics) -> None:
        """Counts an output at `now`, in seconds of `time.monotonic`."""
        arrival = self.request.arrival_time or now
        if output.token_ids:
            metrics.generation_tokens += len(output.token_ids)
            if self._last_token_time is None:
                _count_prompt(output, metrics)
                metrics.time_to_first_token.observe(now - arrival)
                self._first_token_time = now
            else:
                metrics.inter_token_latency.observe(now - self._last_token_time)
            self._last_token_time = now
        elif output.ended_well:
            _count_prompt(output, metrics)
        if output.ending.finish_reason is not None:
            metrics.finished[output.ending.finish_reason] += 1
            metrics.request_latency.observe(now - arrival)
            metrics.request_prompt_tokens.observe(output.prompt.num_tokens)
            metrics.request_generation_tokens.observe(self._num_tokens)
            metrics.request_max_tokens.observe(self._max_tokens)
            self._observe_phases(now, metrics)

    def _observe_phases(self, now: float, metrics: Metrics) -> None:
        """How long a request that had an answer waited, read its prompt, and wrote."""
        if self._begun is None or self._first_token_time is None:
            return
        metrics.queue_time.observe(self._begun - (self.request.arrival_time or self._begun))
        metrics.prefill_time.observe(self._first_token_time - self._begun)
        metrics.decode_time.observe(decode := now - self._first_token_time)
        metrics.inference_time.observe(now - self._begun)
        if self._num_tokens > 1:
            metrics.time_per_token.observe(decode / (self._num_tokens - 1))

    def _unused_prompt(self) -> PromptUse:
        return PromptUse(num_tokens=len(self.request.prompt_token_ids))

    def _unscored(self) -> list[TokenLogprobs | None]:
        """Nothing for the first token, and for those before the first that is to be scored."""
        length = len(self.request.prompt_token_ids)
        return [None] * max(min(self.request.params.logprob_start_len, length), 1)

    def _take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        if self.request.params.prompt_logprobs is None:
            return None
        return tuple(self._prompt_logprobs)


def _count_prompt(output: RequestOutput, metrics: Metrics) -> None:
    """Counts the prompt of an output that is the first with a token, or the only one."""
    prompt = output.prompt
    metrics.prompt_tokens += prompt.num_tokens
    metrics.cached_prompt_tokens += prompt.num_cached_tokens
    metrics.computed_tokens.observe(prompt.num_tokens - prompt.num_cached_tokens)


class Answers:
    """The answers of all requests that an engine has. `records` takes them down."""

    def __init__(
        self,
        make_detokenizer: MakeDetokenizer,
        eos_token_ids: Collection[int],
        metrics: Metrics,
        records: RequestRecords | None,
    ) -> None:
        self._make_detokenizer = make_detokenizer
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._records = records
        self._answers: dict[str, Answer] = {}

    def __getitem__(self, request_id: str) -> Answer:
        return self._answers[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._answers

    def __iter__(self) -> Iterator[str]:
        return iter(self._answers)

    def make(self, request: Request, max_model_len: int) -> Answer:
        """The answer to a request that is still to be added."""
        most = request.params.max_tokens
        return Answer(
            request,
            self._make_detokenizer(request.params),
            eos_token_ids=self._eos_token_ids,
            max_tokens=max_model_len - len(request.prompt_token_ids) if most is None else most,
        )

    def add(self, answer: Answer, seed: int) -> None:
        """The request of an answer is there; it is sampled with this seed."""
        self._answers[answer.request.request_id] = answer
        if self._records is not None:
            self._records.add(answer.request, seed)

    def begin(self, plan: StepPlan, versions: WeightVersions) -> None:
        """A step with these requests is about to be submitted."""
        now = time.monotonic()
        for sequence in plan.sequences:
            self._answers[sequence.request_id].begin(now)
        if self._records is not None:
            ids = (sequence.request_id for sequence in plan.sequences)
            self._records.compute(ids, versions.number, versions.name)

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Counts and records outputs that callers get, and forgets the answers that they end."""
        now = time.monotonic()
        for output in outputs:
            self._answers[output.request_id].observe(output, now, self._metrics)
            if self._records is not None:
                self._records.push(output)
            if output.finished:
                del self._answers[output.request_id]

    def end(
        self, request_id: str, ending: Ending, prompt: PromptUse | None = None
    ) -> RequestOutput:
        """The last output of a request, which is forgotten; as `Answer.end`."""
        answer = self._answers[request_id]
        try:
            output = answer.end(ending, prompt)
        except Exception as error:
            logger.exception("Request %s failed.", request_id)
            output = answer.end(failed(error))
        self.deliver([output])
        return output

    def restart(self, request_ids: Sequence[str], begun: Iterable[str]) -> list[RequestOutput]:
        """Restarts answers, of which those in `begun` had tokens; what their callers get."""
        if self._records is not None:
            self._records.restart(request_ids)
        outputs = map(self._restarted, begun)
        return [output for output in outputs if output is not None]

    def _restarted(self, request_id: str) -> RequestOutput | None:
        answer = self._answers[request_id]
        try:
            return answer.restart(self._make_detokenizer(answer.request.params))
        except Exception as error:
            logger.exception("Request %s failed.", request_id)
            return self.end(request_id, failed(error))

    def forget_all(self) -> None:
        """There is no request any more."""
        self._answers.clear()
        if self._records is not None:
            self._records.forget_all()


def failed(error: Exception) -> Ending:
    """Names the error alone: its text may quote another request of the step."""
    return Ending("error", error=f"{type(error).__name__}, of which the log says more")
