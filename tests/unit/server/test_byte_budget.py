"""The memory of bodies: what is long gives way, and what is short always has room."""

from __future__ import annotations

import pytest

from prefixcache.server.http.byte_budget import Body, ByteBudget
from prefixcache.server.http.errors import ApiError


def test_a_short_body_has_room_where_long_ones_that_have_come_wait() -> None:
    budget = ByteBudget(8 * 2**20)
    waiting = [Body(budget) for _ in range(8)]
    for body in waiting:
        body.add(bytes(2**20))
        body.take()
    long, short = Body(budget), Body(budget)
    with pytest.raises(ApiError) as refused:
        long.add(bytes(budget.short + 1))
    short.add(b"x" * budget.short)
    assert refused.value.code == "bodies_full"
    assert short.take() == b"x" * budget.short
    for body in (*waiting, long, short):
        body.release()
    assert budget.size == 0
