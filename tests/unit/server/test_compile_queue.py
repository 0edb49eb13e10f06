"""Grammars wait in turns and within bounds, and whoever leaves takes its grammar along."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any
from unittest import mock

import pytest

from prefixcache.exceptions import QueueFullError, RequestTimeoutError, SlowGrammarError
from prefixcache.server.http.access import Caller
from prefixcache.server.jobs import compile_queue
from prefixcache.server.jobs.compile_queue import CompileQueue, TurnQueue
from prefixcache.server.jobs.context import Call
from prefixcache.types.structured_output import StructuredOutput
from support.serving import until


class Gate:
    """A function of a queue: it ends when it is let go, or when nobody wants it any more."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.cancelled: list[str] = []
        self.open = threading.Event()

    def work(self, name: str) -> Callable[[threading.Event], str]:
        def run(cancelled: threading.Event) -> str:
            self.order.append(name)
            while not self.open.wait(0.001):
                if cancelled.is_set():
                    self.cancelled.append(name)
                    raise CancelledError
            return name

        return run


def begin(queue: TurnQueue, gate: Gate, *names: str) -> list[asyncio.Task[str]]:
    """Clients are called by the first letters of the names."""
    return [asyncio.create_task(queue.run(name[0], gate.work(name))) for name in names]


async def test_clients_take_turns() -> None:
    queue, gate = TurnQueue("test"), Gate()
    tasks = begin(queue, gate, "a1", "a2", "a3", "a4", "b1", "b2", "c1")
    await until(lambda: gate.order == ["a1"])
    gate.open.set()
    assert await asyncio.gather(*tasks) == ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    assert gate.order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_who_leaves_takes_its_work_along() -> None:
    queue, gate = TurnQueue("test"), Gate()
    first, second, third = begin(queue, gate, "a1", "a2", "b1")
    await until(lambda: gate.order == ["a1"])
    second.cancel()
    first.cancel()
    await until(lambda: gate.order == ["a1", "b1"])
    assert gate.cancelled == ["a1"]
    gate.open.set()
    assert await third == "b1"
    assert await queue.run("d", gate.work("d1")) == "d1"


async def test_who_leaves_gives_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "_MOST_OF_CLIENT", 2)
    monkeypatch.setattr(compile_queue, "_MOST_WAITING", 3)
    queue, gate = TurnQueue("test"), Gate()
    first, *leaving = begin(queue, gate, "z1", "a1", "a2", "b1")
    await until(lambda: sum(map(len, queue._waiting.values())) == 3)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    assert not queue._waiting
    tasks = begin(queue, gate, "a3", "a4", "b2")
    gate.open.set()
    assert await asyncio.gather(first, *tasks) == ["z1", "a3", "a4", "b2"]


async def test_a_turn_that_came_with_its_cancellation_is_passed_on() -> None:
    queue, gate = TurnQueue("test"), Gate()
    first, second, third = begin(queue, gate, "a1", "b1", "c1")
    await until(lambda: gate.order == ["a1"])
    queue._start_next()
    second.cancel()
    gate.open.set()
    assert await asyncio.gather(first, third) == ["a1", "c1"]
    assert gate.order == ["a1", "c1"]


async def test_too_many_of_a_client_or_in_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "_MOST_OF_CLIENT", 2)
    monkeypatch.setattr(compile_queue, "_MOST_WAITING", 3)
    queue, gate = TurnQueue("test"), Gate()
    tasks = begin(queue, gate, "a1", "a2", "a3", "a4", "b1", "c1")
    await until(lambda: gate.order == ["a1"])
    gate.open.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [one for one in results if isinstance(one, QueueFullError)]
    assert [results[i] for i in (0, 1, 2, 4)] == ["a1", "a2", "a3", "b1"]
    assert len(refused) == 2
    assert refused[0].retry_after > 0


class SlowEngine:
    """Does not compile "slow" in a quick sandbox, and compiles everything once it is released."""

    def __init__(self) -> None:
        self.gate = Gate()

    def compile(
        self, output: StructuredOutput, cancelled: threading.Event, *, quick: bool = False
    ) -> Any:
        if output.text != "slow":
            return output.text
        if quick:
            raise SlowGrammarError("it takes longer")
        return self.gate.work("slow")(cancelled)


async def test_slow_grammars_keep_no_quick_one_waiting() -> None:
    queue, engine = CompileQueue(), SlowEngine()
    slow = [
        asyncio.create_task(queue.compile(engine, StructuredOutput("regex", "slow"), None))  # type: ignore[arg-type]
        for _ in range(20)
    ]
    await until(lambda: engine.gate.order == ["slow"])
    found = await queue.compile(engine, StructuredOutput("regex", "quick"), None)  # type: ignore[arg-type]
    assert found == "quick"
    engine.gate.open.set()
    assert await asyncio.gather(*slow) == ["slow"] * 20  # type: ignore[comparison-overlap]


async def test_a_deadline_ends_the_wait_for_a_grammar() -> None:
    queue, gate = TurnQueue("test"), Gate()
    begun = begin(queue, gate, "a1")
    never = mock.AsyncMock(side_effect=asyncio.Event().wait)
    call = Call(id="x", caller=Caller(), receive=never, logprobs=mock.Mock(), deadline=0.0)
    with pytest.raises(RequestTimeoutError):
        await call.within_bounds(queue.run("b", gate.work("b1")))
    gate.open.set()
    assert await asyncio.gather(*begun) == ["a1"]
    assert gate.order == ["a1"]
