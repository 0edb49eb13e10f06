"""Random operations on the core and on the slow reference: equal after each step, ids included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixcache._core import PrefixCache
from reference.cache import ReferenceCache
from support.repeatable import bounded

BASES = [[7] * 40, list(range(40))]  # prompts share a prefix of one of these
FULL = "full"
GROUPS: list[list[Any]] = [
    [FULL],
    [FULL],
    [FULL] * 3,
    [FULL, ("sliding_window", 5)],
    [("sliding_window", 1), FULL, ("sliding_window", 16)],
    [("sliding_window", 7)],
    [("sliding_window", 3), ("sliding_window", 12)],
    ["state"],
    [FULL, "state", "state"],
    ["state", FULL, ("sliding_window", 5), "state"],
]
SCOPES = [{}] * 6 + [{"cache_salt": ""}, {"lora": ""}]
MAX_BLOCKS = 24


@dataclass
class Pair:
    """One sequence in both caches, which hold it or do not hold it together."""

    real: Any
    slow: Any

    @property
    def held(self) -> bool:
        return self.slow.tables is not None


def prompts() -> st.SearchStrategy[list[int]]:
    tail = st.lists(st.integers(0, 1), max_size=4)
    shared = st.tuples(st.sampled_from(BASES), st.integers(0, 40))
    return st.builds(lambda base, more: base[0][: base[1]] + more, shared, tail)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        groups=st.sampled_from(GROUPS),
        num_blocks=st.integers(MAX_BLOCKS // 2, MAX_BLOCKS),
        order=st.sampled_from(["unhashed_first", "append"]),
        threads=st.sampled_from(["single_writer", "shared"]),
        in_order=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        groups: list[Any],
        num_blocks: int,
        order: str,
        threads: str,
        in_order: bool,
    ) -> None:
        # Neither unpins nor resizes: the core then finds hits by bisection, pins or not.
        self.in_order = in_order
        self.real = PrefixCache(
            num_blocks,
            block_size,
            groups=groups,
            free_order=order,
            threads=threads,
            max_blocks=MAX_BLOCKS,
            model="m",
        )
        self.slow = ReferenceCache(num_blocks, block_size, groups, order, MAX_BLOCKS)
        self.pairs: list[Pair] = []
        self.duplicates: list[tuple[Pair, int, int, int]] = []

    def pick(self, data: st.DataObject, *, held: bool) -> Pair:
        return data.draw(st.sampled_from([pair for pair in self.pairs if pair.held == held]))

    def pick_batch(self, data: st.DataObject) -> list[Pair]:
        held = [index for index, pair in enumerate(self.pairs) if pair.held]
        chosen = data.draw(st.lists(st.sampled_from(held), unique=True, max_size=4))
        return [self.pairs[index] for index in chosen]

    def any_held(self) -> bool:
        return any(pair.held for pair in self.pairs)

    def any_idle(self) -> bool:
        return any(not pair.held for pair in self.pairs)

    def both(self, method: str, *arguments: Any) -> Any:
        """Calls both caches, each with its own part of the pairs among the arguments."""

        def own(argument: Any, side: str) -> Any:
            if isinstance(argument, Pair):
                return getattr(argument, side)
            if isinstance(argument, list):
                return [own(item, side) for item in argument]
            return argument

        slow = getattr(self.slow, method)(*(own(argument, "slow") for argument in arguments))
        real = getattr(self.real, method)(*(own(argument, "real") for argument in arguments))
        assert real == slow, method
        return slow

    @rule(tokens=prompts(), scope=st.sampled_from(SCOPES), extra=st.sampled_from([b"", b"x"]))
    def new_sequence(self, tokens: list[int], scope: dict[str, str], extra: bytes) -> None:
        made = [
            cache.new_sequence(tokens, **scope, extras=[b"", extra])
            for cache in (self.real, self.slow)
        ]
        self.pairs.append(Pair(*made))

    @rule(tokens=prompts(), copies=st.integers(1, 3))
    def serve(self, tokens: list[int], copies: int) -> None:
        """Requests with one prompt at once: each hits what is there, and all compute the rest."""
        batch = []
        for _ in range(copies):
            self.new_sequence(tokens, {}, b"")
            pair = self.pairs[-1]
            hits = self.both("count_prefix_hits", pair)
            rest = max(len(tokens) - hits, 1)
            if self.both("commit_prefix_plan", pair, hits, rest) is not None:
                batch.append(pair)
        self.mark(batch, [pair.slow.num_tokens for pair in batch])

    @precondition(any_held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        pair = self.pick(data, held=True)
        self.both("release", [pair])
        self.pairs.remove(pair)

    @precondition(any_idle)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        pair = self.pick(data, held=False)
        hits = self.both("count_prefix_hits", pair)
        asked = data.draw(st.integers(0, pair.slow.num_tokens // self.slow.block_size))
        asked = data.draw(st.sampled_from([hits, asked * self.slow.block_size]))
        rest = max(pair.slow.num_tokens - asked, 1)
        rest, chunk = data.draw(st.integers(1, rest)), data.draw(st.integers(0, 12))
        if data.draw(st.booleans()):
            self.both("commit_missing", pair, asked, rest, chunk or rest)
        else:
            self.both("commit_prefix_plan", pair, asked, rest, chunk or None)

    @precondition(any_idle)
    @rule(data=st.data(), most=st.integers(0, 50))
    def count_within(self, data: st.DataObject, most: int) -> None:
        pair = self.pick(data, held=False)
        self.both("count_prefix_hits", pair, most)
        self.both("count_whole_hits", pair, most)

    @precondition(any_held)
    @rule(data=st.data(), more=st.integers(0, 9))
    def ensure_slots(self, data: st.DataObject, more: int) -> None:
        batch = self.pick_batch(data)
        self.both("ensure_slots", batch, [pair.slow.num_ready_slots + more for pair in batch])

    @precondition(any_held)
    @rule(data=st.data(), start=st.integers(0, 40))
    def keep_snapshots(self, data: st.DataObject, start: int) -> None:
        batch = self.pick_batch(data)
        self.both("keep_snapshots", batch, [pair.slow.num_filled + start for pair in batch])

    @precondition(any_held)
    @rule(data=st.data(), published=st.booleans())
    def drop_unneeded(self, data: st.DataObject, published: bool) -> None:
        batch = self.pick_batch(data)
        size = self.slow.block_size
        ready = [pair.slow.num_ready_slots for pair in batch]
        upto = [
            min(pair.slow.num_published * size, most)
            for pair, most in zip(batch, ready, strict=True)
        ]
        self.both("drop_unneeded", batch, upto if published else ready)

    @precondition(lambda self: self.pairs)
    @rule(
        data=st.data(),
        interval=st.sampled_from([None, 0, 0, 5, 16]),
        anchors=st.lists(st.integers(0, 45), max_size=3),
        prompt_end=st.one_of(st.none(), st.integers(0, 45)),
        pin=st.booleans(),
        least=st.integers(0, 3),
        prefix=st.booleans(),
    )
    def retain(
        self,
        data: st.DataObject,
        interval: int | None,
        anchors: list[int],
        prompt_end: int | None,
        pin: bool,
        least: int,
        prefix: bool,
    ) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        pins = {"pin": pin and interval is not None, "min_pin_blocks": least, "pin_prefix": prefix}
        for sequence in (pair.real, pair.slow):
            sequence.set_retention(interval, **pins)
            for anchor in anchors:
                sequence.add_anchor(anchor)
            if prompt_end is not None:
                sequence.add_prompt_end(prompt_end)

    @precondition(any_held)
    @rule(data=st.data())
    def pin_anchors(self, data: st.DataObject) -> None:
        self.both("pin_anchors", self.pick_batch(data))

    @rule(num_tokens=st.integers(0, 90), chunk=st.integers(1, 20))
    def most_blocks(self, num_tokens: int, chunk: int) -> None:
        self.both("most_blocks", num_tokens, chunk)

    @precondition(any_held)
    @rule(data=st.data())
    def append_slots(self, data: st.DataObject) -> None:
        batch = self.pick_batch(data)
        counts = data.draw(st.lists(st.integers(1, 9), min_size=len(batch), max_size=len(batch)))
        self.both("append_slots", batch, counts)

    @precondition(any_held)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append_tokens(self, data: st.DataObject, token: int) -> None:
        batch = self.pick_batch(data)
        self.both("append_tokens", batch, [token] * len(batch))

    @precondition(any_idle)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=5))
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        pair = self.pick(data, held=False)
        pair.real.extend(tokens)
        pair.slow.extend(tokens)

    @precondition(any_held)
    @rule(data=st.data(), every=st.booleans())
    def mark_filled(self, data: st.DataObject, every: bool) -> None:
        batch = self.pick_batch(data)
        most = [min(pair.slow.num_ready_slots, pair.slow.num_tokens) for pair in batch]
        upto = most if every else [data.draw(st.integers(0, one)) for one in most]
        self.mark(batch, upto)

    def mark(self, batch: list[Pair], upto: list[int]) -> None:
        for number, group, index, _ in self.both("mark_blocks_filled", batch, upto):
            self.duplicates.append((batch[number], group, index, batch[number].slow.epoch))

    @precondition(lambda self: self.duplicates)
    @rule()
    def replace_duplicate(self) -> None:
        pair, group, index, epoch = self.duplicates.pop()
        if not pair.held or pair.slow.epoch != epoch or pair.slow.num_published <= index:
            return
        if pair.slow.block_table(group)[index] == 0:
            return  # dropped since
        self.both("replace_block", pair, group, index)

    @precondition(any_held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.both("release", self.pick_batch(data))

    @precondition(any_held)
    @rule(data=st.data())
    def fill_block_tables(self, data: st.DataObject) -> None:
        batch = self.pick_batch(data)
        size, group = self.slow.block_size, self.slow.num_groups - 1
        tables = [pair.slow.block_table(group) for pair in batch]
        ends = [data.draw(st.integers(0, pair.slow.num_ready_slots)) for pair in batch]
        starts = [data.draw(st.integers(0, end)) for end in ends]
        first = [self.slow.first_needed(group, start) for start in starts]
        held = [next((i for i, b in enumerate(table) if b), len(table)) for table in tables]
        if any(page < own for page, own in zip(first, held, strict=True)):
            return  # what they need was dropped
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        pages = [
            table[page : max(page, -(-end // size))]
            for table, page, end in zip(tables, first, ends, strict=True)
        ]
        slots = [
            table[position // size] * size + position % size
            for table, start, end in zip(tables, starts, ends, strict=True)
            for position in range(start, end)
        ]
        indptr = np.full(len(batch) + 1, -1, np.int32)
        indices = np.full(sum(map(len, pages)), -1, np.int32)
        last = np.full(len(batch), -1, np.int32)
        mapping = np.full(len(slots), -1, np.int64)
        reals = [pair.real for pair in batch]
        read = {(row, (start - 1) // size) for row, start in enumerate(starts) if start}
        written_to = {(row, (end - 1) // size) for row, end in enumerate(ends)}
        computes = [row for row, count in enumerate(counts) if count]
        at_ends = [one for one in read | written_to if one[0] in computes]
        lacks_state = self.slow.is_state(group) and not all(tables[row][at] for row, at in at_ends)
        left_out = np.full(len(batch), -1, np.int32)
        arrays = (indptr, indices, last, mapping, left_out)
        if lacks_state:
            with pytest.raises(ValueError, match="must begin and end where"):
                self.real.fill_block_tables(reals, starts, counts, group, *arrays)
            return
        written = self.real.fill_block_tables(reals, starts, counts, group, *arrays)
        assert written == len(indices)
        assert np.diff(indptr).tolist() == [len(page) for page in pages]
        assert indices.tolist() == [block for page in pages for block in page]
        assert last.tolist() == [
            (end - 1) % size + 1 if page else 0 for page, end in zip(pages, ends, strict=True)
        ]
        assert left_out.tolist() == first
        assert mapping.tolist() == slots

    @rule()
    def clear(self) -> None:
        self.both("clear_cache_index")

    @rule(name=st.sampled_from([None, "tag:a", "tag:b"]))
    def new_weights(self, name: str | None) -> None:
        """Names come back, and nothing that was cached under them does."""
        self.both("new_weight_version", name)
        assert self.real.weights_name == self.slow.weights_name

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), num_tokens=st.integers(0, 50))
    def pin(self, data: st.DataObject, num_tokens: int) -> None:
        self.both("pin", data.draw(st.sampled_from(self.pairs)), num_tokens)

    @precondition(lambda self: self.pairs and not self.in_order)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.both("unpin", data.draw(st.sampled_from(self.pairs)))

    @rule(count=st.integers(0, 6))
    def demote(self, count: int) -> None:
        self.both("demote", count)

    @precondition(lambda self: not self.in_order)
    @rule(num_blocks=st.integers(2, MAX_BLOCKS))
    def resize(self, num_blocks: int) -> None:
        self.both("resize", num_blocks)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pairs"):
            return
        self.real.validate()
        assert self.real.num_blocks == self.slow.num_blocks
        assert self.real.num_free_blocks == self.slow.num_free_blocks
        assert self.real.free_order() == self.slow.free_order()
        assert self.real.cached_blocks() == self.slow.cached_blocks()
        assert self.real.stats() == self.slow.stats()
        for pair in self.pairs:
            self.same_sequence(pair)

    def same_sequence(self, pair: Pair) -> None:
        real, slow = pair.real, pair.slow
        assert real.is_committed == pair.held
        assert real.num_tokens == slow.num_tokens
        assert (real.num_slots, real.num_filled) == (slow.num_slots, slow.num_filled)
        assert real.num_ready_slots == slow.num_ready_slots
        assert real.block_hashes() == slow.block_hashes()
        for group in range(self.slow.num_groups):
            assert real.block_table(group) == slow.block_table(group)


CacheMachine.TestCase.settings = settings(
    max_examples=bounded(usual=200, long=10_000),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_cache_follows_the_reference = pytest.mark.timeout(1800)(CacheMachine.TestCase)
