"""Another size of the KV cache, in slices between steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock

from prefixcache.config.checked import shown
from prefixcache.config.engine_parts.flag_values import parse_memory
from prefixcache.engine.commands import EngineState, RunBetweenSteps
from prefixcache.engine.steps import InFlightRequests
from prefixcache.exceptions import InvalidRequestError, OutOfMemoryError, wrong
from prefixcache.kv.elastic import ElasticPool, ResizeStatus


class Resizing:
    """Resizes a pool between the steps of the engine that it serves; from any thread.

    Without a `pool` every call raises `InvalidRequestError`.
    """

    def __init__(
        self,
        requests: InFlightRequests,
        state: EngineState,
        pool: ElasticPool | None,
        run_between_steps: RunBetweenSteps,
    ) -> None:
        self._requests = requests
        self._state = state
        self._pool = pool
        self._run_between_steps = run_between_steps
        self._slicing = Lock()  # else steps would wait for a slice of every caller

    @property
    def pool(self) -> ElasticPool:
        """The pool. Raises `InvalidRequestError` where none can be resized."""
        if self._pool is None:
            raise InvalidRequestError("This engine's KV cache cannot be resized.")
        return self._pool

    def resize(
        self, memory: str | float | None = None, num_blocks: int | None = None
    ) -> ResizeStatus:
        """Gives the KV cache another size, while requests are served; how far that is.

        `memory` is bytes, a size as "2GiB", or a share of what was free at the start; `num_blocks`
        counts the null block. A shrink keeps the blocks that are worth most and takes several
        slices between steps. Of several calls at once the last one to begin decides, and each
        returns the same. Blocks above the end that requests hold go as these end; while the
        engine sleeps all of it waits for `wake_up`. Raises `InvalidRequestError` for a size out of
        range, during an update of the weights, and where there is not as much memory.
        """
        pool = self.pool
        wanted, param = _num_blocks(pool, memory, num_blocks)
        self._run_between_steps(partial(self._begin_resize, pool, wanted, param))
        with self._slicing:
            self._do_slices(pool)
        return pool.status

    def adjust_pool(self, choose: Callable[[ElasticPool], None]) -> None:
        """Lets `choose` change what the pool may hold, and does what follows from it."""
        pool = self.pool
        self._run_between_steps(partial(choose, pool))
        # Never waited for: whoever has it may wait for a lock that this thread holds.
        if self._slicing.acquire(blocking=False):
            try:
                self._do_slices(pool)
            finally:
                self._slicing.release()

    def _begin_resize(self, pool: ElasticPool, num_blocks: int, param: str) -> None:
        if self._state.is_updating:
            raise wrong(
                param,
                "cannot change before end_weight_update has ended the open weight update. "
                f"Allowed then are {pool.sizes.describe()}",
            )
        self._requests.drain()
        try:
            pool.resize(num_blocks)
        except OutOfMemoryError as error:
            raise wrong(param, f"asks for more than there is: {error}") from error

    def _do_slices(self, pool: ElasticPool) -> None:
        """All that are left, with steps between them."""
        while self._run_between_steps(partial(self._advance, pool)):
            pass

    def _advance(self, pool: ElasticPool) -> bool:
        if not pool.has_slices:
            return False
        self._requests.drain()
        return pool.advance()


def _num_blocks(
    pool: ElasticPool, memory: str | float | None, num_blocks: int | None
) -> tuple[int, str]:
    """The size in blocks, and which argument gives it. Raises `InvalidRequestError`."""
    if (memory is None) == (num_blocks is None):
        raise InvalidRequestError("Give either memory or num_blocks.", param="memory")
    if memory is not None:
        try:
            size, param = pool.sizes.blocks_of(parse_memory(memory)), "memory"
        except ValueError as error:
            allowed = f"allowed are {pool.sizes.describe()}"
            raise wrong("memory", f"{error}, got {shown(memory)}; {allowed}") from None
    elif isinstance(num_blocks, bool) or not isinstance(num_blocks, int):
        raise wrong("num_blocks", f"must be an integer, got {shown(num_blocks)}")
    else:
        size, param = num_blocks, "num_blocks"
    pool.check(size, param)
    return size, param
