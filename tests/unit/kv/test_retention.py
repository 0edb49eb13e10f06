"""What requests leave behind their windows, which of it is pinned, and the flags of both."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from fakes.fake_cache import make_cache
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.engine.build import build
from prefixcache.engine.change_log import ChangeLog
from prefixcache.exceptions import ConfigError
from prefixcache.kv.retention import Retention
from prefixcache.kv.specs import GroupKind
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams

HYBRID: tuple[GroupKind, ...] = ("full", ("sliding_window", 8))


@pytest.mark.parametrize(
    ("given", "interval"),
    [(None, 0), (0, 0), ("0", 0), (96, 96), ("96", 96), ("none", None)],
)
def test_an_interval_is_a_number_or_none(given: Any, interval: int | None) -> None:
    config = EngineConfig.from_flags(prefix_cache_retention_interval=given)
    assert Retention.of(config, HYBRID) == Retention(interval=interval)


@pytest.mark.parametrize(
    ("flags", "interval"),
    [
        ({}, None),
        ({"prefix_cache_retention_interval": 0}, 0),
        ({"pin_swa_tokens": True, "max_num_batched_tokens": 256}, 256),
    ],
)
def test_where_all_layers_have_a_window_every_block_is_kept(flags, interval):
    """No hits of full attention would show where prompts part."""
    config = EngineConfig.from_flags(**flags)
    assert Retention.of(config, [("sliding_window", 8)]).interval == interval


@pytest.mark.parametrize("given", ["None", "", "-1", -1, "1.5", 1.5, True, 2**31, "9" * 5000, []])
def test_what_is_no_interval_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="prefix_cache_retention_interval must be 'none', 0, or"):
        CacheConfig(prefix_cache_retention_interval=given)


def test_pins_keep_a_window_for_each_step() -> None:
    flags: dict[str, Any] = {"pin_swa_tokens": True, "max_num_batched_tokens": 256}
    assert Retention.of(EngineConfig.from_flags(**flags), HYBRID).interval == 256
    flags["prefix_cache_retention_interval"] = 0
    assert Retention.of(EngineConfig.from_flags(**flags), HYBRID).interval == 0


@pytest.mark.parametrize(
    ("flags", "message"),
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
def test_flags_that_make_no_sense_are_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flags(**flags)


def test_debugging_shows_evictions_and_pins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "prefixcache.engine")
    serving = Serving(Retention(pin=True, pin_min_drop_size=1), num_blocks=41)
    for start in (0, 1000, 2000):
        serving.serve(list(range(start, start + 64)))
    pins, evictions = serving.stat("pins"), serving.stat("evictions")
    assert min(pins, evictions) > 0
    log = ChangeLog(serving.cache)
    log.write()
    (line,) = [text for text in caplog.messages if text.startswith("Blocks")]
    assert line.startswith(f"Blocks of the cache: {evictions} evictions, {pins} pins")
    log.write()
    assert caplog.messages[-1] == line or not caplog.messages[-1].startswith("Blocks")


# A window of 9 tokens needs two blocks of 4 before a position, and one below them is kept.
@pytest.mark.parametrize(
    ("interval", "windows", "blocks"),
    [
        (0, [None], 25),
        (0, [9], 3),
        (0, [2], 1),
        (0, [None, 9, 9], 25 + 2 * 3),
        (50, [None, 9], 25 + 3 * 3),
        (4, [9], 25),
        (None, [None, 9], 50),
    ],
)
def test_a_prefix_keeps_that_many_blocks(interval, windows, blocks):
    assert Retention(interval=interval).num_blocks_kept(100, 4, windows) == blocks


@pytest.mark.parametrize("length", [37, 101, 260, 777])
@pytest.mark.parametrize("interval", [0, 48, 100, None])
def test_that_many_blocks_are_enough(length: int, interval: int | None) -> None:
    serving = Serving(Retention(interval=interval), num_blocks=1000)
    serving.serve(list(range(length)))
    expected = Retention(interval=interval).num_blocks_kept(length, 4, [None, 9])
    # The windows of the last multiple and of the end may overlap; where the prompt ends with a
    # block, the end and the last block before its last token are two anchors.
    serving.press(kept=expected + 1)
    for anchor in [*range(interval or length, length, interval or length), length - 1]:
        assert serving.start([*range(anchor), 999])[1] == anchor // 4 * 4


def test_the_line_of_the_start_has_the_numbers() -> None:
    retention = Retention(interval=1024, pin=True)
    line = retention.describe_pins(24_000, 16, [None, *[128] * 6], 32_768)
    # 1562 blocks of full attention, and 25 windows of 9 blocks in six groups.
    assert int(0.2 * 24_000 / (1562 + 6 * 25 * 9)) == 1
    assert "at most 4800 of 24000 blocks (20%), which are 1 prefix of 25000 tokens, 41208 " in line
    assert "Pins are 256 tokens apart or more" in line
    assert "every 1024 tokens, with the blocks of full attention before them" in line
    assert "\n" not in line
    closer = Retention(interval=64, pin=True, pin_min_drop_size=64)
    line = closer.describe_pins(24_000, 16, [None, *[128] * 6], 32_768)
    assert "1 prefix of 25000 tokens, 41208 tokens in all. Pins are 1024 tokens apart" in line


CHUNK = 16
PINS = Retention(pin=True, pin_min_drop_size=0)
SHARED = list(range(40))
# Of a request of 25 blocks: all under full attention, and of the window two blocks before its end
# and before its last full block but one, and one below them.
PINNED = 25 + 4


class Serving:
    """A cache of one full group and one with a window of 9 tokens, in blocks of 4."""

    def __init__(self, retention: Retention | None = None, num_blocks: int = 401) -> None:
        groups = ("full", ("sliding_window", 9))
        self.cache = make_cache(num_blocks, 4, groups=groups, retention=retention, model="m")
        self._names = map(str, range(10**6))

    def stat(self, name: str) -> int:
        return self.cache.core.stats()[name]

    def start(self, tokens: list[int], **options: Any) -> tuple[str, int, int]:
        """The name of a request that holds blocks, its hits, and what it lost to the window."""
        name = next(self._names)
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            params=SamplingParams(),
            cache=CacheOptions(**options),
        )
        self.cache.start(request)
        limit = len(tokens) - 1
        hits = self.cache.count_hits(name, limit)
        lost = self.cache.add_junction(name, hits, limit)
        assert self.cache.commit(name, hits, len(tokens) - hits, CHUNK) == hits
        return name, hits, lost

    def serve(self, tokens: list[int], *, well: bool = True, **options: Any) -> tuple[int, int]:
        """A request from its start to its end; its hits, and what it lost to the window."""
        name, hits, lost = self.start(tokens, **options)
        self.compute(name, hits, tokens, **options)
        self.cache.free([name], ended_well=[name] if well else [])
        self.cache.core.validate()
        return hits, lost

    def press(self, kept: int) -> None:
        """Leaves `kept` blocks cached: those that are evicted last."""
        self.cache.core.release_cached(max(0, self.stat("cached_blocks") - kept))

    def compute(self, name: str, hits: int, tokens: list[int], *, write: bool = True) -> None:
        for end in range(hits + CHUNK, len(tokens) + CHUNK, CHUNK):
            upto = min(end, len(tokens))
            assert self.cache.ensure_slots([(name, upto)]) == 1
            if write:
                self.cache.mark_filled([name], [upto])
            self.cache.drop_unneeded([(name, upto)])


def own(number: int, length: int = 60) -> list[int]:
    return [*SHARED, *range(1000 * number, 1000 * number + length)]


def test_the_same_prompt_and_its_next_turn_hit() -> None:
    serving = Serving()
    assert serving.serve(own(1)) == (0, 0)
    assert serving.serve(own(1)) == (96, 0)
    assert serving.serve([*own(1), *range(7)]) == (100, 0)
    assert serving.serve([*own(1)[:94], *range(7)]) == (92, 0)


@pytest.mark.parametrize("interval", [0, 24, None])
def test_the_second_request_hits_all_while_there_is_room(interval: int | None) -> None:
    serving = Serving(Retention(interval=interval))
    serving.serve(own(1))
    assert serving.serve(own(2)) == (len(SHARED), 0)


def test_the_second_request_with_a_prefix_repairs_it_for_the_third() -> None:
    serving = Serving()
    serving.serve(own(1))
    serving.press(kept=Retention().num_blocks_kept(len(own(1)), 4, [None, 9]))
    assert serving.serve(own(2)) == (0, len(SHARED))
    assert serving.serve(own(3)) == (len(SHARED), 0)


def test_every_multiple_of_the_interval_is_kept() -> None:
    retention = Retention(interval=24)
    serving = Serving(retention)
    serving.serve(own(1))
    serving.press(kept=retention.num_blocks_kept(len(own(1)), 4, [None, 9]))
    assert serving.serve(own(2)) == (24, len(SHARED) - 24)
    assert serving.serve(own(3)) == (len(SHARED), 0)


def test_who_ends_badly_pins_nothing_more() -> None:
    serving = Serving(Retention(interval=20, pin=True, pin_min_drop_size=0))
    name, hits, _ = serving.start(own(1))
    serving.compute(name, hits, own(1))
    pins = serving.stat("pins")
    serving.cache.free([name])
    assert serving.stat("pins") == pins > 0, "windows that were dropped on the way"
    assert serving.serve(own(1)) == (96, 0)


def test_who_may_not_write_pins_nothing() -> None:
    serving = Serving(PINS)
    serving.serve(own(1), write=False)
    serving.serve(own(1), well=False)
    before = serving.stat("pins")
    assert serving.serve(own(1), write=False) == (96, 0)
    assert serving.stat("pins") == before


def test_without_windows_or_the_flag_nothing_is_pinned() -> None:
    for groups, retention in ((("full",), PINS), (("full", ("sliding_window", 9)), None)):
        serving = Serving()
        serving.cache = make_cache(401, 4, groups=groups, retention=retention, model="m")
        serving.serve(own(1))
        assert serving.stat("pins") == 0
        assert serving.cache.core.stats()["cached_blocks"] >= 25


def test_prefix_blocks_are_pinned_unless_they_are_not_wanted() -> None:
    serving = Serving(Retention(pin=True, pin_prefix_blocks=False, pin_min_drop_size=0))
    serving.serve(own(1))
    assert serving.stat("pinned_blocks") == PINNED - 25


@pytest.mark.parametrize(
    ("interval", "least", "pinned"),
    [
        *((0, 1, PINNED), (0, 2, 24 + 3), (0, 24, 24 + 3), (0, 25, 25 + 3), (0, 26, 0)),
        (8, 6, 24 + 3 * 4),  # 6, 12, 18 and 24 of the anchors after every second block
        (8, 7, 24 + 3 * 3),  # 8, 16 and 24
        (8, 10, 24 + 3 * 3),  # 10, 20, and the prompt's end though it is near
    ],
)
def test_an_anchor_too_near_the_last_pinned_one_is_not_pinned(interval, least, pinned):
    serving = Serving(Retention(interval=interval, pin=True, pin_min_drop_size=least))
    serving.serve(own(1))
    assert serving.stat("pinned_blocks") == pinned


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 1.0])
def test_beyond_the_share_the_oldest_pins_end(share: float) -> None:
    serving = Serving(Retention(pin=True, pin_min_drop_size=0, pin_max_share=share))
    for number in range(5):
        serving.serve([number, *own(number, length=59)])
    most = int(400 * share)
    assert serving.stat("pinned_blocks") == min(5 * PINNED, most)
    assert serving.stat("demotions") == max(0, 5 * PINNED - most)


def test_the_oldest_pins_end_first() -> None:
    """A prefix that is hit again becomes the youngest."""
    serving = Serving(Retention(pin=True, pin_min_drop_size=0, pin_max_share=2.5 * PINNED / 400))
    for number in (1, 2, 1, 3):
        serving.serve([number, *own(number)])
    for number in range(2):  # together they take all that is not pinned
        serving.serve(list(range(9000 * number, 9000 * number + 800)), well=False)
    hits = {number: serving.serve([number, *own(number)])[0] for number in (1, 2, 3)}
    assert hits == {1: 100, 2: 0, 3: 100}


@pytest.mark.parametrize("forget", ["reset", "renew"])
def test_pins_end_with_what_they_were_for(forget: str) -> None:
    serving = Serving(PINS)
    serving.serve(own(1))
    assert serving.stat("pinned_blocks") == PINNED
    getattr(serving.cache.versions, forget)()
    assert serving.stat("pinned_blocks") == serving.stat("pinned_free_blocks") == 0
    _, hits, _ = serving.start(list(range(4 * (PINNED - 8))))
    assert hits == serving.stat("pinned_evictions") == 0


@pytest.mark.parametrize(
    ("architecture", "flags", "message"),
    [
        ("gemma3", {"pin_swa_tokens": True}, "Pinned: .* every 2048 tokens, with the blocks"),
        ("mistral-window", {"pin_swa_tokens": True}, "Pinned: .* every 2048 tokens; at most 20 of"),
        ("smollm2", {"pin_swa_tokens": True}, "Without effect: --pin-swa-tokens. No layer"),
        (
            "smollm2",
            {"prefix_cache_retention_interval": 0},
            "Without effect: --prefix-cache-retention-interval. No layer",
        ),
        ("gemma3", {}, None),
        ("smollm2", {}, None),
    ],
)
def test_a_start_says_what_is_pinned(tiny_checkpoint, caplog, architecture, flags, message):
    folder = tiny_checkpoint(architecture)
    with caplog.at_level(logging.INFO, "prefixcache"):
        build(EngineConfig.from_flags(model=str(folder), num_blocks=101, **flags))
    found = [text for text in caplog.messages if text.startswith(("Pinned", "Without"))]
    assert len(found) == (message is not None)
    assert message is None or re.match(message, found[0])
    assert "Pinned" not in "".join(found) or "of 100 blocks (20%)" in found[0]


def test_a_resize_says_again_what_is_pinned(tiny_checkpoint, caplog):
    flags = {"num_blocks": 101, "pin_swa_tokens": True, "prefix_cache_max_blocks": 5}
    engine = build(EngineConfig.from_flags(model=str(tiny_checkpoint("gemma3")), **flags)).engine
    caplog.set_level(logging.INFO, "prefixcache")
    engine.control.resize(num_blocks=21)
    (line,) = [text for text in caplog.messages if text.startswith("Pinned")]
    assert "at most 4 of 20 blocks (20%)" in line
    engine.control.resize(num_blocks=101)
    assert "at most 5 of 100 blocks (--prefix-cache-max-blocks)" in caplog.messages[-1]
