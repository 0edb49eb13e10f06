"""What is asked of a server: prompts with a shared prefix, and when they are sent.

Prompts are random draws from a pool of a tokenizer's own tokens for plain English words. So they
hold no special token, they are valid for any vocabulary, and two draws of a whole block never
coincide.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from prefixcache.exceptions import ConfigError

# Tokenized once by the target: the source of all prompts' tokens.
SOURCE_TEXT = (
    "The river turned north beyond the old mill, where farmers had stacked wood for winter and "
    "children waited beside a narrow bridge. Nobody could remember which family built the house "
    "first, but every summer visitors asked about its painted windows, heavy doors, and the "
    "garden that reached down to the water. A letter arrived from another country one morning. It "
    "described ships, markets, music in crowded streets, and the long road over the mountains. "
    "She read it twice before answering with questions about weather, trains, bread, the price "
    "of paper, and whether anyone there still played the game they had learned at school."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Sizes in tokens. `prefix_len` tokens are shared by all prompts, `suffix_len` are their own.

    Raises `ConfigError`, naming the field.
    """

    num_requests: int = 16
    prefix_len: int = 1024
    suffix_len: int = 64
    output_len: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("num_requests", 1),
            ("prefix_len", 0),
            ("suffix_len", 0),
            ("output_len", 1),
        ):
            _check_at_least(name, getattr(self, name), low)
        if self.prompt_len == 0:
            raise ConfigError("prefix_len and suffix_len must not both be 0.")

    @property
    def prompt_len(self) -> int:
        """Tokens of each prompt."""
        return self.prefix_len + self.suffix_len

    @property
    def total_len(self) -> int:
        """Tokens of each request at its end."""
        return self.prompt_len + self.output_len


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How requests are sent: at most `concurrency` at once, at `request_rate` a second on average.

    None means without limit. Arrivals at a rate are a Poisson process.
    """

    concurrency: int | None = None
    request_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            _check_at_least("concurrency", self.concurrency, 1)
        if self.request_rate is not None and not 0 < self.request_rate < float("inf"):
            raise ConfigError(f"request_rate must be positive, got {self.request_rate}.")

    def arrivals(self, count: int) -> list[float]:
        """Seconds after the start at which each of `count` requests is due."""
        if self.request_rate is None:
            return [0.0] * count
        draw = random.Random(self.seed)
        due, times = 0.0, list[float]()
        for _ in range(count):
            times.append(due)
            due += draw.expovariate(self.request_rate)
        return times


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to send, how many tokens to ask for, and the salt under which they are cached."""

    token_ids: tuple[int, ...]
    output_len: int
    cache_salt: str | None = None


def make_prompts(config: WorkloadConfig, token_pool: Sequence[int]) -> list[Prompt]:
    """The workload's prompts, drawn from `token_pool`; equal for equal arguments."""
    draw = random.Random(config.seed)
    prefix = _draw_tokens(draw, token_pool, config.prefix_len)
    return [
        Prompt(prefix + _draw_tokens(draw, token_pool, config.suffix_len), config.output_len)
        for _ in range(config.num_requests)
    ]


def _draw_tokens(draw: random.Random, pool: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(draw.choices(pool, k=count))


def _check_at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}.")
