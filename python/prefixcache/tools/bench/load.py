"""Sends sessions to a target, and their turns one after another with the real answers between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import anyio

from prefixcache.tools.bench.arrivals import LoadConfig
from prefixcache.tools.bench.prompts import Content, Message, Prompt
from prefixcache.tools.bench.records import BenchmarkError, RequestFailedError, RequestRecord, Run
from prefixcache.tools.bench.sessions import Session, Turn
from prefixcache.tools.bench.targets import Target
from prefixcache.tools.openai_api import side_by_side


async def drive(
    target: Target,
    sessions: Iterable[Session],
    load: LoadConfig,
    run: Run,
    *,
    limit: int = 0,
    seed: str = "0",
    on_done: Callable[[int], None] = lambda _count: None,
) -> None:
    """Sends all sessions as `load` says, at most `limit` at once (0: all); `run` takes what comes.

    A request that fails ends its session. A server that is gone and a trace that breaks off end the
    run, which tells why and keeps what was measured until then. `on_done` is called with the number
    of requests that are over.
    """
    gate = asyncio.Semaphore(limit) if limit else None
    player = _Player(target, run, seed, on_done)
    start = time.perf_counter()

    async def play(session: Session) -> None:
        try:
            await player.play(session)
        except BenchmarkError as error:
            stop(error)
        finally:
            if gate:
                gate.release()

    def stop(error: BenchmarkError) -> None:
        run.error = run.error or str(error)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        try:
            for due, session in load.schedule(sessions):
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                if gate:
                    await gate.acquire()
                group.start_soon(play, session)
        except BenchmarkError as error:
            stop(error)


class _Player:
    """Sends the turns of one session after another, and those of sub-sessions side by side."""

    def __init__(self, target: Target, run: Run, seed: str, on_done: Callable[[int], None]) -> None:
        self._target = target
        self._form = target.form
        self._run = run
        self._seed = seed
        self._on_done = on_done

    async def play(self, session: Session, *, is_sub: bool = False) -> Content | None:
        """The last answer of a sub-session; None where a request failed or was not sent.

        Raises `BenchmarkError` where the run cannot go on.
        """
        messages, answer = list[Message](), None
        if session.opening:
            messages.append(Message("system", self._form.draw(session.opening, self._seed)))
        for number, turn in enumerate(session.turns):
            messages.append(Message("user", await self._added(turn)))
            continues = is_sub or number + 1 < len(session.turns)
            prompt = Prompt(tuple(messages), turn.output_len, continues=continues)
            record = await self._ask(session, number, prompt)
            if record is None:
                # Those of the turns behind it are not sent.
                self._on_done(1 + sum(later.num_requests for later in session.turns[number + 1 :]))
                return None
            if continues:
                answer = self._form.answer(record.output)
                messages.append(Message("assistant", answer))
        return answer

    async def _added(self, turn: Turn) -> Content:
        """What a turn adds, once its sub-sessions have run and its pause is over."""
        plays = [self.play(sub, is_sub=True) for sub in turn.sub_sessions]
        answers = [session for session in await side_by_side(plays) if session is not None]
        await asyncio.sleep(turn.pause)
        return self._form.join([*answers, self._form.draw(turn.adds, self._seed)])

    async def _ask(self, session: Session, number: int, prompt: Prompt) -> RequestRecord | None:
        longest, run = self._target.max_model_len, self._run
        if longest and self._form.count(prompt.messages) + prompt.output_len > longest:
            run.too_long += 1
            return None
        try:
            record = await self._target.send(prompt)
        except RequestFailedError as error:
            run.failures.append(str(error))
            return None
        self._on_done(1)
        run.records.append(replace(record, session=session.name, turn=number))
        return record
