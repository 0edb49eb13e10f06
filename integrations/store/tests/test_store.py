"""The store against a dict that does the same, its arguments, and injected faults."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from damage import SCRATCH
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixcache_store import Store, StoreInUseError

PAGE = 4096
KEYS = st.sampled_from([bytes(range(size)) for size in range(1, 9)])
BOUNDS = st.integers(8, 24)
SHARED = np.ones(4)
FAULTS = int(os.environ.get("FAULTS", "2000"))


def room(value: bytes) -> int:
    """What a value counts for: whole pages, and one for its name."""
    return -(-len(value) // PAGE) * PAGE + PAGE


class StoreMachine(RuleBasedStateMachine):
    """One thread's lives over a folder; the dict has the values in the order of their use."""

    @initialize(bound=BOUNDS)
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
        if self.values.get(key) == value:
            self.values.move_to_end(key)
        else:
            self.evict(room(value))  # Until it is written an earlier one has its room.
            self.values[key] = value
            self.use(key)

    @rule(size=st.integers(25, 60))
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

    @rule(key=KEYS, change=st.sampled_from([-PAGE, -1, 1, PAGE]))
    def get_of_another_length(self, key, change):
        size = len(self.values.get(key, b"")) + change
        if size > 0:
            assert self.store.get_into([key], [bytearray(size)]) == [False]

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

    @rule(bound=BOUNDS)
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
TestStoreMachine.settings = settings(deadline=None, max_examples=100, stateful_step_count=50)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "values", 1 << 20) as store:
        yield store


USES = {
    "touch": (False, lambda store, key, value: store.touch([key])),
    "put": (False, lambda store, key, value: store.put([key], [value])),
    "get": (False, lambda store, key, value: store.get_into([key], [bytearray(len(value))])),
    "get, before a restart": (
        True,
        lambda store, key, value: store.get_into([key], [bytearray(len(value))]),
    ),
}


@pytest.mark.parametrize("name", USES)
def test_used_values_are_evicted_last(tmp_path, name):
    keys, value = [bytes([number]) for number in range(1, 25)], bytes(PAGE)
    reopens, use = USES[name]
    with Store(tmp_path / "values", 48 * PAGE) as store:
        for key in keys[:-2]:
            assert store.put([key], [value]) == [True]
        use(store, keys[0], value)
        if not reopens:
            store.put(keys[-2:], [value, value])
    with Store(tmp_path / "values", 48 * PAGE) as store:
        store.put(keys[-2:], [value, value])
        assert store.contains(keys[:2]) == [True, False]


def test_threads_share_a_store(tmp_path):
    """Calls that are late, replace, remove and evict what others read: no byte is counted twice."""
    values = [bytes([number]) * PAGE * (1 + number % 3) for number in range(12)]
    keys = [b"%d" % (number // 2) for number in range(12)]  # Each of two values.

    def live(seed):
        choose, hits = random.Random(seed), 0
        for _ in range(400):
            number, timeout = choose.randrange(12), choose.choice([None, None, 0.0, 1e-4, 60.0])
            key, value, buffer = keys[number], values[number], bytearray(len(values[number]))
            store.put([key], [value], timeout)
            if store.get_into([key], [buffer], timeout)[0]:
                assert bytes(buffer) == value
                hits += 1
            if choose.random() < 0.2:
                store.remove([key])
        return hits

    folder = tmp_path / "values"
    with Store(folder, 20 * PAGE, threads=3) as store, ThreadPoolExecutor(4) as pool:
        hits = sum(pool.map(live, range(4)))
        assert store.counts()["hits"] == hits > 100
        store.get_into(keys, [bytearray(1) for _ in keys])
        while store.counts()["late"] == 0:
            store.put(keys[:1], values[:1], 0.0)
            store.remove(keys[:1])
        store.put(keys * 3, values * 3)  # What was late has ended.
        files = [path.stat().st_size for path in folder.iterdir() if path.name != "lock"]
        rooms = sum(-(-size // PAGE) * PAGE + PAGE for size in files)
        assert store.num_bytes == rooms + folder.stat().st_blocks * 512
        assert len(store) == len(files)


def test_buffers_are_memory_of_any_kind(store):
    """Whatever its shape; a part of an array in its place."""
    values = np.arange(3 * PAGE, dtype=np.float32).reshape(3, 2, -1)
    assert store.put([b"a", b"b"], [values[1], memoryview(values)[2:3]]) == [True, True]
    into = np.zeros_like(values)
    assert store.get_into([b"b", b"a"], [into[0], into[1]]) == [True, True]
    assert (into[:2] == values[[2, 1]]).all()
    assert not into[2].any()
    assert store.get_into([b"a"], [bytearray(values[1].nbytes - 1)]) == [False]


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
    with pytest.raises(StoreInUseError, match=r"another process.* uses .*values"):
        Store(tmp_path / "values", 1 << 20)
    store.put([b"a"], [b"value"])
    store.close()
    with Store(tmp_path / "values", 1 << 20) as again:
        assert again.contains([b"a"]) == [True]


def test_a_folder_that_others_may_open_is_refused(tmp_path):
    tmp_path.chmod(0o750)
    with pytest.raises(OSError, match="opened by other users"):
        Store(tmp_path, 1 << 20)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "notes").touch()
    with pytest.raises(NotADirectoryError, match=r"Not a directory: .*notes/values") as raised:
        Store(tmp_path / "notes" / "values", 1 << 20)
    assert raised.value.filename == str(tmp_path / "notes" / "values")


def test_files_of_others_stay_and_count(tmp_path):
    folder = tmp_path / "values"
    folder.mkdir(mode=0o700)
    (folder / "notes").write_bytes(bytes(10 * PAGE))
    (folder / "7.part").write_bytes(bytes(PAGE))
    (folder / "0.part").mkdir()
    with Store(folder, 20 * PAGE) as store:
        assert store.num_bytes >= 10 * PAGE
        assert store.put([b"a"], [b"value"]) == [True]
        store.clear()
    assert {path.name for path in folder.iterdir()} == {"lock", "notes", "0.part"}
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
