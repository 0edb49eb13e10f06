"""The store against a dict that does the same, its arguments, and injected faults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixcache_store import Store, StoreInUseError

PAGE = 4096
KEYS = st.binary(min_size=1, max_size=2)
SHARED = np.ones(4)
MEMORY = Path("/dev/shm")
SCRATCH = MEMORY if MEMORY.is_dir() else None
"""Where many lives go: a disk takes a hundred times as long."""
FAULTS = int(os.environ.get("FAULTS", "2000"))


def room(value: bytes) -> int:
    """What a value counts for: whole pages, and one for its name."""
    return -(-len(value) // PAGE) * PAGE + PAGE


class StoreMachine(RuleBasedStateMachine):
    """One thread's lives over a folder; the dict has the values in the order of their use."""

    @initialize(bound=st.integers(8, 40))
    def begin(self, bound):
        self.folder = Path(tempfile.mkdtemp(dir=SCRATCH)) / "values"
        self.folder.mkdir(mode=0o700)
        self.bound = bound * PAGE
        self.values = OrderedDict[bytes, bytes]()
        self.stamps: dict[bytes, int] = {}
        self.open()

    def open(self):
        self.others = self.folder.stat().st_blocks * 512
        self.store = Store(self.folder, self.bound, threads=1)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder.parent)

    def evict(self, wanted=0):
        while self.others + sum(map(room, self.values.values())) + wanted > self.bound:
            self.values.popitem(last=False)

    def use(self, key):
        """It is written or read: that outlives the process."""
        self.values.move_to_end(key)
        self.stamps[key] = max(self.stamps.values(), default=0) + 1

    @rule(key=KEYS, byte=st.integers(0, 255), size=st.sampled_from([1, PAGE, 3 * PAGE + 1]))
    def put(self, key, byte, size):
        value = bytes([byte]) * size
        assert self.store.put([key], [value]) == [True]
        if key in self.values:
            self.values.move_to_end(key)
        if self.values.get(key) != value:
            self.evict(room(value))  # Until it is written an earlier one has its room.
            self.values[key] = value
            self.use(key)

    @rule(size=st.integers(41, 60))
    def put_too_much(self, size):
        assert self.store.put([b"large"], [bytes(size * PAGE)]) == [False]

    @rule(keys=st.lists(KEYS, max_size=4), timeout=st.sampled_from([None, 60.0]))
    def get(self, keys, timeout):
        sizes = [len(self.values.get(key, b"?")) for key in keys]
        buffers = [bytearray(size) for size in sizes]
        hits = self.store.get_into(keys, buffers, timeout)
        assert hits == [key in self.values for key in keys]
        for key, buffer, is_hit in zip(keys, buffers, hits, strict=True):
            if is_hit:
                assert buffer == self.values[key]
                self.use(key)

    @rule(key=KEYS, size=st.integers(1, PAGE))
    def get_of_another_length(self, key, size):
        buffer = bytearray(len(self.values.get(key, b"")) + size)
        assert self.store.get_into([key], [buffer]) == [False]

    @rule(key=KEYS)
    def touch(self, key):
        self.store.touch([key])
        if key in self.values:
            self.values.move_to_end(key)

    @rule(keys=st.lists(KEYS, max_size=4))
    def remove(self, keys):
        self.store.remove(keys)
        for key in keys:
            self.values.pop(key, None)

    @rule()
    def clear(self):
        self.store.clear()
        self.values.clear()

    @rule(bound=st.integers(8, 40))
    def reopen(self, bound):
        self.store.close()
        self.bound = bound * PAGE
        self.open()
        self.values = OrderedDict(sorted(self.values.items(), key=lambda it: self.stamps[it[0]]))
        self.evict()

    @invariant()
    def agrees(self):
        keys = list(self.values)
        assert len(self.store) == len(keys)
        assert self.store.contains([*keys, b"never put"]) == [True] * len(keys) + [False]
        assert self.store.num_bytes == self.others + sum(map(room, self.values.values()))
        paths = [self.folder, *self.folder.iterdir()]
        used = sum(path.stat().st_blocks * 512 for path in paths)
        assert used <= self.store.num_bytes <= self.store.bound == self.bound


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(deadline=None, max_examples=40, stateful_step_count=40)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "values", 1 << 20) as store:
        yield store


