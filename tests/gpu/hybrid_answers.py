"""Answers of a tiny hybrid model: cold, on hits and in chunks. `python hybrid_answers.py OPTIONS`.

A process of its own, since batch-invariant matmuls are chosen before CUDA starts. OPTIONS are those
of `LLM` in JSON. Prints how many prompt tokens were hits; fails where a bit of an answer changed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from prefixcache import LLM, SamplingParams

# Longer than the window and than FlashInfer's key tiles, with a beginning that all share.
SHARED = [*range(20, 320)] * 2
PROMPTS = [[*SHARED, *range(40 + i, 90 + 2 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)


def answers(llm: LLM, prompts: list[list[int]]) -> tuple[list[Any], int]:
    """Tokens with their log probabilities, and how many prompt tokens were hits."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    choices = [output.outputs[0] for output in outputs]
    hits = sum(output.num_cached_tokens for output in outputs)
    return [(choice.token_ids, choice.logprobs) for choice in choices], hits


def main(options: dict[str, Any]) -> None:
    """Compares every answer with that of its prompt alone, in an empty cache."""
    llm = LLM(**options)
    cold: list[Any] = []
    for prompt in PROMPTS:
        llm.control.reset_prefix_cache()
        cold += answers(llm, [prompt])[0]
    hit, hits = answers(llm, PROMPTS)
    assert hit == cold, "an answer is another on a hit"
    chunked = LLM(**options, max_num_batched_tokens=70)
    assert answers(chunked, PROMPTS)[0] == cold, "an answer is another in chunks"
    print(hits)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
