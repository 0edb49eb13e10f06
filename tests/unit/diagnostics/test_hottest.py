"""The tree of prefixes that prompts share, against one that looks at every length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.diagnostics import evictions
from prefixcache.diagnostics.history import PromptHistory, RememberedPrompt
from prefixcache.diagnostics.hottest import HotPrefix, HotPrefixes
from prefixcache.types.request import CacheScope

BLOCK = 2


def prompt(tokens: list[int], time: float, cached: int, salt: str | None) -> RememberedPrompt:
    return RememberedPrompt(
        request_id=f"request-{time}",
        time=time,
        scope=CacheScope(salt=salt),
        model="tiny",
        api="completions",
        token_ids=np.array(tokens, np.int32),
        source=None,
        prompt_tokens=len(tokens),
        cached_tokens=cached,
        miss=None,
    )


@st.composite
def prompt_lists(draw: st.DrawFn) -> list[RememberedPrompt]:
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    times = range(draw(st.integers(0, 12)))
    cached = st.integers(0, 9)
    salts = st.sampled_from([None, "a"])
    return [prompt(draw(tokens), time, draw(cached), draw(salts)) for time in times]


def in_token_order(prompts: list[RememberedPrompt]) -> list[RememberedPrompt]:
    history = PromptHistory(1 << 20)
    for one in prompts:
        history.remember(one)
    return history.in_token_order()


def facts(nodes: list[HotPrefix]) -> list[Any]:
    """Every node: its tokens, where it starts, and its counts."""
    found: list[Any] = []
    for node in nodes:
        name = node.prompt.scope.salt, tuple(node.prompt.token_ids[: node.tokens].tolist())
        found.append((name, node.start, node.requests, node.hits, node.last_use))
        found += facts(node.children)
    return found


def obvious(prompts: list[RememberedPrompt]) -> set[Any]:
    """A prefix is a node where several prompts have it and do not all go on with one block."""
    users: dict[Any, list[RememberedPrompt]] = {}
    for one in prompts:
        tokens = one.token_ids.tolist()
        for length in range(BLOCK, len(tokens) + 1, BLOCK):
            users.setdefault((one.scope.salt, tuple(tokens[:length])), []).append(one)
    nodes = {
        name: who
        for name, who in users.items()
        if len(who) > 1
        and not any(
            longer[0] == name[0]
            and len(longer[1]) == len(name[1]) + BLOCK
            and longer[1][: len(name[1])] == name[1]
            and len(others) == len(who)
            for longer, others in users.items()
        )
    }
    found: set[Any] = set()
    for (salt, tokens), who in nodes.items():
        above = [
            len(other)
            for scope, other in nodes
            if scope == salt and len(other) < len(tokens) and tokens[: len(other)] == other
        ]
        hits = sum(one.cached_tokens >= len(tokens) for one in who)
        last = max(one.time for one in who)
        found.add(((salt, tokens), max(above, default=0), len(who), hits, last))
    return found


@given(prompt_lists())
def test_the_tree_has_every_shared_prefix(prompts: list[RememberedPrompt]) -> None:
    drawer = HotPrefixes()
    ordered = in_token_order(prompts)
    for _ in range(2):  # the second time from what was counted before
        found = facts(drawer.tree(ordered, BLOCK, 1000))
        assert len(found) == len(set(found))
        assert set(found) == obvious(prompts)


@given(prompt_lists(), st.integers(1, 4))
def test_the_heaviest_stay_with_those_above_them(
    prompts: list[RememberedPrompt], most: int
) -> None:
    ordered = in_token_order(prompts)
    weights = sorted(node.weight for node in _all(HotPrefixes().tree(ordered, BLOCK, 99)))
    kept = [*_all(HotPrefixes().tree(ordered, BLOCK, most))]
    heaviest = sorted(node.weight for node in kept)[-most:]
    assert heaviest == weights[-most:]
    leaves = [node for node in kept if not node.children]
    assert len(leaves) <= most


def _all(nodes: list[HotPrefix]) -> list[HotPrefix]:
    return [one for node in nodes for one in (node, *_all(node.children))]


def test_a_listener_that_fails_does_not_end_the_reading_nor_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(evictions, "_PERIOD", 0.0)
    reads: list[int] = []

    class Failing:
        def read(self) -> None:
            reads.append(1)
            if len(reads) in {1, 2, 4}:
                raise RuntimeError("a listener")

    reader = Failing()
    reference: Any = iter([*[reader] * 4, None]).__next__
    evictions._read_on(reference)
    assert len(reads) == 4
    assert len(caplog.records) == 1, "the same error each time"
