"""Every misuse of the core raises an error that names the argument, and leaves the cache valid."""

from __future__ import annotations

import array
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from prefixcache._core import BlockHashes, BlockPool, PrefixCache, Sequence

THREADS = ["single_writer", "shared"]


@pytest.fixture(params=THREADS)
def cache(request: pytest.FixtureRequest) -> Iterator[PrefixCache]:
    cache = PrefixCache(17, 4, threads=request.param, max_blocks=33, model="m")
    yield cache
    cache.validate()


@pytest.fixture(params=THREADS)
def pool(request: pytest.FixtureRequest) -> Iterator[BlockPool]:
    pool = BlockPool(9, threads=request.param, max_blocks=17)
    yield pool
    pool.validate()


def committed(cache: PrefixCache, count: int = 10) -> Sequence:
    sequence = cache.new_sequence(list(range(count)))
    assert cache.commit_prefix_plan(sequence, 0, count) == 0
    return sequence


def state(cache: PrefixCache) -> tuple[object, ...]:
    return cache.num_free_blocks, cache.free_order(), cache.cached_blocks(), cache.stats()


@pytest.mark.parametrize(
    ("arguments", "keywords", "name"),
    [
        ((0,), {}, "num_blocks"),
        ((1,), {}, "num_blocks"),
        ((-1,), {}, "num_blocks"),
        ((2**64,), {}, "num_blocks"),
        ((2**24 + 1,), {}, "max_blocks"),
        ((8,), {"max_blocks": 4}, "num_blocks"),
        ((8,), {"max_blocks": 2**40}, "max_blocks"),
        ((8, 0), {}, "block_size"),
        ((8, 3), {}, "block_size"),
        ((8, 512), {}, "block_size"),
        ((8, -16), {}, "block_size"),
        ((8,), {"num_groups": 0}, "num_groups"),
        ((8,), {"num_groups": 70_000}, "num_groups"),
        ((8,), {"groups": []}, "groups must have from 1"),
        ((8,), {"groups": ["full"] * 65_536}, "groups must have from 1"),
        ((8,), {"groups": ["full", "mamba"]}, r"groups\[1\] must be .*, not \"mamba\""),
        ((8,), {"groups": [("chunked", 4)]}, r"groups\[0\] must be .*, not \"chunked\""),
        ((8,), {"groups": ["full", ("sliding_window", 0)]}, r"groups\[1\] must have a window"),
        ((8,), {"groups": [("sliding_window", -1)]}, "window"),
        ((8,), {"groups": ["full"], "num_groups": 1}, "num_groups must not be given with groups"),
        ((8,), {"free_order": "lifo"}, "free_order"),
        ((8,), {"eviction_policy": "fifo"}, "eviction_policy"),
        ((8,), {"threads": "many"}, "threads"),
    ],
)
def test_sizes_of_a_cache(arguments: tuple[int, ...], keywords: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        PrefixCache(*arguments, **keywords)


def test_wrong_types_of_a_cache() -> None:
    for arguments in [("8",), (8.0,), (None,), (8, "16")]:
        with pytest.raises(TypeError, match=r"num_blocks|block_size"):
            PrefixCache(*arguments, model="m")


TOKENS = [5, 0, 2**31 - 1, 7, 9]


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        np.array(TOKENS, np.int32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, np.uint64),
        np.array(TOKENS * 2, np.int32)[: len(TOKENS)],
        np.repeat(np.array(TOKENS, np.int64), 3)[::3],
        array.array("i", TOKENS),
        array.array("q", TOKENS),
        array.array("L", TOKENS),
        pytest.param("torch", id="torch"),
    ],
)
def test_every_kind_of_tokens(tokens: Any) -> None:
    if isinstance(tokens, str):
        tokens = pytest.importorskip("torch").tensor(TOKENS)
    cache = PrefixCache(4, 1, model="m")
    expected = cache.new_sequence(TOKENS).block_hashes()
    assert cache.new_sequence(tokens).block_hashes() == expected
    hashes = cache.compute_block_hashes(tokens)
    assert [hashes.to_bytes(index) for index in range(len(hashes))] == expected
    grown = cache.new_sequence([])
    grown.extend(tokens)
    assert grown.block_hashes() == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_tokens_that_are_not_aligned(dtype: type) -> None:
    aligned = np.array(TOKENS, dtype)
    tokens = np.frombuffer(b"-" + aligned.tobytes(), dtype, offset=1)
    assert not tokens.flags.aligned
    hashes = PrefixCache(4, 1, model="m").new_sequence(tokens).block_hashes()
    assert hashes == PrefixCache(4, 1, model="m").new_sequence(aligned).block_hashes()


