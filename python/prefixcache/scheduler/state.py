"""How far a request has come."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from prefixcache.text.grammar.answer_matcher import AnswerMatcher
from prefixcache.types.request import PromptUse, Request
from prefixcache.types.step_plan import (
    NOTHING_SUPPRESSED,
    PromptLogprobsInput,
    SamplingInput,
    ScheduledSequence,
    SequenceOutput,
    SuppressedTokens,
    TokenMask,
)
from prefixcache.types.token_ids import TokenBuffer, TokenIds

Order = tuple[int, int, int, float, int]
"""Priority, round of its client, turn of its job, arrival time and serial number of a request."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestProgress:
    """How far a running request is, in tokens.

    `cached_tokens` of the prompt were hits; `computed_tokens`, they among them, have their KV;
    `total_tokens` are the prompt and what was generated so far, `max_tokens` at most.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    total_tokens: int
    max_tokens: int


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """A request in the scheduler: its tokens, and which of them are computed.

    What a planned step computes and samples counts from its planning on: a token is pending until
    the step's outputs are known.
    """

    request: Request
    _: dataclasses.KW_ONLY
    serial: int
    seed: dataclasses.InitVar[int]
    max_num_tokens: int
    """Of the prompt and what is generated."""
    end_token_ids: tuple[int, ...] = ()
    """End the answer; they may not be sampled before `min_tokens`."""
    suppressed: SuppressedTokens = NOTHING_SUPPRESSED
    matcher: AnswerMatcher | None = None
    """Keeps the answer to its grammar."""
    write_limit: int = sys.maxsize
    """Blocks of the first tokens up to there are published, a multiple of the block size."""
    computes_once: bool = False
    """No token is computed before it is known what may follow, as none can be computed again."""

    request_id: str = dataclasses.field(init=False)
    tokens: TokenBuffer = dataclasses.field(init=False)
    turn: int = 0
    """The round in which its job lets the request start."""
    round: int = sys.maxsize
    """That of its client, once it has come; until then it is behind those of earlier ones."""
    waits_since: float | None = None
    """When it first waited, by the clock of a queue that asks for it."""
    first_wait_step: int | None = None
    has_ended: bool = False
    is_loading: bool = False
    """Its next blocks come from a disk."""
    skips_disk: bool = False
    """Its next start does without the disk."""
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_published_tokens: int = 0
    num_slots: int = 0
    num_prompt_logprobs: int = 0
    num_cached_tokens: int | None = None
    num_disk_tokens: int = 0
    """Hits that came from a disk."""
    num_window_missed_tokens: int = 0
    num_resets: int = 0
    """Of the cache when it got its blocks: after a later one it publishes no more."""
    hit_staleness: int = 0
    _num_written_tokens: int = 0
    _sampled_row: int = 0
    _sampling: SamplingInput = dataclasses.field(init=False)

    def __post_init__(self, seed: int) -> None:
        self.request_id = self.request.request_id
        self.tokens = TokenBuffer(self.request.prompt_token_ids)
        self.num_prompt_logprobs = self.request.params.num_unscored or 0
        self._sampling = SamplingInput(params=self.request.params, seed=seed, tokens=self.tokens)
        self.restart()

    @property
    def order(self) -> Order:
        """Sorts requests: lower priority value first, then earlier round, turn and arrival."""
        request = self.request
        return (request.priority, self.round, self.turn, request.arrival_time, self.serial)

    def progress(self) -> RequestProgress:
        """How far it is. From any thread: during a step, numbers may differ by that step."""
        return RequestProgress(
            request_id=self.request_id,
            prompt_tokens=self.tokens.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens or 0,
            computed_tokens=self.num_computed_tokens,
            total_tokens=self.num_tokens,
            max_tokens=self.max_num_tokens,
        )

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is not there."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def decodes(self) -> bool:
        """Whether all that is left to compute is the answer's last token."""
        num_tokens = self.num_tokens
        is_last = num_tokens - self.num_computed_tokens == 1
        return is_last and num_tokens > self.tokens.num_prompt_tokens

    @property
    def is_full(self) -> bool:
        """Whether the answer ends with the step in flight, whatever it samples."""
        return self.num_tokens >= self.max_num_tokens

    @property
    def is_held(self) -> bool:
        """Whether a grammar keeps the answer out of the next step.

        What may follow is worked out once the last token is known, while its step is computed.
        """
        if self.matcher is None:
            return False
        if self.num_tokens > len(self.tokens):
            return True
        return not self.matcher.is_known if self.computes_once else self.matcher.is_held

    @property
    def may_be_drafted(self) -> bool:
        """Whether all tokens are known, and a grammar tells soon what may follow guesses."""
        if self.num_tokens > len(self.tokens):
            return False
        return self.matcher is None or not self.matcher.is_slow

    @property
    def prompt_logprobs_due(self) -> bool:
        """Whether log probabilities of the prompt are wanted and not all there."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.tokens.num_prompt_tokens - 1

    def restart_answer(self) -> None:
        """Nothing is computed, and nothing was generated."""
        self.tokens.forget_answer()
        if self.matcher is not None:
            self.matcher.reset()
        self.num_prompt_logprobs = self.request.params.num_unscored or 0
        self.num_cached_tokens = None
        self.num_disk_tokens = self._num_written_tokens = 0
        self.restart()

    def restart(self) -> None:
        """Nothing is computed (any more); the tokens that are known stay."""
        self.num_tokens = len(self.tokens)
        self.num_computed_tokens = 0
        self.num_published_tokens = 0
        self.num_slots = 0

    @property
    def publishes_more(self) -> bool:
        """Whether blocks are still to be published, as far as its tokens are known."""
        return self.num_published_tokens < self.write_limit

    def count_written(self, upto: int, duplicates: int, block_size: int) -> None:
        """Counts the prompt's full blocks below `upto` as written, but `duplicates` of them."""
        prompt = self.tokens.num_prompt_tokens
        new = min(upto, prompt) // block_size - self.num_published_tokens // block_size - duplicates
        self._num_written_tokens += max(0, new) * block_size

    def prompt_use(self) -> PromptUse:
        """What became of the prompt."""
        prompt, cached = self.tokens.num_prompt_tokens, self.num_cached_tokens or 0
        return PromptUse(
            num_tokens=prompt,
            num_cached_tokens=cached,
            num_disk_tokens=self.num_disk_tokens,
            # Blocks that were lost to a preemption are written twice, and count once.
            num_written_tokens=min(self._num_written_tokens, prompt - cached),
            num_window_missed_tokens=self.num_window_missed_tokens,
            hit_staleness=self.hit_staleness,
        )

    @property
    def next_token(self) -> int:
        """What a decode computes: -1 - i for the i-th token that the step in flight samples."""
        at = self.num_computed_tokens
        return self.tokens.at(at) if at < len(self.tokens) else -1 - self._sampled_row

    def next_tokens(self, count: int) -> TokenIds:
        """The next tokens to compute, all of them known."""
        return self.tokens.known[self.num_computed_tokens :][:count]

    def after_drafts(self, drafts: Sequence[int]) -> list[SamplingInput]:
        """How to sample after each of some guesses at what follows the tokens, all known."""
        texts = self.tokens.with_drafts(drafts)
        banned = [self._banned_after(len(tokens)) for tokens in texts]
        masks: Sequence[TokenMask | None] = [None] * len(texts)
        if self.matcher is not None:
            masks = self.matcher.draft_masks(drafts, banned)
        return list(map(self._sampling_input, texts, banned, masks))

    def plan(self, count: int, sampled_row: int, num_drafts: int = 0) -> ScheduledSequence:
        """The next `count` tokens to compute, which count as computed from here on.

        Where they reach the last token the next one is sampled: the step's `sampled_row`-th. Drafts
        that are computed behind it do not count until they are taken.
        """
        start = self.num_computed_tokens
        stop = self.num_computed_tokens = start + count
        scheduled = ScheduledSequence(
            request_id=self.request_id,
            start=start,
            num_tokens=count + num_drafts,
            sampling=self._next_input() if stop == self.num_tokens else None,
            prompt_logprobs=self._prompt_logprobs_input(start, stop),
        )
        if scheduled.sampling is not None:
            self.num_tokens += 1
            self._sampled_row = sampled_row
        return scheduled

    def take(self, scheduled: ScheduledSequence, output: SequenceOutput) -> None:
        """Takes what is known of a computed chunk, and the tokens sampled after it."""
        if output.prompt_logprobs:
            assert scheduled.prompt_logprobs is not None
            first = scheduled.prompt_logprobs.first
            self.num_prompt_logprobs = first + len(output.prompt_logprobs)
        token_ids = output.token_ids
        for token_id in token_ids:
            self.tokens.append(token_id)
        if self.matcher is not None:
            self.matcher.push(*token_ids)
        self.num_tokens += len(output.after_drafts)
        self.num_computed_tokens += len(output.after_drafts)
        if output.is_late:
            self.num_tokens -= 1
            self.num_computed_tokens -= 1

    def _prompt_logprobs_input(self, start: int, stop: int) -> PromptLogprobsInput | None:
        count = self.request.params.prompt_logprobs
        if count is None or not self.prompt_logprobs_due:
            return None
        first = max(start, self.num_prompt_logprobs)
        followers = self.tokens.prompt[first + 1 : stop + 1]
        return PromptLogprobsInput(followers, count, first) if len(followers) else None

    def _banned_after(self, num_tokens: int) -> tuple[int, ...]:
        """What may not follow that many tokens: what ends the answer too, while it is too short."""
        length = num_tokens - self.tokens.num_prompt_tokens
        banned = self.suppressed.always if length else self.suppressed.first
        return banned if length >= self.request.params.min_tokens else banned + self.end_token_ids

    def _next_input(self) -> SamplingInput:
        banned = self._banned_after(self.num_tokens)
        if self.matcher is not None and self.computes_once:
            self.matcher.wait()  # Where the answer was held, it is known.
        mask = None if self.matcher is None else self.matcher.mask(banned)
        return self._sampling_input(self.tokens, banned, mask)

    def _sampling_input(
        self, tokens: TokenBuffer, banned: tuple[int, ...], mask: TokenMask | None
    ) -> SamplingInput:
        if mask is not None:
            # Where the grammar is complete nothing but the end may follow, however short it is.
            return dataclasses.replace(self._sampling, tokens=tokens, mask=mask)
        if not banned and tokens is self.tokens:
            return self._sampling
        return dataclasses.replace(self._sampling, tokens=tokens, banned_token_ids=banned)
