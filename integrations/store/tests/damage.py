"""Damage to the files of a store, and a tier of another engine over files that are damaged."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 4096
MEMORY = Path("/dev/shm")
SCRATCH = MEMORY if MEMORY.is_dir() else None
"""Where many lives go: a disk takes a hundred times as long."""


def files(folder: Path) -> list[Path]:
    """What a store wrote to its folder, but for its lock and a tier's notes."""
    return sorted(path for path in folder.iterdir() if path.name not in {"lock", "weights.json"})


def num_disk_bytes(folder: Path) -> int:
    """What a folder and its files take of the disk."""
    total = 0
    for path in [folder, *folder.iterdir()]:
        with suppress(FileNotFoundError):  # A late write has moved it.
            total += path.stat().st_blocks * 512
    return total


def flip(paths: list[Path], choose: random.Random) -> None:
    path = choose.choice(paths)
    content = bytearray(path.read_bytes())
    if content:
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)


def zero(paths: list[Path], choose: random.Random) -> None:
    path = choose.choice(paths)
    path.write_bytes(bytes(PAGE) + path.read_bytes()[PAGE:])


def cut(paths: list[Path], choose: random.Random) -> None:
    path = choose.choice(paths)
    os.truncate(path, choose.randrange(path.stat().st_size + 1))


def extend(paths: list[Path], choose: random.Random) -> None:
    with choose.choice(paths).open("ab") as file:
        file.write(b"more")


def swap(paths: list[Path], choose: random.Random) -> None:
    first, second = choose.sample(paths, 2)
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)


def overwrite(paths: list[Path], choose: random.Random) -> None:
    first, second = choose.sample(paths, 2)
    first.write_bytes(second.read_bytes())


def delete(paths: list[Path], choose: random.Random) -> None:
    choose.choice(paths).unlink()


KINDS = {change.__name__: change for change in (flip, zero, cut, extend, swap, overwrite, delete)}
LATE = ("late_store", "late_find")
BOUND = 16 * 2 * PAGE
"""Of 16 values of a page, with their names: fewer than the blocks of two prompts with ten each."""
FAULTS = int(os.environ.get("FAULTS", "60"))
FAULTS_OF_A_LIFE = 1000


@dataclass(frozen=True)
class Engine:
    """Another engine, over a store of at most `BOUND` bytes.

    `store` and `find` have the number of one of two prompts, whose blocks are in the folder or
    nowhere. `find` compares each byte that comes back; it returns how many blocks did. `memory`
    copies where they come to.
    """

    tier: Any
    folder: Path
    memory: Callable[[], np.ndarray[Any, Any]]
    store: Callable[[int], object]
    find: Callable[[int], int]
    close: Callable[[], object]


def damage_lives(start: Callable[[Path], Engine]) -> None:
    """Injects `FAULTS` faults over one folder, for each thousand into another life of an engine."""
    counts: Counter[str] = Counter()
    choose = random.Random(7)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        for begin in range(0, FAULTS, FAULTS_OF_A_LIFE):
            engine = start(Path(scratch))
            for _ in range(min(FAULTS_OF_A_LIFE, FAULTS - begin)):
                counts += inject(engine, choose)
            engine.close()
    print(json.dumps(counts))
    assert not counts["late bytes"] + counts["over the bound"], counts
    assert sum(counts[kind] for kind in [*KINDS, *LATE]) == FAULTS
    assert 0 < counts["hits"] < 10 * FAULTS, counts


def inject(engine: Engine, choose: random.Random) -> Counter[str]:
    """Stores a prompt, injects a fault and finds the prompt; what there was."""
    tier, deadline = engine.tier, engine.tier._deadline
    prompt, kind = choose.randrange(2), choose.choice([*KINDS, *LATE])
    short = choose.choice([0.0, 1e-4, 1e-3])
    tier._deadline = short if kind == "late_store" else deadline
    engine.store(prompt)
    tier._deadline = short if kind == "late_find" else deadline
    paths = files(engine.folder)
    if kind in KINDS and len(paths) > 1:
        with suppress(FileNotFoundError):  # A late write has moved it.
            KINDS[kind](paths, choose)
    counts = Counter({kind: 1, "hits": engine.find(prompt)})
    tier._deadline = deadline
    if kind == "late_find":
        before = engine.memory()
        tier._store.put([b"key"], [b"value"])
        tier._store.get_into([b"key"], [bytearray(5)])
        counts["late bytes"] += not np.array_equal(before, engine.memory())
    used = max(num_disk_bytes(engine.folder), tier._store.num_bytes)
    counts["over the bound"] += used > BOUND
    return counts
