"""The prompts of the last requests, in bounded memory: who sent what, and how much of it hit."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from prefixcache.diagnostics.spans import PromptSource
from prefixcache.types.request import CacheScope
from prefixcache.types.token_ids import TokenIds

MissReason = Literal[
    "never_seen",
    "different_text",
    "evicted",
    "on_disk",
    "another_salt",
    "weights_changed",
    "cleared",
    "window_lost",
    "no_state",
    "write_refused",
    "tail",
    "prompt_logprobs",
    "cache_read_off",
    "cache_off",
]

Pressure = Literal["capacity", "cached_limit", "shrunk_cache", "unknown"]

# What an entry takes besides tokens and text, in bytes, roughly.
_ENTRY_BYTES = 800
# A trim goes below the limit by this share, so that its cost is spread over what comes next.
_TRIM = 1 / 16
# Neighbours that share equally much: the newest of this many on each side is taken.
_NEIGHBOURS = 32
# A number above those of all entries.
_NEWEST = 1 << 62


@dataclass(frozen=True, slots=True)
class EvictedContent:
    """How the first block that did not hit was evicted.

    By "capacity" it was the next to go when room was needed, by "cached_limit" when more was
    cached than `--prefix-cache-max-blocks`.
    Seconds: `ago_s` since it was evicted, `age_s` from its registration to then, `idle_s` from its
    last use to then; None where it is known only that it was evicted. `hits` counts its uses.
    """

    pressure: Pressure = "unknown"
    ago_s: float | None = None
    age_s: float | None = None
    idle_s: float | None = None
    hits: int | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """The first block that did not hit, and why: the tokens before it did.

    `detail` tells of content that was evicted, where that is the reason.
    """

    hit_tokens: int
    reason: MissReason
    detail: EvictedContent | None = None


@dataclass(frozen=True, slots=True)
class RememberedPrompt:
    """One prompt that was computed.

    `request_id` is the id of the answer, with "-1", "-2" and so on for later prompts of one
    request. `time` is `time.time()` at its arrival, `arrival` the same in `time.monotonic()`.
    `token_ids` is the array that the request shares. `source` is None where no text is kept. `api`
    is "completions", "chat", "responses" or "messages".
    Full blocks of the first `write_upto` tokens were published; `cached_tokens` were hits, those of
    `disk_cached_tokens` on a disk. `miss` is None until the reason has been looked up.
    """

    request_id: str
    time: float
    scope: CacheScope
    model: str
    api: str
    token_ids: TokenIds
    source: PromptSource | None
    prompt_tokens: int
    cached_tokens: int
    miss: Miss | None
    arrival: float = 0.0
    write_upto: int = 0
    disk_cached_tokens: int = 0

    @property
    def text(self) -> str | None:
        """The rendered prompt, where it is kept."""
        return None if self.source is None else self.source.text

    @property
    def num_bytes(self) -> int:
        """The memory that it keeps, roughly; of a view all that it is a part of."""
        base = self.token_ids.base
        tokens = base.nbytes if isinstance(base, np.ndarray) else self.token_ids.nbytes
        return tokens + self.num_own_bytes

    @property
    def num_own_bytes(self) -> int:
        """The memory of all but the tokens, roughly."""
        return _ENTRY_BYTES + (0 if self.source is None else self.source.num_bytes)


def shared_tokens(first: TokenIds, second: TokenIds) -> int:
    """How many leading tokens two prompts share."""
    begin, step, size = 0, 64, min(len(first), len(second))
    while begin < size:
        end = min(begin + step, size)
        differs = first[begin:end] != second[begin:end]
        place = int(differs.argmax())
        if differs[place]:
            return begin + place
        begin, step = end, step * 8
    return size


class PromptHistory:
    """The newest prompts, at most `max_bytes` of them. From any thread.

    Where memory is short the owners with the most give up their oldest prompts, and of theirs the
    salts with the most: who sends much pushes out little of others.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._next_number = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._names: dict[tuple[str | None, str], int] = {}
        self._everything = _Order()
        self._shares: dict[str | None, dict[str | None, _Share]] = {}

    @property
    def num_bytes(self) -> int:
        """The memory taken, roughly."""
        return self._num_bytes

    def remember(self, prompt: RememberedPrompt) -> None:
        """Adds a prompt whose request has ended; one that is larger than a quarter is not kept."""
        size = prompt.num_bytes
        if size > self.max_bytes // 4:
            return
        with self._lock:
            self._add(_Entry(self._next_number, size, prompt))
            self._next_number += 1
            if self._num_bytes > self.max_bytes:
                self._trim(int(self.max_bytes * (1 - _TRIM)))

    def nearest(
        self,
        token_ids: TokenIds,
        scope: CacheScope,
        *,
        sees_all: bool = False,
        before: float = math.inf,
    ) -> tuple[RememberedPrompt, int] | None:
        """The prompt that shares the most leading tokens, and how many; of equals a new one.

        Only what was sent in `scope` is looked at, unless it `sees_all`, and what arrived `before`
        that, in seconds of `time.monotonic`. None where nothing shares a token.
        """
        with self._lock:
            share = self._shares.get(scope.client, {}).get(scope.salt)
            own = None if share is None else share.order
            order = self._everything if sees_all else own
            nearest = None if order is None else order.nearest(token_ids, before)
        return None if nearest is None or not nearest[1] else (nearest[0].prompt, nearest[1])

    def find(self, request_id: str, client: str | None) -> RememberedPrompt | None:
        """The prompt of the answer with that id, which `client` got; None where it is forgotten."""
        with self._lock:
            number = self._names.get((client, request_id))
            return None if number is None else self._entries[number].prompt

    def recent_misses(self, limit: int) -> list[RememberedPrompt]:
        """The newest prompts of which some full block did not hit, the newest first."""
        misses: list[RememberedPrompt] = []
        for prompt in reversed(self.prompts()):
            if len(misses) == limit:
                break
            if prompt.miss is not None and prompt.miss.reason != "tail":
                misses.append(prompt)
        return misses

    def prompts(self) -> list[RememberedPrompt]:
        """All that is remembered, the oldest first."""
        with self._lock:
            return [entry.prompt for entry in self._entries.values()]

    def in_token_order(self) -> list[RememberedPrompt]:
        """All that is remembered: those that share a prefix stand side by side."""
        with self._lock:
            return [entry.prompt for entry in self._everything]

    def _add(self, entry: _Entry) -> None:
        prompt = entry.prompt
        salts = self._shares.setdefault(prompt.scope.client, {})
        salts.setdefault(prompt.scope.salt, _Share()).add(entry)
        self._everything.add(entry)
        self._entries[entry.number] = entry
        self._names[prompt.scope.client, prompt.request_id] = entry.number
        self._num_bytes += entry.size

    def _trim(self, target: int) -> None:
        owners = {
            owner: sum(share.num_bytes for share in salts.values())
            for owner, salts in self._shares.items()
        }
        for owner, most in _above(owners, target):
            self._trim_owner(self._shares[owner], owners[owner], most)
            if not self._shares[owner]:
                del self._shares[owner]

    def _trim_owner(self, salts: dict[str | None, _Share], size: int, most: int) -> None:
        """Forgets the oldest prompts of the largest salts, until all are `most` bytes at most."""
        above = _above({salt: share.num_bytes for salt, share in salts.items()}, most)
        dropped = sorted(entry for salt, level in above for entry in salts[salt].beyond(level))
        for entry in dropped:
            if size <= most:
                return
            size -= entry.size
            share = salts[entry.prompt.scope.salt]
            self._forget(share.pop_oldest())
            if not share.entries:
                del salts[entry.prompt.scope.salt]

    def _forget(self, entry: _Entry) -> None:
        name = entry.prompt.scope.client, entry.prompt.request_id
        if self._names.get(name) == entry.number:
            del self._names[name]
        del self._entries[entry.number]
        self._everything.remove(entry)
        self._num_bytes -= entry.size


