"""The wire form, against the bytes that vLLM's own definitions give, written out by hand."""

import io

import msgpack
import pytest

from prefixcache.events import wire

STORED = wire.BlockStored(
    [2**64 - 1, 5], None, [1, 2, 3, 4], 2, None, wire.MEDIUM, None, 1, "sliding_window", 512
)
PARTS = [
    wire.SnapshotHeader(1, 7, "ab", "m", 2, [wire.KVGroup("full_attention")]),
    STORED,
    wire.SnapshotEnd(2),
]


def test_a_batch_is_an_array_of_tagged_maps() -> None:
    plain = wire.BlockStored([3], 5, [9], 1, None, wire.MEDIUM, None)
    events = [STORED, plain, wire.BlockRemoved([3], wire.MEDIUM), wire.AllBlocksCleared()]
    payload = wire.encode(wire.EventBatch(1.5, events, 0))
    without_group = {
        "type": "BlockStored",
        "block_hashes": [3],
        "parent_block_hash": 5,
        "token_ids": [9],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    with_group = without_group | {
        "block_hashes": [2**64 - 1, 5],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 512,
    }
    removed = {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}
    expected = [with_group, without_group, removed, {"type": "AllBlocksCleared"}]
    assert msgpack.unpackb(payload) == [1.5, expected, 0]
    assert wire.decode_batch(payload) == wire.EventBatch(1.5, events, 0)


def test_sequences_are_eight_bytes() -> None:
    assert wire.encode_sequence(258) == bytes(6) + b"\1\2"
    assert wire.decode_sequence(wire.END_OF_REPLAY) == -1
    with pytest.raises(ValueError, match="8 bytes, not 3"):
        wire.decode_sequence(b"abc")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_snapshot_is_read_from_pieces_of_any_size(size: int) -> None:
    stream = b"".join(map(wire.encode, PARTS))
    assert next(msgpack.Unpacker(io.BytesIO(stream)))["sequence"] == 7
    pieces = (stream[at : at + size] for at in range(0, len(stream), size))
    assert list(wire.decode_snapshot(pieces)) == PARTS


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([], "broke off"),
        (PARTS[:2], "broke off"),
        (PARTS[1:], "not part of a snapshot"),
        ([wire.SnapshotHeader(2, 0, "", "", 2, [])], "version 2"),
    ],
    ids=["nothing", "no end", "no header", "another version"],
)
def test_what_is_no_whole_snapshot_is_refused(parts: list, problem: str) -> None:
    stream = b"".join(map(wire.encode, parts))
    with pytest.raises(wire.SnapshotError, match=problem):
        list(wire.decode_snapshot([stream]))
