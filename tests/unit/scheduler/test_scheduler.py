"""The scheduler's rules, one by one, with a runner that reads KV through the block tables."""

from __future__ import annotations

import dataclasses

import pytest

from fakes.fake_runner import FakeRunner, answer_alone
from fakes.plain_runner import PlainRunner
from prefixcache.exceptions import RequestTooLargeError
from prefixcache.types.request import CacheOptions, Request
from prefixcache.types.sampling_params import SamplingParams
from support.scheduler_bench import Bench, counts, prompt_of


@pytest.fixture(autouse=True, params=[FakeRunner, PlainRunner])
def _runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands behind the boundary, the scheduler's rules hold."""
    monkeypatch.setattr(Bench, "make_runner", request.param)


def test_a_request_gets_its_lone_answer_and_its_blocks_come_back() -> None:
    bench = Bench()
    bench.add("a", prompt_of(10), max_tokens=9)
    bench.run()
    assert bench.answers["a"] == answer_alone(prompt_of(10), 9)
    assert bench.cache.core.num_free_blocks == bench.cache.size.num_blocks - 1


def test_prompts_are_chunked_under_the_budget() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", prompt_of(20))
    assert [counts(bench.step())["a"] for _ in range(3)] == [8, 8, 4]
    assert bench.answers["a"] == answer_alone(prompt_of(20), 1)


def test_only_the_chunk_that_ends_the_prompt_samples() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", prompt_of(20))
    sampled = [bench.step().sequences[0].sampling is not None for _ in range(3)]
    assert sampled == [False, False, True]


def test_decodes_come_first_and_prompts_fill_the_rest() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", prompt_of(4))
    bench.step()
    bench.add("b", prompt_of(20, 1))
    plan = bench.step()
    assert list(counts(plan).items()) == [("a", 1), ("b", 7)]


def test_the_last_token_of_a_prompt_alone_is_not_a_decode() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", prompt_of(4), max_tokens=8)
    bench.step()
    bench.add("b", prompt_of(15, 1), priority=-1)
    plans = [counts(bench.step()) for _ in range(3)]
    assert [list(plan.items()) for plan in plans] == [
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 1)],
    ]


def test_at_most_max_num_seqs_run() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name, prompt_of(4))
    assert set(counts(bench.step())) == {"a", "b"}
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)


def test_lower_priority_values_start_first_then_earlier_arrivals() -> None:
    bench = Bench(max_num_seqs=8)
    bench.add("late", prompt_of(4), arrival_time=2.0)
    bench.add("early", prompt_of(4), arrival_time=1.0)
    bench.add("urgent", prompt_of(4), arrival_time=3.0, priority=-1)
    assert list(counts(bench.step())) == ["urgent", "early", "late"]


def test_a_shared_prefix_is_computed_once() -> None:
    bench = Bench()
    bench.add("a", prompt_of(18))
    bench.run()
    bench.add("b", [*prompt_of(16), 80, 81])
    plan = bench.step()
    assert counts(plan) == {"b": 2}
    assert bench.scheduler.state("b").num_cached_tokens == 16
    bench.run()
    assert bench.answers["b"] == answer_alone([*prompt_of(16), 80, 81], 4)


def test_a_fully_cached_block_multiple_still_computes_its_last_block() -> None:
    bench = Bench()
    bench.add("a", prompt_of(16))
    bench.run()
    bench.add("b", prompt_of(16))
    plan = bench.step()
    assert counts(plan) == {"b": 4}
    assert bench.answers["b"] == answer_alone(prompt_of(16), 1)


def test_blocks_are_not_hit_before_their_kv_is_there() -> None:
    bench = Bench(max_num_batched_tokens=64)
    bench.add("a", prompt_of(16))
    bench.add("b", prompt_of(16))
    assert counts(bench.step()) == {"a": 16, "b": 16}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (CacheOptions(salt="x"), CacheOptions(salt="y")),
        (CacheOptions(write=False), CacheOptions()),
        (CacheOptions(), CacheOptions(read=False)),
    ],
)
def test_cache_options_keep_requests_apart(first: CacheOptions, second: CacheOptions) -> None:
    bench = Bench()
    bench.add("a", prompt_of(16), cache=first)
    bench.run()
    bench.add("b", prompt_of(17), cache=second)
    assert counts(bench.step()) == {"b": 17}


def test_without_prefix_caching_nothing_is_hit_or_published() -> None:
    bench = Bench(enable_prefix_caching=False)
    for name in "ab":
        bench.add(name, prompt_of(16))
        bench.run()
    assert bench.cache.core.stats()["hits"] == 0
    assert bench.scheduler.admission.counter.queried_tokens == 0


