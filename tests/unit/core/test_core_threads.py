"""What threads may do with a cache: many read, one writes, or many write where asked for."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from prefixcache._core import BlockPool, Cpu, PackedLinear, PrefixCache

BLOCK = 4
LONG = 8_192  # tokens: enough for a call to detach from the interpreter


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()


def publish(cache: PrefixCache, tokens: Any) -> None:
    sequence = cache.new_sequence(tokens)
    hits = cache.count_prefix_hits(sequence)
    if cache.commit_prefix_plan(sequence, hits, sequence.num_tokens - hits) is not None:
        cache.mark_blocks_filled([sequence], [sequence.num_tokens])
        cache.release([sequence])


def test_a_second_writer_is_refused_and_can_take_over() -> None:
    cache = PrefixCache(17, BLOCK, model="m")
    publish(cache, range(8))
    for write in (
        lambda: publish(cache, range(8)),
        cache.clear_cache_index,
        cache.new_weight_version,
        lambda: cache.resize(17),
        lambda: cache.demote(1),
    ):
        with pytest.raises(RuntimeError, match=r"adopt_writer\(\).*threads=\"shared\""):
            in_thread(write)
    assert in_thread(lambda: cache.probe(cache.compute_block_hashes(range(9)))) == 8
    assert in_thread(lambda: cache.stats()["cached_blocks"]) == 2
    in_thread(cache.validate)

    def take_over() -> None:
        cache.adopt_writer()
        publish(cache, range(12))

    in_thread(take_over)
    with pytest.raises(RuntimeError, match="another thread writes"):
        publish(cache, range(8))
    cache.adopt_writer()
    publish(cache, range(8))


def test_a_pool_has_one_writer_too() -> None:
    pool = BlockPool(9)
    assert pool.allocate(1) == [1]
    with pytest.raises(RuntimeError, match="another thread writes"):
        in_thread(lambda: pool.allocate(1))
    in_thread(pool.adopt_writer)
    assert in_thread(lambda: pool.lookup(bytes(32))) is None
    shared = BlockPool(9, threads="shared")
    assert shared.allocate(1) == [1]
    assert in_thread(lambda: shared.allocate(1)) == [2]


def test_any_thread_writes_to_a_shared_cache(seed: int) -> None:
    cache = PrefixCache(257, BLOCK, threads="shared", model="m")

    def work(thread: int) -> None:
        pick = random.Random(seed + thread)
        for _ in range(150):
            publish(cache, [pick.randrange(4)] * pick.randrange(1, 200))

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(work, range(4)))
    cache.validate()
    assert cache.num_free_blocks == cache.num_blocks - 1
    assert cache.stats()["hits"] > 0


@pytest.mark.parametrize("threads", ["single_writer", "shared"])
def test_probes_in_parallel_with_the_writer(threads: Any) -> None:
    cache = PrefixCache(LONG // BLOCK + 65, BLOCK, threads=threads, model="m")
    kept = cache.new_sequence(range(64 * BLOCK))
    assert cache.commit_prefix_plan(kept, 0, 64 * BLOCK) == 0
    cache.mark_blocks_filled([kept], [64 * BLOCK])
    prompts = [[prompt] * LONG for prompt in range(3)]
    done = threading.Event()

    def probe() -> list[int]:
        live = cache.compute_block_hashes(range(64 * BLOCK))
        other = cache.compute_block_hashes(prompts[0])
        seen: list[int] = []
        while not done.is_set():
            assert cache.probe(live) == 64 * BLOCK  # held all the time, so never evicted
            seen.append(cache.probe(other))
        return seen

    with ThreadPoolExecutor(2) as executor:
        probes = [executor.submit(probe) for _ in range(2)]
        try:
            for turn in range(30):
                publish(cache, prompts[turn % 3])
        finally:
            done.set()
        seen = [count for one in probes for count in one.result()]
    assert all(count % BLOCK == 0 and count <= LONG for count in seen)
    cache.release([kept])
    cache.validate()


def test_a_sequence_serves_one_thread_at_a_time() -> None:
    """Four threads use one sequence until one has come second; it gets an error."""
    cache = PrefixCache(2 * LONG // BLOCK, BLOCK, threads="shared", model="m")
    sequence = cache.new_sequence([0] * LONG)
    refused: list[str] = []

    def use_once() -> None:
        try:
            if cache.commit_prefix_plan(sequence, 0, LONG) is not None:
                cache.release([sequence])
        except RuntimeError as error:
            refused.append(str(error))

    def use() -> None:
        for _ in range(20_000):
            if len(refused) < 100:
                use_once()

    with ThreadPoolExecutor(4) as executor:
        for future in [executor.submit(use) for _ in range(4)]:
            future.result()
    assert refused
    known = ("in use by another call", "holds blocks already", "holds no blocks")
    assert all(any(part in error for part in known) for error in refused)
    if sequence.is_committed:
        cache.release([sequence])
    assert cache.num_free_blocks == cache.num_blocks - 1
    cache.validate()


@pytest.fixture
def no_switching() -> Iterator[None]:
    """A thread keeps the interpreter until it lets go of it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    yield
    sys.setswitchinterval(before)


def another_runs_during(call: Callable[[], Any], tries: int) -> bool:
    """Whether a thread that waits for the interpreter gets it within this number of calls."""
    gate = threading.Lock()
    ran = threading.Event()

    def wait() -> None:
        with gate:
            ran.set()

    def ran_during_call() -> bool:
        call()
        return ran.is_set()

    with gate:
        other = threading.Thread(target=wait)
        other.start()
    during = any(ran_during_call() for _ in range(tries))
    other.join()
    return during


