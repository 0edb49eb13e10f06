"""Rust modules import each other in one direction, as lint-imports sees to for Python."""

import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CRATES = sorted((Path(__file__).parents[3] / "rust").glob("*/src"))

Module = tuple[str, ...]


def imports(crate: Path) -> dict[Module, dict[str, set[str]]]:
    """For each module with modules in it, which of these name which outside of their unit tests.

    A module in a folder is part of the one that the folder belongs to.
    """
    files = {module_of(path.relative_to(crate)): path for path in crate.rglob("*.rs")}
    graphs = defaultdict[Module, dict[str, set[str]]](lambda: defaultdict(set))
    for module, path in files.items():
        code = re.sub(r"//.*", "", path.read_text()).split("\nmod tests {")[0]
        for name in named(code, module):
            while name not in files and name:
                name = name[:-1]
            for depth, (this, other) in enumerate(zip(module, name, strict=False)):
                if this != other:
                    graphs[module[:depth]][this].add(other)
                    break
    return dict(graphs)


def module_of(path: Path) -> Module:
    return tuple(part for part in path.with_suffix("").parts if part not in ("lib", "mod"))


def named(code: str, module: Module) -> Iterator[Module]:
    """Paths of items that the code of a module names."""
    paths = re.findall(r"\b(crate|super(?:::super)*)\b((?:::\w+)*)(?:::\{([^;]*)\})?", code)
    for start, head, group in paths:
        above = () if start == "crate" else module[: -start.count("super")]
        for last in re.findall(r"(?:^|[{,])\s*([\w:]*)", group):
            yield above + tuple(part for part in f"{head}::{last}".split("::") if part)


@pytest.mark.parametrize("crate", CRATES, ids=lambda crate: crate.parent.name)
def test_no_modules_import_each_other(crate: Path) -> None:
    for graph in imports(crate).values():
        TopologicalSorter(graph).prepare()


def test_a_cycle_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring.rs").write_text("mod walk;\nmod slot;\n")
    (tmp_path / "ring" / "walk.rs").write_text(
        "use super::slot::Slot;\nuse crate::{sync::Mode, pool::Pool};\n"
    )
    (tmp_path / "ring" / "slot.rs").write_text("fn f(walk: super::walk::Walk) {}\n")
    (tmp_path / "pool.rs").write_text("use super::ring::{Ring, walk::Walk};\n")
    graphs = imports(tmp_path)
    assert graphs[()] == {"ring": {"pool"}, "pool": {"ring"}}
    assert graphs["ring",] == {"walk": {"slot"}, "slot": {"walk"}}
    for graph in graphs.values():
        with pytest.raises(CycleError, match=r"ring|walk"):
            TopologicalSorter(graph).prepare()


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
