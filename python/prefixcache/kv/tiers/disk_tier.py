"""A tier of blocks on a disk, behind the ones in memory.

The pool copies what it evicts into a bounded queue (`BlockStaging`), and a thread of the tier puts
it into a `BlockStore`, some blocks before they are evicted. A request whose next blocks are there
waits in a `Load` until that thread has read them into blocks that the request holds. The thread
reads before it writes. When the store fails, the tier is idle for a while and then opens it again:
no answer depends on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from prefixcache._core import BlockStaging
from prefixcache.config.logs import RecurringError
from prefixcache.config.private_folder import NotUsableError
from prefixcache.kv.tiers.disk_store import BlockStore
from prefixcache.metrics import DiskCounts

logger = logging.getLogger(__name__)

_GROUP = b"\0\0"
_KEY_BYTES = 34
_RUN_BYTES = 4 << 20
_MOST_IN_RUN = 128
_RETRY_SECONDS = 60.0
_FORGET_SECONDS = 1.0
_QUIET_SECONDS, _CLOSE_SECONDS = 0.5, 5.0
_NEW = 0.3
"""Weight of the last run of blocks in the average of what a block takes."""
_PATIENCE = 1.05
"""How much faster the disk is taken to be after each load that it was too slow for."""


def block_key(block_hash: bytes) -> bytes:
    """The tier's key of a block of the first group."""
    return block_hash + _GROUP


