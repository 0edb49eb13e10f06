"""How far a request has come."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from prefixcache.request import Request
from prefixcache.step_plan import SamplingInput, ScheduledSequence, SequenceOutput


class RequestState:
    """A request in the scheduler: its tokens, and which of them are computed.

    `end_token_ids` are the ids that end the answer; they may not be sampled before `min_tokens`.
    `num_tokens` counts the prompt and what was generated, up to `max_num_tokens`. What a planned
    step computes and samples counts from its planning on: a token is pending until the step's
    outputs are known. `turn` is the round in which its job lets the request start.
    """

    __slots__ = (
        "_prompt_length",
        "_sampled_row",
        "_sampling",
        "_serial",
        "end_token_ids",
        "first_wait_step",
        "has_ended",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_logprobs",
        "num_published_tokens",
        "num_slots",
        "num_tokens",
        "output_token_ids",
        "request",
        "request_id",
        "turn",
    )

    def __init__(
        self,
        request: Request,
        *,
        seed: int,
        serial: int,
        max_num_tokens: int,
        end_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.max_num_tokens = max_num_tokens
        self.has_ended = False
        self.turn = 0
        self.end_token_ids = end_token_ids
        self.output_token_ids: list[int] = []
        self.num_cached_tokens: int | None = None
        self.first_wait_step: int | None = None
        self.num_prompt_logprobs = 0
        self._prompt_length = len(request.prompt_token_ids)
        self._sampled_row = 0
        self._serial = serial
        self._sampling = SamplingInput(
            params=request.params,
            seed=seed,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self.output_token_ids,
        )
        self.restart()

    @property
    def order(self) -> tuple[int, int, float, int]:
        """Sorts requests: lower priority value first, then the earlier turn, then arrival."""
        return (self.request.priority, self.turn, self.request.arrival_time, self._serial)

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is not there."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def decodes(self) -> bool:
        """Whether all that is left to compute is the answer's last token."""
        num_tokens = self.num_tokens
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > self._prompt_length

    @property
    def is_full(self) -> bool:
        """Whether the answer ends with the step that is under way, whatever it samples."""
        return self.num_tokens >= self.max_num_tokens

    @property
    def prompt_logprobs_due(self) -> bool:
        """Whether log probabilities of the prompt are wanted and not all there."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self._prompt_length - 1

    def begin_anew(self) -> None:
        """Nothing is computed, and nothing was generated."""
        self.output_token_ids.clear()
        self.num_prompt_logprobs = 0
        self.num_cached_tokens = None
        self.restart()

    def restart(self) -> None:
        """Nothing is computed (any more); the tokens that are known stay."""
        self.num_tokens = self._prompt_length + len(self.output_token_ids)
        self.num_computed_tokens = 0
        self.num_published_tokens = 0
        self.num_slots = 0

    def plan(self, count: int, sampled_row: int) -> ScheduledSequence:
        """The next `count` tokens to compute, which count as computed from here on.

        Where they reach the last token the next one is sampled: the step's `sampled_row`-th.
        """
        start = self.num_computed_tokens
        stop = self.num_computed_tokens = start + count
        due = self.prompt_logprobs_due
        scheduled = ScheduledSequence(
            request_id=self.request_id,
            token_ids=self._tokens(start, stop),
            start=start,
            sampling=self._sampling_input() if stop == self.num_tokens else None,
            prompt_logprobs=self.request.params.prompt_logprobs if due else None,
            next_prompt_token_ids=self.request.prompt_token_ids[start + 1 : stop + 1]
            if due
            else (),
        )
        if scheduled.sampling is not None:
            self.num_tokens += 1
            self._sampled_row = sampled_row
        return scheduled

    def take(self, scheduled: ScheduledSequence, output: SequenceOutput) -> None:
        """Takes what is known of a computed chunk, and the token sampled after it."""
        if output.prompt_logprobs:
            self.num_prompt_logprobs = scheduled.start + len(output.prompt_logprobs)
        if output.token_id is not None:
            self.output_token_ids.append(output.token_id)

    def _sampling_input(self) -> SamplingInput:
        if self.num_tokens - self._prompt_length >= self.request.params.min_tokens:
            return self._sampling
        return dataclasses.replace(self._sampling, banned_token_ids=self.end_token_ids)

    def _tokens(self, start: int, stop: int) -> Sequence[int]:
        length = self._prompt_length
        if start >= length + len(self.output_token_ids):
            return (-1 - self._sampled_row,)  # pending: named by its place in the step before
        if start >= length:
            return self.output_token_ids[start - length : stop - length]
        prompt = self.request.prompt_token_ids[start:stop]
        if stop <= length:
            return prompt
        return [*prompt, *self.output_token_ids[: stop - length]]
