"""What a request changes in its logits before a token is chosen.

In vLLM's order: bias, banned tokens, then the penalties. Each row is worked on alone. Letters of
shapes: R rows, V vocabulary, P rows with penalties, C contexts that are counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prefixcache.runner.torch.sampling.row_options import Additions, Allowed, Penalties, SampledRow
from prefixcache.runner.torch.sampling.upload import Upload
from prefixcache.types.step_plan import SamplingInput

_FIRST_CONTEXTS = 4


class TokenCounts:
    """How often each token stands in an answer, and whether it stands in the prompt.

    A context is counted when its request first samples with a penalty, and each token is added on
    the device as it is sampled: neither a long context nor a token that the host has not read yet
    costs anything. At most `max_contexts` are kept, those that were used last.
    """

    def __init__(self, max_contexts: int, device: torch.device) -> None:
        self._max_contexts = max_contexts
        self._device = device
        # Request to its row and the tokens of its answer that are counted; the last used last.
        self._contexts: dict[str, tuple[int, int]] = {}
        # Twice the number of occurrences in the answer, and one more for those in the prompt.
        self._counts_CV = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def rows_of(self, rows: Sequence[SampledRow], vocab_size: int) -> list[int]:
        """Rows of the requests' contexts. `add` must follow, with the tokens that are sampled."""
        for row in rows:
            if row.request_id in self._contexts:
                self._contexts[row.request_id] = self._contexts.pop(row.request_id)
        return [self._row_of(row, vocab_size) for row in rows]

    def of(self, counts_P: Tensor) -> Tensor:
        """Counts of those contexts, int32 [P, V]."""
        return self._counts_CV[counts_P]

    def add(self, counts_P: Tensor, tokens_P: Tensor) -> None:
        """Counts a sampled token of each context; one below zero ends its request."""
        tokens_P = tokens_P.clamp(min=0)
        self._counts_CV[counts_P, tokens_P] += 2

    def _row_of(self, row: SampledRow, vocab_size: int) -> int:
        if row.num_guesses:
            return self._contexts[row.request_id][0]
        answered = row.position - row.sampling.tokens.num_prompt_tokens
        entry = self._contexts.get(row.request_id)
        context, counted = entry or (self._free_row(vocab_size), -1)
        if counted != answered:
            self._count(context, row.sampling, vocab_size)
        self._contexts[row.request_id] = context, answered + 1
        return context

    def _free_row(self, vocab_size: int) -> int:
        used = len(self._contexts)
        if used == self._max_contexts:
            longest_unused = next(iter(self._contexts))
            return self._contexts.pop(longest_unused)[0]
        if used == len(self._counts_CV):
            more = min(max(used, _FIRST_CONTEXTS), self._max_contexts - used)
            added = torch.zeros(more, vocab_size, dtype=torch.int32, device=self._device)
            kept = self._counts_CV if used else added[:0]
            self._counts_CV = torch.cat([kept, added])
        return used

    def _count(self, context: int, sampling: SamplingInput, vocab_size: int) -> None:
        """Of a request that is new, or whose answer was restarted: all its tokens are known."""
        prompt, answer = sampling.tokens.prompt, sampling.tokens.answer
        counts_V = 2 * np.bincount(answer, minlength=vocab_size)
        counts_V[prompt] += 1
        upload = Upload()
        counts_at = upload.integers(counts_V)
        self._counts_CV[context].copy_(counts_at(upload.send(self._device)))


def adjust_logits(
    logits_RV: Tensor,
    additions: Additions | None,
    penalties: Penalties | None,
    counts: TokenCounts,
    allowed: Allowed | None = None,
) -> Tensor:
    """Logits with bias, bans, allowed tokens and penalties; the argument itself is left alone."""
    if additions is None and allowed is None and penalties is None:
        return logits_RV
    adjusted_RV = logits_RV.clone()
    if additions is not None:
        adjusted_RV[additions.rows_N, additions.tokens_N] += additions.values_N
    if allowed is not None:
        _keep_alone(adjusted_RV, allowed)
    if penalties is not None:
        _penalize(adjusted_RV, counts, penalties)
    return adjusted_RV


def _keep_alone(logits_RV: Tensor, allowed: Allowed) -> None:
    kept_N = logits_RV[allowed.rows_N, allowed.tokens_N]
    logits_RV[allowed.rows_A] = -torch.inf
    logits_RV[allowed.rows_N, allowed.tokens_N] = kept_N


def _penalize(logits_RV: Tensor, counts: TokenCounts, penalties: Penalties) -> None:
    rows_P, options_P13 = penalties.rows_P, penalties.options_P3.unsqueeze(1)
    counts_PV, guesses_2G = counts.of(penalties.counts_P), penalties.guesses_2G
    twice_G = torch.full_like(guesses_2G[0], 2, dtype=counts_PV.dtype)
    counts_PV.index_put_((guesses_2G[0], guesses_2G[1]), twice_G, accumulate=True)
    logits_RV[rows_P] = _penalized(
        logits_RV[rows_P], counts_PV, options_P13, penalties.has_repetition
    )


def _penalized(logits: Tensor, counts: Tensor, options: Tensor, has_repetition: bool) -> Tensor:
    """The CTRL paper's repetition penalty (Keskar et al., 2019), its sign mended; then OpenAI's.

    The first is on prompt and answer; the others are on each token of the answer, once, and once
    for each occurrence.
    """
    repetition, presence, frequency = options.unbind(-1)
    if has_repetition:
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(counts > 0, repeated, logits)
    occurrences = counts >> 1
    less = frequency * occurrences + presence
    return logits - less.masked_fill_(occurrences == 0, 0.0)