class Load:
    """Blocks of one request that are being read. `num_loaded` leading ones are there.

    Behind one that is lost the others are read too, so that all that are lost are known at once:
    `num_read` of them were looked at. Between its start and `is_done`, or the return of `cancel`,
    the tier writes to the blocks.
    """

    def __init__(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        self.blocks = blocks
        self.keys = keys
        self.num_loaded = 0
        self.num_read: int = 0
        self.is_done = False
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Ends it with what is there. Waits for the copy of a few blocks, never for the disk."""
        with self._lock:
            self.is_done = True

    def fill(
        self, staging: BlockStaging, values: Sequence[bytes], *, misses_next: bool
    ) -> list[bytes]:
        """Writes the next values to their blocks; `misses_next` if the block after them is missing.

        Returns the keys of what is missing or damaged; none where the load has ended.
        """
        lost: list[bytes] = []
        with self._lock:
            if self.is_done:
                return lost
            while values:
                part = slice(self.num_read, self.num_read + len(values))
                filled = staging.fill(self.blocks[part], self.keys[part], values)
                if self.num_loaded == self.num_read:
                    self.num_loaded += filled
                self.num_read += filled
                if filled < len(values):
                    lost.append(self._skip())
                values = values[filled + 1 :]
            if misses_next:
                lost.append(self._skip())
            self.is_done = self.num_read == len(self.blocks)
        return lost

    def _skip(self) -> bytes:
        self.num_read += 1
        return self.keys[self.num_read - 1]


class DiskSpeed:
    """How long the disk takes for a block, as runs of blocks were read and loads were late."""

    def __init__(self) -> None:
        self._block_seconds = 0.0

    def seconds(self, num_blocks: int) -> float:
        """How long that number of blocks will take; 0 until one was measured."""
        return num_blocks * self._block_seconds

    def note_read(self, block_seconds: float) -> None:
        """Learns from blocks that were read, and how long each took."""
        weight = _NEW if self._block_seconds else 1.0
        self._block_seconds += weight * (block_seconds - self._block_seconds)

    def note_refused(self) -> None:
        """A load would have taken too long: after many of them the disk is tried again."""
        self._block_seconds /= _PATIENCE

    def note_late(self, num_blocks: int, seconds: float) -> None:
        """Learns from a load that took too long, whether or not anything of it came."""
        self._block_seconds = max(self._block_seconds, seconds / num_blocks)


class Clearing:
    """Ends generations of a store for each clear of the cache, in a thread that nothing else uses.

    `store_era` is the clear after which the store's own thread has emptied it, which it does with
    `lock`. `void_store` ends the store's generation, whether it is open or not.
    """

    def __init__(
        self,
        staging: BlockStaging,
        void_store: Callable[[], None],
        name: str,
        changed: threading.Condition,
    ) -> None:
        self._staging = staging
        self._void_store = void_store
        self._name = name
        self._changed = changed
        self._is_running = False
        self._void_era = 0
        self.store_era = 0
        self.lock = threading.Lock()

    def wait(self) -> None:
        """Until all that was cleared is void; `_FORGET_SECONDS` at most for a disk that hangs."""
        with self._changed:
            if not self._is_running:
                threading.Thread(target=self._run, name="disk-clear", daemon=True).start()
                self._is_running = True
            if not self._changed.wait_for(self._is_void, _FORGET_SECONDS):
                logger.warning(
                    "The disk of %s does not answer: a process that begins before it has may find "
                    "what was cleared.",
                    self._name,
                )

    def note_cleared(self, era: int) -> None:
        """The store's thread has emptied it."""
        with self._changed:
            self.store_era = era
            self._changed.notify_all()

    def _is_void(self) -> bool:
        return self._staging.era in (self.store_era, self._void_era)

    def _run(self) -> None:
        """Ends generations until all that was cleared is unfindable."""
        while (era := self._next_era()) is not None:
            try:
                with self.lock:
                    if self.store_era != era:
                        self._void_store()
            except Exception as error:  # noqa: BLE001 - who clears waits for this thread
                logger.warning("The disk tier in %s could not be cleared: %s.", self._name, error)
            with self._changed:
                self._void_era = era
                self._changed.notify_all()

    def _next_era(self) -> int | None:
        with self._changed:
            self._is_running = not self._is_void()
            return self._staging.era if self._is_running else None


class DiskTier:
    """Blocks of one pool on a disk, each with `block_bytes`.

    `open_store` is called by the tier's thread, again after a failure; `void_store` is that of
    `Clearing`; `name` says where it is; `before_load` is called before the tier's thread writes to
    blocks. One thread makes all calls but `count` and `counts`.
    """

    def __init__(
        self,
        staging: BlockStaging,
        open_store: Callable[[], BlockStore],
        void_store: Callable[[], None],
        *,
        block_bytes: int,
        name: str,
        before_load: Callable[[Sequence[int]], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.staging = staging
        self._open_store = open_store
        self._before_load = before_load
        self._run_blocks = max(1, min(_MOST_IN_RUN, _RUN_BYTES // block_bytes))
        self._name = name
        self._clock = clock
        self._store: BlockStore | None = None
        self._is_listed = self._is_failing = False
        self._retry_at = clock()
        self._changed = threading.Condition()
        self._clearing = Clearing(staging, void_store, name, self._changed)
        self._loads: deque[Load] = deque()
        self.speed = DiskSpeed()
        self._stopped = False
        self._num_written = self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="disk-tier", daemon=True)

    def start(self) -> None:
        """Opens the store, in the tier's thread; what is evicted is copied by now."""
        self._thread.start()

    def close(self, *, waits: bool = True) -> None:
        """Waits until what was copied is written, a few seconds at most, if it `waits` at all."""
        self._stopped = True
        self._wake()
        if waits and self._is_behind(_QUIET_SECONDS):
            logger.info(
                "Evicted blocks are written to the disk of %s, for %g seconds at most; Ctrl-C ends "
                "that at once.",
                self._name,
                _CLOSE_SECONDS,
            )
            if self._is_behind(_CLOSE_SECONDS):
                logger.warning("The disk of %s is too slow: some blocks are lost.", self._name)

    def _is_behind(self, seconds: float) -> bool:
        """Whether the thread goes on for longer than that."""
        if self._thread.is_alive():
            self._thread.join(seconds)
        return self._thread.is_alive()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def nudge(self) -> None:
        """Lets the thread look whether there are blocks to write. After each step."""
        if self.staging.has_staged:
            self._wake()

    def count(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of these blocks of the first group it has. From any thread."""
        return self.staging.count_stored([block_key(block_hash) for block_hash in hashes])

    def seconds(self, num_blocks: int) -> float:
        """How long a load of that many blocks will take; 0 until one was measured."""
        waiting = sum(len(load.blocks) - load.num_read for load in tuple(self._loads))
        return self.speed.seconds(waiting + num_blocks)

    def load(self, blocks: Sequence[int], keys: Sequence[bytes]) -> Load:
        """Reads blocks that are on the disk into `blocks` of the pool, one after the other."""
        load = Load(blocks, keys)
        self._before_load(blocks)
        with self._changed:
            if self._store is None:
                load.cancel()
            else:
                self._loads.append(load)
                self._changed.notify_all()
        return load

    def wait(self, loads: Sequence[Load], seconds: float) -> None:
        """Waits until one of the loads is done, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: any(load.is_done for load in loads), seconds)

    def forget(self) -> None:
        """After a clear of the cache: no later process finds what was put before.

        This one finds nothing of it from the clear on. A disk that hangs is waited for
        `_FORGET_SECONDS` at most.
        """
        self._clearing.wait()

    def counts(self) -> DiskCounts:
        """What became of blocks. From any thread."""
        counts = self.staging.counts()
        return DiskCounts(
            stored=self.staging.num_stored,
            written=self._num_written,
            dropped=counts["dropped"],
            skipped=counts["skipped"],
            damaged=counts["damaged"],
            failures=self._num_failures,
        )

    # In the tier's thread.

    def _run(self) -> None:
        failing = RecurringError(logger, "The disk tier failed.")
        try:
            while self._wait():
                try:
                    self._work()
                except (OSError, NotUsableError) as error:
                    self._fail(error)
                except Exception as error:  # noqa: BLE001 - logged
                    failing.log(error)
                    self._fail(error)
                self._wake()  # Somebody may wait for what is done.
        finally:
            self._close_store()
            self._cancel_loads()

    def _wait(self) -> bool:
        """Waits for something to do; false at the end."""
        with self._changed:
            while not self._has_work():
                if self._stopped:
                    return False
                self._changed.wait()
        return True

    def _has_work(self) -> bool:
        if self._store is None:
            return not self._stopped and self._clock() >= self._retry_at
        is_behind = self._clearing.store_era != self.staging.era or not self._is_listed
        return is_behind or bool(self._loads) or self.staging.has_staged

    def _work(self) -> None:
        store = self._store = self._store or self._open_store()
        era = self.staging.era
        if self._clearing.store_era != era:
            with self._clearing.lock:
                store.clear()
                self._clearing.note_cleared(era)
        elif not self._is_listed:
            self.staging.add_stored(_sound(store.keys()), era)
            self._is_listed = True
            if self._is_failing:
                logger.info("The disk tier in %s is in use again.", self._name)
            self._is_failing = False
        elif self._loads:
            self._read(store, self._loads[0])
        else:
            self._write(store)

    def _read(self, store: BlockStore, load: Load) -> None:
        """Reads the next run of blocks."""
        begun, first = self._clock(), load.num_read
        keys = load.keys[first : first + self._run_blocks]
        if not load.is_done:
            values = store.get(keys)
            lost = load.fill(self.staging, values, misses_next=len(values) < len(keys))
            if lost:
                self.staging.remove_stored(lost)
                store.remove(lost)
            elif load.num_read > first:
                self.speed.note_read((self._clock() - begun) / len(keys))
        if load.is_done:
            self._loads.popleft()

    def _write(self, store: BlockStore) -> None:
        era = self._clearing.store_era
        taken = self.staging.take(self._run_blocks, era)
        if taken:
            self.staging.remove_stored(_sound(store.put(taken)))
            self.staging.add_stored([key for key, _ in taken], era)
            self._num_written += len(taken)

    def _fail(self, error: Exception) -> None:
        """Ends all loads with what is there; the store is opened again later."""
        level = logging.DEBUG if self._is_failing else logging.WARNING
        # What no code has foreseen may quote a block.
        reason = error if isinstance(error, (OSError, NotUsableError)) else type(error).__name__
        logger.log(level, "The disk tier in %s is idle: %s.", self._name, reason)
        self._is_failing, self._is_listed = True, False
        self._retry_at = self._clock() + _RETRY_SECONDS
        self._close_store()
        self.staging.clear_stored()
        self._num_failures += 1  # What is evicted from now on is copied again.
        self._cancel_loads()

    def _cancel_loads(self) -> None:
        with self._changed:
            while self._loads:
                self._loads.popleft().cancel()

    def _close_store(self) -> None:
        store, self._store = self._store, None
        try:
            if store is not None:
                store.close()
        except Exception as error:  # noqa: BLE001 - nobody needs the store any more
            logger.debug("Closing it failed: %s.", type(error).__name__)


def _sound(keys: Iterable[bytes]) -> list[bytes]:
    """Those that are keys of blocks: the file may be damaged."""
    return [key for key in keys if len(key) == _KEY_BYTES]
