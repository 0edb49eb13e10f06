"""Injected faults over one folder: what comes back was put under that key, or nothing does.

    FAILING_FOLDER=FOLDER LD_PRELOAD=SHIM python faults.py FAULTS SEED

SHIM is built of tests/failing_files.c. After each fault every key is read. Prints a line of JSON:
how many faults of each kind there were, hits and misses after them, and what was wrong: other
bytes, more bytes than the bound, a put that an open folder refuses, bytes after a deadline.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import damage

from prefixcache_store import Store, StoreInUseError

FOLDER = Path(os.environ["FAILING_FOLDER"])
SHIM = ctypes.CDLL(None)
PAGE = 4096
SWITCH = FOLDER.with_name("switch")
"""While it is there no call on the folder returns."""
KEYS = [
    bytes([weights]) + number.to_bytes(3, "little") for weights in (1, 2) for number in range(3)
]
SIZES = [PAGE, 2 * PAGE, 3 * PAGE + 17]
BOUND = 18 * PAGE
"""A few of all values do not fit."""
ERRORS = [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.EINVAL]
CALLS = 12
"""At least the calls of one operation on a value."""


def value_of(key: bytes, version: int) -> bytes:
    size = SIZES[key[1] % len(SIZES)]
    return random.Random(key + bytes([version])).randbytes(size)


class Life:
    """A store, what was put there, and what was wrong."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.counts: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.values = {key: (value_of(key, 0), value_of(key, 1)) for key in KEYS}
        self.memory = memoryview(mmap.mmap(-1, 4 * PAGE * len(KEYS) + PAGE))
        self.store = self.open()

    def open(self) -> Store:
        store = None
        while store is None:  # A call that was late may not have ended.
            with suppress(StoreInUseError):
                store = Store(FOLDER, BOUND, threads=1)
        return store

    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()

    def files(self) -> list[Path]:
        return damage.files(FOLDER)

    def put(self, key: bytes, timeout: float | None = None) -> None:
        """Puts a value: a key has two, and an earlier one that cannot be removed may come back."""
        self.store.put([key], [self.choose.choice(self.values[key])], timeout)

    def check_hit(self, key: bytes, buffer: memoryview) -> None:
        if bytes(buffer) not in self.values[key]:
            self.wrong["bytes"] += 1

    def fill(self) -> None:
        """Puts what is not there."""
        for key in KEYS:
            if not self.store.contains([key])[0]:
                self.put(key)
            if not self.store.contains([key])[0]:  # Files that could not be removed count.
                self.reopen()
                self.put(key)
                self.wrong["refused"] += not self.store.contains([key])[0]

    def check(self, timeout: float | None = None) -> None:
        """Reads all."""
        shift = self.choose.choice([0, 0, 8])
        places = range(shift, 4 * PAGE * len(KEYS), 4 * PAGE)
        buffers = [
            self.memory[at : at + len(self.values[key][0])]
            for key, at in zip(KEYS, places, strict=False)
        ]
        for key, is_hit, buffer in zip(
            KEYS, self.store.get_into(KEYS, buffers, timeout), buffers, strict=True
        ):
            self.counts["hits" if is_hit else "misses"] += 1
            if is_hit:
                self.check_hit(key, buffer)

    def check_bound(self) -> None:
        paths = [FOLDER, *FOLDER.iterdir()]
        used = sum(path.stat().st_blocks * 512 for path in paths)
        if max(used, self.store.num_bytes) > BOUND:
            self.wrong["bound"] += 1

    # Faults.

    def damage(self, kind: str) -> None:
        if len(self.files()) < 2:  # Files that could not be removed count.
            self.reopen()
            self.fill()
        damage.KINDS[kind](self.files(), self.choose)

    def rename(self) -> None:
        path = self.choose.choice(self.files())
        name = bytearray(path.name.encode())
        name[self.choose.randrange(len(name))] = self.choose.choice(b"0123456789abcdef-")
        path.rename(FOLDER / name.decode())
        self.reopen()
        self.check()
        (FOLDER / name.decode()).unlink(missing_ok=True)  # Nobody's, and it counts.
        self.reopen()

    def failing_put(self) -> None:
        with Failing(self.choose):
            self.put(self.choose.choice(KEYS))

    def failing_get(self) -> None:
        with Failing(self.choose):
            self.check(self.choose.choice([None, 60.0]))

    def failing_open(self) -> None:
        self.store.close()
        with Failing(self.choose):
            try:
                self.store = self.open()
            except OSError:
                pass
            else:
                self.store.close()
        self.store = self.open()

    def late(self) -> None:
        """Nothing is written to a buffer after a deadline."""
        buffer = self.memory[: SIZES[0]]
        key = next(key for key in KEYS if len(self.values[key][0]) == len(buffer))
        buffer[:] = b"?" * len(buffer)
        is_hit = self.store.get_into([key], [buffer], self.choose.choice([0.0, 1e-5, 1e-4]))[0]
        before = bytes(buffer)
        if is_hit:
            self.check_hit(key, buffer)
        self.put(self.choose.choice(KEYS), timeout=self.choose.choice([0.0, 1e-5, 1e-4]))
        self.store.get_into([KEYS[1]], [bytearray(len(self.values[KEYS[1]][0]))])
        if bytes(buffer) != before:
            self.wrong["late"] += 1

    def hang(self) -> None:
        """Calls end in time on a disk that does not answer, which writes to no buffer later."""
        buffers = [bytearray(b"?" * len(self.values[key][0])) for key in KEYS]
        before = [bytes(buffer) for buffer in buffers]
        SWITCH.touch()
        os.environ["FAILING_SWITCH"] = str(SWITCH)
        results = self.store.get_into(KEYS, buffers, 0.01)
        results += self.store.get_into(KEYS, buffers, 60.0)  # At once: all threads are in calls.
        results += self.store.put(KEYS[:1], [b"another"], 0.01)
        SWITCH.unlink()
        del os.environ["FAILING_SWITCH"]
        self.wrong["late"] += any(results)
        self.check()
        self.wrong["late"] += before != buffers

    def kill(self) -> None:
        """Another process ends at one of its calls."""
        self.store.close()
        child = os.fork()
        if child == 0:
            SHIM.fail_calls(ctypes.c_long(self.choose.randrange(4 * CALLS)), ctypes.c_long(1), -9)
            self.store = self.open()
            for key in self.choose.sample(KEYS, 4):
                self.put(key)
                self.check()
            os._exit(0 if not self.wrong["bytes"] else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (0, -signal.SIGKILL):
            self.wrong["child"] += 1
        self.store = self.open()

    def second_store(self) -> None:
        try:
            Store(FOLDER, BOUND)
            self.wrong["two stores"] += 1
        except StoreInUseError:
            pass


class Failing:
    """One of the next calls on the folder fails, or some in a row."""

    def __init__(self, choose: random.Random) -> None:
        self._first = choose.randrange(CALLS)
        self._count = choose.choice([1, 1, CALLS])
        self._errno = choose.choice(ERRORS)

    def __enter__(self) -> None:
        SHIM.fail_calls(ctypes.c_long(self._first), ctypes.c_long(self._count), self._errno)

    def __exit__(self, *_: object) -> None:
        SHIM.fail_calls(ctypes.c_long(0), ctypes.c_long(0), 0)


COMMON = [*damage.KINDS, "failing_put", "failing_get", "late"]
SELDOM = ["rename", "failing_open", "hang", "kill", "second_store"]
"""They take milliseconds each."""


def main(faults: int, seed: int) -> None:
    life = Life(random.Random(seed))
    for number in range(faults):
        life.fill()
        kind = life.choose.choice(COMMON if number % 40 else SELDOM)
        if kind in damage.KINDS:
            life.damage(kind)
        else:
            getattr(life, kind)()
        life.counts[kind] += 1
        life.check(life.choose.choice([None, 60.0]))
        if number % 10 == 0:
            life.reopen()
            life.check()
        if number % 100 == 0:
            life.check_bound()
    life.store.close()
    print(json.dumps({"counts": life.counts, "wrong": life.wrong}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
