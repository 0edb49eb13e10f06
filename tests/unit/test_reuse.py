"""What any prefix cache promises: only tails are computed, and no block in use is evicted."""

from __future__ import annotations

import random

import pytest

from fake_engine import make_engine, make_request
from fake_runner import answer_alone


@pytest.mark.parametrize("length", [500, 2000])
def test_requests_on_a_cached_prefix_compute_their_tails_alone(length: int) -> None:
    engine, runner, _ = make_engine(
        num_blocks=200, block_size=16, max_num_batched_tokens=4096, max_model_len=4096
    )
    prefix = [number % 97 for number in range(length)]
    for number, tail in enumerate(([5, 6, 7], [8, 9], [*range(20)])):
        prompt, name = [*prefix, *tail], str(number)
        engine.add_request(make_request(name, prompt, max_tokens=2))
        runner.plans.clear()
        tokens = [token for _ in range(2) for output in engine.step() for token in output.token_ids]
        assert tokens == answer_alone(prompt, 2)
        cached = length // 16 * 16 if number else 0
        assert [plan.num_tokens for plan in runner.plans] == [len(prompt) - cached, 1]


def test_twenty_evictions_in_ten_blocks_touch_no_live_one() -> None:
    engine, _, cache = make_engine(num_blocks=11, max_num_seqs=3, max_model_len=24)
    choose = random.Random(1)
    prompts = {
        str(number): [number, *(choose.randrange(97) for _ in range(choose.randrange(6, 11)))]
        for number in range(40)
    }
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(make_request(name, prompt, max_tokens=5))
    most_live = 0
    while engine.has_unfinished():
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        cache.validate()
        most_live = max(most_live, cache.stats()["blocks_in_use"])
    assert answers == {name: answer_alone(prompt, 5) for name, prompt in prompts.items()}
    assert cache.stats()["evictions"] >= 20
    assert most_live >= 8
