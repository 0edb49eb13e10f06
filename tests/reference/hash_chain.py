"""The chain of block hashes, readable; `python -m reference.hash_chain` prints its test vectors.

    h_0 = blake3.derive_key("prefixcache chain v1", fields)
    h_i = blake3.keyed_hash(key=h_{i-1}, tokens_i as u32 little endian [, extra_i])

A field or an extra is its length as u64 little endian, then its bytes. A number is a field of eight
bytes, little endian. What may be absent is one byte 0, or one byte 1 and the field.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

CONTEXT = "prefixcache chain v1"


@dataclass(frozen=True, kw_only=True)
class Root:
    """All that decides what a block's KV is, but the tokens and the extras."""

    model: str = ""
    revision: str = ""
    kv_dtype: str = ""
    block_size: int = 16
    lora: str | None = None
    cache_salt: str | None = None
    weight_version: int = 0
    groups: tuple[str, ...] = ("full",)

    def hash(self) -> bytes:
        fields = (
            field(self.model.encode())
            + field(self.revision.encode())
            + field(self.kv_dtype.encode())
            + field(struct.pack("<Q", self.block_size))
            + optional_field(self.lora)
            + optional_field(self.cache_salt)
            + field(struct.pack("<Q", self.weight_version))
            + field(",".join(self.groups).encode())
        )
        return blake3(fields, derive_key_context=CONTEXT).digest()


def field(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def optional_field(value: str | None) -> bytes:
    return b"\0" if value is None else b"\1" + field(value.encode())


def extend(parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """The hash of a full block after `parent`; an empty `extra` is none."""
    message = struct.pack(f"<{len(tokens)}I", *tokens)
    return blake3(message + (field(extra) if extra else b""), key=parent).digest()


def chain(root: Root, tokens: Sequence[int], extras: Sequence[bytes] = ()) -> list[bytes]:
    """The hashes of the full blocks of `tokens`."""
    hashes: list[bytes] = []
    parent = root.hash()
    for index in range(len(tokens) // root.block_size):
        block = tokens[index * root.block_size : (index + 1) * root.block_size]
        extra = extras[index] if index < len(extras) else b""
        parent = extend(parent, block, extra)
        hashes.append(parent)
    return hashes


def vectors() -> Iterator[dict[str, Any]]:
    """Inputs that each differ from another in one thing, with their hashes."""
    tokens = [(7 * index * index + 3) % 50_257 for index in range(40)]
    roots = [
        Root(),
        Root(model="m", revision="r", kv_dtype="bfloat16"),
        Root(model="mr", kv_dtype="bfloat16"),
        Root(lora=""),
        Root(lora="adapter"),
        Root(cache_salt=""),
        Root(cache_salt="adapter"),
        Root(cache_salt="häßlich \N{GRINNING FACE}"),
        Root(weight_version=1),
        Root(groups=("full", "full")),
        Root(block_size=1),
        Root(block_size=4),
        Root(block_size=32),
    ]
    for root in roots:
        yield vector(root, tokens)
    yield vector(Root(), [])
    yield vector(Root(), tokens[:15])
    yield vector(Root(), [0] * 16)
    yield vector(Root(), [2**32 - 1] * 16)
    yield vector(Root(block_size=256), list(range(512)))
    yield vector(Root(), tokens, [b"", b"an image's digest"])
    yield vector(Root(), tokens, [b"\0"])
    yield vector(Root(), tokens, [b"\0\0"])


def vector(root: Root, tokens: list[int], extras: Sequence[bytes] = ()) -> dict[str, Any]:
    return {
        "root": asdict(root),
        "tokens": tokens,
        "extras": [extra.hex() for extra in extras],
        "root_hash": root.hash().hex(),
        "hashes": [one.hex() for one in chain(root, tokens, extras)],
    }


if __name__ == "__main__":
    print("[\n" + ",\n".join(json.dumps(one) for one in vectors()) + "\n]")
