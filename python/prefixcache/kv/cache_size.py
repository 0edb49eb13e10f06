"""How many blocks a cache has, and another number of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from prefixcache.core import PrefixCache
from prefixcache.kv.pins import Pins
from prefixcache.kv.recordings.recording import CacheRecorder, NotRecorded

Blocks = npt.NDArray[np.int32]


class CacheSize:
    """The blocks of one cache. Attributes may be read from any thread.

    `num_blocks` counts the null block, which no request can hold; `num_usable_blocks` does not.
    `attainable_blocks` is what the pool has or can return to by itself; it can be resized up to
    `max_blocks`.
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
        self.max_blocks = most_blocks
        self.attainable_blocks = core.num_blocks
        self._make_room: Callable[[int], bool] = lambda _: False
        self._set_size(core.num_blocks)

    def _set_size(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_usable_blocks = num_blocks - 1
        self._pins.set_size(self.num_usable_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return self._core.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def set_growth(self, make_room: Callable[[int], bool]) -> None:
        """Where the pool grows by itself `make_room` does so, for a number of usable blocks."""
        self._make_room = make_room

    def set_attainable(self, num_blocks: int) -> None:
        """From now on the pool has, or can return by itself to, that number of blocks."""
        self.attainable_blocks = num_blocks

    def make_room(self, num_usable_blocks: int) -> bool:
        """Grows for a request that nothing but this can let start; whether there is room then."""
        return self._make_room(num_usable_blocks)

    def resize(self, num_blocks: int) -> int:
        """Sets the number of blocks; how many above it are held by requests still.

        What is cached above is lost: `move_cached` comes before.
        """
        self._recorder.tick()
        self._recorder.note("resize", blocks=num_blocks)
        held = self._core.resize(num_blocks)
        self._set_size(num_blocks)
        self._pins.keep_share()
        self._recorder.count()
        return held

    def move_cached(
        self, num_blocks: int, max_moves: int, copy: Callable[[Blocks, Blocks], None]
    ) -> int:
        """One slice of a shrink: moves cached blocks that are worth most below the new end.

        They take the place of blocks that would go first; `copy` copies the KV of the first blocks
        to the second ones, and when it raises the content stays where it is. From the first slice
        on no block above the new end is handed out. Returns how many were to be moved: with 0 the
        shrink is ripe for `resize`, and `resize` to the old size takes it back.
        """
        self._recorder.tick()
        moved = False
        try:
            sources, targets = self._core.begin_moves(num_blocks, max_moves)
            self._set_size(num_blocks)
            self._copy(sources, targets, copy)
            moved = True
        finally:
            self._recorder.note("move", blocks=num_blocks, most=max_moves, moved=moved)
        self._recorder.count()
        return len(sources)

    def _copy(
        self, sources: Blocks, targets: Blocks, copy: Callable[[Blocks, Blocks], None]
    ) -> None:
        if not len(sources):
            return
        try:
            copy(sources, targets)
        except BaseException:
            self._core.abort_moves()
            raise
        self._core.finish_moves()
