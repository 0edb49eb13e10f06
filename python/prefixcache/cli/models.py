"""The command `prefixcache models`: what can be served without a download, and its removal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from prefixcache.cli.command_line import FlagCommand, FlagGroup, Given
from prefixcache.config.checked import Checked, shown
from prefixcache.config.flags import flag
from prefixcache.exceptions import FieldError, PrefixCacheError
from prefixcache.models.gguf.choice import stem_of

_NAMES = click.Argument(
    ["names"], metavar="NAME...", nargs=-1, required=True, help="Models as `models` shows them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions(Checked):
    """How to show the models."""

    json: bool = flag(False, "Show them as a JSON list.", "Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model by the `name` that `--model` takes.

    `size` is in bytes, and None where the model is not on this machine yet.
    """

    name: str
    source: str
    size: int | None
    folder: str | None


def models(given: Given) -> None:
    """List known models and cached files.

    They are the aliases, the GGUF files that were converted for a start, and the repositories of
    the hub's cache. Any other folder, GGUF file or hub id can be served too.
    """
    options = given.make(ModelsOptions)
    listed = _listed()
    if options.json:
        click.echo(json.dumps([asdict(model) for model in listed], indent=1))
        return
    rows = [("MODEL", "FROM", "SIZE", "FOLDER"), *map(_row, listed)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for *columns, folder in rows:
        padded = (text.ljust(width) for text, width in zip(columns, widths, strict=True))
        click.echo("  ".join([*padded, folder]).rstrip())


def rm(given: Given) -> None:
    """Remove models from this machine.

    Of an alias or a hub id all that was fetched goes; of a GGUF file, named as `models` shows it or
    by its stem, what was converted for its start. The file itself stays.
    """
    names: tuple[str, ...] = given.values["names"]
    named = {
        model.folder: model
        for model in _listed()
        if model.folder and set(names) & set(_names(model))
    }
    for name in set(names).difference(*map(_names, named.values())):
        raise FieldError("NAME", f"must be a model that `models` shows, got {shown(name)}.")
    for folder, model in named.items():
        num_bytes = _remove(model, Path(folder))
        click.echo(f"{model.name}: removed {num_bytes / 2**20:,.1f} MiB")


def _names(model: KnownModel) -> tuple[str, ...]:
    is_file = model.source == "GGUF file"
    return (model.name, stem_of(Path(model.name).name)) if is_file else (model.name,)


def _remove(model: KnownModel, folder: Path) -> int:
    """Returns the bytes that are free again. Raises `PrefixCacheError`."""
    from prefixcache.models.hub import remove_folder

    num_bytes = _size(folder)
    try:
        if model.source == "hub":
            shutil.rmtree(folder)
        else:
            remove_folder(folder)
    except OSError as error:
        raise PrefixCacheError(f"{model.name} is not removed: {error}.") from error
    return num_bytes


def _listed() -> list[KnownModel]:
    return [*_aliases(), *_converted(), *_of_the_hub()]


def _row(model: KnownModel) -> tuple[str, str, str, str]:
    absent = "not fetched" if model.source == "alias" else "file is gone"
    size = absent if model.size is None else f"{model.size / 2**20:,.0f} MiB"
    return model.name, model.source, size, model.folder or ""


def _aliases() -> Iterator[KnownModel]:
    from prefixcache.models.hub import ALIASES, folder_of_alias

    for name in ALIASES:
        folder = folder_of_alias(name)
        is_there = folder.is_dir()
        yield KnownModel(
            name=name,
            source="alias",
            size=_size(folder) if is_there else None,
            folder=str(folder) if is_there else None,
        )


def _converted() -> Iterator[KnownModel]:
    """GGUF files of the user: their folders hold all but the weights, which they lead to."""
    from prefixcache.models.hub import converted_files

    for folder, file in converted_files():
        size = file.stat().st_size if file.is_file() else None
        yield KnownModel(name=str(file), source="GGUF file", size=size, folder=str(folder))


def _of_the_hub() -> Iterator[KnownModel]:
    """Repositories of models with a config, in the cache that other programs share."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        snapshots = [path.snapshot_path for path in repo.revisions]
        if repo.repo_type == "model" and any(
            (path / "config.json").is_file() for path in snapshots
        ):
            folder = str(repo.repo_path)
            yield KnownModel(name=repo.repo_id, source="hub", size=repo.size_on_disk, folder=folder)


def _size(folder: Path) -> int:
    """Bytes of the folder's own files, not of those that links lead to."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


MODELS = FlagGroup(
    models,
    ModelsOptions,
    below=[FlagCommand(rm, arguments=[_NAMES], examples=["prefixcache models rm Qwen/Qwen3-0.6B"])],
    examples=["prefixcache models"],
)
