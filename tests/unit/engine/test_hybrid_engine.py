"""An engine on a model that mixes full attention with windows: what its pool holds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from equality import with_windows
from prefixcache.config.engine_config import EngineConfig
from prefixcache.engine.build import BuiltEngine, build
from prefixcache.exceptions import ConfigError
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams

BLOCK, CHUNK, WINDOW = 16, 32, 33
CONTEXT = 512
TinyCheckpoint = Callable[..., Path]


def built(folder: Path, num_blocks: int, **flags: object) -> BuiltEngine:
    config = EngineConfig.from_flags(
        model=str(folder),
        device="cpu",
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=4,
        **flags,
    )
    return build(config, folder)


def answer(engine: BuiltEngine, prompt: list[int]) -> list[tuple[int, float]]:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    engine.engine.add_request(Request(request_id="a", prompt_token_ids=prompt, params=params))
    outputs = []
    while engine.engine.has_unfinished():
        outputs += engine.engine.step()
    assert [output.error for output in outputs] == [None] * len(outputs)
    tokens = [(t, p.logprob) for o in outputs for t, p in zip(o.token_ids, o.logprobs, strict=True)]
    assert len(tokens) == 4
    return tokens


@pytest.mark.parametrize(("num_full", "pool"), [(1, 1 + 32 + 2 * 6), (0, 1 + 6)])
def test_a_prompt_of_the_whole_context_runs_in_a_pool_of_its_blocks_and_windows(
    tiny_checkpoint: TinyCheckpoint, num_full: int, pool: int
) -> None:
    """Window groups hold six blocks each: a chunk, the window and one below it, and one begun."""
    folder = tiny_checkpoint("qwen3", **with_windows(WINDOW, num_full=num_full))
    prompt = [3 + i * 7 % 380 for i in range(CONTEXT - 4)]
    small, large = built(folder, pool), built(folder, 200)
    assert (small.max_model_len, large.max_model_len) == (CONTEXT, CONTEXT)
    expected = answer(large, prompt)
    assert answer(small, prompt) == expected
    assert answer(large, prompt) == expected, "a hit"
    assert answer(small, prompt) == expected
    assert large.engine.metrics.gauges().num_hit_tokens > 0
    assert built(folder, pool - 1).max_model_len < CONTEXT


def test_the_context_is_what_the_pool_holds_in_all_groups(tiny_checkpoint: TinyCheckpoint) -> None:
    folder = tiny_checkpoint("qwen3", **with_windows(WINDOW))
    assert built(folder, 200, max_model_len=400).max_model_len == 400
    with pytest.raises(ConfigError, match=r"holds 80 tokens \(15 blocks of 16\)"):
        built(folder, 16, max_model_len=400)
    with pytest.raises(ConfigError, match="or lower --max-model-len or --max-num-batched-tokens"):
        built(folder, 3)


def test_the_start_line_says_groups_where_there_are_several(tiny_checkpoint, caplog):
    caplog.set_level(logging.INFO, "prefixcache")
    built(tiny_checkpoint("qwen3", **with_windows(WINDOW)), 200)
    assert "GiB) for 3 groups of layers (full 1, window 2; size 1, padded 0), pref" in caplog.text
    caplog.clear()
    built(tiny_checkpoint("qwen3", **with_windows(WINDOW, num_full=0)), 200)
    assert "GiB), prefix cache" in caplog.text


def test_prompts_share_a_prefix_where_all_layers_have_a_window(tiny_checkpoint):
    """The second request finds it: no full attention tells where prompts part."""
    folder = tiny_checkpoint("qwen3", **with_windows(WINDOW, num_full=0))
    engine, prefix = built(folder, 200), [3 + i * 7 % 380 for i in range(10 * BLOCK)]
    answer(engine, [*prefix, 1])
    expected = answer(built(folder, 200), [*prefix, 2])
    assert answer(engine, [*prefix, 2]) == expected
    assert engine.engine.metrics.gauges().num_hit_tokens == len(prefix)
    answer(engine, [*prefix[: 7 * BLOCK + 3], 4])
    assert engine.engine.metrics.gauges().num_hit_tokens == len(prefix) + 7 * BLOCK
