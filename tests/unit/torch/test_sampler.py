"""The sampler against an obvious float64 reference, and its independence of the batch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefixcache.runner.torch.ops.linear import TorchLinear
from prefixcache.runner.torch.sampling.cuts import floors
from prefixcache.runner.torch.sampling.noise import RowNoise, row_keys
from prefixcache.runner.torch.sampling.row_options import SampledRow, add_draws
from prefixcache.runner.torch.sampling.sampler import Sampler, greedy_token_ids, sample
from prefixcache.runner.torch.sampling.tiles import Tiles, token_ids
from prefixcache.runner.torch.sampling.upload import Upload
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SamplingInput, SequenceOutput
from support.plans import context

CPU = torch.device("cpu")


def row(
    seed: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **params: Any,
) -> SamplingInput:
    return SamplingInput(
        params=SamplingParams(**params),
        seed=seed,
        tokens=context(prompt, output),
        banned_token_ids=banned,
    )


def logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def chosen(values: torch.Tensor, rows: list[SamplingInput]) -> list[int | None]:
    return [output.token_id for output in sample(values, rows)]


def exponential_noise(
    seeds: list[int], positions: list[int], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """The noise of all tokens, [rows, vocabulary]."""
    rows = torch.arange(len(seeds), device=device).unsqueeze(1)
    blocks, members = torch.meshgrid(
        torch.arange(-(-vocab_size // 1024) * 64), torch.arange(16), indexing="ij"
    )
    blocks, members = blocks.flatten().to(device), members.flatten().to(device)
    order = token_ids(blocks, members).argsort()
    keys = (torch.from_numpy(keys).to(device) for keys in row_keys(seeds, positions))
    noise = RowNoise(*keys).of_members(rows, blocks, members)
    return noise[:, order][:, :vocab_size]


def draws(values: torch.Tensor, count: int, **params: Any) -> Counter[int | None]:
    repeated = values.expand(count, -1)
    return Counter(chosen(repeated, [row(seed, **params) for seed in range(count)]))


def test_greedy_takes_the_likeliest_token() -> None:
    values = logits(5, 97)
    assert chosen(values, [row(temperature=0)] * 5) == values.argmax(dim=-1).tolist()


def test_greedy_takes_the_first_of_equal_tokens() -> None:
    values = torch.zeros(2, 50)
    values[1, [7, 9]] = 1.0
    assert chosen(values, [row(temperature=0)] * 2) == [0, 7]


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"temperature": 0, "logprobs": 2}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(params: dict[str, Any], bad: float) -> None:
    values = logits(3, 97)
    values[1, 40] = bad
    outputs = sample(values, [row(**params)] * 3)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[1].token_id is None
    alone = sample(logits(3, 97)[2:], [row(**params)])[0]
    assert outputs[2] == alone


def test_every_token_banned_is_an_error_and_not_a_token() -> None:
    outputs = sample(logits(1, 4), [row(temperature=0, banned=(0, 1, 2, 3))])
    assert outputs[0].token_id is None
    assert outputs[0].error


@pytest.mark.parametrize("vocab_size", [5, 384, 5000])
def test_likeliest_tokens_of_narrow_logits_are_those_of_wide_ones(vocab_size: int) -> None:
    """Few values, so that most rows have ties: the first of equals."""
    values = (logits(200, vocab_size, scale=0.02).bfloat16() * 64).round()
    values[0, 1], values[1] = math.nan, -math.inf
    values[2, 3] = math.inf
    ids = greedy_token_ids(values)
    assert torch.equal(ids, greedy_token_ids(values.float()))
    assert ids[:3].tolist() == [-1, -1, -1]
    assert ids[3:].tolist() == values[3:].float().numpy().argmax(axis=1).tolist()
    assert (values[3:] == values[3:].amax(dim=1, keepdim=True)).sum(dim=1).max() > 1


def test_greedy_rows_need_no_wide_copy_of_the_logits() -> None:
    class Made(TorchDispatchMode):
        """Float32 tensors that operations make."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            made.extend(leaf for leaf in leaves if leaf.dtype == torch.float32)
            return result

    made: list[torch.Tensor] = []
    narrow = TorchLinear(torch.randn(384, 64).bfloat16())
    rows = [SampledRow(f"{r}", 2, row(temperature=0)) for r in range(3)]
    hidden = torch.randn(3, 64).bfloat16()
    with Made():
        greedy = Sampler(3, CPU).sample(narrow.wide(hidden), rows)
    assert greedy.token_ids_R.shape == (3,)
    assert made == []


