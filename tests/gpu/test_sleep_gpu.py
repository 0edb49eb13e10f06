"""Sleep gives a GPU's memory back, and captured graphs are made again for the new addresses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prefixcache import LLM, SamplingParams

PROMPT = [*range(20, 60)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BLOCKS = 100_000


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_answers_are_the_same_before_and_after(
    tiny_checkpoint: Callable[..., Path], level: int, enforce_eager: bool
) -> None:
    llm = LLM(
        str(tiny_checkpoint("qwen3", head_dim=128)),
        dtype="bfloat16",
        device="cuda",
        num_blocks=BLOCKS,
        enforce_eager=enforce_eager,
    )
    before = _answer(llm)
    held = torch.cuda.memory_reserved()
    llm.control.sleep(level)
    given_back = held - torch.cuda.memory_reserved()
    assert given_back > BLOCKS * 16 * 2 * 128 * 2 * 2
    llm.control.wake_up()
    assert _answer(llm) == before
    llm.control.update_weights_from_disk(str(tiny_checkpoint("qwen3", head_dim=128, seed=3)))
    assert _answer(llm) != before


def _answer(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
