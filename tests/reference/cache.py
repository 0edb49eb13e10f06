"""The prefix cache in plain lists and dicts, with the rules that the Rust core must follow.

`ReferenceCache` has the methods of `prefixcache.core.PrefixCache` and takes as long as it likes.
It checks no arguments: what is right to ask is the tests' business.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from reference.prefix_hashes import Root, block_hashes

Key = tuple[bytes, int]  # the content's hash and the group


@dataclass
class Block:
    """A block of the pool. `content` is its key and the epoch in which that was registered."""

    holders: int = 0
    content: tuple[Key, int] | None = None
    pinned: bool = False


@dataclass
class Sequence:
    tokens: list[int]
    root: Root
    extras: Items[bytes] = ()
    tables: list[list[int]] | None = None
    epoch: int = 0
    num_slots: int = 0
    num_filled: int = 0
    num_published: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Items[int]) -> None:
        self.tokens.extend(tokens)

    def block_table(self, group: int = 0) -> list[int]:
        return list(self.tables[group]) if self.tables else []

    def block_hashes(self, start: int = 0, stop: int | None = None) -> list[bytes]:
        hashes = block_hashes(self.root.hash(), self.root.block_size, self.tokens, self.extras)
        return hashes[start:stop]


class ReferencePool:
    """Blocks, the order in which free ones are handed out, and the order of registration."""

    def __init__(self, num_blocks: int, free_order: str, max_blocks: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.append_only = free_order == "append"
        self.blocks = {block: Block() for block in range(1, max_blocks or num_blocks)}
        self.regular = list(range(1, num_blocks))
        self.pinned: list[int] = []
        self.registered: dict[Key, list[int]] = {}  # oldest registration first
        self.epoch = 0
        self.counts = {"evictions": 0, "allocations": 0, "touches": 0}

    def free_order(self) -> list[int]:
        stale = self.stale_pins()
        return stale + self.regular + self.pinned[len(stale) :]

    def stale_pins(self) -> list[int]:
        """Pinned since before the epoch: of no use, so they go first."""
        return list(itertools.takewhile(lambda block: not self.is_cached(block), self.pinned))

    def is_cached(self, block: int) -> bool:
        content = self.blocks[block].content
        return content is not None and content[1] == self.epoch

    def cached_blocks(self) -> list[int]:
        return [block for block in self.blocks if self.is_cached(block)]

    def lookup(self, key: Key) -> int | None:
        twins = self.registered.get(key, [])
        hits = [block for block in twins if self.blocks[block].content == (key, self.epoch)]
        return hits[0] if hits else None

    def commit(self, keys: list[Key], num_new: int) -> tuple[int, list[int]] | None:
        hits: list[int] = []
        for key in keys:
            hit = self.lookup(key)
            if hit is None:
                break
            hits.append(hit)
        free_hits = sum(self.blocks[hit].holders == 0 for hit in hits)
        if num_new + free_hits > len(self.free_order()):
            return None
        for hit in hits:
            self.touch(hit)
        return len(hits), hits + [self.hand_out() for _ in range(num_new)]

    def touch(self, block: int) -> None:
        if self.blocks[block].holders == 0:
            self.leave_line(block)
        self.blocks[block].holders += 1
        self.counts["touches"] += 1

    def hand_out(self) -> int:
        block = self.free_order()[0]
        self.leave_line(block)
        self.counts["evictions"] += self.is_cached(block)
        self.counts["allocations"] += 1
        self.forget(block)
        self.blocks[block].holders = 1
        return block

    def leave_line(self, block: int) -> None:
        (self.regular if block in self.regular else self.pinned).remove(block)

    def forget(self, block: int) -> None:
        content = self.blocks[block].content
        if content is not None:
            self.registered[content[0]].remove(block)
        self.blocks[block].content = None
        self.blocks[block].pinned = False

    def register(self, block: int, key: Key, epoch: int) -> int | None:
        """The twin that hits instead, if there is one."""
        if epoch != self.epoch or block >= self.num_blocks:
            return None
        if self.blocks[block].content == (key, epoch):
            return None
        hitting = self.lookup(key)
        self.forget(block)
        self.blocks[block].content = (key, epoch)
        self.registered.setdefault(key, []).append(block)
        return hitting

    def release(self, blocks: list[int]) -> None:
        freed = []
        for block in blocks:
            self.blocks[block].holders -= 1
            if self.blocks[block].holders == 0:
                freed.append(block)
        blank = [block for block in freed if not self.is_cached(block)]
        for block in blank:
            self.forget(block)
        freed = [block for block in freed if block < self.num_blocks]
        if not self.append_only:
            self.regular[:0] = [block for block in freed if block in blank]
            freed = [block for block in freed if block not in blank]
        for block in freed:
            (self.pinned if self.blocks[block].pinned else self.regular).append(block)

    def set_pins(self, blocks: list[int], pinned: bool) -> int:
        return sum(self.set_pin(block, pinned) for block in blocks)

    def set_pin(self, block: int, pinned: bool) -> bool:
        """Pins the copy that hits for the block's content; takes the pins off all copies."""
        content = self.blocks[block].content
        current = content is not None and content[1] == self.epoch
        copies = self.registered[content[0]] if current else []
        copies = [copy for copy in copies if self.blocks[copy].content == content]
        copies = copies[:1] if pinned else [*copies, block]
        change = [copy for copy in copies if self.blocks[copy].pinned != pinned]
        for copy in set(change):
            free = copy in self.regular + self.pinned
            if free:
                self.leave_line(copy)
            self.blocks[copy].pinned = pinned
            if free:
                (self.pinned if pinned else self.regular).append(copy)
        return bool(change)

    def demote(self, count: int) -> int:
        moved, self.pinned = self.pinned[:count], self.pinned[count:]
        for block in moved:
            self.blocks[block].pinned = False
        self.regular += moved
        return len(moved)

    def resize(self, num_blocks: int) -> int:
        for block in range(num_blocks, self.num_blocks):
            self.forget(block)
            if self.blocks[block].holders == 0:
                self.leave_line(block)
        grown = range(self.num_blocks, num_blocks)
        self.regular[:0] = [block for block in grown if self.blocks[block].holders == 0]
        self.num_blocks = num_blocks
        return sum(b >= num_blocks and block.holders > 0 for b, block in self.blocks.items())


