"""Temporary: torch's sampler behind the CPU sampler's interface."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefixcache._core import Cpu
from prefixcache.runner.cuda.sampling.logprobs import compute_logprobs
from prefixcache.runner.cuda.sampling.sampler import sample
from prefixcache.types.request import TokenLogprobs
from prefixcache.types.step_plan import SamplingInput, SequenceOutput


class Sampler:
    def __init__(self, cpu: Cpu) -> None:
        pass

    def sample(self, logits_RV, rows: Sequence[SamplingInput]) -> list[SequenceOutput]:
        return sample(torch.from_numpy(logits_RV), rows)

    def prompt_logprobs(self, logits_RV, followers, count) -> tuple[TokenLogprobs, ...]:
        packed = compute_logprobs(
            torch.from_numpy(logits_RV), torch.tensor(followers).long(), count
        )
        return packed.unpack(packed.numbers.numpy())
