"""Short lives of a disk behind a kept file, without a model: each call on files fails or is last.

    python tests/disk_lives.py FOLDER fail|kill [EVERY]
    python tests/disk_lives.py FOLDER share NUMBER

Compiles failing_files.c, and runs itself with it. Of one life after the other over the same folder
the n-th call fails (EIO, ENOSPC), or ends the process with SIGKILL; then the next life looks at
what is there. Blocks of the disk and of the kept file must be as they were written, what was
cleared must be gone, and no reference may be lost. Prints how many calls there were.

Of two that share the folder at a time, each with a number, no call may fail.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from prefixcache._core import BlockStaging, PrefixCache
from prefixcache.kv.kv_folder import FileLayout, KeptFile, open_kept_file
from prefixcache.kv.tiers.disk_store import DiskStore, void
from prefixcache.kv.tiers.disk_tier import DiskTier, block_key

NUM_BLOCKS, BLOCK_BYTES, TENSORS = 8, 4096, 2
LAYOUT = FileLayout(
    facts={}, num_tensors=TENSORS, block_bytes=BLOCK_BYTES, max_blocks=NUM_BLOCKS, block_tokens=16
)
MIB = 1 << 20
SCOPE = b"s" * 16


def keys_of(hashes: Sequence[bytes]) -> list[bytes]:
    """Those of the first group."""
    return [block_key(one) for one in hashes]


class Tiered:
    """A cache of seven blocks of 16 tokens, in a file in `kept` if given, and a disk behind it."""

    def __init__(
        self,
        folder: Path,
        *,
        min_uses: int = 1,
        queue_bytes: int = MIB,
        weights: str = "blake3:a",
        starts: bool = True,
        kept: Path | None = None,
        open_store: Callable[..., DiskStore] = DiskStore,
    ) -> None:
        self.file = kept and open_kept_file(kept, LAYOUT, NUM_BLOCKS, None)
        self.kv = tensors_in(self.file)
        addresses = [tensor.ctypes.data for tensor in self.kv]
        self.staging = BlockStaging(
            addresses, BLOCK_BYTES, NUM_BLOCKS, queue_bytes, min_uses, self.kv
        )
        self.cache = PrefixCache(NUM_BLOCKS, 16, weights=weights, retention_budget=1.0, model="m")
        self.num_restored = 0
        if self.file is None:
            self.cache.stage_evicted(self.staging)
        else:
            self.num_restored, _ = self.cache.keep_in(self.file.core, self.staging)
        self.now = 0.0
        self.tier = DiskTier(
            self.staging,
            partial(open_store, folder, 8 * MIB, SCOPE),
            partial(void, folder, SCOPE),
            block_bytes=TENSORS * BLOCK_BYTES,
            name=str(folder),
            clock=lambda: self.now,
        )
        if starts:
            self.tier.start()

    def tokens(self, first: int, num_blocks: int = 7) -> list[int]:
        return [first + i for i in range(16 * num_blocks)]

    def hashes(self, first: int) -> list[bytes]:
        return self.cache.new_sequence(self.tokens(first)).block_hashes()

    def compute(
        self, first: int, num_blocks: int = 7, salt: str | None = None, **hints: int
    ) -> list[bytes]:
        """Fills the blocks of a prompt with numbers of its tokens; its hashes."""
        tokens = self.tokens(first, num_blocks)
        sequence = self.cache.new_sequence(tokens, cache_salt=salt)
        if hints:
            sequence.set_hints("", [(0, None, hints["priority"], None)])
        assert self.cache.commit_prefix_plan(sequence, 0, 16 * num_blocks) == 0
        for place, block in enumerate(sequence.block_table()):
            self.kv[:, block] = (first + place) % 251
        self.cache.mark_blocks_filled([sequence], [16 * num_blocks])
        self.cache.release([sequence])
        return sequence.block_hashes()

    def until(self, condition: Callable[[], object]) -> None:
        """Waits for what the tier's thread does."""
        with self.tier._changed:
            assert self.tier._changed.wait_for(condition, 240)

    def settle(self) -> None:
        """All that waits is written, unless the store has failed."""
        self.tier.nudge()
        counts = self.tier.counts
        self.until(lambda: counts().failures or counts().written >= self.staged)

    @property
    def staged(self) -> int:
        return self.staging.counts()["staged"]

    def count(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones are on the disk."""
        return self.tier.count(hashes)

    def check(self, first: int) -> None:
        """What is there of a prompt is what was computed of it."""
        hashes = self.hashes(first)
        count = self.count(hashes)
        expected = [(first + place) % 251 for place in range(7)]
        loaded = self.load(hashes[:count]) if count else []
        assert loaded == expected[: len(loaded)], "a block holds others' bytes"

    def check_memory(self, first: int) -> int:
        """What hits of a prompt in memory is what was computed of it; how many blocks."""
        sequence = self.cache.new_sequence(self.tokens(first))
        hits = self.cache.count_prefix_hits(sequence)
        taken = self.cache.commit_prefix_plan(sequence, hits, 0) if hits else 0
        blocks = self.kv[:, sequence.block_table()] if taken else self.kv[:, :0]
        numbers = [(first + place) % 251 for place in range(taken // 16)]
        assert (blocks == np.array(numbers).reshape(1, -1, 1)).all(), "a block is another's"
        if hits:
            self.cache.release([sequence])
        return len(numbers)

    def load(self, hashes: Sequence[bytes]) -> list[int]:
        """Numbers of the first bytes of the blocks that came back."""
        sequence = self.cache.new_sequence(self.tokens(0, len(hashes)))
        assert self.cache.commit_prefix_plan(sequence, 0, 16 * len(hashes)) == 0
        load = self.tier.load(sequence.block_table(), keys_of(hashes))
        while not load.is_done:
            self.tier.wait([load], 1)
        blocks = self.kv[:, sequence.block_table()[: load.num_loaded]]
        numbers = blocks[1, :, 0]
        assert (blocks == numbers[:, None]).all(), "a block is torn"
        self.cache.release([sequence])
        return numbers.tolist()


def tensors_in(file: KeptFile | None) -> np.ndarray:
    """The bytes of all blocks [tensor, block, byte]."""
    shape = (TENSORS, NUM_BLOCKS, BLOCK_BYTES)
    if file is None:
        return np.zeros(shape, np.uint8)
    first, second = (np.frombuffer(pages, np.uint8) for pages in file.maps)
    between = second.ctypes.data - first.ctypes.data
    return np.lib.stride_tricks.as_strided(first, shape, (between, BLOCK_BYTES, 1))


class Lives:
    """What the lives of one folder share: how many clears there were, by when they returned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def num_clears(self) -> int:
        return int.from_bytes(self.shared[:8], "little")

    def prompt(self, number: int, age: int = 0) -> int:
        """The first token of a prompt of now, or of some clears ago."""
        return 1000 * (3 * (self.num_clears - age + 1) + number)

    def live(self) -> None:
        """Finds what the life before left, writes more, clears, and ends."""
        # What the library counts are calls on paths that begin as the folder's does.
        tiered = Tiered(self.folder, kept=self.folder.with_name(f"{self.folder.name}-kept"))
        tiered.until(lambda: tiered.tier._is_listed or tiered.tier.counts().failures)
        for number in range(3):
            cleared = self.prompt(number, age=1)
            assert not tiered.count(tiered.hashes(cleared)), "cleared"
            assert not tiered.check_memory(cleared), "cleared"
            self.shared[8] |= tiered.check_memory(self.prompt(number)) > 0
        for _ in range(2):
            for number in range(3):
                tiered.check(self.prompt(number))
                tiered.compute(self.prompt(number))
                tiered.settle()
        tiered.cache.clear_cache_index()
        tiered.tier.forget()
        self.shared[:8] = (self.num_clears + 1).to_bytes(8, "little")
        self.write_again(tiered)
        self.leave_in_memory(tiered)
        tiered.tier.close()
        tiered.cache.validate()
        assert tiered.cache.num_free_blocks == NUM_BLOCKS - 1

    def write_again(self, tiered: Tiered) -> None:
        """A store that failed is in use again after a while."""
        hashes, counts = tiered.hashes(self.prompt(0)), tiered.tier.counts
        while not tiered.count(hashes):
            tiered.now += 100
            tiered.tier._wake()
            failures = counts().failures
            for number in range(3):
                tiered.compute(self.prompt(number))
            tiered.tier.nudge()
            tiered.until(lambda n=failures: tiered.count(hashes) or counts().failures > n)
        tiered.check(self.prompt(0))

    def leave_in_memory(self, tiered: Tiered) -> None:
        """Of the blocks that the file has kept one call at most has failed."""
        core = None if tiered.file is None else tiered.file.core
        before = core.counts()["kept"] if core else 0
        tiered.compute(self.prompt(0))
        while core and core.counts()["kept"] < before + 6:
            pass


def run(folder: Path, how: str, every: int) -> int:
    """All lives; how many calls the last one made, of which none failed."""
    shim, lives, number = ctypes.CDLL(None), Lives(folder), 0
    logging.getLogger("prefixcache").setLevel(logging.CRITICAL)
    while True:
        error = -signal.SIGKILL if how == "kill" else (errno.EIO, errno.ENOSPC)[number % 2]
        child = os.fork()
        if child == 0:
            try:
                shim.fail_calls(ctypes.c_long(number), ctypes.c_long(1), ctypes.c_int(error))
                lives.live()
                os._exit(shim.calls_seen() > number)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is wrong
                print(f"call {number}: {error!r}", flush=True)
                os._exit(2)
        _, status = os.waitpid(child, 0)
        if status == 0:
            assert lives.shared[8], "no life has hit what another one kept"
            return number
        if status not in (signal.SIGKILL, 1 << 8):
            sys.exit(f"life {number} ended with {status}")
        number += every


def share(folder: Path, number: int) -> None:
    """Writes prompts of its own and of both, and loads what is still there of earlier ones."""
    tiered = Tiered(folder)
    tiered.until(lambda: tiered.tier._is_listed)
    prompts = [1000 * step + (100_000 * number if step % 4 else 0) for step in range(60)]
    for step, prompt in enumerate(prompts):
        tiered.compute(prompt)
        tiered.settle()
        tiered.check(prompts[step // 2])
    tiered.tier.close()
    counts = tiered.tier.counts()
    assert (counts.failures, counts.damaged) == (0, 0), counts
    print(counts.written)


def main(folder: Path, how: str, every: int = 1) -> None:
    if how == "share":
        share(folder, every)
        return
    if "FAILING_FOLDER" in os.environ:
        print(run(folder, how, every))
        return
    with tempfile.TemporaryDirectory() as scratch:
        shim, source = Path(scratch) / "shim.so", Path(__file__).with_name("failing_files.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
        environment = os.environ | {"LD_PRELOAD": str(shim), "FAILING_FOLDER": str(folder)}
        done = subprocess.run([sys.executable, *sys.argv], env=environment, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
