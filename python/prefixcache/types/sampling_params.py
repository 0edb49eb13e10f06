"""How the next token of a request is chosen, and when the request ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from prefixcache.config.checked import shown
from prefixcache.exceptions import wrong
from prefixcache.types.pooling import Pooling
from prefixcache.types.structured_output import StructuredOutput

MAX_LOGPROBS = 20
# Beyond these a logit that is divided or multiplied may overflow.
REPETITION_PENALTIES = (0.01, 100.0)
_TEMPERATURE_FLOOR = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request, with OpenAI's names and vLLM's additions.

    Raises `InvalidRequestError`, naming the field, for a value out of range.
    `temperature` 0 is greedy, and so is `top_p` 0. `top_k` 0 or -1 keeps every token. `logprobs`
    and `prompt_logprobs` are counts of alternatives; 0 gives the chosen token's alone. Of the
    prompt, those of the first `logprob_start_len` tokens are left out, and may be hits. The
    answer's text follows `structured_output`. `max_tokens` 0 computes the prompt, and answers
    nothing; with `pooling` it answers what that asks for.
    `stop`, `stop_token_ids` and `bad_words` may be lists, None, or one text, as in vLLM.

    Where `allowed_token_ids` is given, no other token is chosen. The answer holds none of
    `bad_words`, as long as another token may be chosen. They act by their token ids, which
    `tokenizer.with_bad_words` finds; sequences of ids may be given instead.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        _in_range("n", self.n, 1, 128)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("top_k", self.top_k, -1, None)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        _in_range("min_tokens", self.min_tokens, 0, None)
        _in_range("logprob_start_len", self.logprob_start_len, 0, None)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _in_range(name, count, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**64 - 1)
        self._check_lengths()
        for token_id, bias in self.logit_bias.items():
            _in_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if any(not text for text in self.stop):
            raise wrong("stop", "must not hold an empty string")
        self._check_words()

    def _check_lengths(self) -> None:
        if self.pooling is not None and self.max_tokens != 0:
            raise wrong("pooling", "needs max_tokens=0")
        if self.max_tokens is None:
            return
        _in_range("max_tokens", self.max_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise wrong(
                "min_tokens", f"({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )

    def _check_words(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise wrong("allowed_token_ids", "must not be empty")
        if self.allowed_token_ids is not None and self.structured_output is not None:
            raise wrong("allowed_token_ids", "and structured output exclude each other")
        if any(not word.strip() for word in self.bad_words) or not all(self.bad_words_token_ids):
            raise wrong("bad_words", "must not hold an empty word")

    def for_choice(self, index: int) -> SamplingParams:
        """Options of choice number `index` of the `n`: its seed is `seed + index`."""
        seed = None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63
        choice = copy(self)  # not `replace`: nothing of it need be checked again
        object.__setattr__(choice, "n", 1)
        object.__setattr__(choice, "seed", seed)
        return choice

    def most_tokens(self, room: int) -> int | None:
        """`max_tokens`, or `room` where that is less: a token at least, if one is wanted."""
        if self.max_tokens is None:
            return None
        return min(self.max_tokens, max(room, 1))

    def shortened(self, max_tokens: int | None) -> SamplingParams:
        """The options with that `max_tokens`, and no more `min_tokens` than these."""
        if max_tokens is None or max_tokens == self.max_tokens:
            return self
        return replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))

    @property
    def num_unscored(self) -> int | None:
        """Tokens of the prompt that its log probabilities leave to the cache; None without any."""
        return None if self.prompt_logprobs is None else max(self.logprob_start_len - 1, 0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < _TEMPERATURE_FLOOR or not self.top_p


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(() if value is None else value)


def _in_range(
    name: str,
    value: float,
    low: float,
    high: float | None,
) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong(name, f"must be a number, got {shown(value)}")
    finite = abs(value) <= sys.float_info.max  # not so for NaN
    too_high = high is not None and value > high
    if not finite or value < low or too_high:
        bounds = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        got = value if finite else "one that no float holds"
        raise wrong(name, f"must be a number {bounds}, got {got}")
