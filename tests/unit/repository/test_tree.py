"""What a reader meets: few loose files, folders of one idea, names that are not everywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "python" / "prefixcache"
FILES = sorted(PACKAGE.rglob("*.py"))


def test_few_files_stand_loose() -> None:
    loose = {file.name for file in PACKAGE.iterdir() if file.suffix in (".py", ".pyi")}
    assert len(loose) <= 8, loose


def test_no_folder_has_more_than_fifteen_modules() -> None:
    counts = Counter(file.parent for file in FILES if file.name != "__init__.py")
    assert {str(folder): n for folder, n in counts.items() if n > 15} == {}


def test_no_name_is_in_more_than_two_places() -> None:
    names = Counter(file.name for file in FILES)
    assert [
        name for name, n in names.items() if n > 2 and name not in ("__init__.py", "base.py")
    ] == []
