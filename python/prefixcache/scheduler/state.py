"""How far a request has come."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from prefixcache.request import Request
from prefixcache.step_plan import SamplingInput, ScheduledSequence, SequenceOutput


class RequestState:
    """A request in the scheduler: its tokens, and which of them are computed.

    `order` sorts requests: lower priority value first, then the earlier arrival. `end_token_ids`
    are the ids that end the answer; they may not be sampled before `min_tokens`. `num_tokens`
    counts the prompt and what was generated.
    """

    __slots__ = (
        "_prompt_length",
        "_sampling",
        "end_token_ids",
        "first_wait_step",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_logprobs",
        "num_published_tokens",
        "num_slots",
        "num_tokens",
        "order",
        "output_token_ids",
        "request",
    )

    def __init__(
        self, request: Request, *, seed: int, serial: int, end_token_ids: tuple[int, ...] = ()
    ) -> None:
        self.request = request
        self.order = (request.priority, request.arrival_time, serial)
        self.end_token_ids = end_token_ids
        self.output_token_ids: list[int] = []
        self.num_cached_tokens: int | None = None
        self.first_wait_step: int | None = None
        self.num_prompt_logprobs = 0
        self._prompt_length = self.num_tokens = len(request.prompt_token_ids)
        self._sampling = SamplingInput(
            params=request.params,
            seed=seed,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self.output_token_ids,
        )
        self.restart()

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def num_remaining(self) -> int:
        """Tokens known whose KV is not there."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def decodes(self) -> bool:
        """Whether all that is left to compute is the answer's last token."""
        return self.num_remaining == 1 and bool(self.output_token_ids)

    @property
    def prompt_logprobs_due(self) -> bool:
        """Whether log probabilities of the prompt are wanted and not all there."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self._prompt_length - 1

    def begin_anew(self) -> None:
        """Nothing is computed, and nothing was generated."""
        self.output_token_ids.clear()
        self.num_tokens = self._prompt_length
        self.num_prompt_logprobs = 0
        self.num_cached_tokens = None
        self.restart()

    def restart(self) -> None:
        """Nothing is computed (any more); the tokens stay."""
        self.num_computed_tokens = 0
        self.num_published_tokens = 0
        self.num_slots = 0

    def chunk(self, count: int) -> ScheduledSequence:
        """The next `count` tokens to compute; samples when they reach the last known token."""
        start = self.num_computed_tokens
        stop = start + count
        due = self.prompt_logprobs_due
        return ScheduledSequence(
            request_id=self.request_id,
            token_ids=self._tokens(start, stop),
            start=start,
            sampling=self._sampling_input() if stop == self.num_tokens else None,
            prompt_logprobs=self.request.params.prompt_logprobs if due else None,
            next_prompt_token_ids=self.request.prompt_token_ids[start + 1 : stop + 1]
            if due
            else (),
        )

    def take(self, scheduled: ScheduledSequence, output: SequenceOutput) -> None:
        """Takes note of a computed chunk and of the token sampled after it."""
        self.num_computed_tokens += scheduled.num_tokens
        if output.prompt_logprobs:
            self.num_prompt_logprobs = scheduled.start + len(output.prompt_logprobs)
        if output.token_id is not None:
            self.output_token_ids.append(output.token_id)
            self.num_tokens += 1

    def _sampling_input(self) -> SamplingInput:
        if len(self.output_token_ids) >= self.request.params.min_tokens:
            return self._sampling
        return dataclasses.replace(self._sampling, banned_token_ids=self.end_token_ids)

    def _tokens(self, start: int, stop: int) -> Sequence[int]:
        length = self._prompt_length
        if start >= length:
            return self.output_token_ids[start - length : stop - length]
        prompt = self.request.prompt_token_ids[start:stop]
        if stop <= length:
            return prompt
        return [*prompt, *self.output_token_ids[: stop - length]]
