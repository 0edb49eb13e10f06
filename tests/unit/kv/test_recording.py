"""A recording, replayed at its own size and policy, counts what the live cache counted."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakes.fake_cache import make_cache
from fakes.fake_engine import make_engine
from fakes.fake_runner import answer_alone
from fakes.plain_drafts import HostileDrafter
from fakes.plain_runner import VOCAB_SIZE
from prefixcache._core import BlockPseudonyms, replay_recording
from prefixcache.exceptions import ConfigError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.recordings import record_writer
from prefixcache.kv.recordings.record_writer import check_folder
from prefixcache.kv.recordings.recording import CacheRecorder
from prefixcache.kv.recordings.request_records import RequestRecords
from prefixcache.kv.recordings.trace_writer import TraceWriter
from prefixcache.kv.retention import Retention
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.retention_range import RetentionRange
from prefixcache.types.sampling_params import SamplingParams
from support.repeatable import bounded
from support.serving import wait_until

HYBRID = ("full", ("sliding_window", 8))
PINS = Retention(interval=16, pin=True, pin_max_share=0.1, pin_min_drop_size=0)


class Recorded:
    """An engine whose cache is recorded, driven at random."""

    def __init__(
        self, path: Path, seed: int = 0, *, max_size: int = 1 << 30, **options: Any
    ) -> None:
        self.writer = TraceWriter(path, max_size)
        self.path = self.writer.path
        policy = options.pop("eviction_policy", "lru")
        make = partial(make_cache, recorder=CacheRecorder(self.writer), eviction_policy=policy)
        self.answers: dict[str, list[int]] = {}
        if options.pop("drafts", False):
            options["drafter"] = HostileDrafter(seed, self.answers, VOCAB_SIZE)
        options = {"num_blocks": 40, "max_blocks": 60, "merge_twins": True} | options
        self.engine, _, self.cache = make_engine(make_cache=make, **options)
        self._random = random.Random(seed)
        self._stems = [[self._random.randrange(90) for _ in range(40)] for _ in range(3)]
        self._open: list[str] = []

    def add(self) -> None:
        choose = self._random
        stem = choose.choice(self._stems)
        tail = [choose.randrange(90) for _ in range(choose.randrange(1, 12))]
        prompt = stem[: choose.randrange(len(stem))] + tail
        request = Request(
            request_id=f"client-{len(self._open)}",
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=choose.randrange(1, 30), ignore_eos=True),
            cache=self._options(len(prompt)),
        )
        self.answers[request.request_id] = prompt + answer_alone(prompt, 30)
        self.engine.add_request(request)
        self._open.append(request.request_id)
        if choose.random() < 0.5:  # The next turn, whose prompt holds an answer's blocks.
            stem[:] = (prompt + stem)[:60]

    def _options(self, length: int) -> CacheOptions:
        choose = self._random
        hints = [RetentionRange(0, length, priority=80, ttl_s=choose.choice([None, 0.002, 5.0]))]
        return CacheOptions(
            salt=choose.choice([None, None, "a secret salt"]),
            read=choose.random() < 0.9,
            write=choose.random() < 0.9,
            retention=tuple(hints) if choose.random() < 0.3 else (),
            write_upto=choose.choice([None, None, length // 2]),
            owner=choose.choice([None, "a secret key"]),
        )

    def serve(self, prompt: list[int], cache: CacheOptions) -> None:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        name = f"alone-{prompt[0]}-{self.engine.metrics.prompt_tokens}"
        request = Request(request_id=name, prompt_token_ids=prompt, params=params, cache=cache)
        self.engine.add_request(request)
        while self.engine.has_work():
            self.engine.step()

    def step(self) -> None:
        self.engine.step()

    def abort(self) -> None:
        if self._open:
            self.engine.abort([self._random.choice(self._open)])

    def reset(self) -> None:
        self.engine.control.reset_prefix_cache()

    def resize(self) -> None:
        most = self.cache.size.max_blocks
        self.engine.control.resize(num_blocks=self._random.randrange(most - 26, most + 1))

    def new_weights(self) -> None:
        self.engine.requests.drain()
        self.engine._scheduler.restart([*self.engine._scheduler._states])
        self.cache.versions.renew()

    def requeue(self) -> None:
        self.engine.requests.drain()
        self.engine._scheduler.requeue_running()

    def end(self) -> dict[str, Any]:
        """What the replay of the whole recording finds."""
        while self.engine.has_work():
            self.engine.step()
        self.engine.close()
        return replay_recording(self.path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_agrees(found: dict[str, Any], cache: CacheManager) -> None:
    assert found["difference"] is None
    assert found["agrees"]
    assert (found["ended"], found["unchecked_events"]) == ("end", 0)
    stats = cache.core.stats()
    assert found["live"]["queries"] == stats["queries"]
    assert found["replayed"]["hits"] == stats["hits"]
    assert found["replayed"]["evictions"] == stats["evictions"]


actions = st.lists(
    st.sampled_from(
        [Recorded.add] * 6
        + [Recorded.step] * 10
        + [Recorded.abort, Recorded.reset, Recorded.resize]
        + [Recorded.new_weights, Recorded.requeue]
    ),
    min_size=20,
    max_size=bounded(80, 300),
)
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "drafts": {"drafts": True},
    "hybrid": {"groups": HYBRID, "max_blocks": 90, "num_blocks": 80},
    "pins": {"groups": HYBRID, "max_blocks": 90, "num_blocks": 80, "retention": PINS},
    "few cached": {"max_cached_blocks": 9, "merge_twins": False},
    "reuse queue": {"eviction_policy": "reuse-queue"},
    "reuse queue, hybrid": {
        "eviction_policy": "reuse-queue",
        "groups": HYBRID,
        "max_blocks": 90,
        "num_blocks": 80,
    },
}


def resize_after(forget: Callable[[Recorded], None]) -> list[Callable[[Recorded], None]]:
    """Ends pins, whose blocks decide what a later resize finds above the new end."""
    add, step = Recorded.add, Recorded.step
    return [*[add] * 4, *[step] * 4, forget, *[add] * 8, *[step] * 2, Recorded.resize]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=bounded(8, 300))
@example(actions=resize_after(Recorded.reset), seed=1)
@example(actions=resize_after(Recorded.new_weights), seed=1)
@given(actions=actions, seed=st.integers(0, 2**32))
def test_random_schedules_replay_to_the_token(tmp_path_factory, form, actions, seed):
    recorded = Recorded(tmp_path_factory.mktemp("trace") / "trace.jsonl", seed, **FORMS[form])
    for action in actions:
        action(recorded)
    assert_agrees(recorded.end(), recorded.cache)


def test_a_dropped_event_is_noticed(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace.jsonl", seed=1, num_blocks=36, max_blocks=36)
    for _ in range(20):
        recorded.add()
        for _ in range(3):
            recorded.step()
    assert_agrees(recorded.end(), recorded.cache)
    lines = recorded.path.read_text().splitlines(keepends=True)
    noticed: dict[str, list[bool]] = {}
    changed = tmp_path / "changed.jsonl"
    for number, line in enumerate(lines[1:], start=1):
        changed.write_text("".join(lines[:number] + lines[number + 1 :]))
        noticed.setdefault(json.loads(line)["e"], []).append(not is_replayed(changed))
    for kind in ("add", "start", "preempt"):
        assert all(noticed[kind]), kind
    # What a request publishes may be lost before anybody asks; slots may be unused.
    for kind in ("publish", "slots", "end"):
        assert any(noticed[kind]), kind


def test_hints_end_in_a_replay_when_they_ended(tmp_path: Path) -> None:
    options = {"num_blocks": 21, "max_blocks": 21, "retention_budget": 1.0}
    recorded = Recorded(tmp_path / "trace.jsonl", **options)
    hinted = CacheOptions(retention=(RetentionRange(0, 32, priority=80, ttl_s=30.0),))
    recorded.serve([*range(32)], hinted)
    recorded.cache._recorder._began -= 60 * 10**9  # A minute passes.
    for first in (40, 50, 60):
        recorded.serve([*range(first, first + 30)], CacheOptions())
    recorded.serve([*range(32)], CacheOptions())
    found = recorded.end()
    assert_agrees(found, recorded.cache)
    assert found["live"]["hits"] == 0, "the hint's blocks went first when it had ended"
    lines = recorded.path.read_text().splitlines(keepends=True)
    for kind in ("expire", "hints"):
        changed = tmp_path / f"without-{kind}.jsonl"
        kept = (line.replace('"hints"', '"_"') if kind == "hints" else line for line in lines)
        changed.write_text("".join(line for line in kept if '"e":"expire"' not in line))
        assert is_replayed(changed) is (kind == "hints")


def is_replayed(path: Path) -> bool:
    try:
        return bool(replay_recording(path)["agrees"])
    except ValueError:
        return False


def record_some(path: Path, num_requests: int = 6, **options: Any) -> Recorded:
    recorded = Recorded(path, seed=3, **options)
    for _ in range(num_requests):
        recorded.add()
        recorded.step()
    return recorded


def test_a_recording_cut_off_anywhere_reads_up_to_its_last_whole_line(tmp_path: Path) -> None:
    recorded = record_some(tmp_path / "trace.jsonl")
    whole = recorded.end()
    text = recorded.path.read_bytes()
    header = text.index(b"\n") + 1
    for end in (header, header + 1, len(text) // 2, len(text) - 1):
        recorded.path.write_bytes(text[:end])
        found = replay_recording(recorded.path)
        assert (found["difference"], found["ended"]) == (None, None)
        assert found["events"] == text[header:end].count(b"\n") <= whole["events"]
        assert not (end == header and found["agrees"]), "nothing was compared"
    recorded.path.write_bytes(text[: header - 1])
    with pytest.raises(ValueError, match="line 1: header is missing"):
        replay_recording(recorded.path)


def test_names_are_keyed_hashes_and_nothing_else_tells_of_a_prompt(tmp_path: Path) -> None:
    key, tokens = bytes(range(32)), [*range(11)]
    pseudonyms = BlockPseudonyms(key, 4)
    for salt, begin in ((None, b"\0"), ("", b"\1"), ("né", b"\1" + "né".encode())):
        chain, names = blake3(begin, key=key).digest(), ""
        for start in (0, 4):
            block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 4])
            chain = blake3(chain + block, key=key).digest()
            names += chain[:8].hex()
        first, name = pseudonyms.extend(pseudonyms.begin(salt), tokens[:7])
        second, other = pseudonyms.extend(first, tokens[4:])
        assert (second, name + other) == (chain, names)
    one, two = (record_some(tmp_path / name) for name in ("one.jsonl", "two.jsonl"))
    prompts = []
    for recorded in (one, two):
        recorded.end()
        text = recorded.path.read_text()
        assert "client" not in text
        assert "secret" not in text
        prompts.append(
            [line["names"] for line in lines_of(recorded.path) if line.get("e") == "add"]
        )
    assert [*map(len, prompts[0])] == [*map(len, prompts[1])]
    assert prompts[0] != prompts[1], "another key each time"


def test_a_recording_is_its_users_alone_and_never_overwritten(tmp_path, caplog):
    paths = []
    with caplog.at_level("INFO"):
        for _ in range(2):
            recorded = record_some(tmp_path / "day.jsonl")
            assert stat.S_IMODE(recorded.path.stat().st_mode) == 0o600
            assert_agrees(recorded.end(), recorded.cache)
            paths.append(recorded.path)
    assert [path.name for path in paths] == ["day.jsonl", "day-2.jsonl"]
    assert str(paths[1]) in caplog.text


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("missing/day.jsonl", "in a folder that exists, not .*missing"),
        ("file/day.jsonl", "in a folder that exists, not .*file"),
        ("", "a file, and .* is a folder"),
    ],
)
def test_a_file_that_cannot_be_made_is_refused_by_its_flag(tmp_path, path, error):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"record_trace must be {error}"):
        check_folder(tmp_path / path, "record_trace")


def test_a_folder_that_is_gone_by_then_is_reported_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_trace cannot be made: .*: No such file"):
        TraceWriter(tmp_path / "gone" / "day.jsonl", 1)


def test_parts_are_one_recording(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "day.jsonl", seed=5, max_size=2000)
    for _ in range(8):
        recorded.add()
        while recorded.engine.has_work():
            recorded.step()
    found = recorded.end()
    assert_agrees(found, recorded.cache)
    parts = [tmp_path / f"day.jsonl.{part}" for part in range(1, found["parts"])]
    assert {recorded.path, *parts} == {*tmp_path.iterdir()}
    assert len(parts) > 1
    with pytest.raises(ValueError, match=r"day\.jsonl\.1, line 1: part must be 0"):
        replay_recording(parts[0])
    parts[0].unlink()
    with pytest.raises(OSError, match=r"day\.jsonl\.1"):
        replay_recording(recorded.path)


def full_disk(file: int, data: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failure", ["full disk", "deleted", "too slow", "too many tokens"])
def test_a_recording_that_cannot_go_on_stops_alone(tmp_path, failure, monkeypatch, caplog):
    recorded = record_some(tmp_path / "day.jsonl")
    assert metric_of(recorded.writer) == 1
    reason = "more waits to be written than may"
    if failure == "full disk":
        reason = "No space left on device"
        monkeypatch.setattr(os, "write", full_disk)
    elif failure == "deleted":
        reason = "the file was deleted"
        recorded.path.unlink()
    elif failure == "too slow":
        monkeypatch.setattr(record_writer, "MAX_EVENTS", 0)
    else:
        monkeypatch.setattr(record_writer, "MAX_TOKENS", 0)
    recorded.add()
    recorded.step()
    wait_until(lambda: not recorded.writer.is_recording)
    monkeypatch.undo()
    assert f"has stopped: {reason}. Serving goes on." in caplog.text
    assert metric_of(recorded.writer) == 0
    waits_for_thread(recorded.writer)
    recorded.add()
    while recorded.engine.has_work():
        recorded.step()
    assert not recorded.engine.has_unfinished()
    assert not recorded.writer._events, "nothing is kept for a thread that has ended"
    recorded.engine.close()
    if failure != "deleted":
        assert replay_recording(recorded.path)["difference"] is None


@pytest.mark.parametrize("kind", ["trace", "requests"])
def test_a_file_that_cannot_be_closed_is_reported_in_the_log(tmp_path, kind, monkeypatch, caplog):
    def failing(file: int) -> None:
        close(file)
        if file == writer._file._file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    close = os.close
    if kind == "trace":
        writer: Any = record_some(tmp_path / "day.jsonl").writer
    else:
        writer = RequestRecords(tmp_path / "day.jsonl", {})
    monkeypatch.setattr(os, "close", failing)
    writer.close()
    assert f"The recording {writer.path} may lack its end: Input/output error." in caplog.text


def waits_for_thread(writer: TraceWriter) -> None:
    wait_until(lambda: not writer._thread.is_alive())


def metric_of(writer: TraceWriter) -> float:
    return next(iter(writer.families())).samples[0].value


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], r"line 1: header is missing"),
        (["nothing"], r"line 1: header must be an object of JSON"),
        ([{"timestamp": 1}], r"line 1: prefixcache_trace is missing: this is no recording"),
        ([{"prefixcache_trace": 2}], r"line 1: prefixcache_trace must be 1, not 2"),
        ([{"prefixcache_trace": 1}], r"line 1: header cannot be read: missing field"),
        ([{"block_size": 3}], r"header is refused: block_size must be a power of two"),
        ([{"num_blocks": 1}], r"header is refused: num_blocks must be from 2"),
        ([{"part": 1}], r"line 1: part must be 0"),
        ([{}, {"e": "nap", "t": 0}], r"line 2: event cannot be read: unknown variant `nap`"),
        ([{}, {"e": "reset"}], r"line 2: event cannot be read: missing field `t`"),
        ([{}, {"e": "reset", "t": 2}, {"e": "reset", "t": 1}], r"line 3: t must not be below"),
        (
            [{}, {"e": "add", "t": 0, "id": 0, "tokens": 9, "names": ""}],
            r"names must be of 2 blocks",
        ),
        ([{}, {"e": "add", "t": 0, "id": 0, "tokens": 4, "names": "xy"}], r"names must be 16 hexa"),
        ([{}, {"e": "add", "t": 0, "id": 0, "tokens": 2**62}], r"tokens must be at most"),
        ([{}, {"e": "preempt", "t": 0, "ids": [7]}], r"line 2: id must be of a request, not 7"),
        ([{}, {"e": "end", "t": 0, "ids": [], "tokens": [], "well": [True]}], r"well must have an"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_recording_is_reported_by_line_and_field(tmp_path, lines, error):
    recorded = record_some(tmp_path / "good.jsonl", 0)
    recorded.end()
    header = lines_of(recorded.path)[0]
    if (
        lines
        and isinstance(lines[0], dict)
        and not {"timestamp", "prefixcache_trace"} & {*lines[0]}
    ):
        lines = [header | lines[0], *lines[1:]]
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f"{text}\n" for text in texts))
    with pytest.raises(ValueError, match=error) as raised:
        replay_recording(path)
    assert str(path) in str(raised.value)
