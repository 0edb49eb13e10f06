"""Packages whose private parts are used stay within versions that the tests have run with."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]


def requirements(begin: str = r"dependencies = \[", end: str = "]") -> dict[str, Requirement]:
    """What the package depends on, or what the part of the file between two marks names."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(rf"\n{begin}\n(.+?)\n{re.escape(end)}\n", text, re.DOTALL)
    assert listed
    found = map(Requirement, re.findall(r'"([\w-]+(?:\[\w+\])?[<>=][^"]+)"', listed[1]))
    return {requirement.name.lower().replace("_", "-"): requirement for requirement in found}


@pytest.mark.parametrize("name", ["runtime", "dev"])
def test_pinned_versions_are_allowed(name: str) -> None:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pins = [Requirement(line.rstrip(" \\")) for line in lines if re.match(r"[\w-]+==", line)]
    allowed = requirements()
    checked = [pin for pin in pins if pin.name in allowed]
    assert {pin.name for pin in checked} == set(allowed)
    for pin in checked:
        (version,) = pin.specifier
        assert allowed[pin.name].specifier.contains(version.version), pin


@pytest.mark.parametrize("name", ["torch", "transformers", "uvicorn"])
def test_packages_whose_private_parts_are_used_have_a_last_version(name: str) -> None:
    extras = requirements(r"\[project.optional-dependencies\]", "\n[project.scripts]")
    assert not (extras | requirements())[name].specifier.contains("1000")


def test_nothing_is_published_before_it_has_addresses_people_and_a_day(tmp_path: Path) -> None:
    def said(root: Path) -> str:
        command = [sys.executable, root / "release/publishable.py", "v0.1.0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (done.stderr == "")
        return done.stderr

    names = (
        "release/publishable.py",
        "pyproject.toml",
        "Cargo.toml",
        "CHANGELOG.md",
        "SECURITY.md",
    )
    (tmp_path / "release").mkdir()
    for name in names:
        shutil.copy(ROOT / name, tmp_path / name)
    added = {
        "pyproject.toml": "[project.urls]\nauthors = [\n",
        "CHANGELOG.md": "## 0.1.0 - 2027-01-31\n",
        "SECURITY.md": "security@example.com\n",
    }
    for name, text in added.items():
        assert f"{name} lacks" in said(tmp_path)
        with (tmp_path / name).open("a") as file:
            file.write(text)
    assert said(tmp_path) == ""
    (tmp_path / "Cargo.toml").write_text('version = "0.2.0"')
    assert said(tmp_path) == "Cargo.toml lacks version 0.1.0\n"
