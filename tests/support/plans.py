"""Contexts and steps, written out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from prefixcache.types.step_plan import ScheduledSequence, StepPlan
from prefixcache.types.token_ids import TokenBuffer, as_token_ids


def context(prompt: Sequence[int] = (), answer: Iterable[int] = ()) -> TokenBuffer:
    tokens = TokenBuffer(as_token_ids(prompt))
    for token in answer:
        tokens.append(token)
    return tokens


def plan_of(
    sequences: Sequence[ScheduledSequence], token_ids: Sequence[int] | None = None, decodes: int = 0
) -> StepPlan:
    """Of tokens 0 where they do not matter."""
    if token_ids is None:
        token_ids = [0] * sum(sequence.num_tokens for sequence in sequences)
    return StepPlan(tuple(sequences), np.array(token_ids, dtype=np.int32), decodes)
