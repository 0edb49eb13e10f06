"""llama.cpp's prompt lookup through llama-cpp-python's own generate loop, greedy, next to none.

A task comes as JSON on stdin: model, threads, max_tokens, prompts, longest, and numbers of guesses
(`most`), the best of which counts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def decode(llama: Llama, prompt: list[int], longest: int) -> float:
    """Tokens a second after the first one."""
    llama.reset()
    tokens = llama.generate(prompt, temp=0.0, top_k=1)
    next(tokens)
    begun = time.perf_counter()
    for _ in range(longest - 1):
        next(tokens)
    return (longest - 1) / (time.perf_counter() - begun)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = json.load(sys.stdin)
    threads = task["threads"]
    options = {"n_ctx": task["max_tokens"], "n_threads": threads, "n_threads_batch": threads}
    plain = Llama(task["model"], verbose=False, **options)
    lookup = LlamaPromptLookupDecoding(max_ngram_size=2)
    guessing = Llama(task["model"], verbose=False, draft_model=lookup, logits_all=True, **options)
    rounds: dict[int, dict[str, list[float]]] = {}
    for most in task["most"]:
        lookup.num_pred_tokens = most
        found = rounds[most] = {"plain": [], "guessed": [], "ratios": []}
        for prompt in task["prompts"]:
            speeds = [decode(llama, prompt, task["longest"]) for llama in (plain, guessing)]
            for name, value in zip(found, [*speeds, speeds[1] / speeds[0]], strict=True):
                found[name].append(round(value, 4))
    best = max(rounds.values(), key=lambda found: statistics.median(found["ratios"]))
    replies.write(json.dumps(best))


if __name__ == "__main__":
    main()
