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
Group = str | tuple[str, int]  # "full", ("sliding_window", window) or "state"


@dataclass
class Block:
    """A block of the pool. `content` is its key and the epoch in which that was registered."""

    holders: int = 0
    content: tuple[Key, int] | None = None
    pinned: bool = False
    marks: set[str] = field(default_factory=set)


@dataclass
class Sequence:
    tokens: list[int]
    root: Root
    extras: Items[bytes] = ()
    tables: list[list[int]] | None = None
    firsts: list[int] = field(default_factory=list)  # places before them are needed no more
    epoch: int = 0
    num_slots: int = 0
    num_ready_slots: int = 0
    num_filled: int = 0
    num_published: int = 0
    num_hits: int = 0
    interval: int | None = None
    pin: bool = False
    min_pin_blocks: int = 0
    pin_prefix: bool = True
    anchors: set[int] = field(default_factory=set)
    prompt_end: int | None = None
    num_prompt: int = 0

    def set_retention(
        self,
        interval: int | None,
        *,
        pin: bool = False,
        min_pin_blocks: int = 0,
        pin_prefix: bool = True,
    ) -> None:
        self.interval, self.pin = interval, pin
        self.min_pin_blocks, self.pin_prefix = min_pin_blocks, pin_prefix

    def add_anchor(self, position: int) -> None:
        self.anchors.add(position)

    def add_prompt_end(self, position: int) -> None:
        self.prompt_end = position
        self.anchors.add(position)

    def anchor_blocks(self, block_size: int, upto: int) -> list[int]:
        """All anchors from block 1 to block `upto`, in blocks."""
        step = self.interval
        multiples = range(step, (upto + 1) * block_size, step) if step else ()
        positions = self.anchors | set(multiples)
        found = {position // block_size for position in positions}
        return sorted(length for length in found if 0 < length <= upto)

    def is_pinned(self, length: int, block_size: int) -> bool:
        last, end = 0, (self.prompt_end or 0) // block_size
        for anchor in [*self.anchor_blocks(block_size, length - 1), length]:
            from_start = anchor == end >= self.min_pin_blocks
            is_apart = from_start or anchor - last >= self.min_pin_blocks
            last = anchor if is_apart else last
        return self.pin and last == length

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


COUNTS = (
    "evictions",
    "allocations",
    "touches",
    "pins",
    "demotions",
    "pinned_evictions",
    "pinned_hits",
    "lost_to_resize_blocks",
    # Nothing here moves or hints.
    "moved_blocks",
    "hinted_blocks",
    "hints_demoted",
    "hints_expired",
)


class ReferencePool:
    """Blocks, the order in which free ones are handed out, and the order of registration."""

    def __init__(self, num_blocks: int, free_order: str, max_blocks: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.append_only = free_order == "append"
        self.blocks = {block: Block() for block in range(1, max_blocks or num_blocks)}
        self.blank = list(range(1, num_blocks))
        self.unneeded: list[int] = []
        self.regular: list[int] = []
        self.pinned: list[int] = []
        self.registered: dict[Key, list[int]] = {}  # oldest registration first
        self.epoch = 0
        self.counts = dict.fromkeys(COUNTS, 0)

    def free_order(self) -> list[int]:
        stale = self.stale_pins()
        return stale + self.blank + self.unneeded + self.regular + self.pinned[len(stale) :]

    def stale_pins(self) -> list[int]:
        """Pinned since before the epoch: of no use, so they go first."""
        return list(itertools.takewhile(lambda block: not self.is_cached(block), self.pinned))

    def is_cached(self, block: int) -> bool:
        content = self.blocks[block].content
        return content is not None and content[1] == self.epoch

    def cached_blocks(self) -> list[int]:
        return [block for block in self.blocks if self.is_cached(block)]

    def lookup(self, key: Key) -> int | None:
        duplicates = self.registered.get(key, [])
        hits = [block for block in duplicates if self.blocks[block].content == (key, self.epoch)]
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
        self.counts["pinned_hits"] += self.blocks[block].pinned

    def hand_out(self) -> int:
        block = self.free_order()[0]
        self.leave_line(block)
        self.evict(block)
        self.counts["allocations"] += 1
        self.blocks[block].holders = 1
        return block

    def evict(self, block: int) -> None:
        self.counts["evictions"] += self.is_cached(block)
        self.counts["pinned_evictions"] += self.is_cached(block) and self.blocks[block].pinned
        self.forget(block)

    def leave_line(self, block: int) -> None:
        next(line for line in self.lines if block in line).remove(block)

    def forget(self, block: int) -> None:
        content = self.blocks[block].content
        if content is not None:
            self.registered[content[0]].remove(block)
        self.blocks[block].content = None
        self.blocks[block].pinned = False

    def register(self, block: int, key: Key, epoch: int) -> int | None:
        """The duplicate that hits instead, if there is one."""
        if epoch != self.epoch or block >= self.num_blocks:
            return None
        if self.blocks[block].content == (key, epoch):
            return None
        hitting = self.lookup(key)
        self.forget(block)
        self.blocks[block].content, self.blocks[block].marks = (key, epoch), set()
        self.registered.setdefault(key, []).append(block)
        return hitting

    @property
    def lines(self) -> list[list[int]]:
        return [self.blank, self.unneeded, self.regular, self.pinned]

    def release(self, blocks: list[int], *, unneeded: bool = False) -> None:
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
            self.blank[:0] = [block for block in freed if block in blank]
            freed = [block for block in freed if block not in blank]
        for block in freed:
            goes_first = unneeded and block not in blank
            line = self.unneeded if goes_first else self.regular
            (self.pinned if self.blocks[block].pinned else line).append(block)

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
            free = any(copy in line for line in self.lines)
            if free:
                self.leave_line(copy)
            self.blocks[copy].pinned = pinned
            self.counts["pins"] += pinned
            if free:
                (self.pinned if pinned else self.regular).append(copy)
        return bool(change)

    def demote(self, count: int) -> int:
        moved, self.pinned = self.pinned[:count], self.pinned[count:]
        for block in moved:
            self.blocks[block].pinned = False
        self.regular += moved
        self.counts["demotions"] += len(moved)
        return len(moved)

    def resize(self, num_blocks: int) -> int:
        for block in range(num_blocks, self.num_blocks):
            self.counts["lost_to_resize_blocks"] += self.is_cached(block)
            self.evict(block)
            if self.blocks[block].holders == 0:
                self.leave_line(block)
        grown = range(self.num_blocks, num_blocks)
        self.blank[:0] = [block for block in grown if self.blocks[block].holders == 0]
        self.num_blocks = num_blocks
        return self.num_held_above

    @property
    def num_held_above(self) -> int:
        return sum(b >= self.num_blocks and block.holders > 0 for b, block in self.blocks.items())


@dataclass
class ReferenceCache:
    num_blocks_with_null: int
    block_size: int = 16
    groups: Items[Group] = ("full",)
    free_order_name: str = "unhashed_first"
    max_blocks: int | None = None
    weight_version: int = 0
    weights_name: str = "0"
    queries: int = 0
    hits: int = 0
    ends: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "answer": 0})
    pool: ReferencePool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = ReferencePool(self.num_blocks_with_null, self.free_order_name, self.max_blocks)

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def is_full(self, group: int) -> bool:
        return self.groups[group] == "full"

    def is_state(self, group: int) -> bool:
        return self.groups[group] == "state"

    def num_new(self, group: int, places: int) -> int:
        """Blocks for that many places: a state has one in the last place alone."""
        return min(places, 1) if self.is_state(group) else places

    def first_needed(self, group: int, position: int) -> int:
        """The block of the first token that the one at `position` attends to."""
        kind = self.groups[group]
        if kind == "state":
            return max(0, position - 1) // self.block_size
        return 0 if isinstance(kind, str) else max(0, position + 1 - kind[1]) // self.block_size

    def first_kept(self, group: int, length: int) -> int:
        needed = self.first_needed(group, length * self.block_size)
        return needed if self.is_state(group) else max(0, needed - 1)

    def new_sequence(
        self,
        tokens: Items[int],
        *,
        cache_salt: str | None = None,
        lora: str | None = None,
        extras: Items[bytes] | None = None,
    ) -> Sequence:
        root = Root(
            model="m",
            block_size=self.block_size,
            lora=lora,
            cache_salt=cache_salt,
            weights=self.weights_name,
            groups=tuple(g if isinstance(g, str) else f"{g[0]}:{g[1]}" for g in self.groups),
        )
        return Sequence(list(tokens), root, tuple(extras or ()))

    def needed(self, hashes: list[bytes]) -> list[Key]:
        """What a hit of all these blocks needs, group by group."""
        end = len(hashes) * self.block_size
        groups = range(self.num_groups)
        return [(one, g) for g in groups for one in hashes[self.first_needed(g, end) :]]

    def longest_hit(self, hashes: list[bytes]) -> int:
        """Blocks of the longest length of which every group has what it needs."""
        lengths = range(len(hashes), -1, -1)
        has = self.pool.lookup
        return next(n for n in lengths if all(has(key) for key in self.needed(hashes[:n])))

    def refresh(self, sequence: Sequence) -> None:
        if sequence.tables is None:
            sequence.root = replace(sequence.root, weights=self.weights_name)

    def count_prefix_hits(self, sequence: Sequence, max_tokens: int = 1 << 60) -> int:
        self.refresh(sequence)
        hashes = sequence.block_hashes()[: max_tokens // self.block_size]
        return self.longest_hit(hashes) * self.block_size

    def count_whole_hits(self, sequence: Sequence, max_tokens: int = 1 << 60) -> int:
        self.refresh(sequence)
        hashes = sequence.block_hashes()[: max_tokens // self.block_size]
        full = [group for group in range(self.num_groups) if self.is_full(group)]
        has = self.pool.lookup
        hits = itertools.takewhile(lambda one: all(has((one, group)) for group in full), hashes)
        return sum(1 for _ in hits) * self.block_size if full else 0

    def commit_prefix_plan(
        self, sequence: Sequence, hit_tokens: int, num_tokens: int, chunk: int | None = None
    ) -> int | None:
        self.refresh(sequence)
        hashes = sequence.block_hashes(0, hit_tokens // self.block_size)
        length = self.longest_hit(hashes)
        taken = self.take(sequence, hashes[:length], num_tokens, chunk or num_tokens)
        return None if taken is None else length * self.block_size

    def commit_missing(
        self, sequence: Sequence, hit_tokens: int, num_tokens: int, chunk: int
    ) -> tuple[list[int], list[bytes], list[int]] | None:
        self.refresh(sequence)
        hashes = sequence.block_hashes(0, hit_tokens // self.block_size)
        missing = self.take(sequence, hashes, num_tokens, chunk)
        if missing is None:
            return None
        missing.sort()
        keys = [hashes[index] + group.to_bytes(2, "big") for index, group, _ in missing]
        return [block for *_, block in missing], keys, [index for index, *_ in missing]

    def take(
        self, sequence: Sequence, hashes: list[bytes], num_tokens: int, chunk: int
    ) -> list[tuple[int, int, int]] | None:
        """Lets it hold a hit of all hashes, and more; place, group and block of what was absent."""
        assert sequence.tables is None
        near, hit_tokens = min(num_tokens, chunk), len(hashes) * self.block_size
        groups = range(self.num_groups)
        new = [-(-(num_tokens if self.is_full(g) else near) // self.block_size) for g in groups]
        needed = self.needed(hashes)
        keys = [key for key in needed if self.pool.lookup(key)]
        num_new = len(needed) - len(keys) + sum(map(self.num_new, groups, new))
        taken = self.pool.commit(keys, num_new)
        if taken is None:
            return None
        hits, fresh = dict(zip(keys, taken[1], strict=False)), iter(taken[1][len(keys) :])
        missing, sequence.tables = list[tuple[int, int, int]](), []
        sequence.firsts = [self.first_needed(group, hit_tokens) for group in groups]
        for group, first in zip(groups, sequence.firsts, strict=True):
            table = [0] * first
            for index in range(first, len(hashes)):
                table.append(hits.get((hashes[index], group)) or next(fresh))
                if (hashes[index], group) not in hits:
                    missing.append((index, group, table[-1]))
            count = self.num_new(group, new[group])
            table += [0] * (new[group] - count) + list(itertools.islice(fresh, count))
            sequence.tables.append(table)
        fulls = [self.is_full(group) for group in groups]
        sequence.epoch = self.pool.epoch
        sequence.num_slots = hit_tokens + (num_tokens if any(fulls) else near)
        sequence.num_ready_slots = hit_tokens + (num_tokens if all(fulls) else near)
        sequence.num_hits = len(hashes)
        sequence.num_published = min([len(hashes), *(index for index, *_ in missing)])
        sequence.num_filled = sequence.num_published * self.block_size
        sequence.num_prompt = len(sequence.block_hashes())
        self.queries += sequence.num_tokens
        self.hits += sequence.num_filled
        return missing

    def append_slots(self, sequences: list[Sequence], counts: list[int]) -> int:
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            if not self.grow(sequence, sequence.num_slots + count):
                return index
        return len(sequences)

    def ensure_slots(self, sequences: list[Sequence], upto: list[int]) -> int:
        for index, (sequence, tokens) in enumerate(zip(sequences, upto, strict=True)):
            if not self.grow(sequence, tokens):
                return index
        return len(sequences)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        assert sequence.tables is not None
        blocks = -(-tokens // self.block_size)
        longer = [table + [0] * (blocks - len(table)) for table in sequence.tables]
        wanted = [
            (group, index)
            for group, table in enumerate(sequence.tables)
            for index in range(len(table), blocks)
            if not self.is_state(group)
        ] + [
            (group, blocks - 1)
            for group, first in enumerate(sequence.firsts)
            if self.is_state(group) and blocks > first and longer[group][blocks - 1] == 0
        ]
        taken = self.pool.commit([], len(wanted))
        if taken is None:
            return False
        sequence.tables = longer
        for (group, index), block in zip(sorted(wanted), taken[1], strict=True):
            longer[group][index] = block
        sequence.num_slots = max(sequence.num_slots, tokens)
        sequence.num_ready_slots = max(sequence.num_ready_slots, tokens)
        return True

    def keep_snapshots(self, sequences: list[Sequence], starts: list[int]) -> int:
        count, states = 0, [group for group in range(self.num_groups) if self.is_state(group)]
        for sequence, start in zip(sequences, starts, strict=True):
            assert sequence.tables is not None
            for index in range(
                start // self.block_size, len(sequence.block_hashes()) if states else 0
            ):
                if index < sequence.firsts[states[0]] or index >= len(sequence.tables[states[0]]):
                    continue
                tables = [sequence.tables[group] for group in states]
                if tables[0][index] or self.fate(sequence, states[0], index) == "unneeded":
                    continue
                if self.num_free_blocks < 2 * len(states):
                    break
                taken = self.pool.commit([], len(states))
                assert taken is not None
                for table, block in zip(tables, taken[1], strict=True):
                    table[index] = block
                count += 1
        return count

    def drop_unneeded(self, sequences: list[Sequence], upto: list[int]) -> int:
        count = 0
        for sequence, position in zip(sequences, upto, strict=True):
            assert sequence.tables is not None
            judged = self.judge_snapshots(sequence, position)
            for group, table in enumerate(sequence.tables):
                if sequence.interval is None:
                    end = self.first_needed(group, position)
                else:
                    end = self.first_kept(group, position // self.block_size)
                dropped = [index for index in range(end) if table[index] != 0][::-1]
                fates = {index: self.fate(sequence, group, index) for index in dropped}
                fates |= judged if self.is_state(group) else {}
                self.pool.set_pins([table[i] for i in dropped if fates[i] == "pinned"], True)
                self.pool.release([table[i] for i in dropped if fates[i] != "unneeded"])
                unneeded = [table[i] for i in dropped if fates[i] == "unneeded"]
                self.pool.release(unneeded, unneeded=True)
                for index in dropped:
                    table[index] = 0
                sequence.firsts[group] = max(sequence.firsts[group], end)
                count += len(dropped)
        return count

    def state_and_whole(self) -> tuple[int, int] | None:
        states = [group for group in range(self.num_groups) if self.is_state(group)]
        fulls = [group for group in range(self.num_groups) if self.is_full(group)]
        return (states[0], fulls[0]) if states and fulls else None

    def judge_snapshots(self, sequence: Sequence, position: int) -> dict[int, str]:
        """What becomes of each snapshot that is dropped before a position, by its place."""
        groups = self.state_and_whole()
        if groups is None or sequence.interval is None:
            return {}
        (state, whole), judged = groups, dict[int, str]()
        assert sequence.tables is not None
        for index in range(self.first_kept(state, position // self.block_size)):
            if sequence.tables[state][index] == 0:
                continue
            is_hit, own = index < sequence.num_hits, self.own_fate(sequence, state, index)
            judged[index] = own
            if own == "unneeded" and not is_hit:
                continue
            marks = self.pool.blocks[sequence.tables[whole][index]].marks
            is_passed, before = "passed" in marks, set(marks)
            if before in ({"prompt"}, {"answer"}):
                self.ends[min(before)] += 1
                if self.ends[min(before)] > 256:
                    self.ends = {kind: count // 2 for kind, count in self.ends.items()}
            end = sequence.prompt_end
            ends_prompt = end is not None and end // self.block_size == index + 1
            marks.add("prompt" if ends_prompt else "passed")
            may_go = own == "kept" and ends_prompt and not is_hit and self.are("answer", "prompt")
            if not is_passed and (own == "unneeded" or may_go):
                judged[index] = "unneeded"
            elif own == "unneeded":
                judged[index] = "kept"
        return judged

    def are(self, kind: str, other: str) -> bool:
        return self.ends[kind] > 8 * (self.ends[other] + 1)

    def note_end(self, sequence: Sequence) -> None:
        groups, last = self.state_and_whole(), sequence.num_published - 1
        assert sequence.tables is not None
        if groups is None or last < sequence.num_hits:
            return
        state, whole = groups
        if sequence.tables[state][last] == 0:
            return
        marks = self.pool.blocks[sequence.tables[whole][last]].marks
        marks |= {"answer"} if last >= sequence.num_prompt else {"answer", "prompt"}
        if last >= sequence.num_prompt and self.are("prompt", "answer"):
            for table in itertools.compress(
                sequence.tables, map(self.is_state, range(self.num_groups))
            ):
                self.pool.release([table[last]], unneeded=True)
                table[last] = 0

    def fate(self, sequence: Sequence, group: int, index: int) -> str:
        own = self.own_fate(sequence, group, index)
        return "kept" if own == "unneeded" and index < sequence.num_hits else own

    def own_fate(self, sequence: Sequence, group: int, index: int) -> str:
        size = self.block_size
        if sequence.interval is None:
            return "kept"
        anchors = sequence.anchor_blocks(size, len(sequence.tables[group]) + 100)
        own = [a for a in anchors if self.first_kept(group, a) <= index < a]
        if any(sequence.is_pinned(anchor, size) for anchor in own):
            return "pinned"
        return "kept" if own else "unneeded"

    def pin_anchors(self, sequences: list[Sequence]) -> int:
        pinned = 0
        for sequence in sequences:
            assert sequence.tables is not None
            end, size = sequence.num_published, self.block_size
            anchors = {*sequence.anchor_blocks(size, end), end} if sequence.pin and end else ()
            anchors = sorted(one for one in anchors if sequence.is_pinned(one, size))
            for group, table in enumerate(sequence.tables):
                own = anchors
                if self.is_full(group):
                    own = anchors[-1:] if sequence.pin_prefix else []
                for length in own:
                    blocks = table[self.first_kept(group, length) : length]
                    pinned += self.pool.set_pins([block for block in blocks if block], True)
        return pinned

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        return sum(self.most_of_group(group, num_tokens, chunk) for group in range(self.num_groups))

    def most_of_group(self, group: int, num_tokens: int, chunk: int) -> int:
        size = self.block_size
        if self.is_state(group):
            return min(-(-num_tokens // size), 3)
        full = num_tokens // size
        behind = full - self.first_kept(group, full)
        return min(-(-num_tokens // size), behind + -(-chunk // size) + 1)

    def append_tokens(self, sequences: list[Sequence], tokens: list[int]) -> None:
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.extend([token])

    def mark_blocks_filled(
        self, sequences: list[Sequence], upto: list[int]
    ) -> list[tuple[int, int, int, int]]:
        duplicates: list[tuple[int, int, int, int]] = []
        for number, (sequence, tokens) in enumerate(zip(sequences, upto, strict=True)):
            assert sequence.tables is not None
            hashes = sequence.block_hashes()
            for index in range(sequence.num_published, tokens // self.block_size):
                for group, table in enumerate(sequence.tables):
                    if table[index] == 0:
                        continue
                    key = (hashes[index], group)
                    duplicate = self.pool.register(table[index], key, sequence.epoch)
                    if duplicate is not None:
                        duplicates.append((number, group, index, duplicate))
            sequence.num_published = max(sequence.num_published, tokens // self.block_size)
            sequence.num_filled = max(sequence.num_filled, tokens)
        return duplicates

    def replace_block(self, sequence: Sequence, group: int, index: int) -> None:
        assert sequence.tables is not None
        own = sequence.tables[group][index]
        block = self.pool.lookup((sequence.block_hashes()[index], group))
        if block is None:
            return
        self.pool.touch(block)
        sequence.tables[group][index] = block
        self.pool.release([own], unneeded=True)

    def release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            assert sequence.tables is not None
            self.note_end(sequence)
            for table in sequence.tables:
                self.pool.release([block for block in table[::-1] if block])
            sequence.tables = None
            sequence.num_slots = sequence.num_ready_slots = sequence.num_filled = (
                sequence.num_published
            ) = 0

    def clear_cache_index(self) -> None:
        self.pool.epoch += 1

    def new_weight_version(self, weights: str | None = None) -> int:
        self.weight_version += 1
        self.weights_name = weights or str(self.weight_version)
        self.clear_cache_index()
        return self.weight_version

    def pin(self, sequence: Sequence, num_tokens: int) -> int:
        """Pins what the longest hit needs, which leaves the line of free blocks and joins again."""
        self.refresh(sequence)
        hashes = sequence.block_hashes()[: num_tokens // self.block_size]
        keys = self.needed(hashes[: self.longest_hit(hashes)])
        return self.set_pins(keys, pinned=True)

    def unpin(self, sequence: Sequence) -> int:
        self.refresh(sequence)
        hashes = sequence.block_hashes()
        unpinned = 0
        for group in range(self.num_groups):
            keys = [(one, group) for one in hashes if self.pool.lookup((one, group))]
            unpinned += self.set_pins(keys, pinned=False)
        return unpinned

    def set_pins(self, keys: list[Key], *, pinned: bool) -> int:
        taken = self.pool.commit(keys, 0)
        assert taken is not None
        blocks = taken[1]
        changed = self.pool.set_pins(blocks, pinned)
        groups = [
            [b for b, key in zip(blocks, keys, strict=True) if key[1] == group]
            for group in range(self.num_groups)
        ]
        for own in groups:
            self.pool.release(own[::-1])
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
            "pinned_blocks": sum(block.pinned for block in self.pool.blocks.values()),
            "pinned_free_blocks": len(self.pool.pinned),
            "held_above_blocks": self.pool.num_held_above,
        }
