"""Options of an engine's configuration that are numbers."""

from __future__ import annotations

import math

import pytest

from prefixcache_store.options import positive


@pytest.mark.parametrize("value", ["9", None, [9], True, 0, -9, math.nan, math.inf])
def test_what_is_no_positive_number_is_named(value: object) -> None:
    with pytest.raises(ValueError, match='The option "max_bytes" must be a positive number'):
        positive("max_bytes", value)


def test_numbers_of_json_are_taken() -> None:
    assert [positive("max_bytes", value) for value in (9, 9e9, 0.5)] == [9, 9e9, 0.5]