@pytest.mark.parametrize("empty", [[], (), np.array([]), np.array([], np.int32)])
def test_no_tokens(empty: Any) -> None:
    cache = PrefixCache(4, model="m")
    assert len(cache.compute_block_hashes(empty)) == 0
    assert cache.new_sequence(empty).num_tokens == 0


BAD_VALUES = [
    [3, -1],
    [3, 2**32],
    [3, 2**70],
    np.array([3, -1], np.int32),
    np.array([3, -1], np.int64),
    np.array([3, 2**32], np.int64),
    np.array([3, 2**63], np.uint64),
    array.array("i", [3, -1]),
]
BAD_TYPES = [None, 7, "tokens", [3, "a"], [3, 1.0], [3, None], 1.5, {}, ...]
BAD_TYPES += [np.array([1.0]), np.array([[1]]), np.array(3), np.array([1], np.int8), b"12345678"]


BAD_TOKENS = [(tokens, ValueError, r"tokens\[1\] must be from 0") for tokens in BAD_VALUES]
BAD_TOKENS += [(tokens, TypeError, "tokens") for tokens in BAD_TYPES]


@pytest.mark.parametrize(("tokens", "error", "problem"), BAD_TOKENS, ids=repr)
def test_tokens(cache: PrefixCache, tokens: Any, error: type[Exception], problem: str) -> None:
    for call in token_calls(cache):
        with pytest.raises(error, match=problem):
            call(tokens)


def token_calls(cache: PrefixCache) -> list[Callable[[Any], Any]]:
    sequence = cache.new_sequence([])
    return [
        cache.compute_block_hashes,
        cache.new_sequence,
        sequence.extend,
        lambda tokens: cache.append_tokens([sequence, sequence], tokens),
    ]


def test_wrong_scopes(cache: PrefixCache) -> None:
    # Errors have notes, which name the argument, from Python 3.11 on.
    with pytest.raises(TypeError, match="cache_salt" if sys.version_info >= (3, 11) else "'str'"):
        cache.new_sequence([], cache_salt=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="extras"):
        cache.new_sequence([], extras=["text"])  # type: ignore[list-item]
    with pytest.raises(UnicodeError):
        cache.new_sequence([], cache_salt="\ud800")


@pytest.mark.parametrize(
    ("hits", "count", "name"),
    [
        (0, 0, "num_tokens"),
        (-4, 4, "hit_tokens"),
        (3, 4, "hit_tokens"),
        (12, 4, "hit_tokens"),
        (2**63, 4, "hit_tokens"),
        (0, -1, "num_tokens"),
        (0, 2**60, "num_tokens"),
        (0, 2**64, "num_tokens"),
    ],
)
def test_plans(cache: PrefixCache, hits: int, count: int, name: str) -> None:
    sequence = cache.new_sequence(range(10))
    before = state(cache)
    with pytest.raises(ValueError, match=name):
        cache.commit_prefix_plan(sequence, hits, count)
    assert state(cache) == before


def batch_calls(cache: PrefixCache) -> dict[str, Callable[[Any], Any]]:
    return {
        "append_slots": lambda batch: cache.append_slots(batch, [1] * len(batch)),
        "mark_blocks_filled": lambda batch: cache.mark_blocks_filled(batch, [1] * len(batch)),
        "release": cache.release,
    }


