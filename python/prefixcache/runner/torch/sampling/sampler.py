"""Chooses each sequence's next token.

A row's token depends on its logits, its options, its seed and its position, and never on the other
rows: every operation here works on rows one by one, or is elementwise. On a GPU nothing waits for
the device: a step's options go there in one copy, and what is wanted of it comes back in another.
Letters of shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache.runner.sampled_rows import (
    UNUSABLE,
    KnownMasks,
    has_penalties,
    is_plain_greedy,
)
from prefixcache.runner.torch.sampling.bad_words import BadWords
from prefixcache.runner.torch.sampling.cuts import floors
from prefixcache.runner.torch.sampling.logprobs import PackedLogprobs, compute_logprobs
from prefixcache.runner.torch.sampling.masks import add_masks
from prefixcache.runner.torch.sampling.penalties import TokenCounts, adjust_logits
from prefixcache.runner.torch.sampling.race import race
from prefixcache.runner.torch.sampling.row_options import (
    Draws,
    SampledRow,
    add_additions,
    add_allowed,
    add_draws,
    add_penalties,
)
from prefixcache.runner.torch.sampling.tiles import Tiles
from prefixcache.runner.torch.sampling.upload import Upload
from prefixcache.types.request import TokenLogprobs
from prefixcache.types.step_plan import SamplingInput, SequenceOutput


class Sampled:
    """Tokens of some rows, on the device: -1 in rows without a finite maximum.

    `logprobs` are those that were asked for, each of some rows. `unsampled` are outputs of rows
    whose tokens mean nothing.
    """

    def __init__(
        self,
        token_ids_R: Tensor,
        logprobs: Sequence[tuple[Sequence[int], PackedLogprobs]] = (),
        unsampled: Mapping[int, SequenceOutput] | None = None,
    ) -> None:
        self.token_ids_R = token_ids_R
        self._logprobs = logprobs
        self._unsampled = unsampled or {}

    @property
    def parts(self) -> list[Tensor]:
        """The int64 numbers that `outputs` reads."""
        return [self.token_ids_R, *(packed.numbers for _, packed in self._logprobs)]

    def outputs(self, parts: Iterator[npt.NDArray[np.int64]]) -> list[SequenceOutput]:
        """One output a row, from `parts` on the host; an unusable row gets an error."""
        tokens = next(parts).tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        for rows, packed in self._logprobs:
            logprobs.update(zip(rows, packed.unpack(next(parts)), strict=True))
        outputs = [
            SequenceOutput(error=UNUSABLE)
            if token < 0
            else SequenceOutput(token_id=token, logprobs=logprobs.get(r))
            for r, token in enumerate(tokens)
        ]
        for r, output in self._unsampled.items():
            outputs[r] = output
        return outputs


class Sampler:
    """Samples step after step, and remembers what requests with penalties or bad words need.

    At most `max_rows` rows are sampled in a step.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._counts = TokenCounts(max_rows, device)
        self._bad_words = BadWords()

    def sample(
        self, logits_RV: Tensor, rows: Sequence[SampledRow], likeliest_R: Tensor | None = None
    ) -> Sampled:
        """The next token of each row, and its log probabilities where they are asked for.

        `likeliest_R` are the logits' `greedy_token_ids`, where they were computed already.

        Logits of 16 bits become float32 unless all rows are greedy, which changes no maximum. A row
        without a finite one gets an error in place of a token.
        """
        if all(is_plain_greedy(row.sampling) for row in rows):
            if likeliest_R is None:
                likeliest_R = greedy_token_ids(logits_RV)
            return Sampled(likeliest_R)
        masks = KnownMasks.of(row.sampling.mask for row in rows)
        logits_RV = logits_RV.float()
        vocab_size = logits_RV.shape[1]
        drawn = [r for r, row in enumerate(rows) if not row.params.greedy]
        penalized = [r for r, row in enumerate(rows) if has_penalties(row.params)]
        contexts = self._counts.rows_of([rows[r] for r in penalized], vocab_size)
        upload = Upload()
        additions, allowed = add_additions(upload, rows), add_allowed(upload, rows)
        bans = self._bad_words.add(upload, rows)
        penalties = add_penalties(upload, rows, penalized, contexts)
        draws = add_draws(upload, rows, drawn, vocab_size)
        masking = add_masks(upload, masks.words)
        asked = _rows_by_logprobs(rows)
        asked_at = {count: upload.integers(asking) for count, asking in asked.items()}
        sent = upload.send(self._device)
        penalizing = penalties(sent)
        adjusted_RV = adjust_logits(
            logits_RV,
            additions(sent),
            penalizing,
            self._counts,
            allowed=allowed(sent),
        )
        adjusted_RV = self._bad_words.ban(adjusted_RV, bans(sent))
        adjusted_RV = masking(sent, adjusted_RV)
        tokens_R = _tokens(logits_RV, adjusted_RV, draws(sent))
        self._bad_words.remember(rows, tokens_R)
        if penalizing is not None:
            first_F = penalizing.first_F
            counted_F = penalizing.counts_P[first_F]
            self._counts.add(counted_F, tokens_R[penalizing.rows_P[first_F]])
        logprobs = [
            (asking, _logprobs(logits_RV, tokens_R, asked_at[count](sent), count))
            for count, asking in asked.items()
        ]
        return Sampled(tokens_R, logprobs, masks.unsampled)