def test_greedy_ids_mark_unusable_rows() -> None:
    values = logits(3, 8)
    values[0] = -math.inf
    ids = greedy_token_ids(values).tolist()
    assert ids == [-1, *values[1:].argmax(dim=-1).tolist()]


def test_noise_is_a_function_of_seed_position_and_index() -> None:
    base = exponential_noise([3], [7], 64, CPU)
    assert torch.equal(base, exponential_noise([3], [7], 64, CPU))
    assert torch.equal(base, exponential_noise([3], [7], 256, CPU)[:, :64])
    assert torch.equal(base, exponential_noise([9, 3], [1, 7], 64, CPU)[1:])
    for other in (exponential_noise([4], [7], 64, CPU), exponential_noise([3], [8], 64, CPU)):
        assert not torch.equal(base, other)


def test_noise_is_exponential() -> None:
    noise = exponential_noise(list(range(40)), [5] * 40, 5000, CPU).flatten().sort().values
    expected = 1 - torch.exp(-noise)
    steps = torch.arange(1, len(noise) + 1, dtype=torch.float64) / len(noise)
    distance = (steps - expected).abs().max().item()
    assert distance < 1.95 / math.sqrt(len(noise))  # Kolmogorov-Smirnov at 0.1 %
    assert noise.min().item() > 0


def test_noise_of_neighbours_is_uncorrelated() -> None:
    by_seed = exponential_noise(list(range(200)), [5] * 200, 500, CPU)
    by_position = exponential_noise([1] * 200, list(range(200)), 500, CPU)
    for noise in (by_seed, by_position):
        across_rows = np.corrcoef(noise[:-1].flatten(), noise[1:].flatten())[0, 1]
        across_columns = np.corrcoef(noise[:, :-1].flatten(), noise[:, 1:].flatten())[0, 1]
        assert abs(across_rows) < 0.015
        assert abs(across_columns) < 0.015


@pytest.mark.parametrize("vocab", [5, 64, 1024, 1025, 5003])
@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_the_race_is_won_by_the_largest_quotient_of_all(vocab: int, scale: float) -> None:
    """Passing over tokens that cannot win changes no winner: p / E of all tokens tells the same."""
    values = logits(50, vocab, scale=scale)
    values[7:20, ::3] = -math.inf
    noise = exponential_noise(list(range(50)), [2] * 50, vocab, CPU)
    for temperature, top_k in ((1.0, 0), (0.4, 0), (1.7, 3)):
        quotients = torch.softmax(values.double() / temperature, dim=-1) / noise
        if top_k:
            cut = values.topk(top_k, dim=-1).values[:, -1:]
            quotients[values < cut] = -1.0
        rows = [row(seed, temperature=temperature, top_k=top_k) for seed in range(50)]
        assert chosen(values, rows) == quotients.argmax(dim=-1).tolist()


def test_tiles_hold_every_token_once_and_find_the_largest() -> None:
    values = logits(3, 5003)
    tiles = Tiles(values)
    rows = torch.zeros(tiles.best_RB.shape[1], dtype=torch.int64)
    blocks, members = torch.arange(len(rows)), torch.arange(16)
    ids = token_ids(blocks.unsqueeze(1), members)
    assert sorted(ids.flatten().tolist()) == list(range(5120))
    for r in range(3):
        held = tiles.members(rows + r, blocks)
        padded = torch.cat([values[r], torch.full((117,), -math.inf)])
        assert torch.equal(held, padded[ids])
        assert torch.equal(held.amax(dim=1), tiles.best_RB[r])
    for count in (1, 7, 319, 320, 5003):
        expected = values[[2, 0]].sort(dim=-1, descending=True).values[:, :count]
        assert torch.equal(tiles.largest(torch.tensor([2, 0]), count), expected)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 5},
    {"top_p": 0.8, "logprobs": 3},
    {"top_p": 0.9999},
    {"min_p": 0.05, "top_k": 40, "top_p": 0.7},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {3: 5.0}, "logprobs": 0},
    {"temperature": 0, "logprobs": 7},
    {"temperature": 1.5, "banned": (2, 3), "logit_bias": {3: 5.0, 4: -2.0}},
]


