"""The CPU's sampler against torch's, and its independence of the batch, the threads and the form.

Torch's is tested against a float64 reference (`test_sampler.py`), the crate against slow code of
its own (`rust/prefixcache-sampler/tests/rows.rs`).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prefixcache import _core
from prefixcache._core import Cpu, SamplerRow
from prefixcache.exceptions import GrammarError
from prefixcache.runner.cpu.sampler import Sampler
from prefixcache.runner.torch.sampling.logprobs import compute_logprobs
from prefixcache.runner.torch.sampling.sampler import sample
from prefixcache.types.request import TokenLogprobs
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SamplingInput, SequenceOutput
from support.plans import context
from unit.torch.test_sampler import exponential_noise, mixed_rows, row

Logits = npt.NDArray[np.float32]
FORMS = Cpu.available_instructions()
OURS = Sampler(Cpu(1))


class Mask:
    """A grammar's mask that is known, late, or at its end."""

    def __init__(self, words: npt.NDArray[np.int32] | Exception | None) -> None:
        self._words = words
        self.waited: list[float] = []

    def words(self, seconds: float) -> npt.NDArray[np.int32] | None:
        self.waited.append(seconds)
        if isinstance(self._words, Exception):
            raise self._words
        return self._words


def mask_of(tokens: Sequence[int], vocab: int) -> Mask:
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return Mask(np.packbits(bits, bitorder="little").view(np.int32))


def random_logits(choose: random.Random, rows: int, vocab: int) -> Logits:
    """Of many spreads; half of them on a grid, with ties."""
    values = np.random.default_rng(choose.getrandbits(32)).standard_normal((rows, vocab))
    values *= choose.choice([0.0, 0.05, 1.0, 3.0, 3.0, 12.0])
    if choose.random() < 0.5:
        values = np.round(values * 64) / 64
    return values.astype(np.float32)


def some(choose: random.Random, vocab: int, most: int) -> tuple[int, ...]:
    return tuple(choose.randrange(vocab) for _ in range(choose.randint(0, most)))


def random_params(choose: random.Random, vocab: int) -> SamplingParams:
    of = choose.choice
    options: dict[str, Any] = {
        "temperature": of([0.0, 1e-5, 0.3, 0.7, 1.0, 1.0, 1.8, 100.0]),
        "top_k": of([0, -1, 1, 3, 40, 200, 10**6]),
        "top_p": of([1.0, 1.0, 0.999, 0.9, 0.4, 1e-6]),
        "min_p": of([0.0, 0.0, 0.05, 0.5, 1.0]),
        "logprobs": of([None, None, 0, 5, 20]),
    }
    if choose.random() < 0.3:
        options["presence_penalty"] = of([0.0, 0.8, -2.0])
        options["frequency_penalty"] = of([0.0, 0.3, -1.0])
        options["repetition_penalty"] = of([1.0, 1.2, 0.7])
    if choose.random() < 0.2:
        options["logit_bias"] = {t: choose.uniform(-9, 9) for t in some(choose, vocab, 4)}
    if choose.random() < 0.1:
        options["allowed_token_ids"] = some(choose, vocab, 30) or None
    if choose.random() < 0.1:
        last = choose.randrange(vocab)
        options["bad_words_token_ids"] = (
            (choose.randrange(vocab),),
            (*some(choose, vocab, 1), last),
        )
    return SamplingParams(**options)


def random_row(choose: random.Random, vocab: int) -> SamplingInput:
    has_mask = choose.random() < 0.1
    return SamplingInput(
        params=random_params(choose, vocab),
        seed=choose.randint(-(2**63), 2**64 - 1),
        tokens=context(some(choose, vocab, 30) or (0,), some(choose, vocab, 30)),
        banned_token_ids=some(choose, vocab, 3) if choose.random() < 0.2 else (),
        mask=mask_of((*some(choose, vocab, 60), 0), vocab) if has_mask else None,
    )


def score(values: Logits, given: SamplingInput, token: int) -> float:
    """log(p / E) of a token whose logit nothing but the temperature changes, up to a constant."""
    (noise,) = exponential_noise(
        [given.seed], [len(given.tokens)], len(values), torch.device("cpu")
    )
    scaled = values[token] / np.float32(given.params.temperature)
    return float(scaled) - math.log(noise[token])


def is_near_tie(values: Logits, given: SamplingInput, tokens: Sequence[int | None]) -> bool:
    """Whether both tokens' scores are as good as each other's."""
    if None in tokens or given.params.greedy:
        return False
    first, second = (score(values, given, token) for token in tokens if token is not None)
    return abs(first - second) <= 1e-12 * max(abs(first), abs(second))


