"""Another size of the cache while it serves: what is kept, who waits, and when memory goes back."""

from __future__ import annotations

import mmap
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Lock, get_ident
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest

from fakes.fake_blocks import BLOCK_BYTES, slow_clock
from fakes.fake_engine import make_engine, make_request
from fakes.fake_memory import FakeMemory, lone_answer, make_versioned_engine
from fakes.fake_runner import answer_alone
from prefixcache.config.engine_parts.cache_config import CacheConfig, ElasticConfig
from prefixcache.engine.engine import Engine
from prefixcache.engine.pool_watch import PoolWatch, adjust_pool
from prefixcache.engine.sizing.elastic import SelfSizing
from prefixcache.exceptions import (
    ConfigError,
    InvalidRequestError,
    OutOfMemoryError,
    RequestTooLargeError,
)
from prefixcache.kv.elastic import ElasticPool, ResizeStatus
from prefixcache.kv.retention import Retention
from prefixcache.llm import LLM
from prefixcache.runner.cpu import file_memory, host_memory
from prefixcache.runner.reserved_memory import ReservedBlocks
from prefixcache.runner.sizing import MemorySize, pool_sizes
from prefixcache.types.sampling_params import SamplingParams
from support.serving import wait_until

MIB = 1 << 20
PROMPT = [*range(10, 26)]


class Elastic:
    """An engine of 40 blocks of 4 tokens, of up to 64, and what its requests got."""

    def __init__(self, *, slow: bool = False, **options: Any) -> None:
        options = {"num_blocks": 40, "max_blocks": 64, "max_model_len": 200, **options}
        pool_options = options.pop("pool_options", {})
        if slow:
            pool_options["clock"] = slow_clock()
        self.engine, self.runner, self.cache = make_engine(pool_options=pool_options, **options)
        assert self.engine._pool is not None
        self.pool: ElasticPool = self.engine._pool
        if slow:
            self.pool._moves.num_blocks = self.pool._above.pace.num_blocks = 1
        self.control = self.engine.control
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.errors: dict[str, str | None] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 4) -> None:
        self.tokens[name] = []
        self.engine.add_request(make_request(name, prompt, max_tokens=max_tokens))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in [*self.engine.take_outputs(), *self.engine.step()]:
                self.tokens[output.request_id] += output.token_ids
                self.cached.setdefault(output.request_id, output.num_cached_tokens)
                if output.finished:
                    self.errors[output.request_id] = output.error
        self.cache.core.validate()

    def run(self) -> None:
        for _ in range(500):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("the loop hangs")

    def answer(self, name: str, prompt: list[int] = PROMPT, max_tokens: int = 4) -> int:
        """Checks the answer; the tokens of the prompt that were cached."""
        self.add(name, prompt, max_tokens)
        self.run()
        assert self.tokens[name] == answer_alone(prompt, max_tokens)
        return self.cached[name]


def fill(elastic: Elastic, count: int) -> list[list[int]]:
    """Requests of four full blocks each, the first one the longest unused."""
    prompts = [[number, *range(30, 46)] for number in range(count)]
    for number, prompt in enumerate(prompts):
        elastic.answer(f"fill-{number}", prompt, 1)
    return prompts


def test_growing_is_done_at_once_and_shrinking_takes_slices_between_steps() -> None:
    elastic = Elastic(slow=True)
    assert elastic.control.resize(num_blocks=64).is_done
    elastic.add("a", PROMPT, 30)
    elastic.step()
    elastic.pool.resize(30)
    steps = 0
    while elastic.pool.has_slices:
        elastic.step()
        steps += 1
    assert steps > 5
    assert elastic.pool.status.is_done
    assert elastic.pool.memory.num_mapped_bytes() == 30 * BLOCK_BYTES
    elastic.run()
    assert elastic.tokens["a"] == answer_alone(PROMPT, 30)


def test_blocks_that_requests_hold_above_the_end_go_as_they_end() -> None:
    elastic = Elastic()
    elastic.add("a", PROMPT, 40)
    elastic.step()
    elastic.add("b", PROMPT[::-1], 60)
    elastic.step(3)
    held = elastic.cache.held_blocks(4)
    status = elastic.control.resize(num_blocks=4)
    assert not status.is_done
    assert status.blocks_held_above == len(held) > 0
    assert elastic.pool.memory.num_mapped_bytes() == (4 + len(held)) * BLOCK_BYTES
    elastic.engine.abort(["b"])
    left = elastic.pool.status.blocks_held_above
    assert 0 < left < len(held)
    elastic.control.pause()
    elastic.run()
    assert elastic.pool.memory.num_mapped_bytes() == (4 + left) * BLOCK_BYTES
    assert not elastic.engine.has_work()
    elastic.control.resume()
    elastic.engine.abort(["a"])
    elastic.run()
    assert elastic.control.resize_status.is_done
    assert elastic.pool.memory.num_mapped_bytes() == 4 * BLOCK_BYTES


