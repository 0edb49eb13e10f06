"""An engine whose evicted blocks lie on a disk: loads, what ends them, and the bits."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from equality import WIDE, Bench, Counts, schedule_on_disk
from prefixcache.config.engine_config import EngineConfig
from prefixcache.diagnostics.reasons import Asked, Explanation
from prefixcache.engine.build import build
from prefixcache.engine.engine import Engine
from prefixcache.kv.tiers import disk_tier
from prefixcache.kv.tiers.disk_store import DiskStore
from prefixcache.kv.tiers.disk_tier import DiskTier
from prefixcache.scheduler import loading
from prefixcache.scheduler.loading import Reads
from prefixcache.scheduler.step_time import StepTimeModel
from prefixcache.server.jobs.answers import TokenCounts, usage
from prefixcache.types.request import CacheOptions, CacheScope, Request, RequestOutput
from prefixcache.types.sampling_params import SamplingParams
from support.repeatable import slow

TinyCheckpoint = Callable[..., Path]


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 384, count).tolist()


PROMPT = tokens(150)


class Served:
    """An engine with a pool of 15 blocks, and what it answered."""

    def __init__(self, folder: Path, disk: Path | None, **flags: object) -> None:
        if disk is not None:
            flags |= {"disk_cache_memory": "64MiB", "disk_cache_dir": disk}
        options = {"num_blocks": 16, "max_num_batched_tokens": 64, "max_model_len": 240} | flags
        config = EngineConfig.from_flags(model=str(folder), device="cpu", **options)
        self.engine: Engine = build(config, folder).engine
        self.outputs: dict[str, list[RequestOutput]] = {}
        # Of the first prompt, of 150 tokens; a state is kept eight tokens before its end.
        self.hit = 128 if self.engine._cache.has_states else 144

    def add(self, name: str, prompt: list[int], max_tokens: int = 6, **options: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        self.outputs[name] = []
        cache = CacheOptions(**options)
        self.engine.add_request(
            Request(request_id=name, prompt_token_ids=prompt, params=params, cache=cache)
        )

    def step(self) -> None:
        for output in [*self.engine.take_outputs(), *self.engine.step()]:
            self.outputs[output.request_id].append(output)

    def run(self) -> None:
        while self.engine.has_unfinished():
            self.step()
        self.engine._cache.core.validate()

    def answer(self, name: str, prompt: list[int]) -> list[tuple[int, float]]:
        self.add(name, prompt)
        self.run()
        return self.said(name)

    def said(self, name: str) -> list[tuple[int, float]]:
        outputs = self.outputs[name]
        assert [one.error for one in outputs] == [None] * len(outputs)
        return [
            (t, p.logprob) for o in outputs for t, p in zip(o.token_ids, o.logprobs, strict=True)
        ]

    def from_disk(self, name: str) -> int:
        return self.outputs[name][0].num_disk_tokens

    def end(self) -> None:
        """Another engine may have the files."""
        self.engine.close()
        if (file := self.engine._cache.file) is not None:
            cached = self.engine.control.stats()["cached_blocks"]
            while file.core.survey(reads=False)[0] < cached:
                pass
            file.close()

    def until(self, *locations: tuple[int, int]) -> int:
        """Waits until the first prompt lies at one of them; how much of it is on the disk."""
        disk = self.engine._cache.disk
        assert disk is not None
        disk.nudge()
        with disk._changed:
            where = partial(self.engine.locate_prefix, PROMPT)
            assert disk._changed.wait_for(lambda: where() in locations, 240)
            return where().disk_tokens

    def evict(self, *, whole: bool = True) -> None:
        """The first prompt lies on the disk alone, or some of what it needs does."""
        self.answer("first", PROMPT)
        for seed in itertools.count(1):
            found = self.engine._cache.reader.look_up(PROMPT, None)
            if not (found.hit_tokens or (whole and found.full_attention_tokens)):
                break
            self.other = tokens(230, seed=seed)
            self.answer("other", self.other)
        self.until((0, self.hit))


@pytest.fixture
def model(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("qwen3")


@pytest.fixture(autouse=True)
def _loads_are_taken_to_be_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimeModel, "seconds", lambda *_: 0.0)
    monkeypatch.setattr(loading, "_MOST_SECONDS", 600)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads wait for the event."""
    go, get = threading.Event(), DiskStore.get

    def wait(store: DiskStore, keys: list[bytes]) -> list[bytes]:
        assert go.wait(600)
        return get(store, keys)

    monkeypatch.setattr(DiskStore, "get", wait)
    return go