@pytest.mark.parametrize("call", ["append_slots", "mark_blocks_filled", "release"])
def test_sequences_that_a_batch_refuses(cache: PrefixCache, call: str) -> None:
    good, idle = committed(cache), cache.new_sequence(range(10))
    foreign = committed(PrefixCache(17, 4, model="m"))
    before = state(cache)
    method = batch_calls(cache)[call]
    with pytest.raises(RuntimeError, match=r"sequences\[1\] holds no blocks"):
        method([good, idle])
    with pytest.raises(RuntimeError, match=r"sequences\[1\] belongs to another cache"):
        method([good, foreign])
    with pytest.raises(RuntimeError, match=r"sequences\[1\] is in use"):
        method([good, good])
    with pytest.raises(TypeError, match=r"sequences\[1\] must be a Sequence"):
        method([good, None])
    with pytest.raises(TypeError, match="sequences"):
        cache.release(good)  # type: ignore[arg-type]
    assert state(cache) == before


def test_sequences_that_single_calls_refuse(cache: PrefixCache) -> None:
    sequence = committed(cache)
    foreign = PrefixCache(17, 4, model="m").new_sequence(range(10))
    before = state(cache)
    with pytest.raises(RuntimeError, match="sequence holds blocks already"):
        cache.commit_prefix_plan(sequence, 0, 1)
    for call in (
        lambda: cache.commit_prefix_plan(foreign, 0, 1),
        lambda: cache.count_prefix_hits(foreign),
        lambda: cache.count_whole_hits(foreign),
        lambda: cache.pin(foreign, 4),
        lambda: cache.unpin(foreign),
        lambda: cache.replace_block(foreign, 0, 0),
        lambda: cache.append_tokens([foreign], [1]),
        lambda: cache.validate([foreign]),
    ):
        with pytest.raises(RuntimeError, match="belongs to another cache"):
            call()
    assert state(cache) == before


@pytest.mark.parametrize("counts", [[0], [-1], [2**60], [2**64], [1, 1], [], "1", [1.5], None])
def test_counts(cache: PrefixCache, counts: Any) -> None:
    sequence = committed(cache)
    before = state(cache)
    with pytest.raises((ValueError, TypeError), match="counts"):
        cache.append_slots([sequence], counts)
    assert state(cache) == before


@pytest.mark.parametrize("upto", [[-1], [11], [2**64], [1, 1], []])
def test_upto(cache: PrefixCache, upto: list[int]) -> None:
    sequence = committed(cache)
    with pytest.raises(ValueError, match="upto"):
        cache.mark_blocks_filled([sequence], upto)
    assert sequence.num_filled == 0


def test_slots_beyond_the_tokens_cannot_be_filled(cache: PrefixCache) -> None:
    sequence = committed(cache)
    assert cache.append_slots([sequence], [5]) == 1
    with pytest.raises(ValueError, match=r"upto\[0\] must be at most 10"):
        cache.mark_blocks_filled([sequence], [12])


def test_duplicates_are_reported_once_and_can_be_swapped(cache: PrefixCache) -> None:
    first, second = committed(cache), committed(cache)
    assert cache.mark_blocks_filled([first, second], [8, 8]) == [
        (1, 0, 0, first.block_table()[0]),
        (1, 0, 1, first.block_table()[1]),
    ]
    assert cache.mark_blocks_filled([first, second], [8, 8]) == []
    for index in (2, -1, 2**70):
        with pytest.raises(ValueError, match="index"):
            cache.replace_block(second, 0, index)
    for group in (1, -1, 70_000):
        with pytest.raises(ValueError, match="group"):
            cache.replace_block(second, group, 0)
    free = cache.num_free_blocks
    cache.replace_block(second, 0, 1)
    assert second.block_table()[1] == first.block_table()[1]
    assert cache.num_free_blocks == free + 1
    cache.release([first, second])
    assert cache.num_free_blocks == cache.num_blocks - 1


@pytest.mark.parametrize("kind", [("sliding_window",), ("sliding_window", 4, 4), 4, None])
def test_kinds_of_groups_of_the_wrong_type(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"groups\[0\] must be "):
        PrefixCache(8, groups=[kind], model="m")


