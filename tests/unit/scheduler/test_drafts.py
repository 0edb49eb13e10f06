"""Several tokens a step: what guesses may change, which is the number of steps alone."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equality import LFM2, WIDE, Bench, Counts, make_pair, random_schedule, with_windows
from fakes.fake_engine import make_engine, make_request
from fakes.fake_runner import answer_alone
from fakes.plain_drafts import MOST_DRAFTS, HostileDrafter, plain_drafter
from fakes.plain_runner import VOCAB_SIZE
from prefixcache._core import DraftIndex
from prefixcache.config.engine_config import EngineConfig
from prefixcache.engine.build import build
from prefixcache.engine.engine import Engine
from prefixcache.engine.steps import Steps
from prefixcache.exceptions import ConfigError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.runner.cpu import sampler
from prefixcache.runner.cpu.model import CpuModel, StepKernels
from prefixcache.runner.torch import batch
from prefixcache.runner.torch.ops.linear import TorchLinear
from prefixcache.scheduler import drafts as drafts_module
from prefixcache.scheduler.budget import Chunk
from prefixcache.scheduler.drafts import Drafter
from prefixcache.scheduler.publishing import Publisher
from prefixcache.scheduler.step_time import RowTimes, StepTimeModel
from prefixcache.types.request import CacheOptions, Request, RequestOutput
from prefixcache.types.step_plan import ScheduledSequence, SequenceOutput, StepPlan
from prefixcache.types.token_ids import TokenBuffer, as_token_ids
from support.plans import plan_of
from support.repeatable import slow
from support.serving import served_folder

PROMPT = tuple(range(1, 12))
LONG = 60


def drafting_engine(**drafter: Any) -> Engine:
    """Each of its steps takes as long, whatever it computes."""
    clock = itertools.count().__next__
    return make_engine(drafter=plain_drafter(**drafter), clock=clock)[0]


def serve(engine: Engine, *requests: Request) -> tuple[dict[str, list[RequestOutput]], int]:
    """All outputs by request, and the number of steps."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    num_steps = 0
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id].append(output)
        num_steps += 1
    return outputs, num_steps


