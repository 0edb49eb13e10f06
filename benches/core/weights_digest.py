"""What the digest of weights costs a start: `python benches/core/weights_digest.py [MODEL ...]`.

MODEL is what `prefixcache serve` takes. CPU seconds are those of this process alone, so that other
processes hardly change them; seconds of the wall go by what the machine has free.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from prefixcache._core import Cpu, hash_file_ranges
from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.config.model_config import ModelConfig
from prefixcache.models.checkpoint import read_checkpoint
from prefixcache.models.digests import compute_sha256
from prefixcache.models.hub import resolve_model
from prefixcache.models.loader import load_model
from prefixcache.ops.threads import default_threads

_CHUNK = 1 << 20


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the wall and of processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def _read(file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.read(_CHUNK):
            pass


def _weight_files(folder: Path) -> list[Path]:
    names = ("*.gguf", "*.safetensors")
    return [file.resolve() for name in names for file in folder.glob(name)]


def _measure(model: str) -> None:
    folder = resolve_model(model)
    files = _weight_files(folder)
    size = sum(file.stat().st_size for file in files)
    config, cpu = ModelConfig.from_hf(folder), Cpu(default_threads())
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "cpu": cpu}

    def hashed(threads: int) -> None:
        for file in files:
            # As many ranges as a model has tensors, or more threads would not help.
            step = max(1, file.stat().st_size // 256)
            ends = [*range(0, file.stat().st_size, step), file.stat().st_size]
            hash_file_ranges(file, list(pairwise(ends)), threads)

    rows: dict[str, Callable[[], object]] = {
        "read, from the page cache": lambda: list(map(_read, files)),
        "BLAKE3, 1 thread": lambda: hashed(1),
        "BLAKE3, 2 threads": lambda: hashed(2),
        "sha256, which a new GGUF file takes": lambda: list(map(compute_sha256, files)),
        "the digest, remembered": lambda: read_checkpoint(folder),
        "loading": lambda: load_model(config, folder, **options),
    }
    _read(files[0])
    read_checkpoint(folder)
    print(f"{model}: {size / 1e6:.0f} MB")
    for name, work in rows.items():
        wall, spent = min(_timed(work) for _ in range(3))
        rate = size / 1e6 / max(spent, 1e-9)
        print(f"  {name:38} {wall:8.3f} s  {spent:8.3f} s of processors  {rate:9.0f} MB/s of one")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[DEFAULT_MODEL])
    for one in parser.parse_args().models:
        _measure(one)
