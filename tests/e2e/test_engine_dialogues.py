"""The default model on real dialogues: greedy float32 text equals that of transformers.

The dialogues are three of tau-bench's recorded airline chats (MIT, see LICENSE.tau-bench). Request
k of a chat is all that stands before its k-th answer; the recorded answer is what follows, so that
the prompts are the same for every engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixcache import LLM, SamplingParams
from prefixcache.config import DEFAULT_MODEL
from prefixcache.models.hub import is_downloaded, resolve_model

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not is_downloaded(DEFAULT_MODEL), reason="prefixcache download was not run"),
]

DIALOGUES = Path(__file__).parent.parent / "data" / "taubench_airline.jsonl"
NEW_TOKENS = 32


def requests(turns: int) -> list[list[dict[str, Any]]]:
    """The first requests of each dialogue, turn by turn."""
    chats = [json.loads(line)["messages"] for line in DIALOGUES.read_text().splitlines()]
    answers = [[i for i, m in enumerate(chat) if m["role"] == "assistant"] for chat in chats]
    return [chats[c][: answers[c][turn]] for turn in range(turns) for c in range(len(chats))]


@pytest.mark.timeout(600)
def test_greedy_text_equals_that_of_transformers() -> None:
    llm = LLM(DEFAULT_MODEL, dtype="float32", max_model_len=4096, kv_cache_memory=1 << 30)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    results = [llm.chat(messages, params, use_tqdm=False)[0] for messages in requests(turns=1)]
    assert [result.num_cached_tokens > 1000 for result in results] == [False, True, True]
    folder = resolve_model(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for result in results:
        ids = torch.tensor([result.prompt_token_ids])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=None,
            pad_token_id=2,
        )
        assert result.outputs[0].token_ids == expected[0, len(ids[0]) :].tolist()
