"""The cache by request id."""

from __future__ import annotations

import logging

import pytest

from fakes.fake_cache import make_cache
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.retention import Retention
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import ScheduledSequence
from support.plans import plan_of


def started(cache: CacheManager, name: str, length: int, salt: str | None = None) -> str:
    cache.start(
        Request(
            request_id=name,
            prompt_token_ids=list(range(length)),
            params=SamplingParams(),
            cache=CacheOptions(salt=salt),
        )
    )
    return name


def test_released_requests_resume_and_freed_ones_are_forgotten() -> None:
    cache = make_cache(9, 4, model="m")
    cache.commit(started(cache, "a", 8), 0, 8, 99)
    cache.mark_filled(["a"], [8])
    cache.append_tokens({"a": 77})
    cache.release(["a"])
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1
    assert cache.commit("a", cache.count_hits("a", 99), 4, 99) == 8
    started(cache, "waiting", 4)
    cache.free(["a", "waiting"])
    assert cache.core.num_free_blocks == cache.size.num_blocks - 1
    with pytest.raises(KeyError):
        cache.count_hits("a", 99)


def test_with_windows_a_shorter_length_than_the_longest_need_not_hit() -> None:
    """So the cache knows how much of a prompt may be taken, and does not find it cut off."""
    retention = Retention(interval=None)
    cache = make_cache(6, 4, groups=[("sliding_window", 4)], retention=retention, model="m")
    cache.commit(started(cache, "a", 16), 0, 16, 4)
    for upto in (4, 8, 12, 16):
        assert cache.ensure_slots([("a", upto)]) == 1
        cache.mark_filled(["a"], [upto])
        cache.drop_unneeded([("a", upto)])
    cache.free(["a"])
    request = Request(request_id="b", prompt_token_ids=list(range(17)), params=SamplingParams())
    assert cache.reader.probe(request) == cache.count_hits(started(cache, "b", 16), 16) == 16
    assert cache.count_hits("b", 15) == 12
    cache.commit(started(cache, "other", 16, "salt"), 0, 16, 16)
    assert cache.count_hits("b", 16) == 16, "the last window is recycled last"
    assert cache.count_hits("b", 15) == 0
    shorter = Request(request_id="c", prompt_token_ids=list(range(16)), params=SamplingParams())
    assert (cache.reader.probe(request), cache.reader.probe(shorter)) == (16, 0)


def test_fill_writes_pages_and_slots() -> None:
    cache = make_cache(9, 4, model="m")
    cache.commit(started(cache, "a", 10), 0, 12, 99)
    cache.commit(started(cache, "b", 5), 0, 8, 99)
    tables = BlockTableBuffers.of_size(max_tokens=32, max_seqs=8, max_pages=8)
    sequences = (
        ScheduledSequence(request_id="b", start=4, num_tokens=1, sampling=None),
        ScheduledSequence(request_id="a", start=0, num_tokens=6, sampling=None),
    )
    cache.fill(plan_of(sequences), (tables,))
    a, b = [1, 2, 3], [4, 5]
    assert tables.indptr[:3].tolist() == [0, 2, 4]
    assert tables.indices[:4].tolist() == [*b, *a[:2]]
    assert tables.last_page_len[:2].tolist() == [1, 2]
    expected = [b[1] * 4, *(a[0] * 4 + i for i in range(4)), a[1] * 4, a[1] * 4 + 1]
    assert tables.slot_mapping[:7].tolist() == expected


def test_debugging_shows_what_the_cache_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "prefixcache")
    cache = make_cache(9, 4, model="m")
    cache.commit(started(cache, "a", 10), 0, 12, 99)
    cache.mark_filled(["a"], [10])
    cache.commit(started(cache, "b", 10), 8, 4, 99)
    cache.release(["b"])
    assert cache.commit(started(cache, "c", 99), 0, 99, 99) is None
    cache.free(["a"])
    cache.versions.reset()
    assert [record.getMessage() for record in caplog.records] == [
        "Request a hits 0 tokens in the cache.",
        "Request b hits 8 tokens in the cache.",
        "Request b gives its blocks back and waits.",
        "Request c waits: too few free blocks.",
        "Request a ends and gives its blocks back.",
        "All cached prefixes are forgotten.",
    ]
