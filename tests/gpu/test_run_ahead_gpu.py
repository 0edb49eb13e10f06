"""Steps planned ahead of the device give the answers of steps that are read one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from prefixcache import LLM, SamplingParams
from prefixcache.runner.torch.batch import resolve_pending

PROMPTS = [[*range(20 + i, 60 + i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_answers_do_not_depend_on_run_ahead(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    """Five answers of one length: both runs compute the same batches, and so the same bits."""
    resolve = mock.Mock(side_effect=resolve_pending)
    monkeypatch.setattr("prefixcache.runner.torch.batch.resolve_pending", resolve)
    llm = LLM(
        str(tiny_checkpoint("qwen3", head_dim=128)),
        dtype="bfloat16",
        device="cuda",
        num_blocks=500,
        enforce_eager=enforce_eager,
    )
    answers = []
    for ahead in (False, True):
        assert resolve.call_count == 0
        llm._engine._steps._runner.steps.runs_ahead = ahead
        llm.control.reset_prefix_cache()
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert resolve.call_count > 50
