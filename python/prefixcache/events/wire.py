"""The wire form of KV events, as vLLM 0.33 sends them.

A message has three frames: topic, sequence (8 bytes, big endian) and payload. The payload is a
batch: a msgpack array `[ts, events, data_parallel_rank]`, whose events are maps tagged `type`.
Hashes are unsigned 64-bit integers: the last 8 bytes of a block's hash, big endian.

A replay is asked for from a DEALER socket: an empty frame, and the first sequence wanted in 8
bytes. Each answer is an empty frame, a sequence and a payload; the last one has the sequence -1 and
no payload.

A snapshot is a stream of msgpack objects one behind the other: a header, `BlockStored` events, and
an end. They give what was cached once batch `sequence` was sent, so batches from `sequence + 1` on
continue it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import msgspec

MEDIUM = "GPU"
"""The tier of blocks in memory: readers take it as the fastest one, whatever computes there."""
DISK_MEDIUM = "DISK"
"""The tier of blocks on a disk, as Dynamo calls it; vLLM leaves the name to the tier."""

SNAPSHOT_VERSION = 1

_SEQUENCE_BYTES = 8
_END_OF_REPLAY = -1


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that hit from now on, each the one after the block before it in a prompt.

    `token_ids` are those of all the blocks, `block_size` of each. `parent_block_hash` is that of
    the block before the first; None at a prompt's beginning. On a disk blocks are in no order, and
    have neither. Where the model has several KV cache
    groups, the last three fields say which one this is; they are absent where it has one.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that hit no more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing hits any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one message holds: events in their order, at `ts` (seconds since 1970)."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class KVGroup(msgspec.Struct, omit_defaults=True, gc=False):
    """A KV cache group of the model, as its events name it."""

    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None = None


class SnapshotHeader(msgspec.Struct, gc=False):
    """What a snapshot begins with. `sequence` is -1 where no batch was sent yet.

    Caches with the same `root_hash` (hexadecimal) name the same content alike: same weights, types,
    block size and groups.
    """

    prefixcache_snapshot: int
    sequence: int
    root_hash: str
    model: str
    block_size: int
    groups: list[KVGroup]


class SnapshotEnd(msgspec.Struct, tag=True, gc=False):
    """What a whole snapshot ends with: the number of blocks in it, each counted once a group."""

    num_blocks: int


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(EventBatch)


def encode(part: EventBatch | SnapshotHeader | Event | SnapshotEnd) -> bytes:
    """The payload of a message, or one object of a snapshot."""
    return _encoder.encode(part)


def decode_batch(payload: bytes) -> EventBatch:
    """The batch of a payload. Raises `msgspec.DecodeError` for what is none."""
    return _batches.decode(payload)


def encode_sequence(sequence: int) -> bytes:
    """The frame of a sequence, which is at least -1."""
    return sequence.to_bytes(_SEQUENCE_BYTES, "big", signed=True)


def decode_sequence(frame: bytes) -> int:
    """The sequence of a frame. Raises `ValueError` for a frame that is not 8 bytes long."""
    if len(frame) != _SEQUENCE_BYTES:
        raise ValueError(f"a sequence has {_SEQUENCE_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)


END_OF_REPLAY = encode_sequence(_END_OF_REPLAY)
"""The sequence frame of the message that ends a replay."""


class SnapshotError(ValueError):
    """A snapshot that breaks off, or is none."""


def decode_snapshot(chunks: Iterable[bytes]) -> Iterator[SnapshotHeader | Event | SnapshotEnd]:
    """The objects of a snapshot, header and end among them, from its bytes in pieces of any size.

    Raises `SnapshotError` for what is no snapshot of this version, and where one breaks off.
    """
    # msgspec reads one object that ends where its bytes do; msgpack finds where each one ends.
    stream = cast("Any", msgpack.Unpacker())  # pyright: ignore[reportUnknownMemberType]
    header: SnapshotHeader | None = None
    for chunk in chunks:
        stream.feed(chunk)
        for value in stream:
            if header is None:
                header = _read_header(value)
                yield header
                continue
            part = _convert(value, Event | SnapshotEnd)
            yield part
            if isinstance(part, SnapshotEnd):
                return
    raise SnapshotError("the snapshot broke off before its end")


def _read_header(value: object) -> SnapshotHeader:
    header: SnapshotHeader = _convert(value, SnapshotHeader)
    if header.prefixcache_snapshot != SNAPSHOT_VERSION:
        version = header.prefixcache_snapshot
        raise SnapshotError(f"the snapshot is of version {version}, not {SNAPSHOT_VERSION}")
    return header


def _convert(value: object, kind: object) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise SnapshotError(f"not part of a snapshot: {error}") from None
