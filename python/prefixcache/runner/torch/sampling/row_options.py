"""What the sampled rows of a step ask for, as numbers on the device.

Letters of shapes: R rows, N single logits, P rows with penalties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from prefixcache.runner.torch.sampling.noise import RowNoise, row_keys
from prefixcache.runner.torch.sampling.upload import Field, Upload
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SamplingInput
from prefixcache.types.token_ids import TokenIds

T = TypeVar("T")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One row of logits: whose next token it chooses, and the position of that token.

    `num_guesses` of the tokens before it, the last ones, are guesses.
    """

    request_id: str
    position: int
    sampling: SamplingInput
    num_guesses: int = 0

    @property
    def params(self) -> SamplingParams:
        """The request's options."""
        return self.sampling.params

    @property
    def guesses(self) -> TokenIds:
        """The guesses before it."""
        tokens = self.sampling.tokens.known
        return tokens[len(tokens) - self.num_guesses :]

    @property
    def unread(self) -> int:
        """Tokens before it that the host has not read."""
        return self.position - len(self.sampling.tokens)


@dataclass(frozen=True, slots=True)
class Additions:
    """Bias, and minus infinity for banned tokens: each logit at most once."""

    rows_N: Tensor
    tokens_N: Tensor
    values_N: Tensor  # float32


@dataclass(frozen=True, slots=True)
class Allowed:
    """The logits that stay in rows where no other token may be chosen."""

    rows_A: Tensor  # each such row once
    rows_N: Tensor
    tokens_N: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows with penalties; `counts_P` are their rows in `TokenCounts`.

    Guesses before a row are not counted there: `guesses` are pairs of a row of P and such a token.
    """

    rows_P: Tensor
    counts_P: Tensor
    first_F: Tensor  # those of P that no guess comes before: their tokens are counted
    guesses_2G: Tensor
    options_P3: Tensor  # float32: repetition, presence, frequency
    has_repetition: bool  # without it a prompt's tokens stay as they are


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows that keep some tokens alone: the `top_k` or `top_p` of each, and the largest of all."""

    rows_N: Tensor
    limits_N: Tensor
    most: float


@dataclass(frozen=True, slots=True)
class Draws:
    """How rows draw their token."""

    rows_N: Tensor  # of the step's logits
    noise: RowNoise
    temperature_N1: Tensor  # float32
    least_N: Tensor  # float32, the logarithm of min_p
    top_k: Cut | None  # its rows, and those of top_p, are counted among the rows that draw
    top_p: Cut | None


Later = Callable[[Tensor], T]
"""What is made of an upload once it was sent."""


def add_additions(upload: Upload, rows: Sequence[SampledRow]) -> Later[Additions | None]:
    """None when no row has a bias or a banned token. Bad words are added elsewhere."""
    row_ids: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for r, row in enumerate(rows):
        if row.params.logit_bias or row.sampling.banned_token_ids:
            changed = dict(row.params.logit_bias)
            changed.update(dict.fromkeys(row.sampling.banned_token_ids, -math.inf))
            row_ids += [r] * len(changed)
            tokens += changed
            values += changed.values()
    if not tokens:
        return lambda _sent: None
    rows_at, tokens_at = upload.integers(row_ids), upload.integers(tokens)
    values_at = upload.floats(values)
    return lambda sent: Additions(rows_at(sent), tokens_at(sent), values_at(sent).float())


def add_allowed(upload: Upload, rows: Sequence[SampledRow]) -> Later[Allowed | None]:
    """None when every token is allowed in all rows."""
    limited = {r: row.params.allowed_token_ids for r, row in enumerate(rows)}
    pairs = [(r, token) for r, tokens in limited.items() for token in tokens or ()]
    if not pairs:
        return lambda _sent: None
    row_ids, tokens = zip(*pairs, strict=True)
    each_at = upload.integers(list(dict.fromkeys(row_ids)))
    rows_at, tokens_at = upload.integers(row_ids), upload.integers(tokens)
    return lambda sent: Allowed(each_at(sent), rows_at(sent), tokens_at(sent))


def add_penalties(
    upload: Upload, rows: Sequence[SampledRow], penalized: Sequence[int], counts: Sequence[int]
) -> Later[Penalties | None]:
    """Those of the rows `penalized`; None when there are none."""
    if not penalized:
        return lambda _sent: None
    params = [rows[r].params for r in penalized]
    options = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
    rows_at, counts_at = upload.integers(penalized), upload.integers(counts)
    options_at = upload.floats([value for of_row in options for value in of_row])
    first_at = upload.integers([p for p, r in enumerate(penalized) if not rows[r].num_guesses])
    guesses = [(p, token) for p, r in enumerate(penalized) for token in rows[r].guesses.tolist()]
    guesses_at = upload.integers([number for pair in zip(*guesses, strict=True) for number in pair])
    has_repetition = any(repetition != 1.0 for repetition, _, _ in options)
    return lambda sent: Penalties(
        rows_at(sent),
        counts_at(sent),
        first_at(sent),
        guesses_at(sent).view(2, -1),
        options_at(sent).float().view(-1, 3),
        has_repetition,
    )


def add_draws(
    upload: Upload, rows: Sequence[SampledRow], drawn: Sequence[int], vocab_size: int
) -> Later[Draws | None]:
    """Options of the rows `drawn`; None when there are none."""
    if not drawn:
        return lambda _sent: None
    picked = [rows[r] for r in drawn]
    params = [row.params for row in picked]
    keys = row_keys([row.sampling.seed for row in picked], [row.position for row in picked])
    rows_at, block_keys_at, token_keys_at = map(upload.integers, (drawn, *keys))
    temperature_at = upload.floats([p.temperature for p in params])
    least_at = upload.floats([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params])
    top_k = {n: p.top_k for n, p in enumerate(params) if 0 < p.top_k < vocab_size}
    top_p = {n: p.top_p for n, p in enumerate(params) if p.top_p < 1}
    top_k_at = _add_cut(upload, top_k, upload.integers)
    top_p_at = _add_cut(upload, top_p, upload.floats)
    return lambda sent: Draws(
        rows_N=rows_at(sent),
        noise=RowNoise(block_keys_at(sent), token_keys_at(sent)),
        temperature_N1=temperature_at(sent).float().unsqueeze(1),
        least_N=least_at(sent).float(),
        top_k=top_k_at(sent),
        top_p=top_p_at(sent),
    )


def _add_cut(
    upload: Upload, limits: Mapping[int, Number], add_limits: Callable[[Sequence[Number]], Field]
) -> Later[Cut | None]:
    """Of the rows that `limits` holds; None when it is empty."""
    if not limits:
        return lambda _sent: None
    rows_at, limits_at = upload.integers([*limits]), add_limits([*limits.values()])
    most = max(limits.values())
    return lambda sent: Cut(rows_at(sent), limits_at(sent), most)
