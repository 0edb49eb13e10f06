"""What is cached at one moment, in the wire's form."""

from __future__ import annotations

from prefixcache.events.form import WireForm
from prefixcache.events.wire import (
    SNAPSHOT_VERSION,
    SnapshotEnd,
    SnapshotHeader,
    encode_snapshot_part,
)
from prefixcache.kv.events import StoredBlocks

# As in the publisher: so that a part keeps the interpreter for a fraction of a millisecond.
_BLOCKS_AT_ONCE = 512


class CacheSnapshot:
    """The bytes of a snapshot, part by part; it holds a copy of what was cached until it ends."""

    def __init__(
        self, blocks: StoredBlocks, form: WireForm, *, sequence: int, root_hash: str, model: str
    ) -> None:
        self._blocks = blocks
        self._form = form
        self._header: SnapshotHeader | None = SnapshotHeader(
            SNAPSHOT_VERSION, sequence, root_hash, model, form.block_size, form.groups
        )
        self._is_over = False

    def next_part(self) -> bytes:
        """The next bytes; empty at the end."""
        if self._header is not None:
            header, self._header = self._header, None
            return encode_snapshot_part(header)
        events = self._blocks.take(_BLOCKS_AT_ONCE)
        if events:
            return b"".join(encode_snapshot_part(self._form.event(event)) for event in events)
        if self._is_over:
            return b""
        self._is_over = True
        return encode_snapshot_part(SnapshotEnd(self._blocks.num_blocks))