def mixed_rows(count: int) -> list[SamplingInput]:
    return [row(i, output=tuple(range(i)), **OPTIONS[i % len(OPTIONS)]) for i in range(count)]


def sampled(values: torch.Tensor, rows: list[SamplingInput]) -> list[SequenceOutput]:
    known = [SampledRow(f"{r}", len(one.tokens), one) for r, one in enumerate(rows)]
    result = Sampler(len(rows), CPU).sample(values, known)
    return result.outputs(part.numpy() for part in result.parts)


def test_likeliest_tokens_that_are_known_are_not_looked_for_again() -> None:
    values = logits(2, 97)
    known = greedy_token_ids(values)
    greedy = [SampledRow(f"{r}", 2, row(r, temperature=0.0)) for r in range(2)]
    assert Sampler(2, CPU).sample(values, greedy, known).token_ids_R is known
    biased = [SampledRow("0", 2, row(0, temperature=0.0, logit_bias={5: 100.0})), greedy[1]]
    chosen_now = Sampler(2, CPU).sample(values, biased, known).token_ids_R.tolist()
    assert chosen_now == [5, known[1].item()]


@pytest.mark.parametrize("vocab", [97, 384, 5003])
def test_a_row_does_not_see_the_batch(vocab: int) -> None:
    """Any size and order of the batch, and any mix of options in it."""
    rows = mixed_rows(30)
    values = logits(30, vocab)
    alone = [sampled(values[i : i + 1], [rows[i]])[0] for i in range(30)]
    assert sampled(values, rows) == alone
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sampled(values[order], [rows[i] for i in order])
    assert shuffled == [alone[i] for i in order]
    assert sampled(values[5:18], rows[5:18]) == alone[5:18]


def test_a_nucleus_is_found_bit_by_bit() -> None:
    """Among equal logits, among neighbours, and next to another cut."""
    values = torch.cat([logits(8, 3001, scale=s) for s in (0.0, 0.01, 1.0, 6.0)]).round(decimals=2)
    # Neighbours among the float32, around two numbers that differ in their upper bits.
    values[:8] += logits(8, 3001, scale=1e-3) + torch.where(torch.arange(3001) % 2 == 1, 2.6, 1.6)
    for top_p in (1e-9, 0.1, 0.5, 0.95):
        for top_k in (0, 3):
            rows = [row(seed, top_p=top_p, top_k=top_k) for seed in range(32)]
            tiles, upload = Tiles(values), Upload()
            known = [SampledRow(f"{r}", 2, one) for r, one in enumerate(rows)]
            draws_at = add_draws(upload, known, range(32), 3001)
            draws = draws_at(upload.send(CPU))
            assert draws is not None
            found = floors(values, tiles, draws)
            for of_row, least in zip(values, found.tolist(), strict=True):
                assert least in _nucleus_ends(of_row, top_k, top_p)


def _nucleus_ends(logits: torch.Tensor, top_k: int, top_p: float) -> set[float]:
    """The least logits of the row's nucleus: two where rounding decides."""
    likeliest = logits.sort(descending=True).values
    if top_k:
        likeliest = likeliest[likeliest >= likeliest[top_k - 1]]
    sums = (likeliest.double() - likeliest[0]).exp().cumsum(0)
    wanted = (top_p * sums[-1]).item()
    ends = (int((sums < wanted * (1 + slack)).sum()) for slack in (-1e-9, 1e-9))
    return {likeliest[min(end, len(likeliest) - 1)].item() for end in ends}


