"""vLLM's CPU backend: its engine in one process, step by step, greedy, with its prefix cache."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import torch
import vllm
from vllm import platforms
from vllm.platforms.cpu import CpuPlatform

from contenders.engine_steps import EngineSteps


class Contender(EngineSteps):
    def __init__(
        self, *, model: str, dtype: str, threads: int, max_tokens: int, max_seqs: int
    ) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        vars(platforms)["_current_platform"] = CpuPlatform()  # It looks for a package named vllm.
        torch.set_num_threads(threads)
        self._engine = vllm.LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=max_tokens,
            kv_cache_memory_bytes=2 << 30,
        ).llm_engine
        self._numbers = itertools.count()
        self.version = f"vLLM {vllm.__version__}, torch {torch.__version__}"

    def end(self) -> list[int]:
        self._engine.abort_request(self._batch)
        return self._tokens

    def _added(self, prompt: Sequence[int], max_tokens: int) -> str:
        params = vllm.SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=False
        )
        params.output_kind = params.output_kind.DELTA
        name = str(next(self._numbers))
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return name

    def _step(self, requests: Sequence[str]) -> int:
        found = {one.request_id: one.outputs[0].token_ids for one in self._engine.step()}
        if [len(found.get(name, ())) for name in requests] != [1] * len(requests):
            raise RuntimeError(f"{len(requests)} tokens were due in this step: {found}")
        return int(found[requests[0]][0])