@pytest.mark.parametrize("threads", THREADS)
def test_calls_about_windows(threads: Any) -> None:
    cache = PrefixCache(9, 4, groups=["full", ("sliding_window", 5)], threads=threads, model="m")
    sequence = cache.new_sequence(range(16))
    for call in (cache.drop_unneeded, cache.ensure_slots):
        with pytest.raises(RuntimeError, match=r"sequences\[0\] holds no blocks"):
            call([sequence], [1])
    with pytest.raises(RuntimeError, match=r"sequences\[0\] holds no blocks"):
        cache.pin_anchors([sequence])
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        cache.commit_prefix_plan(sequence, 0, 16, 0)
    with pytest.raises(ValueError, match="interval must not be None with pin"):
        sequence.set_retention(None, pin=True)
    with pytest.raises(ValueError, match="interval must be from 0"):
        sequence.set_retention(-1)
    with pytest.raises(ValueError, match="position must be from 0"):
        sequence.add_anchor(-1)
    assert cache.commit_prefix_plan(sequence, 0, 16, 8) == 0
    assert (sequence.num_slots, sequence.num_ready_slots) == (16, 8)
    with pytest.raises(ValueError, match=r"upto\[0\] must be at most 8, its slots, not 9"):
        cache.drop_unneeded([sequence], [9])
    with pytest.raises(ValueError, match=r"upto\[0\] must be at most 8, the tokens with a slot"):
        cache.mark_blocks_filled([sequence], [9])
    with pytest.raises(ValueError, match="upto must have one entry"):
        cache.ensure_slots([sequence], [])
    with pytest.raises(ValueError, match=r"upto\[0\] must be at most"):
        cache.ensure_slots([sequence], [2**60])
    cache.mark_blocks_filled([sequence], [8])
    assert cache.drop_unneeded([sequence], [8]) == 1
    assert sequence.block_table(1)[0] == 0
    arrays = [np.zeros(4, kind) for kind in ("i4", "i4", "i4", "i8", "i4")]
    with pytest.raises(ValueError, match=r"starts\[0\] must not need blocks before 1"):
        cache.fill_block_tables([sequence], [7], [1], 1, *arrays)
    with pytest.raises(ValueError, match="first_pages must have room for 1"):
        cache.fill_block_tables([sequence], [7], [1], 0, *arrays[:4], arrays[4][:0])
    with pytest.raises(ValueError, match="index must be at least 1, the first block held"):
        cache.replace_block(sequence, 1, 0)
    cache.validate()


@pytest.mark.parametrize("size", [-1, 0, 1, 34, 2**24 + 1, 2**64])
def test_resize(cache: PrefixCache, pool: BlockPool, size: int) -> None:
    before = state(cache)
    with pytest.raises(ValueError, match="num_blocks"):
        cache.resize(size)
    with pytest.raises(ValueError, match="num_blocks"):
        pool.resize(size)
    assert state(cache) == before


