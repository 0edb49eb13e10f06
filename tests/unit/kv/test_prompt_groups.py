"""Requests that share a prompt: it is computed once, and kept until the last of them has ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fakes.fake_engine import make_engine
from fakes.fake_memory import make_versioned_engine
from prefixcache.engine.engine import Engine
from prefixcache.exceptions import InvalidRequestError
from prefixcache.kv import prompt_groups
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.scheduler.jobs import GROUP_TURN
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import as_token_ids

SIZE = 4
PROMPTS = [[(7 * k + 3 * i) % 50 + 1 for i in range(33)] for k in range(8)]
ANSWERS = 16
FULL = 32  # tokens of a prompt in full blocks


def request(
    name: str,
    prompt: Sequence[int],
    group: str | None = None,
    size: int | None = None,
    *,
    choices: tuple[str, int] | None = None,
    max_tokens: int = 8,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=as_token_ids(prompt),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        cache=CacheOptions(group_id=group, group_size=size),
        job_id=None if choices is None else choices[0],
        choices=choices,
    )


def batch(step: int = 0, *, named: bool) -> list[Request]:
    """Eight prompts with sixteen answers each, a job for each prompt."""
    return [
        request(f"{step}-{k}-{i}", prompt, f"{step}-{k}", ANSWERS)
        if named
        else request(f"{step}-{k}-{i}", prompt, choices=(f"{step}-{k}", ANSWERS))
        for k, prompt in enumerate(PROMPTS)
        for i in range(ANSWERS)
    ]


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, int]:
    """Answers them all; the hits of each."""
    for one in requests:
        engine.add_request(one)
    cached: dict[str, int] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            cached.setdefault(output.request_id, output.num_cached_tokens)
    return cached


def share(cached: dict[str, int]) -> float:
    """The hits as a share of those that there can be when each prompt is computed once."""
    return sum(cached.values()) / (len(PROMPTS) * (ANSWERS - 1) * FULL)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("num_blocks", [257, 65, 33, 21, 13])
def test_a_prompt_is_computed_once_however_little_memory_there_is(
    num_blocks: int, named: bool
) -> None:
    engine, _, cache = make_engine(num_blocks=num_blocks, share_in_flight=True)
    cached = run(engine, batch(named=named))
    assert len(cached) == len(PROMPTS) * ANSWERS
    assert share(cached) >= 0.98
    cache.core.validate()
    assert cache.core.stats()["hinted_blocks"] == 0


def test_a_prompt_is_computed_once_a_step_and_weight_version() -> None:
    engine, _, _ = make_versioned_engine(share_in_flight=True, num_blocks=65)
    for step in range(3):
        cached = run(engine, batch(step, named=True))
        assert share(cached) == 1.0, step
        engine.control.begin_weight_update()
        engine.control.end_weight_update()


def test_requests_that_come_one_after_the_other_find_their_groups_prompt() -> None:
    """Others fill the cache meanwhile; without the group they push the prompt out."""

    def hits(group: str | None) -> int:
        engine, _, _ = make_engine(num_blocks=65, share_in_flight=True, retention_budget=0.5)
        found = []
        for i in range(4):
            found.append(run(engine, [request(f"{i}", PROMPTS[0], group)])[f"{i}"])
            for k in range(40):
                run(engine, [request(f"{i}-{k}", [51 + k, *PROMPTS[1]])])
        return sum(found)

    assert hits(None) == 0
    assert hits("g") == 3 * FULL


def raised(cache: CacheManager) -> int:
    cache.core.validate()
    return cache.core.stats()["hinted_blocks"]


def test_a_group_ends_with_its_last_request() -> None:
    engine, _, cache = make_engine(num_blocks=65)
    for i in range(3):
        run(engine, [request(f"{i}", PROMPTS[0], "g", 3)])
        assert raised(cache) == (FULL // SIZE if i < 2 else 0)


def test_a_group_ends_when_its_last_request_never_started() -> None:
    engine, _, cache = make_engine(num_blocks=65)
    run(engine, [request("a", PROMPTS[0], "g", 2)])
    engine.add_request(request("b", PROMPTS[0], "g", 2))
    assert raised(cache) == FULL // SIZE
    engine.abort(["b"])
    run(engine, [request("c", PROMPTS[1])])
    assert raised(cache) == 0


def test_a_group_whose_answers_began_again_ends_too() -> None:
    engine, _, cache = make_versioned_engine(num_blocks=65)
    engine.add_request(request("a", PROMPTS[0], "g", 1))
    for _ in range(3):
        engine.step()
    engine.control.begin_weight_update()
    engine.control.end_weight_update()
    run(engine, [])
    assert raised(cache) == len(cache.hints.groups) == 0


def test_a_group_without_a_size_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    engine, _, cache = make_engine(num_blocks=65)
    monkeypatch.setattr(cache.hints.groups, "_clock", lambda: now[0])
    run(engine, [request("a", PROMPTS[0], "g")])
    now[0] = prompt_groups.GROUP_TTL - 1
    run(engine, [request("b", PROMPTS[1])])
    assert raised(cache) == FULL // SIZE
    now[0] += 1
    run(engine, [request("c", PROMPTS[1])])
    assert raised(cache) == len(cache.hints.groups) == 0


def test_a_prefix_of_two_groups_is_kept_until_both_end() -> None:
    engine, _, cache = make_engine(num_blocks=65)
    other = [*PROMPTS[0][:16], *PROMPTS[1][:17]]
    run(engine, [request("a", PROMPTS[0], "g", 2), request("b", other, "h", 2)])
    assert raised(cache) == (FULL + 16) // SIZE
    run(engine, [request("c", PROMPTS[0], "g", 2)])
    assert raised(cache) == FULL // SIZE
    run(engine, [request("d", other, "h", 2)])
    assert raised(cache) == 0


def test_what_is_remembered_of_groups_is_bounded() -> None:
    """With a name for each request, and with one that never ends."""
    engine, _, cache = make_engine(num_blocks=33, max_num_seqs=2)
    for name in ("a", "b"):
        for i in range(40):
            group = name if name == "b" else f"{name}{i}"
            run(engine, [request(f"{name}{i}", [1 + i, *PROMPTS[i % 8]], group)])
            assert raised(cache) <= 33 * 0.2
    groups = cache.hints.groups
    assert sum(len(one.blocks) for one in groups._prompts.values()) <= 33
    assert len(groups._num_raising) <= 33
    assert len(groups) <= 33 // (FULL // SIZE)


def test_others_wait_for_a_part_of_a_large_group_alone() -> None:
    engine, _, _ = make_engine(num_blocks=65, max_num_seqs=1)
    crowd = [request(f"{i}", PROMPTS[0], "g", max_tokens=1) for i in range(2 * GROUP_TURN)]
    order = [*run(engine, [*crowd, request("single", PROMPTS[1], max_tokens=1)])]
    assert order.index("single") == GROUP_TURN


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"group_id": ""}, "group_id"),
        ({"group_id": "a\n"}, "group_id"),
        ({"group_id": 3}, "group_id"),
        ({"group_id": "a" * 257}, "group_id"),
        ({"group_id": "a", "group_size": 0}, "group_size"),
        ({"group_id": "a", "group_size": True}, "group_size"),
        ({"group_size": 2}, "group_size"),
    ],
)
def test_what_is_no_group_is_refused(options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        CacheOptions(**options)  # type: ignore[arg-type]
    assert caught.value.param == field
