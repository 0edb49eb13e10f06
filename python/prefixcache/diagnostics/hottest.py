"""Which prefixes the remembered prompts share, as a tree, the most used first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prefixcache.diagnostics.history import RememberedPrompt, TokenIds, shared_tokens
from prefixcache.types.request import CacheScope

# Tokens that two prompts share, by the ids of their arrays.
_Shared = dict[tuple[int, int], tuple[TokenIds, TokenIds, int]]


@dataclass(slots=True)
class HotPrefix:
    """The first `tokens` tokens of several prompts of one owner and salt.

    `requests` have them, `hits` of which found them all in the cache, the newest of all at
    `last_use` (`time.time()`). `prompt` is one of them; the tokens from `start` on are what this
    node adds to the one above. `children` are longer prefixes, by the tokens that they add, times
    the requests.
    """

    tokens: int
    requests: int
    hits: int
    last_use: float
    prompt: RememberedPrompt
    start: int = 0
    children: list[HotPrefix] = field(default_factory=list["HotPrefix"])

    @property
    def weight(self) -> int:
        """Tokens that requests asked for, beyond those of the node above."""
        return self.requests * (self.tokens - self.start)


class HotPrefixes:
    """Draws the tree again and again: what prompts share is counted once for each pair."""

    def __init__(self) -> None:
        self._shared: _Shared = {}

    def tree(
        self, prompts: Iterable[RememberedPrompt], block_size: int, most: int
    ) -> list[HotPrefix]:
        """The `most` prefixes that weigh most, with those above them; the heaviest first.

        `prompts` stand in the order of their tokens. Prefixes are whole blocks, as hits are.
        """
        scopes: dict[CacheScope, list[RememberedPrompt]] = {}
        for prompt in prompts:
            scopes.setdefault(prompt.scope, []).append(prompt)
        before, self._shared = self._shared, {}
        roots = [
            root
            for scope in scopes.values()
            for root in _nodes(scope, self._blocks_shared(scope, block_size, before))
        ]
        for root in roots:
            _set_starts(root)
        return _pruned(roots, most)

    def _blocks_shared(
        self, prompts: Sequence[RememberedPrompt], block_size: int, before: _Shared
    ) -> list[int]:
        """Tokens in the full blocks that neighbours share."""
        counts = [
            self._count(prompt.token_ids, next_one.token_ids, before)
            for prompt, next_one in pairwise(prompts)
        ]
        return [count - count % block_size for count in counts]

    def _count(self, first: TokenIds, other: TokenIds, before: _Shared) -> int:
        pair = id(first), id(other)
        # The arrays are kept with the count, so that their ids stay theirs.
        count = before.get(pair) or (first, other, shared_tokens(first, other))
        self._shared[pair] = count
        return count[2]


def _nodes(prompts: Sequence[RememberedPrompt], shared: Sequence[int]) -> list[HotPrefix]:
    """The top of the tree of sorted prompts, of which neighbours have `shared` tokens in common.

    A node is a run of prompts that share more tokens than its neighbours do with it. It is open
    while the run goes on, and `open_runs` are nested: length, first prompt, children.
    """
    top: list[HotPrefix] = []
    open_runs: list[tuple[int, int, list[HotPrefix]]] = [(0, 0, top)]
    for place, length in enumerate([*shared, 0]):
        first, closed = place, None
        while length < open_runs[-1][0]:
            tokens, first, children = open_runs.pop()
            closed = _node(prompts[first : place + 1], tokens, children)
            if open_runs[-1][0] >= length:
                open_runs[-1][2].append(closed)
                closed = None
        if length > open_runs[-1][0]:
            open_runs.append((length, first, [] if closed is None else [closed]))
    return top


def _node(run: Sequence[RememberedPrompt], tokens: int, children: list[HotPrefix]) -> HotPrefix:
    newest = max(run, key=lambda prompt: prompt.time)
    return HotPrefix(
        tokens=tokens,
        requests=len(run),
        hits=sum(prompt.cached_tokens >= tokens for prompt in run),
        last_use=newest.time,
        prompt=newest,
        children=children,
    )


def _set_starts(root: HotPrefix) -> None:
    for node in _all(root):
        for child in node.children:
            child.start = node.tokens


def _all(root: HotPrefix) -> Iterator[HotPrefix]:
    """A node and all below it, each after the one above. Without recursion: trees may be deep."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


def _pruned(roots: list[HotPrefix], most: int) -> list[HotPrefix]:
    """Leaves the heaviest nodes and those above them."""
    nodes = [node for root in roots for node in _all(root)]
    above = {id(child): node for node in nodes for child in node.children}
    kept: set[int] = set()
    for node in heapq.nlargest(most, nodes, key=lambda node: node.weight):
        prefix: HotPrefix | None = node
        while prefix is not None and id(prefix) not in kept:
            kept.add(id(prefix))
            prefix = above.get(id(prefix))
    for node in nodes:
        node.children = _heaviest_first(child for child in node.children if id(child) in kept)
    return _heaviest_first(root for root in roots if id(root) in kept)


def _heaviest_first(nodes: Iterable[HotPrefix]) -> list[HotPrefix]:
    return sorted(nodes, key=lambda node: node.weight, reverse=True)
