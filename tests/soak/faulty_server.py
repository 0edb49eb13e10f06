"""`prefixcache` with fault points: `python -m soak.faulty_server FOLDER serve ...`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from prefixcache.cli.main import main
from prefixcache.engine.output import Answer
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.tiers import disk_tier
from prefixcache.kv.tiers.disk_store import DiskStore
from prefixcache.models import weights
from prefixcache.runner.torch.model_runner import ModelRunner
from prefixcache.scheduler.step_time import StepTimeModel
from prefixcache.server import app
from prefixcache.server.openai.response_store import ResponseStore
from prefixcache.text.tokenization.tokenizer import Tokenizer
from soak.census import serve_census
from soak.faults import (
    DISK,
    LEAK,
    STORE_POINTS,
    Faults,
    InjectedDiskError,
    InjectedError,
    InjectedMemoryError,
)

# The tensor of a weight file whose reading fails: some were replaced, most were not.
_BREAKS_AT = 5
# Of each key: full within minutes, so that memory that grows later grows without a bound.
_STORED_RESPONSES = 16


def plug_in(faults: Faults) -> None:
    """Puts the fault points around the calls of this process."""
    _plug_into_forward(faults)
    _plug_into_texts(faults)
    _plug_into_disk(faults)
    _plug_into_release(faults)
    _plug_into_store(faults)
    app.ResponseStore = functools.partial(ResponseStore, max_responses=_STORED_RESPONSES)


def _plug_into_forward(faults: Faults) -> None:
    submit, results = ModelRunner.submit, ModelRunner.results

    def faulty(self: ModelRunner, plan: Any) -> Any:
        faults.meet("forward-before")
        faults.meet("forward-memory", InjectedMemoryError)
        return submit(self, plan)

    def faulty_results(self: ModelRunner, step: Any) -> Any:  # computed, and lost on the way
        faults.meet("forward-after")
        return results(self, step)

    ModelRunner.submit, ModelRunner.results = faulty, faulty_results


def _plug_into_texts(faults: Faults) -> None:
    encode_batch, push = Tokenizer.encode_batch, Answer.push

    def faulty_encode(self: Tokenizer, *args: Any, **options: Any) -> Any:
        faults.meet("tokenizer")
        return encode_batch(self, *args, **options)

    def faulty_push(self: Answer, *args: Any) -> Any:
        faults.meet("detokenizer")
        return push(self, *args)

    Tokenizer.encode_batch = faulty_encode
    Answer.push = faulty_push


def _plug_into_disk(faults: Faults) -> None:
    read_bytes = weights.read_bytes
    num_read = WeakKeyDictionary[Any, int]()

    def faulty_read(stream: Any, start: int, length: int) -> Any:
        """A weight file that breaks after a few tensors."""
        num_read[stream] = num_read.get(stream, 0) + 1
        if num_read[stream] == _BREAKS_AT:
            faults.meet(DISK, InjectedDiskError)
        return read_bytes(stream, start, length)

    weights.read_bytes = faulty_read


def _plug_into_release(faults: Faults) -> None:
    free = CacheManager.free
    kept: list[Any] = []

    def leaking(self: CacheManager, request_ids: Sequence[str], **options: Any) -> None:
        """Where a file says so, some requests are forgotten with the blocks that they hold."""
        try:
            if any(self._sequences[request_id].is_committed for request_id in request_ids):
                faults.meet(LEAK)
        except InjectedError:
            kept.extend(self._sequences.pop(request_id) for request_id in request_ids)
            return
        free(self, request_ids, **options)

    CacheManager.free = leaking


def _plug_into_store(faults: Faults) -> None:
    """A disk that fails is soon tried again, and never predicted slower than the tiny model."""
    disk_tier._RETRY_SECONDS = 5.0
    StepTimeModel.seconds = lambda *_: 0.0
    for point, name in STORE_POINTS.items():
        setattr(DiskStore, name, _faulty(getattr(DiskStore, name), faults, point))


def _faulty(call: Any, faults: Faults, point: str) -> Any:
    def faulty(*args: Any) -> Any:
        faults.meet(point, InjectedDiskError)
        return call(*args)

    return faulty


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    plug_in(Faults(folder))
    serve_census(folder)
    main()
