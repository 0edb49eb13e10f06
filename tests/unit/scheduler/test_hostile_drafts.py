"""What a client can do to others through the index of drafts: take its room, and nothing more."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import answer_alone
from prefixcache._core import DraftIndex
from prefixcache.engine.engine import Engine
from prefixcache.metrics import DraftCounts
from prefixcache.scheduler import drafts
from prefixcache.scheduler.drafts import Drafter
from prefixcache.scheduler.step_time import RowTimes
from prefixcache.types.request import CacheOptions

PROMPT = list(range(1, 40))
LONG = 40
NAMES = map(str, itertools.count())


def engine_with(index: DraftIndex) -> Engine:
    """Each of its steps takes as long, whatever it computes."""
    drafter = Drafter(index, RowTimes(), shares=True, most=7)
    return make_engine(drafter=drafter, clock=itertools.count().__next__)[0]


def num_steps(engine: Engine, prompt: Sequence[int], salt: str, max_tokens: int) -> int:
    """The steps that an answer takes."""
    request = make_request(next(NAMES), prompt, max_tokens=max_tokens)
    engine.add_request(replace(request, cache=CacheOptions(salt=salt)))
    count = 0
    while engine.has_unfinished():
        engine.step()
        count += 1
    return count


def counts_of(engine: Engine) -> DraftCounts:
    counts = engine.metrics.gauges().drafts
    assert counts is not None
    return counts


def mislead(engine: Engine, salt: str, times: int = 40, max_tokens: int = 3) -> None:
    """Says that something follows an answer's first token which does not, and asks for it."""
    first, *_ = answer_alone(PROMPT, 1)
    for i in range(times):
        num_steps(engine, [*PROMPT, first, 50 + i % 4, *range(1, 9)], salt, 1)
        num_steps(engine, PROMPT, salt, max_tokens)


@pytest.mark.parametrize("salt", ["victim", "hostile"])
def test_wrong_guesses_spoil_those_of_their_own_salt_alone(salt: str) -> None:
    alone, attacked = engine_with(DraftIndex(1 << 14)), engine_with(DraftIndex(1 << 14))
    mislead(attacked, salt)
    assert sum(counts_of(attacked).accepted.values()) == 0
    assert sum(counts_of(attacked).drafted.values()) > 0
    expected, found = (
        [num_steps(engine, PROMPT, "victim", LONG) for _ in range(2)]
        for engine in (alone, attacked)
    )
    assert expected[1] < LONG / 4
    assert (found == expected) == (salt == "hostile")


def test_wrong_guesses_under_many_salts_cost_no_more_than_under_one() -> None:
    engine = engine_with(DraftIndex(1 << 14))
    for number in range(60):
        mislead(engine, str(number), times=1, max_tokens=12)
    counts = counts_of(engine)
    assert sum(counts.accepted.values()) == 0
    assert 50 < sum(counts.drafted.values()) <= 64


def test_a_flood_takes_no_memory_beyond_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_MOST_RECORDS", 20)
    index = DraftIndex(1 << 10)
    engine, num_bytes = engine_with(index), index.num_bytes
    for number in range(100):
        num_steps(engine, [number % 50 + 1, *range(1, 60)] * 2, str(number), 8)
    assert index.num_tokens <= 1 << 10
    assert index.num_bytes == num_bytes
    drafter = engine._scheduler.drafter
    assert drafter is not None
    assert len(drafter._records) == 20
    assert not drafter._texts
