"""What stands for the content of a model's weight files."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import cast

logger = logging.getLogger(__name__)

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")
_CHUNK = 16 << 20
_THREADS = 8
# The hub's cache calls a large file by the sha256 of its content, and links to it.
_HUB_BLOB = re.compile(r"[0-9a-f]{64}")
# Two changes within a tick of the file system's clock may have one time.
_CLOCK_TICK_NS = 20_000_000


def model_digest(
    model: str, revision: str | None, download_dir: str | None, load_format: str, notes: Path
) -> str:
    """The digest of a model's folder, or of its files in the hub's cache; see `weights_digest`.

    Arguments are those of an engine. Raises `ValueError`, which names the engine's option
    `weights`, where no file stands for the weights.
    """
    try:
        if load_format == "dummy":
            raise ValueError("They are random")
        if not Path(model).exists():
            # Engines have it.
            from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

            model = snapshot_download(
                model, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        return weights_digest(Path(model), notes)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"What stands for the weights of {model}? {error}. If you know, say so: the option "
            '"weights" is a text that is another one for other weights.'
        ) from error


def weights_digest(path: Path, notes: Path) -> str:
    """The digest of a weight file, or of a folder's weight files and configuration.

    A file is read unless the hub's cache calls it by its content, or `notes` has its digest and
    neither its inode nor a time of change is another. Raises `OSError`, and `ValueError` where
    there are no weights.
    """
    files = [path] if path.is_file() else sorted(path.iterdir())
    files = [file for file in files if file.suffix in _SUFFIXES and file.is_file()]
    if all(file.suffix == ".json" for file in files):
        raise ValueError(f"{path} has no weight files")
    noted = _read_notes(notes)
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = list(threads.map(_file_digest, files, repeat(noted)))
    _write_notes(notes, noted)
    named = list(zip((file.name for file in files), digests, strict=True))
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _file_digest(file: Path, noted: dict[str, list[int | str]]) -> str:
    blob = file.resolve()
    if blob.parent.name == "blobs" and _HUB_BLOB.fullmatch(blob.name):
        return blob.name
    state = _state(blob)
    note = noted.get(str(blob), [])
    if note[:-1] == state:
        return str(note[-1])
    digest = hashlib.sha256()
    with blob.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    if _state(blob) == state and time.time_ns() - max(state[2:]) > _CLOCK_TICK_NS:
        noted[str(blob)] = [*state, digest.hexdigest()]
    return digest.hexdigest()


def _state(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_notes(notes: Path) -> dict[str, list[int | str]]:
    """What earlier starts noted; nothing where that is missing or damaged."""
    with suppress(OSError, ValueError):
        content: object = json.loads(notes.read_bytes())
        if isinstance(content, dict):
            listed = cast("dict[str, list[int | str]]", content)
            return {path: note for path, note in listed.items() if type(note) is list}
    return {}


def _write_notes(notes: Path, noted: dict[str, list[int | str]]) -> None:
    new = notes.with_suffix(".part")  # What a killed process left of it, a store removes.
    try:
        new.write_text(json.dumps(noted))
        new.replace(notes)
    except OSError as error:
        logger.warning("Cannot note the digests of weights: %s. The next start reads them.", error)
