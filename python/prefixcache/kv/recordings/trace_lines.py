"""The lines of a recording, made of its events: docs/reference/recording.md has both formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prefixcache._core import BlockPseudonyms
from prefixcache.kv.recordings.record_writer import line
from prefixcache.types.request import CacheOptions, Request

VERSION = 1

Event = tuple[str, int, dict[str, Any]]
"""What happened, its milliseconds since the start, and the arguments of the call."""

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

    def __init__(
        self, number: int, request: Request, hashed: bool, pseudonyms: BlockPseudonyms
    ) -> None:
        prompt = request.prompt_token_ids
        self.number = number
        self.num_prompt_tokens = len(prompt)
        self._pseudonyms = pseudonyms
        self._is_named = hashed
        chain, self._names = pseudonyms.begin(request.cache.salt), ""
        if hashed:
            chain, self._names = pseudonyms.extend(chain, prompt)
        num_full = len(prompt) // pseudonyms.block_size * pseudonyms.block_size
        self._prompt = chain, prompt[num_full:].tolist()
        self.restart()

    def restart(self) -> None:
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
        if len(self._rest) == self._pseudonyms.block_size:
            self._chain, name = self._pseudonyms.extend(self._chain, self._rest)
            self._names += name
            self._rest.clear()

    def take_names(self) -> str:
        """Names of blocks that no line has yet."""
        names, self._names = self._names, ""
        return names


class TraceLines:
    """Makes the lines of one recording, with numbers for requests and names for blocks.

    `last_ms` is the time of the last event.
    """

    def __init__(self, pseudonyms: BlockPseudonyms) -> None:
        self._pseudonyms = pseudonyms
        self._requests: dict[str, _Recorded] = {}
        self._num_requests = 0
        self.last_ms = 0
        # Of the other kinds the details stand in the line as they are.
        self._makers: dict[str, Callable[..., dict[str, Any] | None]] = {
            "add": self._add,
            "restart": self._restart,
            "start": self._start,
            "slots": self._slots,
            "snapshots": self._snapshots,
            "tokens": self._tokens,
            "publish": self._publish,
            "anchor": self._anchor,
            "drop": self._slots,
            "preempt": self._preempt,
            "end": self._end,
            "counters": _counters,
        }

    def of(self, event: Event) -> str:
        """The line of an event; empty for tokens of answers, named once they fill a block."""
        kind, self.last_ms, details = event
        made = self._makers.get(kind, dict[str, Any])(**details)
        return "" if made is None else line({"e": kind, "t": self.last_ms} | made)

    def _numbers(self, request_ids: Iterable[str]) -> list[int]:
        return [self._requests[request_id].number for request_id in request_ids]

    def _add(self, request: Request, hashed: bool) -> dict[str, Any]:
        recorded = _Recorded(self._num_requests, request, hashed, self._pseudonyms)
        self._requests[request.request_id] = recorded
        self._num_requests += 1
        fields: dict[str, Any] = {"id": recorded.number, "tokens": recorded.num_tokens}
        fields |= {"names": recorded.take_names()} if hashed else {"hashed": False}
        return fields | _options(request.cache, self._pseudonyms) | _facts(request)

    def _restart(self, request_id: str) -> dict[str, Any]:
        recorded = self._requests[request_id]
        recorded.take_names()
        recorded.restart()
        return {"id": recorded.number}

    def _start(self, request_id: str, hit: int, new: int, chunk: int | None) -> dict[str, Any]:
        recorded = self._requests[request_id]
        fields: dict[str, Any] = {"id": recorded.number, "tokens": recorded.num_tokens}
        fields |= {"hit": hit, "new": new}
        if names := recorded.take_names():
            fields["names"] = names
        if chunk is not None:
            fields["chunk"] = chunk
        return fields

    def _slots(self, wanted: Sequence[tuple[str, int]]) -> dict[str, Any]:
        return {
            "ids": self._numbers(request_id for request_id, _ in wanted),
            "upto": [upto for _, upto in wanted],
        }

    def _snapshots(self, starts: Sequence[tuple[str, int]]) -> dict[str, Any]:
        return {
            "ids": self._numbers(request_id for request_id, _ in starts),
            "from": [start for _, start in starts],
        }

    def _tokens(self, sampled: Mapping[str, int]) -> None:
        for request_id, token in sampled.items():
            self._requests[request_id].add_token(token)

    def _publish(self, request_ids: Sequence[str], upto: Sequence[int]) -> dict[str, Any]:
        recorded = [self._requests[request_id] for request_id in request_ids]
        return {
            "ids": [request.number for request in recorded],
            "upto": upto,
            "names": [request.take_names() for request in recorded],
        }

    def _anchor(self, request_id: str, at: int) -> dict[str, Any]:
        return {"id": self._requests[request_id].number, "at": at}

    def _preempt(self, request_ids: Sequence[str]) -> dict[str, Any]:
        return {"ids": self._numbers(request_ids)}

    def _end(self, request_ids: Sequence[str], well: frozenset[str]) -> dict[str, Any]:
        ended = [self._requests.pop(request_id) for request_id in request_ids]
        return {
            "ids": [request.number for request in ended],
            "tokens": [request.num_tokens for request in ended],
            "well": [request_id in well for request_id in request_ids],
        }


def _options(cache: CacheOptions, pseudonyms: BlockPseudonyms) -> dict[str, Any]:
    """What a request says of its cache, as far as it is not the default."""
    fields: dict[str, Any] = {}
    if cache.retention:
        fields["hints"] = [(r.start, r.end, r.chosen_priority, r.ttl_s) for r in cache.retention]
        # Another salt of the same key names the owner, so equal owners look equal.
        fields["owner"] = pseudonyms.begin("owner:" + cache.retention_owner).hex()[:16]
    if cache.write_upto is not None:
        fields["write_upto"] = cache.write_upto
    if not cache.write:
        fields["write"] = False
    return fields


def _facts(request: Request) -> dict[str, Any]:
    """What decides when a request runs and ends, and who wrote its prompt: for simulations."""
    fields: dict[str, Any] = {}
    if request.params.max_tokens is not None:
        fields["max_tokens"] = request.params.max_tokens
    if request.priority:
        fields["priority"] = request.priority
    if request.roles:
        fields["roles"] = request.roles
    return fields


def _counters(stats: Mapping[str, int]) -> dict[str, Any]:
    return {name: stats[counter] for name, counter in _COUNTERS.items()}