def test_a_nucleus_of_flat_logits_has_no_token_too_many() -> None:
    """Each token has less of the mass than a float32 sum of all is wrong by."""
    values = logits(16, 150_000, scale=3.0)
    upload = Upload()
    known = [SampledRow(f"{r}", 2, row(r, top_p=0.95)) for r in range(16)]
    draws_at = add_draws(upload, known, range(16), 150_000)
    draws = draws_at(upload.send(CPU))
    assert draws is not None
    probabilities = torch.softmax(values.double(), dim=-1).sort(dim=-1, descending=True)
    last = (probabilities.values.cumsum(dim=-1) < 0.95).sum(dim=-1, keepdim=True)
    expected = values.gather(1, probabilities.indices.gather(1, last)).squeeze(1)
    assert torch.equal(floors(values, Tiles(values), draws), expected)


def test_a_context_that_grew_gives_what_one_counted_again_gives() -> None:
    values = logits(5, 12, scale=0.5)
    options = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4}
    sampler, answers = Sampler(5, CPU), [[] for _ in range(5)]
    for _ in range(12):
        rows = [row(r, output=tuple(answers[r]), **options) for r in range(5)]
        known = [
            # The host has read none of the answer.
            SampledRow(
                f"{r}", 2 + len(answers[r]), dataclasses.replace(one, tokens=context((1, 2)))
            )
            for r, one in enumerate(rows)
        ]
        chosen_now = sampler.sample(values, known).token_ids_R.tolist()
        assert chosen_now == chosen(values, rows)
        for answer, token in zip(answers, chosen_now, strict=True):
            answer.append(token)


@pytest.mark.parametrize("last", range(4))
def test_a_bad_words_last_token_is_banned_behind_a_token_that_the_host_has_not_read(
    last: int,
) -> None:
    words = ((3,), (1, 2), (0, 1, 0), (7, 1, 4))
    params = {"temperature": 0.0, "bad_words_token_ids": words}
    others = [("other", row(output=(6,), temperature=0.0)), ("bad", row(output=(0,), **params))]
    sampler = Sampler(2, CPU)
    first = torch.full((2, 8), -1.0)
    first[:, last] = 5.0
    before = [SampledRow(name, len(one.tokens), one) for name, one in others]
    (_, taken) = sampler.sample(first, before).token_ids_R.tolist()
    assert taken == (last if last != 3 else 0)
    ahead = SampledRow("bad", 4, others[1][1])  # its tokens are those of the step before
    for token in range(8):
        values = torch.full((1, 8), -1.0)
        values[0, token] = 5.0
        chosen_now = sampler.sample(values, [ahead]).token_ids_R.item()
        known = row(output=(0, taken), **params)
        assert chosen_now == chosen(values, [known])[0]
        sampler.sample(first, before)


def test_a_bad_word_is_said_where_nothing_else_is_allowed() -> None:
    only = row(allowed_token_ids=(5,), bad_words_token_ids=((5,),), temperature=0.5)
    hot = row(allowed_token_ids=(5, 6), bad_words_token_ids=((5,),), temperature=100.0, top_k=1)
    assert chosen(logits(2, 9), [only, hot]) == [5, 6]


def test_many_keys_are_those_of_single_rows() -> None:
    seeds = [0, 1, -1, 2**64 - 1, -(2**63), 7, 8, 9, 10, 11]
    positions = [*range(0, 10**6, 10**5)]
    many = np.stack(row_keys(seeds, positions), axis=1)
    for seed, position, keys in zip(seeds, positions, many, strict=True):
        assert np.concatenate(row_keys([seed], [position])).tolist() == keys.tolist()


def chi_square(counts: Counter[int | None], probabilities: np.ndarray, total: int) -> float:
    expected = probabilities * total
    kept = expected > 0
    observed = np.array([counts[i] for i in range(len(probabilities))])
    assert observed[~kept].sum() == 0, "a token that was cut off was drawn"
    return float(((observed - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.8, "temperature": 1.5},
    ],
)
def test_draws_follow_the_reference_distribution(params: dict[str, Any]) -> None:
    values = logits(1, 12, scale=1.0)[0]
    probabilities = reference(values.double().numpy(), row(**params))
    count = 6000
    statistic = chi_square(draws(values, count, **params), probabilities, count)
    assert statistic < 35  # chi-square at 0.03 % for 12 degrees; fixed seeds, so it never flickers


