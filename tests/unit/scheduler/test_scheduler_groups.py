"""Slots and blocks by KV cache group: what requests hold where layers have a sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fakes.fake_cache import make_cache
from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import answer_alone
from prefixcache.exceptions import RequestTooLargeError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.specs import GroupKind
from prefixcache.types.request import CacheOptions
from prefixcache.types.step_plan import StepPlan
from support.scheduler_bench import Bench, counts, prompt_of

WINDOW: GroupKind = ("sliding_window", 8)
HYBRID: tuple[GroupKind, ...] = ("full", WINDOW, WINDOW)
ALL_WINDOWS: tuple[GroupKind, ...] = (WINDOW,)


def windowed(groups: tuple[GroupKind, ...] = HYBRID, **options: Any) -> Bench:
    """A bench of blocks of 4 tokens, where prompts are computed 8 tokens at a time."""
    return Bench(groups=groups, **{"max_num_batched_tokens": 8, **options})


def steps(bench: Bench, limit: int = 200) -> Iterator[StepPlan]:
    """Steps until all is served."""
    for _ in range(limit):
        yield bench.step()
        if not bench.scheduler.has_unfinished():
            return
    raise AssertionError("the loop hangs")


def held(bench: Bench, name: str) -> list[int]:
    """How many blocks the request holds in each group."""
    sequence = bench.cache._sequences[name]
    groups = range(len(bench.runner.block_tables))
    return [sum(block != 0 for block in sequence.block_table(group)) for group in groups]


@pytest.mark.parametrize(
    ("options", "cache"),
    [
        ({}, CacheOptions()),
        ({}, CacheOptions(write=False)),
        ({}, CacheOptions(read=False, write=False)),
        ({"enable_prefix_caching": False}, CacheOptions()),
    ],
)
@pytest.mark.parametrize("groups", [HYBRID, ALL_WINDOWS])
def test_a_window_holds_its_tokens_and_a_chunk_whatever_is_published(groups, options, cache):
    bench = windowed(groups, **options)
    bench.add("a", prompt_of(60), max_tokens=30, cache=cache)
    after = [held(bench, "a") for _ in steps(bench) if bench.scheduler.num_running]
    for group, blocks in zip(groups, zip(*after, strict=True), strict=True):
        if group == "full":
            assert blocks[0] == 15, "the whole prompt at once"
            assert blocks[-1] == 22
        else:
            assert max(blocks) <= 6, "2 of the window, 1 below, 2 of the chunk, 1 begun before"
    assert bench.answers["a"] == answer_alone(prompt_of(60), 30, groups=groups)
    assert bench.cache.core.num_free_blocks == bench.cache.size.num_usable_blocks


def test_what_fits_is_counted_by_group() -> None:
    small = {"num_blocks": 10, "max_model_len": 256}
    with pytest.raises(RequestTooLargeError, match=r"up to 51 KV cache blocks.*has 9"):
        Bench(**small).add("a", prompt_of(200))
    bench = windowed(ALL_WINDOWS, **small)
    bench.add("a", prompt_of(200))
    bench.run()
    assert bench.answers["a"] == answer_alone(prompt_of(200), 4, groups=ALL_WINDOWS)


def test_a_request_may_need_the_whole_pool_and_not_a_block_more() -> None:
    need = make_cache(9, 4, groups=HYBRID, model="m").core.most_blocks(60 + 3, 8)
    bench = windowed(num_blocks=1 + need)
    bench.add("a", prompt_of(60))
    bench.run()
    assert bench.answers["a"] == answer_alone(prompt_of(60), 4)
    smaller = windowed(num_blocks=need)
    with pytest.raises(
        RequestTooLargeError, match=rf"up to {need} .* has {need - 1}.* --max-num-batched-tokens"
    ):
        smaller.add("a", prompt_of(60))


@pytest.mark.parametrize("num_blocks", range(28, 40))
def test_a_prompt_starts_when_its_windows_have_room_too(num_blocks: int) -> None:
    """It would be preempted for them otherwise, and start again, as often as it starts."""
    bench = windowed(num_blocks=1 + num_blocks, max_model_len=64)
    bench.add("old", prompt_of(24), max_tokens=24)
    bench.add("new", prompt_of(24, 1), max_tokens=12)
    for _ in steps(bench):
        assert bench.answers["new"] or not bench.scheduler.num_preemptions
    for name, first, length in (("old", 0, 24), ("new", 1, 12)):
        assert bench.answers[name] == answer_alone(prompt_of(24, first), length)


def test_a_preempted_request_resumes_behind_its_windows() -> None:
    bench = windowed(num_blocks=1 + 33, max_model_len=64)
    bench.add("old", prompt_of(24), max_tokens=24)
    bench.add("new", prompt_of(24, 1), max_tokens=12)
    while not bench.scheduler.num_preemptions:
        bench.step()
    later = (s for plan in steps(bench) for s in plan.sequences if s.request_id == "new")
    assert next(later).start >= 24, "it hits what it published"


def test_a_threshold_asks_for_what_the_windows_let_a_request_take() -> None:
    bench = windowed()
    bench.add("warm", prompt_of(16), max_tokens=1)
    bench.run()
    for name, threshold in (("above", 0.81), ("below", 0.8)):
        bench.add(name, prompt_of(24), cache=CacheOptions(hit_threshold=threshold))
    bench.run()
    assert [request_id for request_id, *_ in bench.scheduler.take_rejected()] == ["above"]


@pytest.mark.parametrize("groups", [("full",), HYBRID])
def test_nobody_waits_for_a_block_that_it_has_to_compute_itself(groups):
    bench = Bench(groups=groups, share_in_flight=True)
    bench.add("warm", prompt_of(16), max_tokens=1)
    bench.run()
    for name in "abc":
        bench.add(name, prompt_of(16), max_tokens=1)
    assert counts(bench.step()) == {"a": 4, "b": 4, "c": 4}
    assert bench.scheduler.sharing.num_waits == 0


def test_without_windows_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one kind of layer pay no call for what they do not have."""
    monkeypatch.delattr(CacheManager, "drop_unneeded")
    bench = Bench()
    bench.add("a", prompt_of(20), max_tokens=20)
    bench.run()
    assert bench.answers["a"] == answer_alone(prompt_of(20), 20)


def test_the_cache_learns_which_requests_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: dict[str, bool] = {}
    free = CacheManager.free

    def free_and_tell(cache: CacheManager, request_ids: list[str], **options: Any) -> None:
        reported.update({name: name in options.get("ended_well", ()) for name in request_ids})
        free(cache, request_ids, **options)

    monkeypatch.setattr(CacheManager, "free", free_and_tell)
    prompt = [1, 2, 3, 4, 5]
    engine, runner, _ = make_engine(eos_token_ids=answer_alone([*prompt, 6], 1))
    runner.broken_tokens = {90}
    engine.add_request(make_request("length", prompt))
    engine.add_request(make_request("stop", [*prompt, 6], max_tokens=50))
    engine.add_request(make_request("error", [*prompt, 90]))
    engine.add_request(make_request("abort", [*prompt, 7], max_tokens=50))
    engine.step()
    engine.abort(["abort"])
    while engine.has_unfinished():
        engine.step()
    assert reported == {"length": True, "stop": True, "error": False, "abort": False}
