"""The one loop that makes events for all pages, and what is kept without a page."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest

from prefixcache.exceptions import EngineDeadError
from prefixcache.server.dashboard import samples
from prefixcache.server.dashboard.feed import Feed
from prefixcache.server.dashboard.rates import POINT_FIELDS, Look
from prefixcache.server.dashboard.samples import NUM_SAMPLES, Samples
from support.serving import until

if TYPE_CHECKING:
    from prefixcache.engine.stats import PrefixCacheStats


def looks(seconds: float) -> Iterator[Look]:
    """A request every second, of 100 tokens, of which 40 hit; then none, and the engine dies."""
    for number in (*range(NUM_SAMPLES + 5), NUM_SAMPLES + 4):
        counts = {"queried_tokens": 100 * number, "hit_tokens": 40 * number}
        rest = dict.fromkeys(("disk_cached_tokens", "evictions", "demotions", "hints_demoted"), 0)
        stats = cast("PrefixCacheStats", SimpleNamespace(**counts, **rest))
        yield Look(seconds * number, stats, 7 * number, [0, number], answered=number, running=2)
    yield Look(seconds * (NUM_SAMPLES + 9), stats, 7 * number, [0, number], answered=number)
    raise EngineDeadError("x")


async def test_the_last_samples_are_kept_until_the_engine_dies(monkeypatch) -> None:
    seen = looks(2.0)
    monkeypatch.setattr(samples, "look_at", lambda _: next(seen))
    monkeypatch.setattr(samples, "_PERIOD", 0.0)
    kept = Samples(mock.Mock(**{"metrics.time_to_first_token.bounds": (1.0, 2.0)}))
    assert kept.points() == []
    await kept.keep()
    points = kept.points()
    assert len(points) == NUM_SAMPLES
    assert all(tuple(point) == POINT_FIELDS for point in points)
    expected = {"hit_ratio": 0.4, "ttft_p50": 1.5, "computed_tokens": 30, "disk_tokens": None}
    expected |= {"generated_tokens": 3.5, "answered": 0.5, "failed": 0, "running": 2}
    assert {name: points[-2][name] for name in expected} == expected
    assert (points[-1]["hit_ratio"], points[-1]["answered"], points[-1]["running"]) == (None, 0, 0)


async def test_samples_go_on_after_a_failure(monkeypatch, caplog) -> None:
    seen = [RuntimeError("x"), *itertools.islice(looks(2.0), 2), EngineDeadError("x")]
    monkeypatch.setattr(samples, "look_at", mock.Mock(side_effect=seen))
    monkeypatch.setattr(samples, "_PERIOD", 0.0)
    kept = Samples(mock.Mock(**{"metrics.time_to_first_token.bounds": (1.0, 2.0)}))
    await kept.keep()
    assert len(kept.points()) == 1
    assert caplog.messages == ["A point of the dashboard's history could not be added."]


class Source:
    """Numbers its events; `error` is raised instead of the next."""

    def __init__(self, **options: Any) -> None:
        self.taken = 0
        self.stopping = False
        self.error: Exception | None = None
        self.feed = Feed(self._take, lambda: b"hello", lambda: self.stopping, **options)

    def _take(self) -> dict[str, bytes]:
        if self.error is not None:
            raise self.error
        self.taken += 1
        return {"a": b"a%d " % self.taken, "b": b"b%d " % self.taken}


async def test_pages_share_one_loop_which_ends_with_the_last_of_them() -> None:
    source = Source(period=0.001)
    feed = source.feed
    assert source.taken == 0
    assert not feed.is_running
    async with aclosing(feed.events()) as one, aclosing(feed.events()) as other:
        assert [await anext(one), await anext(other)] == [b"hello"] * 2
        both = await asyncio.gather(anext(one), anext(other))
        assert both[0] == both[1]
        assert feed.is_running
    await until(lambda: not feed.is_running)
    async with aclosing(feed.events()) as again:
        assert await anext(again) == b"hello"
        assert (await anext(again)).startswith(b"a")


async def test_a_slow_reader_gets_the_last_of_each_event_and_holds_no_more() -> None:
    source = Source(period=0.0)
    async with aclosing(source.feed.events()) as slow:
        await anext(slow)
        await until(lambda: source.taken > 20)
        names = (await anext(slow)).split()
    assert [name[:1] for name in names] == [b"a", b"b"]
    assert int(names[0][1:]) >= 20


async def test_pages_are_limited_however_they_leave() -> None:
    source = Source(period=0.001, most_pages=2)
    feed = source.feed
    for _ in range(3):
        async with aclosing(feed.events()) as one, aclosing(feed.events()) as other:
            await anext(one)
            assert not feed.is_full
            await anext(other)
            assert feed.is_full
            assert [event async for event in feed.events()] == []
        unread = feed.events()
        await unread.aclose()
        assert not feed.is_full


async def test_a_cancelled_reader_gives_its_place_back() -> None:
    source = Source(period=60.0, most_pages=1)

    async def read() -> None:
        async with aclosing(source.feed.events()) as events:
            async for _ in events:
                pass

    task = asyncio.create_task(read())
    await until(lambda: source.feed.is_full)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not source.feed.is_full


@pytest.mark.parametrize("computes", [False, True])
async def test_the_loop_rests_by_what_it_computes(computes, monkeypatch):
    """CPU seconds count, and not those in which other processes had the processor."""
    sleep, rests = asyncio.sleep, list[float]()
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: rests.append(seconds) or sleep(0))

    def take() -> dict[str, bytes]:
        ends = time.thread_time() + 0.02
        while computes and time.thread_time() < ends:
            pass
        time.sleep(0.02)
        return {"a": b"a"}

    feed = Feed(take, lambda: b"hello", lambda: len(rests) > 0, period=0.5)
    assert [event async for event in feed.events()] == [b"hello", b"a"]
    assert rests[0] >= 50 * 0.02 if computes else rests == [0.5]


@pytest.mark.parametrize("why", ["stopping", "error"])
async def test_pages_end_when_there_is_no_more_to_tell(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(period=0.001)
    async with aclosing(source.feed.events()) as events:
        for _ in itertools.repeat(None, 3):
            await anext(events)
        source.stopping = why == "stopping"
        source.error = None if source.stopping else RuntimeError("the cache is closed")
        async for _ in events:
            pass
    assert ("the cache is closed" in caplog.text) == (why == "error")