def check_logprobs(values: Logits, ours: TokenLogprobs, theirs: TokenLogprobs) -> None:
    """Against float64, and against torch's, which are off by what it rounds to float32.

    Where torch makes one number of two logits, it does not count the larger one as larger.
    """
    logprobs = torch.log_softmax(torch.from_numpy(values).double(), dim=0).numpy()
    assert ours.token_id == theirs.token_id
    found = np.array([ours.logprob, *ours.top_logprobs])
    np.testing.assert_allclose(found, logprobs[[ours.token_id, *ours.top_token_ids]], 1e-7, 1e-7)
    np.testing.assert_allclose(found, [theirs.logprob, *theirs.top_logprobs], 2e-5, 2e-5)
    taken = values[ours.token_id]
    assert ours.rank == 1 + (values > taken).sum()
    merged = ((values > taken) & (values <= taken + 4e-6 * max(1, abs(theirs.logprob)))).sum()
    assert theirs.rank <= ours.rank <= theirs.rank + merged
    order = np.lexsort((np.arange(len(values)), -values))
    assert list(ours.top_token_ids) == order[: len(theirs.top_token_ids)].tolist()


def compare(values: Logits, rows: Sequence[SamplingInput]) -> list[int]:
    """Checks every row against torch's sampler; the rows whose tokens are as good as its."""
    near_ties: list[int] = []
    ours, theirs = OURS.sample(values, rows), sample(torch.from_numpy(values), rows)
    for r, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.error == other.error
        if one.token_id != other.token_id:
            assert is_near_tie(values[r], rows[r], (one.token_id, other.token_id)), rows[r]
            near_ties.append(r)
        elif one.logprobs is not None and other.logprobs is not None:
            check_logprobs(values[r], one.logprobs, other.logprobs)
        else:
            assert one == other
    return near_ties


def compare_random(seed: int, batches: int, batch: int, vocab: int) -> list[str]:
    choose = random.Random(seed)
    found: list[str] = []
    for number in range(batches):
        values = random_logits(choose, batch, vocab)
        rows = [random_row(choose, vocab) for _ in range(batch)]
        found += [f"batch {number}: {rows[r]}" for r in compare(values, rows)]
    return found


@pytest.mark.parametrize("vocab", [1, 5, 97, 1023, 1024, 1025, 5003])
def test_rows_of_all_options_are_torchs(vocab: int) -> None:
    near_ties = compare_random(vocab, batches=12, batch=25, vocab=vocab)
    assert len(near_ties) <= 1, near_ties


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(20))
def test_a_million_rows_are_torchs(part: int) -> None:
    near_ties = compare_random(1000 + part, batches=100, batch=500, vocab=1200)
    print(f"{len(near_ties)} of 50,000 rows have two best tokens", *near_ties, sep="\n")
    assert len(near_ties) <= 5


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {}, {"top_k": 50, "min_p": 0.01, "logprobs": 5}]
)
def test_rows_of_a_large_vocabulary_are_torchs(params: dict[str, Any]) -> None:
    for scale in (0.01, 2.0, 6.0):
        values = np.random.default_rng(1).standard_normal((8, 49152), np.float32) * scale
        rows = [row(seed, temperature=0.8, **params) for seed in range(8)]
        assert compare(values.astype(np.float32), rows) == []


def test_a_difference_would_be_seen() -> None:
    """Another seed, another cut, another rank."""
    values = random_logits(random.Random(3), 1, 97)
    values[0, :2] = values.max() + 1
    both = [row(seed, top_k=2) for seed in range(30)]
    tokens = {OURS.sample(values, [one])[0].token_id for one in both}
    assert tokens == {0, 1}
    assert not is_near_tie(values[0], both[0], (0, 1))
    (output,) = OURS.sample(values, [row(temperature=0, logprobs=3)])
    assert output.logprobs is not None
    check_logprobs(values[0], output.logprobs, output.logprobs)
    for wrong in ({"rank": 2}, {"logprob": -1.5}, {"top_token_ids": (1, 0, 2)}):
        changed = dataclasses.replace(output.logprobs, **wrong)
        with pytest.raises(AssertionError):
            check_logprobs(values[0], changed, output.logprobs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [97, 1024, 5003])