@pytest.mark.parametrize(
    ("options", "cache", "hashed"),
    [
        ({}, CacheOptions(), True),
        ({}, CacheOptions(read=False), True),
        ({}, CacheOptions(write=False), True),
        ({}, CacheOptions(read=False, write=False), False),
        ({"enable_prefix_caching": False}, CacheOptions(), False),
    ],
)
def test_tokens_are_hashed_only_where_blocks_can_be_shared(
    options: dict[str, bool], cache: CacheOptions, hashed: bool
) -> None:
    bench = Bench(**options)
    bench.add("a", prompt_of(16), max_tokens=9, cache=cache)
    bench.add("b", prompt_of(10, 1), max_tokens=9)
    for _ in range(6):
        bench.step()
    assert (bench.cache.block_hash("a", 0) is not None) is hashed
    assert (bench.cache.block_hash("a", 4) is not None) is hashed, "what was generated too"
    bench.run()
    assert bench.answers["a"] == answer_alone(prompt_of(16), 9)
    assert bench.answers["b"] == answer_alone(prompt_of(10, 1), 9)


def test_without_hashes_a_preempted_request_is_computed_again() -> None:
    bench = Bench(num_blocks=9, max_model_len=32, enable_prefix_caching=False)
    bench.add("old", prompt_of(12), max_tokens=12)
    bench.add("new", prompt_of(12, 1), max_tokens=6)
    bench.run()
    assert bench.scheduler.num_preemptions >= 1
    assert bench.answers["new"] == answer_alone(prompt_of(12, 1), 6)


def test_the_newest_request_is_preempted_and_resumes_on_its_own_blocks() -> None:
    bench = Bench(num_blocks=9, max_model_len=32)
    bench.add("old", prompt_of(12), max_tokens=12)
    bench.add("new", prompt_of(12, 1), max_tokens=6)
    resumed: list[int] = []
    while bench.scheduler.has_unfinished():
        before = bench.scheduler.num_preemptions
        plan = bench.step()
        if bench.scheduler.num_preemptions > before:
            assert "new" not in counts(plan)
        resumed += [s.start for s in plan.sequences if s.request_id == "new" and s.num_tokens > 1]
    assert bench.scheduler.num_preemptions >= 1
    assert resumed[0] == 0
    assert max(resumed) >= 8
    for name, first, length in (("old", 0, 12), ("new", 1, 6)):
        assert bench.answers[name] == answer_alone(prompt_of(12, first), length)
    assert bench.cache.core.num_free_blocks == bench.cache.size.num_blocks - 1


def test_the_lowest_priority_is_preempted_even_when_it_is_older() -> None:
    bench = Bench(num_blocks=9, max_model_len=32)
    bench.add("batch", prompt_of(12), max_tokens=12, priority=5)
    bench.add("user", prompt_of(12, 1), max_tokens=12)
    while bench.scheduler.num_preemptions == 0:
        plan = bench.step()
    assert list(counts(plan)) == ["user"]


def test_a_preempted_request_keeps_its_place_in_the_queue() -> None:
    bench = Bench(num_blocks=9, max_model_len=32, max_num_seqs=2)
    bench.add("a", prompt_of(12), max_tokens=12)
    bench.add("b", prompt_of(12, 1), max_tokens=12)
    bench.add("c", prompt_of(4, 2), max_tokens=2)
    plan = bench.step()
    while "c" not in counts(plan):
        plan = bench.step()
    assert bench.scheduler.num_preemptions >= 1
    assert list(counts(plan)) == ["b", "c"]


def test_two_long_prompts_do_not_starve_each_other() -> None:
    bench = Bench(num_blocks=13, max_model_len=48, max_num_batched_tokens=8)
    bench.add("a", prompt_of(40), max_tokens=4)
    bench.add("b", prompt_of(40, 1), max_tokens=4)
    bench.run(limit=40)
    assert bench.scheduler.num_preemptions == 0


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    bench = Bench(max_model_len=32, num_blocks=6)
    with pytest.raises(RequestTooLargeError, match=r"32 tokens.*40 in the prompt"):
        bench.add("long", prompt_of(40))
    with pytest.raises(RequestTooLargeError, match=r"32 tokens.*needs 36: 30 in the prompt and 6"):
        bench.add("far", prompt_of(30), max_tokens=6)
    with pytest.raises(RequestTooLargeError, match=r"up to 6 KV cache blocks.*has 5"):
        bench.add("wide", prompt_of(20), max_tokens=4)
    assert not bench.scheduler.has_unfinished()
    bench.add("fits", prompt_of(17), max_tokens=4)
    bench.run()
    assert len(bench.answers["fits"]) == 4


