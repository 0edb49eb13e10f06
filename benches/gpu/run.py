"""Everything that only a GPU can show, without network: checks, speed, peers.

    python benches/gpu/run.py                            # with prebuilt kernels, 480 s on an H200
    python benches/gpu/run.py --budget 720               # and vLLM, which is last
    python benches/gpu/run.py --jit                      # kernels to compile first, other peers
    python benches/gpu/run.py --dry-run --device cpu     # the same steps with a tiny model

`rows.jsonl` of the record's folder gets the machine and then each row as it is measured, so that a
run which is cut off loses none. `log.txt` keeps all that sections printed, `table.md` has the rows
to read, `values.json` those that are compared as the records of BENCHMARKS.md have them, and
`kernels.tar.xz` what FlashInfer compiled, for `pack.sh --kernels`. Every section is a
process with a time limit of its own, and goes on in another one where it loses the device. What
failed and the rows that decide are printed last, in 12,000 characters at most.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import PEERS
from progress import LOST
from record import append_row, read_rows

from prefixcache.tools.bench.machine import machine_facts, now

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"
_LEAST_SECONDS = 15
_SHOWN_LINES = 30
# Of the summary: some consoles keep no more of a run.
_MOST_CHARACTERS = 12_000
_MOST_OF_A_LINE = 240
# Sections and what their rows are called that benches/notes/gpu.md asks for.
HEADLINES = (
    ("workload", r"cache on|on / off"),
    ("peers", ""),
    ("equality", ""),
    ("steps", r"prefill|first token|decode of (64|\d), (default|fastest)"),
    ("sampling", r"sampled / greedy"),
    ("attention", r"decode of 64"),
)
# What a process gets to print its stacks before it is killed.
_ABORT_SECONDS = 5


@dataclass(frozen=True)
class Job:
    """A section with its options, and the seconds that it may take."""

    section: str
    shape: str = ""
    peer: str = ""
    marks: str = ""
    seconds: float = 60

    @property
    def title(self) -> str:
        """What is printed while it runs."""
        return " ".join(part for part in (self.section, self.shape, self.peer) if part)


FULL = (
    Job("smoke", "two-layers", seconds=60),
    Job("tests", marks="not jit", seconds=120),
    Job("steps", "qwen2.5-7b", seconds=90),
    Job("equality", "qwen2.5-7b", seconds=90),
    Job("workload", "qwen2.5-7b", seconds=90),
    Job("fast_workload", "qwen2.5-7b", seconds=60),
    Job("kernels+attention+sampling+profiles", "qwen2.5-7b", seconds=90),
    Job("matmuls", "qwen2.5-7b", seconds=30),
    Job("pinned_matmuls", "qwen2.5-7b", seconds=30),
    Job("fast_steps", "qwen2.5-7b", seconds=40),
    Job("equality", "qwen3-0.6b", seconds=60),
    Job("workload", "qwen3-0.6b", seconds=60),
    Job("fast_workload", "qwen3-0.6b", seconds=60),
    Job("steps", "qwen3-0.6b", seconds=60),
    Job("peer", "qwen2.5-7b", "vllm", seconds=200),
    Job("peer", "qwen3-0.6b", "vllm", seconds=200),
)
# Heads of 64, windows and soft caps have no prebuilt kernel.
JIT = (
    Job("jit_build", seconds=300),
    Job("jit_keep", seconds=30),
    Job("compiled_kernels", seconds=60),
    Job("equality", "hybrid", seconds=90),
    Job("smoke", "hybrid", seconds=60),
    Job("steps", "hybrid", seconds=60),
    Job("steps", "llama-3.2-1b", seconds=60),
    Job("workload", "llama-3.2-1b", seconds=60),
    Job("peer", "qwen3-0.6b", "nano-vllm", seconds=90),
    Job("peer", "qwen2.5-7b", "transformers", seconds=120),
    Job("tests", marks="jit", seconds=120),
    Job("jit_keep", seconds=30),
)
# Dry runs measure nothing: their times are bounds for a busy machine.
DRY = (
    Job("smoke+kernels+steps+fast_steps+equality+workload", "tiny", seconds=900),
    Job("attention+sampling+profiles+matmuls+pinned_matmuls", "tiny", seconds=900),
    Job("tests", marks="not jit", seconds=900),
    Job("peer", "tiny", "transformers", seconds=900),
)
DRY_JIT = (
    Job("jit_build+compiled_kernels", "tiny", seconds=900),
    Job("smoke+equality+steps", "tiny-hybrid", seconds=900),
    Job("peer", "tiny", "vllm", seconds=15),
    Job("peer", "tiny", "nano-vllm", seconds=15),
    Job("tests", marks="jit", seconds=900),
)


@dataclass(frozen=True)
class Run:
    """Where sections run and what they leave behind."""

    folder: Path
    device: str = "cuda"
    scale: str = "full"
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def record(self) -> Path:
        """The rows so far, one JSON object a line."""
        return self.folder / "rows.jsonl"

    @property
    def log(self) -> Path:
        """All that sections printed, with all stacks where one was stopped."""
        return self.folder / "log.txt"

    def job(self, job: Job, seconds: float) -> None:
        """Runs one section; that it fails becomes a row after those it measured.

        Where a process ends before all its parts were begun, another one goes on after the last.
        """
        end = time.monotonic() + seconds
        with tempfile.TemporaryDirectory() as scratch:
            progress = Path(scratch) / "begun"
            begun = 0
            while True:
                failure = self.process(self._command(job, progress, begun), job.title, seconds)
                if failure is not None:
                    self._failed(job, failure)
                before, begun = begun, _read_number(progress)
                seconds = end - time.monotonic()
                if begun <= before:
                    return
                if seconds < min(_LEAST_SECONDS, job.seconds):
                    self._failed(job, f"skipped: no time left after part {begun}")
                    return

    def _failed(self, job: Job, why: str) -> None:
        row = {"section": job.section, "what": job.title, "unit": why}
        append_row(self.record, row if job.peer else row | {"ok": False})

    def process(self, command: Sequence[str | Path], title: str, seconds: float) -> str | None:
        """Runs a command with its output added to the log; says how it failed.

        That it lost the device is no failure of its own: a row says which part did it.
        """
        with self.log.open("ab") as output:
            output.write(f"\n==== {title}\n".encode())
            begin = output.tell()
            output.flush()
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=dict(self.environment),
                # So that compilers and workers that a section started end with it.
                start_new_session=True,
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
                process.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ABORT_SECONDS)
            finally:
                _kill_group(process)
        if status in (0, LOST):
            return None
        said = self.log.read_bytes()[begin:].decode(errors="replace")
        lines = said.strip().splitlines() or ["no output"]
        print("\n".join(lines[-_SHOWN_LINES:]), file=sys.stderr, flush=True)
        return f"stopped after {seconds:.0f} s" if status is None else f"failed: {lines[-1]}"

    def _command(self, job: Job, progress: Path, begun: int) -> list[str | Path]:
        if job.section == "tests":
            options = ["-m", job.marks, "-v", "--tb=short", "-p", "no:cacheprovider"]
            rows = ["-p", "pytest_rows", "--rows", self.record, "--progress", progress]
            rows += ["--resume-at", str(begun)]
            pytest = [sys.executable, "-X", "faulthandler", "-m", "pytest", TESTS / "gpu"]
            return [*pytest, *options, *rows]
        given = {"device": self.device, "scale": self.scale, "shape": job.shape, "peer": job.peer}
        given |= {"folder": str(self.folder), "progress": str(progress), "begun": begun}
        sections = [HERE / "sections.py", job.section, json.dumps(given), self.record]
        return [sys.executable, "-X", "faulthandler", *sections]


def _read_number(file: Path) -> int:
    """What it holds; 0 where there is no such file."""
    return int(file.read_text()) if file.exists() else 0


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a section. A process that hangs in the driver is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ABORT_SECONDS)


def run_all(run: Run, jobs: Sequence[Job], budget: float) -> None:
    """All sections in order, the most wanted first, until the budget is spent."""
    end = time.monotonic() + budget
    for job in jobs:
        left = end - time.monotonic() - _ABORT_SECONDS
        if (missing := _missing(job, left)) is not None:
            append_row(run.record, {"section": job.section, "what": job.title, "unit": missing})
            continue
        begun = time.monotonic()
        run.job(job, min(left, job.seconds))
        print(f"{job.title}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _missing(job: Job, left: float) -> str | None:
    if left < min(_LEAST_SECONDS, job.seconds):
        return "skipped: no time left"
    if job.peer and not PEERS[job.peer].installed:
        return "not installed"
    return None


def section_environment(jit: bool) -> dict[str, str]:
    """Sections find the modules next to this file and the tests' references.

    Where kernels are prebuilt, none is compiled.
    """
    environment = dict(os.environ)
    paths = [str(HERE), str(TESTS), environment.get("PYTHONPATH", "")]
    # Plugins that happen to be installed may not fit the pytest that is packed.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if importlib.util.find_spec("flashinfer_jit_cache") is not None and not jit:
        environment["FLASHINFER_DISABLE_JIT"] = "1"
    return environment


def summary(rows: list[dict[str, Any]]) -> str:
    """How many rows there are, what failed and what decides, within `_MOST_CHARACTERS`."""
    counts = Counter(str(row["section"]) for row in rows)
    failed = [row for row in rows if row.get("ok") is False or "value" not in row]
    decides = [row for row in rows if row.get("ok") is not False and _is_headline(row)]
    lines = [
        f"{len(rows)} rows: " + ", ".join(f"{name} {count}" for name, count in counts.items()),
        "",
        f"Failed or not done: {len(failed)}",
    ]
    left = _MOST_CHARACTERS - sum(len(line) + 1 for line in lines) - 200
    headlines = _fitting(decides, left // 2)
    failures = _fitting(failed, left - sum(len(line) + 1 for line in headlines))
    return "\n".join([*lines, *failures, "", "What decides:", *headlines])


def _is_headline(row: dict[str, Any]) -> bool:
    return any(
        row["section"] == section and re.search(pattern, row["what"])
        for section, pattern in HEADLINES
    )


def _fitting(rows: list[dict[str, Any]], most: int) -> list[str]:
    """The first rows of those that have room, and how many have none."""
    lines = [_line(row)[:_MOST_OF_A_LINE] for row in rows]
    while sum(len(line) + 1 for line in lines) > most:
        lines.pop()
    left_out = len(rows) - len(lines)
    return [*lines, f"and {left_out} more in the record"] if left_out else lines


def _line(row: dict[str, Any]) -> str:
    said = f"{row['section']}: {row['what']}: {_number(row.get('value'))} {row.get('unit', '')}"
    floor = f", floor {_number(row['floor'])}" if "floor" in row else ""
    return said.replace("\n", " ") + floor + (" FAILED" if row.get("ok") is False else "")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown; a row that must hold and does not is marked."""
    lines = ["| section | what | value | unit | floor | value / floor | holds |", "|" + "---|" * 7]
    for row in rows:
        cells = [row["section"], row["what"], _number(row.get("value")), row.get("unit", "")]
        cells += [_number(row.get("floor")), _number(row.get("ratio"))]
        cells.append({None: "", True: "yes", False: "NO"}[row.get("ok")])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compared(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Values by their setting and contender."""
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        if "setting" in row:
            values.setdefault(row["setting"], {})[row["contender"]] = round(row["value"], 3)
    return values


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def facts(device: str) -> dict[str, Any]:
    """The machine, and the GPU as its driver names it."""
    found: dict[str, Any] = dict(machine_facts())
    if device == "cuda":
        fields = "--query-gpu=name,driver_version,memory.total"
        command = ["nvidia-smi", fields, "--format=csv,noheader"]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
            found["gpu"] = done.stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as failure:
            found["gpu"] = f"unknown: {failure}"
    return found


def main() -> int:
    """Exit status 1 when something that must hold does not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model and short workloads")
    parser.add_argument("--jit", action="store_true", help="kernels to compile first, and peers")
    parser.add_argument("--budget", type=float, default=480, help="seconds for all of it")
    parser.add_argument("--only", help="sections to run, by comma")
    parser.add_argument("--record", type=Path, help="a folder for the rows and all output")
    parser.add_argument("--values", type=Path, help="another place for values.json")
    options = parser.parse_args()
    if options.device == "cpu" and not options.dry_run:
        parser.error("--device cpu is for --dry-run: the models are too large")
    # So that a run that is ended from outside ends its section too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begun = time.monotonic()
    run = Run(
        folder=options.record or Path(time.strftime("gpu-record-%Y%m%d-%H%M%S")),
        device=options.device,
        scale="dry" if options.dry_run else "full",
        environment=section_environment(options.jit),
    )
    run.folder.mkdir(parents=True, exist_ok=True)
    first = len(read_rows(run.record))
    machine = facts(options.device)
    append_row(run.record, {"machine": machine})
    run_all(run, _jobs(options), options.budget)
    rows = read_rows(run.record)[first + 1 :]
    (run.folder / "table.md").write_text(table(rows) + "\n")
    command = " ".join(["python benches/gpu/run.py", *sys.argv[1:]])
    about = {"command": command, "date": now(), "machine": machine, "values": compared(rows)}
    (options.values or run.folder / "values.json").write_text(json.dumps(about, indent=1) + "\n")
    print(summary(rows))
    print(f"\n{time.monotonic() - begun:.0f} s, kept in {run.folder}")
    return 0 if all(row.get("ok", True) for row in rows) else 1


def _jobs(options: argparse.Namespace) -> list[Job]:
    jobs = {
        (False, False): FULL,
        (False, True): JIT,
        (True, False): DRY,
        (True, True): DRY_JIT,
    }[options.dry_run, options.jit]
    wanted = options.only.split(",") if options.only else None
    return [job for job in jobs if wanted is None or job.section in wanted]


if __name__ == "__main__":
    sys.exit(main())