@dataclass
class ReferenceCache:
    num_blocks_with_null: int
    block_size: int = 16
    num_groups: int = 1
    free_order_name: str = "unhashed_first"
    max_blocks: int | None = None
    weight_version: int = 0
    queries: int = 0
    hits: int = 0
    pool: ReferencePool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = ReferencePool(self.num_blocks_with_null, self.free_order_name, self.max_blocks)

    def new_sequence(
        self,
        tokens: Items[int],
        *,
        cache_salt: str | None = None,
        lora: str | None = None,
        extras: Items[bytes] | None = None,
    ) -> Sequence:
        root = Root(
            block_size=self.block_size,
            lora=lora,
            cache_salt=cache_salt,
            weights=str(self.weight_version),
            groups=("full",) * self.num_groups,
        )
        return Sequence(list(tokens), root, tuple(extras or ()))

    def keys(self, hashes: list[bytes]) -> list[Key]:
        return [(one, group) for one in hashes for group in range(self.num_groups)]

    def refresh(self, sequence: Sequence) -> None:
        if sequence.tables is None:
            sequence.root = replace(sequence.root, weights=str(self.weight_version))

    def count_prefix_hits(self, sequence: Sequence) -> int:
        self.refresh(sequence)
        blocks = 0
        for block_hash in sequence.block_hashes():
            if any(self.pool.lookup(key) is None for key in self.keys([block_hash])):
                break
            blocks += 1
        return blocks * self.block_size

    def commit_prefix_plan(
        self, sequence: Sequence, hit_tokens: int, num_tokens: int
    ) -> int | None:
        assert sequence.tables is None
        self.refresh(sequence)
        groups = self.num_groups
        wanted = sequence.block_hashes(0, hit_tokens // self.block_size)
        new_blocks = -(-num_tokens // self.block_size)
        taken = self.pool.commit(self.keys(wanted), new_blocks * groups)
        if taken is None:
            return None
        count, blocks = taken
        whole = count - count % groups
        self.pool.release(blocks[whole:count])
        hits, new = blocks[:whole], blocks[count:]
        sequence.tables = [
            hits[group::groups] + new[group * new_blocks : (group + 1) * new_blocks]
            for group in range(groups)
        ]
        hit_tokens = whole // groups * self.block_size
        sequence.epoch = self.pool.epoch
        sequence.num_slots = hit_tokens + num_tokens
        sequence.num_filled = hit_tokens
        sequence.num_published = whole // groups
        self.queries += sequence.num_tokens
        self.hits += hit_tokens
        return hit_tokens

    def append_slots(self, sequences: list[Sequence], counts: list[int]) -> int:
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            assert sequence.tables is not None
            blocks = -(-(sequence.num_slots + count) // self.block_size)
            missing = blocks - len(sequence.tables[0])
            taken = self.pool.commit([], missing * self.num_groups)
            if taken is None:
                return index
            for group, table in enumerate(sequence.tables):
                table += taken[1][group * missing : (group + 1) * missing]
            sequence.num_slots += count
        return len(sequences)

    def append_tokens(self, sequences: list[Sequence], tokens: list[int]) -> None:
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.extend([token])

    def mark_blocks_filled(
        self, sequences: list[Sequence], upto: list[int]
    ) -> list[tuple[int, int, int, int]]:
        twins: list[tuple[int, int, int, int]] = []
        for number, (sequence, tokens) in enumerate(zip(sequences, upto, strict=True)):
            assert sequence.tables is not None
            hashes = sequence.block_hashes()
            for index in range(sequence.num_published, tokens // self.block_size):
                for group, table in enumerate(sequence.tables):
                    key = (hashes[index], group)
                    twin = self.pool.register(table[index], key, sequence.epoch)
                    if twin is not None:
                        twins.append((number, group, index, twin))
            sequence.num_published = max(sequence.num_published, tokens // self.block_size)
            sequence.num_filled = max(sequence.num_filled, tokens)
        return twins

    def replace_block(self, sequence: Sequence, group: int, index: int, block: int) -> None:
        assert sequence.tables is not None
        own = sequence.tables[group][index]
        self.pool.touch(block)
        sequence.tables[group][index] = block
        self.pool.release([own])

    def release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            assert sequence.tables is not None
            for table in sequence.tables:
                self.pool.release(table[::-1])
            sequence.tables = None
            sequence.num_slots = sequence.num_filled = sequence.num_published = 0

    def clear_cache_index(self) -> None:
        self.pool.epoch += 1

    def new_weight_version(self) -> int:
        self.weight_version += 1
        self.clear_cache_index()
        return self.weight_version

    def pin(self, sequence: Sequence, num_tokens: int) -> int:
        return self.set_pins(sequence, num_tokens // self.block_size, pinned=True)

    def unpin(self, sequence: Sequence) -> int:
        return self.set_pins(sequence, len(sequence.tokens), pinned=False)

    def set_pins(self, sequence: Sequence, num_blocks: int, *, pinned: bool) -> int:
        """Pin or unpin the leading hits, which leave the line of free blocks and join it again."""
        self.refresh(sequence)
        taken = self.pool.commit(self.keys(sequence.block_hashes()[:num_blocks]), 0)
        assert taken is not None
        count, blocks = taken
        whole = count - count % self.num_groups
        self.pool.release(blocks[whole:])
        tables = [blocks[group : whole : self.num_groups] for group in range(self.num_groups)]
        blocks = [block for table in tables for block in table]
        changed = self.pool.set_pins(blocks, pinned)
        self.pool.release(blocks[::-1])
        return changed

    def demote(self, count: int) -> int:
        return self.pool.demote(count)

    def resize(self, num_blocks: int) -> int:
        return self.pool.resize(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self.pool.free_order())

    def free_order(self) -> list[int]:
        return self.pool.free_order()

    def cached_blocks(self) -> list[int]:
        return self.pool.cached_blocks()

    def stats(self) -> dict[str, int]:
        return {
            "queries": self.queries,
            "hits": self.hits,
            **self.pool.counts,
            "cached_blocks": len(self.cached_blocks()),
            "blocks_in_use": sum(block.holders > 0 for block in self.pool.blocks.values()),
            "free_blocks": self.num_free_blocks,
            "pinned_free_blocks": len(self.pool.pinned),
        }
