"""Side by side on this machine: prefixcache, transformers, llama.cpp. Prefill, decode, TTFT.

    python benches/serving/compare.py --output benches/record/DATE-compare.json
    python benches/serving/compare.py --llama-python VENV/bin/python   # also llama-cpp-python

Each contender is a process of its own; they take turns, window by window, and medians are shown. A
batch is computed once and then decoded in windows. One that overruns `--limit` is out, and says so.
The model is the default one; its GGUF file is the shipped 4-bit one and a BF16 copy made of it, so
all compute with the same numbers.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from gguf_bf16 import convert
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prefixcache.bench.machine import machine_facts, usable_cores
from prefixcache.bench.workloads import SOURCE_TEXT
from prefixcache.config import DEFAULT_MODEL
from prefixcache.models.hub import resolve_model
from prefixcache.tokenization.tokenizer import Tokenizer

HERE = Path(__file__).parent
BATCHES = (1, 8)
NEW_TOKENS = 32
WINDOW = 16
"""Decode steps of one turn."""
REST = 0.25
"""Seconds between two turns, in which the last one's OpenMP threads stop to spin."""


@dataclass(frozen=True)
class Entry:
    """A column of the table: which contender, under which interpreter, with which options."""

    label: str
    module: str
    options: dict[str, Any]
    python: str = sys.executable


class Worker:
    """The process of one contender."""

    def __init__(
        self, entry: Entry, process: subprocess.Popen[str], log: IO[str], limit: float
    ) -> None:
        self.label = entry.label
        self.is_out = False
        self._process = process
        self._log = log
        self._limit = limit
        self.version: str = self._reply()["ready"]

    def __call__(self, do: str, **task: Any) -> Any:
        """The task's result; None once the contender is out."""
        if self.is_out:
            return None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **task}) + "\n")
        self._process.stdin.flush()
        reply = self._reply()
        time.sleep(REST)
        return reply

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        overrun = threading.Timer(self._limit, self._give_up)
        overrun.start()
        line = self._process.stdout.readline()
        overrun.cancel()
        if line:
            return json.loads(line)
        if self.is_out:
            return None
        self._log.seek(0)
        raise SystemExit(f"{self.label} ended:\n{''.join(self._log.readlines()[-20:])}")

    def _give_up(self) -> None:
        self.is_out = True
        self._process.kill()


@contextmanager
def started(entry: Entry, limit: float) -> Iterator[Worker]:
    command = [entry.python, str(HERE / "worker.py"), entry.module, json.dumps(entry.options)]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        yield Worker(entry, process, log, limit)


Turns = Iterator[tuple[int, Worker]]
"""The number of the round, and whose turn it is."""


@dataclass
class Results:
    """Per row of the table and contender: one number a round."""

    values: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    greedy: dict[str, list[int]] = field(default_factory=dict)

    def add(self, row: str, label: str, value: float) -> None:
        self.values[row][label].append(value)

    def median(self, row: str, label: str) -> str:
        values = self.values[row].get(label)
        return f"{statistics.median(values):,.1f}" if values else "too slow"


def main(
    model: str = DEFAULT_MODEL,
    dtype: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="May be given several times.")] = None,
    rounds: int = 5,
    threads: Annotated[int, typer.Option(help="Of each contender.")] = usable_cores(),
    llama_python: Annotated[
        str | None, typer.Option(help="Interpreter that has llama-cpp-python.")
    ] = None,
    gguf: Annotated[Path | None, typer.Option(help="The model's GGUF file, for llama.cpp.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds a task may take.")] = 120,
    output: Path | None = None,
) -> None:
    """Measure and print one table."""
    if (llama_python is None) != (gguf is None):
        raise typer.BadParameter("--llama-python and --gguf go together.")
    folder = resolve_model(model)
    dtypes, contexts = dtype or ["float32", "bfloat16"], context or [128, 1024]
    room = (max(contexts) + (rounds + 1) * WINDOW + NEW_TOKENS) * max(BATCHES)
    pool = Tokenizer.from_folder(folder).encode(SOURCE_TEXT, add_special_tokens=False).tolist()
    with ExitStack() as stack:
        shared = {"threads": threads, "max_tokens": room}
        entries = _torch_entries(folder, dtypes, shared)
        if llama_python is not None and gguf is not None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            entries += _llama_entries(llama_python, gguf, scratch, shared)
        workers = [stack.enter_context(started(entry, limit)) for entry in entries]
        results = measure(workers, pool, contexts, rounds)
        for worker in workers:
            Console(stderr=True).print(f"{worker.label}: {worker.version}")
    Console(width=200).print(table(results, [entry.label for entry in entries], rounds))
    if output is not None:
        output.write_text(json.dumps(_to_json(results, rounds, threads), indent=1) + "\n")


