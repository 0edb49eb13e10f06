"""Hits across requests on a model with sliding windows, against the number of prefixes in turn.

    python benches/serving/hybrid.py [--simulate] [--k 15 --k 20]

k prefixes of 3,136 tokens are asked for one after another, each time with 384 new tokens behind,
and that three times over. The pool holds 20 of them with every block registered. A row is what
requests leave behind; its flags are shown. The model has Gemma 3's layers (five with a window of
128, then one without) and random weights.

`--simulate` takes the engine with its scheduler and its cache, and a runner that computes nothing:
it tells how many tokens each request would compute, in a minute, and next to it what is expected.
A run that was stopped goes on where it was: what its record has is not measured again.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from prefixcache.config.engine_config import EngineConfig
from prefixcache.engine.build import build
from prefixcache.engine.engine import Engine
from prefixcache.engine.request_rules import RequestRules
from prefixcache.kv.buffers import BlockTableBuffers
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.cache_settings import CacheSettings
from prefixcache.kv.retention import Retention
from prefixcache.kv.specs import GroupKind
from prefixcache.scheduler.scheduler import Scheduler
from prefixcache.tools.bench.machine import run_facts
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SequenceOutput, StepPlan

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from fakes.fake_engine import IdText
from fakes.plain_runner import PlainRunner
from support.tiny_models import save_tokenizer

BLOCK = 16
WINDOW = 128
CHUNK = 1024
NUM_BLOCKS = 24_000
PREFIX = 3136
SUFFIX = 384
SHORT = 240
PASSES = 3
OUTPUT = 16
VOCAB = 384
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}

REGISTERED = "every block registered"
ANCHORS = "anchors alone"
SPACED = "and a window every 1,024 tokens"
WINDOWS = "windows pinned"
BOTH = "windows and full blocks pinned"
CLOSE = "both, anchors however close"
FLAGS: dict[str, dict[str, Any]] = {
    REGISTERED: {"prefix_cache_retention_interval": "none"},
    ANCHORS: {},
    SPACED: {"prefix_cache_retention_interval": CHUNK},
    WINDOWS: {"pin_swa_tokens": True, "pin_prefix_blocks": False},
    BOTH: {"pin_swa_tokens": True},
    CLOSE: {"pin_swa_tokens": True, "pin_min_drop_size": 0},
}
COUNTS = (15, 20, 30, 40, 50, 60)
ALL = PREFIX + SUFFIX
# Tokens that a request computes in passes 2 and 3, by a simulation checked against vLLM's manager,
# which forgets what is behind a window at once unless every block is registered: at most this many.
EXPECTED = {
    **{(REGISTERED, k): (ALL, ALL) if k > 15 else (SUFFIX, SUFFIX) for k in COUNTS},
    **{(ANCHORS, k): (ALL, SUFFIX) for k in COUNTS},
    **{
        (row, k): (ALL - 3 * CHUNK, SUFFIX) if k < 60 else (ALL, ALL)
        for row in (WINDOWS, BOTH)
        for k in COUNTS
    },
}
RECORD = Path("benches/record/hybrid.json")


@dataclass(frozen=True)
class Cell:
    """One run: a row, its prefixes, and whether each pass has an order of its own.

    Between two passes come `num_short` requests of `SHORT` tokens that nobody asks for again.
    """

    row: str
    k: int
    shuffled: bool = False
    num_output: int = OUTPUT
    num_short: int = 0

    @property
    def title(self) -> str:
        """The row, and in what the cell is out of the ordinary."""
        more = [", shuffled"] if self.shuffled else []
        more += [f", {self.num_output} tokens of answer"] if self.num_output != OUTPUT else []
        more += [f", {self.num_short} short requests between"] if self.num_short else []
        return self.row + "".join(more)

    @property
    def expected(self) -> tuple[int, int] | None:
        """Tokens that a request should compute in passes 2 and 3, where that is known."""
        return EXPECTED.get((self.row, self.k)) if self.title == self.row else None

    def passes(self) -> Iterator[list[int]]:
        """The order of the prefixes in each pass."""
        order = random.Random(self.k)
        for _ in range(PASSES):
            prefixes = list(range(self.k))
            if self.shuffled:
                order.shuffle(prefixes)
            yield prefixes


CELLS = [
    *(Cell(row, k) for row in FLAGS for k in COUNTS),
    *(Cell(row, 40, num_output=256) for row in (BOTH, CLOSE)),
    *(Cell(row, 8, num_short=400) for row in FLAGS),
    *(Cell(row, k, shuffled=True) for row in (ANCHORS, SPACED, WINDOWS, BOTH) for k in (60, 80)),
]


@dataclass(frozen=True)
class Served:
    """What came of one request: tokens computed of its prompt, and seconds."""

    computed: int
    first: float
    rest: float


def prompt(prefix: int, turn: int) -> list[int]:
    """A prefix, and a suffix that no other turn has."""
    return text(str(prefix), PREFIX) + text(f"{prefix} {turn}", SUFFIX)


def text(seed: str, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def serve(engine: Engine, name: str, tokens: Sequence[int], num_output: int) -> Served:
    """Serves one request alone."""
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    request = Request(request_id=name, prompt_token_ids=list(tokens), params=params)
    sent = time.perf_counter()
    engine.add_request(request)
    first, cached = 0.0, 0
    while engine.has_unfinished():
        for output in engine.step():
            if output.token_ids and not first:
                first, cached = time.perf_counter(), output.num_cached_tokens
            if output.error is not None:
                raise RuntimeError(output.error)
    return Served(len(tokens) - cached, first - sent, time.perf_counter() - first)


def measure(engine: Engine, cell: Cell) -> dict[str, Any]:
    """The means of each pass over the prefixes of a cell, and the cache's counts after them."""
    passes = []
    for turn, prefixes in enumerate(cell.passes()):
        for number in range(cell.num_short if turn else 0):
            name = f"short {turn} {number}"
            serve(engine, name, text(name, SHORT), 2)
        begun = time.perf_counter()
        served: list[Served] = []
        for prefix in prefixes:
            tokens = prompt(prefix, turn)
            served.append(serve(engine, f"{prefix}-{turn}", tokens, cell.num_output))
        seconds = sum(one.first + one.rest for one in served)
        passes.append(
            {
                "computed": statistics.fmean(one.computed for one in served),
                "ttft_ms": 1e3 * statistics.fmean(one.first for one in served),
                "ttft_median_ms": 1e3 * statistics.median(one.first for one in served),
                "inter_token_ms": 1e3
                * statistics.fmean(one.rest / (cell.num_output - 1) for one in served),
                "tokens_per_second": cell.k * (ALL + cell.num_output) / seconds,
                "seconds": time.perf_counter() - begun,
            }
        )
    return asdict(cell) | {"passes": passes, "stats": engine.control.stats()}