# Full attention, windows, states.
POOLS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_blocks": 16},
    "gemma3": {"num_blocks": 60},
    "qwen3.5": {"num_blocks": 40, "state_block_size": 16},
}


@pytest.mark.parametrize("name", POOLS)
def test_hits_from_disk_change_no_bit(tiny_checkpoint, tmp_path, name):
    model = tiny_checkpoint(name)
    served = Served(model, tmp_path / "disk", **POOLS[name])
    for whole in (False, True):
        served.evict(whole=whole)
        before = served.engine.control.prefix_cache_stats().disk_cached_tokens
        assert served.answer("again", PROMPT) == served.said("first")
        hit, served.hit = served.hit, 144  # Whoever hits keeps the state at the end of what hit.
        assert served.engine.control.prefix_cache_stats().disk_cached_tokens == before + hit
        output = served.outputs["again"][0]
        assert (output.num_disk_tokens, output.num_cached_tokens) == (hit, hit)
    assert served.answer("memory", PROMPT) == served.said("first")
    assert served.from_disk("memory") == 0
    served.engine.close()
    next_process = Served(model, tmp_path / "disk", **POOLS[name])
    # What was not written yet when the first one ended is gone.
    hit = next_process.until((0, next_process.hit), (0, 144))
    assert next_process.answer("first", PROMPT) == served.said("first")
    assert next_process.from_disk("first") == hit
    next_process.engine.close()


@pytest.mark.parametrize("name", POOLS)
def test_a_restart_finds_what_was_in_memory_and_what_was_evicted(tiny_checkpoint, tmp_path, name):
    def life() -> Served:
        both = {"disk": tmp_path / "disk", "kv_cache_dir": tmp_path / "kept"}
        return Served(tiny_checkpoint(name), **both, **POOLS[name])

    served = life()
    served.evict()
    served.end()
    again = life()
    again.until((0, served.hit))
    for said, prompt in ("other", served.other), ("first", PROMPT):
        assert again.answer(said, prompt) == served.said(said)
    assert (again.from_disk("other"), again.from_disk("first")) == (0, served.hit)
    assert again.outputs["other"][0].num_cached_tokens > 200
    again.end()


def test_a_load_waits_until_all_was_read_that_it_hits_in_memory(model, tmp_path, monkeypatch):
    served, asked = Served(model, tmp_path / "disk"), list[int]()
    served.evict()
    monkeypatch.setattr(Reads, "must_wait", lambda _, state, hits: asked.append(hits))
    served.answer("again", PROMPT)
    assert asked == [served.hit]
    served.engine.close()


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5"])
def test_a_hit_needs_the_window_and_the_state_at_its_end(
    tiny_checkpoint, tmp_path, monkeypatch, name
):
    served = Served(tiny_checkpoint(name), tmp_path / "disk", **POOLS[name])
    served.evict()
    get, asked = DiskStore.get, set[bytes]()

    def of_full_attention(store: DiskStore, keys: list[bytes]) -> list[bytes]:
        asked.update(keys)
        return get(store, list(itertools.takewhile(lambda key: key[32:] == bytes(2), keys)))

    monkeypatch.setattr(DiskStore, "get", of_full_attention)
    assert served.answer("again", PROMPT) == served.said("first")
    assert served.from_disk("again") == 0
    assert served.engine._scheduler.loads.counts().started == 1
    # Of full attention all, of a window what it needs, of a state one.
    groups = Counter(key[33] for key in asked)
    kinds = served.engine._cache.groups
    wanted = [
        served.hit // 16 if kind == "full" else 1 if kind == "state" else -(-kind[1] // 16)
        for kind in kinds
    ]
    assert [groups[group] for group in range(len(kinds))] == wanted
    served.engine.close()