def reference(values: np.ndarray, given: SamplingInput) -> np.ndarray:
    """The distribution a row is drawn from, written as plainly as possible, in float64."""
    values = values.copy()
    params = given.params
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in given.banned_token_ids:
        values[token] = -np.inf
    forbid(values, given)
    for token in set(given.tokens.known.tolist()):
        by = params.repetition_penalty
        values[token] = values[token] / by if values[token] > 0 else values[token] * by
    for token, count in Counter(given.tokens.answer.tolist()).items():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.greedy:
        return (np.arange(len(values)) == values.argmax()).astype(float)
    probabilities = softmax(values / params.temperature)
    probabilities = keep(probabilities, probabilities >= params.min_p * probabilities.max())
    if 0 < params.top_k < len(values):
        least = np.sort(probabilities)[-params.top_k]
        probabilities = keep(probabilities, probabilities >= least)
    if params.top_p < 1:
        probabilities = keep(probabilities, nucleus(probabilities, params.top_p))
    return probabilities


def forbid(values: np.ndarray, given: SamplingInput) -> None:
    for word in given.params.bad_words_token_ids:
        if (*given.tokens.answer.tolist(), word[-1])[-len(word) :] == word:
            values[word[-1]] = -np.inf
    if given.params.allowed_token_ids is not None:
        others = np.setdiff1d(np.arange(len(values)), given.params.allowed_token_ids)
        values[others] = -np.inf


def softmax(values: np.ndarray) -> np.ndarray:
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def keep(probabilities: np.ndarray, mask: np.ndarray) -> np.ndarray:
    kept = np.where(mask, probabilities, 0.0)
    return kept / kept.sum()


def nucleus(probabilities: np.ndarray, mass: float) -> np.ndarray:
    taken, least = 0.0, 0.0
    for probability in sorted(probabilities, reverse=True):
        taken, least = taken + probability, probability
        if taken >= mass:
            break
    return probabilities >= least


@pytest.mark.long
def test_a_wide_nucleus_is_sorted_whole() -> None:
    """More tokens inside the nucleus than the candidates that are looked at first."""
    values = torch.linspace(1.0, 0.9, 4000)
    kept = draws(values, 3000, top_p=0.75)
    assert max(kept) > 2500
    assert max(kept) < 3000


def test_a_nucleus_of_nearly_everything_stays_within_top_k() -> None:
    """Whichever way the sum of the mass is rounded."""
    values = logits(300, 97, scale=0.3)
    rows = [row(seed, top_k=3, top_p=1 - 1e-9) for seed in range(300)]
    allowed = values.topk(3, dim=-1).indices.tolist()
    assert all(token in ids for token, ids in zip(chosen(values, rows), allowed, strict=True))


def test_ties_at_a_cut_are_kept() -> None:
    values = torch.tensor([3.0, 1.0, 1.0, 1.0, -2.0])
    assert set(draws(values, 2000, top_k=2)) == {0, 1, 2, 3}
    assert set(draws(values, 2000, top_p=0.85, temperature=1.5)) == {0, 1, 2, 3}


def test_logprobs_are_those_of_the_raw_logits() -> None:
    values = logits(1, 97)
    options = {"temperature": 0.2, "top_k": 1, "logit_bias": {5: 50.0}, "logprobs": 4}
    (output,) = sample(values, [row(**options)])
    expected = torch.log_softmax(values[0].double(), dim=-1)
    logprobs = output.logprobs
    assert logprobs is not None
    assert output.token_id == logprobs.token_id == 5
    assert logprobs.logprob == pytest.approx(expected[5].item(), abs=1e-5)
    assert logprobs.rank == 1 + int((expected > expected[5]).sum())
    top = expected.topk(4)
    assert list(logprobs.top_token_ids) == top.indices.tolist()
    assert logprobs.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)


def test_the_argument_is_left_alone() -> None:
    values = logits(2, 97)
    before = values.clone()
    sample(values, [row(repetition_penalty=2.0, top_k=3), row(logit_bias={1: 9.0})])
    assert torch.equal(values, before)