@pytest.mark.parametrize("kind", [BlockPool, PrefixCache])
def test_a_pool_too_large_for_the_memory(kind: Any) -> None:
    """Seen by a process that may take little more memory than it has."""
    code = f"""
import resource
from prefixcache._core import {kind.__name__}
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, size + 2**28))
try:
    {kind.__name__}(16, max_blocks=2**24)
except MemoryError as error:
    print(error)
print({kind.__name__}(16).num_blocks)
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout == "max_blocks asks for more memory than there is: 16777216\n16\n"


@pytest.mark.parametrize("kind", [BlockPool, partial(PrefixCache, model="m")])
def test_a_resize_during_another_threads_call_is_refused(kind: Any) -> None:
    num_blocks, taken = 2**15, 2**14
    pool = kind(num_blocks, threads="shared")
    stop = threading.Event()

    def take_and_give_back() -> None:
        if isinstance(pool, BlockPool):
            pool.release(pool.allocate(taken) or [])
        else:
            sequence = pool.new_sequence([])
            pool.commit_prefix_plan(sequence, 0, taken * pool.block_size)
            pool.release([sequence])

    def change() -> None:
        while not stop.is_set():
            take_and_give_back()

    def resize_until_refused() -> None:
        for _ in range(1_000_000):
            pool.resize(num_blocks)

    with ThreadPoolExecutor(1) as executor:
        changing = executor.submit(change)
        try:
            with pytest.raises(RuntimeError, match="num_blocks cannot change while another thread"):
                resize_until_refused()
        finally:
            stop.set()
        changing.result()


def buffers(pages: int = 3, tokens: int = 10, sequences: int = 1) -> list[np.ndarray[Any, Any]]:
    sizes = [(sequences + 1, "i4"), (pages, "i4"), (sequences, "i4"), (tokens, "i8")]
    return [np.full(size, -1, dtype) for size, dtype in sizes]


NAMES = ["indptr", "indices", "last_page_len", "slot_mapping"]


@pytest.mark.parametrize("which", range(4))
def test_buffers(cache: PrefixCache, which: int) -> None:
    pair = [committed(cache), committed(cache)]
    good = buffers(pages=6, tokens=20, sequences=2)
    size = len(good[which])
    read_only = np.zeros(size, good[which].dtype)
    read_only.flags.writeable = False
    bytes_ = np.zeros(size * good[which].itemsize + 1, np.uint8)
    misaligned = bytes_[1:].view(good[which].dtype)
    for bad in (
        good[which][: size - 1],
        np.zeros(2 * size, good[which].dtype)[::2],
        read_only,
        misaligned,
    ):
        arrays = [*good[:which], bad, *good[which + 1 :]]
        with pytest.raises(ValueError, match=NAMES[which]):
            cache.fill_block_tables(pair, [0, 0], [10, 10], 0, *arrays)
    for bad in (np.zeros(size, "f4"), np.zeros((size, 1), good[which].dtype), [0] * size):
        arrays = [*good[:which], bad, *good[which + 1 :]]
        with pytest.raises(TypeError, match=NAMES[which]):
            cache.fill_block_tables(pair, [0, 0], [10, 10], 0, *arrays)
    assert all((one == -1).all() for one in good)
    assert cache.fill_block_tables(pair, [0, 0], [10, 10], 0, *good) == 6


def test_the_same_buffer_twice(cache: PrefixCache) -> None:
    indptr, _, last, mapping = buffers()
    with pytest.raises(ValueError, match="indices cannot be written to"):
        cache.fill_block_tables([committed(cache)], [0], [1], 0, indptr, indptr, last, mapping)


class Resizes(list[Sequence]):
    """Sequences that resize an array when they are read."""

    def __init__(self, sequences: list[Sequence], array: np.ndarray[Any, Any], size: int) -> None:
        super().__init__(sequences)
        self._resize = lambda: array.resize(size, refcheck=False)

    def __iter__(self) -> Iterator[Sequence]:
        self._resize()
        return super().__iter__()


class Batch:
    """Some other iterable."""

    def __init__(self, sequences: Resizes) -> None:
        self._sequences = sequences

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)


@pytest.mark.parametrize("which", range(4))
def test_buffers_that_are_resized_while_the_batch_is_read(cache: PrefixCache, which: int) -> None:
    """What counts is the memory that they have after the caller's code has run."""
    sequences, expected, arrays = [committed(cache)], buffers(), buffers()
    assert cache.fill_block_tables(sequences, [0], [10], 0, *expected) == 3
    size = len(arrays[which])
    gone: Any = Batch(Resizes(sequences, arrays[which], 0))
    with pytest.raises(ValueError, match=f"{NAMES[which]} must have room"):
        cache.fill_block_tables(gone, [0], [10], 0, *arrays)
    grown: Any = Batch(Resizes(sequences, arrays[which], size))
    assert cache.fill_block_tables(grown, [0], [10], 0, *arrays) == 3
    for filled, right in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(filled, right)


