"""The order in which requests start where long hits go first.

Priority and the turns of clients stand above hits: which client starts how many requests is decided
as without them (`queue.py`), so nobody gains turns by sending hits. Of the requests that may start
in this round, the one with the longest hit does: among several with the same length, those with the
same prefix as the one before, so that few prefixes are in use at a time. Hits are counted again
for each start, over the first `WINDOW` requests in order.

A request that has waited `max_delay` seconds is a barrier: nobody behind it in order goes
before it any more. It starts after as many others as if hits did not count, which without clients
and jobs of several requests means: after those alone that came earlier. Only a request that ran
before and was preempted goes ahead of it, since it had its start already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from prefixcache.scheduler.queue import Line
from prefixcache.scheduler.state import Order, RequestState

WINDOW = 64
"""Requests whose hits are counted for one start: about 0.1 ms."""


class LongestHits:
    """The ranking in which long hits go first.

    `count_hits` returns how many tokens of a request hit now, `prefix_name` a key of its first `n`
    tokens, `clock` seconds.
    """

    def __init__(
        self,
        *,
        count_hits: Callable[[RequestState], int],
        prefix_name: Callable[[RequestState, int], bytes | None],
        max_delay: float,
        clock: Callable[[], float],
    ) -> None:
        self._count_hits = count_hits
        self._prefix_name = prefix_name
        self._max_delay = max_delay
        self._clock = clock
        self._ranked: list[tuple[int, RequestState]] = []  # with their hits, the next one last
        self._last_prefix: bytes | None = None

    def push(self, state: RequestState) -> Order:
        """Lets the request wait, from its first time on; returns where it stands in its line.

        Whoever waited for blocks and never ran has a round, but goes back among the others.
        """
        if state.waits_since is None:
            state.waits_since = self._clock()
        self._ranked.clear()
        if _has_run(state):
            return state.order
        priority, _, turn, arrival, serial = state.order
        return (priority, sys.maxsize, turn, arrival, serial)

    def head(self, lines: Sequence[Line]) -> RequestState | None:
        """The request to start next, or None."""
        if not self._ranked:
            self._ranked = self._rank(list(self._candidates(lines)))
        return self._ranked[-1][1] if self._ranked else None

    def take(self, state: RequestState) -> None:
        """What `head` returned starts; its prefix goes on."""
        hits, _ = self._ranked.pop()
        if hits:
            self._last_prefix = self._prefix_name(state, hits)

    def forget(self) -> None:
        """Lets hits be counted again for the next start."""
        self._ranked.clear()

    def _candidates(self, lines: Sequence[Line]) -> Iterator[RequestState]:
        """Those who may start next, in the order without hits, up to one that nobody passes."""
        lines = sorted(lines, key=Line.order)
        lines = [line for line in lines if line.order()[:2] == lines[0].order()[:2]]
        overdue = self._clock() - self._max_delay
        for line in lines[:WINDOW]:
            for _, state in line.entries[: max(1, WINDOW // len(lines))]:
                yield state
                if _has_run(state) or (state.waits_since or 0) <= overdue:
                    return

    def _rank(self, states: list[RequestState]) -> list[tuple[int, RequestState]]:
        """Those to start, the next one last."""
        if len(states) <= 1 or _has_run(states[-1]):
            return [(0, state) for state in states[-1:]]
        states.reverse()
        ranked = sorted(((self._count_hits(s), s) for s in states), key=lambda pair: pair[0])
        most = ranked[-1][0]
        first = next(i for i, (hits, _) in enumerate(ranked) if hits == most)
        if most and len(ranked) - first > 1:
            ranked[first:] = sorted(ranked[first:], key=self._is_of_last_prefix)
        return ranked

    def _is_of_last_prefix(self, ranked: tuple[int, RequestState]) -> bool:
        hits, state = ranked
        return self._prefix_name(state, hits) == self._last_prefix


def _has_run(state: RequestState) -> bool:
    return state.num_cached_tokens is not None
