"""The table at the end of a file of laid-out weights: where each part of a linear layer lies.

The parts come first, each from a multiple of 64 bytes on. Then the table in JSON, and last its
length, its digest and the version: a file that was cut short has none.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from prefixcache._core import derive_digest, hash_file_ranges
from prefixcache.models.weights import with_progress

ALIGNMENT = 64

_END = struct.Struct("<Q32s16s")
_MAGIC = b"prefixcache w v1"
_CONTEXT = "prefixcache laid-out weights v1"
_BATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LaidOutPart:
    """A part by the name of its tensor in a checkpoint, and how it is kept: a type or a format.

    `digest` is BLAKE3 of its bytes, in hexadecimal.
    """

    name: str
    kept_as: str
    offset: int
    num_bytes: int
    digest: str = ""

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class PartTable:
    """`facts` are all that the bytes of the parts depend on."""

    facts: Mapping[str, Any]
    parts: Sequence[LaidOutPart]

    def write(self, descriptor: int) -> None:
        """Ends the file with the table. Raises `OSError`."""
        content = {"facts": dict(self.facts), "parts": [asdict(part) for part in self.parts]}
        text = json.dumps(content).encode()
        end = max((part.end for part in self.parts), default=0)
        os.ftruncate(descriptor, end)
        os.pwrite(descriptor, text + _END.pack(len(text), _digest(text), _MAGIC), end)

    @classmethod
    def read(cls, descriptor: int) -> PartTable:
        """The table of a file. Raises `ValueError` for one that is damaged, and `OSError`."""
        size = os.fstat(descriptor).st_size - _END.size
        length, digest, magic = _END.unpack(_read(descriptor, size, _END.size))
        text = _read(descriptor, size - length, length) if magic == _MAGIC else b""
        if _digest(text) != digest:
            raise ValueError("it has no sound table of this version")
        content = json.loads(text)
        return cls(content["facts"], [LaidOutPart(**part) for part in content["parts"]])


def facts_digest(facts: Mapping[str, Any]) -> str:
    """Stands for the facts, in hexadecimal."""
    return _digest(json.dumps(dict(facts), sort_keys=True).encode()).hex()


def hashed(descriptor: int, parts: Sequence[LaidOutPart], threads: int) -> Iterator[LaidOutPart]:
    """The parts with the digests of what lies in the file. Raises `OSError`."""
    total = sum(part.num_bytes for part in parts)
    hashing = _hashed(descriptor, parts, threads)
    return with_progress("Checking weights", total, hashing, attrgetter("num_bytes"))


def _hashed(descriptor: int, parts: Iterable[LaidOutPart], threads: int) -> Iterator[LaidOutPart]:
    for batch in _batches(parts):
        ranges = [(part.offset, part.end) for part in batch]
        digests = hash_file_ranges(f"/dev/fd/{descriptor}", ranges, threads)
        for part, digest in zip(batch, digests, strict=True):
            yield replace(part, digest=digest.hex())


def _batches(parts: Iterable[LaidOutPart]) -> Iterator[list[LaidOutPart]]:
    batch: list[LaidOutPart] = []
    num_bytes = 0
    for part in parts:
        batch.append(part)
        num_bytes += part.num_bytes
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    yield batch


def _digest(text: bytes) -> bytes:
    return derive_digest(_CONTEXT, text)


def _read(descriptor: int, start: int, length: int) -> bytes:
    data = os.pread(descriptor, length, start) if start >= 0 else b""
    if len(data) != length:
        raise ValueError("it is cut short")
    return data
