"""Each contender alone, one after the other: prefill of 1,024, decode of 1 and of 8 at 128.

    python benches/serving/once.py LLAMA_PYTHON GGUF BF16_GGUF

One round after a warm-up: under a minute, where `compare.py` takes turns and medians.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import compare

STEPS = 16


def main(llama_python: str, *files: str) -> None:
    folder = compare.resolve_model(compare.DEFAULT_MODEL)
    tokenizer = compare.Tokenizer.from_folder(folder)
    pool = tokenizer.encode(compare.SOURCE_TEXT, add_special_tokens=False)
    shared = {"threads": 2, "max_tokens": 9216}
    entries = list(compare.torch_entries(folder, ["bfloat16"], shared))
    entries += [
        compare.Entry(Path(f).name, "with_llama_cpp", {**shared, "model": f}, llama_python)
        for f in files
    ]
    draw = random.Random(1)
    prompts = [draw.choices(pool, k=1024) for _ in range(8)]
    for entry in entries:
        if "not invariant" not in entry.label:
            measure(entry, prompts)


def measure(entry: compare.Entry, prompts: list[list[int]]) -> None:
    short = [prompt[:128] for prompt in prompts]
    with compare.started(entry) as worker:
        worker("prefill", prompt=prompts[0])
        prefill = 1024 / worker("prefill", prompt=prompts[1])
        one = STEPS / worker("decode", prompts=short[:1], steps=STEPS)["seconds"]
        eight = 8 * STEPS / worker("decode", prompts=short, steps=STEPS)["seconds"]
    print(f"{entry.label}: {prefill:.0f}, {one:.1f}, {eight:.1f} tok/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
