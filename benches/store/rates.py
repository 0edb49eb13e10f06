"""How fast values of a GPU's blocks go to a disk and come back, by the format they are kept in.

    python benches/store/rates.py [--dir ON_A_DISK] [--mib 64] [--rounds 3]

Each round: every format writes the same values and reads them back, for each size and number of
threads, one format after the other; medians are shown. A write counts until the file system has
passed it to the disk (syncfs). Before values are read the system's cache of their files is dropped
(posix_fadvise), so that the disk is read. CPU is that of this process, the kernel's part for its
calls included. In some rows
another thread computes in Python meanwhile, as a scheduler does.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from prefixcache.kv.tiers.disk_store import DiskStore
from prefixcache.tools.bench.machine import write_record

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"0.5 MiB": MIB // 2, "2 MiB": 2 * MIB, "8 MiB": 8 * MIB}
SECTOR = 512


class Format:
    """Values in files of a folder, put and read by `threads`."""

    threads = 1

    def put(self, key: bytes, value: memoryview) -> None:
        raise NotImplementedError

    def get(self, key: bytes, into: memoryview) -> bool:
        raise NotImplementedError

    def put_all(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(self.put, keys, values))

    def get_all(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
            assert all(pool.map(self.get, keys, into))

    def drop(self) -> None:
        """Makes the system able to forget pages."""

    def close(self) -> None:
        """Ends the use of the files."""


class FilePerValue(Format):
    """A file a value. With `direct` as vLLM's tier writes it: O_DIRECT, another name until it is
    complete; without as LMCache's local disk does."""

    def __init__(self, folder: Path, direct: bool) -> None:
        self._folder, self._direct = folder, direct

    def put(self, key: bytes, value: memoryview) -> None:
        path = self._folder / key.hex()
        if not self._direct:
            with open(path, "wb") as file:
                file.write(value)
            return
        part = f"{path}_{threading.get_ident()}.tmp"
        descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
        write_all(descriptor, value, 0)
        os.close(descriptor)
        os.replace(part, path)

    def get(self, key: bytes, into: memoryview) -> bool:
        path = self._folder / key.hex()
        if not self._direct:
            with open(path, "rb") as file:
                return file.readinto(into) == len(into)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        count = os.readv(descriptor, [into])
        os.close(descriptor)
        return count == len(into)


class Slots(Format):
    """Slots of one file that has its space from the beginning; a table of records in another."""

    def __init__(self, folder: Path, size: int, count: int) -> None:
        self._size = size
        self._values = os.open(folder / "values", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._values, 0, size * count)
        self._table = os.open(folder / "table", os.O_CREAT | os.O_RDWR, 0o600)

    def put(self, key: bytes, value: memoryview) -> None:
        slot = number_of(key)
        write_all(self._values, value, slot * self._size)
        os.pwrite(self._table, key.ljust(64), 64 * slot)

    def get(self, key: bytes, into: memoryview) -> bool:
        return os.preadv(self._values, [into], number_of(key) * self._size) == len(into)

    def close(self) -> None:
        os.close(self._values)
        os.close(self._table)