def test_a_resize_to_the_same_size_gives_back_what_a_request_held_above_until_just_now() -> None:
    elastic = Elastic()
    elastic.add("a", PROMPT, 40)
    elastic.step()
    assert elastic.control.resize(num_blocks=4).blocks_held_above
    elastic.engine.abort(["a"])
    assert elastic.control.resize(num_blocks=4).is_done
    assert elastic.pool.memory.num_mapped_bytes() == 4 * BLOCK_BYTES


def test_a_request_that_no_longer_fits_waits_and_ends_with_the_numbers_when_it_is_alone() -> None:
    elastic = Elastic(max_num_seqs=1)
    elastic.add("runs", PROMPT, 8)
    elastic.step()
    elastic.add("too large", [*range(60, 90)], 30)
    elastic.add("small", PROMPT[:4], 2)
    elastic.control.resize(num_blocks=9)
    elastic.step(2)
    assert not elastic.errors, "it waits while another one runs"
    elastic.run()
    assert elastic.errors["runs"] is elastic.errors["small"] is None
    assert elastic.tokens["small"] == answer_alone(PROMPT[:4], 2)
    error = elastic.errors["too large"]
    assert error is not None
    assert "8 blocks of the cache's 8" in error
    with pytest.raises(RequestTooLargeError, match="but the cache has 8"):
        elastic.add("later", [*range(60, 90)], 30)
    elastic.control.resize(num_blocks=40)
    elastic.answer("grown", [*range(60, 90)], 30)


def test_an_answer_without_a_limit_is_as_long_as_the_cache_of_now_allows() -> None:
    elastic = Elastic()
    elastic.control.resize(num_blocks=6)
    assert elastic.engine.max_model_len == 20
    elastic.add("a", PROMPT, None)  # type: ignore[arg-type]
    elastic.run()
    assert elastic.tokens["a"] == answer_alone(PROMPT, 4)
    elastic.control.resize(num_blocks=64)
    assert elastic.engine.max_model_len == 200


def test_what_was_used_last_survives_wherever_it_lies() -> None:
    elastic = Elastic()
    prompts = fill(elastic, 9)
    elastic.answer("the first again", prompts[0], 1)
    status = elastic.control.resize(num_blocks=17)
    assert status.blocks_moved >= 12
    assert status.blocks_lost == 36 - 16
    elastic.cache.core.validate()
    hits = {number: elastic.engine.probe(make_request("", prompts[number])) for number in range(9)}
    assert hits == {0: 16, 8: 16, 7: 16, 6: 16} | dict.fromkeys(range(1, 6), 0)
    for number in (0, 8):
        assert elastic.answer(f"after {number}", prompts[number], 6) == 16


@pytest.mark.parametrize("fails", [False, True])
def test_content_that_was_not_copied_shows_and_a_failed_copy_loses_none(monkeypatch, fails):
    elastic = Elastic()
    prompts = fill(elastic, 9)

    def copy(sources: Any, targets: Any) -> None:
        if fails:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(elastic.pool.memory, "copy_blocks", copy)
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            elastic.control.resize(num_blocks=17)
        assert elastic.pool.num_blocks == elastic.cache.size.num_blocks == 40
        assert elastic.answer("the last", prompts[8], 6) == 16
        elastic.pool.resize(17)
        elastic.run()
        assert elastic.pool.num_blocks == 40, "the loop goes on"
    else:
        elastic.control.resize(num_blocks=17)
        with pytest.raises(AssertionError):
            elastic.answer("the last", prompts[8], 6)


@pytest.mark.parametrize("most", [0, 6])
def test_only_that_many_blocks_outlive_their_requests(most: int) -> None:
    elastic = Elastic(max_cached_blocks=most)
    prompts = fill(elastic, 3)
    assert elastic.cache.core.stats()["cached_blocks"] == most
    cached = [elastic.engine.probe(make_request("", prompt)) for prompt in prompts]
    assert cached == ([0, 0, 0] if most == 0 else [0, 8, 16])


