"""Engines on a tiny Qwen3.5 and LFM2: what states and convolutions keep, where requests resume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from equality import GRAMMARS, LFM2, WIDE
from prefixcache.config.engine_config import EngineConfig
from prefixcache.engine.build import BuiltEngine, build
from prefixcache.exceptions import FieldError
from prefixcache.kv.specs import GroupKind, KVGroup
from prefixcache.runner.cpu.kv_memory import KVMemory
from prefixcache.text.grammar.answer_matcher import AnswerMatcher
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import InFlightStep, StepPlan

BLOCK = 16
TinyCheckpoint = Callable[..., Path]
Said = list[tuple[int, float]]


@pytest.fixture
def folder(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("qwen3.5", max_position_embeddings=4096, **WIDE)


@pytest.fixture
def conv_folder(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("lfm2", max_position_embeddings=4096, **LFM2)


@pytest.fixture(params=["folder", "conv_folder"])
def any_folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def _hit_of_150(folder: Path) -> int:
    """Tokens of a prompt of 150: a state is kept eight tokens before its end, a window twice."""
    return 144 if "lfm2" in folder.name else 128


def built(folder: Path, num_blocks: int = 2000, **flags: object) -> BuiltEngine:
    options = {"block_size": BLOCK, "state_block_size": BLOCK, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 64, "num_blocks": num_blocks} | flags
    return build(EngineConfig.from_flags(model=str(folder), device="cpu", **options), folder)


def requested(
    name: str, prompt: list[int], num_tokens: int, *, guided: bool = False, **cache: bool
) -> Request:
    params = SamplingParams(
        max_tokens=num_tokens,
        temperature=0.0,
        ignore_eos=True,
        logprobs=0,
        structured_output=GRAMMARS[1] if guided else None,
    )
    return Request(
        request_id=name, prompt_token_ids=prompt, params=params, cache=CacheOptions(**cache)
    )


def serve(engine: BuiltEngine, requests: list[Request]) -> dict[str, tuple[Said, int]]:
    """Of each request tokens and log probabilities, and how much of its prompt was cached."""
    for request in requests:
        engine.engine.add_request(request)
    outputs = []
    while engine.engine.has_unfinished():
        outputs += engine.engine.step()
    assert [output.error for output in outputs] == [None] * len(outputs)
    answers = dict[str, tuple[Said, int]]()
    for request in requests:
        own = [output for output in outputs if output.request_id == request.request_id]
        said = [(t, p.logprob) for o in own for t, p in zip(o.token_ids, o.logprobs, strict=True)]
        answers[request.request_id] = said, own[0].num_cached_tokens
    return answers


def answer(
    engine: BuiltEngine, prompt: list[int], num_tokens: int = 20, **cache: bool
) -> tuple[Said, int]:
    return serve(engine, [requested("a", prompt, num_tokens, **cache)])["a"]


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 384, count).tolist()


def test_turns_of_a_chat_compute_their_message_and_at_most_a_block(any_folder: Path) -> None:
    engine, cold = built(any_folder), built(any_folder, enable_prefix_caching=False)
    message = history = tokens(100)
    for turn in range(8):
        said, cached = answer(engine, history, num_tokens=25)
        assert said == answer(cold, history, num_tokens=25)[0]
        # The last token of an answer was sampled, and not computed.
        assert turn == 0 or len(history) - cached <= len(message) + 1 + BLOCK
        message = tokens(30 + turn, seed=turn)
        history = [*history, *(token for token, _ in said), *message]


@pytest.mark.slow
def test_requests_with_a_long_common_prefix_hit_one_after_another_and_together(
    folder: Path,
) -> None:
    """1,500 of 2,200 tokens: all but the first two hit, whatever is kept at multiples of more."""
    prefix = tokens(1500)
    prompts = [prefix + tokens(700, seed=1 + number) for number in range(8)]
    engine = built(folder, num_blocks=12_000, max_num_batched_tokens=512)
    cached = [answer(engine, prompt, num_tokens=1)[1] for prompt in prompts]
    assert sum(hit >= 1500 - BLOCK for hit in cached) >= len(prompts) - 2
    engine = built(folder, num_blocks=12_000, max_num_batched_tokens=512, max_num_seqs=8)
    requests = [requested(str(i), prompt, 1) for i, prompt in enumerate(prompts)]
    computed = sum(len(r.prompt_token_ids) for r in requests)
    computed -= sum(cached for _, cached in serve(engine, requests).values())
    assert computed <= 2 * 1500 + 8 * (700 + BLOCK)


@pytest.mark.parametrize(("num_blocks", "expected"), [(400, [96, 96, 96]), (34, [48, 96, 96])])
def test_requests_resume_where_prompts_part(
    conv_folder: Path, num_blocks: int, expected: list[int]
) -> None:
    """From the second on while there is room for all, from the third on where there is little."""
    engine, cold = built(conv_folder, num_blocks), built(conv_folder, enable_prefix_caching=False)
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


def test_a_long_prompt_holds_a_chunk_of_convolutions_and_leaves_its_anchors(
    conv_folder: Path,
) -> None:
    """4,000 tokens: 251 blocks of attention with the answer, and few of the convolutions."""
    most = 251 + 64 // BLOCK + 3
    engine = built(conv_folder, num_blocks=1 + most, max_model_len=4008)
    prompt, held = tokens(4000), list[int]()
    submit = engine.engine._steps._runner.submit

    def watched(plan: StepPlan) -> InFlightStep:
        cache = engine.engine._cache
        held.append(cache.size.num_usable_blocks - cache.core.num_free_blocks)
        return submit(plan)

    engine.engine._steps._runner.submit = watched  # type: ignore[method-assign]
    said, _ = answer(engine, prompt, num_tokens=8)
    assert max(held) <= most
    # Another request takes what no anchor needs.
    answer(engine, tokens(10, seed=9), num_tokens=2)
    assert answer(engine, prompt, num_tokens=8) == (said, 3984)


def test_blocks_that_are_too_small_are_refused_by_name(conv_folder: Path) -> None:
    with pytest.raises(FieldError, match="block_size must be at least 5 for this model's conv"):
        built(conv_folder, block_size=4)


def test_a_prompt_leaves_snapshots_at_anchors_and_where_steps_end(folder: Path) -> None:
    engine = built(folder)
    said, _ = answer(engine, tokens(300), num_tokens=1)
    num_states = len(engine.engine._steps._runner.kv.layout.groups) - 1
    # Steps of four blocks, the last one eight tokens before the last, and all of attention.
    assert engine.engine.control.stats()["cached_blocks"] == 18 + num_states * (4 + 1)
    parting = tokens(300)[:150] + tokens(60, seed=1)
    assert [answer(engine, parting)[1] for _ in "ab"] == [128, 192]
    assert answer(engine, parting[:150] + tokens(60, seed=2))[1] == 144
    assert answer(engine, tokens(300), num_tokens=1) == (said, 288)


def test_a_request_that_waits_begins_where_it_parts_within_the_step(folder: Path) -> None:
    engine = built(folder)
    prompts = [tokens(40) + tokens(20, seed=seed) for seed in (1, 2)]
    cached = serve(engine, [requested(str(i), prompt, 2) for i, prompt in enumerate(prompts)])
    assert [hits for _, hits in cached.values()] == [0, 32]


def test_a_step_ends_in_a_block_though_more_slots_were_taken(folder: Path) -> None:
    """As for a longer step that was not planned in the end."""
    engine, prompt = built(folder), tokens(300)
    said, _ = answer(built(folder), prompt, num_tokens=1)
    engine.engine.add_request(requested("a", prompt, 1))
    engine.engine.step()
    (state,) = engine.engine._scheduler._running
    assert engine.engine._scheduler._cache.ensure_slots([("a", 256)]) == 1
    state.num_slots = 256
    assert serve(engine, [requested("b", prompt, 1)])["b"][0] == said


def test_bits_do_not_depend_on_how_many_states_begin_in_a_block(folder: Path) -> None:
    """With 128 tokens all of them begin in one block of two tensors, with 16 in three."""
    said, _ = answer(built(folder), tokens(300))
    large = built(folder, num_blocks=40, state_block_size=128)
    assert len(large.engine._steps._runner.kv.layout.groups) == 2
    assert answer(large, tokens(300)) == (said, 0)
    assert answer(large, tokens(300)) == (said, 256)


def test_short_prompts_hit(folder: Path) -> None:
    engine = built(folder)
    said, _ = answer(engine, tokens(60))
    assert answer(engine, tokens(60)) == (said, 48)


def test_a_turn_that_differs_in_the_last_tokens_of_the_prompt_before_hits(folder: Path) -> None:
    """As where a template drops the thinking, and the prompt before ended with its beginning."""
    engine, prompt = built(folder), tokens(97)
    answer(engine, prompt)
    assert answer(engine, [*prompt[:95], *tokens(30, seed=1)])[1] == 80


def test_no_bit_changes_over_sleep_and_other_sizes_of_the_pool(any_folder: Path) -> None:
    engine = built(any_folder, num_blocks=600, kv_cache_max_memory="64MiB")
    prompt = tokens(150)
    said, _ = answer(engine, prompt)
    hit = _hit_of_150(any_folder)
    # The first that hits keeps the state too up to which keys and values were there.
    for size, hits in ((400, hit), (1200, 144), (300, 144)):
        assert engine.engine.control.resize(num_blocks=size).is_done
        assert answer(engine, prompt) == (said, hits), size
    engine.engine.control.sleep()
    engine.engine.control.wake_up()
    assert answer(engine, prompt) == (said, 0)
    assert answer(engine, prompt) == (said, hit)


@pytest.mark.parametrize("grows", [False, True])
def test_a_prompt_that_lacks_blocks_alone_stands_in_nobodys_way(folder: Path, grows: bool) -> None:
    """In a pool that shrank, which holds its first chunk and no more; nothing of it is cached."""
    flags = {"kv_cache_idle_release": 1e9} if grows else {}
    built_engine = built(folder, enable_prefix_caching=False, **flags)
    engine, cache = built_engine.engine, built_engine.engine._cache
    num_blocks = 1 + 10 + cache.groups.count("state")
    assert num_blocks <= cache.core.most_blocks(150, 64)
    engine.add_request(requested("long", tokens(150), 4))
    engine.add_request(requested("short", tokens(20), 4))
    if grows:
        engine.control.adjust_pool(lambda pool: pool.allow(num_blocks))
    else:
        engine.control.resize(num_blocks=num_blocks)
    assert cache.size.num_blocks == num_blocks
    ends: dict[str, tuple[str | None, str | None]] = {}
    for _ in range(60):
        ends |= {o.request_id: (o.finish_reason, o.error_code) for o in engine.step()}
    lacks = ("error", "insufficient_kv_cache")
    assert ends == {"long": ("length", None) if grows else lacks, "short": ("length", None)}
    assert not engine.has_unfinished()
    assert cache.core.num_free_blocks == cache.size.num_usable_blocks


def test_another_process_resumes_from_kept_blocks(any_folder: Path, tmp_path: Path) -> None:
    """Not where it computes with other instructions, whose blocks have other hashes."""
    prompt, said = tokens(150), []
    for form, cached in (None, 0), ("portable", 0), (None, _hit_of_150(any_folder)):
        engine = built(any_folder, kv_cache_dir=str(tmp_path / "kept"), cpu_instructions=form)
        said.append(answer(engine, prompt))
        assert said[-1][1] == cached
        file = engine.engine._steps._runner.kv_specs().file
        assert file is not None
        new = engine.engine.control.stats()["cached_blocks"] - file.num_restored
        while file.core.counts()["kept"] < new:
            pass
        engine.engine.close()
        file.close()
    assert said[0][0] == said[2][0]


def test_the_start_line_names_what_layers_keep(
    folder: Path, conv_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixcache")
    groups = built(folder).engine._steps._runner.kv.layout.groups
    built(conv_folder)
    states = f"(full 1, window 0, state {len(groups) - 1};"
    assert f"for {len(groups)} groups of layers {states}" in caplog.text
    assert "for 2 groups of layers (full 1, window 0, convolution 1; size 2," in caplog.text


def test_an_answer_waits_until_its_mask_is_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's token is computed meanwhile, and again where the mask came late."""
    engine, known, late = built(folder), AnswerMatcher.is_known, list[bool]()
    request = requested("a", tokens(40), 30, guided=True)
    said = serve(engine, [request])["a"][0]

    def unknown(matcher: AnswerMatcher) -> bool:
        late.append(len(late) % 3 == 0)
        return not late[-1] and known.__get__(matcher)

    monkeypatch.setattr(AnswerMatcher, "is_known", property(unknown))
    assert serve(built(folder), [request])["a"][0] == said
    assert any(late)


