"""Calls about files with numbers that no file has, and what the classes say of their module."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixcache import _core
from prefixcache._core import KVFile, hash_file_ranges


@pytest.fixture
def file(tmp_path: Path) -> Iterator[KVFile]:
    with (tmp_path / "kv").open("w+b") as opened:
        yield KVFile(opened.fileno(), bytes(32), 1, 4096, 4)


@pytest.mark.parametrize("call", ["allocate", "punch"])
@pytest.mark.parametrize(("arguments", "name"), [((-1, 1), "start"), ((0, 1 << 64), "length")])
def test_bytes_of_a_kv_file(file: KVFile, call: str, arguments: tuple[int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be from 0 to {2**64 - 1}"):
        getattr(file, call)(*arguments)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ((-1, 2), ValueError, r"ranges\[1\] must be from 0 to"),
        ((2, 1), ValueError, r"ranges\[1\] must not end before its start"),
        ((0, "2"), TypeError, r"ranges\[1\] must be a whole number"),
        (3, TypeError, r"ranges\[1\] must be \(start, end\) in bytes"),
    ],
)
def test_ranges_of_a_file(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hash_file_ranges(__file__, [(0, 1), wrong], 1)


def test_every_class_is_where_it_says() -> None:
    for name in _core.__all__:
        offered = getattr(_core, name)
        if isinstance(offered, type):
            assert getattr(importlib.import_module(offered.__module__), name) is offered
