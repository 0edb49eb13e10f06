"""vLLM's secondary tier over `prefixcache_store`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from prefixcache_store import Store
from prefixcache_store.options import positive
from prefixcache_vllm import refuse_version
from prefixcache_vllm.namespace import NAMESPACE_BYTES, namespace

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

logger = logging.getLogger(__name__)

# For how long a block that came too late counts as missing: the next request would wait as long.
_PAUSE_SECONDS = 60.0
_WRITERS = 2


@dataclass(frozen=True)
class _Job:
    """Blocks between memory and the store; `done` says which of them arrived."""

    transfer: TransferJob
    keys: list[bytes]
    done: Future[list[bool]]
    begin: float


class PrefixCacheTier(SecondaryTierManager):
    """Blocks on a disk: bounded, checked, never served for other weights or another layout.

    A load or a store ends `deadline_s` after it was submitted. Blocks that are not there by then
    are misses, and nothing writes to their memory any more.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        max_bytes: int,
        deadline_s: float = 2.0,
        threads: int = 4,
        weights: str | None = None,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        """Opens the store.

        Args:
            offloading_spec: What vLLM says of blocks.
            primary_kv_view: The memory of blocks, (blocks, bytes of one).
            tier_type: The name under which the tier was configured.
            root_dir: The folder of the store, which is created. One engine uses it at a time.
            max_bytes: The most bytes on the disk, divided between data parallel ranks.
            deadline_s: Seconds from the submission of a job to its end.
            threads: Loads that run at once; each spreads its blocks over as many threads.
            weights: What stands for the weights, where their files are not to be read.
            backpressure_detector: vLLM's own.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if (refusal := refuse_version(vllm.__version__)) is not None:
            raise ValueError(refusal)
        config = get_current_vllm_config_or_none()
        if config is None:
            raise ValueError(
                'The tier needs the connector that passes vLLM\'s configuration: "kv_connector": '
                '"PrefixCacheConnector".'
            )
        self.locality = Locality.LOCAL
        self._rows: np.ndarray | None = np.asarray(primary_kv_view)
        self._deadline = positive("deadline_s", deadline_s)
        parallel = offloading_spec.config.parallel
        share = positive("max_bytes", max_bytes) // parallel.data_parallel_size
        folder = Path(root_dir).expanduser() / f"rank{parallel.data_parallel_index}"
        self._store = Store(folder, int(share), threads=threads)
        # In the store's folder, which nobody else can open: notes say which weights blocks are of.
        notes = folder / "weights.json"
        try:
            self._namespace = namespace(config, offloading_spec.config, notes, weights)
        except BaseException:
            self._store.close()
            raise
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="prefixcache-read")
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="prefixcache-write")
        self._running: dict[int, _Job] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._late: dict[bytes, float] = {}

    def _names(self, keys: Iterable[OffloadKey]) -> list[bytes]:
        return [self._namespace + key for key in keys]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the block is there, from memory."""
        (name,) = self._names([key])
        is_late = self._late.get(name, 0.0) > time.monotonic()
        is_here = not is_late and self._store.contains([name])[0]
        return LookupResult.HIT if is_here else LookupResult.MISS

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to read blocks into memory."""
        self._submit(self._readers, self._store.get_into, job_metadata)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to write blocks that are not there yet."""
        self._submit(self._writers, self._store.put, job_metadata)

    def _submit(
        self,
        threads: ThreadPoolExecutor,
        transfer: Callable[[list[bytes], list[np.ndarray], float], list[bool]],
        job: TransferJob,
    ) -> None:
        assert self._rows is not None
        keys = self._names(job.keys)
        rows = [self._rows[chunk] for chunk in job.chunk_ids]
        begin = time.monotonic()

        def run() -> list[bool]:
            left = begin + self._deadline - time.monotonic()
            return transfer(keys, rows, left) if left > 0 else [False] * len(keys)

        done = threads.submit(run)
        self._running[job.job_id] = _Job(job, keys, done, begin)
        done.add_done_callback(lambda _: self._ended.put(job.job_id))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call, and which blocks of a load arrived."""
        while True:
            try:
                job = self._running.pop(self._ended.get_nowait())
            except Empty:
                return
            arrived = self._arrived(job)
            is_load = job.transfer.is_promotion
            if is_load:
                self._pause(
                    [key for key, is_here in zip(job.keys, arrived, strict=True) if not is_here]
                )
            yield JobResult(
                job_id=job.transfer.job_id,
                success=all(arrived),
                successful_keys=tuple(compress(job.transfer.keys, arrived)) if is_load else None,
                transfer_time=time.monotonic() - job.begin,
                transfer_bytes=sum(arrived) * self.block_size_bytes,
            )

    def _arrived(self, job: _Job) -> list[bool]:
        if job.done.cancelled():
            return [False] * len(job.keys)
        if (error := job.done.exception()) is not None:
            logger.error("A transfer of %d blocks failed: %r", len(job.keys), error)
            return [False] * len(job.keys)
        return job.done.result()

    def _pause(self, missed: list[bytes]) -> None:
        """What did not arrive and is there still was late: it counts as missing for a while."""
        now = time.monotonic()
        self._late = {key: until for key, until in self._late.items() if until > now}
        late = compress(missed, self._store.contains(missed))
        self._late.update((key, now + _PAUSE_SECONDS) for key in late)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Blocks count as used."""
        self._store.touch(self._names(keys))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """No request needs anything else."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Waits for jobs to end. From here on the blocks of before are not served.

        vLLM calls it where caches are reset, among other things since the weights are new ones.
        What is stored afterwards is found by this process alone.
        """
        jobs = list(self._running.values())
        for job in jobs:
            job.done.cancel()
        wait([job.done for job in jobs])
        self._namespace = os.urandom(NAMESPACE_BYTES)

    def shutdown(self) -> None:
        """Ends jobs, each within its deadline, and closes the store."""
        for threads in (self._readers, self._writers):
            threads.shutdown(cancel_futures=True)
        self._rows = None
        self._running.clear()
        logger.info("The disk tier ends: %s", self._store.counts())
        self._store.close()
