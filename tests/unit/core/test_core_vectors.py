"""The core reproduces vLLM's own block ids, hits and free order, and the vectors of the hashes."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixcache._core import PrefixCache
from reference.cache import ReferenceCache
from reference.prefix_hashes import Root, block_hashes, vectors

VECTORS = Path(__file__).parents[2] / "vectors"


def rows(kind: str, number: int) -> Iterator[dict[str, Any]]:
    with gzip.open(VECTORS / f"vllm_order_{kind}.{number}.jsonl.gz", "rt") as lines:
        yield from map(json.loads, lines)


class Replay:
    """vLLM's operations on a cache: blocks count as filled in the call that allocates them."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.sequences: dict[str, Any] = {}

    def step(self, row: dict[str, Any]) -> None:
        getattr(self, row["op"])(row)
        if row.get("ok", True):
            assert self.cache.num_free_blocks == row.get("free", self.cache.num_free_blocks)
            assert self.cache.free_order() == row.get("free_order", self.cache.free_order())

    def new(self, row: dict[str, Any]) -> None:
        self.sequences[row["req"]] = self.cache.new_sequence(row["tokens"])

    def match(self, row: dict[str, Any]) -> None:
        sequence = self.sequences[row["req"]]
        computable = sequence.num_tokens - 1
        assert self.cache.count_prefix_hits(sequence, computable) == row["hit_tokens"]

    def allocate(self, row: dict[str, Any]) -> None:
        sequence = self.sequences[row["req"]]
        taken = self.cache.commit_prefix_plan(sequence, row["hit_tokens"], row["new_tokens"])
        assert taken == (row["hit_tokens"] if row["ok"] else None)
        if row["ok"]:
            self.fill(sequence, row)

    def append(self, row: dict[str, Any]) -> None:
        sequence = self.sequences[row["req"]]
        self.cache.drop_unneeded([sequence], [sequence.num_filled])
        served = self.cache.append_slots([sequence], [row["new_tokens"]])
        assert served == row["ok"]
        if row["ok"]:
            self.fill(sequence, row)

    def fill(self, sequence: Any, row: dict[str, Any]) -> None:
        self.cache.mark_blocks_filled([sequence], [sequence.num_slots])
        groups = range(len(row["tables"]))
        assert [sequence.block_table(group) for group in groups] == row["tables"]

    def sampled(self, row: dict[str, Any]) -> None:
        self.cache.append_tokens([self.sequences[row["req"]]], [row["token"]])

    def preempt(self, row: dict[str, Any]) -> None:
        self.cache.release([self.sequences[row["req"]]])

    def free(self, row: dict[str, Any]) -> None:
        self.cache.release([self.sequences.pop(row["req"])])

    def reset(self, row: dict[str, Any]) -> None:
        if row["ok"]:
            self.cache.clear_cache_index()

    def end(self, row: dict[str, Any]) -> None:
        assert self.cache.cached_blocks() == row["hashed"]


@pytest.mark.parametrize("threads", ["single_writer", "shared", "reference"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_vllm_order(threads: Any, kind: str, number: int) -> None:
    config, *operations = rows(kind, number)
    size = (config["num_blocks"], config["block_size"])
    groups: list[Any] = ["full"]
    if kind == "hybrid":
        groups.append(("sliding_window", config["sliding_window"]))
    slow = threads == "reference"
    replay = Replay(
        ReferenceCache(*size, groups=groups)
        if slow
        else PrefixCache(*size, groups=groups, threads=threads, model="m")
    )
    for index, row in enumerate(operations):
        try:
            replay.step(row)
        except AssertionError as error:
            raise AssertionError(f"operation {index}: {row}") from error
        if not slow:
            replay.cache.validate()
    assert len(operations) > 5000


def test_hash_vectors_are_those_of_the_reference() -> None:
    assert json.loads((VECTORS / "prefix_hashes.json").read_text()) == json.loads(
        json.dumps(list(vectors()))
    )


@pytest.mark.filterwarnings("ignore:the cache has no model")
@pytest.mark.parametrize("vector", json.loads((VECTORS / "prefix_hashes.json").read_text()))
def test_block_hashes(vector: dict[str, Any]) -> None:
    root = vector["root"]
    is_named = ":" in root["weights"]
    cache = PrefixCache(
        2,
        root["block_size"],
        model=root["model"],
        revision=root["revision"],
        weights=root["weights"] if is_named else None,
        kv_dtype=root["kv_dtype"],
        arithmetic=root["arithmetic"],
        num_groups=len(root["groups"]),
    )
    for _ in range(0 if is_named else int(root["weights"])):
        cache.new_weight_version()
    assert cache.weights_name == root["weights"]
    scope = {"cache_salt": root["cache_salt"], "lora": root["lora"]}
    assert cache.root_hash(**scope).hex() == vector["root_hash"]
    extras = [bytes.fromhex(extra) for extra in vector["extras"]]
    hashes = cache.compute_block_hashes(vector["tokens"], **scope, extras=extras)
    found = [hashes.to_bytes(index).hex() for index in range(len(hashes))]
    assert found == vector["hashes"]
    sequence = cache.new_sequence(vector["tokens"][:5], **scope, extras=extras)
    sequence.extend(vector["tokens"][5:])
    assert [one.hex() for one in sequence.block_hashes()] == vector["hashes"]


def test_only_an_empty_extra_leaves_a_hash_as_it_is() -> None:
    hashes = Counter(one for vector in vectors() for one in vector["hashes"])
    plain = block_hashes(Root().hash(), 16, next(vectors())["tokens"])
    assert [one for one, count in hashes.items() if count > 1] == [plain[0].hex()]
