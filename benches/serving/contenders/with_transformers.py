"""transformers' own model, SDPA attention and a growing cache, greedy, without its generate loop.

That is its fastest plain form on CPU. Warm means that the caller kept `past_key_values` and cuts
them back; copying them, which every reuse by a second request needs, is not counted.
"""

from __future__ import annotations

import time

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache


class Contender:
    def __init__(self, *, model: str, dtype: str, threads: int, **_: object) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def ttft(self, prompt: list[int], first: list[int], second: list[int]) -> dict[str, float]:
        cache = DynamicCache()
        cold = self._timed(prompt + first, cache)
        cache.crop(-len(first))
        return {"cold": cold, "warm": self._timed(second, cache)}

    def begin(self, prompts: list[list[int]], max_steps: int) -> None:  # noqa: ARG002
        self._cache = DynamicCache()
        self._rows = [self._forward(torch.tensor(prompts), self._cache)]

    def go_on(self, steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            self._rows.append(self._forward(self._rows[-1], self._cache))
        return time.perf_counter() - begun

    def end(self) -> list[int]:
        return [int(tokens[0]) for tokens in self._rows]

    def _timed(self, prompt: list[int], cache: DynamicCache) -> float:
        begun = time.perf_counter()
        self._forward(torch.tensor([prompt]), cache)
        return time.perf_counter() - begun

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Next token of each row, [rows, 1]."""
        logits = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)
