"""Two results of the bench, read from their files and put side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefixcache.exceptions import ConfigError
from prefixcache.tools.bench.reports.tables import describe, table

# Settings that say where the server stands, rather than what was asked of it.
_PLACES = frozenset({"through"})


def compare_files(a: Path, b: Path) -> Iterator[str]:
    """What `bench compare` prints: a table for each variant in both files, ratios towards A.

    Files without a variant in common are compared by their last ones. Raises `ConfigError` with the
    file that is none of `prefixcache bench --output`.
    """
    first, second = _read(a), _read(b)
    yield f"A: {a}: {describe(first['settings'])}, {first['date'][:10]}"
    yield f"B: {b}: {describe(second['settings'])}, {second['date'][:10]}"
    yield from _differences(first, second)
    for name_a, name_b in _pairs(list(first["variants"]), list(second["variants"])):
        columns = [first["variants"][name_a], second["variants"][name_b]]
        yield table([f"A: {name_a}", f"B: {name_b}"], columns)


def _pairs(a: list[str], b: list[str]) -> list[tuple[str, str]]:
    common = [(name, name) for name in a if name in b]
    return common or [(a[-1], b[-1])]


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """What was not the same, so that nobody takes its effect for the server's."""
    for part in ("settings", "machine"):
        for name in sorted(a[part].keys() | b[part].keys()):
            here, other = a[part].get(name), b[part].get(name)
            if here != other and name not in _PLACES:
                yield f"{name}: {here} in A, {other} in B"


def _read(path: Path) -> dict[str, Any]:
    """Settings, machine, date, and the variants' medians by name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        variants = {variant["name"]: dict(variant["median"]) for variant in content["variants"]}
        kept = {name: dict(content[name]) for name in ("settings", "machine")}
        describe(kept["settings"])
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no result of prefixcache bench --output.") from error
    if not variants:
        raise ConfigError(f"{path} holds no measurement.")
    return kept | {"date": str(content.get("date", "")), "variants": variants}