def test_a_token_that_is_computed_twice_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = requested("a", tokens(40), 30, guided=True)
    said = serve(built(folder), [request])["a"][0]
    words, asked = AnswerMatcher.words, list[None]()

    def once_late(matcher: AnswerMatcher, seconds: float, unwanted: tuple[int, ...]) -> Any:
        asked.append(None)
        return None if len(asked) == 9 else words(matcher, 60, unwanted)

    monkeypatch.setattr(AnswerMatcher, "words", once_late)
    assert serve(built(folder), [request])["a"][0] != said


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        *(("folder", fault) for fault in ("late", "convolution", "exchanged")),
        *(("conv_folder", fault) for fault in ("late", "exchanged")),
    ],
)
def test_a_planted_fault_changes_hits_alone(
    request: pytest.FixtureRequest, model: str, fault: str
) -> None:
    """Another layer's, those one block or token late, inputs of convolutions that were not kept."""
    engine = built(request.getfixturevalue(model), max_num_batched_tokens=1024)
    prompt = tokens(150)
    said, _ = answer(engine, prompt, num_tokens=1)
    hit = 144 if model == "conv_folder" else 128
    assert answer(engine, prompt, num_tokens=1) == (said, hit)
    if fault == "exchanged":
        _exchange(engine)
    elif model == "conv_folder":
        _shift(engine)
    else:
        _plant(engine, fault)
    assert answer(engine, prompt, num_tokens=1)[0] != said


