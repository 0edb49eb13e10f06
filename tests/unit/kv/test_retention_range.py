"""Retention hints as a caller gives them: what they mean, and which are refused by name."""

from __future__ import annotations

import math

import pytest

from prefixcache.exceptions import InvalidRequestError
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.retention_range import MAX_TTL_SECONDS, RetentionRange
from prefixcache.types.sampling_params import SamplingParams


def request(*ranges: RetentionRange, tokens: int = 24) -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=list(range(tokens)),
        params=SamplingParams(max_tokens=1),
        cache=CacheOptions(retention=ranges),
    )


def test_what_is_left_out_has_its_meaning() -> None:
    assert RetentionRange().chosen_priority == 35
    assert RetentionRange(ttl_s=5).chosen_priority == 60
    assert RetentionRange(priority=0, ttl_s=5).chosen_priority == 0


def test_ranges_may_touch_come_in_any_order_and_end_with_the_prompt() -> None:
    given = (RetentionRange(16, 24), RetentionRange(0, 8), RetentionRange(8, 16))
    assert request(*given).cache.retention == given
    request(RetentionRange(23), tokens=24)
    request(*(RetentionRange(i, i + 1) for i in range(32)), tokens=32)
    request(RetentionRange(ttl_s=MAX_TTL_SECONDS))


@pytest.mark.parametrize(
    ("ranges", "field"),
    [
        ([RetentionRange(-1, 8)], "retention[0].start"),
        ([RetentionRange(True, 8)], "retention[0].start"),
        ([RetentionRange(0, 8), RetentionRange(8, 8)], "retention[1].end"),
        ([RetentionRange(9, 8)], "retention[0].end"),
        ([RetentionRange(0, -8)], "retention[0].end"),
        ([RetentionRange(0, 25)], "retention[0].end"),
        ([RetentionRange(25)], "retention[0].start"),
        ([RetentionRange(0, 9), RetentionRange(8, 16)], "retention[1].start"),
        ([RetentionRange(8, 16), RetentionRange(0)], "retention[0].start"),
        ([RetentionRange(8, 16), RetentionRange(8, 16)], "retention[1].start"),
        ([RetentionRange(priority=101)], "retention[0].priority"),
        ([RetentionRange(priority=-1)], "retention[0].priority"),
        ([RetentionRange(priority=35.0)], "retention[0].priority"),  # type: ignore[arg-type]
        ([RetentionRange(0, 1), RetentionRange(1, ttl_s=0)], "retention[1].ttl_s"),
        ([RetentionRange(ttl_s=-1)], "retention[0].ttl_s"),
        ([RetentionRange(ttl_s=math.nan)], "retention[0].ttl_s"),
        ([RetentionRange(ttl_s=math.inf)], "retention[0].ttl_s"),
        ([RetentionRange(ttl_s=MAX_TTL_SECONDS + 1)], "retention[0].ttl_s"),
        ([RetentionRange(i, i + 1) for i in range(33)], "retention"),
        ([{"start": 0}], "retention[0]"),
    ],
)
def test_a_wrong_range_is_refused_by_name(ranges: list[RetentionRange], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        request(*ranges)
    assert refused.value.param == field
    assert str(refused.value).startswith(field)


def test_the_budget_is_that_of_the_owner_the_salt_or_all_others() -> None:
    assert CacheOptions().retention_owner == ""
    assert CacheOptions(salt="x").retention_owner == "salt:x"
    assert CacheOptions(owner="key:1").retention_owner == "key:1"