def test_where_cached_blocks_are_bounded_the_memory_of_the_others_goes_back() -> None:
    elastic = Elastic(max_cached_blocks=6, pool_options={"bounds_memory": True})
    prompts = fill(elastic, 9)
    assert elastic.pool.memory.num_mapped_bytes() <= (1 + 6) * BLOCK_BYTES
    assert elastic.answer("again", prompts[8]) == 16
    elastic.control.resize(num_blocks=10)
    elastic.control.resize(num_blocks=40)
    assert elastic.answer("once more", prompts[8]) == 16


@pytest.mark.parametrize("most", [None, 10])
def test_memory_of_the_machine_goes_back_where_cached_blocks_are_bounded(
    tiny_checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    monkeypatch.setattr("prefixcache.kv.unused_memory.WORTH_BYTES", 1)
    flags = {"dtype": "float32", "device": "cpu", "num_blocks": 600}
    llm = LLM(str(tiny_checkpoint()), prefix_cache_max_blocks=most, **flags)
    pool = llm._engine._pool
    prompts = [[5 + number, *range(30, 330)] for number in range(24)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    first, again = (llm.generate(prompts, params, use_tqdm=False) for _ in range(2))
    assert [one.outputs for one in again] == [one.outputs for one in first]
    mapped = pool.memory.num_mapped_bytes() // pool.sizes.block_bytes
    assert mapped > 400 if most is None else mapped <= 1 + most


def test_what_requests_hold_keeps_its_memory_while_that_of_others_goes_back() -> None:
    elastic = Elastic(max_cached_blocks=0, pool_options={"bounds_memory": True})
    elastic.add("long", PROMPT, 40)
    elastic.step()
    fill(elastic, 9)
    assert elastic.tokens["long"] == answer_alone(PROMPT, 40)
    assert elastic.pool.memory.num_mapped_bytes() <= 20 * BLOCK_BYTES


def test_a_size_that_cannot_be_chosen_is_logged_once_with_its_stack_and_then_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prefixcache.engine.pool_watch.WATCH_SECONDS", 0.001)
    elastic = Elastic()
    elastic.engine.self_sizing = Mock(choose=Mock(side_effect=OSError("no memory")))
    with closing(PoolWatch(elastic.engine, elastic.control)):
        wait_until(lambda: "failed 100 times" in caplog.text)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [bool(record.exc_info) for record in errors] == [True, False, False]


def test_slices_that_have_little_to_do_do_not_make_later_ones_longer() -> None:
    elastic = Elastic(num_blocks=64)
    paces = elastic.pool._moves, elastic.pool._above.pace
    before = [pace.num_blocks for pace in paces]
    for _ in range(70):
        elastic.control.resize(num_blocks=10)
        elastic.control.resize(num_blocks=64)
    assert [pace.num_blocks for pace in paces] <= [2 * count for count in before]
    elastic.answer("a")


def test_without_a_prefix_cache_only_live_blocks_hold_memory() -> None:
    elastic = Elastic(enable_prefix_caching=False)
    fill(elastic, 9)
    assert elastic.control.resize(num_blocks=2).blocks_lost == 0
    assert elastic.pool.memory.num_mapped_bytes() == 2 * BLOCK_BYTES
    elastic.control.resize(num_blocks=40)
    elastic.add("a", PROMPT, 20)
    elastic.step()
    elastic.control.resize(num_blocks=2)
    held = elastic.cache.held_blocks(2)
    assert elastic.pool.memory.num_mapped_bytes() == (2 + len(held)) * BLOCK_BYTES


def test_what_the_shares_are_of_follows_the_size() -> None:
    elastic = Elastic(groups=(("sliding_window", 1000),), retention=Retention(pin=True))
    before = elastic.cache._pins._most
    elastic.control.resize(num_blocks=21)
    assert (before, elastic.cache._pins._most) == (7, 4)
    elastic.add("a", PROMPT, 4)
    elastic.step()
    assert elastic.cache.size.usage == pytest.approx(4 / 20)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({}, "memory", "either memory or num_blocks"),
        ({"memory": "1MiB", "num_blocks": 5}, "memory", "either memory or num_blocks"),
        ({"memory": "5bit"}, "memory", "must be bytes.*allowed are 3 to 64 blocks"),
        ({"memory": -5}, "memory", "must be bytes.*allowed are 3 to 64 blocks"),
        ({"memory": float("nan")}, "memory", "must be bytes"),
        ({"memory": "0.01"}, "memory", "asks for 0 blocks.*3 to 64 blocks"),
        ({"memory": "65MiB"}, "memory", "asks for 65 blocks of 1048576 bytes; allowed are 3 to 64"),
        ({"num_blocks": 0}, "num_blocks", "asks for 0 blocks"),
        ({"num_blocks": 2}, "num_blocks", "--kv-cache-min-memory to --kv-cache-max-memory"),
        ({"num_blocks": 65}, "num_blocks", "3.0 to 64.0 MiB"),
        ({"num_blocks": True}, "num_blocks", "must be an integer"),
        ({"num_blocks": 10**400}, "num_blocks", "num_blocks"),
    ],
)
def test_sizes_out_of_range_are_refused_with_the_range(options, param, message):
    elastic = Elastic(pool_options={"floor": 3})
    with pytest.raises(InvalidRequestError, match=message) as caught:
        elastic.control.resize(**options)
    assert caught.value.param == param
    assert elastic.pool.num_blocks == 40


