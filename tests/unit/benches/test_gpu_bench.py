"""`benches/gpu/run.py` on a CPU: with nothing but torch, and with sections that hang."""

from __future__ import annotations

import contextlib
import dataclasses
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

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "benches" / "gpu"
# What a machine with a GPU may lack, and what only servers, plots and tests of ours import.
ABSENT = (
    *("flashinfer", "flashinfer_jit_cache", "transformers", "vllm", "nanovllm", "matplotlib"),
    *("starlette", "uvicorn", "uvloop", "httptools", "hypothesis", "pytest_asyncio", "xdist"),
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


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [[], ["--jit"]], ids=["first", "jit"])
def test_the_dry_run_needs_no_package_that_the_machine_may_lack(tmp_path, command):
    (tmp_path / "sitecustomize.py").write_text(_BLOCK)
    paths = [str(tmp_path), str(ROOT / "python")]
    done = subprocess.run(
        [
            *(sys.executable, BENCH / "run.py", "--dry-run", "--device", "cpu", *command),
            *("--budget", "1800", "--record", tmp_path / "record"),
        ],
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
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


def test_a_section_that_hangs_loses_neither_its_rows_nor_its_words(tmp_path, bench, monkeypatch):
    limit = 12345
    run = bench.Run(folder=tmp_path, environment=bench.section_environment(jit=False))

    class UntilItHangs(subprocess.Popen[bytes]):
        """Its limit is over as soon as it hangs."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout != limit:
                return super().wait(timeout)
            while "hung" not in run.log.read_text():
                assert self.poll() is None
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, limit)

    monkeypatch.setattr(bench.subprocess, "Popen", UntilItHangs)
    command = [sys.executable, "-X", "faulthandler", "-c", _HANG, run.record]
    failure = run.process(command, "slow part", limit)
    assert failure == f"stopped after {limit} s"
    (row,) = _rows(tmp_path)
    assert row["what"] == "first"
    said = run.log.read_text()
    assert "said before it hung" in said
    assert "in hangs_here" in said
    _wait_until_gone(row["child"])


def test_a_section_that_fails_is_a_row_and_the_others_are_run(tmp_path, bench, monkeypatch):
    hang = "import time; time.sleep(600)"
    scripts = {"broken": "raise ValueError('reason')", "good": "pass", "slow": hang}
    monkeypatch.setattr(
        bench.Run,
        "_command",
        lambda run, job, *_: [sys.executable, "-c", scripts[job.section], run.record],
    )
    run = bench.Run(folder=tmp_path, environment=bench.section_environment(jit=False))
    jobs = [
        *(bench.Job("broken"), bench.Job("slow", seconds=1), bench.Job("good")),
        bench.Job("peer", "tiny", "vllm"),
    ]
    monkeypatch.setattr(bench, "PEERS", {"vllm": bench.PEERS["vllm"].__class__("absent_", None)})
    bench.run_all(run, jobs, budget=3600)
    recorded = [(row["section"], row.get("unit"), row.get("ok")) for row in _rows(tmp_path)]
    assert recorded == [
        ("broken", "failed: ValueError: reason", False),
        ("slow", "stopped after 1 s", False),
        ("peer", "not installed", None),
    ]
    assert "| NO |" in bench.table(_rows(tmp_path))


_MANY_ROWS = """
import sys
from pathlib import Path
from record import append_row
record = Path(sys.argv[1])
row = {"section": "steps", "what": "qwen2.5-7b, decode of 64, default", "value": 5.2, "unit": "ms"}
row |= {"setting": "decode of 64 (ms)", "contender": "default"}
append_row(record, row)
for i in range(60):
    row = {"section": "matmuls", "what": "x" * 300, "unit": "failed:\\n" + "y" * 3000}
    append_row(record, row if i % 3 else row | {"ok": False})
print("said" * 10000)
"""


def test_a_whole_run_leaves_few_plain_files_and_prints_what_matters_last(
    tmp_path: Path, bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench.Run, "_command", lambda run, *_: [sys.executable, "-c", _MANY_ROWS, run.record]
    )
    monkeypatch.setattr(bench, "PEERS", {"transformers": bench.PEERS["transformers"]})
    jobs = [dataclasses.replace(job, seconds=900) for job in bench.FULL]
    monkeypatch.setattr(bench, "FULL", jobs)
    command = ["run.py", "--budget", "3600", "--record", str(tmp_path / "record")]
    monkeypatch.setattr(sys, "argv", command)
    assert bench.main() == 1
    left = list((tmp_path / "record").iterdir())
    assert all(file.is_file() and re.fullmatch(r"[A-Za-z0-9._-]+", file.name) for file in left)
    # Some machines give back eight files.
    assert {file.name for file in left} | {"kernels.tar.xz"} == {
        *("rows.jsonl", "log.txt", "table.md", "values.json", "kernels.tar.xz"),
    }
    values = json.loads((tmp_path / "record" / "values.json").read_text())["values"]
    assert values == {"decode of 64 (ms)": {"default": 5.2}}
    assert len(_rows(tmp_path / "record")) == 1 + 61 * len(bench.FULL)
    printed = capsys.readouterr().out
    assert 9_000 < len(printed) <= 12_000
    failures, decides = printed.split("What decides:")
    assert "more in the record" in failures
    assert "decode of 64, default: 5.2 ms" in decides


def test_each_headline_is_a_row_of_a_section(bench: Any, tmp_path: Path) -> None:
    run = bench.Run(
        folder=tmp_path, device="cpu", scale="dry", environment=bench.section_environment(jit=False)
    )
    run.job(bench.Job("workload+equality+steps+fast_steps", "tiny"), 900)
    found = {row["section"] for row in _rows(tmp_path) if bench._is_headline(row)}
    assert found == {"workload", "equality", "steps"}


class _Broken:
    """A system that cannot be made in the first of two modes."""

    def __init__(self, make: Any, is_broken: Any) -> None:
        self._make, self._is_broken = make, is_broken

    def __call__(self, model: Any, setup: Any) -> Any:
        if self._is_broken(setup):
            raise RuntimeError("CUDA error: this mode has none")
        return self._make(model, setup)


@pytest.mark.parametrize(
    ("section", "is_broken", "measured"),
    [
        ("equality", lambda setup: setup.batch_invariant, {"tiny, reference, hit and batch"}),
        ("workload", lambda setup: not setup.prefix_caching, {"tiny, output 8, cache on"}),
        ("steps", lambda setup: setup.eager, {"decode of 4, default"}),
    ],
)
def test_a_mode_that_fails_does_not_lose_those_after_it(
    section, is_broken, measured, tmp_path, bench, monkeypatch
):
    import progress
    import sections

    modes = (("reference", True), ("reference", False))
    monkeypatch.setattr(sections, "_modes", lambda _device: modes)
    monkeypatch.setattr(sections, "_step_kinds", lambda _device: (True, False))
    monkeypatch.setattr(sections, "System", _Broken(sections.System, is_broken))
    begun = progress.Progress(tmp_path / "begun", 0)
    options = sections.Options(device="cpu", scale="dry", shape="tiny")
    sections.run_sections(section, options, tmp_path / "rows.jsonl", begun)
    rows = _rows(tmp_path)
    assert "failed: CUDA error: this mode has none" in rows[0]["unit"]
    assert rows[0]["ok"] is False
    assert all(any(part in row["what"] for row in rows if "value" in row) for part in measured)
    assert not (tmp_path / "begun").exists()


def test_a_process_that_lost_its_device_ends_and_tells_where_it_was(tmp_path, bench, monkeypatch):
    import progress
    import sections

    def parts(_options: Any) -> Any:
        yield "good", lambda: iter([{"section": "s", "what": "good", "value": 1}])
        yield "bad", lambda: iter([{"section": "s", "what": {}["absent"]}])
        yield "after", lambda: pytest.fail("runs on a lost device")

    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setitem(sections.SECTIONS, "stub", parts)
    monkeypatch.setattr(sections, "device_is_lost", lambda: True)
    monkeypatch.setattr(sections.os, "_exit", end)
    options = sections.Options(device="cpu", scale="dry")
    with pytest.raises(SystemExit) as ended:
        sections.run_sections(
            "stub", options, tmp_path / "rows.jsonl", progress.Progress(tmp_path / "begun", 0)
        )
    assert ended.value.code == progress.LOST
    assert (tmp_path / "begun").read_text() == "2"
    assert [row["what"] for row in _rows(tmp_path)] == ["good", "stub, bad"]


_PARTS = """
import os, sys
from pathlib import Path
from progress import LOST, Progress
from record import append_row
record, file, begun = sys.argv[1:]
progress = Progress(Path(file), int(begun))
for part in range(5):
    if progress.is_left():
        progress.begin()
        append_row(Path(record), {"section": "parts", "what": f"part {part}", "value": os.getpid()})
        if part == 1:
            os._exit(LOST)
        if part == 3:
            os.abort()
progress.end()
"""


def test_another_process_goes_on_after_the_part_that_ended_one(tmp_path, bench, monkeypatch):
    monkeypatch.setattr(
        bench.Run,
        "_command",
        lambda run, _job, *at: [sys.executable, "-c", _PARTS, run.record, *map(str, at)],
    )
    run = bench.Run(folder=tmp_path, environment=bench.section_environment(jit=False))
    run.job(bench.Job("parts"), 900)
    rows = _rows(tmp_path)
    assert [row["what"] for row in rows] == [
        *("part 0", "part 1", "part 2", "part 3", "parts", "part 4"),
    ]
    processes = [row["value"] for row in rows if "value" in row]
    assert len(set(processes)) == 3
    assert processes[0] == processes[1] != processes[2] == processes[3]


def test_kernels_are_compiled_only_where_it_was_asked_for(tmp_path, bench, monkeypatch):
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


def test_packed_kernels_lie_where_flashinfer_asks_for_them(tmp_path, monkeypatch):
    package = shutil.copytree(BENCH / "prebuilt", tmp_path / "packed") / "flashinfer_jit_cache"
    (package / "version.txt").write_text("0.6.14\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "flashinfer_jit_cache", raising=False)
    import flashinfer_jit_cache

    monkeypatch.delitem(sys.modules, "flashinfer_jit_cache")
    assert flashinfer_jit_cache.__version__ == "0.6.14"
    assert flashinfer_jit_cache.get_jit_cache_dir() == str(package / "aot")
