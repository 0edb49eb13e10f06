"""Rust modules import each other in one direction, as lint-imports sees to for Python."""

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CRATES = sorted((Path(__file__).parents[3] / "rust").glob("*/src"))


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


def shared_by_threads(crate: Path) -> list[str]:
    """Lines that name a lock, or outside of `sync.rs` what threads share."""
    found = list[str]()
    for path in sorted(crate.rglob("*.rs")):
        code = re.sub(r"//.*", "", path.read_text()).split("\nmod tests {")[0]
        for line in code.splitlines():
            is_shared = path.name != "sync.rs" and re.search(r"\b(std|core)::sync\b", line)
            if is_shared or re.search(r"\b(Mutex|RwLock|Condvar)\b", line):
                found.append(f"{path.name}: {line.strip()}")
    return found


def test_the_core_has_no_lock_and_names_atomics_in_one_place(tmp_path: Path) -> None:
    (core,) = [crate for crate in CRATES if crate.parent.name == "prefixcache-core"]
    assert shared_by_threads(core) == []
    (tmp_path / "pool.rs").write_text("use std::sync::Arc;\nlet a = 1; // no Mutex\n")
    (tmp_path / "sync.rs").write_text("use std::sync::OnceLock;\nstruct A(RwLock<u8>);\n")
    assert shared_by_threads(tmp_path) == [
        "pool.rs: use std::sync::Arc;",
        "sync.rs: struct A(RwLock<u8>);",
    ]
