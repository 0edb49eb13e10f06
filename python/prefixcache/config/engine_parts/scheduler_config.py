"""The flags of the scheduler: the order of starts, and the limits of a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from prefixcache.config.checked import Checked, Fraction, NonNegativeFloat, PositiveInt
from prefixcache.config.engine_parts.flag_values import TokenCount
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError

if TYPE_CHECKING:
    from prefixcache.config.model_config import ModelConfig

SchedulingPolicy = Literal["fcfs", "priority", "cache-aware"]
HitTiers = Literal["memory", "memory,disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Of a step; `max_step_ms` 0 sets no limit."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_step_ms: float


_CPU_LIMITS = StepLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_step_ms=250)
# Those of vLLM: smaller steps leave a GPU idle.
_CUDA_LIMITS = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_step_ms=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Checked):
    """Order of starts and limits of a step. `max_model_len` None takes the model's context length.

    `scheduling_policy` is the order within the turns of API keys: "fcfs" is that of arrival,
    "priority" the same below the priorities that requests bring, which a server refuses otherwise,
    and "cache-aware" starts long hits first, but none before a request ahead of it that has waited
    for `max_queue_delay` seconds.

    A request whose share of cached tokens is below `global_cache_hit_threshold` ends where it
    would start, unless it brings a threshold of its own; tokens in `cache_hit_threshold_tiers`
    count as cached. With `share_in_flight` a request waits, at most `max_wait_steps` steps, for
    blocks that another one is computing.

    While answers are in flight, chunks of prompts are so short that a step takes `max_step_ms` at
    most, as far as earlier steps tell. The limits of a step that are None go by the device.
    """

    scheduling_policy: SchedulingPolicy = flag(
        "fcfs",
        "fcfs serves in order of arrival, API keys in turns; priority lets clients choose who "
        "is first; cache-aware serves the longest hits first.",
        "Scheduling",
    )
    max_queue_delay: NonNegativeFloat = flag(
        30.0,
        "Longest time in seconds that a request may be overtaken under cache-aware scheduling.",
        "Scheduling",
    )
    max_num_seqs: PositiveInt | None = flag(
        None,
        "Most sequences of a step.",
        "Scheduling",
        shown="64 on a CPU, 256 on CUDA",
        common=True,
    )
    max_num_batched_tokens: TokenCount | None = flag(
        None,
        "Most tokens of a step.",
        "Scheduling",
        shown="2048 on a CPU, 8192 on CUDA, 512 where layers have states",
        metavar="<tokens>",
    )
    max_step_ms: NonNegativeFloat | None = flag(
        None,
        "Most milliseconds of a step while answers are in flight; 0 sets no limit.",
        "Scheduling",
        shown="250 on a CPU, 0 on CUDA",
    )
    max_running_per_key: PositiveInt | None = flag(
        None,
        "Most sequences of one API key in a step; others of the key wait.",
        "Scheduling",
        shown="no limit",
    )
    max_model_len: TokenCount | None = flag(
        None,
        "Most tokens of a sequence, as 8192, 8k (8,000) or 8K (8,192).",
        "Model",
        shown="the model's context length",
        metavar="<tokens>",
        common=True,
    )
    global_cache_hit_threshold: Fraction = flag(
        0.0,
        "Requests with a smaller share of cached tokens end where they would start; 0 ends none.",
        "Cache",
    )
    cache_hit_threshold_tiers: HitTiers = flag(
        "memory", "Tiers whose tokens count as cached for a hit threshold.", "Cache"
    )
    share_in_flight: bool = flag(
        True, "Wait for blocks that another request is computing.", "Cache"
    )
    max_wait_steps: PositiveInt = 4096

    def check_together(self) -> None:
        """Raises `FieldError`."""
        limits = self.limits()
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise FieldError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({limits.max_num_seqs}), "
                f"got {limits.max_num_batched_tokens}.",
            )

    def limits(self, device: str = "cpu") -> StepLimits:
        """What is given, and otherwise what is usual with it on a device as "cpu" or "cuda:0"."""
        usual = _CUDA_LIMITS if device.startswith("cuda") else _CPU_LIMITS
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        return StepLimits(
            max_num_seqs=seqs or min(usual.max_num_seqs, tokens or usual.max_num_seqs),
            max_num_batched_tokens=tokens or max(usual.max_num_batched_tokens, seqs or 0),
            max_step_ms=usual.max_step_ms if self.max_step_ms is None else self.max_step_ms,
        )

    def on(self, device: str) -> SchedulerConfig:
        """The same with the limits of that device."""
        return replace(self, **asdict(self.limits(device)))

    def context_length(self, model: ModelConfig) -> int:
        """Most tokens of a sequence. Raises `FieldError` when more is asked than the model has."""
        longest = model.max_context_length
        if self.max_model_len is None:
            return longest
        if self.max_model_len > longest:
            raise FieldError(
                "max_model_len",
                f"must be at most the model's context length of {longest} tokens, "
                f"got {self.max_model_len}.",
            )
        return self.max_model_len
