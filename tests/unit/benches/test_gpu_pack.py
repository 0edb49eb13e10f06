"""`benches/gpu/pack.sh`, `bootstrap.sh` and what is between them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "benches" / "gpu"
# Keeps what pip is asked for, and leaves a wheel that it does not name.
_PIP = """#!{python}
import json, sys
from pathlib import Path
arguments = sys.argv[1:]
with open({asked!r}, "a") as asked:
    asked.write(json.dumps(arguments) + "\\n")
Path(arguments[arguments.index("--dest") + 1], "found.whl").write_bytes(b"wheel")
"""


def _packed(
    folder: Path, python: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A packed folder with kernels and a stand-in of our wheel."""
    kernels = folder.parent / "kernels.tar.xz"
    library = folder.parent / "page.so"
    library.write_bytes(b"library")
    with tarfile.open(kernels, "w:xz") as archive:
        archive.add(library, "aot/page/page.so")
    wheel = folder.parent / "prefixcache-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("prefixcache/__init__.py", '__version__ = "1.0"')
        archive.writestr("prefixcache/_core.py", "")
        about = (
            "Name: prefixcache\nVersion: 1.0\nRequires-Dist: torch>=2\nRequires-Dist: no_such>=1"
        )
        archive.writestr("prefixcache-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\n{about}\n")
    return subprocess.run(
        ["bash", BENCH / "pack.sh", folder, "--wheel", wheel, "--kernels", kernels],
        env=os.environ | {"PYTHON": str(python)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def recording_pip(tmp_path: Path) -> tuple[Path, Path]:
    """An interpreter whose pip downloads nothing, and what it was asked for."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(_PIP.format(python=sys.executable, asked=str(asked)))
    python.chmod(0o755)
    return python, asked


def test_a_packed_folder_has_what_the_tests_there_import_and_no_more_than_can_be_carried(
    tmp_path: Path, recording_pip: tuple[Path, Path]
) -> None:
    python, _ = recording_pip
    folder = tmp_path / "packed"
    assert _packed(folder, python).returncode == 0
    assert not (folder / "tests" / "unit").exists()
    paths = [str(ROOT / "python"), str(folder / "benches" / "gpu")]
    done = subprocess.run(
        [sys.executable, "-c", "import pytest, sections; pytest.main(['tests/gpu', '-q'])"],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([*paths, str(folder / "tests")]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ skipped in", done.stdout, re.MULTILINE), done.stdout
    too_large = _packed(tmp_path / "again", python, LIMIT_MIB="0")
    assert too_large.returncode == 1
    assert "More than 0 MiB" in too_large.stderr


def test_bootstrap_unpacks_wheels_without_pip_and_names_what_is_missing(tmp_path, recording_pip):
    folder, target = tmp_path / "packed", tmp_path / "target"
    assert _packed(folder, recording_pip[0]).returncode == 0
    (folder / "wheels" / "found.whl").unlink()
    without = tmp_path / "without"
    without.mkdir()
    (without / "pip.py").write_text("raise ImportError('there is no pip')")
    done = subprocess.run(
        [folder / "bootstrap.sh", target],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(without)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "prefixcache 1.0 with" in done.stdout
    assert "Neither packed nor there: no_such\n" in done.stdout
    assert (target / "flashinfer_jit_cache" / "aot" / "page" / "page.so").exists()
