"""Rust modules import each other in one direction, as lint-imports sees to for Python."""

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CRATES = sorted((Path(__file__).parents[2] / "rust").glob("*/src"))


def imports(crate: Path) -> dict[str, set[str]]:
    """The modules of the crate's root, and which of them each names outside of its unit tests.

    A module in a folder is part of the one that the folder belongs to.
    """
    files = {path: path.relative_to(crate).with_suffix("").parts[0] for path in crate.rglob("*.rs")}
    modules = set(files.values())
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for path, module in files.items():
        code = re.sub(r"//.*", "", path.read_text()).split("\n#[cfg(test)]\nmod tests")[0]
        graph[module] |= set(named(code)) & modules - {module}
    return graph


def named(code: str) -> Iterator[str]:
    yield from re.findall(r"\bcrate::(\w+)", code)
    for group in re.findall(r"\bcrate::\{([^;]*)\}", code):
        yield from re.findall(r"\w+", group)


@pytest.mark.parametrize("crate", CRATES, ids=lambda crate: crate.parent.name)
def test_no_modules_import_each_other(crate: Path) -> None:
    TopologicalSorter(imports(crate)).prepare()


def test_a_cycle_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring" / "walk.rs").write_text("use crate::{sync::Mode, pool::Pool};\n")
    (tmp_path / "pool.rs").write_text("use crate::ring::Ring;\n")
    assert imports(tmp_path) == {"ring": {"pool"}, "pool": {"ring"}}
    with pytest.raises(CycleError, match="ring"):
        TopologicalSorter(imports(tmp_path)).prepare()
