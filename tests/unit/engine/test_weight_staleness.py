"""What older weights computed: who may hit it, what becomes of who is in flight, and the labels."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.fake_memory import lone_answer, make_versioned_engine
from prefixcache.config.engine_parts.cache_config import CacheConfig
from prefixcache.exceptions import FieldError, InvalidRequestError
from prefixcache.kv.specs import GroupKind
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import as_token_ids
from prefixcache.types.weight_spans import WeightSpan, extend_spans

SIZE = 4
PROMPT = [*range(10, 27)]
FULL = 16


class Server:
    """An engine whose weights are the number of their folder, and what its requests got."""

    def __init__(self, staleness: int = 0, **options: Any) -> None:
        self.engine, self.runner, self.cache = make_versioned_engine(
            max_weight_staleness=staleness, **options
        )
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.spans: defaultdict[str, list[WeightSpan]] = defaultdict(list)
        self.cached: dict[str, int] = {}
        self.staleness: dict[str, int] = {}
        self.ends: dict[str, str] = {}

    def add(
        self, name: str, prompt: Sequence[int] = PROMPT, max_tokens: int = 8, **cache: Any
    ) -> None:
        self.engine.add_request(
            Request(
                request_id=name,
                prompt_token_ids=as_token_ids(prompt),
                params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                cache=CacheOptions(**cache),
            )
        )

    def step(self) -> None:
        for output in [*self.engine.take_outputs(), *self.engine.step()]:
            name = output.request_id
            if output.restarted:
                for known in (self.tokens, self.spans):
                    known[name].clear()
            if output.token_ids:
                self.cached.setdefault(name, output.num_cached_tokens)
                self.staleness.setdefault(name, output.hit_staleness)
            self.tokens[name] += output.token_ids
            extend_spans(self.spans[name], output.weight_version, len(output.token_ids))
            if output.finish_reason is not None:
                self.ends[name] = output.finish_reason

    def run(self, steps: int = 1000) -> None:
        for _ in range(steps):
            if not self.engine.has_work():
                break
            self.step()
        self.cache.core.validate()

    def answer(self, name: str, **options: Any) -> list[int]:
        self.add(name, **options)
        self.run()
        return self.tokens[name]

    def swap(self, weights: int, mode: Any = "recompute", tag: str | None = None) -> None:
        self.engine.control.update_weights_from_disk(str(weights), mode, weight_version=tag)

    def writers(self, name: str) -> list[int]:
        """The weights that computed the KV of each block that the request holds and hit."""
        hits = self.cached[name] // SIZE
        tables = [
            self.cache._sequences[name].block_table(group)[:hits]
            for group in range(len(self.cache.groups))
        ]
        kv = self.runner._writers.reshape(-1, SIZE)
        return [int(one) for table in tables for block in table if block for one in kv[block]]


@pytest.fixture(autouse=True)
def _folders_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "prefixcache.engine.weights.weight_updates.resolve_model", lambda name, revision: Path(name)
    )


def test_each_request_takes_hits_as_old_as_it_allows() -> None:
    server = Server(staleness=2)
    server.answer("a")
    server.swap(1)
    assert server.answer("fresh", max_weight_staleness=0) == lone_answer(PROMPT, 8, 1)
    assert server.cached["fresh"] == 0
    server.swap(2)
    for most, cached, age in ((0, 0, 0), (1, FULL, 0)):
        server.answer(f"{most}", max_weight_staleness=most)
        assert (server.cached[f"{most}"], server.staleness[f"{most}"]) == (cached, age)
    server.swap(3)
    server.answer("b", prompt=[*PROMPT[:8], *PROMPT], max_weight_staleness=2)
    assert (server.cached["b"], server.staleness["b"]) == (8, 1)
    assert server.engine._scheduler.admission.num_stale_tokens == {1: 8}


def test_the_longest_hit_wins_and_the_newest_of_them() -> None:
    server = Server(staleness=3)
    server.answer("long")
    server.swap(1)
    server.answer("short", prompt=PROMPT[:9], max_weight_staleness=0)
    server.swap(2)
    server.answer("a", prompt=PROMPT[:9])
    assert (server.cached["a"], server.staleness["a"]) == (8, 1)
    server.answer("b")
    assert (server.cached["b"], server.staleness["b"]) == (FULL, 2)


def test_a_server_that_allows_none_keeps_nothing() -> None:
    server = Server(staleness=0)
    server.answer("a")
    server.swap(1)
    assert server.answer("b", max_weight_staleness=5) == lone_answer(PROMPT, 8, 1)
    assert server.cached["b"] == 0


def test_without_a_bound_all_versions_count_and_only_those_with_a_hit_are_hashed() -> None:
    server = Server(staleness=-1, num_blocks=700)
    server.answer("a")
    for weights in range(1, 80):
        server.swap(weights)
        server.answer(f"{weights}", prompt=[1 + weights % 9, *PROMPT[1:]])
    server.add("b", max_weight_staleness=-1)
    assert server.cache.count_hits("b", FULL) == FULL
    assert [*server.cache.versions._older["b"].sequences] == [79, 0]
    server.run()
    assert (server.cached["b"], server.staleness["b"]) == (FULL, 79)
    assert server.answer("c", max_weight_staleness=64) == lone_answer(PROMPT, 8, 79)


def test_what_stands_on_old_blocks_is_as_old_as_they_are() -> None:
    """Blocks that new weights compute after old ones are not for those who want the new alone."""
    server = Server(staleness=1)
    server.answer("a")
    server.swap(1)
    longer = [*PROMPT, *PROMPT]
    server.answer("b", prompt=longer, max_weight_staleness=1)
    assert server.cached["b"] == FULL
    assert server.answer("c", prompt=longer, max_weight_staleness=0) == lone_answer(longer, 8, 1)
    assert server.cached["c"] == 0
    server.swap(2)
    server.answer("d", prompt=[*longer, *PROMPT], max_weight_staleness=1)
    assert server.staleness["d"] == 1
    assert server.cached["d"] == len(longer) // SIZE * SIZE


def test_weights_whose_name_comes_back_find_nothing_mixed() -> None:
    server = Server(staleness=2)
    server.add("kept", max_tokens=24)
    server.run(3)
    server.swap(1, "keep")
    server.run()
    mixed = [*PROMPT, *server.tokens["kept"]]
    server.swap(0)
    assert server.answer("b", prompt=mixed) == lone_answer(mixed, 8, 0)
    assert server.cached["b"] == 0


@pytest.mark.parametrize("groups", [("full",), ("full", ("sliding_window", 9))], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_hit_outside_its_bound(seed: int, groups: Sequence[GroupKind]) -> None:
    """With requests kept over updates, so that chains hold what several weights computed."""
    choose = random.Random(seed)
    server = Server(staleness=3, num_blocks=60, max_num_batched_tokens=16, groups=groups)
    prompts = [[choose.randrange(2) + 1 for _ in range(20)] for _ in range(4)]
    alone: dict[str, tuple[list[int], int]] = {}
    hit_old = 0
    for now in range(12):
        for i in range(4):
            name, most = f"{now}-{i}", choose.randrange(4)
            prompt = [*choose.choice(prompts)[: choose.randrange(9, 20)], 3 + choose.randrange(2)]
            server.add(name, prompt, max_tokens=choose.randrange(1, 9), max_weight_staleness=most)
            ends_before_the_update = choose.random() < 0.6
            while name not in server.cached and name not in server.ends:
                server.step()
                if name in server.cached and name in server.cache._sequences:
                    writers = server.writers(name)
                    assert all(now - most <= one <= now for one in writers)
                    assert server.staleness[name] >= max((now - one for one in writers), default=0)
                    hit_old += any(one < now for one in writers)
            if ends_before_the_update:
                while name not in server.ends:
                    server.step()
                if most == 0:
                    alone[name] = (prompt, now)
        for name, (prompt, weights) in alone.items():
            assert server.tokens[name] == lone_answer(
                prompt, len(server.tokens[name]), weights, groups
            )
        server.swap(now + 1, "keep")
    server.run()
    assert hit_old > 3
    assert len(alone) > 1


def test_tokens_are_labelled_with_their_weights() -> None:
    server = Server()
    server.add("a", max_tokens=12, on_weight_update="keep")
    for version, tag in ((1, None), (2, "step-2"), (3, None)):
        server.run(2)
        server.swap(version, "recompute", tag)
    server.run()
    first = server.spans["a"][0]
    assert (first.version, first.start) == (0, 0)
    assert [one.version for one in server.spans["a"]] == [0, 1, "step-2", 3]
    assert [one.start for one in server.spans["a"][1:]] == [
        one.end for one in server.spans["a"][:-1]
    ]
    assert server.spans["a"][-1].end == len(server.tokens["a"]) == 12


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_choose_what_an_update_does_to_them(ahead: bool) -> None:
    server = Server(ahead=ahead)
    for name in ("keep", "recompute", "abort"):
        server.add(name, on_weight_update=name)
    server.add("none")
    server.run(3)
    before = list(server.tokens["keep"])
    server.swap(1, "abort")
    server.run()
    assert server.ends == {
        "keep": "length",
        "recompute": "length",
        "abort": "abort",
        "none": "abort",
    }
    assert server.tokens["keep"][: len(before)] == before
    assert [one.version for one in server.spans["keep"]] == [0, 1]
    assert server.tokens["recompute"] == lone_answer(PROMPT, 8, 1)
    assert server.spans["recompute"] == [WeightSpan(1, 0, 8)]


def test_a_sleep_gives_up_the_blocks_of_all() -> None:
    server = Server()
    server.add("a", on_weight_update="keep")
    server.run(2)
    server.engine.control.sleep(2)
    server.swap(1)
    server.engine.control.wake_up()
    server.run()
    assert server.tokens["a"] == lone_answer(PROMPT, 8, 1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_weight_staleness": -2}, "max_weight_staleness"),
        ({"max_weight_staleness": True}, "max_weight_staleness"),
        ({"max_weight_staleness": "1"}, "max_weight_staleness"),
        ({"on_weight_update": "later"}, "on_weight_update"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        CacheOptions(**options)
    assert caught.value.param == field


@pytest.mark.parametrize("other", ["kv_cache_dir", "record_trace"])
def test_what_outlives_the_process_is_never_stale(other: str, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=f"excludes {other}"):
        CacheConfig(max_weight_staleness=1, **{other: tmp_path / "x"})  # type: ignore[arg-type]
