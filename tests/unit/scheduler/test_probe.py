"""Probes: what the next request would find in the cache, read while the loop runs."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fakes import fake_engine
from fakes.fake_cache import make_cache
from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import StepGate, answer_alone
from prefixcache import LLM, SamplingParams
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.exceptions import EngineDeadError, EngineHaltedError, InvalidRequestError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.types.request import CacheOptions, Request

PROMPT = list(range(1, 11))  # two full blocks of 4 and a half
READERS = {"probe", "most_blocks", "stats"}


def asking(prompt: list[int], cache: CacheOptions | None = None, name: str = "p") -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(
        request_id=name, prompt_token_ids=prompt, params=params, cache=cache or CacheOptions()
    )


@pytest.fixture
def serve() -> Iterator[Callable[..., AsyncEngine]]:
    made: list[AsyncEngine] = []

    def make(**options: Any) -> AsyncEngine:
        made.append(AsyncEngine(make_engine(**options)[0]))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


async def answer(engine: AsyncEngine, request: Request) -> int:
    """Serves the request; returns the cached tokens that it reports."""
    return [output async for output in engine.generate(request)][-1].num_cached_tokens


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 10, 12])
async def test_a_probe_is_what_the_next_request_takes_but_for_its_last_token(
    serve: Callable[..., AsyncEngine], length: int
) -> None:
    engine = serve()
    await answer(engine, make_request("warm", PROMPT, max_tokens=1))
    prompt = [*PROMPT, 60, 61][:length]
    cached = engine.probe(asking(prompt))
    assert cached == min(length, 10) // 4 * 4
    taken = await answer(engine, make_request("next", prompt))
    assert taken == min(cached, (length - 1) // 4 * 4)


async def test_a_probe_changes_nothing(serve: Callable[..., AsyncEngine]) -> None:
    engine = serve()
    await answer(engine, make_request("warm", PROMPT))
    before = engine.control.stats(), engine.control.prefix_cache_stats()
    assert [engine.probe(asking(PROMPT)) for _ in range(5)] == [8] * 5
    assert (engine.control.stats(), engine.control.prefix_cache_stats()) == before


async def test_without_a_cache_nothing_is_seen(serve: Callable[..., AsyncEngine]) -> None:
    for enabled, expected in ((True, 8), (False, 0)):
        cache = make_cache(65, 4, model="m")
        scheduler = Scheduler(
            fake_engine.SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8),
            cache,
            max_model_len=128,
            enable_prefix_caching=enabled,
        )
        engine = serve(cache=cache, scheduler=scheduler)
        await answer(engine, make_request("warm", PROMPT))
        assert engine.probe(asking(PROMPT)) == expected


async def test_after_a_reset_nothing_is_seen(serve: Callable[..., AsyncEngine]) -> None:
    engine = serve()
    await answer(engine, make_request("warm", PROMPT))
    await engine.run(lambda control: control.reset_prefix_cache())
    assert engine.probe(asking(PROMPT)) == 0


async def test_a_probe_is_checked_as_a_request_is(serve: Callable[..., AsyncEngine]) -> None:
    engine = serve()
    for prompt in ([], [10**6], list(range(128)) * 2):
        request = asking(prompt)
        with pytest.raises(InvalidRequestError) as reported:
            engine.probe(request)
        with pytest.raises(InvalidRequestError) as expected:
            engine.generate(request)
        assert str(reported.value) == str(expected.value)
    engine.close()
    with pytest.raises(EngineDeadError):
        engine.probe(asking(PROMPT))


async def test_a_probe_does_not_wait_for_a_step() -> None:
    engine, runner, _ = make_engine()
    gate = StepGate(runner)
    served = AsyncEngine(engine)
    try:
        await answer(served, make_request("warm", PROMPT))
        gate.hold_after()
        busy = asyncio.ensure_future(answer(served, make_request("busy", [*PROMPT, 50, 51])))
        await gate.until_held()
        assert served.probe(asking(PROMPT)) == 8
        assert served.probe(asking([*PROMPT, 50, 51])) == 8, "the third block is being computed"
        assert not busy.done()
        gate.open()
        assert await busy == 8
        assert served.probe(asking([*PROMPT, 50, 51])) == 12
    finally:
        gate.open()
        served.close()


async def test_probes_of_many_threads_next_to_a_busy_engine() -> None:
    """A prompt that somebody holds is seen by every probe, while others evict each other."""
    inner, _, cache = make_engine(num_blocks=33)
    engine = AsyncEngine(inner)
    kept = [7] * 16
    done = threading.Event()

    def hold() -> None:
        cache.start(asking(kept, name="holder"))
        cache.commit("holder", 0, 16, 99)
        cache.mark_filled(["holder"], [16])

    def probe(number: int) -> set[int]:
        seen: set[int] = set()
        while not done.is_set():
            assert engine.probe(asking([*kept, number])) == 16
            seen.add(engine.probe(asking([number] * 40)))
        return seen

    async def evict_one_another() -> None:
        for turn in range(40):
            request = make_request(f"{turn}", [20 + turn % 6] * 40, max_tokens=1)
            assert await answer(engine, request) in range(0, 40, 4)

    await asyncio.wrap_future(engine._thread.submit(hold))
    with ThreadPoolExecutor(3) as executor:
        probes = [executor.submit(probe, number) for number in (20, 21, 22)]
        try:
            await evict_one_another()
        finally:
            done.set()
        seen = set[int]().union(*(one.result() for one in probes))
    engine.close()
    assert 40 in seen
    assert min(seen) < 40, "some were evicted"


class Part:
    """A part of a cache; remembers which threads call what."""

    def __init__(self, part: Any, callers: defaultdict[str, set[int]]) -> None:
        self._part = part
        self._callers = callers

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if callable(value):
            self._callers[name].add(threading.get_ident())
        return value


class Watched(CacheManager):
    """Remembers which threads call what, of its parts too."""

    callers: defaultdict[str, set[int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.callers = defaultdict(set)
        for name in ("core", "reader", "versions", "hints", "size"):
            setattr(self, name, Part(getattr(self, name), self.callers))

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if inspect.ismethod(value) and not name.startswith("_"):
            self.callers[name].add(threading.get_ident())
        return value


async def test_only_the_loop_and_probes_reach_the_cache() -> None:
    engine, _, cache = make_engine(num_blocks=9, make_cache=partial(make_cache, kind=Watched))
    assert isinstance(cache, Watched)
    served = AsyncEngine(engine)
    try:
        await asyncio.gather(
            *(answer(served, make_request(f"{i}", [i + 1] * 9, max_tokens=9)) for i in range(6))
        )
        left = served.generate(make_request("left", PROMPT))
        await anext(left)
        await left.aclose()
        stopped = served.generate(make_request("stopped", PROMPT))
        await anext(stopped)
        await served.abort("stopped")
        served.probe(asking(PROMPT))
        list(served.metrics.collect())
        served.control.stats()
        served.control.prefix_cache_stats()
        await served.run(lambda control: control.reset_prefix_cache())
        await served.run(lambda control: control.pause())
        await served.run(lambda control: control.resume())
    finally:
        served.close()
    loop = {served.thread_id}
    elsewhere = {name for name, threads in cache.callers.items() if threads != loop}
    elsewhere -= {"block_map", "keep_events"}  # which the control holds
    assert elsewhere == READERS | {"close"}, "which is called once the loop has ended"
    assert all(cache.callers[name] - loop == {threading.get_ident()} for name in elsewhere)
    assert {
        "adopt_writer",
        "start",
        "commit",
        "ensure_slots",
        "mark_filled",
        "free",
        "reset",
    } <= set(cache.callers)


async def test_an_engine_that_has_served_already_is_taken_over() -> None:
    engine, _, _ = make_engine()
    engine.add_request(make_request("first", PROMPT))
    while engine.has_unfinished():
        engine.step()
    served = AsyncEngine(engine)
    try:
        outputs = [output async for output in served.generate(make_request("second", PROMPT))]
    finally:
        served.close()
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == answer_alone(PROMPT, 4)
    assert outputs[-1].num_cached_tokens == 8


GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Callable[..., Path]) -> LLM:
    return LLM(str(tiny_checkpoint()), dtype="float32", num_blocks=65)


def test_llm_probes_every_form_of_a_prompt(llm: LLM) -> None:
    text = "A block of the cache holds the keys and values of sixteen tokens."
    (result,) = llm.generate(text, GREEDY, use_tqdm=False)
    ids = result.prompt_token_ids
    full = len(ids) // 16 * 16
    assert full
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}, [5, 6, 7]]
    assert llm.probe(forms) == [full] * 4 + [0]
    assert llm.probe(text) == [full]
    salts = [CacheOptions(), CacheOptions(salt="x")]
    assert llm.probe([ids, ids], cache_options=salts) == [full, 0]
    with pytest.raises(InvalidRequestError):
        llm.probe([[]])
    with pytest.raises(InvalidRequestError, match="cache_options"):
        llm.probe([ids, ids], cache_options=[CacheOptions()])


def test_llm_may_be_driven_by_one_thread_after_another(llm: LLM) -> None:
    prompt = list(range(100, 150))

    def work() -> int:
        (result,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        return result.num_cached_tokens

    hits: list[int] = []
    for _ in range(2):
        with ThreadPoolExecutor(1) as executor:
            hits.append(executor.submit(work).result())
        hits.append(work())
        with ThreadPoolExecutor(1) as executor:
            executor.submit(llm.control.reset_prefix_cache).result()
    assert hits == [0, 48] * 2


def test_a_sleeping_llm_is_not_probed(llm: LLM) -> None:
    llm.control.sleep()
    with pytest.raises(EngineHaltedError):
        llm.probe([1, 2, 3])
    llm.control.wake_up()
    assert llm.probe([1, 2, 3]) == [0]