def tokens_of(outputs: Iterable[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def counts_of(engine: Engine) -> tuple[Counter[str], Counter[str]]:
    found = engine.metrics.gauges().drafts
    assert found is not None
    return Counter(found.drafted), Counter(found.accepted)


# What comes out.


def test_an_answer_given_before_comes_in_fewer_steps() -> None:
    engine = drafting_engine()
    first, plain_steps = serve(engine, make_request("a", PROMPT, max_tokens=LONG))
    second, steps = serve(engine, make_request("b", PROMPT, max_tokens=LONG))
    expected = answer_alone(PROMPT, LONG)
    assert tokens_of(first["a"]) == tokens_of(second["b"]) == expected
    assert plain_steps >= LONG - 2
    assert steps <= 2 + LONG / (1 + MOST_DRAFTS) + 1
    drafted, accepted = counts_of(engine)
    assert accepted["cache"] >= LONG - steps
    assert drafted["cache"] == accepted["cache"]


def test_each_token_is_an_output_of_its_own_and_usage_counts_the_guesses() -> None:
    engine = drafting_engine()
    serve(engine, make_request("a", PROMPT, max_tokens=LONG))
    outputs, steps = serve(engine, make_request("b", PROMPT, max_tokens=LONG))
    assert [len(output.token_ids) for output in outputs["b"]] == [1] * LONG
    last = outputs["b"][-1]
    assert last.finish_reason == "length"
    assert last.num_accepted_drafts == LONG - steps
    assert last.num_refused_drafts == 0


def hostile_engine(seed: int, requests: Sequence[Request], **parts: Any) -> Any:
    answers = {
        one.request_id: [
            *one.prompt_token_ids,
            *answer_alone(one.prompt_token_ids.tolist(), one.params.max_tokens or 0),
        ]
        for one in requests
    }
    return make_engine(drafter=HostileDrafter(seed, answers, VOCAB_SIZE), **parts)


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_ends_where_it_does_without_guesses(seed: int) -> None:
    ends_alike(seed)


def ends_alike(seed: int) -> None:
    """At a stop string or a stop token, whatever was accepted behind it, with the same blocks."""
    answer = answer_alone(PROMPT, LONG)
    ends: list[dict[str, Any]] = [
        {"stop": (f"{answer[20]} ",)},
        {"stop_token_ids": (answer[17],)},
        {"max_tokens": 23},
    ]
    for params in ends:
        request = make_request("a", PROMPT, **({"max_tokens": LONG} | params))
        plain, _, of_plain = make_engine()
        drafted, _, of_drafted = hostile_engine(seed, [request])
        expected, _ = serve(plain, request)
        found, _ = serve(drafted, request)
        assert [replace_counts(one) for one in found["a"]] == [*map(replace_counts, expected["a"])]
        assert cached_blocks(of_drafted) == cached_blocks(of_plain)
        of_drafted.core.validate()


def replace_counts(output: RequestOutput) -> RequestOutput:
    return replace(output, num_accepted_drafts=0, num_refused_drafts=0, started_at=None)


def cached_blocks(cache: CacheManager) -> tuple[int, int]:
    """How many there are, and how many tokens of the answer they hold."""
    tokens = as_token_ids([*PROMPT, *answer_alone(PROMPT, LONG), 1])
    return cache.core.stats()["cached_blocks"], cache.reader.look_up(tokens, None).hit_tokens


def test_nothing_is_guessed_beyond_the_last_token_or_a_stop_token() -> None:
    answer = answer_alone(PROMPT, LONG)
    engine = drafting_engine()
    serve(engine, make_request("a", PROMPT, max_tokens=LONG))
    runner: Any = engine._steps._runner
    runner.plans.clear()
    found, _ = serve(engine, make_request("b", PROMPT, max_tokens=LONG, stop_token_ids=[answer[9]]))
    ends = [s.start + s.num_tokens for plan in runner.plans for s in plan.sequences]
    assert tokens_of(found["b"]) == answer[:10]
    assert max(ends) == len(PROMPT) + 9, "the stop token is never computed"


def test_a_restarted_answer_begins_a_new_text() -> None:
    engine = drafting_engine()
    engine.add_request(make_request("a", PROMPT, max_tokens=LONG))
    for _ in range(10):
        engine.step()
    engine.requests.restart_all()
    engine.take_outputs()
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert tokens_of(outputs) == answer_alone(PROMPT, LONG)
    drafter = engine._scheduler.drafter
    assert drafter is not None
    assert not drafter._texts


def test_a_request_that_may_not_come_back_leaves_no_text() -> None:
    engine = drafting_engine()
    serve(engine, make_request("warm", PROMPT, max_tokens=1))
    asked = make_request("a", PROMPT, max_tokens=LONG)
    engine.add_request(replace(asked, cache=CacheOptions(hit_threshold=0.5)))
    for _ in range(10):
        engine.step()
    drafter = engine._scheduler.drafter
    assert drafter is not None
    assert drafter._texts
    engine.control.reset_prefix_cache()
    engine._scheduler.requeue_running()
    ended = [output.finish_reason for output in engine.step() if output.finished]
    assert ended == ["cache_threshold"]
    assert not drafter._texts


def test_a_step_is_read_before_the_next_is_guessed_at() -> None:
    engine, runner, _ = make_engine(drafter=plain_drafter(), ahead=True)
    for name in "ab":
        outputs, _ = serve(engine, make_request(name, PROMPT, max_tokens=LONG))
        assert tokens_of(outputs[name]) == answer_alone(PROMPT, LONG)
    assert runner.num_ahead == 0
    assert counts_of(engine)[1]["cache"] > 0


# Whose text guesses come from.


def drafts_across(first: CacheOptions, second: CacheOptions, **drafter: Any) -> int:
    """Guesses for a request that come from another one's text."""
    engine = drafting_engine(**drafter)
    for name, cache in (("a", first), ("b", second)):
        request = make_request(name, PROMPT, max_tokens=LONG)
        serve(engine, replace(request, cache=cache))
    return counts_of(engine)[0]["cache"]


def test_no_guess_comes_from_another_salt_or_from_who_keeps_apart(monkeypatch) -> None:
    shared, salted = CacheOptions(), CacheOptions(salt="x")
    assert drafts_across(shared, shared) > LONG / 2
    assert drafts_across(salted, salted) > LONG / 2
    assert drafts_across(shared, shared, shares=False) == 0
    for other in (salted, CacheOptions(read=False), CacheOptions(write=False)):
        assert drafts_across(shared, other) == drafts_across(other, shared) == 0
    monkeypatch.setattr(drafts_module, "_scope", lambda request: b"")
    assert drafts_across(shared, salted) > 0, "this test would notice"


def test_no_guess_comes_from_another_api_key() -> None:
    engine = drafting_engine()
    for name, client in (("a", "one"), ("b", "two"), ("c", "one")):
        before = counts_of(engine)[0]["cache"]
        serve(engine, replace(make_request(name, PROMPT, max_tokens=LONG), client=client))
        assert (counts_of(engine)[0]["cache"] > before) == (name == "c")


def test_a_predicted_answer_is_guessed_from_the_first_token_on() -> None:
    predicted = as_token_ids(answer_alone(PROMPT, LONG))
    engine = drafting_engine(shares=False)
    request = replace(make_request("a", PROMPT, max_tokens=LONG), prediction=predicted)
    outputs, steps = serve(engine, request)
    assert tokens_of(outputs["a"]) == predicted.tolist()
    assert steps <= 2 + LONG / (1 + MOST_DRAFTS) + 1
    assert counts_of(engine)[1]["prompt"] == LONG - steps


# How many.


class Guesses:
    """A source whose guesses are right as often as it says, by turns."""

    def __init__(self, right_of_ten: int) -> None:
        self.right_of_ten, self.turn = right_of_ten, 0
        self.next_is_right = False

    def stream(self, scope: bytes, shares: bool) -> Guesses:
        return self

    def append(self, tokens: Any) -> None: ...

    def close(self) -> None: ...

    def draft(self, max_tokens: int) -> tuple[list[int], int, str]:
        self.turn += 1
        self.next_is_right = self.turn * 7 % 10 < self.right_of_ten
        return [5] * max_tokens, 40, "prompt"


def rows_of(right_of_ten: int, steps: int = 5000) -> tuple[int, int, int]:
    """Rows computed for a token each, rows accepted and rows refused, in that many steps."""
    source = Guesses(right_of_ten)
    drafter = Drafter(source, RowTimes(), shares=False, most=MOST_DRAFTS)
    state = guessed_state("a")
    accepted = refused = 0
    for _ in range(steps):
        drafted = len(proposed(drafter, [state]))
        right = drafted if source.next_is_right else 0
        accepted, refused = accepted + right, refused + drafted - right
        drafter.observe({"a": right})
    return steps, accepted, refused


def test_what_cannot_be_guessed_costs_no_more_than_a_row_in_200() -> None:
    steps, accepted, refused = rows_of(0)
    assert accepted == 0
    assert refused > 0, "it is tried"
    assert steps / (steps + refused) >= 0.995


def test_noise_is_computed_in_as_many_rows_as_without_guesses() -> None:
    drafter = Drafter(DraftIndex(1 << 14), RowTimes(), shares=True, most=MOST_DRAFTS)
    clock = itertools.count().__next__
    sizes = {"num_blocks": 400, "block_size": 16, "max_model_len": 1024}
    engine, runner, _ = make_engine(drafter=drafter, clock=clock, **sizes)
    outputs, _ = serve(engine, *(make_request(f"{n}", [n], max_tokens=1000) for n in range(4)))
    assert sum(map(len, map(tokens_of, outputs.values()))) == 4000
    rows = sum(plan.num_tokens for plan in runner.plans)
    assert 4000 / rows >= 0.995
    assert sum(drafter.counts().drafted.values()) > 0, "by chance three tokens come again"


def test_what_can_be_guessed_often_enough_is() -> None:
    steps, accepted, _ = rows_of(10, 500)
    assert accepted >= steps * MOST_DRAFTS * 0.9
    steps, accepted, refused = rows_of(5, 500)
    assert accepted > steps
    assert refused < accepted * 1.2


def test_a_step_without_guesses_says_nothing_of_those_before() -> None:
    drafter = Drafter(Guesses(10), RowTimes(), shares=False, most=MOST_DRAFTS)
    assert proposed(drafter, [guessed_state("a")])
    for _ in range(3):
        drafter.observe({"a": 1})
    counts = drafter.counts()
    assert (counts.drafts, counts.drafted["prompt"]) == (1, MOST_DRAFTS)


def decode_plan(num_seqs: int, num_tokens: int) -> StepPlan:
    one = ScheduledSequence(request_id="a", start=8, num_tokens=1, sampling=None)
    last = replace(one, num_tokens=num_tokens - num_seqs + 1)
    return plan_of([one] * (num_seqs - 1) + [last], decodes=num_seqs)


@pytest.mark.parametrize(
    ("num_seqs", "a_row", "guesses"), [(1, 0.05, 7), (8, 5.0, 0), (32, 1.0, 0)]
)
def test_guesses_go_by_what_a_row_costs_in_this_step(num_seqs, a_row, guesses) -> None:
    """In steps that take 1 and `a_row` for each row; the guesses are good ones."""
    rows = RowTimes()
    for round_ in range(200):
        num_rows = num_seqs + round_ % 2 * 7
        rows.observe(decode_plan(num_seqs, num_rows), 1 + a_row * num_rows)
    longer = rows.times_longer(num_seqs, num_seqs + 7)
    assert longer == pytest.approx(1 + 7 * a_row / (1 + a_row * num_seqs), rel=0.15)
    drafter = Drafter(Guesses(10), rows, shares=False, most=MOST_DRAFTS)
    states = [guessed_state(f"{number}") for number in range(num_seqs)]
    assert len(proposed(drafter, states)) == guesses


def proposed(drafter: Drafter, states: list[Any]) -> list[int]:
    chunks = [Chunk(state, 1, is_decode=True) for state in states]
    drafter.propose(chunks, 63, lambda _, wanted: wanted)
    return [token for chunk in chunks for token in chunk.drafts]


def guessed_state(name: str) -> Any:
    return SimpleNamespace(
        request_id=name,
        request=make_request(name),
        tokens=TokenBuffer(as_token_ids(PROMPT)),
        num_tokens=len(PROMPT),
        max_num_tokens=1 << 20,
        end_token_ids=(),
        may_be_drafted=True,
    )


def test_rows_that_nobody_measured_are_taken_to_be_cheap_again() -> None:
    rows = RowTimes()
    for round_ in range(100):
        rows.observe(decode_plan(1, 1 + round_ % 2 * 7), 1 + 3.0 * (1 + round_ % 2 * 7))
    dear = rows.times_longer(1, 8)
    for _ in range(300):
        rows.observe(decode_plan(1, 1), 4.0)
    assert rows.times_longer(1, 8) < 2.5 < dear


def test_steps_with_guesses_teach_nothing_of_chunks() -> None:
    model = StepTimeModel()
    plan = replace(decode_plan(1, 8), drafts=[(0, ())])
    model.observe(plan, 5.0)
    assert not model._decodes
    assert not model._prefills


def test_no_guess_takes_the_last_blocks_or_the_place_of_a_prompt() -> None:
    requests = [make_request(f"{n}", [n, *PROMPT], max_tokens=30) for n in range(6)]
    plain, _, _ = make_engine(num_blocks=30, max_model_len=64)
    _, plain_steps = serve(plain, *requests)
    engine, runner, cache = hostile_engine(3, requests, num_blocks=30, max_model_len=64)
    outputs, steps = serve(engine, *requests)
    for request in requests:
        expected = answer_alone(request.prompt_token_ids.tolist(), 30)
        assert tokens_of(outputs[request.request_id]) == expected
    assert all(row < plan.num_decodes for plan in runner.plans for row, _ in plan.drafts)
    drafted = {plan.num_decodes == len(plan.sequences) for plan in runner.plans if plan.drafts}
    assert drafted == {True, False}, "in steps with chunks of prompts too"
    assert steps < plain_steps
    cache.core.validate()


# Not one bit.


def compare(
    schedules: Iterable[int], shape: dict[str, Any] = WIDE, *, on_torch: bool = False
) -> Iterator[Counts]:
    with tempfile.TemporaryDirectory() as scratch:
        folder, _ = make_pair(Path(scratch), "float32", None, **shape)
        bench = Bench(folder, "float32", invariant=not on_torch)
        for seed in schedules:
            yield bench.compare(random_schedule(seed, speculates=True))


# Blocks of 8 tokens hold the inputs that guesses need.
_CONVOLUTIONS = LFM2 | {"architecture": "lfm2", "num_key_value_heads": 3}


_EXPERTS = WIDE | {"architecture": "qwen2-moe"}
_STATES = WIDE | {"architecture": "qwen3.5"}


@pytest.mark.parametrize(
    "shape", [WIDE, *map(slow, (with_windows(40), _CONVOLUTIONS, _EXPERTS, _STATES))]
)
def test_no_schedule_with_guesses_changes_a_bit(shape: dict[str, Any]) -> None:
    counts = Counts()
    for one in compare(range(10), shape):
        counts.add(one)
    assert counts.differences == counts.block_differences == 0
    assert counts.drafted > 200
    assert 100 < counts.accepted < counts.drafted - 100
    assert min(counts.guided, counts.late_masks, counts.hit_tokens, counts.chunks) > 0


def _row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch compute each row as if it were alone: its own kernels are not invariant."""
    linear = TorchLinear.__call__

    def apart(self: TorchLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        residuals = [None] * len(x) if residual is None else residual.split(1)
        return torch.cat([linear(self, *row) for row in zip(x.split(1), residuals, strict=True)])

    monkeypatch.setattr(TorchLinear, "__call__", apart)
    monkeypatch.setattr(batch, "_num_apart", lambda plan: len(plan.sequences))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [with_windows(40), _CONVOLUTIONS])
def test_no_schedule_with_guesses_changes_a_bit_on_torch(monkeypatch, shape) -> None:
    _row_by_row(monkeypatch)
    counts = Counts()
    for one in compare([5], shape, on_torch=True):
        counts.add(one)
    assert counts.differences == counts.block_differences == 0
    assert min(counts.accepted, counts.drafted - counts.accepted, counts.chunks) > 0


class _Shown:
    """A row's tokens as the sampler sees them, with something wrong."""

    def __init__(self, tokens: TokenBuffer, *, shift: int = 0, twice: bool = False) -> None:
        self._length = len(tokens) + shift
        self.prompt, self.answer = tokens.prompt, tokens.answer
        if twice:
            self.answer = np.concatenate([self.answer, self.answer[-1:]])

    def __len__(self) -> int:
        return self._length


def _after_drafts(monkeypatch: pytest.MonkeyPatch, **wrong: Any) -> None:
    """Lets the sampler see the tokens after guesses wrongly."""
    drafted: set[int] = set()
    with_drafts, options = TokenBuffer.with_drafts, sampler._options

    def noted(self: TokenBuffer, drafts: Sequence[int]) -> list[TokenBuffer]:
        found = with_drafts(self, drafts)
        drafted.clear()
        drafted.update(map(id, found))
        return found

    def wrongly(row: Any, mask: Any) -> Any:
        if id(row.tokens) in drafted:
            row = replace(row, tokens=_Shown(row.tokens, **wrong))
        return options(row, mask)

    monkeypatch.setattr(TokenBuffer, "with_drafts", noted)
    monkeypatch.setattr(sampler, "_options", wrongly)


def _noise_of_the_wrong_position(monkeypatch: pytest.MonkeyPatch) -> None:
    _after_drafts(monkeypatch, shift=1)


def _a_penalty_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    _after_drafts(monkeypatch, twice=True)


def _a_refused_guess_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than what was sampled."""

    def accept_all(first: SequenceOutput, drafts: Any, after: Any) -> SequenceOutput:
        if first.token_id is None:
            return first
        return replace(first, after_drafts=tuple(one for one in after if one.token_id is not None))

    monkeypatch.setattr("prefixcache.runner.sampled_rows.with_accepted", accept_all)


def _a_mask_of_the_place_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(found: Any, drafts: Sequence[int]) -> None:
        found._begins.wait()
        track = found._track.copy()
        found.words += [track._words().copy() for _ in drafts]
        found.is_known.set()

    monkeypatch.setattr("prefixcache.text.grammar.answer_matcher._DraftWords.follow", stay)


def _states_take_refused_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixcache.runner.cpu.step._guesses", lambda plan: [])


def _the_last_accepted_guess_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = CpuModel.keep_accepted

    def too_few(self: CpuModel, kernels: StepKernels, accepted: Sequence[int]) -> None:
        keep(self, kernels, [max(0, count - 1) for count in accepted])

    monkeypatch.setattr(CpuModel, "keep_accepted", too_few)


@pytest.mark.parametrize(
    ("break_it", "shape"),
    [
        (_noise_of_the_wrong_position, WIDE),
        (_a_penalty_counts_twice, WIDE),
        (_a_refused_guess_is_kept, WIDE),
        (_a_mask_of_the_place_before, WIDE),
        (_states_take_refused_guesses, _STATES),
        (_the_last_accepted_guess_is_no_state, _STATES),
    ],
)
def test_the_comparison_notices_what_it_is_for(
    monkeypatch, break_it: Callable[..., None], shape: dict[str, Any]
) -> None:
    break_it(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):  # noqa: PT012 - one of them
        for counts in compare((seed for seed in range(40) if seed % 3), shape):
            assert not counts.differences


def _publish_the_last_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot holds what was computed for a refused guess, or nothing."""
    publish = Publisher.publish

    def too_far(self: Publisher, filled: Any) -> None:
        publish(self, [(state, len(state.tokens)) for state, _ in filled])

    monkeypatch.setattr(Publisher, "publish", too_far)


def _publish_what_follows_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    within = Steps._within_end
    monkeypatch.setattr(
        Steps, "_within_end", lambda self, *args: (within(self, *args)[0], args[-1])
    )


def _name_a_block_by_the_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Publisher.append_accepted

    def wrongly(self: Publisher, sampled: dict[str, list[int]]) -> None:
        for name, tokens in sampled.items():
            sampled[name] = [(token + 1) % VOCAB_SIZE for token in tokens[:-1]] + tokens[-1:]
        append(self, sampled)

    monkeypatch.setattr(Publisher, "append_accepted", wrongly)


@pytest.mark.parametrize(
    "break_it",
    [_publish_the_last_token_too, _publish_what_follows_the_end, _name_a_block_by_the_guess],
)
def test_blocks_of_refused_guesses_are_noticed(monkeypatch, break_it: Callable[..., None]) -> None:
    break_it(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):  # noqa: PT012 - one of them
        for seed in range(20):
            ends_alike(seed)


# What asks for it.


def flags(**given: Any) -> tuple[str, int]:
    config = EngineConfig.from_flags(**given).speculation
    return config.source, config.most


def test_vllms_way_to_say_it_is_taken() -> None:
    assert flags() == ("off", 7)
    assert flags(speculate="cache", speculate_tokens=3) == ("cache", 3)
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    assert flags(speculative_config=ngram) == ("prompt", 5)
    assert flags(speculative_config='{"method": "suffix"}') == ("cache", 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_config": "{"}, "must be JSON with method ngram or suffix"),
        ({"speculative_config": "[1]"}, "must be JSON with method ngram or suffix"),
        ({"speculative_config": {"method": ["ngram"]}}, "must be JSON with method"),
        ({"speculative_config": {"method": "eagle"}}, "must be JSON with method"),
        ({"speculative_config": {"method": "ngram", "model": "x"}}, "has model, which is not"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}},
            "must have num_speculative_tokens from 1 to 31",
        ),
        (
            {"speculative_config": {"method": "ngram"}, "speculate": "cache"},
            "speculative_config excludes speculate",
        ),
        ({"speculate": "draft_model"}, "speculate must be"),
        ({"speculate_tokens": 32}, "speculate_tokens must be"),
    ],
)
def test_wrong_ways_to_say_it_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flags(**given)


