"""The default model on real dialogues: greedy float32 text equals that of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixcache import LLM, SamplingParams
from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.models.hub import is_downloaded, resolve_model
from support.dequantized import save_dequantized
from support.dialogues import read_dialogues, requests_of
from support.tiny_models import is_greedy

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not is_downloaded(DEFAULT_MODEL), reason="prefixcache download was not run"),
]

# Tokens of the policy that all share, at least, and of an answer.
SHARED, NEW_TOKENS = 1_000, 32


@pytest.mark.long  # test_default_model.py compares short texts.
def test_greedy_text_equals_that_of_transformers(tmp_path: Path) -> None:
    flags = {"dtype": "float32", "cpu_activations": "exact", "max_model_len": 4096}
    llm = LLM(DEFAULT_MODEL, **flags, kv_cache_memory=1 << 30)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    first_requests = [requests_of(chat)[0] for chat in read_dialogues(None)[:3]]
    results = [llm.chat(messages, params, use_tqdm=False)[0] for messages in first_requests]
    assert [result.num_cached_tokens > SHARED for result in results] == [False, True, True]
    dense = save_dequantized(resolve_model(DEFAULT_MODEL), tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    for result in results:
        answer = result.outputs[0].token_ids
        assert len(answer) == NEW_TOKENS
        assert is_greedy(model, result.prompt_token_ids, answer)