def test_memory_is_bytes_or_a_share_of_what_was_free_at_the_start() -> None:
    elastic = Elastic()
    assert elastic.control.resize(memory="50MiB").num_blocks == 50
    assert elastic.control.resize(memory=20 * MIB + 1).num_blocks == 20
    assert elastic.control.resize(memory=0.5).num_blocks == 32


def test_while_the_engine_sleeps_it_waits_for_the_wake_up() -> None:
    engine, _, cache = make_versioned_engine(num_blocks=40, max_blocks=64)
    control, pool = engine.control, engine._pool
    assert pool is not None
    control.sleep()
    assert not control.resize(num_blocks=50).is_done
    assert not control.resize(num_blocks=20).is_done
    assert cache.size.num_blocks == 40
    control.wake_up()
    assert control.resize_status.is_done
    assert cache.size.num_blocks == pool.memory.num_blocks == 20
    engine.add_request(make_request("a", PROMPT, max_tokens=4))
    tokens = [token for _ in range(4) for output in engine.step() for token in output.token_ids]
    assert tokens == lone_answer(PROMPT, 4, 0)


def test_a_wake_up_that_lacks_memory_lets_it_wait_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, cache = make_versioned_engine(num_blocks=40, max_blocks=64)
    control, pool = engine.control, engine._pool
    assert pool is not None
    control.sleep()
    with monkeypatch.context() as lacking:
        lacking.setattr(FakeMemory, "make_kv", _lack_memory)
        with pytest.raises(OutOfMemoryError):
            control.wake_up()
    assert control.is_sleeping
    assert not control.resize(num_blocks=50).is_done
    assert pool.memory.num_blocks == 40
    control.wake_up()
    assert control.resize_status.is_done
    assert cache.size.num_blocks == pool.memory.num_blocks == 50


def _lack_memory(memory: FakeMemory) -> None:
    raise OutOfMemoryError("too large")


def test_a_shrink_that_sleep_interrupts_ends_with_the_wake_up() -> None:
    engine, _, cache = make_versioned_engine(
        num_blocks=40, max_blocks=64, pool_options={"clock": slow_clock()}
    )
    pool = engine._pool
    assert pool is not None
    pool.resize(10)
    pool.advance()
    engine.control.sleep()
    assert not pool.advance()
    engine.control.wake_up()
    assert engine.control.resize_status.is_done
    assert cache.size.num_blocks == 10
    assert not engine.has_work()


def test_a_resize_is_refused_while_weights_change() -> None:
    engine, _, cache = make_versioned_engine(num_blocks=40, max_blocks=64)
    engine.control.begin_weight_update()
    with pytest.raises(
        InvalidRequestError, match=r"num_blocks .* end_weight_update .* 2 to 64 blocks"
    ):
        engine.control.resize(num_blocks=20)
    assert cache.size.num_blocks == 40
    assert engine.control.resize_status.is_done