def test_torch_refuses_it_by_name_where_a_model_has_states(tiny_checkpoint) -> None:
    config = EngineConfig.from_flags(
        model=str(tiny_checkpoint("qwen3.5")), device="cpu", attention="torch", speculate="prompt"
    )
    with pytest.raises(ConfigError, match="speculate needs the CPU's own kernels for a model with"):
        build(config)


async def test_clients_see_the_same_answer_and_what_was_guessed(
    tiny_checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowTimes, "times_longer", lambda *_: 1.0)  # however busy the machine is
    body = {
        "messages": [{"role": "user", "content": "What is cached?"}],
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
        "logprobs": True,
    }
    answers: list[Any] = []
    for options in ({}, {"speculate": "prompt"}, {"speculate": "cache"}):
        async with served_folder(tiny_checkpoint(), **options) as (client, _):
            answers.append((await client.post("/v1/chat/completions", json=body)).json())
            text = answers[0]["choices"][0]["message"]["content"]
            prediction = {"type": "content", "content": [{"type": "text", "text": text}]}
            more = (
                body if options.get("speculate") == "cache" else {**body, "prediction": prediction}
            )
            answers.append((await client.post("/v1/chat/completions", json=more)).json())
            asked = {"temperature": 0, "max_output_tokens": 40, "ignore_eos": True}
            asked |= {"input": body["messages"]}
            response = (await client.post("/v1/responses", json=asked)).json()
            metrics = (await client.get("/metrics")).text
    assert all(one["choices"] == answers[0]["choices"] for one in answers)
    details = [one["usage"].get("completion_tokens_details") for one in answers]
    assert details[:2] == [None, None]
    assert details[3]["accepted_prediction_tokens"] > 0, "the predicted answer"
    assert details[5]["accepted_prediction_tokens"] > 0, "the answer before"
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 0, **details[5]}
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert f"spec_decode_num_{name}_total" in metrics
    assert 'source="cache"' in metrics


@pytest.mark.parametrize(
    "prediction", ["text", {"type": "content"}, {"type": "content", "content": [{"type": "image"}]}]
)
async def test_a_prediction_of_another_form_is_refused(tiny_checkpoint, prediction: Any) -> None:
    async with served_folder(tiny_checkpoint()) as (client, _):
        body = {"messages": [{"role": "user", "content": "x"}], "prediction": prediction}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "prediction" in response.json()["error"]["message"]
