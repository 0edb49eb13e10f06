"""What writes the recording of `--record-trace`: see docs/reference/recording.md."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from prefixcache._core import BlockPseudonyms
from prefixcache.kv.recordings.record_writer import RecordWriter, line
from prefixcache.kv.recordings.trace_lines import VERSION, Event, TraceLines
from prefixcache.metrics import PREFIX

logger = logging.getLogger(__name__)


class TraceWriter(RecordWriter[Event]):
    """A recording of what the prefix cache is asked for, which `begin_trace` starts."""

    close_seconds = 10.0

    def __init__(self, path: Path, max_size: int) -> None:
        super().__init__(path, "record_trace", max_size)
        self._lines: TraceLines

    def families(self) -> Iterator[Metric]:
        """What `/metrics` tells of the recording. From any thread."""
        yield GaugeMetricFamily(
            PREFIX + "trace_recording",
            "1 while --record-trace records, 0 once that has stopped.",
            value=int(self.is_recording),
        )
        yield CounterMetricFamily(
            PREFIX + "trace_recording_bytes",
            "Bytes that --record-trace has written.",
            value=self._file.num_bytes,
        )

    def begin_trace(self, header: Mapping[str, Any], key: bytes) -> None:
        """Starts to write; the header is what a replay needs to make the same cache.

        Blocks are named by hashes under the `key` of 32 bytes.
        """
        self._lines = TraceLines(BlockPseudonyms(key, header["block_size"]))
        about = {"prefixcache_trace": VERSION, "recording": secrets.token_hex(8)}
        logger.info("What the prefix cache is asked for is recorded in %s.", self.path)
        self.begin({**about, "start": time.time(), **header})

    def line_of(self, event: Event) -> str:  # noqa: D102
        return self._lines.of(event)

    def num_tokens(self, event: Event) -> int:  # noqa: D102
        return len(event[2]["request"].prompt_token_ids) if event[0] == "add" else 0

    def may_end_part(self, event: Event) -> bool:  # noqa: D102
        return event[0] == "counters"

    def end_line(self, **why: str) -> str:  # noqa: D102
        return line({"e": "stop" if why else "next", "t": self._lines.last_ms, **why})