class Mapped(Format):
    """One file that is mapped, as the live file of --kv-cache-dir is."""

    def __init__(self, folder: Path, size: int, count: int) -> None:
        self._size = size
        with open(folder / "mapped", "wb+", opener=private) as file:
            os.posix_fallocate(file.fileno(), 0, size * count)
            self._map = mmap.mmap(file.fileno(), size * count)
        self._bytes = memoryview(self._map)

    def put(self, key: bytes, value: memoryview) -> None:
        at = number_of(key) * self._size
        np.copyto(np.frombuffer(self._bytes[at : at + self._size], np.uint8), np.asarray(value))

    def get(self, key: bytes, into: memoryview) -> bool:
        at = number_of(key) * self._size
        np.copyto(np.asarray(into), np.frombuffer(self._bytes[at : at + self._size], np.uint8))
        return True

    def drop(self) -> None:
        """Pages that are mapped are not dropped."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._bytes.release()
        with suppress(BufferError):
            self._map.close()


class Rows(Format):
    """Rows of SQLite: what the disk tier had."""

    def __init__(self, folder: Path, bound: int) -> None:
        os.chmod(folder, 0o700)
        self._store = DiskStore(folder, bound, bytes(16))

    def put(self, key: bytes, value: memoryview) -> None:
        self._store.put([(key, np.asarray(value))])

    def get(self, key: bytes, into: memoryview) -> bool:
        (value,) = self._store.get([key])
        into[:] = value
        return len(value) == len(into)

    def close(self) -> None:
        self._store.close()


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def number_of(key: bytes) -> int:
    return int.from_bytes(key, "little")


def private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write_all(descriptor: int, value: memoryview, at: int) -> None:
    if os.pwrite(descriptor, value, at) != len(value):
        raise OSError("a short write")


def aligned(num_bytes: int) -> memoryview:
    """Memory as engines have it: it begins with a page."""
    return memoryview(mmap.mmap(-1, num_bytes))


class Device:
    """Sectors that were written to the disk of a folder, by whoever; 0 where it has none."""

    def __init__(self, folder: Path) -> None:
        number = os.stat(folder).st_dev
        self._path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")

    def written(self) -> int:
        try:
            return int(self._path.read_text().split()[6]) * SECTOR
        except OSError:
            return 0


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None).syncfs(descriptor):
            raise OSError("syncfs failed")
    finally:
        os.close(descriptor)


def drop(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@contextmanager
def busy(is_busy: bool) -> Iterator[None]:
    """Another thread computes in Python."""
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    if is_busy:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if is_busy:
            thread.join()


def timed(work: Callable[[], None], num_bytes: int, is_busy: bool) -> tuple[float, float]:
    """GB/s, and seconds of CPU a GB; 0 where another thread has most of it."""
    with busy(is_busy):
        cpu, begun = time.process_time(), time.perf_counter()
        work()
        took, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return num_bytes / took / 1e9, 0.0 if is_busy else cpu / num_bytes * 1e9


class Own(Format):
    """The store that this bench decided; `timeout` in seconds."""

    def __init__(self, folder: Path, bound: int, threads: int, timeout: float | None) -> None:
        from prefixcache_store import Store

        self._store, self._timeout = Store(folder / "own", bound, threads=threads), timeout

    def put_all(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        assert all(self._store.put(keys, values, self._timeout))

    def get_all(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        assert all(self._store.get_into(keys, into, self._timeout))

    def close(self) -> None:
        self._store.close()


def own(timeout: float | None) -> Callable[[Path, int, int, int], Format]:
    def make(folder: Path, size: int, count: int, threads: int) -> Format:
        return Own(folder, (size + 8 * KIB) * count + MIB, threads, timeout)

    return make


FORMATS: dict[str, Callable[[Path, int, int, int], Format]] = {
    "file a value by O_DIRECT (vLLM)": lambda folder, *_: FilePerValue(folder, direct=True),
    "file a value by the cache (LMCache)": lambda folder, *_: FilePerValue(folder, direct=False),
    "slots of one file, O_DIRECT": lambda folder, size, count, _: Slots(folder, size, count),
    "mapped file": lambda folder, size, count, _: Mapped(folder, size, count),
    "SQLite rows": lambda folder, size, count, _: Rows(folder, 2 * size * count + 64 * MIB),
}
if importlib.util.find_spec("prefixcache_store") is not None:
    FORMATS["prefixcache-store"] = own(None)
    FORMATS["prefixcache-store, a deadline"] = own(60.0)
ONE_THREAD = {"SQLite rows"}
NOT_BUSY = {"mapped file", "SQLite rows"}

Cell = dict[str, float]


def measure(
    parent: Path,
    name: str,
    size: int,
    values: memoryview,
    back: memoryview,
    threads: int,
    is_busy: bool,
) -> Cell:
    """One turn of a format: it writes `values`, cut into pieces of `size`, and reads to `back`."""
    count = len(values) // size
    keys = [key_of(number) for number in range(count)]
    pieces = [values[size * n : size * (n + 1)] for n in range(count)]
    np.asarray(back).fill(0)
    into = [back[size * n : size * (n + 1)] for n in range(count)]
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        form = FORMATS[name](folder, size, count, threads)
        form.threads = threads
        sync(folder)
        device = Device(folder)
        before = device.written()

        def write() -> None:
            form.put_all(keys, pieces)
            sync(folder)

        write_rate, write_cpu = timed(write, len(values), is_busy)
        amplified = (device.written() - before) / len(values)
        form.drop()
        drop(folder)
        read_rate, read_cpu = timed(lambda: form.get_all(keys, into), len(values), is_busy)
        assert np.array_equal(np.asarray(back), np.asarray(values)), "other bytes came back"
        form.close()
    finally:
        shutil.rmtree(folder)
    return {
        "write GB/s": write_rate,
        "read GB/s": read_rate,
        "write CPU s/GB": write_cpu,
        "read CPU s/GB": read_cpu,
        "written to the disk / values": amplified,
    }


def checksums(values: memoryview) -> dict[str, float]:
    """GB/s of checksums on one core, of libraries that are installed."""
    calls: dict[str, Callable[[memoryview], object]] = {"crc32 (zlib)": zlib.crc32}
    with suppress(ImportError):
        from blake3 import blake3

        calls["BLAKE3"] = lambda value: blake3(value).digest()
    with suppress(ImportError):
        import xxhash

        calls["XXH3, 128 bits"] = lambda value: xxhash.xxh3_128_digest(value)
    with suppress(ImportError):
        import crc32c

        calls["CRC-32C"] = crc32c.crc32c
    rates: dict[str, float] = {}
    for name, call in calls.items():
        times = []
        for _ in range(5):
            begun = time.process_time()
            call(values)
            times.append(time.process_time() - begun)
        rates[name] = len(values) / min(times) / 1e9
    return rates


def churn(parent: Path, make: Callable[[Path, int], Format], bound: int) -> float:
    """The most bytes on the disk, as a share of the bound, while three times the bound is put."""
    size, value = 2 * MIB, aligned(2 * MIB)
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        form = make(folder, bound)
        most = 0
        for number in range(3 * bound // size):
            form.put_all([key_of(number)], [value])
            files = [path.stat() for path in [folder, *folder.rglob("*")]]
            most = max(most, sum(status.st_blocks for status in files) * SECTOR)
        form.close()
    finally:
        shutil.rmtree(folder)
    return most / bound


BOUNDED: dict[str, Callable[[Path, int], Format]] = {
    "file a value (vLLM: no bound)": lambda folder, _: FilePerValue(folder, direct=True),
    "SQLite rows": Rows,
}
if "prefixcache-store" in FORMATS:
    BOUNDED["prefixcache-store"] = lambda folder, bound: Own(folder, bound, 1, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=64, help="of values in each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    values = aligned(given.mib * MIB)
    values[:] = np.random.default_rng(1).bytes(given.mib * MIB)
    turns = [
        (size, threads, name, False)
        for size in SIZES
        for threads in (1, 2)
        for name in FORMATS
        if threads == 1 or name not in ONE_THREAD
    ]
    turns += [(size, 1, name, True) for size in SIZES for name in FORMATS if name not in NOT_BUSY]
    back = aligned(len(values))
    cells: dict[tuple[str, int, str, bool], list[Cell]] = defaultdict(list)
    for _ in range(given.rounds):
        for turn in turns:
            size, threads, name, is_busy = turn
            cell = measure(given.dir, name, SIZES[size], values, back, threads, is_busy)
            cells[turn].append(cell)
    table = [
        {"size": size, "threads": threads, "another thread computes": is_busy, "format": name}
        | {what: statistics.median(cell[what] for cell in measured) for what in measured[0]}
        for (size, threads, name, is_busy), measured in cells.items()
    ]
    print("|".join(table[0]))
    for row in table:
        print("|".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    sums = checksums(values)
    shares = {name: churn(given.dir, make, 64 * MIB) for name, make in BOUNDED.items()}
    print(sums, shares, sep="\n")
    results = {"rates": table, "checksums GB/s": sums, "most bytes / bound": shares}
    write_record(given.output, values=results)


if __name__ == "__main__":
    main()
