"""The families of models that run, one module a lineage: a new module here is all that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from prefixcache.config.family import Family


def _rows() -> Iterator[tuple[str, Family]]:
    for module in iter_modules(__path__):
        rows: dict[str, Family] = import_module(f"{__name__}.{module.name}").FAMILIES
        yield from rows.items()


FAMILIES = dict(_rows())
"""Families by the names of architectures in a config.json."""

GGUF_ARCHITECTURES = {
    family.gguf.architecture: name for name, family in reversed(FAMILIES.items()) if family.gguf
}
"""Their names in GGUF files. Of families with one name there the first is meant."""
