"""The hashes of blocks, readable; `python -m reference.prefix_hashes` prints their test vectors.

docs/reference/hashing.md says in words what stands here.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

ROOT_CONTEXT = "prefixcache v2 root"
SCOPE_CONTEXT = "prefixcache v2 scope"
WEIGHTS_CONTEXT = "prefixcache v2 weights"


@dataclass(frozen=True, kw_only=True)
class Root:
    """All that decides what a block's KV is, but the tokens and the extras."""

    model: str = ""
    revision: str = ""
    weights: str = "0"
    kv_dtype: str = ""
    arithmetic: str = ""
    block_size: int = 16
    groups: tuple[str, ...] = ("full",)
    lora: str | None = None
    cache_salt: str | None = None

    def hash(self) -> bytes:
        fields = (
            field(self.model.encode())
            + field(self.revision.encode())
            + field(self.weights.encode())
            + field(self.kv_dtype.encode())
            + field(self.arithmetic.encode())
            + field(struct.pack("<Q", self.block_size))
            + field(",".join(self.groups).encode())
        )
        root = blake3(fields, derive_key_context=ROOT_CONTEXT).digest()
        return scoped(root, self.lora, self.cache_salt)


def weights_digest(tensors: Iterable[tuple[str, str, Sequence[int], bytes]]) -> bytes:
    """The digest of a checkpoint of tensors: name, format, shape and bytes of each."""
    message = b""
    for name, form, shape, data in sorted(tensors, key=lambda one: one[0].encode()):
        message += field(name.encode()) + field(form.encode())
        message += field(struct.pack(f"<{len(shape)}Q", *shape)) + field(blake3(data).digest())
    return blake3(message, derive_key_context=WEIGHTS_CONTEXT).digest()


def scoped(root: bytes, lora: str | None = None, cache_salt: str | None = None) -> bytes:
    """`h_0` of requests with this LoRA and salt; without both it is `root` itself."""
    if lora is None and cache_salt is None:
        return root
    scope = optional_field(lora) + optional_field(cache_salt)
    return blake3(root + scope, derive_key_context=SCOPE_CONTEXT).digest()


def field(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def optional_field(value: str | None) -> bytes:
    return b"\0" if value is None else b"\1" + field(value.encode())


def keyed(purpose: str, message: bytes) -> bytes:
    return blake3(message, key=f"prefixcache v2 {purpose}".encode().ljust(32, b"\0")).digest()


def leaf(tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """The digest of one block; an empty `extra` is none."""
    message = struct.pack(f"<{len(tokens)}I", *tokens)
    digest = keyed("block", message + bytes(-len(message) % 64))
    return keyed("extra", digest + extra) if extra else digest


def node(leaves: Sequence[bytes]) -> bytes:
    """The root of the tree over a power of eight of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    width = len(leaves) // 8
    children = [node(leaves[place * width :][:width]) for place in range(8)]
    return keyed("node", b"".join(children))


def block_hashes(
    h_0: bytes, block_size: int, tokens: Sequence[int], extras: Sequence[bytes] = ()
) -> list[bytes]:
    """The hashes `h_1`, `h_2`, ... of the full blocks of `tokens`."""
    starts = range(0, len(tokens) - block_size + 1, block_size)
    padded = itertools.chain(extras, itertools.repeat(b""))
    leaves = [
        leaf(tokens[start : start + block_size], extra)
        for start, extra in zip(starts, padded, strict=False)
    ]
    hashes = [h_0]
    for end in range(1, len(leaves) + 1):
        width = 1
        while end % (8 * width) == 0:
            width *= 8
        hashes.append(keyed("prefix", hashes[end - width] + node(leaves[end - width : end])))
    return hashes[1:]


def vectors() -> Iterator[dict[str, Any]]:
    """Inputs that each differ from another in one thing, with their hashes."""
    tokens = [(7 * index * index + 3) % 50_257 for index in range(40)]
    roots = [
        Root(),
        Root(model="m", revision="r", kv_dtype="bfloat16", arithmetic="bfloat16"),
        Root(model="mr", kv_dtype="bfloat16", arithmetic="bfloat16"),
        Root(kv_dtype="bfloat16"),
        Root(arithmetic="bfloat16"),
        Root(lora=""),
        Root(lora="adapter"),
        Root(lora="adapter", cache_salt="adapter"),
        Root(cache_salt=""),
        Root(cache_salt="adapter"),
        Root(cache_salt="häßlich \N{GRINNING FACE}"),
        Root(weights="1"),
        Root(weights="12"),
        Root(model="5e" * 32, weights="blake3:" + "c0" * 32, kv_dtype="bfloat16"),
        Root(model="5e" * 32, weights="tag:step-1200", kv_dtype="bfloat16"),
        Root(weights="count:12:tag:step-1200"),
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
    yield vector(Root(block_size=64), list(range(320)))
    yield vector(Root(block_size=128), list(range(640)))
    yield vector(Root(block_size=256), list(range(512)))
    yield vector(Root(block_size=1), list(range(70)))
    yield vector(Root(), tokens, [b"", b"an image's digest"])
    yield vector(Root(block_size=1), tokens, [b"x", b"", b"y"] * 6)
    yield vector(Root(), tokens, [b"\0"])
    yield vector(Root(), tokens, [b"\0\0"])


def vector(root: Root, tokens: list[int], extras: Sequence[bytes] = ()) -> dict[str, Any]:
    hashes = block_hashes(root.hash(), root.block_size, tokens, extras)
    return {
        "root": asdict(root),
        "tokens": tokens,
        "extras": [extra.hex() for extra in extras],
        "root_hash": root.hash().hex(),
        "hashes": [one.hex() for one in hashes],
    }


if __name__ == "__main__":
    print("[\n" + ",\n".join(json.dumps(one) for one in vectors()) + "\n]")
