"""The folder of `--weights-cache-dir`: weights as the kernels read them, a file for each layout.

What a checkpoint's tensors become when they are laid out depends on the facts of `PartTable` alone,
so a file is written once, under a name that stands for them, and never changed: whoever has mapped
it keeps it, also where it is removed. Two processes that write the same file do so under names of
their own, and the last to end replaces the other's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter, ne
from pathlib import Path
from typing import Any, TypeAlias, cast

from prefixcache._core import LaidOutFile, PackedLinear
from prefixcache.config.home import cache_home
from prefixcache.config.private_folder import FileState, NotUsableError, PrivateFolder
from prefixcache.models.laid_out.part_table import (
    ALIGNMENT,
    LaidOutPart,
    PartTable,
    facts_digest,
    hashed,
)
from prefixcache.models.quantized import QUANT_FORMATS, QuantFormat
from prefixcache.models.weights import with_progress

logger = logging.getLogger(__name__)

_SUFFIX, _UNFINISHED = ".weights", ".weights.new"
_ENTRY_BYTES = 1024
"""The most that the table takes for a part."""
_LEAST_FREE = 1 << 30
"""Bytes of the disk that no file takes; half of what is free is left besides."""

Parts: TypeAlias = Mapping[str, tuple[PackedLinear, int]]
"""Parts of a model's linear layers by the names of their tensors: layer, and first output."""