def test_a_prompt_without_an_answer_tells_what_came_from_the_disk(model, tmp_path):
    served = Served(model, tmp_path / "disk")
    served.evict()
    served.add("alone", PROMPT, max_tokens=0)
    served.run()
    assert served.from_disk("alone") == served.hit
    served.engine.close()


def test_usage_tells_what_came_from_the_disk():
    counts = TokenCounts(10, 1, 8, 0, 0, 0, 0, 0, from_disk=4)
    assert usage(counts)["prompt_tokens_details"]["disk_cached_tokens"] == 4
    none = usage(counts._replace(from_disk=0))["prompt_tokens_details"]
    assert "disk_cached_tokens" not in none


@pytest.mark.parametrize("tiers", ["memory", "memory,disk"])
def test_a_threshold_counts_the_tiers_asked_for(model, tmp_path, tiers):
    served = Served(model, tmp_path / "disk", cache_hit_threshold_tiers=tiers)
    served.evict()
    all_count = tiers != "memory"
    asked = [
        ("memory", 0.01, False),
        ("memory,disk", 0.91, False),  # 144 of the 160 tokens that could be hits are on the disk.
        (None, 0.91, False),
        (None, 0.9, all_count),
        ("memory,disk", 0.9, True),
    ]
    longer = [*PROMPT, *tokens(20, seed=9)]
    for number, (own, threshold, goes_on) in enumerate(asked):
        served.add(f"{number}", longer, hit_threshold=threshold, hit_tiers=own)
        served.run()
        ending = served.outputs[f"{number}"][-1].finish_reason
        assert ending == ("length" if goes_on else "cache_threshold")
    served.engine.close()


def test_a_miss_says_what_lies_on_the_disk(model, tmp_path):
    served = Served(model, tmp_path / "disk")
    diagnostics = served.engine.diagnose(1 << 20)
    served.evict()
    diagnostics.settle()

    def explained(prompt: list[int], **sent: Any) -> Explanation:
        ids = np.array(prompt, np.int32)
        asked = Asked(token_ids=ids, scope=CacheScope(), **sent)
        return diagnostics.explain(asked, sees_all=True)

    found = explained(PROMPT)
    assert (found.miss.hit_tokens, found.miss.reason, found.disk_tokens) == (0, "on_disk", 144)
    assert "tokens 0 to 15 is on the disk" in str(found)
    assert explained(PROMPT[:48]).disk_tokens == 32  # The last token is computed.
    assert explained(PROMPT, hit_tokens=48).disk_tokens == 96
    # What was evicted since then was not on the disk then.
    assert explained(PROMPT, hit_tokens=0, started_at=0.0).miss.reason == "never_seen"
    assert explained(tokens(64, seed=9)).disk_tokens == 0
    served.engine.close()


def test_others_run_while_a_request_waits(model, tmp_path, slow_disk):
    served = Served(model, tmp_path / "disk")
    served.evict()
    served.add("again", PROMPT)
    served.add("short", tokens(30, seed=5))
    while len(served.said("short")) < 6:
        served.step()
    assert served.outputs["again"] == []
    slow_disk.set()
    served.run()
    assert served.said("again") == served.said("first")
    served.engine.close()


@pytest.mark.parametrize("kept", [None, "kept"])
@pytest.mark.parametrize("how", ["abort", "sleep", "requeue", "reset", "resize"])
def test_what_ends_a_load_loses_nothing(model, tmp_path, slow_disk, how, kept):
    folder = kept and tmp_path / kept
    served = Served(model, tmp_path / "disk", kv_cache_max_memory="1MiB", kv_cache_dir=folder)
    served.evict()
    served.add("again", PROMPT)
    served.step()
    assert served.engine._scheduler.loads.counts().started == 1
    if how == "abort":
        served.engine.abort(["again"])
    elif how == "sleep":
        served.engine.control.sleep()
        served.engine.control.wake_up()
    elif how == "requeue":
        served.engine.control.pause("recompute")
        served.engine.control.resume()
    elif how == "resize":
        served.engine.control.resize(num_blocks=20)
    else:
        served.engine.control.reset_prefix_cache()
    slow_disk.set()
    served.run()
    if how != "abort":
        assert served.said("again") == served.said("first")
    assert served.engine.control.stats()["blocks_in_use"] == 0
    assert served.answer("last", PROMPT) == served.said("first")
    served.engine.close()