def _torch_entries(folder: Path, dtypes: Sequence[str], shared: dict[str, int]) -> list[Entry]:
    return [
        Entry(f"{label} {dtype}", module, {**shared, "model": str(folder), "dtype": dtype, **extra})
        for dtype in dtypes
        for label, module, extra in (
            ("prefixcache", "ours", {}),
            (
                "prefixcache, torch's kernels,",
                "ours",
                {"batch_invariant": False, "attention": "torch"},
            ),
            ("transformers", "with_transformers", {}),
        )
    ]


def _llama_entries(python: str, gguf: Path, scratch: Path, shared: dict[str, int]) -> list[Entry]:
    copy = scratch / "bfloat16.gguf"
    convert(gguf, copy)
    return [
        Entry(f"llama.cpp {label}", "with_llama_cpp", {**shared, "model": str(file)}, python)
        for label, file in (("4-bit", gguf), ("bfloat16", copy))
    ]


def measure(
    workers: Sequence[Worker], pool: Sequence[int], contexts: Sequence[int], rounds: int
) -> Results:
    """Every task and context; round 0 warms up and is not counted."""
    results, draw = Results(), random.Random(0)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        total = len(contexts) * (1 + len(BATCHES)) * (rounds + 1) * len(workers)
        bar = progress.add_task("measuring", total=total)

        def turns() -> Turns:
            for number in range(rounds + 1):
                for worker in workers if number % 2 else workers[::-1]:
                    yield number, worker
                    progress.advance(bar)

        for context in contexts:
            _ttft(turns(), results, [draw.choices(pool, k=context) for _ in range(rounds + 1)])
            for batch in BATCHES:
                prompts = [draw.choices(pool, k=context) for _ in range(batch)]
                for worker in workers:
                    worker("begin", prompts=prompts, max_steps=(rounds + 1) * WINDOW)
                _decode(turns(), results, f"decode of {batch} at {context:,} (tok/s)", batch)
                results.greedy = {worker.label: worker("end") or [] for worker in workers}
    return results


def _ttft(turns: Turns, results: Results, prompts: Sequence[list[int]]) -> None:
    """Each round has a prompt of its own."""
    for number, worker in turns:
        prompt = prompts[number]
        first, second = prompt[-NEW_TOKENS:], prompt[:NEW_TOKENS]
        times = worker("ttft", prompt=prompt, first=first, second=second)
        if number == 0 or times is None:
            continue
        context, tokens = len(prompt), len(prompt) + NEW_TOKENS
        results.add(f"prefill of {tokens:,} (tok/s)", worker.label, tokens / times["cold"])
        for kind, seconds in times.items():
            row = f"TTFT of {context:,} + {NEW_TOKENS}, {kind} (ms)"
            results.add(row, worker.label, seconds * 1e3)


def _decode(turns: Turns, results: Results, row: str, batch: int) -> None:
    for number, worker in turns:
        seconds = worker("go_on", steps=WINDOW)
        if number > 0 and seconds is not None:
            results.add(row, worker.label, batch * WINDOW / seconds)


def table(results: Results, labels: Sequence[str], rounds: int) -> Table:
    made = Table(title=f"Median of {rounds} rounds", title_justify="left", box=MARKDOWN)
    made.add_column("")
    for label in labels:
        made.add_column(label, justify="right")
    for row in results.values:
        made.add_row(row, *(results.median(row, label) for label in labels))
    made.add_row("greedy tokens as the first's", *_agreement(results, labels))
    return made


def _agreement(results: Results, labels: Sequence[str]) -> list[str]:
    """Leading tokens of the last batch that equal the first contender's."""
    expected = results.greedy[labels[0]]
    counts: list[str] = []
    for label in labels:
        pairs = zip(expected, results.greedy[label], strict=False)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected))
        counts.append(f"{equal} of {len(expected)}")
    return counts


def _to_json(results: Results, rounds: int, threads: int) -> dict[str, Any]:
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "rounds": rounds,
        "threads": threads,
        "values": {
            row: {label: [round(value, 3) for value in values] for label, values in columns.items()}
            for row, columns in results.values.items()
        },
    }


if __name__ == "__main__":
    typer.run(main)
