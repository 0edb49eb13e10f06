"""Prompts that the cache keeps until the group of requests that share them ends.

A group raises the blocks of its prompts whenever a request gives them back, as a retention hint
does, and against a budget of the same size: the group's is apart from the client's own hints. The
hint ends with the group, or `GROUP_TTL` seconds after the last use.

Several groups may raise one prefix. It goes on being raised until the last of them ends, since what
follows it must never be worth more than the prefix is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prefixcache.core import PrefixCache
from prefixcache.core import Sequence as CoreSequence
from prefixcache.types.request import Request
from prefixcache.types.retention_range import TTL_PRIORITY

GROUP_TTL = 300.0

_Name = tuple[str | None, ...]


@dataclass(slots=True)
class _Prompt:
    """What a group has raised: the blocks of a prompt, each an owner and a hash."""

    owner: str
    sequence: CoreSequence
    blocks: list[tuple[str, bytes]]


@dataclass(slots=True)
class _Group:
    owner: str
    size: int | None
    num_present: int = 0
    num_ended: int = 0
    prompts: set[bytes] = field(default_factory=set[bytes])

    @property
    def has_ended(self) -> bool:
        """Whether as many requests have come as there are, and gone."""
        return not self.num_present and self.size is not None and self.num_ended >= self.size


class PromptGroups:
    """The groups of one cache; `clock` tells seconds. One thread makes all calls.

    Prompts of up to `most_blocks` blocks are remembered, so that they can end; beyond that those
    that were noted first end at once.
    """

    def __init__(
        self,
        cache: PrefixCache,
        most_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._most_blocks = most_blocks
        self._clock = clock
        self._groups: dict[_Name, _Group] = {}
        self._idle: dict[_Name, float] = {}  # by the time when they end
        self._members: dict[str, tuple[_Group, Request]] = {}
        self._prompts: dict[tuple[_Name, bytes], _Prompt] = {}
        self._num_blocks = 0
        self._num_raising: Counter[tuple[str, bytes]] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def join(self, request: Request, sequence: CoreSequence) -> bool:
        """A request of a group has come; whether what it gives back is kept for the others."""
        named = request.group
        if named is None or not request.cache.write or request.cache.retention:
            return False
        group = self._groups.get(named.name)
        if group is None:
            owner = f"{request.cache.retention_owner}\0groups"
            group = self._groups[named.name] = _Group(owner, named.size)
        self._idle.pop(named.name, None)
        if request.request_id not in self._members:  # else its answer begins again
            group.num_present += 1
            self._members[request.request_id] = (group, request)
        end = len(request.prompt_token_ids)
        sequence.set_hints(group.owner, [(0, end, TTL_PRIORITY, GROUP_TTL)])
        return True

    def note_released(
        self, request_ids: Iterable[str], sequences: Mapping[str, CoreSequence]
    ) -> None:
        """These requests have given their blocks back, and raised them so."""
        if not self._members:
            return
        for request_id in request_ids:
            if request_id in self._members:
                self._note_raised(*self._members[request_id], sequences[request_id])

    def _note_raised(self, group: _Group, request: Request, sequence: CoreSequence) -> None:
        assert request.group is not None
        count = len(request.prompt_token_ids) // self._cache.block_size
        hashes = sequence.block_hashes(0, count)
        if not hashes or hashes[-1] in group.prompts:
            return
        # A copy: the request's own sequence is hashed again under new weights.
        kept = sequence.at_version(sequence.weight_version)
        if kept is None:
            return  # other weights have come since, and everything was forgotten
        prompt = _Prompt(group.owner, kept, [(group.owner, block_hash) for block_hash in hashes])
        group.prompts.add(hashes[-1])
        self._prompts[request.group.name, hashes[-1]] = prompt
        self._num_blocks += count
        self._num_raising.update(prompt.blocks)
        while self._num_blocks > self._most_blocks:
            name, last = next(iter(self._prompts))
            self._groups[name].prompts.discard(last)
            self._end_prompt(name, last)
            if not self._groups[name].prompts and name in self._idle:
                del self._idle[name], self._groups[name]

    def leave(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, whether they ever started or not."""
        for request_id in request_ids:
            if request_id in self._members:
                self._leave(*self._members.pop(request_id))

    def _leave(self, group: _Group, request: Request) -> None:
        assert request.group is not None
        name = request.group.name
        group.num_present -= 1
        group.num_ended += 1
        if group.has_ended or not (group.num_present or group.prompts):
            self._end(name)
        elif not group.num_present:
            self._idle[name] = self._clock() + GROUP_TTL

    def end_overdue(self) -> None:
        """Ends groups of which nothing was heard for `GROUP_TTL` seconds."""
        now = self._clock() if self._idle else 0.0
        while self._idle and next(iter(self._idle.values())) <= now:
            name = next(iter(self._idle))
            del self._idle[name]
            self._end(name)

    def _end(self, name: _Name) -> None:
        for last in self._groups.pop(name).prompts:
            self._end_prompt(name, last)

    def _end_prompt(self, name: _Name, last: bytes) -> None:
        """Ends the hints of a prompt, but for what other prompts raise still."""
        prompt = self._prompts.pop((name, last))
        self._num_blocks -= len(prompt.blocks)
        self._num_raising.subtract(prompt.blocks)
        raised = next(
            (place for place, block in enumerate(prompt.blocks) if not self._num_raising[block]),
            len(prompt.blocks),
        )
        for block in prompt.blocks[raised:]:
            del self._num_raising[block]
        self._cache.end_hints(prompt.owner, prompt.sequence, raised)
