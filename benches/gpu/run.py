"""Everything that only a GPU can show, in one command without network: checks, speed, peers.

    python benches/gpu/run.py                            # about 10 minutes on an H200
    python benches/gpu/run.py --dry-run --device cpu     # all of it with a tiny model

Prints one table and writes it as JSON. Sections that do not fit into the budget are named as such.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import PEERS

from prefixcache.bench.machine import machine_facts

HERE = Path(__file__).parent
_LEAST_SECONDS = 15
_PEER_SECONDS = {"full": 120, "dry": 15}


@dataclass(frozen=True)
class Job:
    """A section with its options."""

    section: str
    shape: str = ""
    peer: str = ""

    @property
    def title(self) -> str:
        """What is printed while it runs."""
        return " ".join(part for part in (self.section, self.shape, self.peer) if part)


FULL = (
    Job("kernels"),
    Job("equality", "qwen3-0.6b"),
    Job("steps", "qwen2.5-7b"),
    Job("workload", "qwen2.5-7b"),
    Job("equality", "qwen2.5-7b"),
    Job("workload", "qwen3-0.6b"),
    Job("workload", "llama-3.2-1b"),
    Job("steps", "qwen3-0.6b"),
    Job("steps", "llama-3.2-1b"),
    Job("peer", "qwen2.5-7b", "vllm"),
    Job("peer", "qwen3-0.6b", "nano-vllm"),
    Job("peer", "qwen2.5-7b", "transformers"),
    Job("compiled_kernels"),
)
DRY = (
    Job("kernels+compiled_kernels+equality+steps+workload", "tiny"),
    Job("peer", "tiny", "vllm"),
    Job("peer", "tiny", "nano-vllm"),
    Job("peer", "tiny", "transformers"),
)


def run_job(job: Job, device: str, scale: str, seconds: float) -> list[dict[str, Any]]:
    """Rows of one section, in a process of its own; a failure becomes a row."""
    with tempfile.TemporaryDirectory() as folder:
        options, result = Path(folder) / "options.json", Path(folder) / "result.json"
        options.write_text(
            json.dumps({"device": device, "scale": scale, "shape": job.shape, "peer": job.peer})
        )
        command = [sys.executable, HERE / "sections.py", job.section, options, result]
        try:
            done = subprocess.run(
                command, timeout=seconds, check=False, stderr=subprocess.PIPE, text=True
            )
            failure = _last_line(done.stderr) if done.returncode else None
            sys.stderr.write(done.stderr)
        except subprocess.TimeoutExpired as expired:
            told = expired.stderr or b""
            sys.stderr.write(told if isinstance(told, str) else told.decode(errors="replace"))
            failure = f"stopped after {seconds:.0f} s"
        rows = json.loads(result.read_text()) if result.exists() else []
    if failure is not None:
        failed: dict[str, Any] = {"section": job.section, "what": job.title, "unit": failure}
        rows.append(failed if job.peer else failed | {"ok": False})
    return rows


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f"failed: {lines[-1]}" if lines else "failed"


def run_all(jobs: tuple[Job, ...], device: str, scale: str, budget: float) -> list[dict[str, Any]]:
    """All sections in order, the most wanted first, until the budget is spent."""
    end = time.monotonic() + budget
    rows: list[dict[str, Any]] = []
    for job in jobs:
        left = end - time.monotonic()
        if left < _LEAST_SECONDS:
            rows.append(
                {"section": job.section, "what": job.title, "unit": "skipped: no time left"}
            )
            continue
        if job.peer and not PEERS[job.peer].installed:
            rows.append({"section": job.section, "what": job.title, "unit": "not installed"})
            continue
        begun = time.monotonic()
        rows += run_job(job, device, scale, min(left, _PEER_SECONDS[scale]) if job.peer else left)
        print(f"{job.title}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown; a row that must hold and does not is marked."""
    lines = ["| section | what | value | unit | floor | value / floor | holds |", "|" + "---|" * 7]
    for row in rows:
        cells = [row["section"], row["what"], _number(row.get("value")), row.get("unit", "")]
        cells += [_number(row.get("floor")), _number(row.get("ratio"))]
        cells.append({None: "", True: "yes", False: "NO"}[row.get("ok")])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def facts(device: str) -> dict[str, Any]:
    """The machine, and the GPU as its driver names it."""
    found: dict[str, Any] = dict(machine_facts())
    if device == "cuda":
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        found["gpu"] = subprocess.run(
            query, check=True, capture_output=True, text=True
        ).stdout.strip()
    return found


def main() -> int:
    """Exit status 1 when something that must hold does not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model and short workloads")
    parser.add_argument("--budget", type=float, default=570, help="seconds for all of it")
    parser.add_argument("--only", help="sections to run, by comma")
    parser.add_argument("--json", type=Path, help="where the rows go")
    options = parser.parse_args()
    if options.device == "cpu" and not options.dry_run:
        parser.error("--device cpu is for --dry-run: the models are too large")
    jobs = DRY if options.dry_run else FULL
    if options.only:
        jobs = tuple(job for job in jobs if job.section in options.only.split(","))
    begun = time.monotonic()
    scale = "dry" if options.dry_run else "full"
    rows = run_all(jobs, options.device, scale, options.budget)
    print(table(rows))
    print(f"\n{len(rows)} rows in {time.monotonic() - begun:.0f} s")
    if options.json is not None:
        record = {"machine": facts(options.device), "rows": rows}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