class WeightsFolder(PrivateFolder):
    """An open folder of such files, which are locked while they are written."""

    suffixes = (_SUFFIX, _UNFINISHED)

    def describe(self, name: str, *, reads: bool) -> FileState:
        """See `PrivateFolder`: its weights, and what they are of."""
        if name.endswith(_UNFINISHED):
            return FileState("not finished")
        with self._opened(name) as descriptor:
            table = PartTable.read(descriptor)
            actual = hashed(descriptor, table.parts, 1) if reads else table.parts
            damaged = sum(map(ne, table.parts, actual))
        checked = f", {damaged} of them damaged" if reads else ""
        facts = ", ".join(f"{fact} {value}" for fact, value in table.facts.items())
        return FileState(f"{len(table.parts)} weights{checked}; {facts}", is_damaged=damaged > 0)

    def map(self, facts: Mapping[str, Any], parts: Parts, threads: int) -> set[str]:
        """Maps the parts of a file into their layers, after all of its bytes were checked.

        Returns their names. Raises `ValueError` for a file that is damaged, whatever it has mapped
        by then; no file is left that cannot be mapped.
        """
        try:
            return self._mapped(facts, parts, threads)
        except (NotUsableError, OSError, ValueError):
            with suppress(OSError):
                os.unlink(file_name(facts), dir_fd=self.descriptor)
            raise

    def _mapped(self, facts: Mapping[str, Any], parts: Parts, threads: int) -> set[str]:
        with self._opened(file_name(facts)) as descriptor:
            table = PartTable.read(descriptor)
            _check(descriptor, table, facts, threads)
            file = LaidOutFile(descriptor)
            for part in table.parts:
                layer, start = parts[part.name]
                is_blocks = part.kept_as in QUANT_FORMATS
                quant_format = cast("QuantFormat", part.kept_as) if is_blocks else None
                layer.map_laid_out(start, file, part.offset, part.num_bytes, quant_format)
            with suppress(OSError):  # A folder that is read only.
                os.utime(descriptor)
        return {part.name for part in table.parts}

    def write(self, facts: Mapping[str, Any], parts: Parts, most_bytes: int, threads: int) -> None:
        """Writes parts to a file that `map` finds.

        All files together take at most `most_bytes`: those that were not used for the longest time
        are removed.
        """
        num_bytes = num_bytes_of(parts)
        self._make_room(num_bytes + _ENTRY_BYTES * (1 + len(parts)), most_bytes)
        name = file_name(facts)
        unfinished = name.replace(_SUFFIX, f"-{os.getpid()}{_UNFINISHED}")
        descriptor = self.lock(unfinished, create=True)
        if descriptor is None:
            raise NotUsableError("this process writes it already")
        try:
            sizes = attrgetter("num_bytes")
            each = with_progress("Writing weights", num_bytes, _written(descriptor, parts), sizes)
            PartTable(facts, list(hashed(descriptor, list(each), threads))).write(descriptor)
            os.rename(unfinished, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            os.unlink(unfinished, dir_fd=self.descriptor)
            raise
        finally:
            os.close(descriptor)

    def _make_room(self, num_bytes: int, most_bytes: int) -> None:
        for info in self.files():
            if info.name.endswith(_UNFINISHED):
                self.remove(info.name)  # Its process ended, or has it locked.
        if self.make_room(self.files(), most_bytes - num_bytes) < 0:
            raise NotUsableError(f"--weights-cache-size has no room for {num_bytes} bytes")
        disk = os.statvfs(self.descriptor)
        if disk.f_bavail * disk.f_frsize < 2 * num_bytes + _LEAST_FREE:
            raise NotUsableError(f"its disk has too little room for {num_bytes} bytes")

    @contextmanager
    def _opened(self, name: str) -> Generator[int]:
        descriptor = self.open_file(name, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class WeightsCache:
    """A folder of at most `most_bytes` bytes, for models of at least `least_bytes`.

    `facts` are what a layout depends on besides the weights. Whatever is wrong with the folder
    means a line in the log, and weights that are laid out again.
    """

    folder: Path
    most_bytes: int
    least_bytes: int
    facts: Mapping[str, Any]
    threads: int

    def restore(self, digest: str, parts: Parts) -> set[str]:
        """Maps what the folder has of a model with these weights: the names of such parts."""
        begun, facts = time.perf_counter(), self._facts(digest)
        try:
            with closing(WeightsFolder(self.folder, create=False)) as folder:
                names = folder.map(facts, parts, self.threads)
        except FileNotFoundError:
            return set()
        except (NotUsableError, OSError, ValueError) as error:
            path = self._path(digest)
            logger.warning("Weights are laid out again, not from %s: %s.", path, error)
            return set()
        seconds = time.perf_counter() - begun
        logger.info("weights mapped from %s in %.2f s", self._path(digest), seconds)
        return names

    def keep(self, digest: str, parts: Parts) -> None:
        """Writes a model's parts for the next start, if they are large and not there."""
        if num_bytes_of(parts) < self.least_bytes or self._path(digest).exists():
            return
        begun = time.perf_counter()
        try:
            with closing(WeightsFolder(self.folder)) as folder:
                folder.write(self._facts(digest), parts, self.most_bytes, self.threads)
        except (NotUsableError, OSError) as error:
            logger.warning("Weights are not kept laid out in %s: %s.", self.folder, error)
            return
        seconds = time.perf_counter() - begun
        logger.info("weights written to %s in %.1f s", self._path(digest), seconds)

    def _facts(self, digest: str) -> Mapping[str, Any]:
        return {"weights": digest, **self.facts}

    def _path(self, digest: str) -> Path:
        return self.folder / file_name(self._facts(digest))


def default_folder() -> Path:
    """Where weights are kept if nothing is said."""
    return cache_home() / "weights"


def file_name(facts: Mapping[str, Any]) -> str:
    """The name of the file of a layout."""
    return facts_digest(facts)[:32] + _SUFFIX


def num_bytes_of(parts: Parts) -> int:
    """Bytes of the layers that parts are of, their biases among them."""
    return sum(layer.num_bytes for layer in {layer for layer, _ in parts.values()})


def _check(descriptor: int, table: PartTable, facts: Mapping[str, Any], threads: int) -> None:
    if table.facts != facts:
        raise ValueError("it is of other weights")
    for part, actual in zip(table.parts, hashed(descriptor, table.parts, threads), strict=True):
        if part != actual:
            raise ValueError(f"{part.name} is damaged")


def _written(descriptor: int, parts: Parts) -> Iterator[LaidOutPart]:
    """Writes the parts, one after the other; those that no layer keeps are left out."""
    at = 0
    for name, (layer, start) in parts.items():
        num_bytes = layer.write_laid_out(start, descriptor, at)
        if num_bytes:
            yield LaidOutPart(name, layer.format_at(start), at, num_bytes)
            at += -(-num_bytes // ALIGNMENT) * ALIGNMENT
