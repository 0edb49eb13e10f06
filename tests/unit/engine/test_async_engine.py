"""Streams, cancellation, shutdown and death of the engine's thread."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest

from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import StepGate, answer_alone, loop_passes
from prefixcache.engine.async_engine import AsyncEngine
from prefixcache.engine.control import Control
from prefixcache.engine.engine import Engine
from prefixcache.engine.threads import streams
from prefixcache.engine.threads.engine_thread import EngineThread
from prefixcache.exceptions import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RateLimitError,
    RequestTimeoutError,
    SlowReaderError,
)
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.types.request import Request, RequestOutput
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.structured_output import StructuredOutput
from prefixcache.types.token_ids import as_token_ids
from support.serving import until

PROMPT = [1, 2, 3, 4, 5]


class Served:
    """An `AsyncEngine`, its parts, and a gate that can hold the runner."""

    def __init__(
        self,
        *,
        max_queue: int | None = None,
        max_waiting_per_client: int | None = None,
        **options: Any,
    ) -> None:
        engine, self.runner, self.cache = make_engine(**options)
        self.gate = StepGate(self.runner)
        self.engine = AsyncEngine(
            engine, max_queue=max_queue, max_waiting_per_client=max_waiting_per_client
        )

    @property
    def num_waiting(self) -> float | None:
        registry = self.engine.metrics.registry
        return registry.get_sample_value("prefixcache:num_requests_waiting")


Make = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Make]:
    made: list[Served] = []

    def make(**options: Any) -> Served:
        made.append(Served(**options))
        return made[-1]

    yield make
    for served in made:
        served.gate.open()
        served.engine.close()


async def collect(engine: AsyncEngine, request: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(request)]


async def start_held(served: Served) -> asyncio.Task[list[RequestOutput]]:
    """A long request, held before its fourth step."""
    served.gate.hold_after(3)
    task = asyncio.create_task(collect(served.engine, make_request(max_tokens=100)))
    await served.gate.until_held()
    return task


def all_free(cache: CacheManager) -> Callable[[], bool]:
    return lambda: cache.core.num_free_blocks == cache.size.num_blocks - 1


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_streams_are_the_lone_answers(serve: Make) -> None:
    served = serve()
    prompts = [[*range(i, i + 9)] for i in range(12)]
    answers = await asyncio.gather(
        *(collect(served.engine, make_request(str(i), p)) for i, p in enumerate(prompts))
    )
    assert [tokens_of(answer) for answer in answers] == [answer_alone(p, 4) for p in prompts]
    assert all(answer[-1].finish_reason == "length" for answer in answers)


async def test_an_id_in_use_fails_its_own_stream_alone(serve: Make) -> None:
    served = serve()
    served.gate.hold_after()
    first = asyncio.create_task(collect(served.engine, make_request()))
    await until(lambda: served.engine.num_streams > 0)
    second = asyncio.create_task(collect(served.engine, make_request()))
    await asyncio.sleep(0)
    served.gate.open()
    with pytest.raises(InvalidRequestError, match="in use"):
        await second
    assert tokens_of(await first) == answer_alone(PROMPT, 4)


async def test_an_unexpected_error_in_add_fails_its_own_stream_alone(serve, monkeypatch):
    served = serve()
    start = served.cache.start

    def start_unless_bad(request: Request, *, hashed: bool) -> None:
        if request.request_id == "bad":
            raise UnicodeError("no such salt")
        start(request, hashed=hashed)

    monkeypatch.setattr(served.cache, "start", start_unless_bad)
    with pytest.raises(UnicodeError, match="no such salt"):
        await asyncio.wait_for(collect(served.engine, make_request("bad")), 60)
    assert served.engine.dead is None
    assert tokens_of(await collect(served.engine, make_request("good"))) == answer_alone(PROMPT, 4)


async def test_poisoned_requests_do_not_end_an_idle_server(serve, caplog):
    served = serve()
    served.runner.failures = [RuntimeError("poisoned") for _ in range(5)]
    with caplog.at_level(logging.CRITICAL):
        for _ in range(5):
            (failed,) = await collect(served.engine, make_request())
            assert failed.error == "RuntimeError, of which the log says more"
    assert tokens_of(await collect(served.engine, make_request())) == answer_alone(PROMPT, 4)


async def test_closing_an_ended_stream_leaves_a_new_request_of_its_id_alone(serve: Make) -> None:
    served = serve()
    first = served.engine.generate(make_request(max_tokens=4))
    await anext(first)
    await until(lambda: served.engine.num_streams == 0)
    served.gate.hold_after()
    second = asyncio.create_task(collect(served.engine, make_request(max_tokens=50)))
    await until(lambda: served.engine.num_streams > 0)
    await first.aclose()
    served.gate.open()
    assert tokens_of(await second) == answer_alone(PROMPT, 50)


async def test_closing_a_stream_aborts_and_frees(serve: Make) -> None:
    served = serve()
    served.gate.hold_after(3)
    stream = served.engine.generate(make_request(max_tokens=100))
    await anext(stream)
    await served.gate.until_held()
    await stream.aclose()
    served.gate.open()
    await until(all_free(served.cache))
    assert len(served.runner.plans) == 4


async def test_cancelling_a_task_aborts_and_frees(serve: Make) -> None:
    served = serve()
    task = await start_held(served)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    served.gate.open()
    await until(all_free(served.cache))
    assert len(served.runner.plans) == 4


async def test_a_stream_that_is_never_read_starts_nothing(serve: Make) -> None:
    served = serve()
    served.engine.generate(make_request())
    assert tokens_of(await collect(served.engine, make_request())) == answer_alone(PROMPT, 4)


async def test_abort_ends_the_stream(serve: Make) -> None:
    served = serve()
    task = await start_held(served)
    await served.gate.open_for(served.engine, served.engine.abort("a"))
    outputs = await task
    assert tokens_of(outputs) == answer_alone(PROMPT, 4)
    assert outputs[-1].finish_reason == "abort"
    assert served.cache.core.num_free_blocks == served.cache.size.num_blocks - 1


def ask(name: str, job: str | None = None) -> Request:
    return dataclasses.replace(make_request(name), job_id=job)


async def test_a_full_queue_refuses_and_says_when_to_come_again(serve: Make) -> None:
    served = serve(max_queue=2, max_num_seqs=1)
    running = await start_held(served)
    waiting = [
        asyncio.create_task(collect(served.engine, ask("b"))),
        asyncio.create_task(collect(served.engine, ask("c"))),
    ]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match=r"2 requests wait already.*holds 2") as caught:
        served.engine.generate(ask("d"))
    assert 1 <= caught.value.retry_after <= 60
    metrics = served.engine.metrics.registry
    assert metrics.get_sample_value("prefixcache:queue_full_refusals_total") == 1
    served.gate.open()
    for answer in await asyncio.gather(running, *waiting):
        assert answer[-1].finish_reason == "length"
    assert (await collect(served.engine, ask("d")))[-1].finished


async def test_a_burst_between_two_steps_is_bounded_too(serve: Make) -> None:
    served = serve(max_queue=3)
    running = await start_held(served)
    streams = [served.engine.generate(ask(f"first {number}")) for number in range(3)]
    for number in range(7):
        with pytest.raises(QueueFullError):
            served.engine.generate(ask(f"later {number}"))
    del streams
    served.gate.open()
    await running


async def test_requests_of_a_job_that_waits_join_it(serve: Make) -> None:
    served = serve(max_queue=1, max_num_seqs=1)
    running = await start_held(served)
    streams = [served.engine.generate(ask(str(number), "job")) for number in range(5)]
    with pytest.raises(QueueFullError):
        served.engine.generate(ask("other"))
    served.gate.open()
    for stream in streams:
        assert [output async for output in stream][-1].finish_reason == "length"
    await running


def of_key(name: str, client: str) -> Request:
    return dataclasses.replace(make_request(name), client=client)


async def test_a_key_may_have_that_many_requests_wait_and_others_go_on(serve: Make) -> None:
    served = serve(max_waiting_per_client=2, max_num_seqs=1)
    running = await start_held(served)
    waiting = [
        asyncio.create_task(collect(served.engine, of_key(f"a{number}", "a")))
        for number in range(2)
    ]
    await asyncio.sleep(0)
    with pytest.raises(RateLimitError, match=r"2 requests with this API key .* and 2 may"):
        served.engine.generate(of_key("a2", "a"))
    other = asyncio.create_task(collect(served.engine, of_key("b", "b")))
    await asyncio.sleep(0)
    served.gate.open()
    for answer in await asyncio.gather(running, *waiting, other):
        assert answer[-1].finish_reason == "length"
    assert (await collect(served.engine, of_key("a2", "a")))[-1].finished


async def test_a_queue_filled_by_one_key_still_takes_others_up_to_their_share(serve: Make) -> None:
    served = serve(max_queue=4, max_num_seqs=1)
    running = await start_held(served)
    open_streams = [served.engine.generate(of_key(f"a{number}", "a")) for number in range(4)]
    with pytest.raises(QueueFullError):
        served.engine.generate(of_key("a4", "a"))
    open_streams += [served.engine.generate(of_key(f"b{number}", "b")) for number in range(4)]
    with pytest.raises(QueueFullError):
        served.engine.generate(of_key("b4", "b"))
    with pytest.raises(QueueFullError):
        served.engine.generate(make_request("without a key"))
    del open_streams
    served.gate.open()
    await running


async def test_at_its_deadline_a_request_is_cut_whether_or_not_it_is_read(serve: Make) -> None:
    served = serve()
    served.gate.hold_after(3)
    timers: list[tuple[Any, ...]] = []
    loop = asyncio.get_running_loop()
    with mock.patch.object(loop, "call_later", lambda *timer: timers.append(timer) or mock.Mock()):
        stream = await served.engine.generate_batches(
            job_of([PROMPT] * 3, max_tokens=100), deadline=time.monotonic() + 60
        )
        await anext(stream)
    ((seconds, cut, *given),) = timers
    assert 0 < seconds <= 60
    await served.gate.until_held()
    cut(*given)
    served.gate.open()
    await until(all_free(served.cache))
    assert len(served.runner.plans) < 50  # they did not run to their end
    with pytest.raises(RequestTimeoutError):
        await anext(stream)
    assert served.engine.num_streams == 0


async def test_a_request_that_waits_is_cut_at_its_deadline_too(serve: Make) -> None:
    served = serve(max_num_seqs=1)
    running = await start_held(served)
    with pytest.raises(RequestTimeoutError):
        async for _ in await served.engine.generate_batches(
            [make_request("late")], deadline=time.monotonic() + 0.05
        ):
            pass
    served.gate.open()
    assert tokens_of(await running) == answer_alone(PROMPT, 100)
    assert all_free(served.cache)()


async def test_outputs_that_nobody_reads_are_bounded(serve: Make) -> None:
    served = serve()
    served.gate.hold_after(3)
    stream = await served.engine.generate_batches([make_request(max_tokens=100)], max_unread=5)
    await anext(stream)
    await served.gate.until_held()
    served.gate.open()
    await until(all_free(served.cache))
    with pytest.raises(SlowReaderError):
        await anext(stream)


def job_of(prompts: Sequence[Sequence[int]], **params: Any) -> list[Request]:
    return [
        dataclasses.replace(make_request(f"job {i}", prompt, **params), job_id="job")
        for i, prompt in enumerate(prompts)
    ]


async def collect_all(engine: AsyncEngine, requests: Sequence[Request]) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in requests]
    async for index, output in await engine.generate_all(requests):
        answers[index] += output.token_ids
    return answers


async def test_a_job_is_one_stream_and_one_command(serve: Make) -> None:
    served = serve(max_num_seqs=4)
    running = await start_held(served)
    prompts = [[*range(i, i + 9)] for i in range(12)]
    job = asyncio.create_task(collect_all(served.engine, job_of(prompts)))
    await until(lambda: served.engine.num_commands > 0)
    assert served.engine.num_commands == 1
    served.gate.open()
    assert await job == [answer_alone(prompt, 4) for prompt in prompts]
    await running


async def test_closing_a_job_ends_all_its_requests(serve: Make) -> None:
    served = serve(max_num_seqs=2)
    served.gate.hold_after(3)
    stream = await served.engine.generate_all(job_of([PROMPT] * 5, max_tokens=100))
    await anext(stream)
    await served.gate.until_held()
    assert served.engine.num_streams == 5
    await stream.aclose()
    served.gate.open()
    await until(all_free(served.cache))
    assert served.engine.num_streams == 0
    assert len(served.runner.plans) == 4


async def test_a_request_that_cannot_be_added_ends_its_job_alone(serve, monkeypatch):
    served = serve()
    other = await start_held(served)
    start = served.cache.start

    def start_unless_bad(request: Request, *, hashed: bool) -> None:
        if request.request_id == "job 3":
            raise UnicodeError("no such salt")
        start(request, hashed=hashed)

    monkeypatch.setattr(served.cache, "start", start_unless_bad)
    job = asyncio.create_task(collect_all(served.engine, job_of([PROMPT] * 5)))
    await until(lambda: served.engine.num_commands > 0)
    served.gate.open()
    with pytest.raises(UnicodeError, match="no such salt"):
        await job
    assert tokens_of(await other) == answer_alone(PROMPT, 100)
    await until(all_free(served.cache))
    assert served.engine.num_streams == 0, "nothing of the job stays"


async def test_a_job_is_checked_as_a_whole_before_it_starts(serve: Make) -> None:
    served = serve()
    requests = job_of([PROMPT, PROMPT, [10**6]])
    with pytest.raises(InvalidRequestError, match="token id 1000000"):
        await served.engine.generate_all(requests)
    for wrong in ([], [ask("a"), ask("b")]):
        with pytest.raises(InvalidRequestError, match="one job_id"):
            await served.engine.generate_all(wrong)
    await loop_passes(served.engine)
    assert not served.runner.plans


async def test_steps_go_on_while_a_long_job_is_added(serve, monkeypatch):
    monkeypatch.setattr(streams, "_AT_ONCE", 1)
    served = serve(max_num_seqs=8)
    running = await start_held(served)
    steps: list[int] = []
    start = served.cache.start

    def counted(request: Request, *, hashed: bool) -> None:
        steps.append(len(served.runner.plans))
        start(request, hashed=hashed)

    monkeypatch.setattr(served.cache, "start", counted)
    job = asyncio.create_task(collect_all(served.engine, job_of([PROMPT] * 6)))
    await until(lambda: served.engine.num_commands > 0)
    served.gate.open()
    await asyncio.gather(job, running)
    assert steps == [*range(steps[0], steps[0] + 6)]


@pytest.mark.parametrize("drain", [False, True])
async def test_a_shutdown_meets_a_job_that_is_still_added(serve, monkeypatch, drain):
    monkeypatch.setattr(streams, "_AT_ONCE", 1)
    served = serve(max_num_seqs=2)
    served.gate.hold_after(1)
    job = asyncio.create_task(collect_all(served.engine, job_of([PROMPT] * 9)))
    await served.gate.until_held()
    stopping = asyncio.create_task(served.engine.shutdown(drain=drain))
    await until(lambda: served.engine.num_commands == 2)
    served.gate.open()
    await stopping
    if drain:
        assert await job == [answer_alone(PROMPT, 4)] * 9
    else:
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(job, 60)
    assert all_free(served.cache)()


async def test_a_job_that_is_closed_while_it_is_added_adds_no_more(serve, monkeypatch):
    monkeypatch.setattr(streams, "_AT_ONCE", 1)
    served = serve()
    served.gate.hold_after(2)
    stream = await served.engine.generate_all(job_of([PROMPT] * 40, max_tokens=50))
    await anext(stream)
    await served.gate.until_held()
    await stream.aclose()
    served.gate.open()
    await until(lambda: served.engine.num_streams == served.engine.num_commands == 0)
    await loop_passes(served.engine)
    assert all_free(served.cache)()
    assert len(served.runner.plans) == 3


async def test_a_refused_add_gives_its_place_up(serve: Make) -> None:
    served = serve(max_queue=1)
    first = await start_held(served)
    second = collect(served.engine, ask("a", "another job"))
    with pytest.raises(InvalidRequestError, match="in use"):
        await served.gate.open_for(served.engine, second)
    await first
    assert (await collect(served.engine, ask("next")))[-1].finished


async def test_looking_does_not_wait_for_a_step(serve: Make) -> None:
    served = serve()
    task = await start_held(served)
    stats = served.engine.control.prefix_cache_stats()
    assert (stats.queries, stats.blocks_in_use) == (1, 2)
    assert served.engine.control.stats()["blocks_in_use"] == 2
    assert not served.engine.control.is_paused
    assert not served.engine.control.is_sleeping
    assert not task.done()


async def test_an_idle_engine_takes_no_steps_and_does_not_spin(serve: Make) -> None:
    served = serve()
    await collect(served.engine, make_request())
    await loop_passes(served.engine)
    with mock.patch.object(Engine, "has_work", autospec=True, side_effect=Engine.has_work) as look:
        for _ in range(20):
            await loop_passes(served.engine)
    assert look.call_count <= 3 * 40, "a look or two for each command"
    assert len(served.runner.plans) == 4


async def test_one_delivery_a_step(serve: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    loop = asyncio.get_running_loop()
    calls = 0
    original = loop.call_soon_threadsafe

    def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
        nonlocal calls
        calls += threading.get_ident() == served.engine.thread_id
        return original(*args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    await asyncio.gather(
        *(collect(served.engine, make_request(str(i), max_tokens=6)) for i in range(8))
    )
    assert calls == len(served.runner.plans)


async def test_draining_finishes_what_runs_and_refuses_what_comes(serve: Make) -> None:
    served = serve()
    served.gate.hold_after()
    running = asyncio.create_task(collect(served.engine, make_request("a")))
    await until(lambda: served.engine.num_streams > 0)
    stopping = asyncio.create_task(served.engine.shutdown(drain=True))
    await until(lambda: served.engine.num_commands > 0)
    late = asyncio.create_task(collect(served.engine, make_request("late")))
    await asyncio.sleep(0)
    served.gate.open()
    assert tokens_of(await running) == answer_alone(PROMPT, 4)
    with pytest.raises(EngineDeadError):
        await late
    await stopping


async def test_shutdown_aborts_what_runs(serve: Make) -> None:
    served = serve()
    task, control = await start_held(served), served.engine.control
    await served.gate.open_for(served.engine, served.engine.shutdown())
    assert (await task)[-1].finish_reason == "abort"
    assert served.cache.core.num_free_blocks == served.cache.size.num_blocks - 1
    await served.engine.shutdown()
    for call in (lambda: served.engine.control, control.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()
    with pytest.raises(EngineDeadError, match="shut down"):
        await served.engine.run(Control.reset_prefix_cache)
    with pytest.raises(EngineDeadError, match="shut down"):
        served.engine.generate(make_request())


async def test_a_dead_engine_tells_everybody(serve, caplog, monkeypatch):
    served = serve()
    served.gate.hold_after()
    tasks = [
        asyncio.create_task(collect(served.engine, make_request(name, max_tokens=50)))
        for name in "abc"
    ]
    await until(lambda: served.engine.num_streams > 0)
    command = asyncio.create_task(served.engine.run(lambda control: control.reset_prefix_cache()))
    await asyncio.sleep(0)

    def broken(*_: Any) -> None:
        raise ValueError("the books are wrong")

    monkeypatch.setattr(served.cache, "append_tokens", broken)
    with caplog.at_level(logging.CRITICAL):
        served.gate.open()
        results = await asyncio.gather(*tasks, command, return_exceptions=True)
    assert {type(result) for result in results} == {EngineDeadError}
    assert "the books are wrong" in str(served.engine.dead)
    with pytest.raises(EngineDeadError):
        served.engine.generate(make_request())


class _DyingInbox:
    """A queue whose engine dies between a caller's look at it and the caller's `put`."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._error, thread.error = thread.error, None
        self._commands: list[Callable[[], None]] = []

    def put(self, command: Callable[[], None]) -> None:
        self._thread.error = self._error
        self._commands.append(command)

    def qsize(self) -> int:
        return len(self._commands)

    def get_nowait(self) -> Callable[[], None]:
        if not self._commands:
            raise queue.Empty
        return self._commands.pop()