def test_an_error_while_a_list_is_read_is_the_callers_own(cache: PrefixCache) -> None:
    def broken() -> Iterator[Sequence]:
        yield committed(cache)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        cache.release(broken())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("starts", "counts", "group", "name"),
    [
        ([0], [11], 0, "counts"),
        ([10], [1], 0, "counts"),
        ([2**63], [2**63], 0, "counts"),
        ([-1], [1], 0, "starts"),
        ([], [1], 0, "starts"),
        ([0], [], 0, "counts"),
        ([0], [1], 1, "group"),
        ([0], [1], -1, "group"),
    ],
)
def test_spans(
    cache: PrefixCache, starts: list[int], counts: list[int], group: int, name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        cache.fill_block_tables([committed(cache)], starts, counts, group, *buffers())


def test_looking_at_a_sequence(cache: PrefixCache) -> None:
    sequence = committed(cache)
    for group in (1, -1):
        with pytest.raises(ValueError, match="group"):
            sequence.block_table(group)
    assert sequence.block_hashes(1) == sequence.block_hashes()[1:]
    assert sequence.block_hashes(0, 1) == sequence.block_hashes()[:1]
    assert sequence.block_hashes(5, 1) == []
    hashes = cache.compute_block_hashes(range(10))
    assert [hashes.to_bytes(index) for index in range(2)] == sequence.block_hashes()
    with pytest.raises(IndexError):
        hashes.to_bytes(2)
    for made in (Sequence, BlockHashes):
        with pytest.raises(TypeError):
            made()


def test_use_after_close() -> None:
    cache = PrefixCache(17, 4, model="m")
    sequence, hashes = committed(cache), cache.compute_block_hashes([])
    cache.close()
    cache.close()
    for call in (
        lambda: cache.num_free_blocks,
        lambda: cache.probe(hashes),
        lambda: cache.new_sequence([]),
        lambda: cache.count_prefix_hits(sequence),
        lambda: cache.release([sequence]),
        cache.clear_cache_index,
        cache.validate,
        cache.stats,
    ):
        with pytest.raises(RuntimeError, match="the cache is closed"):
            call()


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def test_blocks_that_a_pool_refuses(pool: BlockPool) -> None:
    blocks = pool.allocate(3)
    assert blocks == [1, 2, 3]
    for bad, why in [(0, "null block"), (17, "not a block"), (5, "not in use"), (10, "retired")]:
        for call in (
            lambda bad: pool.release([bad]),
            lambda bad: pool.pin([bad]),
            lambda bad: pool.unpin([bad]),
            lambda bad: pool.register([bad], [digest(1)], pool.epoch),
        ):
            with pytest.raises(ValueError, match=f"blocks: .*{why}"):
                call(bad)
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match=r"blocks\[1\]"):
            pool.release([1, bad])
    assert pool.num_free_blocks == 5


def test_a_release_stops_at_the_first_bad_block(pool: BlockPool) -> None:
    assert pool.allocate(3) == [1, 2, 3]
    with pytest.raises(ValueError, match="released twice"):
        pool.release([2, 2, 1])
    assert pool.num_free_blocks == 6
    pool.release([1, 3])
    assert pool.free_order() == [1, 3, 2, 4, 5, 6, 7, 8]


def test_more_blocks_than_the_pool(pool: BlockPool) -> None:
    for count in (9, -1, 2**64):
        with pytest.raises(ValueError, match="count"):
            pool.allocate(count)
        with pytest.raises(ValueError, match="num_new"):
            pool.commit([], count)
    assert pool.allocate(8) is not None
    assert pool.allocate(1) is None
    assert pool.commit([digest(1)], 1) is None


def test_hashes_that_a_pool_refuses(pool: BlockPool) -> None:
    assert pool.allocate(1) == [1]
    for bad in (b"short", b"x" * 33):
        with pytest.raises(ValueError, match=r"hashes\[0\] must have 32 bytes"):
            pool.commit([bad])
        with pytest.raises(ValueError, match="block_hash must have 32 bytes"):
            pool.lookup(bad)
    with pytest.raises(TypeError, match=r"hashes\[0\]"):
        pool.commit(["text"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="hashes must be one for each"):
        pool.register([1], [], pool.epoch)
    with pytest.raises(ValueError, match="epoch"):
        pool.register([1], [digest(1)], -1)
    pool.register([1], [digest(1)], pool.epoch)
    with pytest.raises(ValueError, match="registered under another hash"):
        pool.register([1], [digest(2)], pool.epoch)