def test_a_row_is_the_same_bits_everywhere(vocab: int, threads: int, form: str) -> None:
    """Alone and in any batch, at any number of threads, with any instructions."""
    choose = random.Random(vocab)
    rows = [*mixed_rows(30), *(random_row(choose, vocab) for _ in range(70))]
    values = random_logits(choose, 100, vocab)
    alone = [OURS.sample(values[i : i + 1], [rows[i]])[0] for i in range(100)]
    there = Sampler(Cpu(threads, form))
    assert there.sample(values, rows) == alone
    order = choose.sample(range(100), 100)
    shuffled = there.sample(values[order], [rows[i] for i in order])
    assert shuffled == [alone[i] for i in order]
    followers = np.array([choose.randrange(vocab) for _ in rows], np.int32)
    single = [
        OURS.prompt_logprobs(values[i : i + 1], followers[i : i + 1], 3)[0] for i in range(100)
    ]
    assert there.prompt_logprobs(values, followers, 3) == tuple(single)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"temperature": 0, "logprobs": 2}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("vocab", [97, 3000])
def test_a_row_that_is_not_finite_fails_alone(
    vocab: int, bad: float, params: dict[str, Any]
) -> None:
    values = random_logits(random.Random(1), 3, vocab)
    good = OURS.sample(values, [row(**params)] * 3)
    values[1, 40] = bad
    outputs = OURS.sample(values, [row(**params)] * 3)
    assert outputs == [good[0], SequenceOutput(error=outputs[1].error), good[2]]
    assert outputs == sample(torch.from_numpy(values), [row(**params)] * 3) or "logprobs" in params
    hidden = row(**params, banned=(40,))
    assert OURS.sample(values[1:2], [hidden])[0].error == outputs[1].error


EXTREMES: dict[str, Logits] = {
    "nothing is finite": np.full((1, 97), -np.inf, np.float32),
    "one token": np.array([[-np.inf] * 96 + [3.0]], np.float32),
    "huge": np.linspace(-3e38, 3e38, 97, dtype=np.float32)[None],
    "huge and equal": np.full((1, 2049), 3e38, np.float32),
    "tiny": np.full((1, 1500), 1e-45, np.float32),
    "signs of zero": np.array([[-0.0, 0.0] * 600], np.float32),
    "a vocabulary of one": np.zeros((1, 1), np.float32),
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0},
        {"temperature": 1e-5},
        {"temperature": 100.0, "top_k": 10**9},
        {"top_p": 1e-300},
        {"top_p": 1 - 1e-16},
        {"min_p": 1.0, "logprobs": 20},
        {"min_p": 5e-324, "top_k": 1, "top_p": 1e-9},
        {"temperature": 0, "logprobs": 0},
    ],
)
def test_extremes(name: str, params: dict[str, Any]) -> None:
    values = EXTREMES[name]
    rows = [row(1, **params)]
    outputs = [Sampler(Cpu(1, form)).sample(values, rows) for form in FORMS]
    assert outputs == [outputs[0]] * len(FORMS)
    # Torch's own log probabilities of huge logits are NaN or infinite where ours are not.
    (theirs,) = sample(torch.from_numpy(values), rows)
    assert (outputs[0][0].token_id, outputs[0][0].error) == (theirs.token_id, theirs.error)


def draws(values: Logits, count: int, **params: Any) -> Counter[int | None]:
    repeated = np.repeat(values[None], count, axis=0)
    outputs = OURS.sample(repeated, [row(seed, **params) for seed in range(count)])
    return Counter(output.token_id for output in outputs)


def test_a_nucleus_of_flat_logits_has_no_token_too_many() -> None:
    """More of them than are looked at first, each with less of the mass than 1e-5."""
    values = np.random.default_rng(2).permutation(np.linspace(0, 1e-3, 200_000, dtype=np.float32))
    probabilities = np.exp(np.sort(values.astype(np.float64))[::-1])
    mass = np.cumsum(probabilities / probabilities.sum())
    least = np.sort(values)[::-1][np.searchsorted(mass, 0.3)]
    kept = [token for token in draws(values, 60, top_p=0.3) if token is not None]
    assert min(values[kept]) >= least
    assert max(values[kept]) > least + 1e-4


