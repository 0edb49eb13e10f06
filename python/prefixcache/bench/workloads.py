"""What is asked of a server: prompts with a shared prefix, and when they are sent.

Prompts are random draws from a pool of a tokenizer's own tokens for plain English words. So they
hold no special token, they are valid for any vocabulary, and two draws of a whole block never
coincide.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from prefixcache.checked import Checked, Count, NonNegativeFloat, PositiveInt
from prefixcache.exceptions import FieldError
from prefixcache.flags import flag

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
class WorkloadConfig(Checked):
    """The prompts. Sizes are in tokens."""

    num_requests: PositiveInt = flag(16, "Requests of each run.", "Benchmark")
    prefix_len: Count = flag(1024, "Prompt tokens that all requests share.", "Benchmark")
    suffix_len: Count = flag(64, "Prompt tokens of each request's own.", "Benchmark")
    output_len: PositiveInt = flag(32, "Tokens generated for each request.", "Benchmark")
    seed: Count = flag(0, "Seed of prompts and arrivals.", "Benchmark")

    def check_together(self) -> None:
        """Raises `FieldError`."""
        if self.prompt_len == 0:
            raise FieldError("suffix_len", "and prefix_len must not both be 0.")

    @property
    def prompt_len(self) -> int:
        """Tokens of each prompt."""
        return self.prefix_len + self.suffix_len

    @property
    def total_len(self) -> int:
        """Tokens of each request at its end."""
        return self.prompt_len + self.output_len


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig(Checked):
    """How requests are sent. Arrivals at a rate are a Poisson process."""

    concurrency: Count = flag(4, "Requests at once; 0: all.", "Benchmark")
    request_rate: NonNegativeFloat = flag(
        0.0, "Requests a second on average (Poisson); 0: no limit.", "Benchmark"
    )
    seed: Count = 0

    def arrivals(self, count: int) -> list[float]:
        """Seconds after the start at which each of `count` requests is due."""
        if not self.request_rate:
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
