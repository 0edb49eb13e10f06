"""An engine on a tiny LFM2: what its convolutions keep, where requests resume, and the bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from equality import LFM2
from prefixcache.config.engine_config import EngineConfig
from prefixcache.engine.build import BuiltEngine, build
from prefixcache.exceptions import FieldError
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import InFlightStep, StepPlan

BLOCK = 16
TinyCheckpoint = Callable[..., Path]
Said = list[tuple[int, float]]


@pytest.fixture
def folder(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("lfm2", max_position_embeddings=4096, **LFM2)


def built(folder: Path, num_blocks: int = 400, **flags: object) -> BuiltEngine:
    options = {"block_size": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 4} | flags
    config = EngineConfig.from_flags(
        model=str(folder), device="cpu", num_blocks=num_blocks, **options
    )
    return build(config, folder)


def answer(
    engine: BuiltEngine, prompt: list[int], num_tokens: int = 20, **cache: bool
) -> tuple[Said, int]:
    """Tokens and log probabilities, and how much of the prompt was cached."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    request = Request(
        request_id="a", prompt_token_ids=prompt, params=params, cache=CacheOptions(**cache)
    )
    engine.engine.add_request(request)
    outputs = []
    while engine.engine.has_unfinished():
        outputs += engine.engine.step()
    assert [output.error for output in outputs] == [None] * len(outputs)
    said = [(t, p.logprob) for o in outputs for t, p in zip(o.token_ids, o.logprobs, strict=True)]
    assert len(said) == num_tokens
    return said, outputs[0].num_cached_tokens


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 384, count).tolist()


def test_turns_of_a_chat_compute_their_message_and_at_most_a_block(folder: Path) -> None:
    engine, cold = built(folder), built(folder, enable_prefix_caching=False)
    message = history = tokens(100)
    for turn in range(8):
        said, cached = answer(engine, history, num_tokens=25)
        assert said == answer(cold, history, num_tokens=25)[0]
        # The last token of an answer was sampled, and not computed.
        assert turn == 0 or len(history) - cached <= len(message) + 1 + BLOCK
        message = tokens(30 + turn, seed=turn)
        history = [*history, *(token for token, _ in said), *message]


@pytest.mark.parametrize(("num_blocks", "expected"), [(400, [96, 96, 96]), (34, [48, 96, 96])])
def test_requests_resume_where_prompts_part(
    folder: Path, num_blocks: int, expected: list[int]
) -> None:
    """From the second on while there is room for all, from the third on where there is little."""
    engine, cold = built(folder, num_blocks), built(folder, enable_prefix_caching=False)
    prefix, hits = tokens(100), list[int]()
    answer(engine, prefix + tokens(40))
    for number in range(3):
        answer(engine, tokens(200, seed=90 + number), write=False)
        prompt = prefix + tokens(40, seed=1 + number)
        said, cached = answer(engine, prompt)
        assert said == answer(cold, prompt)[0]
        hits.append(cached)
    assert hits == expected
    missed = engine.engine.metrics.gauges().num_window_missed_tokens
    assert missed == sum(96 - hit for hit in hits)


def test_a_long_prompt_holds_a_chunk_of_convolutions_and_leaves_its_anchors(folder: Path) -> None:
    """4,000 tokens: 251 blocks of attention with the answer, and few of the convolutions."""
    most = 251 + 64 // BLOCK + 3
    engine = built(folder, num_blocks=1 + most, max_model_len=4008)
    prompt, held = tokens(4000), list[int]()
    submit = engine.engine._runner.submit

    def watched(plan: StepPlan) -> InFlightStep:
        cache = engine.engine._cache
        held.append(cache.num_usable_blocks - cache.num_free_blocks)
        return submit(plan)

    engine.engine._runner.submit = watched  # type: ignore[method-assign]
    said, _ = answer(engine, prompt, num_tokens=8)
    assert max(held) <= most
    # Another request takes what no anchor needs.
    answer(engine, tokens(10, seed=9), num_tokens=2)
    assert answer(engine, prompt, num_tokens=8) == (said, 3984)


def test_no_bit_changes_over_sleep_and_other_sizes_of_the_pool(folder: Path) -> None:
    engine = built(folder, kv_cache_max_memory="64MiB")
    prompt = tokens(150)
    said, _ = answer(engine, prompt)
    pool = engine.engine._pool
    assert pool is not None
    for size in (40, 300, 24):
        assert engine.engine.control.resize(num_blocks=size).is_done
        assert answer(engine, prompt) == (said, 144), size
    engine.engine.control.sleep()
    engine.engine.control.wake_up()
    assert answer(engine, prompt) == (said, 0)
    assert answer(engine, prompt) == (said, 144)


def test_another_process_resumes_from_kept_blocks(folder: Path, tmp_path: Path) -> None:
    """Not where it computes with other instructions, whose blocks have other hashes."""
    prompt, said = tokens(150), []
    for form, cached in (None, 0), ("portable", 0), (None, 144):
        engine = built(folder, kv_cache_dir=str(tmp_path / "kept"), cpu_instructions=form)
        said.append(answer(engine, prompt))
        assert said[-1][1] == cached
        file = engine.engine._runner.kv_specs().file
        assert file is not None
        new = engine.engine.control.stats()["cached_blocks"] - file.num_restored
        while file.core.counts()["kept"] < new:
            pass
        engine.engine.close()
        file.close()
    assert said[0][0] == said[2][0]


def test_the_start_line_names_convolutions(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefixcache")
    built(folder)
    assert "for 2 groups of layers (full 1, window 0, convolution 1; size 2," in caplog.text


def test_blocks_that_are_too_small_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(FieldError, match="block_size must be at least 5 for this model's conv"):
        built(folder, block_size=4)


@pytest.mark.parametrize("fault", ["exchanged", "late"])
def test_a_planted_fault_changes_hits_alone(folder: Path, fault: str) -> None:
    """Inputs of another layer, or those of the token after: a cold run reads none of them."""
    engine = built(folder, max_num_batched_tokens=1024)
    prompt = tokens(150)
    said, _ = answer(engine, prompt, num_tokens=1)
    if fault == "exchanged":
        caches = engine.engine._runner._steps._kernels.caches
        caches[0], caches[1] = caches[1], caches[0]
    else:
        _shift(engine)
    assert answer(engine, prompt, num_tokens=1)[0] != said


def _shift(engine: BuiltEngine) -> None:
    """Every block has the inputs of each convolution one token late."""
    kv = engine.engine._runner.kv
    group = kv.layout.groups[1]
    for number in range(len(group.layers)):
        tensor, part = group.part(number)
        rows: npt.NDArray[np.float32] = kv.rows()[tensor].view(np.float32)
        inputs = rows[:, part].reshape(len(rows), group.kept_tokens, -1)
        rows[:, part] = np.roll(inputs, 1, axis=1).reshape(len(rows), -1)