def test_a_block_that_is_given_back_too_early_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The state before a block's first token lies in the block before, which others would take."""

    def too_short(group: KVGroup) -> GroupKind:
        return ("sliding_window", 1) if group.state_tensors else "full"

    monkeypatch.setattr(KVGroup, "kind", property(too_short))
    engine = built(folder, max_num_batched_tokens=BLOCK)
    with pytest.raises(AssertionError, match="ValueError"):
        answer(engine, tokens(150))
    assert "first_pages leaves out 1 pages of sequence 0" in caplog.text


def _exchange(engine: BuiltEngine) -> None:
    """The first two layers read what the other one keeps."""
    kernels, other = engine.engine._steps._runner._steps._kernels, {0: 1, 1: 0}
    if kernels.states:
        kernels.states[:] = [(other.get(layer, layer), *rest) for layer, *rest in kernels.states]
    else:
        kernels.caches[:2] = kernels.caches[1::-1]


def _shift(engine: BuiltEngine) -> None:
    """Every block has the inputs of each convolution one token late."""
    kv = engine.engine._steps._runner.kv
    group = kv.layout.groups[1]
    for number in range(len(group.layers)):
        tensor, part = group.part(number)
        rows: npt.NDArray[np.float32] = kv.rows()[tensor].view(np.float32)
        inputs = rows[:, part].reshape(len(rows), group.kept_tokens, -1)
        rows[:, part] = np.roll(inputs, 1, axis=1).reshape(len(rows), -1)


def _plant(engine: BuiltEngine, fault: str) -> None:
    kv = engine.engine._steps._runner.kv
    delta = engine.model.delta
    assert isinstance(kv, KVMemory)
    assert delta is not None
    # A head's matrices come first, then the inputs of its convolution.
    kept = delta.state_numbers // delta.key_heads
    matrices = delta.value_dim * delta.value_heads // delta.key_heads * delta.key_dim
    rows = [one.view(np.float32) for one in kv.rows()]
    place = 0  # Layers' states are whole heads, one after the other.
    for part in kv.layout.states:
        numbers = rows[part.tensor][:, part.start : part.start + part.numbers]
        if fault == "late":
            numbers[...] = np.roll(numbers, 1, axis=0)
        else:
            of_convolution = (place + np.arange(part.numbers)) % kept >= matrices
            numbers[:, of_convolution] = 0.0
        place += part.numbers