@pytest.mark.parametrize("call", ["generate", "reset_prefix_cache"])
async def test_a_caller_that_meets_the_engine_dying_is_answered(serve: Make, call: str) -> None:
    engine = serve().engine
    await engine.shutdown()
    thread = engine._thread
    inbox, thread._inbox = thread._inbox, _DyingInbox(thread)  # type: ignore[assignment]
    waiting = (
        collect(engine, make_request())
        if call == "generate"
        else engine.run(lambda control: control.reset_prefix_cache())
    )
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(waiting, 60)
    thread._inbox = inbox


def test_streams_of_two_event_loops(serve: Make) -> None:
    served = serve()
    answers: dict[str, list[int]] = {}

    def client(name: str) -> None:
        outputs = asyncio.run(collect(served.engine, make_request(name, max_tokens=20)))
        answers[name] = tokens_of(outputs)

    threads = [threading.Thread(target=client, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {name: answer_alone(PROMPT, 20) for name in "ab"}


def test_a_closed_event_loop_frees_its_requests(serve: Make) -> None:
    served = serve()
    served.gate.hold_after(3)
    loop = asyncio.new_event_loop()
    stream = served.engine.generate(make_request(max_tokens=100))
    loop.run_until_complete(anext(stream))
    loop.run_until_complete(served.gate.until_held())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    served.gate.open()
    asyncio.run(until(all_free(served.cache)))
    assert len(served.runner.plans) == 4


class CountedIds(tuple[int, ...]):
    """Token ids that count how often somebody goes through them."""

    num_looks = 0

    def __iter__(self) -> Iterator[int]:
        CountedIds.num_looks += 1
        return super().__iter__()


@pytest.mark.parametrize("options", [{"seed": 3}, {}], ids=["seeded", "unseeded"])
async def test_token_ids_of_options_are_checked_once_a_job(
    serve: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    monkeypatch.setattr(CountedIds, "num_looks", 0)
    ids = CountedIds(range(90))
    params = SamplingParams(n=50, max_tokens=1, allowed_token_ids=ids, min_tokens=1, **options)
    requests = [
        Request(
            request_id=f"{choice}",
            prompt_token_ids=[5, 6, 7],
            params=params.for_choice(choice),
            job_id="job",
        )
        for choice in range(params.n)
    ]
    served = serve()
    ended = [one async for one in await served.engine.generate_all(requests)]
    assert len(ended) == len(requests)
    assert CountedIds.num_looks <= 3


async def test_a_grammar_is_looked_up_once_a_job(serve: Make) -> None:
    served, grammar = serve(), mock.Mock()
    grammar.for_answer.return_value = None
    params = SamplingParams(n=3, max_tokens=1, structured_output=StructuredOutput("regex", "a"))
    prompt = as_token_ids([5, 6, 7])
    requests = [
        Request(request_id=f"{choice}", prompt_token_ids=prompt, params=params, job_id="job")
        for choice in range(params.n)
    ]
    rules = served.engine._engine.rules
    with mock.patch.object(rules, "compile", return_value=grammar) as compiled:
        _ = [one async for one in await served.engine.generate_all(requests)]
    assert (compiled.call_count, grammar.for_answer.call_count) == (1, 3)


async def test_a_choice_with_other_ids_is_checked_too(serve: Make) -> None:
    requests = job_of([[5, 6], [5, 6]], allowed_token_ids=(5,))
    wrong = dataclasses.replace(requests[1].params, allowed_token_ids=(10**6,))
    requests[1] = dataclasses.replace(requests[1], params=wrong)
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        await serve().engine.generate_all(requests)
