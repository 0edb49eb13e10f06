"""transformers' own model, SDPA attention and a growing cache, greedy, without its generate loop.

That is its fastest plain form on CPU. Warm means that the caller kept `past_key_values`; copying
them, which every reuse needs, is not counted.
"""

from __future__ import annotations

import copy
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache


class Contender:
    def __init__(self, *, model: str, dtype: str, threads: int, max_tokens: int) -> None:  # noqa: ARG002
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def prefill(self, prompt: list[int]) -> float:
        begun = time.perf_counter()
        self._forward(torch.tensor([prompt]), DynamicCache())
        return time.perf_counter() - begun

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, object]:
        cache = DynamicCache()
        rows = [self._forward(torch.tensor(prompts), cache)]
        begun = time.perf_counter()
        for _ in range(steps):
            rows.append(self._forward(rows[-1], cache))
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "tokens": [int(tokens[0]) for tokens in rows]}

    def ttft(self, prompt: list[int], first: list[int], second: list[int]) -> dict[str, float]:
        cold = self.prefill(prompt + first)
        kept = DynamicCache()
        self._forward(torch.tensor([prompt]), kept)
        cache = copy.deepcopy(kept)
        begun = time.perf_counter()
        self._forward(torch.tensor([second]), cache)
        return {"cold": cold, "warm": time.perf_counter() - begun}

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Next token of each row, [rows, 1]."""
        logits = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)