class _Entry(NamedTuple):
    number: int
    size: int
    prompt: RememberedPrompt


class _Order:
    """Entries by their tokens: what shares the most with a prompt stands next to its place."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __iter__(self) -> Iterator[_Entry]:
        return iter(self._entries)

    def add(self, entry: _Entry) -> None:
        self._entries.insert(self._place(entry.prompt.token_ids, entry.number), entry)

    def remove(self, entry: _Entry) -> None:
        del self._entries[self._place(entry.prompt.token_ids, entry.number)]

    def nearest(self, token_ids: TokenIds, before: float) -> tuple[_Entry, int] | None:
        """The entry that shares the most leading tokens, and how many."""
        place = self._place(token_ids, _NEWEST)
        lower = self._entries[max(0, place - _NEIGHBOURS) : place][::-1]
        upper = self._entries[place : place + _NEIGHBOURS]
        best: tuple[int, int] | None = None
        chosen: _Entry | None = None
        for side in (lower, upper):
            for entry in side:
                if entry.prompt.arrival >= before:
                    continue
                rank = shared_tokens(token_ids, entry.prompt.token_ids), entry.number
                if best is not None and rank[0] < best[0]:
                    break
                if best is None or rank > best:
                    best, chosen = rank, entry
        return None if best is None or chosen is None else (chosen, best[0])

    def _place(self, token_ids: TokenIds, number: int) -> int:
        """Where an entry of these tokens stands; of equal tokens the newest is first."""
        return bisect_left(
            self._entries, True, key=lambda entry: not _stands_before(entry, token_ids, number)
        )


def _stands_before(entry: _Entry, token_ids: TokenIds, number: int) -> bool:
    own = entry.prompt.token_ids
    shared = shared_tokens(own, token_ids)
    if shared < min(len(own), len(token_ids)):
        return bool(own[shared] < token_ids[shared])
    return (len(own), -entry.number) < (len(token_ids), -number)


@dataclass(slots=True)
class _Share:
    """What one owner sent under one salt."""

    num_bytes: int = 0
    entries: deque[_Entry] = field(default_factory=deque["_Entry"])
    order: _Order = field(default_factory=_Order)

    def add(self, entry: _Entry) -> None:
        self.entries.append(entry)
        self.order.add(entry)
        self.num_bytes += entry.size

    def beyond(self, level: int) -> Iterable[_Entry]:
        """The oldest entries, without which it has `level` bytes at most."""
        size = self.num_bytes
        for entry in self.entries:
            if size <= level:
                return
            yield entry
            size -= entry.size

    def pop_oldest(self) -> _Entry:
        entry = self.entries.popleft()
        self.order.remove(entry)
        self.num_bytes -= entry.size
        return entry


def _above(sizes: Mapping[str | None, int], target: int) -> Iterable[tuple[str | None, int]]:
    """Who is above an equal share, and that share: all get `target` together, or less."""
    level = _equal_share(sorted(sizes.values()), target)
    return [(name, level) for name, size in sizes.items() if size > level]


def _equal_share(sizes: list[int], target: int) -> int:
    """The most that each may keep, so that the ascending `sizes` sum up to `target` at most."""
    if sum(sizes) <= target:
        return sizes[-1] if sizes else 0
    before = [0, *accumulate(sizes)]
    for place, size in enumerate(sizes):
        share = (target - before[place]) // (len(sizes) - place)
        if share < size:
            return max(share, 0)
    return sizes[-1]
