"""What a reader meets: few loose files, folders of one idea, names that are not everywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "python" / "prefixcache"
TESTS = ROOT / "tests"


def sources(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*.py")) if file.name != "__init__.py"]


def crowded(folder: Path, limit: int) -> dict[str, int]:
    """Folders with more modules than `limit`, and how many these have."""
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in sources(folder))
    return {name: n for name, n in counts.items() if n > limit}


def test_few_files_stand_loose() -> None:
    loose = {file.name for file in PACKAGE.iterdir() if file.suffix in (".py", ".pyi")}
    assert len(loose) <= 8, loose


def test_no_folder_has_more_modules_than_a_reader_takes_in() -> None:
    assert crowded(PACKAGE, 15) | crowded(TESTS, 20) == {}


def test_no_name_is_in_more_than_two_places() -> None:
    names = Counter(file.name for file in sources(PACKAGE) if file.name != "base.py")
    assert [name for name, n in names.items() if n > 2] == []


def test_no_two_tests_have_one_name() -> None:
    """pytest imports a test by its name alone, and tests of a file that share go by it too."""
    names = Counter(file.name for file in TESTS.rglob("test_*.py"))
    assert [name for name, n in names.items() if n > 1] == []