def greedy_token_ids(logits_RV: Tensor) -> Tensor:
    """[R] on the logits' device: each row's likeliest token, -1 without a finite maximum.

    The first of equals.
    """
    best_R = logits_RV.max(dim=-1)
    return torch.where(best_R.values.isfinite(), best_R.indices, -1)


def sample(logits_RV: Tensor, rows: Sequence[SamplingInput]) -> list[SequenceOutput]:
    """What `Sampler` gives for rows whose tokens are all known. Waits for the device."""
    rows_to_sample = [SampledRow(f"{r}", len(row.tokens), row) for r, row in enumerate(rows)]
    sampled = Sampler(len(rows), logits_RV.device).sample(logits_RV, rows_to_sample)
    return sampled.outputs(part.cpu().numpy() for part in sampled.parts)


def _tokens(logits_RV: Tensor, adjusted_RV: Tensor, draws: Draws | None) -> Tensor:
    """[R]: the likeliest tokens, or those that are drawn; -1 without a finite maximum."""
    if draws is None:
        tokens_R = greedy_token_ids(adjusted_RV)
    elif len(draws.rows_N) == len(logits_RV):
        tokens_R = _draw(adjusted_RV, draws)
    else:
        tokens_R = greedy_token_ids(adjusted_RV)
        tokens_R[draws.rows_N] = _draw(adjusted_RV[draws.rows_N], draws)
    if adjusted_RV is not logits_RV:
        tokens_R = torch.where(logits_RV.amax(dim=-1).isfinite(), tokens_R, -1)
    return tokens_R


def _draw(logits_NV: Tensor, draws: Draws) -> Tensor:
    """The tokens that the rows draw, -1 without a finite maximum."""
    scaled_NV = logits_NV / draws.temperature_N1
    tiles = Tiles(scaled_NV)
    usable_N = tiles.best_RB.amax(dim=-1).isfinite()
    tokens_N = race(scaled_NV, floors(scaled_NV, tiles, draws), draws.noise)
    return torch.where(usable_N, tokens_N, -1)


def _rows_by_logprobs(rows: Sequence[SampledRow]) -> dict[int, list[int]]:
    """Rows that want log probabilities, by the number of likeliest tokens.

    Those of one number go together: how ties fall may depend on it.
    """
    by_count: defaultdict[int, list[int]] = defaultdict(list)
    for r, row in enumerate(rows):
        if row.params.logprobs is not None:
            by_count[row.params.logprobs].append(r)
    return by_count


def _logprobs(logits_RV: Tensor, tokens_R: Tensor, rows_N: Tensor, count: int) -> PackedLogprobs:
    picked_NV = logits_RV if len(rows_N) == len(logits_RV) else logits_RV[rows_N]
    return compute_logprobs(picked_NV, tokens_R[rows_N].clamp_(min=0), count)
