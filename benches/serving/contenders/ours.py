"""prefixcache's engine, step by step, with its scheduler and sampler.

The variable PREFIXCACHE_CPU_INSTRUCTIONS sets its kernels' instruction set, as for the server.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch

from contenders.engine_steps import EngineSteps
from prefixcache import __version__
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.model_config import ModelConfig
from prefixcache.engine.build import build
from prefixcache.kv.specs import kv_layout
from prefixcache.models.hub import resolve_model
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams


class Contender(EngineSteps):
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
            cpu_instructions=os.environ.get("PREFIXCACHE_CPU_INSTRUCTIONS"),
            **flags,
        )
        self._engine = build(config, folder).engine
        self._numbers = itertools.count()
        self.version = f"prefixcache {__version__}, torch {torch.__version__}"

    def weight_bytes(self) -> int:
        weights = self._engine.control.weights_info()
        assert weights is not None
        return weights.bytes

    def _reset(self) -> None:
        self._engine.control.reset_prefix_cache()

    def end(self) -> list[int]:
        self._engine.abort([request.request_id for request in self._batch])
        return self._tokens

    def _added(self, prompt: Sequence[int], max_tokens: int) -> Request:
        request = Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
        )
        self._engine.add_request(request)
        return request

    def _step(self, requests: Sequence[Request]) -> int:
        outputs = self._engine.step()
        if [len(output.token_ids) for output in outputs] != [1] * len(requests):
            raise RuntimeError(f"{len(requests)} tokens were due in this step: {outputs}")
        found = {output.request_id: output.token_ids[0] for output in outputs}
        return found[requests[0].request_id]
