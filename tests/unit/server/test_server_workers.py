"""What is small runs in the event loop, unless much did lately: then in threads, as all else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.server.http import workers
from prefixcache.server.http.workers import Workers


class Clock:
    """Time that passes as a test says; what runs in the event loop takes `seconds` of it."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.num_inline = 0
        self._seconds = seconds
        self._loop_thread = threading.get_ident()

    def monotonic(self) -> float:
        return self.now

    def piece(self, result: int) -> Callable[[], int]:
        def run() -> int:
            if threading.get_ident() == self._loop_thread:
                self.num_inline += 1
                self.now += self._seconds
            return result

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(0.001)
    monkeypatch.setattr(workers, "time", clock)
    return clock


async def test_of_many_small_pieces_at_once_few_run_in_the_event_loop(clock: Clock) -> None:
    threads = Workers()
    results = await asyncio.gather(*(threads.run(100, clock.piece(n)) for n in range(1000)))
    assert results == [*range(1000)]
    assert clock.num_inline == 7  # 5 ms, and the quarter of all that is paid meanwhile


async def test_small_pieces_with_time_between_them_run_in_the_event_loop(clock: Clock) -> None:
    threads = Workers()
    for number in range(1, 101):
        clock.now += 0.003
        assert await threads.run(100, clock.piece(number)) == number
        assert clock.num_inline == number


async def test_what_is_long_or_sent_to_workers_never_runs_in_the_event_loop(clock: Clock) -> None:
    threads = Workers()
    assert await threads.run(1 << 14, clock.piece(1)) == 1
    assert await threads.in_thread(clock.piece(2)) == 2
    assert not clock.num_inline


async def test_what_fails_counts_too(clock: Clock) -> None:
    threads = Workers()

    def fails() -> None:
        clock.piece(0)()
        raise ValueError("no")

    for _ in range(100):
        with pytest.raises(ValueError, match="no"):
            await threads.run(100, fails)
    assert clock.num_inline == 7


@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.1))), st.data())
def test_a_share_of_the_loops_time_is_never_exceeded(
    pieces: list[tuple[float, float]], data: st.DataObject
) -> None:
    """Over any stretch that begins with a piece: 5 ms, one piece, and a quarter of the stretch."""
    clock = Clock(0)
    ran: list[tuple[float, float]] = []

    async def all_of_them() -> None:
        threads = Workers()
        for pause, seconds in pieces:
            clock.now += pause
            before, clock._seconds, num = clock.now, seconds, clock.num_inline
            await threads.run(100, clock.piece(0))
            if clock.num_inline > num:
                ran.append((before, seconds))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "time", clock)
        asyncio.run(all_of_them())
    if ran:
        first = data.draw(st.integers(0, len(ran) - 1))
        spent = sum(seconds for _, seconds in ran[first:-1])
        stretch = ran[-1][0] - ran[first][0]
        assert spent <= 0.005 + 0.25 * stretch + 1e-9
