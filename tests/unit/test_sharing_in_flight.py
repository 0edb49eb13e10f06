"""One request computes a shared prefix, the others wait for its blocks."""

from __future__ import annotations

import pytest

from fake_runner import answer_alone
from prefixcache.request import CacheOptions
from scheduler_bench import Bench, counts, prompt_of

SHARED = prompt_of(32)


def own(name: int) -> list[int]:
    return [*SHARED, *prompt_of(5, 50 + name)]


def crowd(bench: Bench, size: int) -> list[str]:
    names = [f"r{i}" for i in range(size)]
    for i, name in enumerate(names):
        bench.add(name, own(i))
    return names


def run_counting(bench: Bench) -> int:
    computed = 0
    while bench.scheduler.has_unfinished():
        computed += bench.step().num_tokens
    return computed


@pytest.mark.parametrize("budget", [8, 64, 256])
def test_a_crowd_computes_its_prefix_once(budget: int) -> None:
    bench = Bench(
        num_blocks=129, max_num_seqs=8, max_num_batched_tokens=budget, share_in_flight=True
    )
    names = crowd(bench, 8)
    assert run_counting(bench) == 32 + 8 * 5 + 8 * 3
    assert budget == 8 or bench.scheduler.num_in_flight_waits == 7
    for i, name in enumerate(names):
        assert bench.answers[name] == answer_alone(own(i), 4)


def test_without_sharing_the_crowd_computes_it_many_times() -> None:
    bench = Bench(num_blocks=129, max_num_seqs=8, max_num_batched_tokens=512)
    crowd(bench, 8)
    assert run_counting(bench) == 8 * (32 + 5 + 3)


def test_tokens_got_from_another_count_as_cached() -> None:
    bench = Bench(share_in_flight=True)
    crowd(bench, 2)
    bench.step()
    bench.step()
    assert bench.scheduler.num_cached_tokens("r0") == 0
    assert bench.scheduler.num_cached_tokens("r1") == 32


def test_a_waiter_follows_chunk_by_chunk() -> None:
    bench = Bench(max_num_batched_tokens=16, share_in_flight=True)
    bench.add("long", prompt_of(64), max_tokens=1)
    bench.add("short", [*prompt_of(24), 89, 88], max_tokens=1)
    plans = [counts(bench.step()) for _ in range(2)]
    assert plans == [{"long": 16}, {"long": 16}]
    assert counts(bench.step()) == {"long": 16}
    bench.run()
    assert bench.answers["short"] == answer_alone([*prompt_of(24), 89, 88], 1)
    assert bench.scheduler.hit_counter.hit_tokens == 24


@pytest.mark.parametrize("size", [2, 5])
def test_an_aborted_owner_wakes_its_waiters(size: int) -> None:
    bench = Bench(max_num_batched_tokens=8, share_in_flight=True)
    names = crowd(bench, size)
    bench.step()
    bench.scheduler.finish(["r0"])
    assert set(counts(bench.step())) == {"r1"}
    bench.run()
    for i, name in enumerate(names[1:], start=1):
        assert bench.answers[name] == answer_alone(own(i), 4)


def test_a_waiter_can_be_aborted() -> None:
    bench = Bench(max_num_batched_tokens=8, share_in_flight=True)
    crowd(bench, 3)
    bench.step()
    assert bench.scheduler.num_waiting == 2
    assert bench.scheduler.finish(["r1"]) == ["r1"]
    assert bench.scheduler.num_waiting == 1
    bench.run()
    assert bench.answers["r1"] == []
    assert bench.answers["r2"] == answer_alone(own(2), 4)


def test_nobody_waits_past_the_limit() -> None:
    bench = Bench(share_in_flight=True, max_wait_steps=3)
    bench.scheduler._publish = lambda computed: None
    crowd(bench, 2)
    planned = [set(counts(bench.step())) for _ in range(4)]
    assert planned == [{"r0"}] * 3 + [{"r0", "r1"}]
    bench.run()
    assert bench.answers["r1"] == answer_alone(own(1), 4)


def test_a_preempted_owner_wakes_its_waiters() -> None:
    bench = Bench(num_blocks=14, max_num_batched_tokens=8, share_in_flight=True)
    bench.add("old", prompt_of(4, 3), max_tokens=20)
    bench.step()
    bench.add("owner", own(0), max_tokens=4)
    bench.add("waiter", own(1), max_tokens=4)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for name, prompt in (("owner", own(0)), ("waiter", own(1))):
        assert bench.answers[name] == answer_alone(prompt, 4)


@pytest.mark.parametrize(
    "options",
    [CacheOptions(salt="other"), CacheOptions(read=False)],
    ids=["another salt", "no reading"],
)
def test_who_cannot_read_the_blocks_does_not_wait(options: CacheOptions) -> None:
    bench = Bench(share_in_flight=True)
    bench.add("a", own(0))
    bench.add("b", own(1), cache=options)
    assert set(counts(bench.step())) == {"a", "b"}
    assert bench.scheduler.num_in_flight_waits == 0


def test_nobody_waits_for_blocks_that_are_not_published() -> None:
    bench = Bench(share_in_flight=True)
    bench.add("a", own(0), cache=CacheOptions(write=False))
    bench.add("b", own(1))
    assert set(counts(bench.step())) == {"a", "b"}


def test_the_next_fork_is_shared_too() -> None:
    bench = Bench(num_blocks=129, max_num_seqs=8, max_num_batched_tokens=64, share_in_flight=True)
    fork = [*SHARED, *prompt_of(8, 40)]
    for name in "abc":
        bench.add(name, [*fork, ord(name) % 90, 1, 2], max_tokens=1)
    bench.add("d", [*SHARED, 89, 88, 87], max_tokens=1)
    assert run_counting(bench) == 40 + 4 * 3
