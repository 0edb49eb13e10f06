"""Requests that came together, and clients, take turns with others; how many of them wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.scheduler.cache_aware import LongestHits
from prefixcache.scheduler.jobs import Jobs
from prefixcache.scheduler.queue import WaitingQueue
from prefixcache.scheduler.state import RequestState
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from support.scheduler_bench import Bench, counts, prompt_of


class Server:
    """Starts one request after another, in the order of turns and then of arrival."""

    def __init__(self, batch_size: int = 8) -> None:
        self.jobs = Jobs(batch_size)
        self.waiting: list[tuple[int, int, int, Request]] = []
        self.started: list[Request] = []
        self._serial = 0

    def arrive(self, job: str, count: int = 1, priority: int = 0) -> None:
        for number in range(count):
            request = Request(
                request_id=f"{job}{number}",
                prompt_token_ids=[1],
                params=SamplingParams(),
                priority=priority,
                job_id=job,
            )
            self._serial += 1
            self.waiting.append((priority, self.jobs.add(request), self._serial, request))

    def start(self, count: int = 1) -> list[str]:
        """Lets up to `count` start and end; returns their jobs."""
        for _ in range(min(count, len(self.waiting))):
            entry = min(self.waiting, key=lambda entry: entry[:3])
            self.waiting.remove(entry)
            _, turn, _, request = entry
            self.jobs.start(request, turn)
            self.jobs.remove(request, waited=False)
            self.started.append(request)
        return [request.job for request in self.started[-count:]]


def test_single_requests_start_as_they_came() -> None:
    server = Server()
    for number in range(30):
        server.arrive(str(number))
        if number % 3 == 0:
            server.start()
    server.start(30)
    assert [request.job for request in server.started] == [str(n) for n in range(30)]


def test_jobs_alternate() -> None:
    server = Server()
    server.arrive("a", 4)
    server.arrive("b", 2)
    server.arrive("c", 3)
    assert server.start(9) == [*"abc", *"abc", *"ac", "a"]


def test_a_job_among_newcomers_without_end_goes_on() -> None:
    server = Server()
    server.arrive("big", 20)
    for number in range(60):
        server.arrive(f"new {number}")
        server.start()
    # As many come as start, so rounds grow longer: the big one starts one in each.
    rounds = [turn for turn, request in enumerate(server.started) if request.job == "big"]
    assert len(rounds) == 10
    assert rounds[-1] > 40


def test_priorities_have_rounds_of_their_own() -> None:
    server = Server()
    server.arrive("background", 5, priority=1)
    for number in range(50):
        server.arrive(f"urgent {number}")
        server.start()
    server.arrive("late", priority=1)
    assert server.start(2) == ["background", "late"]


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 8)), min_size=1, max_size=30))
def test_nobody_waits_for_more_than_two_of_each_job(arrivals: list[tuple[int, int]]) -> None:
    server = Server()
    first_wait: dict[str, tuple[int, int]] = {}
    for number, (size, starts) in enumerate(arrivals):
        waiting_jobs = len({request.job for *_, request in server.waiting})
        first_wait[str(number)] = (len(server.started), waiting_jobs)
        server.arrive(str(number), size)
        server.start(starts)
    server.start(10_000)
    assert len(server.started) == sum(size for size, _ in arrivals)
    order = [request.job for request in server.started]
    for job, (began, waiting_jobs) in first_wait.items():
        newer = {later for later in first_wait if int(later) > int(job)}
        before = [other for other in order[began : order.index(job)] if other not in newer]
        assert len(before) <= 2 * waiting_jobs
        assert not newer & set(order[began : order.index(job)]), "those who came later start later"


def test_a_job_counts_once_for_every_batch_of_its_waiting_requests() -> None:
    server = Server(batch_size=8)
    server.arrive("small")
    server.arrive("big", 17)
    assert server.jobs.queue_length == 1 + 3
    assert "big" in server.jobs
    server.start(3)
    assert server.jobs.queue_length == 2
    server.start(100)
    assert server.jobs.queue_length == 0
    assert "big" not in server.jobs


def test_the_scheduler_counts_who_waits_whatever_becomes_of_them() -> None:
    bench = Bench(num_blocks=9, max_model_len=32, max_num_seqs=2)
    bench.add("a", prompt_of(12), max_tokens=12)
    bench.add("b", prompt_of(12, 1), max_tokens=12)
    bench.add("c", prompt_of(4, 2), max_tokens=2)
    assert bench.scheduler.jobs.queue_length == 3
    bench.step()
    assert bench.scheduler.jobs.queue_length == 1
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert bench.scheduler.jobs.queue_length == 2
    bench.scheduler.finish(["c"])
    assert bench.scheduler.jobs.queue_length == 1
    bench.run()
    assert bench.scheduler.jobs.queue_length == 0
    assert "a" not in bench.scheduler.jobs


def test_a_refused_request_waits_no_more() -> None:
    from prefixcache.types.request import CacheOptions

    bench = Bench()
    bench.add("a", prompt_of(8), cache=CacheOptions(hit_threshold=0.5))
    bench.step()
    assert len(bench.scheduler.take_rejected()) == 1
    assert (bench.scheduler.jobs.queue_length, "a" in bench.scheduler.jobs) == (0, False)


def test_who_waits_for_anothers_blocks_is_counted_as_waiting() -> None:
    bench = Bench(share_in_flight=True)
    bench.add("a", prompt_of(32))
    bench.add("b", prompt_of(32))
    bench.step()
    assert (bench.scheduler.sharing.num_waits, bench.scheduler.jobs.queue_length) == (1, 1)
    bench.run()
    assert bench.scheduler.jobs.queue_length == 0


def test_a_newcomer_starts_before_the_rest_of_a_large_job() -> None:
    bench = Bench(max_num_seqs=2)
    for number in range(20):
        bench.add(f"big {number}", prompt_of(4, number), max_tokens=2, job_id="big")
    bench.step()
    bench.add("small", prompt_of(4, 50), max_tokens=1)
    bench.step()
    assert "small" in counts(bench.step())


def test_the_newest_turn_is_preempted_rather_than_a_newcomer() -> None:
    bench = Bench(num_blocks=13, max_model_len=32, max_num_seqs=3)
    for number in range(3):
        bench.add(f"big {number}", prompt_of(8, number), max_tokens=20, job_id="big")
    bench.add("small", prompt_of(8, 50), max_tokens=20)
    preempted = ""
    while not preempted:
        running = set(counts(bench.step()))
        if bench.scheduler.num_preemptions:
            preempted = ({"big 0", "big 1", "big 2", "small"} - running).pop()
    assert preempted != "small"
    bench.run()


MakeQueue = Callable[[Callable[[str | None], bool] | None], WaitingQueue]


def hits_first(is_held: Callable[[str | None], bool] | None) -> WaitingQueue:
    """Where clients a and c send nothing but hits."""
    ranking = LongestHits(
        count_hits=lambda state: 100 if state.request.client in ("a", "c", "held") else 0,
        prefix_name=lambda state, hits: b"",
        max_delay=1e9,
        clock=lambda: 0.0,
    )
    return WaitingQueue(is_held, ranking)


class Clients:
    """Starts one request after another of `WaitingQueue`, and remembers whose they were."""

    def __init__(self, limit: int | None = None, make_queue: MakeQueue = WaitingQueue) -> None:
        self.jobs = Jobs(batch_size=1)
        held = (lambda client: self.jobs.running[client] >= limit) if limit else None
        self.queue = make_queue(held)
        self.started: list[str | None] = []
        self._serial = 0

    def arrive(self, client: str | None, count: int = 1, job: str | None = None) -> None:
        for _ in range(count):
            self._serial += 1
            request = Request(
                request_id=str(self._serial),
                prompt_token_ids=[1],
                params=SamplingParams(),
                job_id=job or str(self._serial),
                client=client,
            )
            state = RequestState(request, seed=0, serial=self._serial, max_num_tokens=9)
            state.turn = self.jobs.add(request)
            self.queue.push(state)

    def start(self) -> RequestState | None:
        """Lets the next one start, and run on."""
        state = self.queue.head()
        if state is None:
            return None
        self.queue.take(state)
        self.queue.forget_hits()
        self.jobs.start(state.request, state.turn)
        self.started.append(state.request.client)
        return state


ARRIVALS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(1, 12), st.integers(0, 8)),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("make_queue", [WaitingQueue, hits_first])
@given(ARRIVALS)
def test_a_client_waits_for_at_most_two_of_each_other_one(make_queue, arrivals):
    """Between two starts of a client that waits, and before its first, whatever the others sent."""
    server = Clients(make_queue=make_queue)
    since: dict[str | None, int] = {}  # whoever waits: how many had started before its turn
    for client, size, starts in [*arrivals, ("a", 1, 10_000)]:
        since.setdefault(client, len(server.started))
        server.arrive(client, size)
        for _ in range(starts):
            state = server.start()
            if state is None:
                break
            begun = since.pop(state.request.client)
            others = Counter(server.started[begun:-1])
            assert max(others.values(), default=0) <= 2
            if server.jobs.waiting[state.request.client]:
                since[state.request.client] = len(server.started)
    assert not since
    assert not len(server.queue)


def test_thousands_of_requests_of_one_key_delay_another_by_two() -> None:
    server = Clients()
    server.arrive("greedy", 2000)
    for _ in range(500):
        server.start()
    server.arrive("small", 3)
    for _ in range(7):
        server.start()
    assert server.started[500:].count("small") == 3


def test_who_sends_the_next_request_when_one_starts_does_not_go_before_all_others() -> None:
    server = Clients()
    server.arrive("patient", 40)
    for _ in range(60):
        if not server.jobs.waiting["prompt"]:
            server.arrive("prompt")
        server.start()
    assert server.started.count("patient") >= 30


def test_jobs_of_one_client_take_turns_within_its_own() -> None:
    server = Clients()
    server.arrive("one", 100, job="large")
    server.arrive("two", 100)
    for _ in range(20):
        server.start()
    server.arrive("one", 1, job="urgent")
    jobs = [state.request.job for _ in range(6) if (state := server.start())]
    assert "urgent" in jobs


@pytest.mark.parametrize("make_queue", [WaitingQueue, hits_first])
def test_a_client_starts_no_more_than_its_limit_and_gathers_no_turns_meanwhile(make_queue):
    server = Clients(2, make_queue)
    server.arrive("held", 50)
    first = [server.start(), server.start()]
    for _ in range(20):
        server.arrive("other", 1)
        end(server, server.start())
    assert server.start() is None
    server.arrive("other", 10)
    for state in first:
        end(server, state)
    for _ in range(8):
        end(server, server.start())
    assert server.started[-8:].count("other") >= 3


def end(server: Clients, state: RequestState | None) -> None:
    assert state is not None
    server.jobs.remove(state.request, waited=False)


def test_the_scheduler_gives_keys_turns_and_bounds_what_runs_of_each() -> None:
    bench = Bench(max_num_seqs=4, max_running_per_key=2, num_blocks=200)
    for number in range(50):
        bench.add(f"a{number}", prompt_of(4, number), max_tokens=6, client="a")
    bench.step()
    assert set(counts(bench.step())) == {"a0", "a1"}
    bench.add("b0", prompt_of(4, 90), max_tokens=1, client="b")
    assert "b0" in counts(bench.step())
    assert bench.scheduler.jobs.waiting == {"a": 48}
    bench.run()
    assert not bench.scheduler.jobs.waiting


def test_a_preempted_request_keeps_the_round_of_its_client() -> None:
    """Whoever came first is never preempted for others, so everybody ends."""
    bench = Bench(num_blocks=9, max_model_len=32, max_num_seqs=3)
    for number, client in enumerate("aabbc"):
        bench.add(f"{client}{number}", prompt_of(8, number), max_tokens=20, client=client)
    order: list[str] = []
    for _ in range(400):
        plan = bench.step()
        order += [one.request_id for one in plan.sequences if one.request_id not in order]
        if not bench.scheduler.has_unfinished():
            break
    assert bench.scheduler.num_preemptions
    assert [name[0] for name in order] == ["a", "b", "c", "a", "b"]
