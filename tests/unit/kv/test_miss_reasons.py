"""Why prompts miss: each reason made to happen in a real cache under a scripted model."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fakes.fake_engine import make_engine, make_request
from prefixcache.diagnostics.evictions import EvictedBlocks, Evictions
from prefixcache.diagnostics.history import Miss, RememberedPrompt
from prefixcache.diagnostics.reasons import Asked, Explanation
from prefixcache.diagnostics.room import Admitted
from prefixcache.kv.retention import Retention
from prefixcache.types.request import CacheOptions, CacheScope

BLOCK = 4
MEMORY = 1 << 20
PROMPT = [*range(10, 31)]


class Room:
    """An engine and its diagnostics, with the life of a request as a server gives it."""

    def __init__(self, memory: int = MEMORY, **options: Any) -> None:
        self.engine, _, self.cache = make_engine(**({"num_blocks": 33, **options}))
        self.diagnostics = self.engine.diagnose(memory)
        self._names = itertools.count()

    def send(self, prompt: Sequence[int], *, owner: str | None = None, **cache: Any) -> Miss:
        """Has the prompt answered; the reason that is remembered with it."""
        name, options = str(next(self._names)), CacheOptions(**cache)
        request = dataclasses.replace(make_request(name, prompt, max_tokens=1), cache=options)
        length = len(prompt)
        upto = length if options.write_upto is None else options.write_upto
        remembered = RememberedPrompt(
            request_id=name,
            time=time.time(),
            scope=CacheScope(owner, options.salt),
            model="m",
            api="completions",
            token_ids=request.prompt_token_ids,
            source=None,
            prompt_tokens=length,
            cached_tokens=0,
            miss=None,
            arrival=time.monotonic(),
            write_upto=upto if options.write else 0,
        )
        self.diagnostics.begin(name, remembered)
        self.engine.add_request(request)
        outputs = []
        while self.engine.has_work():
            outputs += self.engine.step()
        (last,) = outputs
        admitted = Admitted(
            hit_tokens=last.num_cached_tokens,
            started_at=last.started_at or remembered.arrival,
            window_missed_tokens=last.num_window_missed_tokens,
            reads=options.read,
            is_refused=last.finish_reason == "cache_threshold",
        )
        self.diagnostics.end(name, admitted)
        self.diagnostics.settle()
        if admitted.is_refused:
            assert self.diagnostics.history.find(name, owner) is None
            return Miss(last.num_cached_tokens, "refused")
        found = self.diagnostics.history.find(name, owner)
        assert found is not None
        assert found.miss is not None
        assert found.cached_tokens == found.miss.hit_tokens == last.num_cached_tokens
        return found.miss

    def leave_cached(self, count: int) -> None:
        """Evicts all but the blocks that are evicted last."""
        self.cache.core.release_cached(self.cache.core.stats()["cached_blocks"] - count)

    def explain(
        self,
        prompt: Sequence[int],
        *,
        owner: str | None = None,
        salt: str | None = None,
        sees_all: bool = False,
        **options: Any,
    ) -> Explanation:
        """What is explained of the prompt before it is sent."""
        self.diagnostics.settle()
        ids = np.array(prompt, np.int32)
        asked = Asked(token_ids=ids, scope=CacheScope(owner, salt), **options)
        return self.diagnostics.explain(asked, sees_all=sees_all)

    def check(self, prompt: Sequence[int], hit: int, reason: str, **options: Any) -> Explanation:
        """Both before and after it is sent the prompt has this reason."""
        found = self.explain(prompt, **options)
        assert (found.miss.hit_tokens, found.miss.reason) == (hit, reason)
        assert str(found)
        sees_all = options.pop("sees_all", False)
        reads = options.pop("reads", True)
        if not sees_all:
            sent = self.send(prompt, read=reads, **options)
            assert (sent.hit_tokens, sent.reason) == (hit, reason)
        return found


def others(count: int) -> list[list[int]]:
    """Prompts of 5 blocks, none of which shares one with another or with `PROMPT`."""
    return [[80 + number, *range(40, 59)] for number in range(count)]


def test_never_seen_then_tail() -> None:
    room = Room()
    found = room.check(PROMPT, 0, "never_seen")
    assert (found.first_block, found.nearest) == (range(4), None)
    found = room.check(PROMPT, 20, "tail")
    assert found.first_block is None
    room.check(PROMPT[:20], 16, "tail")
    room.check([1, 2], 0, "tail")
    longer = room.check([*PROMPT, *range(60, 70)], 20, "never_seen")
    assert longer.first_block == range(20, 24)
    assert longer.shared_tokens == len(PROMPT)
    assert room.diagnostics.miss_counts == {"never_seen": 2, "tail": 3}


def test_text_that_differs_in_front_of_the_same() -> None:
    room = Room()
    room.send(PROMPT)
    changed = [*PROMPT[:2], 96, *PROMPT[3:], 5, 6, 7]
    found = room.check(changed, 0, "different_text")
    assert found.shared_tokens == 2
    # The same beginning before something else is no change of the text.
    room.check([*PROMPT[:9], *range(70, 90)], 8, "never_seen")


def test_evicted_for_new_content() -> None:
    room, before = Room(), time.monotonic()
    room.send(PROMPT)
    for other in others(8):
        room.send(other)
    found = room.check(PROMPT, 0, "evicted")
    lost = found.miss.detail
    assert lost is not None
    assert lost.pressure == "capacity"
    assert lost.ago_s is not None
    assert 0 <= lost.ago_s <= time.monotonic() - before
    assert lost.age_s is not None
    assert 0 < lost.age_s <= time.monotonic() - before
    assert lost.hits == 0
    assert "evicted to make room" in str(found)


@pytest.mark.parametrize(
    ("pressure", "options"),
    [("cached_limit", {"max_cached_blocks": 3}), ("shrunk_cache", {"max_blocks": 33})],
)
def test_a_bound_and_a_smaller_pool(pressure: str, options: dict[str, Any]) -> None:
    room = Room(**options)
    room.send(PROMPT)
    if pressure == "shrunk_cache":
        room.engine.control.resize(num_blocks=4)
        room.engine.control.resize(num_blocks=33)
    found = room.check(PROMPT, 12, "evicted")
    assert found.miss.detail is not None
    assert found.miss.detail.pressure == pressure


def test_cleared_and_other_weights() -> None:
    room = Room()
    room.send(PROMPT)
    room.engine.control.reset_prefix_cache()
    room.check(PROMPT, 0, "cleared")
    room.check(PROMPT, 20, "tail")
    room.cache.versions.renew()
    room.check(PROMPT, 0, "weights_changed")
    # What was gone before the clear was not cleared.
    for other in others(8):
        room.send(other)
    room.engine.control.reset_prefix_cache()
    room.check(PROMPT, 0, "evicted")
    room.engine.control.reset_prefix_cache()
    room.check(PROMPT, 0, "cleared")


def test_writing_refused() -> None:
    room = Room()
    room.send(PROMPT, write=False)
    room.check(PROMPT, 0, "write_refused")
    room = Room()
    room.send(PROMPT, write_upto=9)
    room.check(PROMPT, 8, "write_refused")
    room.check(PROMPT, 20, "tail")


def test_reading_refused_and_cache_off() -> None:
    room = Room()
    room.send(PROMPT)
    room.check(PROMPT, 0, "cache_read_off", reads=False)
    assert room.explain(PROMPT, num_unscored=0).miss == Miss(0, "prompt_logprobs")
    assert room.explain(PROMPT, num_unscored=9).miss == Miss(8, "prompt_logprobs")
    assert room.explain(PROMPT, num_unscored=1 << 40).miss == room.explain(PROMPT).miss
    room = Room(enable_prefix_caching=False)
    room.check(PROMPT, 0, "cache_off")
    room.check(PROMPT, 0, "cache_off", reads=False)


def test_a_window_whose_blocks_are_gone() -> None:
    """Of two prompts that part in the middle the second finds no window before that place."""
    room = Room(groups=("full", ("sliding_window", 8)), num_blocks=65)
    shared = list(range(10, 50))
    room.check([*shared, *range(60, 80)], 0, "never_seen")
    room.check([*shared, *range(80, 95)], 40, "never_seen")
    # Without room for what is behind windows.
    room = Room(groups=("full", ("sliding_window", 8)), num_blocks=65)
    room.check([*shared, *range(60, 80)], 0, "never_seen")
    room.leave_cached(Retention().num_blocks_kept(60, 4, [None, 8]))
    room.check([*shared, *range(80, 95)], 0, "window_lost")
    # The second one repaired it.
    room.check([*shared, *range(70, 85)], 40, "never_seen")


def test_refused_requests_count_what_windows_lost_and_are_no_earlier_prompts() -> None:
    room = Room(groups=("full", ("sliding_window", 8)), num_blocks=65)
    shared = list(range(10, 50))
    room.send([*shared, *range(60, 80)])
    room.leave_cached(Retention().num_blocks_kept(60, 4, [None, 8]))
    before = room.diagnostics.miss_counts["window_lost"]
    for _ in range(2):
        room.send([*shared, *range(80, 95)], hit_threshold=0.5)
    assert room.diagnostics.miss_counts["window_lost"] == before + 2
    assert room.engine.metrics.gauges().num_window_missed_tokens == 80
    # Something has to compute it.
    room.send([*shared, *range(80, 95)], hit_threshold=0.0)
    assert room.send([*shared, *range(70, 85)], hit_threshold=0.5).hit_tokens == 40


def test_windows_alone() -> None:
    """Nothing but what windows need is kept, so only prompts that go on from an end hit."""
    room = Room(groups=(("sliding_window", 8),))
    shared = list(range(10, 50))
    first = [*shared, *range(60, 80)]
    room.check(first, 0, "never_seen")
    room.check(first, 56, "tail")
    room.check([*first, *range(1, 7)], 60, "never_seen")
    room.leave_cached(5)
    room.check([*shared, *range(80, 95)], 0, "window_lost")
    for other in others(8):
        room.send(other)
    room.check(first, 0, "window_lost")
    room.cache.versions.renew()
    room.check(first, 0, "weights_changed")


def test_another_salt_is_named_to_the_administrator_alone() -> None:
    room = Room()
    room.send(PROMPT, owner="a", salt="a:1")
    for owner, salt in (("a", "a:2"), ("b", "b:1"), ("a", None), (None, None)):
        found = room.explain(PROMPT, owner=owner, salt=salt)
        assert found.miss == Miss(0, "never_seen")
        assert (found.nearest, found.shared_tokens) == (None, 0)
        seen = room.explain(PROMPT, owner=owner, salt=salt, sees_all=True)
        assert seen.miss == Miss(0, "another_salt")
        assert seen.nearest is not None
    room.engine.control.reset_prefix_cache()
    assert room.explain(PROMPT, owner="a", salt="a:1").miss.reason == "cleared"
    assert room.explain(PROMPT, owner="b", salt="b:1", sees_all=True).miss.reason == "another_salt"
    assert room.explain(PROMPT, owner="b", salt="b:1").miss.reason == "never_seen"


def test_a_loss_that_nobody_could_take_note_of_is_still_one() -> None:
    """Too many at once for the log: only the history knows that the block was there."""
    room = Room()
    room.send(PROMPT)
    room.cache.core.take_evictions(1000)
    for other in others(8):
        request = make_request(str(other), other, max_tokens=1)
        room.engine.add_request(request)
        while room.engine.has_work():
            room.engine.step()
    room.cache.core.take_evictions(1000)
    found = room.explain(PROMPT)
    assert found.miss.reason == "evicted"
    assert found.miss.detail is not None
    assert found.miss.detail.ago_s is None


def test_prompts_in_flight_are_bounded_and_forgotten_where_nothing_was_computed() -> None:
    room = Room(memory=1 << 15)
    diagnostics = room.diagnostics
    prompt = RememberedPrompt(
        "x", 0.0, CacheScope(), "m", "chat", np.zeros(3, np.int32), None, 3, 0, None
    )
    for number in range(1000):
        diagnostics.begin(str(number), prompt)
    for number in range(1000):
        diagnostics.end(str(number), Admitted(hit_tokens=0, started_at=1.0))
    diagnostics.settle()
    assert 0 < len(diagnostics.history.prompts()) <= 10
    diagnostics.begin("y", prompt)
    before = len(diagnostics.history.prompts())
    diagnostics.end("y", None)
    diagnostics.end("z", None)
    diagnostics.settle()
    assert len(diagnostics.history.prompts()) == before


def test_the_table_of_evictions_keeps_the_last_ones() -> None:
    table = EvictedBlocks(1 << 17)
    assert 1 << 15 < table.num_bytes <= 1 << 17
    random = np.random.default_rng(0)
    hashes = random.integers(0, 256, (5000, 32), np.uint8)
    for number, one in enumerate(np.split(hashes, 50)):
        rows = {
            "hash": one,
            "group": np.full(100, number % 2, np.uint16),
            "cause": np.ones(100, np.uint8),
            "hits": np.full(100, 3, np.uint32),
            "age": np.full(100, 2.0),
            "idle": np.full(100, 1.0),
            "is_last": np.arange(100) % 10 > 0,
        }
        table.add(Evictions(rows, number, number + 1.0, 0))
    found = [table.find(bytes(one), 1) for one in hashes[4900:]]
    assert not any(found[::10])
    assert sum(one is not None for one in found) > 80
    assert {(one.time, one.hits, one.age_s) for one in found if one is not None} == {(50.0, 3, 2.0)}
    assert table.find(bytes(hashes[4901]), 0) is None
    early = sum(table.find(bytes(one), 0) is not None for one in hashes[:100])
    assert early < 30


def test_a_reader_ends_with_its_engine() -> None:
    room = Room()
    reader = room.engine.evictions
    seen = []
    reader.listen(seen.append)
    reader.read()
    assert len(seen) == 1
    gone = weakref.ref(reader)
    del room, reader
    gc.collect()
    deadline = time.monotonic() + 60
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    assert gone() is None
