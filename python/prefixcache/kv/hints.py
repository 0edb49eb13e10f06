"""Retention hints of requests, and of the groups that they come in."""

from __future__ import annotations

from prefixcache.core import PrefixCache
from prefixcache.core import Sequence as CoreSequence
from prefixcache.kv.pins import Pins
from prefixcache.kv.prompt_groups import PromptGroups
from prefixcache.kv.recordings.recording import CacheRecorder, NotRecorded
from prefixcache.types.request import CacheOptions, Request


class Hints:
    """Ranks the blocks of requests as their hints say, until these end.

    `groups` remembers prompts of up to `most_blocks` blocks.
    """

    def __init__(
        self,
        core: PrefixCache,
        recorder: CacheRecorder | NotRecorded,
        pins: Pins,
        *,
        most_blocks: int,
    ) -> None:
        self._core = core
        self._recorder = recorder
        self._pins = pins
        self._expire = False
        self.groups = PromptGroups(core, most_blocks)

    def start(self, request: Request, sequence: CoreSequence) -> None:
        """Ranks the blocks of a new sequence."""
        if request.cache.retention:
            self._set(sequence, request.cache)
        if self._recorder.replays_groups:
            self._expire |= self.groups.join(request, sequence)

    def _set(self, sequence: CoreSequence, cache: CacheOptions) -> None:
        hints = [(r.start, r.end, r.chosen_priority, r.ttl_s) for r in cache.retention]
        sequence.set_hints(cache.retention_owner, hints)
        self._expire |= any(r.ttl_s is not None for r in cache.retention)

    def demote_expired(self) -> None:
        """Gives blocks whose hints ended their default priority, a bounded number at a call."""
        self._recorder.tick()
        if self._expire:
            self._recorder.note("expire")
            self.groups.end_overdue()
            self._core.demote_expired()
            self._pins.keep_share()
        self._recorder.count()
