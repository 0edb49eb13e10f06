"""The order of waiting requests."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.scheduler.queue import WaitingQueue
from prefixcache.scheduler.state import RequestState
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import TokenIds, as_token_ids


def state(
    name: str,
    serial: int,
    priority: int = 0,
    arrival: float = 0.0,
    prompt: Sequence[int] | TokenIds = (1,),
) -> RequestState:
    request = Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(),
        priority=priority,
        arrival_time=arrival,
    )
    return RequestState(request, seed=0, serial=serial, max_num_tokens=9)


def drain(queue: WaitingQueue) -> list[str]:
    return [pop(queue).request_id for _ in range(len(queue))]


def pop(queue: WaitingQueue) -> RequestState:
    state = queue.head()
    assert state is not None
    queue.take(state)
    return state


def test_priority_then_arrival_then_serial() -> None:
    queue = WaitingQueue()
    queue.push(state("late", 0, arrival=2.0))
    queue.push(state("early", 1, arrival=1.0))
    queue.push(state("second", 3, arrival=1.0))
    queue.push(state("urgent", 2, priority=-1, arrival=9.0))
    assert drain(queue) == ["urgent", "early", "second", "late"]


def test_a_removed_request_is_never_seen_again() -> None:
    queue = WaitingQueue()
    for serial, name in enumerate("abc"):
        queue.push(state(name, serial))
    assert queue.remove("a")
    assert not queue.remove("a")
    head = queue.head()
    assert head is not None
    assert (head.request_id, len(queue)) == ("b", 2)
    assert drain(queue) == ["b", "c"]
    assert queue.head() is None


def test_a_request_that_comes_back_takes_its_old_place_once() -> None:
    queue = WaitingQueue()
    first, second = state("a", 0), state("b", 1)
    queue.push(first)
    queue.push(second)
    assert pop(queue) is first
    queue.push(first)
    queue.remove("a")
    queue.push(first)
    assert drain(queue) == ["a", "b"]


def test_a_new_request_with_the_id_of_a_removed_one_is_another_request() -> None:
    queue = WaitingQueue()
    queue.push(state("a", 0))
    queue.remove("a")
    newcomer = state("a", 1)
    queue.push(newcomer)
    assert pop(queue) is newcomer
    assert queue.head() is None


def test_a_removed_request_leaves_nothing_of_its_prompt() -> None:
    queue = WaitingQueue()
    queue.push(state("head", 0))
    prompts = []
    for serial in range(1, 20):
        prompt = as_token_ids([serial])
        prompts.append(weakref.ref(prompt))
        queue.push(state(str(serial), serial, prompt=prompt))
    del prompt
    assert [prompt().tolist() for prompt in prompts] == [[serial] for serial in range(1, 20)]
    for serial in range(1, 20):
        queue.remove(str(serial))
    assert [prompt() for prompt in prompts] == [None] * 19
    assert drain(queue) == ["head"]


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 5))))
def test_it_is_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    queue, model, away = WaitingQueue(), {}, {str(i): state(str(i), i, i % 2) for i in range(6)}
    for operation, number in operations:
        name = str(number)
        if operation == "push" and name in away:
            model[name] = away.pop(name)
            queue.push(model[name])
        elif operation == "pop" and model:
            first = min(model.values(), key=lambda waiting: waiting.order)
            assert pop(queue) is first
            away[first.request_id] = model.pop(first.request_id)
        elif operation == "remove":
            assert queue.remove(name) is (name in model)
            away.update({name: model.pop(name)} if name in model else {})
        assert len(queue) == len(model)
