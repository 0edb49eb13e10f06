"""How much of what requests ask for is found in the prefix cache: over a lifetime and lately."""

from __future__ import annotations

from collections import deque

_WINDOW_REQUESTS = 1000


class HitCounter:
    """Counts requests that were looked up, hits among them, and the tokens of both.

    `queries` and `hits` count requests, `queried_tokens` and `hit_tokens` tokens, all over the
    counter's lifetime. The recent ratio is that of the last `window` requests.
    """

    def __init__(self, window: int = _WINDOW_REQUESTS) -> None:
        self.queries = 0
        self.hits = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)

    def add(self, queried: int, hit: int) -> None:
        """Counts one request of `queried` tokens, `hit` of them cached."""
        self.queries += 1
        self.hits += hit > 0
        self.queried_tokens += queried
        self.hit_tokens += hit
        self._recent.append((queried, hit))

    @property
    def num_recent(self) -> int:
        """Requests in the window."""
        return len(self._recent)

    @property
    def recent_ratio(self) -> float:
        """Cached share of the tokens in the window, 0 to 1; 0 when it is empty."""
        recent = self._recent.copy()  # another thread may add to it meanwhile
        queried = sum(queried for queried, _ in recent)
        return sum(hit for _, hit in recent) / queried if queried else 0.0
