"""Control through the queue of the loop's thread: who waits, who gets an error, who is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from fakes.fake_engine import make_request
from fakes.fake_memory import FakeWeights, lone_answer, make_versioned_engine
from fakes.fake_runner import StepGate, loop_passes
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.engine.control import Control
from prefixcache.exceptions import EngineDeadError, EngineHaltedError, InvalidRequestError
from prefixcache.models.checkpoint import Checkpoint
from prefixcache.types.request import RequestOutput

T = TypeVar("T")
PROMPT = [*range(10, 27)]
LONG = 90


class Served:
    """An `AsyncEngine`, its parts, and a gate that can hold a step."""

    def __init__(self) -> None:
        engine, self.runner, self.cache = make_versioned_engine(max_model_len=128)
        self.gate = StepGate(self.runner)
        self.engine = AsyncEngine(engine)

    async def start_held(self) -> asyncio.Task[list[RequestOutput]]:
        """A long request, held in a step after it has streamed some tokens."""
        self.gate.hold_after(3)
        task = self.start("long", LONG)
        await self.gate.until_held()
        return task

    async def right_after_the_step(self, operation: Callable[[Control], T]) -> T:
        return await self.gate.open_for(self.engine, self.engine.run(operation))

    def start(self, name: str, max_tokens: int = 8) -> asyncio.Task[list[RequestOutput]]:
        return asyncio.create_task(self.collect(name, max_tokens))

    async def collect(self, name: str, max_tokens: int) -> list[RequestOutput]:
        request = make_request(name, PROMPT, max_tokens=max_tokens)
        return [output async for output in self.engine.generate(request)]


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(
        "prefixcache.engine.weights.weight_updates.resolve_model", lambda name, revision: Path(name)
    )
    served = Served()
    yield served
    await served.engine.shutdown()


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    last = max((i for i, output in enumerate(outputs) if output.restarted), default=-1)
    return [token for output in outputs[last + 1 :] for token in output.token_ids]


async def test_requests_that_come_while_paused_wait(served: Served) -> None:
    await served.engine.run(lambda control: control.pause())
    task = served.start("a")
    while served.engine.num_streams < 1:
        await asyncio.sleep(0.001)
    await loop_passes(served.engine)
    assert not task.done()
    assert not served.runner.plans
    assert served.engine.control.is_paused
    await served.engine.run(lambda control: control.resume())
    assert tokens_of(await task) == lone_answer(PROMPT, 8, 0)


async def test_a_paused_loop_sleeps(served: Served) -> None:
    running = await served.start_held()
    await served.right_after_the_step(lambda control: control.pause())
    count = len(served.runner.plans)
    await loop_passes(served.engine)
    assert len(served.runner.plans) == count
    await served.engine.run(lambda control: control.resume())
    assert tokens_of(await running) == lone_answer(PROMPT, LONG, 0)


async def test_a_stream_gets_an_error_when_it_restarts(served: Served) -> None:
    running = await served.start_held()
    assert (
        await served.right_after_the_step(lambda control: control.update_weights_from_disk("1"))
        == 1
    )
    outputs = await running
    assert [output.restarted for output in outputs].count(True) == 1
    assert tokens_of(outputs) == lone_answer(PROMPT, LONG, 1)


async def test_new_weights_are_looked_for_in_parallel_with_steps(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()
    check = FakeWeights.check_folder

    def watched(weights: FakeWeights, folder: Path) -> Checkpoint:
        checkpoint = check(weights, folder)
        looked.set()
        return checkpoint

    monkeypatch.setattr(FakeWeights, "check_folder", watched)
    running = await served.start_held()
    update = asyncio.create_task(
        served.engine.run(lambda control: control.update_weights_from_disk("1"))
    )
    assert await asyncio.to_thread(looked.wait, 60), "the step is held, and nobody waits for it"
    assert served.runner.weights == 0
    served.gate.open()
    assert await update == 1
    assert tokens_of(await running) == lone_answer(PROMPT, LONG, 1)


async def test_commands_wait_for_no_thread_of_others(served: Served) -> None:
    held = threading.Event()
    loop = asyncio.get_running_loop()
    others = [loop.run_in_executor(None, held.wait, 120) for _ in range(64)]
    try:
        await asyncio.wait_for(served.engine.run(lambda control: control.pause()), 60)
        assert served.engine.control.is_paused
    finally:
        held.set()
    await asyncio.gather(*others)


async def test_commands_may_be_called_from_any_thread(served: Served) -> None:
    running = await served.start_held()
    control = served.engine.control
    pausing = asyncio.create_task(asyncio.to_thread(control.pause))
    while not served.engine.num_commands:
        await asyncio.sleep(0.001)
    assert not control.is_paused
    served.gate.open()
    await pausing
    assert control.is_paused
    await asyncio.to_thread(control.resume)
    assert tokens_of(await running) == lone_answer(PROMPT, LONG, 0)


async def test_aborted_streams_end(served: Served) -> None:
    running = await served.start_held()
    await served.right_after_the_step(
        lambda control: control.update_weights_from_disk("1", "abort")
    )
    assert (await running)[-1].finish_reason == "abort"


async def test_a_sleeping_engine_refuses_requests_and_keeps_those_it_has(served: Served) -> None:
    running = await served.start_held()
    await served.right_after_the_step(lambda control: control.sleep(2))
    assert served.engine.control.is_sleeping
    with pytest.raises(EngineHaltedError, match="asleep"):
        served.engine.generate(make_request("b"))
    await served.engine.run(lambda control: control.wake_up())
    assert tokens_of(await running) == lone_answer(PROMPT, LONG, 0)
    assert not served.engine.control.is_sleeping


async def test_a_request_that_meets_the_engine_falling_asleep_is_refused(served: Served) -> None:
    stream = served.engine.generate(make_request("a"))
    await served.engine.run(lambda control: control.sleep())
    with pytest.raises(EngineHaltedError):
        await anext(stream)


async def test_chunks_come_through_the_queue(served: Served) -> None:
    running = await served.start_held()
    await served.right_after_the_step(lambda control: control.begin_weight_update())
    count = len(served.runner.plans)
    for name in ("a", "b"):
        chunk = {name: torch.tensor(3)}
        await asyncio.to_thread(served.engine.control.update_weights, chunk)
        await loop_passes(served.engine)
    assert len(served.runner.plans) == count
    assert await served.engine.run(lambda control: control.end_weight_update(full=True)) == 1
    assert tokens_of(await running) == lone_answer(PROMPT, LONG, 3)
    state = {name: torch.tensor(4) for name in ("a", "b")}
    assert await served.engine.run(lambda control: control.load_state_dict(state)) == 2
    assert tokens_of(await served.start("b")) == lone_answer(PROMPT, 8, 4)
    stats = served.engine.control.prefix_cache_stats()
    assert (stats.weight_version, stats.queries) == (2, 3)


async def test_errors_reach_the_caller_and_the_engine_serves_on(served: Served) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await served.engine.run(lambda control: control.update_weights_from_disk("broken"))
    assert caught.value.param == "model_path"
    with pytest.raises(InvalidRequestError):
        await served.engine.run(lambda control: control.end_weight_update())
    assert tokens_of(await served.start("a")) == lone_answer(PROMPT, 8, 0)


@pytest.mark.parametrize("drain", [False, True])
async def test_shutting_down_a_halted_engine_ends_its_requests(served: Served, drain: bool) -> None:
    running = await served.start_held()
    await served.right_after_the_step(lambda control: control.pause())
    waiting = served.start("b")
    await asyncio.sleep(0)
    await asyncio.wait_for(served.engine.shutdown(drain=drain), 60)
    assert (await running)[-1].finish_reason == "abort"
    assert (await waiting)[-1].finish_reason == "abort"
    assert served.cache.core.num_free_blocks == served.cache.size.num_blocks - 1
    with pytest.raises(EngineDeadError):
        await served.engine.run(lambda control: control.update_weights_from_disk("1"))