# Engines.


def config_of(row: str, model: str) -> EngineConfig:
    return EngineConfig.from_flags(
        model=model,
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=CHUNK,
        max_model_len=4096,
        max_step_ms=0.0,
        pin_max_share=0.2,
        **FLAGS[row],
    )


class NoRunner(PlainRunner):
    """Computes nothing: every token is the same."""

    def execute(self, plan: StepPlan) -> list[SequenceOutput]:
        sampled = [sequence.sampling is not None for sequence in plan.sequences]
        return [SequenceOutput(token_id=3 if one else None) for one in sampled]


class TablelessCache(CacheManager):
    """Nobody reads the block tables."""

    def fill(self, plan: StepPlan, buffers: Sequence[BlockTableBuffers]) -> None: ...


def simulated(row: str) -> Engine:
    config = config_of(row, "none")
    windows = SHAPE["num_hidden_layers"] - 1
    groups: list[GroupKind] = ["full", *[("sliding_window", WINDOW)] * windows]
    cache = TablelessCache(
        CacheSettings(num_blocks=NUM_BLOCKS, block_size=BLOCK, model="m", groups=groups),
        retention=Retention.of(config, groups),
        merge_twins=config.cache.merge_duplicate_blocks,
    )
    scheduler = Scheduler(config.scheduler, cache, max_model_len=4096)
    parts: dict[str, Any] = {
        "scheduler": scheduler,
        "cache": cache,
        "runner": NoRunner(1, 1, max_tokens=1, max_seqs=1, max_pages=1),
        "make_detokenizer": IdText,
        "rules": RequestRules(VOCAB),
    }
    return Engine(**parts)


