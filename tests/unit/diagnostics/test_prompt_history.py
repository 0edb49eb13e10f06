"""What is remembered of prompts: the nearest one against a slow search, and memory by shares."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.diagnostics.history import (
    Miss,
    PromptHistory,
    RememberedPrompt,
    shared_tokens,
)
from prefixcache.diagnostics.spans import PromptSource
from prefixcache.types.request import CacheScope

LARGE = 1 << 24


def prompt(
    tokens: Sequence[int],
    *,
    owner: str | None = None,
    salt: str | None = None,
    name: str = "cmpl-1",
    text: str | None = None,
    miss: Miss | None = None,
) -> RememberedPrompt:
    return RememberedPrompt(
        request_id=name,
        time=0.0,
        scope=CacheScope(owner, salt),
        model="m",
        api="completions",
        token_ids=np.array(tokens, np.int32),
        source=None if text is None else PromptSource(text),
        prompt_tokens=len(tokens),
        cached_tokens=0,
        miss=miss,
    )


def slow_shared(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


SENT = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([None, "s", "t"]),
)


@given(st.lists(SENT, max_size=12), SENT, st.booleans())
def test_the_nearest_prompt_is_the_newest_of_those_that_share_the_most(sent, asked, sees_all):
    history = PromptHistory(LARGE)
    for number, (tokens, owner, salt) in enumerate(sent):
        history.remember(prompt(tokens, owner=owner, salt=salt, name=str(number)))
    tokens, owner, salt = asked
    known = [
        (slow_shared(one[0], tokens), number)
        for number, one in enumerate(sent)
        if sees_all or one[1:] == (owner, salt)
    ]
    found = history.nearest(np.array(tokens, np.int32), CacheScope(owner, salt), sees_all=sees_all)
    best = max(known, default=(0, 0))
    assert (found and (found[1], int(found[0].request_id))) == (best if best[0] else None)


@given(st.lists(st.integers(0, 1), max_size=700), st.integers(0, 700))
def test_shared_tokens_of_long_prompts(tokens: list[int], changed: int) -> None:
    other = [*tokens]
    if changed < len(other):
        other[changed] = 2
    arrays = np.array(tokens, np.int32), np.array(other, np.int32)
    assert shared_tokens(*arrays) == slow_shared(tokens, other)


def kept(history: PromptHistory, owner: str | None) -> list[int]:
    return [int(one.request_id) for one in history.prompts() if one.scope.client == owner]


def test_who_sends_much_pushes_out_nothing_of_who_sends_little() -> None:
    history = PromptHistory(64_000)
    history.remember(prompt(range(100), owner="quiet", salt="s", name="0"))
    for number in range(500):
        flood = prompt(
            range(number, number + 100), owner="loud", salt=str(number), name=str(number)
        )
        history.remember(flood)
        assert history.num_bytes <= 64_000
    assert kept(history, "quiet") == [0]
    assert history.find("0", "quiet") is not None
    loud = kept(history, "loud")
    assert len(loud) > 30
    assert history.find(str(loud[-1]), "quiet") is None


def test_within_an_owner_each_salt_has_its_share_and_the_oldest_go() -> None:
    history = PromptHistory(64_000)
    history.remember(prompt(range(50), salt="quiet", name="0"))
    for number in range(500):
        history.remember(prompt(range(number, number + 100), salt="loud", name=str(number)))
    names = [(one.scope.salt, int(one.request_id)) for one in history.prompts()]
    assert names[0] == ("quiet", 0)
    loud = [number for _, number in names[1:]]
    assert loud == list(range(500 - len(loud), 500))
    for number in range(500 - len(loud), 500):
        found = history.nearest(
            np.arange(number, number + 100, dtype=np.int32), CacheScope(salt="loud")
        )
        assert found is not None
        assert found[1] == 100


def test_text_counts_and_what_is_too_large_is_not_kept() -> None:
    history = PromptHistory(40_000)
    history.remember(prompt([1], text="x" * 20_000))
    assert history.prompts() == []
    history.remember(prompt([1], text="\N{SNOWMAN}" * 2000, name="wide"))
    assert history.num_bytes > 4000
    whole = np.arange(100_000, dtype=np.int32)
    history.remember(prompt([1], name="view"))
    assert prompt([]).num_bytes < 1000
    view = prompt([])
    object.__setattr__(view, "token_ids", whole[:3])
    history.remember(view)
    assert [one.request_id for one in history.prompts()] == ["wide", "view"]


def test_recent_misses_leave_out_what_no_cache_could_hold() -> None:
    history = PromptHistory(LARGE)
    reasons = ("never_seen", "tail", "evicted", None, "cleared")
    for number, reason in enumerate(reasons):
        miss = None if reason is None else Miss(0, reason)
        history.remember(prompt([number], name=str(number), miss=miss))
    assert [one.request_id for one in history.recent_misses(2)] == ["4", "2"]
    assert [one.request_id for one in history.recent_misses(9)] == ["4", "2", "0"]


def test_threads_that_remember_and_read_side_by_side() -> None:
    history = PromptHistory(100_000)

    def send(owner: str) -> None:
        for number in range(150):
            tokens = range(number, number + 20)
            history.remember(prompt(tokens, owner=owner, name=str(number)))
            found = history.nearest(np.array(tokens, np.int32), CacheScope(owner))
            assert found is not None
            assert found[0].scope.client == owner

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert history.num_bytes == sum(one.num_bytes for one in history.prompts()) <= 100_000
