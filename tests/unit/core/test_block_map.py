"""The map of the pool's blocks as arrays, and as the dashboard's columns."""

from __future__ import annotations

import bisect
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.core import PrefixCache
from prefixcache.server.dashboard.rates import Look, quantile, rates
from prefixcache.server.dashboard.view import block_map

if TYPE_CHECKING:
    from prefixcache.engine.stats import PrefixCacheStats

BLOCK = 4
FREE, CACHED, PINNED, HELD = range(4)


def test_a_map_tells_states_and_ages_of_cells() -> None:
    cache = PrefixCache(12, BLOCK, model="m")
    cache.set_time(100)
    cache.listen(4)
    sequences = [
        cache.new_sequence(np.arange(first, first + 3 * BLOCK, dtype=np.int32))
        for first in (0, 100, 200)
    ]
    for sequence in sequences:
        cache.commit_prefix_plan(sequence, 0, 3 * BLOCK)
        cache.mark_blocks_filled([sequence], [3 * BLOCK])
    cache.pin(sequences[1], 3 * BLOCK)
    cache.set_time(103)
    cache.release(sequences[:2])
    cache.set_time(104)
    states, ages = cache.block_map(100, [1, 2, 60])
    assert states.argmax(axis=1).tolist() == [CACHED] * 3 + [PINNED] * 3 + [HELD] * 3 + [FREE] * 2
    assert (states.sum(axis=1) == 1).all()
    assert ages.tolist() == [[1, 0, 0, 0]] * 6 + [[0, 0, 1, 0]] * 3 + [[0, 0, 0, 0]] * 2
    coarse, _ = cache.block_map(4)
    cells = [(block - 1) * 4 // 11 for block in range(1, 12)]
    assert coarse.tolist() == [
        states[[cell == own for own in cells]].sum(axis=0).tolist() for cell in range(4)
    ]
    columns = block_map(states, ages)
    assert columns["held"] == states[:, HELD].tolist()
    assert columns["age"] == [0] * 6 + [2] * 3 + [-1] * 2
    cache.clear_cache_index()
    assert cache.block_map(1)[0].tolist() == [[8, 0, 0, 3]]


def test_a_map_that_cannot_be_is_refused() -> None:
    cache = PrefixCache(5, BLOCK, model="m")
    for cells, ages, name in [(0, [], "cells"), (2**17, [], "cells"), (4, [2, 2], "age_bounds")]:
        with pytest.raises(ValueError, match=f"^{name}"):
            cache.block_map(cells, ages)


@given(
    st.lists(st.floats(0, 12), min_size=1, max_size=30),
    st.floats(0.01, 1.0),
)
def test_a_quantile_lies_between_the_bounds_around_it(values: list[float], share: float) -> None:
    bounds = (1.0, 2.0, 5.0, 10.0)
    counts = [0] * 5
    for value in values:
        counts[bisect.bisect_left(bounds, value)] += 1
    exact = sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]
    place = bisect.bisect_left(bounds, exact)
    found = quantile(bounds, counts, share)
    assert found is not None
    assert [0.0, *bounds][place] <= found <= [*bounds, 10.0][place]
    assert quantile(bounds, [0] * 5, share) is None


def test_what_came_from_a_disk_was_not_computed() -> None:
    def look(time: float, queried: int, hit: int, on_disk: int) -> Look:
        counts = dict.fromkeys(("evictions", "demotions", "hints_demoted"), 0)
        counts |= {"queried_tokens": queried, "hit_tokens": hit, "disk_cached_tokens": on_disk}
        return Look(time, cast("PrefixCacheStats", SimpleNamespace(**counts)), 0, [0, 0])

    none = look(0.0, 0, 0, 0)
    found = rates(none, look(2.0, 100, 40, 20), (1.0,))
    assert (found.memory_tokens, found.disk_tokens, found.computed_tokens) == (20, 10, 20)
    assert found.hit_ratio == 0.6
    assert rates(none, look(2.0, 100, 40, 0), (1.0,)).disk_tokens is None
