"""Flags of windows and pins, and what they tell a sequence of the core."""

from __future__ import annotations

from typing import Any

import pytest

from prefixcache.config import CacheConfig, EngineConfig
from prefixcache.exceptions import ConfigError
from prefixcache.kv.retention import Retention


@pytest.mark.parametrize(
    ("given", "interval"),
    [(None, 0), (0, 0), ("0", 0), (96, 96), ("96", 96), ("none", None)],
)
def test_an_interval_is_a_number_or_none(given: Any, interval: int | None) -> None:
    config = EngineConfig.from_flags(prefix_cache_retention_interval=given)
    assert Retention.of(config) == Retention(interval=interval)


@pytest.mark.parametrize("given", ["None", "", "-1", -1, "1.5", 1.5, True, 2**31, "9" * 5000, []])
def test_what_is_no_interval_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="prefix_cache_retention_interval must be 'none', 0, or"):
        CacheConfig(prefix_cache_retention_interval=given)


def test_pins_keep_a_window_for_each_step() -> None:
    flags: dict[str, Any] = {"pin_swa_tokens": True, "max_num_batched_tokens": 256}
    assert Retention.of(EngineConfig.from_flags(**flags)).interval == 256
    flags["prefix_cache_retention_interval"] = 0
    assert Retention.of(EngineConfig.from_flags(**flags)).interval == 0


def test_all_flags_arrive() -> None:
    config = EngineConfig.from_flags(
        prefix_cache_retention_interval=64,
        pin_swa_tokens=True,
        pin_max_share=0.5,
        pin_min_drop_size=3,
        pin_prefix_blocks=False,
    )
    assert Retention.of(config) == Retention(
        interval=64, pin=True, pin_max_share=0.5, pin_min_drop_size=3, pin_prefix_blocks=False
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"pin_swa_tokens": True, "prefix_cache_retention_interval": "none"},
            "prefix_cache_retention_interval must be a number of tokens where pin_swa_tokens is on",
        ),
        ({"pin_max_share": 1.01}, "pin_max_share must be less than or equal to 1"),
        ({"pin_max_share": -0.1}, "pin_max_share must be greater than or equal to 0"),
        ({"pin_max_share": float("nan")}, "pin_max_share must be a finite number"),
        ({"pin_min_drop_size": -1}, "pin_min_drop_size must be greater than or equal to 0"),
        ({"pin_prefix_blocks": "yes"}, "pin_prefix_blocks must be a valid boolean"),
    ],
)
def test_flags_that_make_no_sense_are_named(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_flags(**flags)


# A window of 9 tokens needs two blocks of 4 before a position, and one below them is kept.
@pytest.mark.parametrize(
    ("interval", "windows", "blocks"),
    [
        (0, [None], 25),
        (0, [9], 3),
        (0, [None, 9, 9], 25 + 2 * 3),
        (50, [None, 9], 25 + 3 * 3),
        (4, [9], 25),
        (None, [None, 9], 50),
    ],
)
def test_a_prefix_keeps_so_many_blocks(
    interval: int | None, windows: list[int | None], blocks: int
) -> None:
    assert Retention(interval=interval).num_blocks_kept(100, 4, windows) == blocks


def test_the_line_of_the_start_has_the_numbers() -> None:
    retention = Retention(interval=1024, pin=True)
    line = retention.describe_pins(24_000, 16, [None, *[128] * 6])
    # 1562 blocks of full attention, and 25 windows of 9 blocks in six groups.
    assert int(0.8 * 24_000 / (1562 + 6 * 25 * 9)) == 6
    assert "at most 20% of the cache" in line
    assert "24000 blocks (384000 tokens of one group of layers)" in line
    assert "80% of them hold 6 prefixes of 25000 tokens" in line
    assert "every 1024 tokens, with the blocks of full attention before them" in line
    assert "thrashes" in line
    assert "\n" not in line


def test_the_line_names_what_is_not_pinned() -> None:
    line = Retention(pin=True, pin_prefix_blocks=False).describe_pins(100, 16, [None, 128])
    assert "full attention" not in line
    assert "every" not in line
    assert "full attention" not in Retention(pin=True).describe_pins(100, 16, [128])
