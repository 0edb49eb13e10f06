"""Recorded requests as sessions of one turn each, read from a file of any size when needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache.tools.bench.records import BenchmarkError
from prefixcache.tools.bench.sessions import Session, Text, Turn
from prefixcache.tools.bench.workloads import WorkloadConfig

_REQUESTS_AT_ONCE = 256


def trace_sessions(config: WorkloadConfig) -> Iterator[Session]:
    """The trace's requests, the first due at once. Prompts share the blocks that they share there.

    Raises `BenchmarkError` with file, line and field: of the first lines here, of later ones where
    they are reached.
    """
    assert config.trace is not None
    sessions = _read(config.trace, config)
    first = next(sessions, None)
    if first is None:
        raise BenchmarkError(f"{config.trace} holds no request.")
    return islice(chain((first,), sessions), config.num_requests)


def _read(path: Path, config: WorkloadConfig) -> Iterator[Session]:
    from prefixcache._core import TraceReader

    number, start = 0, None
    try:
        reader = TraceReader(str(path))
        while batch := reader.read(_REQUESTS_AT_ONCE):
            start = int(batch["time_ms"][0]) if start is None else start
            for row in range(len(batch["time_ms"])):
                yield _session(config, batch, row, number, start, reader.block_size)
                number += 1
    except (OSError, ValueError) as error:
        raise BenchmarkError(str(error)) from error


def _session(
    config: WorkloadConfig,
    batch: dict[str, np.ndarray[Any, Any]],
    row: int,
    number: int,
    start: int,
    block_size: int,
) -> Session:
    begin, end = batch["indptr"][row : row + 2].tolist()
    block_len, tail = config.scaled(block_size), int(batch["input_tokens"][row])
    tail -= (end - begin) * block_size
    blocks = [Text(("block", block), block_len) for block in batch["block_ids"][begin:end].tolist()]
    if tail > 0 or not blocks:
        blocks.append(Text(("tail", number), config.scaled(max(1, tail))))
    turn = Turn(
        adds=tuple(blocks), output_len=config.scaled(max(1, int(batch["output_tokens"][row])))
    )
    due = (int(batch["time_ms"][row]) - start) / 1e3
    return Session(name=str(number), turns=(turn,), due=due)
