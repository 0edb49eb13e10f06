"""OpenVINO GenAI's continuous batching with its prefix cache, step by step, greedy.

It is what its `LLMPipeline` runs when it gets a `SchedulerConfig`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino_genai as genai
from openvino import Tensor

from contenders.engine_steps import EngineSteps

_BLOCK_SIZE = 32


class Contender(EngineSteps):
    """`properties` are those of the device."""

    def __init__(
        self,
        *,
        model: str,
        threads: int,
        max_tokens: int,
        max_seqs: int,
        properties: dict[str, Any],
    ) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = max_tokens
        scheduler.max_num_seqs = max_seqs
        scheduler.num_kv_blocks = max_tokens // _BLOCK_SIZE + 64
        device = {"INFERENCE_NUM_THREADS": threads, **properties}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", device)
        self._numbers = itertools.count()
        self.version = f"OpenVINO GenAI {genai.get_version()}, {device}"

    def end(self) -> list[int]:
        for handle in self._batch:
            handle.stop()
        self._pipeline.step()
        return self._tokens

    def _added(self, prompt: Sequence[int], max_tokens: int) -> genai.GenerationHandle:
        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True)
        tokens = Tensor(np.array([prompt], np.int64))
        return self._pipeline.add_request(next(self._numbers), tokens, config)

    def _step(self, requests: Sequence[genai.GenerationHandle]) -> int:
        self._pipeline.step()
        found = [output.generated_ids for one in requests for output in one.read().values()]
        if [len(tokens) for tokens in found] != [1] * len(requests):
            raise RuntimeError(f"{len(requests)} tokens were due in this step: {found}")
        return int(found[0][0])
