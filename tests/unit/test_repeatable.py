"""How a run is repeated: an inner pytest with a failing test of each kind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FAILING = """
from hypothesis import given, strategies as st

def test_schedule(seed):
    raise AssertionError(f"schedule {seed}")

@given(st.integers())
def test_property(number):
    print("example", number)
    assert number < 1000
"""


def run(folder: Path, *arguments: str, **environment: str) -> str:
    (folder / "test_failing.py").write_text(FAILING)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFIXCACHE_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "repeatable", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=clean | {"PYTHONPATH": str(TESTS)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_failing_run_says_how_to_repeat_it_and_the_next_run_draws_anew(tmp_path: Path) -> None:
    """With CI in the environment Hypothesis would draw the same cases unless told otherwise."""
    first = run(tmp_path, "-n1", "--dist=loadgroup", CI="1", HYPOTHESIS_STORAGE_DIRECTORY="a")
    command = re.search(r"PREFIXCACHE_TEST_SEED=(\d+) pytest '(.+)'", first)
    assert command is not None
    assert "@reproduce_failure(" in first
    again = run(tmp_path, command[2], PREFIXCACHE_TEST_SEED=command[1])
    assert _schedule(again) == _schedule(first)
    second = run(tmp_path, "--reruns=1", CI="1", HYPOTHESIS_STORAGE_DIRECTORY="b")
    assert "first run of test_failing.py::test_schedule" in second
    assert _schedule(second) != _schedule(first)
    assert _examples(second) != _examples(first)


def test_fixed_cases_are_the_same_in_every_run(tmp_path: Path) -> None:
    fixed = {"PREFIXCACHE_FIXED_CASES": "1"}
    first = run(tmp_path, **fixed, HYPOTHESIS_STORAGE_DIRECTORY="a")
    second = run(tmp_path, "-n1", **fixed, HYPOTHESIS_STORAGE_DIRECTORY="b")
    assert _schedule(second) == _schedule(first)
    assert _examples(second) == _examples(first) != []


def _schedule(out: str) -> str:
    found = re.search(r"schedule \d+", out)
    assert found is not None
    return found[0]


def _examples(out: str) -> list[str]:
    return re.findall(r"^example .+", out, flags=re.MULTILINE)