def test_of_resizes_at_once_the_last_one_decides_and_one_does_the_slices(monkeypatch):
    elastic = Elastic(slow=True)
    prompts = fill(elastic, 9)
    caller = get_ident()
    calls: list[Future[ResizeStatus]] = []
    slicing: set[int] = set()
    step = Lock()

    def between_steps(command: Callable[[], Any]) -> Any:
        if get_ident() == caller and elastic.pool.wanted == 5:  # the first call has begun
            for size in (30, 8, 60, 20):
                calls.append(threads.submit(elastic.control.resize, num_blocks=size))
                while elastic.pool.wanted != size:
                    time.sleep(0.001)
        with step:
            elastic.engine.adopt_loop()
            return command()

    def advance() -> bool:
        slicing.add(get_ident())
        return ElasticPool.advance(elastic.pool)

    monkeypatch.setattr(elastic.pool, "advance", advance)
    elastic.control = elastic.engine.control_for(between_steps)
    with ThreadPoolExecutor() as threads:
        first = elastic.control.resize(num_blocks=5)
        found = [first, *(call.result() for call in calls)]
    assert [status.num_blocks for status in found] == [20] * 5
    assert all(status.is_done for status in found)
    assert len(slicing) == 1, "a step waits for one slice, not for that of every caller"
    elastic.engine.adopt_loop()
    elastic.answer("the last", prompts[8], 6)


# By itself.


