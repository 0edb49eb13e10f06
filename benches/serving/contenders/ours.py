"""prefixcache's engine, step by step, with its scheduler and sampler."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from prefixcache import __version__
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.engine.build import build
from prefixcache.kv.specs import kv_layout
from prefixcache.models.hub import resolve_model
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams


class Contender:
    def __init__(self, *, threads: int, max_tokens: int, max_seqs: int, **flags: Any) -> None:
        folder = resolve_model(flags["model"])
        model = ModelConfig.from_hf(folder)
        block_size = EngineConfig().for_model(model).cache.block_size
        groups = kv_layout(model, block_size, itemsize=2).groups
        config = EngineConfig.from_flags(
            num_blocks=(max_tokens // block_size + 64) * len(groups),
            max_num_batched_tokens=max_tokens,
            max_num_seqs=max_seqs,
            max_step_ms=0,
            cpu_threads=threads,
            **flags,
        )
        self._engine = build(config, folder).engine
        self._numbers = itertools.count()
        self.version = f"prefixcache {__version__}, torch {torch.__version__}"

    def weight_bytes(self) -> int:
        weights = self._engine.control.weights_info()
        assert weights is not None
        return weights.bytes

    def ttft(self, prompt: list[int], first: list[int], second: list[int]) -> dict[str, float]:
        self._engine.control.reset_prefix_cache()
        cold = self._first_token(prompt + first)
        return {"cold": cold, "warm": self._first_token(prompt + second)}

    def begin(self, prompts: list[list[int]], max_steps: int) -> None:
        self._engine.control.reset_prefix_cache()
        self._batch = [self._request(prompt, max_steps + 2) for prompt in prompts]
        for request in self._batch:
            self._engine.add_request(request)
        self._tokens = [self._step_batch()]

    def go_on(self, steps: int) -> float:
        begun = time.perf_counter()
        self._tokens += [self._step_batch() for _ in range(steps)]
        return time.perf_counter() - begun

    def end(self) -> list[int]:
        self._engine.abort([request.request_id for request in self._batch])
        return self._tokens

    def _first_token(self, prompt: Sequence[int]) -> float:
        begun = time.perf_counter()
        self._engine.add_request(self._request(prompt, 1))
        self._step(1)
        return time.perf_counter() - begun

    def _step_batch(self) -> int:
        return self._step(len(self._batch))[self._batch[0].request_id]

    def _step(self, expected: int) -> dict[str, int]:
        """One step, in which each of the `expected` requests gets a token."""
        outputs = self._engine.step()
        if [len(output.token_ids) for output in outputs] != [1] * expected:
            raise RuntimeError(f"{expected} tokens were due in this step: {outputs}")
        return {output.request_id: output.token_ids[0] for output in outputs}

    def _request(self, prompt: Sequence[int], max_tokens: int) -> Request:
        return Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
        )