class Calls:
    """Calls about `count` blocks; what each needs besides is done a few blocks at a time."""

    FEW, MANY = 16, 16_384

    def __init__(self) -> None:
        self.pool = BlockPool(2 * self.MANY + 1)
        self.hashes = [number.to_bytes(32, "little") for number in range(self.MANY)]
        self.blocks = self.pool.allocate(self.MANY) or []
        self.register(self.MANY)

    def allocate(self, count: int) -> None:
        self._release(self.pool.allocate(count) or [])

    def commit(self, count: int) -> None:
        taken = self.pool.commit(self.hashes[:count])
        assert taken is not None
        self._release(taken[1])

    def register(self, count: int) -> None:
        self.pool.register(self.blocks[:count], self.hashes[:count], self.pool.epoch)

    def release(self, count: int) -> None:
        parts = [self.pool.allocate(self.FEW) for _ in range(count // self.FEW)]
        self.pool.release([block for part in parts for block in part or []])

    def pin(self, count: int) -> None:
        self.pool.pin(self.blocks[:count])

    def unpin(self, count: int) -> None:
        self.pool.unpin(self.blocks[:count])

    def _release(self, blocks: list[int]) -> None:
        for start in range(0, len(blocks), self.FEW):
            self.pool.release(blocks[start : start + self.FEW])


def cache_calls(num_blocks: int) -> dict[str, Callable[[], Any]]:
    """Calls about `num_blocks` blocks of a cache; whatever else they do is short."""
    num_tokens = num_blocks * BLOCK
    cache = PrefixCache(2 * num_blocks + 1, BLOCK, threads="shared", model="m")
    tokens = np.arange(num_tokens, dtype=np.int32)
    sequence, hashes = cache.new_sequence(tokens), cache.compute_block_hashes(tokens)
    cache.commit_prefix_plan(sequence, 0, num_tokens)
    cache.mark_blocks_filled([sequence], [num_tokens])
    waiting = cache.new_sequence(tokens)

    def shrink_and_grow() -> None:
        cache.resize(2)
        cache.resize(2 * num_blocks + 1)

    def count_hits_under_new_weights() -> None:
        cache.new_weight_version()
        cache.count_prefix_hits(waiting)

    return {
        "cached_blocks": cache.cached_blocks,
        "count_hits_under_new_weights": count_hits_under_new_weights,
        "extend": lambda: cache.new_sequence([]).extend(tokens),
        "free_order": cache.free_order,
        "pin": lambda: cache.pin(sequence, num_tokens),
        "probe": lambda: cache.probe(hashes),
        "resize": shrink_and_grow,
        "unpin": lambda: cache.unpin(sequence),
        "validate": cache.validate,
    }


@pytest.mark.usefixtures("no_switching")
@pytest.mark.parametrize("name", cache_calls(1))
def test_long_calls_of_a_cache_let_other_threads_run(name: str) -> None:
    assert not another_runs_during(cache_calls(Calls.FEW)[name], 20)
    assert another_runs_during(cache_calls(Calls.MANY)[name], 1_000)


def kernel_calls(width: int) -> dict[str, Callable[[], Any]]:
    cpu = Cpu(1)
    layer = PackedLinear(cpu, width, width, "float32")
    weight = np.zeros((width, width), np.float32)
    return {
        "zeroed": lambda: PackedLinear(cpu, 1, width * width, "float32", bias=True),
        "copy_rows": lambda: layer.copy_rows(0, weight.ctypes.data, width),
    }


@pytest.mark.usefixtures("no_switching")
@pytest.mark.parametrize("name", kernel_calls(2))
def test_long_calls_of_a_layer_let_other_threads_run(name: str) -> None:
    assert not another_runs_during(kernel_calls(64)[name], 20)
    assert another_runs_during(kernel_calls(1_024)[name], 1_000)


@pytest.mark.usefixtures("no_switching")
@pytest.mark.parametrize("name", ["allocate", "commit", "register", "release", "pin", "unpin"])
def test_long_calls_of_a_pool_let_other_threads_run(name: str) -> None:
    calls = Calls()
    call = getattr(calls, name)
    assert not another_runs_during(lambda: call(calls.FEW), 20)
    assert another_runs_during(lambda: call(calls.MANY), 1_000)


def run_alone(script: str) -> tuple[str, str]:
    """What a process prints and what it complains of that runs the script."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


FORKS = """
import os, sys, tempfile
from prefixcache import _core
file = tempfile.TemporaryFile()
cpu, kept = _core.Cpu(2), _core.KVFile(file.fileno(), bytes(32), 1, 4096, 64)
child = os.fork()
if child == 0:
    {in_child}
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("in_child", ["del cpu", "del kept", "pass"])
def test_a_forked_child_drops_what_has_threads_in_its_parent_quietly(in_child: str) -> None:
    assert run_alone(FORKS.format(in_child=in_child)) == ("7\n", "")


PANICS = """
import sys
from prefixcache import _core
cache = _core.PrefixCache(64, threads="{threads}", model="m")
# An array is made while the cache is being changed, and without numpy that is a panic.
for name in ("numpy", "numpy._core.multiarray", "numpy.core.multiarray"):
    sys.modules[name] = None
try:
    cache.begin_moves(32, 4)
except BaseException as error:
    print(type(error).__name__)
for call in (cache.stats, cache.adopt_writer, cache.free_order, lambda: cache.resize(9)):
    try:
        call()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize("threads", ["single_writer", "shared"])
def test_a_call_that_panics_closes_the_cache(threads: str) -> None:
    printed, _ = run_alone(PANICS.format(threads=threads))
    reason = "the cache is closed: a call that was changing it panicked"
    assert printed.splitlines() == ["PanicException", *[reason] * 4]