def test_ctrl_c_while_a_request_waits_loses_nothing(model, tmp_path, slow_disk, monkeypatch):
    served = Served(model, tmp_path / "disk")
    served.evict()
    served.add("again", PROMPT)
    monkeypatch.setattr(DiskTier, "wait", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        served.run()
    served.engine.forget_all()
    assert served.engine.control.stats()["blocks_in_use"] == 0
    monkeypatch.undo()
    slow_disk.set()
    assert served.answer("last", PROMPT) == served.said("first")
    served.engine.close()


def test_a_load_that_is_late_ends_with_what_is_there(model, tmp_path, slow_disk, monkeypatch):
    served = Served(model, tmp_path / "disk")
    served.evict()
    monkeypatch.setattr(StepTimeModel, "seconds", lambda *_: 1e-3)
    assert served.answer("again", PROMPT) == served.said("first")
    assert served.from_disk("again") == 0
    assert served.engine._scheduler.loads.counts().late == 1
    slow_disk.set()
    served.answer("other again", tokens(230, seed=1))
    served.answer("refused", PROMPT)
    assert served.from_disk("refused") == 0
    assert served.engine._scheduler.loads.counts().refused > 0
    # Each refusal lets the disk be taken for faster: in the end it is tried again.
    monkeypatch.setattr(disk_tier, "_PATIENCE", 1e9)
    monkeypatch.setattr(loading, "_LEAST_SECONDS", 600)
    for name in ("refused again", "tried again"):
        served.answer(f"before {name}", tokens(230, seed=1))
        assert served.answer(name, PROMPT) == served.said("first")
    assert served.from_disk("tried again") == served.hit
    served.engine.close()


@pytest.mark.parametrize("call", ["_connect", "keys", "put", "get", "clear", "close"])
def test_no_answer_depends_on_the_disk(model, tmp_path, monkeypatch, caplog, call):
    served = Served(model, None)
    expected = served.answer("first", PROMPT)
    served = Served(model, tmp_path / "disk")
    served.evict()
    failing = mock.Mock(side_effect=sqlite3.OperationalError if call == "_connect" else OSError)
    monkeypatch.setattr(DiskStore, call, failing)
    if call in ("_connect", "keys"):
        served = Served(model, tmp_path / "disk")
    for number in range(2):
        assert served.answer(f"{number}", PROMPT) == expected
        served.answer(f"other {number}", tokens(230, seed=2 + number))
    served.engine.control.reset_prefix_cache()
    assert served.answer("last", PROMPT) == expected
    served.engine.close()
    assert failing.called
    assert caplog.text.count("is idle") == (call != "close")


@pytest.mark.parametrize(
    ("name", "kept"),
    [("qwen3", None), ("qwen3", "kept"), slow("gemma3", "kept"), slow("qwen3.5", "kept")],
)
def test_schedules_with_a_disk_change_no_bit(tiny_checkpoint, tmp_path, monkeypatch, name, kept):
    bench, total = Bench(tiny_checkpoint(name, **WIDE), "float32"), Counts()
    # The second engine finds what the first has evicted, and writes only ahead of evictions.
    for queue_bytes in (1 << 20, 0):
        monkeypatch.setattr("prefixcache.kv.tiers.host_blocks._QUEUE_BYTES", queue_bytes)
        schedule = schedule_on_disk(2, tmp_path / "disk", kept and tmp_path / kept)
        total.add(bench.compare(schedule))
    assert total.differences == total.block_differences == 0
    assert total.disk_tokens > 0
    assert (total.restored > 0) == (kept is not None)