def make_model(folder: Path) -> Path:
    """Writes a Gemma 3 of random weights."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        sliding_window=WINDOW,
        max_position_embeddings=4096,
        query_pre_attn_scalar=SHAPE["head_dim"],
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **SHAPE,
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def real(row: str, folder: Path) -> Engine:
    return build(config_of(row, str(folder))).engine


# The record and the table.


def settings(*, simulate: bool) -> dict[str, Any]:
    """What the cells of one record have in common."""
    return {
        "simulated": simulate,
        "shape": SHAPE | {"vocab_size": VOCAB, "sliding_window": WINDOW},
        "block_size": BLOCK,
        "num_blocks": NUM_BLOCKS,
        "chunk": CHUNK,
        "prefix": PREFIX,
        "suffix": SUFFIX,
        "short": SHORT,
        "flags": FLAGS,
    }


def read_record(path: Path | None, *, simulate: bool) -> dict[str, Any]:
    """The record so far; one of other settings is not gone on with."""
    ours = settings(simulate=simulate)
    if path is None or not path.exists():
        return run_facts("make bench-hybrid") | {"settings": ours, "cells": []}
    record = json.loads(path.read_text())
    if record["settings"] != json.loads(json.dumps(ours)):
        raise typer.BadParameter(f"{path} was measured with other settings: name another record.")
    return record


def find(record: dict[str, Any], cell: Cell) -> dict[str, Any] | None:
    own = asdict(cell).items()
    return next((done for done in record["cells"] if own <= done.items()), None)


def computed(cell: dict[str, Any]) -> tuple[int, int]:
    """Tokens that a request computed in passes 2 and 3."""
    second, third = (round(one["computed"]) for one in cell["passes"][1:])
    return second, third


def shown(cell: Cell, done: dict[str, Any], *, simulated: bool) -> str:
    """A row of the table; a number above the expected one is marked."""
    second, third = done["passes"][1:]

    def both(field: str) -> str:
        return f"{second[field]:,.0f} / {third[field]:,.0f}"

    expected = cell.expected
    mark = " !" if expected and is_more(computed(done), expected) else ""
    cells = [cell.title, f"{cell.k}", both("computed")]
    cells.append(" / ".join(f"{number:,}" for number in expected or ()) + mark)
    if not simulated:
        between = statistics.fmean((second["inter_token_ms"], third["inter_token_ms"]))
        cells += [both("ttft_ms"), both("tokens_per_second"), f"{between:.2f}"]
    return "| " + " | ".join(cells) + " |"


def is_more(done: tuple[int, int], expected: tuple[int, int]) -> bool:
    """Whether some pass computed more than was expected."""
    return any(one > most for one, most in zip(done, expected, strict=True))


def run(
    record: dict[str, Any],
    cells: Sequence[Cell],
    make: Callable[[str], Engine],
    save: Callable[[], None],
) -> None:
    """Shows the cells, of which it measures those that the record lacks; saves it after each."""
    simulated = record["settings"]["simulated"]
    titles = ["", "k", "computed", "expected"]
    titles += [] if simulated else ["TTFT (ms)", "tokens/s", "between tokens (ms)"]
    print(f"| {' | '.join(titles)} |\n|---{'|--:' * (len(titles) - 1)}|")
    # One k after another, so that the rows of each are measured close together.
    for cell in sorted(cells, key=lambda cell: cell.k):
        done = find(record, cell)
        if done is None:
            done = measure(make(cell.row), cell)
            record["cells"].append(done)
            save()
        print(shown(cell, done, simulated=simulated), flush=True)


def main(
    *,
    simulate: Annotated[bool, typer.Option(help="Compute nothing; count tokens.")] = False,
    counts: Annotated[list[int] | None, typer.Option("--k", help="Only these k.")] = None,
    record: Annotated[Path, typer.Option(help="JSON of all cells.")] = RECORD,
    write_model: Annotated[Path | None, typer.Option(help="Write the model alone.")] = None,
) -> None:
    if write_model is not None:
        make_model(write_model)
        return
    results = read_record(None if simulate else record, simulate=simulate)
    cells = [cell for cell in CELLS if not counts or cell.k in counts]
    if simulate:
        run(results, cells, simulated, lambda: None)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        save = lambda: record.write_text(json.dumps(results, indent=1) + "\n")  # noqa: E731
        run(results, cells, lambda row: real(row, model), save)


if __name__ == "__main__":
    typer.run(main)
