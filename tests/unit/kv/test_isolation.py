"""Requests share blocks only where all that makes KV valid is equal, and learn of no others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fakes.fake_engine import make_engine
from prefixcache import LLM
from prefixcache._core import PrefixCache
from prefixcache._core import Sequence as CoreSequence
from prefixcache.engine.engine import Engine
from prefixcache.runner.cpu.cpu_runner import CpuRunner
from prefixcache.types.request import CacheOptions, Request, RequestOutput
from prefixcache.types.sampling_params import SamplingParams

BLOCK = 4
TOKENS = list(range(10))
PROMPT = list(range(1, 43))

SCOPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"model": "m"}, {}),
    ({"model": "mr"}, {}),
    ({"model": "m", "revision": "r"}, {}),
    ({"revision": "m"}, {}),
    ({"kv_dtype": "bfloat16"}, {}),
    ({"kv_dtype": "float32"}, {}),
    ({"arithmetic": "bfloat16"}, {}),
    ({"kv_dtype": "bfloat16", "arithmetic": "bfloat16"}, {}),
    ({"kv_dtype": "bfloat16", "arithmetic": "int8"}, {}),
    ({"model": "bfloat16"}, {}),
    ({"num_groups": 2}, {}),
    ({}, {"lora": "a"}),
    ({}, {"lora": "b"}),
    ({}, {"lora": ""}),
    ({}, {"cache_salt": "a"}),
    ({}, {"cache_salt": "b"}),
    ({}, {"cache_salt": ""}),
    ({}, {"lora": "", "cache_salt": ""}),
    ({}, {"lora": "a", "cache_salt": "b"}),
    ({}, {"lora": "b", "cache_salt": "a"}),
    ({}, {"lora": "ab"}),
]


def hashes(cache: PrefixCache, **scope: Any) -> tuple[bytes, ...]:
    found = cache.compute_block_hashes(TOKENS, **scope)
    return tuple(found.to_bytes(index) for index in range(len(found)))


def test_a_cache_without_a_model_warns_where_it_is_made() -> None:
    with pytest.warns(UserWarning, match="model=") as warned:
        PrefixCache(9, BLOCK)
    assert [one.filename for one in warned] == [__file__]


@pytest.mark.filterwarnings("ignore:the cache has no model")
def test_every_field_of_the_root_separates_equal_tokens() -> None:
    chains = [hashes(PrefixCache(9, BLOCK, **made), **scope) for made, scope in SCOPES]
    again = [hashes(PrefixCache(9, BLOCK, **made), **scope) for made, scope in SCOPES]
    assert chains == again
    assert all(len(chain) == 2 for chain in chains)
    assert len(set(itertools.chain(*chains))) == 2 * len(SCOPES)


def test_every_version_of_the_weights_has_hashes_of_its_own() -> None:
    cache = PrefixCache(9, BLOCK, model="m")
    chains = [hashes(cache)]
    for _ in range(3):
        cache.new_weight_version()
        chains.append(hashes(cache))
    assert len(set(itertools.chain(*chains))) == 2 * 4
    cache.clear_cache_index()
    assert hashes(cache) == chains[-1]


def test_a_name_of_weights_that_comes_back_brings_nothing_back() -> None:
    cache = PrefixCache(9, BLOCK, weights="tag:a", model="m")
    first = hashes(cache)
    before, waiting = cache.new_sequence(TOKENS), cache.new_sequence(TOKENS)
    cache.commit_prefix_plan(before, 0, 12)
    cache.mark_blocks_filled([before], [4])
    cache.new_weight_version("tag:b")
    assert set(first).isdisjoint(hashes(cache))
    between = cache.new_sequence(TOKENS)
    cache.commit_prefix_plan(between, 0, 12)
    assert cache.new_weight_version("tag:a") == 2
    assert hashes(cache) == first
    cache.mark_blocks_filled([before, between], [8, 8])
    cache.release([before, between])
    assert cache.count_prefix_hits(waiting) == 0
    cache.commit_prefix_plan(waiting, 0, 12)
    cache.mark_blocks_filled([waiting], [8])
    assert cache.probe(cache.compute_block_hashes(TOKENS)) == 8
    cache.validate()


@pytest.mark.parametrize("name", ["", "3", "tag", "tag:", ":a", "Tag:a"])
def test_a_name_of_weights_is_no_count(name: str) -> None:
    with pytest.raises(ValueError, match="weights must be a kind, a colon and a name"):
        PrefixCache(9, BLOCK, weights=name, model="m")
    with pytest.raises(ValueError, match="weights must be"):
        PrefixCache(9, BLOCK, model="m").new_weight_version(name)


def test_hashes_of_old_weights_find_nothing_and_publish_nothing() -> None:
    cache = PrefixCache(9, BLOCK, model="m")
    old, running = cache.compute_block_hashes(TOKENS), cache.new_sequence(TOKENS)
    cache.commit_prefix_plan(running, 0, 12)
    cache.mark_blocks_filled([running], [4])
    assert cache.probe(old) == 4
    cache.new_weight_version()
    cache.mark_blocks_filled([running], [8])
    assert cache.probe(old) == 0
    assert cache.probe(cache.compute_block_hashes(TOKENS)) == 0


@pytest.mark.parametrize("turn", range(5))
def test_no_block_is_ever_held_under_two_scopes(turn: int, seed: int) -> None:
    """Random prompts of few tokens under four scopes, in a pool too small for all."""
    pick = random.Random(seed)
    scopes: list[dict[str, Any]] = [{}, {"cache_salt": ""}, {"cache_salt": "x"}, {"lora": "x"}]
    cache = PrefixCache(25, BLOCK, model="m")
    held: list[tuple[int, CoreSequence]] = []
    shared = 0
    for _ in range(300):
        if len(held) > 5 or (held and pick.random() < 0.3):
            cache.release([held.pop(pick.randrange(len(held)))[1]])
        scope = pick.randrange(len(scopes))
        tokens = [pick.randrange(2)] * pick.randrange(1, 24)
        sequence = cache.new_sequence(tokens, **scopes[scope])
        hits = cache.count_prefix_hits(sequence)
        if cache.commit_prefix_plan(sequence, hits, len(tokens) - hits or BLOCK) is not None:
            cache.mark_blocks_filled([sequence], [len(tokens)])
            held.append((scope, sequence))
        owners: dict[int, int] = {}
        for owner, one in held:
            for block in one.block_table():
                shared += block in owners
                assert owners.setdefault(block, owner) == owner
    assert shared > 100, "blocks were shared inside the scopes"
    cache.validate()


def ask(name: str, prompt: Sequence[int] = PROMPT, max_tokens: int = 6, **cache: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(temperature=0, max_tokens=max_tokens),
        cache=CacheOptions(**cache),
    )


def serve(engine: Engine, *requests: Request) -> list[list[tuple[str, RequestOutput]]]:
    """The outputs of each step, but for the time of day."""
    for request in requests:
        engine.add_request(request)
    steps: list[list[tuple[str, RequestOutput]]] = []
    while engine.has_unfinished():
        outputs = [replace(output, started_at=None) for output in engine.step()]
        steps.append([(output.request_id, output) for output in outputs])
    return steps


class Tenant:
    """What somebody who sends requests under a salt of his own can see of the engine."""

    def __init__(self, *before: Request, **options: Any) -> None:
        self.engine, self.runner, self.cache = make_engine(
            max_num_batched_tokens=16, num_blocks=129, **options
        )
        serve(self.engine, *before)

    def view(self, **cache: Any) -> dict[str, Any]:
        before = self.engine.control.prefix_cache_stats()
        probed = self.engine.probe(ask("probe", **cache))
        steps = serve(self.engine, ask("mine", **cache))
        after = self.engine.control.prefix_cache_stats()
        return {
            "probed": probed,
            "steps": steps,
            "hits": after.hits - before.hits,
            "hit_tokens": after.hit_tokens - before.hit_tokens,
            "probed after": self.engine.probe(ask("probe", **cache)),
        }


@pytest.mark.parametrize("salt", ["mine", "", None])
@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("share", [False, True])
def test_a_foreign_salt_sees_a_cold_engine(salt, threshold, share):
    """Probe, outputs, steps (and so the time in tokens) and hits are those of an empty cache."""
    mine = {"salt": salt, "hit_threshold": threshold}
    cold = Tenant(share_in_flight=share).view(**mine)
    others = [ask("a", salt="theirs"), ask("b", salt="theirs"), ask("c", salt="mine ")]
    warm = Tenant(*others, share_in_flight=share)
    assert warm.engine.probe(ask("probe", salt="theirs")) > 0
    assert warm.view(**mine) == cold
    assert cold["hits"] == cold["probed"] == 0
    own = Tenant(ask("a", salt=salt), share_in_flight=share).view(**mine)
    assert own["probed"] == 40, "the control: under its own salt it does see"
    assert own != cold


def test_a_foreign_salt_computes_as_many_tokens_as_a_cold_request() -> None:
    computed: dict[str | None, int] = {}
    for other in (None, "theirs", "mine"):
        tenant = Tenant(*([] if other is None else [ask("a", salt=other)]))
        begun = len(tenant.runner.plans)
        serve(tenant.engine, ask("mine", salt="mine"))
        computed[other] = sum(plan.num_tokens for plan in tenant.runner.plans[begun:])
    assert computed["theirs"] == computed[None] == len(PROMPT) + 5
    assert computed["mine"] == len(PROMPT) - 40 + 5


@pytest.mark.parametrize("merge", [False, True])
def test_equal_answers_under_two_salts_are_never_merged(merge: bool) -> None:
    salts = ["a", "b", None]
    tenant = Tenant(merge_twins=merge)
    serve(tenant.engine, *(ask(str(salt), max_tokens=30, salt=salt) for salt in salts))
    assert tenant.cache.num_merged_blocks == 0
    same = Tenant(merge_twins=True)
    serve(same.engine, *(ask(str(salt), max_tokens=30, salt="a") for salt in salts))
    assert same.cache.num_merged_blocks > 0, "the control: under one salt they are"


def test_a_reader_that_does_not_write_still_keeps_what_it_hits() -> None:
    tenant = Tenant(ask("first", PROMPT))
    for name in ("second", "third"):
        steps = serve(tenant.engine, ask(name, PROMPT, write=False))
        assert steps[-1][-1][1].num_cached_tokens == 40


@pytest.mark.parametrize("shares_kv", [False, True])
def test_a_runner_that_cannot_share_kv_turns_the_cache_off_and_says_so(
    tiny_checkpoint, monkeypatch, caplog, shares_kv
):
    monkeypatch.setattr(CpuRunner, "shares_kv", shares_kv)
    llm = LLM(str(tiny_checkpoint()), dtype="float32", device="cpu", num_blocks=60)
    params = SamplingParams(max_tokens=2, temperature=0.0)
    first, second = (llm.generate([[*range(5, 45)]], params, use_tqdm=False)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.num_cached_tokens == (32 if shares_kv else 0)
    assert llm.control.prefix_cache_stats().enabled is shares_kv
    said = [r for r in caplog.records if "cannot share KV" in r.message]
    assert len(said) == (0 if shares_kv else 1)
