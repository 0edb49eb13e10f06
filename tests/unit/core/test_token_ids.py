"""Token ids in one array: what is taken, and a buffer whose views never change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.exceptions import InvalidRequestError
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.token_ids import TokenBuffer, as_token_ids

ids = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize(
    "given",
    [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2]), np.array([3, 1, 2], np.uint32), range(3, 6)],
)
def test_lists_and_arrays_become_one_dense_array(given: Any) -> None:
    token_ids = as_token_ids(given)
    assert token_ids.tolist() == list(given)
    assert token_ids.dtype == np.int32
    assert token_ids.flags.c_contiguous
    assert as_token_ids(token_ids) is token_ids


def test_an_array_that_its_owner_may_change_is_copied() -> None:
    mine = np.array([1, 2, 3], dtype=np.int32)
    request = Request(request_id="a", prompt_token_ids=mine, params=SamplingParams())
    mine[0] = -5
    assert request.prompt_token_ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        request.prompt_token_ids[0] = 4
    every_second = as_token_ids(np.arange(6, dtype=np.int32)[::2])
    assert (every_second.tolist(), every_second.flags.c_contiguous) == ([0, 2, 4], True)


def test_requests_share_an_array() -> None:
    shared = as_token_ids([1, 2])
    both = [Request(request_id=i, prompt_token_ids=shared, params=SamplingParams()) for i in "ab"]
    assert both[0].prompt_token_ids is both[1].prompt_token_ids


@pytest.mark.parametrize(
    "wrong", [[1.0], ["1"], [None], [[1]], [[1], [2, 3]], 7, None, np.ones((2, 2), dtype=np.int32)]
)
def test_what_is_no_list_of_integers_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be integers") as caught:
        as_token_ids(wrong)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("wrong", [-(2**31) - 1, 2**31, 2**62])
def test_an_id_that_no_vocabulary_has_is_named(wrong: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"token id {wrong}, which no") as caught:
        as_token_ids([5, wrong])
    assert caught.value.param == "prompt"


@given(prompt=st.lists(ids, max_size=9), answers=st.lists(st.lists(ids, max_size=60), max_size=4))
def test_views_of_a_buffer_never_change(prompt: list[int], answers: list[list[int]]) -> None:
    tokens = TokenBuffer(as_token_ids(prompt))
    seen: list[tuple[np.ndarray, list[int]]] = []
    for answer in answers:
        for length, token in enumerate(answer):
            seen.append((tokens.known, [*prompt, *answer[:length]]))
            tokens.append(token)
        assert tokens.known.tolist() == [*prompt, *answer]
        assert [tokens.at(i) for i in range(len(tokens))] == [*prompt, *answer]
        assert (tokens.prompt.tolist(), tokens.answer.tolist()) == (prompt, answer)
        seen.append((tokens.answer, answer))
        tokens.forget_answer()
    assert (len(tokens), tokens.known.tolist()) == (len(prompt), prompt)
    assert all(view.tolist() == then for view, then in seen)