def test_masks_that_are_late_or_end_leave_the_other_rows_alone() -> None:
    values = np.zeros((5, 40), np.float32)
    values[:, 7] = 1.0
    masks = [
        None,
        mask_of([3, 9], 40),
        Mask(None),
        Mask(GrammarError("no way on")),
        mask_of([39], 40),
    ]
    rows = [dataclasses.replace(row(temperature=0), mask=mask) for mask in masks]
    assert OURS.sample(values, rows) == [
        SequenceOutput(token_id=7),
        SequenceOutput(token_id=3),
        SequenceOutput(is_late=True),
        SequenceOutput(error="no way on", error_code="grammar_limit"),
        SequenceOutput(token_id=39),
    ]
    waits = [mask.waited for mask in masks if mask is not None]
    assert all(seconds <= 5e-3 for (seconds,) in waits)


def test_a_mask_may_be_longer_than_the_vocabulary() -> None:
    masked = dataclasses.replace(row(temperature=0), mask=Mask(np.full(9, -1, np.int32)))
    assert OURS.sample(np.eye(1, 40, 5, dtype=np.float32), [masked])[0].token_id == 5


@pytest.mark.parametrize("count", [0, 4, 20])
def test_log_probabilities_of_a_prompt_are_torchs(count: int) -> None:
    values = random_logits(random.Random(5), 20, 1500)
    followers = np.random.default_rng(5).integers(0, 1500, 20).astype(np.int32)
    packed = compute_logprobs(torch.from_numpy(values), torch.from_numpy(followers).long(), count)
    ours = OURS.prompt_logprobs(values, followers, count)
    for of_row, one, other in zip(values, ours, packed.unpack(packed.numbers.numpy()), strict=True):
        check_logprobs(of_row, one, other)


def test_the_argument_is_left_alone() -> None:
    values = random_logits(random.Random(6), 2, 97)
    before = values.copy()
    values.flags.writeable = False
    OURS.sample(values, [row(repetition_penalty=2.0, top_k=3), row(logit_bias={1: 9.0})])
    assert np.array_equal(values, before)


LOGITS = np.zeros((2, 40), np.float32)
PLAIN = SamplerRow(1.0, 0, 0)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"banned": [40]}, "banned of row 1 has the token 40"),
        ({"allowed": [0, 41]}, "allowed of row 1 has the token 41"),
        ({"bad_words": [2**40]}, "bad_words of row 1"),
        ({"bias_tokens": [77], "bias": [1.0]}, "bias of row 1 has the token 77"),
        ({"mask": np.zeros(1, np.int32)}, "the mask of row 1 has no bit"),
        ({"presence": 1.0, "prompt": np.array([-1], np.int32)}, "prompt of row 1 has the token -1"),
        ({"presence": 1.0, "answer": np.array([40], np.int32)}, "answer of row 1 has the token 40"),
    ],
)
def test_rows_that_do_not_fit_the_logits(options: dict[str, Any], name: str) -> None:
    sampler = _core.Sampler(Cpu(1))
    with pytest.raises(ValueError, match=name):
        sampler.sample(LOGITS, [PLAIN, SamplerRow(1.0, 0, 0, **options)])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"min_p": -0.1}, "min_p must be from 0 to 1"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition": 0.0}, "repetition"),
        ({"bias_tokens": [1, 2], "bias": [1.0]}, "bias must have 2 numbers"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplerRow(1.0, 0, 0, **options)


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_temperatures_out_of_range(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be from 0"):
        SamplerRow(temperature, 0, 0)


def test_logits_of_another_shape() -> None:
    sampler: Any = _core.Sampler(Cpu(1))
    with pytest.raises(ValueError, match="2 rows of logits and 1 of options"):
        sampler.sample(LOGITS, [PLAIN])
    with pytest.raises(ValueError, match="2 rows of logits and 3 of options"):
        sampler.logprobs(LOGITS, np.zeros(3, np.int32), 1)
    with pytest.raises(ValueError, match="token_ids of row 1 has the token 40"):
        sampler.logprobs(LOGITS, np.array([0, 40], np.int32), 1)
    with pytest.raises(ValueError, match="logits must be contiguous"):
        sampler.likeliest(LOGITS[:, ::2])
    for empty in (np.zeros((2, 0), np.float32), np.zeros((1, 2**19 + 1), np.float32)):
        with pytest.raises(ValueError, match="from 1 to 524288"):
            sampler.likeliest(empty)
    for wrong in (LOGITS[0], LOGITS.astype(np.float64), [[0.0]]):
        with pytest.raises(TypeError, match="logits must be a numpy array of float32 with two"):
            sampler.likeliest(wrong)
    assert sampler.likeliest(np.zeros((0, 40), np.float32)) == []
    assert sampler.sample(np.zeros((0, 40), np.float32), []) == []
