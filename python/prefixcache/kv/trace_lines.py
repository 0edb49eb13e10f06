"""The lines of a recording, made of its events: docs/recording.md has the form of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prefixcache._core import BlockNamer
from prefixcache.types.request import CacheOptions, Request

VERSION = 1

Event = tuple[Any, ...]
"""What happened, its milliseconds since the start, and what it happened to."""

_COUNTERS = {
    "queries": "queries",
    "hits": "hits",
    "evictions": "evictions",
    "allocations": "allocations",
    "touches": "touches",
    "pins": "pins",
    "demotions": "demotions",
    "moved": "moved_blocks",
    "lost_to_resize": "lost_to_resize_blocks",
    "cached": "cached_blocks",
    "in_use": "blocks_in_use",
}


class _Recorded:
    """A request: its number, and the names of its blocks as its tokens become known."""

    def __init__(self, number: int, request: Request, hashed: bool, namer: BlockNamer) -> None:
        prompt = request.prompt_token_ids
        self.number = number
        self.num_prompt_tokens = len(prompt)
        self._namer = namer
        self._is_named = hashed
        chain, self._names = namer.begin(request.cache.salt), ""
        if hashed:
            chain, self._names = namer.extend(chain, prompt)
        num_full = len(prompt) // namer.block_size * namer.block_size
        self._prompt = chain, prompt[num_full:].tolist()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets what followed the prompt."""
        self._chain, rest = self._prompt
        self._rest = list(rest)
        self.num_tokens = self.num_prompt_tokens

    def add_token(self, token: int) -> None:
        """Names the block that the token fills, if it fills one."""
        self.num_tokens += 1
        if not self._is_named:
            return
        self._rest.append(token)
        if len(self._rest) == self._namer.block_size:
            self._chain, name = self._namer.extend(self._chain, self._rest)
            self._names += name
            self._rest.clear()

    def take_names(self) -> str:
        """Names of blocks that were not told yet."""
        names, self._names = self._names, ""
        return names


class TraceLines:
    """Makes the lines of one recording, with numbers for requests and names for blocks.

    `last_ms` is the time of the last event.
    """

    def __init__(self, namer: BlockNamer, *, publishes_answers: bool) -> None:
        self._namer = namer
        self._publishes_answers = publishes_answers
        self._requests: dict[str, _Recorded] = {}
        self._num_requests = 0
        self.last_ms = 0
        self._makers: dict[str, Callable[..., dict[str, Any] | None]] = {
            "add": self._add,
            "restart": self._restart,
            "start": self._start,
            "slots": self._slots,
            "tokens": self._tokens,
            "publish": self._publish,
            "anchor": self._anchor,
            "drop": self._slots,
            "demote": _named("count"),
            "preempt": self._preempt,
            "end": self._end,
            "expire": _named(),
            "reset": _named(),
            "weights": _named(),
            "resize": _named("blocks"),
            "move": _named("blocks", "most", "moved"),
            "counters": _counters,
        }

    def of(self, event: Event) -> list[str]:
        """The line of an event; none for tokens of answers, told once they have filled a block."""
        kind, self.last_ms, *details = event
        told = self._makers[kind](*details)
        return [] if told is None else [line({"e": kind, "t": self.last_ms} | told)]

    def _numbers(self, request_ids: Iterable[str]) -> list[int]:
        return [self._requests[request_id].number for request_id in request_ids]

    def _add(self, request: Request, hashed: bool) -> dict[str, Any]:
        recorded = _Recorded(self._num_requests, request, hashed, self._namer)
        self._requests[request.request_id] = recorded
        self._num_requests += 1
        told: dict[str, Any] = {"id": recorded.number, "tokens": recorded.num_tokens}
        told |= {"names": recorded.take_names()} if hashed else {"hashed": False}
        return told | _options(request.cache, self._namer) | _facts(request)

    def _restart(self, request: Request, _hashed: bool) -> dict[str, Any]:
        recorded = self._requests[request.request_id]
        recorded.take_names()
        recorded.begin_anew()
        return {"id": recorded.number}

    def _start(self, request_id: str, hit: int, new: int, chunk: int | None) -> dict[str, Any]:
        recorded = self._requests[request_id]
        told: dict[str, Any] = {"id": recorded.number, "tokens": recorded.num_tokens}
        told |= {"hit": hit, "new": new}
        if names := recorded.take_names():
            told["names"] = names
        if chunk is not None:
            told["chunk"] = chunk
        return told

    def _slots(self, wanted: Sequence[tuple[str, int]]) -> dict[str, Any]:
        return {
            "ids": self._numbers(request_id for request_id, _ in wanted),
            "upto": [upto for _, upto in wanted],
        }

    def _tokens(self, sampled: Mapping[str, int]) -> None:
        for request_id, token in sampled.items():
            self._requests[request_id].add_token(token)

    def _publish(self, request_ids: Sequence[str], upto: Sequence[int]) -> dict[str, Any]:
        recorded = [self._requests[request_id] for request_id in request_ids]
        if not self._publishes_answers:
            upto = [
                min(one.num_prompt_tokens, end) for one, end in zip(recorded, upto, strict=True)
            ]
        return {
            "ids": [one.number for one in recorded],
            "upto": upto,
            "names": [one.take_names() for one in recorded],
        }

    def _anchor(self, request_id: str, at: int) -> dict[str, Any]:
        return {"id": self._requests[request_id].number, "at": at}

    def _preempt(self, request_ids: Sequence[str]) -> dict[str, Any]:
        return {"ids": self._numbers(request_ids)}

    def _end(self, request_ids: Sequence[str], well: frozenset[str]) -> dict[str, Any]:
        ended = [self._requests.pop(request_id) for request_id in request_ids]
        return {
            "ids": [one.number for one in ended],
            "tokens": [one.num_tokens for one in ended],
            "well": [request_id in well for request_id in request_ids],
        }


def _named(*names: str) -> Callable[..., dict[str, Any]]:
    """For an event whose details stand in the line as they are, under these names."""

    def told(*details: int) -> dict[str, Any]:
        return dict(zip(names, details, strict=True))

    return told


def line(told: Mapping[str, Any]) -> str:
    """A whole line of a recording."""
    return json.dumps(told, separators=(",", ":")) + "\n"


def _options(cache: CacheOptions, namer: BlockNamer) -> dict[str, Any]:
    """What a request says of its cache, as far as it is not the default."""
    told: dict[str, Any] = {}
    if cache.retention:
        told["hints"] = [(r.start, r.end, r.chosen_priority, r.ttl_s) for r in cache.retention]
        # Another salt of the same key names the owner, so equal owners look equal.
        told["owner"] = namer.begin("owner:" + cache.retention_owner).hex()[:16]
    if cache.write_upto is not None:
        told["write_upto"] = cache.write_upto
    if not cache.write:
        told["write"] = False
    return told


def _facts(request: Request) -> dict[str, Any]:
    """What decides when a request runs and ends, and who wrote its prompt: for simulations."""
    told: dict[str, Any] = {}
    if request.params.max_tokens is not None:
        told["max_tokens"] = request.params.max_tokens
    if request.priority:
        told["priority"] = request.priority
    if request.roles:
        told["roles"] = request.roles
    return told


def _counters(stats: Mapping[str, int]) -> dict[str, Any]:
    return {name: stats[counter] for name, counter in _COUNTERS.items()}
