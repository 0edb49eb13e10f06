"""Random logits and options: what is drawn is likely enough in the float64 reference."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.runner.torch.sampling.sampler import sample
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SamplingInput
from support.plans import context
from unit.torch.test_sampler import reference

VOCAB = 40
tokens = st.integers(0, VOCAB - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 1, 3, 39, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.99, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.6]),
    logit_bias=st.dictionaries(tokens, st.floats(-20, 20), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(20, 30), min_size=1).map(tuple),
    bad_words_token_ids=st.lists(
        st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=4
    ).map(tuple),
)
rows = st.builds(
    SamplingInput,
    params=params,
    seed=st.integers(-(2**63), 2**64 - 1),
    tokens=st.builds(
        context,
        st.lists(tokens, min_size=1, max_size=8),
        st.lists(tokens, max_size=8) | st.lists(st.integers(0, 4), max_size=4),
    ),
    banned_token_ids=st.lists(st.integers(0, 19), max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(batch=st.lists(rows, min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_only_tokens_of_the_reference_are_chosen(batch: list[SamplingInput], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(batch), VOCAB, generator=generator) * 4
    outputs = sample(logits, batch)
    for values, row, output in zip(logits, batch, outputs, strict=True):
        probabilities = reference(values.double().numpy(), row)
        assert output.token_id is not None
        assert probabilities[output.token_id] > 0 or _near_a_cut(values, row, output.token_id)
        alone = sample(values.unsqueeze(0), [row])[0]
        assert alone == output


def _near_a_cut(values: torch.Tensor, row: SamplingInput, token: int) -> bool:
    """float32 and float64 may place a cut on two sides of a token: nudged, it is kept."""
    nudged = values.double().numpy().copy()
    nudged[token] += 1e-4 * np.abs(nudged).max()
    return bool(reference(nudged, row)[token] > 0)
