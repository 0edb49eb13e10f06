"""Kills processes that compute into a kept cache, and lets each next one check what it finds.

`python killed_cache.py FOLDER COUNT` prints how many blocks were restored in all; what is wrong
ends it with status 1.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from prefixcache._core import PrefixCache, Sequence
from prefixcache.kv.kv_folder import FileLayout, KeptFile, open_kept_file
from prefixcache.runner.cpu.file_memory import FileMemory

NUM_BLOCKS, BLOCK_BYTES, NUM_TENSORS, NUM_PROMPTS = 64, 8192, 3, 12
MOST_PROMPTS = 80  # of a process, before it is killed
LAYOUT = FileLayout(
    facts={"test": 1}, num_tensors=NUM_TENSORS, block_bytes=BLOCK_BYTES, max_blocks=NUM_BLOCKS
)


class KilledCache:
    """One process: a cache over the file, and what parent and children share of it."""

    def __init__(self, folder: Path, shared: mmap.mmap) -> None:
        file = open_kept_file(folder, LAYOUT, NUM_BLOCKS, None)
        assert file is not None
        self.file: KeptFile = file
        self.shared = shared
        self.rows = [
            FileMemory(file, tensor, NUM_BLOCKS * BLOCK_BYTES).rows(NUM_BLOCKS)
            for tensor in range(NUM_TENSORS)
        ]
        self.cache = PrefixCache(NUM_BLOCKS, 16, weights="blake3:test", model="m")
        restored, _ = self.cache.keep_in(file.core)
        shared[8:16] = (self.read(8) + restored).to_bytes(8, "little")

    def read(self, place: int) -> int:
        return int.from_bytes(self.shared[place : place + 8], "little")

    def tokens(self, prompt: int, age: int = 0) -> np.ndarray:
        """A prompt of now, or of some clears ago."""
        first = (self.read(0) - age) * 100_000 + prompt * 1000
        return np.arange(first, first + 16 * (2 + prompt), dtype=np.uint32)

    def check(self, sequence: Sequence, tokens: np.ndarray, num_hits: int) -> None:
        for place, block in enumerate(sequence.block_table()[: num_hits // 16]):
            expected = tokens[16 * place] % 251
            for rows in self.rows:
                assert (rows[block] == expected).all(), f"block {block} is torn"

    def ask(self, tokens: np.ndarray) -> int:
        """Hits what there is, checks it, computes the rest; how much hit."""
        self.shared[16:24] = (self.read(16) + 1).to_bytes(8, "little")
        sequence = self.cache.new_sequence(tokens)
        hits = self.cache.count_prefix_hits(sequence)
        taken = self.cache.commit_prefix_plan(sequence, hits, len(tokens) - hits or 16)
        if taken is None:
            return 0
        self.check(sequence, tokens, taken)
        for place, block in enumerate(sequence.block_table()[: len(tokens) // 16]):
            if place >= taken // 16:
                for rows in self.rows:
                    rows[block] = tokens[16 * place] % 251
        self.cache.mark_blocks_filled([sequence], [min(len(tokens), sequence.num_slots)])
        self.cache.release([sequence])
        return taken

    def clear(self) -> None:
        self.cache.clear_cache_index()
        self.shared[0:8] = (self.read(0) + 1).to_bytes(8, "little")

    def run(self, choose: random.Random) -> None:
        for prompt in range(NUM_PROMPTS):
            assert not self.cache.count_prefix_hits(
                self.cache.new_sequence(self.tokens(prompt, age=1))
            ), "what was cleared is found"
        for prompt in range(NUM_PROMPTS):
            self.ask(self.tokens(prompt))
        assert self.file.core.counts()["failed"] == 0, "a kill tears no block"
        while True:
            if choose.random() < 0.01:
                self.clear()
            elif choose.random() < 0.03:
                self.resize(choose)
            else:
                self.ask(self.tokens(choose.randrange(NUM_PROMPTS)))

    def resize(self, choose: random.Random) -> None:
        size = choose.randrange(20, NUM_BLOCKS + 1)
        if size < self.cache.num_blocks:
            sources, targets = self.cache.begin_moves(size, 16)
            for rows in self.rows:
                rows[targets] = rows[sources]
            self.cache.finish_moves()
        self.cache.resize(size)


def live(folder: Path, shared: mmap.mmap, seed: int) -> None:
    try:
        KilledCache(folder, shared).run(random.Random(seed))
    except BaseException as error:  # noqa: BLE001 - the parent learns of all of them
        print(f"process {seed}: {error!r}", flush=True)
        os._exit(1)


def _is_alive(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def main(folder: Path, count: int) -> int:
    choose = random.Random(count)
    shared = mmap.mmap(-1, 4096)
    shared[0] = 5
    for seed in range(count):
        shared[16:24] = bytes(8)
        child = os.fork()
        if child == 0:
            live(folder, shared, seed)
        num_prompts = choose.randrange(MOST_PROMPTS)
        while int.from_bytes(shared[16:24], "little") < num_prompts and _is_alive(child):
            time.sleep(0.0005)
        time.sleep(choose.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if status != signal.SIGKILL:
            return 1
    print(int.from_bytes(shared[8:16], "little"))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