def test_touched_values_are_evicted_last(store):
    keys = [bytes([number]) for number in range(1, 200)]
    for key in keys:
        store.touch([b"\1"])
        assert store.put([key], [bytes(PAGE)]) == [True]
    assert store.contains(keys[:2]) == [True, False]
    assert store.counts()["evicted"] > 50


def test_buffers_are_memory_of_any_kind(store):
    """Whatever its shape; a part of an array in its place."""
    values = np.arange(3 * PAGE, dtype=np.float32).reshape(3, 2, -1)
    assert store.put([b"a", b"b"], [values[1], memoryview(values)[2:3]]) == [True, True]
    into = np.zeros_like(values)
    assert store.get_into([b"b", b"a"], [into[0], into[1]]) == [True, True]
    assert (into[:2] == values[[2, 1]]).all()
    assert not into[2].any()


WRONG = {
    "an empty key": lambda store: store.contains([b""]),
    "a key that is text": lambda store: store.contains(["key"]),
    "more keys": lambda store: store.put([b"a", b"b"], [b"value"]),
    "an empty buffer": lambda store: store.put([b"a"], [b""]),
    "a buffer in parts": lambda store: store.put([b"a"], [np.zeros((4, 4))[:, 1]]),
    "a read-only buffer": lambda store: store.get_into([b"a"], [b"value"]),
    "buffers that overlap": lambda store: store.get_into([b"a", b"b"], [SHARED[:2], SHARED[1:]]),
    "a negative timeout": lambda store: store.put([b"a"], [b"value"], -1.0),
    "no number for a timeout": lambda store: store.get_into([b"a"], [bytearray(1)], float("nan")),
    "a closed store": lambda store: (store.close(), store.contains([b"a"])),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise(store, name):
    with pytest.raises((ValueError, TypeError)):
        WRONG[name](store)


def test_a_folder_has_one_store(store, tmp_path):
    with pytest.raises(StoreInUseError, match=r"another process uses .*values"):
        Store(tmp_path / "values", 1 << 20)
    store.put([b"a"], [b"value"])
    store.close()
    with Store(tmp_path / "values", 1 << 20) as again:
        assert again.contains([b"a"]) == [True]


def test_a_folder_that_others_may_open_is_refused(tmp_path):
    tmp_path.chmod(0o750)
    with pytest.raises(OSError, match="opened by other users"):
        Store(tmp_path, 1 << 20)


def test_files_of_others_stay_and_count(tmp_path):
    folder = tmp_path / "values"
    folder.mkdir(mode=0o700)
    (folder / "notes").write_bytes(bytes(10 * PAGE))
    (folder / "7.part").write_bytes(bytes(PAGE))
    with Store(folder, 20 * PAGE) as store:
        assert store.num_bytes >= 10 * PAGE
    assert {path.name for path in folder.iterdir()} == {"lock", "notes"}
    with pytest.raises(OSError, match="no room"):
        Store(folder, 5 * PAGE)


@pytest.mark.timeout(0)
def test_no_injected_fault_gives_other_bytes(tmp_path):
    """FAULTS=1000000 injects as many."""
    source = Path(__file__).parents[3] / "tests/failing_files.c"
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        command = [sys.executable, Path(__file__).with_name("faults.py"), str(FAULTS), "1"]
        environment = {"FAILING_FOLDER": f"{scratch}/values", "LD_PRELOAD": str(shim)}
        ended = subprocess.run(
            command, env=os.environ | environment, stdout=subprocess.PIPE, check=True
        )
    result = json.loads(ended.stdout)
    print(result)
    counts = result["counts"]
    hits, misses = counts.pop("hits"), counts.pop("misses")
    assert not any(result["wrong"].values()), result
    assert sum(counts.values()) == FAULTS
    assert len(counts) == 15
    assert hits > misses > 0
