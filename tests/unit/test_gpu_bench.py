"""`benches/gpu/run.py` on a CPU: with nothing beside torch, and with sections that hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "benches" / "gpu"
# What a machine with a GPU may lack, and what only servers, plots and tests of ours import.
ABSENT = (
    *("flashinfer", "flashinfer_jit_cache", "transformers", "vllm", "nanovllm", "matplotlib"),
    *("fastapi", "uvicorn", "uvloop", "httptools", "hypothesis", "pytest_asyncio", "xdist"),
)
_BLOCK = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n"
_HANG = """
import os, subprocess, sys, time
from record import append_row
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
append_row(Path(sys.argv[1]), {"section": "slow", "what": "first", "child": child.pid})
def hangs_here():
    print("said before it hung", file=sys.stderr, flush=True)
    time.sleep(600)
hangs_here()
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `run` of `benches/gpu`, whose folder is in the path for as long."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    import run

    yield run
    for name in set(sys.modules) - before:
        if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.long
@pytest.mark.parametrize("command", [[], ["--jit"]], ids=["first", "jit"])
def test_the_dry_run_needs_no_package_that_the_machine_may_lack(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_BLOCK)
    paths = [str(tmp_path), str(ROOT / "python")]
    done = subprocess.run(
        [
            *(sys.executable, BENCH / "run.py", "--dry-run", "--device", "cpu", *command),
            *("--budget", "150", "--record", tmp_path / "record"),
        ],
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    machine, *rows = _rows(tmp_path / "record")
    assert "torch" in machine["machine"]
    measured = {row["section"] for row in rows if "value" in row}
    wanted = {"smoke", "kernels", "steps", "equality", "workload", "tests"}
    wanted |= {"attention", "sampling", "profiles", "matmuls"}
    if command:
        wanted = {"kernels", "smoke", "equality", "steps", "tests"}
        hybrid = [row for row in rows if "tiny-hybrid" in row["what"] and "hit" in row["what"]]
        assert hybrid
        assert all(" 0 hit tokens" not in row["unit"] for row in hybrid)
    assert measured == wanted
    assert {row["unit"] for row in rows if row["section"] == "peer"} == {"not installed"}


def test_a_section_that_hangs_loses_neither_its_rows_nor_its_words(
    tmp_path: Path, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 12345

    class UntilItHangs(subprocess.Popen[bytes]):
        """Its limit is over as soon as it hangs."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout != limit:
                return super().wait(timeout)
            while "hung" not in (tmp_path / "slow-part.log").read_text():
                assert self.poll() is None
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, limit)

    monkeypatch.setattr(bench.subprocess, "Popen", UntilItHangs)
    run = bench.Run(folder=tmp_path, environment=bench.section_environment(jit=False))
    command = [sys.executable, "-X", "faulthandler", "-c", _HANG, run.record]
    failure = run.process(command, "slow part", limit)
    assert failure == f"stopped after {limit} s"
    (row,) = _rows(tmp_path)
    assert row["what"] == "first"
    said = (tmp_path / "slow-part.log").read_text()
    assert "said before it hung" in said
    assert "in hangs_here" in said
    _wait_until_gone(row["child"])


def test_a_section_that_fails_is_a_row_and_the_others_are_run(
    tmp_path: Path, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = "import time; time.sleep(600)"
    scripts = {"broken": "raise ValueError('told why')", "good": "pass", "slow": hang}
    monkeypatch.setattr(
        bench.Run,
        "_command",
        lambda run, job: [sys.executable, "-c", scripts[job.section], run.record],
    )
    run = bench.Run(folder=tmp_path, environment=bench.section_environment(jit=False))
    jobs = [
        *(bench.Job("broken"), bench.Job("slow", seconds=1), bench.Job("good")),
        bench.Job("peer", "tiny", "vllm"),
    ]
    monkeypatch.setattr(bench, "PEERS", {"vllm": bench.PEERS["vllm"].__class__("absent_", None)})
    bench.run_all(run, jobs, budget=120)
    told = [(row["section"], row.get("unit"), row.get("ok")) for row in _rows(tmp_path)]
    assert told == [
        ("broken", "failed: ValueError: told why", False),
        ("slow", "stopped after 1 s", False),
        ("peer", "not installed", None),
    ]
    assert "| NO |" in bench.table(_rows(tmp_path))


def test_a_section_that_raises_does_not_end_those_after_it(tmp_path: Path, bench: Any) -> None:
    run = bench.Run(
        folder=tmp_path, device="cpu", scale="dry", environment=bench.section_environment(jit=False)
    )
    run.job(bench.Job("steps+kernels", "no such shape"), 120)
    first, *others = _rows(tmp_path)
    assert first == {
        "section": "steps",
        "what": "steps no such shape",
        "unit": "failed: 'no such shape'",
        "ok": False,
    }
    assert {row["section"] for row in others} == {"kernels"}
    assert all(row["ok"] for row in others)


def test_what_the_budget_leaves_no_time_for_is_said(tmp_path: Path, bench: Any) -> None:
    bench.run_all(bench.Run(folder=tmp_path), [bench.Job("steps", "qwen2.5-7b")], budget=1)
    (row,) = _rows(tmp_path)
    assert row == {"section": "steps", "what": "steps qwen2.5-7b", "unit": "skipped: no time left"}


def test_each_command_fits_into_ten_minutes_and_the_smoke_comes_first(bench: Any) -> None:
    assert bench.FULL[0].section == "smoke"
    assert bench.FULL[1] == bench.Job("tests", marks="not jit", seconds=bench.FULL[1].seconds)
    prebuilt = {job.shape for job in bench.FULL}
    assert "llama-3.2-1b" not in prebuilt, "its heads of 64 have no prebuilt kernel"
    assert {job.peer for job in bench.FULL[:-1]} == {""}


def test_a_row_that_was_cut_off_does_not_hide_those_before(tmp_path: Path, bench: Any) -> None:
    record = tmp_path / "rows.jsonl"
    record.write_text('{"section": "steps"}\n{"section": "wor')
    assert bench.read_rows(record) == [{"section": "steps"}]


def test_kernels_are_compiled_only_where_it_was_asked_for(
    tmp_path: Path, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "flashinfer_jit_cache"
    assert "FLASHINFER_DISABLE_JIT" not in bench.section_environment(jit=False)
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert bench.section_environment(jit=False)["FLASHINFER_DISABLE_JIT"] == "1"
    assert "FLASHINFER_DISABLE_JIT" not in bench.section_environment(jit=True)


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def _wait_until_gone(process: int) -> None:
    """A killed orphan stays until init has read its status: a zombie counts as gone."""
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                time.sleep(0.05)
                continue
        return


def test_packed_kernels_lie_where_flashinfer_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = shutil.copytree(BENCH / "prebuilt", tmp_path / "packed") / "flashinfer_jit_cache"
    (package / "version.txt").write_text("0.6.14\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "flashinfer_jit_cache", raising=False)
    import flashinfer_jit_cache

    monkeypatch.delitem(sys.modules, "flashinfer_jit_cache")
    assert flashinfer_jit_cache.__version__ == "0.6.14"
    assert flashinfer_jit_cache.get_jit_cache_dir() == str(package / "aot")


def test_the_packed_folder_holds_what_the_package_imports() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (declared,) = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    needed = set(re.findall(r'^ *"([\w-]+)', declared, re.MULTILINE))
    # They are on such a machine, and plots are drawn elsewhere.
    there = {"torch", "transformers", "numpy", "safetensors", "tokenizers", "huggingface_hub"}
    packed = {
        name
        for file in ("requirements.in", "requirements-alone.in")
        for name in re.findall(r"^[\w-]+", (BENCH / file).read_text(), re.MULTILINE)
    }
    assert needed - there - {"matplotlib"} <= packed