def test_a_prompt_of_the_whole_context_leaves_no_room_for_an_answer() -> None:
    bench = Bench(max_model_len=32)
    request = Request(
        request_id="a", prompt_token_ids=prompt_of(32), params=SamplingParams(max_tokens=None)
    )
    with pytest.raises(RequestTooLargeError, match="context length is 32"):
        bench.scheduler.limits.check(request)
    bench.scheduler.limits.check(dataclasses.replace(request, prompt_token_ids=prompt_of(31)))


def test_a_request_that_cannot_start_although_alone_ends_and_the_next_one_runs() -> None:
    bench = Bench(num_blocks=9, max_model_len=32)
    other = Request(request_id="other", prompt_token_ids=prompt_of(20), params=SamplingParams())
    bench.cache.start(other)
    bench.cache.commit("other", 0, 20, 99)
    bench.add("big", prompt_of(20), max_tokens=4)
    bench.add("small", prompt_of(8, 1), max_tokens=2)
    assert counts(bench.step()) == {"small": 8}
    ((request_id, ending, _),) = bench.scheduler.take_rejected()
    assert request_id == "big"
    assert "3 blocks" in ending.error


def test_finish_frees_waiting_and_running_requests() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("a", prompt_of(8))
    bench.add("b", prompt_of(8))
    bench.step()
    assert bench.scheduler.finish(["a", "b", "unknown"]) == ["a", "b"]
    assert not bench.scheduler.has_unfinished()
    assert bench.cache.core.num_free_blocks == bench.cache.size.num_blocks - 1
    assert bench.scheduler.schedule().sequences == ()


def test_an_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.add("a", prompt_of(8))
    with pytest.raises(ValueError, match="'a' is in use"):
        bench.add("a", prompt_of(8))


def test_end_tokens_are_banned_until_min_tokens() -> None:
    bench = Bench()
    params = SamplingParams(max_tokens=4, min_tokens=2)
    request = Request(request_id="a", prompt_token_ids=prompt_of(4), params=params)
    bench.scheduler.add(request, seed=0, end_token_ids=(5, 6))
    bench.answers["a"], bench.limits["a"] = [], 4
    banned = [bench.step().sequences[0].sampling.banned_token_ids for _ in range(4)]
    assert banned == [(5, 6), (5, 6), (), ()]


def test_prompt_logprobs_compute_the_whole_prompt_although_it_is_cached() -> None:
    bench = Bench()
    bench.add("a", prompt_of(18))
    bench.run()
    bench.add("b", prompt_of(18), params={"prompt_logprobs": 0})
    (sequence,) = bench.step().sequences
    assert (sequence.start, sequence.num_tokens) == (0, 18)
    assert sequence.prompt_logprobs.followers.tolist() == prompt_of(18)[1:]


def test_prompt_logprobs_leave_what_comes_before_their_start_to_the_cache() -> None:
    bench = Bench()
    bench.add("a", prompt_of(18))
    bench.run()
    asked = {"prompt_logprobs": 0, "logprob_start_len": 13}
    bench.add("b", prompt_of(18), params=asked)
    (sequence,) = bench.step().sequences
    # The score of token 13 is computed out of token 12, the first one of a block.
    assert (sequence.start, sequence.num_tokens) == (12, 6)
    assert sequence.prompt_logprobs.first == 12
    assert sequence.prompt_logprobs.followers.tolist() == prompt_of(18)[13:]
    bench.run()
    bench.add("c", prompt_of(18, 2), params=asked)
    (sequence,) = bench.step().sequences
    assert (sequence.start, sequence.num_tokens) == (0, 18)
    assert sequence.prompt_logprobs.followers.tolist() == prompt_of(18, 2)[13:]


def test_a_resumed_request_reads_the_cache_up_to_its_known_prompt_logprobs() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", prompt_of(20), params={"prompt_logprobs": 0})
    bench.step()
    bench.scheduler.requeue_running()
    (sequence,) = bench.step().sequences
    assert (sequence.start, sequence.num_tokens) == (8, 8)
    assert sequence.prompt_logprobs.followers.tolist() == prompt_of(20)[9:17]


def test_a_sequence_with_an_error_publishes_nothing() -> None:
    bench = Bench()
    bench.runner.broken_tokens = {prompt_of(16)[3]}
    bench.add("a", prompt_of(16))
    bench.step()
    bench.scheduler.finish(["a"])
    bench.runner.broken_tokens = set()
    bench.add("b", prompt_of(17))
    assert counts(bench.step()) == {"b": 17}