class Machine:
    """Memory that several pools take from."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.pools: list[ElasticPool] = []

    @property
    def available(self) -> int:
        mapped = sum(pool.memory.num_mapped_bytes() for pool in self.pools)
        return self.blocks * BLOCK_BYTES - mapped

    def add(self, **flags: Any) -> Elastic:
        elastic = Elastic(num_blocks=70, max_blocks=70, pool_options={"grows_by_itself": True})
        sizing = SelfSizing(ElasticConfig(**flags), elastic.pool, lambda: self.available)
        elastic.engine.self_sizing = sizing
        self.pools.append(elastic.pool)
        return elastic


def test_an_idle_cache_shrinks_step_by_step_to_the_floor_and_grows_with_demand(monkeypatch):
    elastic = Machine(1000).add(kv_cache_idle_release=5.0)
    fill(elastic, 8)
    idle = 4.9
    monkeypatch.setattr(Engine, "idle_seconds", property(lambda engine: idle))
    adjust_pool(elastic.engine, elastic.control)
    assert elastic.pool.num_blocks == 70
    idle = 5.0
    sizes: list[int] = []
    for _ in range(10):
        adjust_pool(elastic.engine, elastic.control)
        sizes.append(elastic.pool.num_blocks)
    assert sizes == [61, 52, 43, 34, 25, 16, 7, 2, 2, 2]
    assert elastic.pool.memory.num_mapped_bytes() == 2 * BLOCK_BYTES
    assert elastic.answer("again", [*range(60, 90)], 20) == 0
    assert elastic.pool.num_blocks == 70


def test_what_does_not_fit_the_floor_is_accepted_and_the_pool_grows_for_it() -> None:
    elastic = Machine(1000).add(kv_cache_idle_release=5.0)
    elastic.pool.rest(2)
    while elastic.pool.advance():
        pass
    assert elastic.pool.num_blocks == 2
    assert elastic.engine.max_model_len == 200
    elastic.answer("a", [*range(60, 90)], 60)


def test_short_memory_takes_cached_blocks_and_gives_them_back_with_hysteresis() -> None:
    others = Machine(1000)
    elastic = others.add(min_free_memory=100 * MIB)
    fill(elastic, 8)
    others.blocks = 70 + 90  # ten less than wanted
    adjust_pool(elastic.engine, elastic.control)
    size = elastic.pool.num_blocks
    assert size == 70 - 10 - 13
    assert others.available == 113 * MIB
    for available in (113, 101, 100, 124, 125):
        others.blocks = size + available
        adjust_pool(elastic.engine, elastic.control)
        elastic.answer(f"at {available}", [available % 90, *PROMPT])
        assert elastic.pool.num_blocks == size, "between the limits nothing changes"
    others.blocks = size + 126
    adjust_pool(elastic.engine, elastic.control)
    elastic.answer("more", [3, *PROMPT])
    assert elastic.pool.num_blocks == size + (126 - 100 - 13) // 2
    others.blocks = 1000
    adjust_pool(elastic.engine, elastic.control)
    elastic.answer("all", [4, *PROMPT])
    assert elastic.pool.num_blocks == 70


def test_live_requests_keep_their_blocks_and_one_alone_takes_what_it_needs() -> None:
    others = Machine(1000)
    elastic = others.add(min_free_memory=100 * MIB)
    elastic.add("a", [*range(60, 90)], 40)
    elastic.step(3)
    others.blocks = 20
    for _ in range(3):
        adjust_pool(elastic.engine, elastic.control)
        elastic.step()
    assert elastic.pool.num_blocks < 18, "less than it will hold"
    elastic.run()
    assert elastic.tokens["a"] == answer_alone([*range(60, 90)], 40)


def test_two_caches_share_a_machine_and_come_to_rest() -> None:
    """Each may hold 70 % of it; both are always asked for more than they have."""
    machine = Machine(100)
    both = [machine.add(min_free_memory=16 * MIB) for _ in range(2)]
    sizes: list[tuple[int, int]] = []
    for turn in range(40):
        for number, elastic in enumerate(both):
            elastic.answer(f"{turn}", [number + 2 * turn, *range(40, 60)], 1)
            adjust_pool(elastic.engine, elastic.control)
        sizes.append((both[0].pool.num_blocks, both[1].pool.num_blocks))
    assert sum(sizes[-1]) <= 100 - 16
    assert min(sizes[-1]) > 10
    assert len(set(sizes[-10:])) == 1, "nothing is traded for ever"


def test_a_file_stands_for_the_available_memory(tmp_path, caplog):
    file = tmp_path / "available"
    elastic = Elastic(pool_options={"grows_by_itself": True})
    config = ElasticConfig(min_free_memory=100 * MIB, available_memory_file=str(file))  # type: ignore[arg-type]
    elastic.engine.self_sizing = SelfSizing.of(config, elastic.pool, lambda: 0)
    for text, size in (("", 40), ("much", 40), (f"{90 * MIB}\n", 40 - 10 - 13)):
        file.write_text(text)
        adjust_pool(elastic.engine, elastic.control)
        assert elastic.pool.num_blocks == size
    file.unlink()
    caplog.clear()
    for _ in range(3):
        adjust_pool(elastic.engine, elastic.control)
    assert elastic.pool.num_blocks == 17
    assert len(caplog.records) == 1, "not one a second"


def test_sizes_out_of_order_and_beyond_the_machine_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"kv_cache_min_memory must be at most kv_cache_memory"):
        CacheConfig(kv_cache_min_memory="2GiB", kv_cache_memory="1GiB")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kv_cache_memory must be at most kv_cache_max_memory"):
        CacheConfig(kv_cache_memory=0.9, kv_cache_max_memory=0.5)
    with pytest.raises(ConfigError, match=r"min_free_memory must be bytes, or a size"):
        ElasticConfig(min_free_memory=0.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"available_memory_file needs min_free_memory"):
        ElasticConfig(available_memory_file=Path("x"))
    memory = MemorySize(free=600 * MIB, total=1000 * MIB)
    sized = partial(pool_sizes, start=100, block_bytes=MIB, memory=memory)
    found = sized(CacheConfig(kv_cache_max_memory=0.5, kv_cache_min_memory="50MiB"))  # type: ignore[arg-type]
    assert (found.floor, found.start, found.ceiling) == (50, 100, 300)
    for flags, message in (
        ({"kv_cache_max_memory": 1001 * MIB}, "kv_cache_max_memory must be at most the 1,000 MiB"),
        ({"kv_cache_max_memory": 99 * MIB}, "kv_cache_max_memory must be at least the size at"),
        ({"kv_cache_min_memory": 101 * MIB}, "kv_cache_min_memory must be at most the size at"),
    ):
        with pytest.raises(ConfigError, match=message):
            sized(CacheConfig(**flags))


def test_a_pool_that_is_too_large_is_refused_before_weights_are_read(tiny_checkpoint, tmp_path):
    folder = tmp_path / "broken weights"
    shutil.copytree(tiny_checkpoint(), folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(OutOfMemoryError, match=r"needs 104,857,\d+ MiB, but only .* MiB are free"):
        LLM(str(folder), kv_cache_memory="100TiB")


@pytest.mark.parametrize("kind", ["host", "file"])
def test_no_page_behind_a_tensor_is_given_back(kind, monkeypatch):
    """16 blocks of 1,280 bytes fill 5 pages, and 20 end within the seventh."""
    sizes, page = list[int](), mmap.PAGESIZE
    module = host_memory if kind == "host" else file_memory
    monkeypatch.setattr(module, "num_resident_bytes", lambda _, size: sizes.append(size) or 0)
    file = mock.Mock(maps=[mmap.mmap(-1, 7 * page)], **{"core.tensor_at.return_value": 0})
    if kind == "host":
        memory = host_memory.HostMemory(20 * 1280, page)
    else:
        memory = file_memory.FileMemory(file, 0, 20 * 1280)
    ReservedBlocks([memory], 1280).give_back(1, 20)
    assert sizes == [2 * page]
    assert kind == "host" or file.give_back.call_args == mock.call(5 * page, 2 * page)
