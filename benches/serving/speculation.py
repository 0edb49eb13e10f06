"""Several tokens a step next to one: how much faster answers are that can be guessed, and others.

    python benches/serving/speculation.py --text chats --text edits --output RECORD.json
    python benches/serving/speculation.py --model MODEL.gguf --activations int8 --streams 8
    python benches/serving/speculation.py --force none --llama-python VENV/bin/python
    python benches/serving/speculation.py --simulate

With `--force recorded` each row's token is the recorded answer's next one, whatever the logits: so
guesses are right as often as the record says, and every row is computed and sampled. Groups of
turns are decoded plainly and with guesses, in alternation, in one engine. They are spread over the
text, and the index is given what lies between them; a second pass asks for all of them again. Steps
that compute a prompt are left out of the times. Rows of other settings that `--output` has are
kept. `--simulate` takes no model: what the index guesses, and how much faster answers would be if a
row cost some share of a step.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import typer
from answered import Texts, Turn
from rich.console import Console

import prefixcache.runner.cpu.cpu_runner
from prefixcache._core import DraftIndex, DraftStream
from prefixcache.config.engine_config import DEFAULT_MODEL, EngineConfig
from prefixcache.engine.build import build
from prefixcache.models.hub import resolve_model
from prefixcache.runner.cpu.sampler import Sampler
from prefixcache.scheduler.budget import Chunk
from prefixcache.scheduler.drafts import Drafter
from prefixcache.scheduler.null_objects import NoDrafts
from prefixcache.scheduler.step_time import RowTimes
from prefixcache.tools.bench.machine import usable_cores, write_record
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.step_plan import SamplingInput, SequenceOutput
from prefixcache.types.token_ids import TokenBuffer, as_token_ids

HERE = Path(__file__).parent
MOST_DRAFTS = 7
LLAMA_DRAFTS = (2, MOST_DRAFTS)
"""Of which the better counts: llama-cpp-python advises 2 on a CPU."""
HISTORY = 1 << 20
LONGEST_PROMPT = 3000
NOISE_GROUPS = 9
"""Groups of noise, which is asked for once: a second time all of it can be guessed."""
ROW_COSTS = (0.31, 0.136, 0.041)
"""Of a step: the default model; a 1.1B shape, exact; with int8 activations."""
TURNS = 350
"""Of a text, at most."""
WAYS = ("plain", "guessed")


class Force(str, Enum):
    """Which tokens the answers have: those of the record, or the model's own."""

    RECORDED = "recorded"
    NONE = "none"


class RecordedSampler(Sampler):
    """Samples, and returns the recorded answer's next token instead. A row's seed names it."""

    answers: ClassVar[dict[int, Sequence[int]]] = {}

    def sample(self, logits_RV: Any, rows: Sequence[SamplingInput]) -> list[SequenceOutput]:  # noqa: N803
        super().sample(logits_RV, rows)
        return [SequenceOutput(token_id=self._next(row)) for row in rows]

    def _next(self, row: SamplingInput) -> int:
        answer = self.answers[row.seed]
        # Rows after wrong guesses may lie past the end.
        return answer[min(len(row.tokens) - row.tokens.num_prompt_tokens, len(answer) - 1)]


@dataclass
class Measured:
    """Tokens of steps that decode alone, their seconds, and the steps."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass
class Row:
    """One text in one setting: tokens a second of each group, and what became of guesses."""

    text: str
    model: str
    activations: str
    streams: int
    force: str
    which_pass: int
    plain: list[float] = field(default_factory=list[float])
    guessed: list[float] = field(default_factory=list[float])
    ratios: list[float] = field(default_factory=list[float])
    plain_ratio: float = 1.0
    tokens_a_step: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What names the setting."""
        return self.text, self.model, self.activations, self.streams, self.force, self.which_pass


class Bench:
    """One engine, which decodes with guesses or without."""

    def __init__(self, model: str, activations: str, streams: int, threads: int) -> None:
        config = EngineConfig.from_flags(
            model=model,
            cpu_activations=activations,
            cpu_threads=threads,
            max_num_seqs=streams,
            num_blocks=(LONGEST_PROMPT + 1000) // 16 * (streams + 2),
            max_step_ms=0,
            speculate="off",
        )
        built = build(config, resolve_model(model))
        self.vocab_size = built.model.vocab_size
        self._engine = built.engine
        self._numbers = itertools.count()

    def run(self, turns: Sequence[Turn], drafter: Drafter | None, longest: int) -> Measured:
        """Answers the turns, all at a time."""
        self._engine._scheduler.drafter = drafter or NoDrafts()  # noqa: SLF001
        found = Measured()
        fresh = {self._add(turn, longest) for turn in turns}
        while self._engine.has_unfinished():
            is_decode = not fresh
            begun = time.perf_counter()
            outputs = self._engine.step()
            seconds = time.perf_counter() - begun
            fresh -= {output.request_id for output in outputs if output.token_ids}
            if is_decode:
                found.tokens += sum(len(output.token_ids) for output in outputs)
                found.seconds += seconds
                found.steps += 1
        return found

    def _add(self, turn: Turn, longest: int) -> str:
        number = next(self._numbers)
        RecordedSampler.answers[number] = turn.answer
        params = SamplingParams(
            temperature=0.0, seed=number, ignore_eos=True, max_tokens=min(longest, len(turn.answer))
        )
        request = Request(request_id=str(number), prompt_token_ids=turn.prompt, params=params)
        self._engine.add_request(request)
        return request.request_id


class OneScope:
    """An index in which all requests share one scope, so that it can be given text."""

    def __init__(self) -> None:
        self._index = DraftIndex(HISTORY)

    def stream(self, scope: bytes, shares: bool) -> DraftStream:  # noqa: ARG002
        """As `DraftIndex.stream`."""
        return self._index.stream(b"", shares)

    def say(self, turns: Sequence[Turn]) -> None:
        """Adds what was said, as if it had been answered."""
        for turn in turns:
            stream = self._index.stream(b"", True)
            stream.append(turn.prompt + turn.answer)
            stream.close()


@dataclass
class Group:
    """Turns that are answered at a time, and those of the text before them."""

    before: list[Turn]
    turns: list[Turn]


def grouped(turns: Sequence[Turn], count: int, size: int, longest: int) -> list[Group]:
    """`count` groups spread over the text, of turns with at least 2 tokens to answer."""
    turns = [t for t in turns if len(t.prompt) <= LONGEST_PROMPT and len(t.answer) > 1]
    stride, found = len(turns) // count, list[Group]()
    for end in range(stride, stride * count + 1, stride):
        said = turns[end - stride : end - size]
        cut = [Turn(t.prompt, t.answer[:longest]) for t in turns[max(end - size, 0) : end]]
        found.append(Group(said, cut))
    return found


def measure(bench: Bench, rows: Sequence[Row], groups: Sequence[Group], longest: int) -> None:
    """Fills in a row for each pass."""
    index = OneScope()
    drafter = Drafter(index, RowTimes(), shares=True, most=MOST_DRAFTS)
    before = drafter.counts()
    for row in rows:
        guessed = Measured()
        for number, group in enumerate(groups):
            index.say(group.before if row.which_pass == 1 else ())
            speeds: dict[str, float] = {}
            for way in WAYS[:: 1 if number % 2 else -1]:
                found = bench.run(group.turns, drafter if way == "guessed" else None, longest)
                if found.steps:
                    speeds[way] = found.speed
                    getattr(row, way).append(round(found.speed, 3))
                if way == "guessed":
                    guessed.tokens += found.tokens
                    guessed.steps += found.steps
            if len(speeds) == len(WAYS):
                row.ratios.append(round(speeds["guessed"] / speeds["plain"], 4))
        after = drafter.counts()
        row.drafted = sum(after.drafted.values()) - sum(before.drafted.values())
        row.accepted = sum(after.accepted.values()) - sum(before.accepted.values())
        row.tokens_a_step, before = round(guessed.tokens / guessed.steps, 3), after


def simulate(texts: Texts, names: Sequence[str], count: int) -> Iterator[str]:
    """What the index alone guesses, and by the length of the match how often the next is right."""
    yield "| text | source | tokens a step | right | append (ns a token) | draft (us) |"
    yield "|---|---|--:|--:|--:|--:|"
    by_length: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        turns = texts.turns(name, count)
        index = DraftIndex(HISTORY)
        for source in ("prompt", "cache", "cache, second pass"):
            found = Simulated()
            for turn in turns:
                found.follow(turn, index, shares=source != "prompt")
            for length, right in found.first_right.items():
                by_length[source][length] += right
            yield f"| {name} | {source} | {found} |"
    yield "\n| text | " + " | ".join(f"a row costs {a_row:.0%}" for a_row in ROW_COSTS) + " |"
    yield "|---|" + "--:|" * len(ROW_COSTS)
    for name in names:
        found = [modelled(texts.turns(name, count), a_row) for a_row in ROW_COSTS]
        yield f"| {name} | " + " | ".join(f"{one:.2f}, {two:.2f}" for one, two in found) + " |"
    for source, lengths in by_length.items():
        shares = (f"{2**n // 2}: {statistics.mean(r):.2f}" for n, r in sorted(lengths.items()))
        yield f"\nNext token right by the length of the match from, {source}: {', '.join(shares)}"


@dataclass
class Simulated:
    """What became of the guesses for some answers."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    appended: int = 0
    append_seconds: float = 0.0
    draft_seconds: float = 0.0
    first_right: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))

    def follow(self, turn: Turn, index: DraftIndex, *, shares: bool) -> None:
        """One answer, all of whose guesses are checked in each step."""
        stream = index.stream(b"", shares)
        place, due = 1, turn.prompt + turn.answer[:1]
        while place < len(turn.answer):
            begun = time.perf_counter()
            stream.append(due)
            appended = time.perf_counter()
            tokens, length, _ = stream.draft(min(MOST_DRAFTS, len(turn.answer) - place - 1))
            self.draft_seconds += time.perf_counter() - appended
            self.append_seconds += appended - begun
            count = num_right(tokens, turn.answer[place:])
            self.steps += 1
            self.appended += len(due)
            self.drafted += len(tokens)
            self.accepted += count
            if tokens:
                self.first_right[length.bit_length()].append(count > 0)
            due = turn.answer[place : place + count + 1]
            place += count + 1
        stream.append(due)
        stream.close()

    def __str__(self) -> str:
        append, draft = self.append_seconds / self.appended, self.draft_seconds / self.steps
        right = self.accepted / max(self.drafted, 1)
        pace = 1 + self.accepted / self.steps
        return f"{pace:.2f} | {right:.2f} | {append * 1e9:.0f} | {draft * 1e6:.1f}"


def modelled(turns: Sequence[Turn], a_row: float) -> list[float]:
    """Tokens a second next to plain decoding in each pass, if a row costs that share of a step."""
    index, rows, ratios = OneScope(), RowTimes(), list[float]()
    drafter = Drafter(index, rows, shares=True, most=MOST_DRAFTS)
    groups = grouped(turns, min(len(turns), 60), 1, 300)
    for which_pass in range(2):
        tokens = seconds = 0.0
        for number, group in enumerate(groups):
            index.say(() if which_pass else group.before)
            for count, num_drafts in decode(drafter, group.turns[0], str(number)):
                took = 1 + a_row * num_drafts
                rows.observe(of_rows(1 + num_drafts), took)
                tokens, seconds = tokens + count, seconds + took
        ratios.append(tokens / seconds)
    return ratios


def of_rows(count: int) -> Any:
    """As much of a step's plan as its time depends on: one decode of that many rows."""
    return SimpleNamespace(num_decodes=1, sequences=[0], num_tokens=count)


def decode(drafter: Drafter, turn: Turn, name: str) -> Iterator[tuple[int, int]]:
    """The steps of an answer without a model: the tokens and the guesses of each."""
    prompt, params = as_token_ids(turn.prompt), SamplingParams(max_tokens=len(turn.answer))
    known = TokenBuffer(prompt)
    state: Any = SimpleNamespace(
        request_id=name,
        request=Request(request_id=name, prompt_token_ids=prompt, params=params),
        tokens=known,
        max_num_tokens=len(turn.prompt) + len(turn.answer),
        end_token_ids=(),
        may_be_drafted=True,
        num_cached_tokens=0,
    )
    count, place = 1, 0
    while True:
        for token in turn.answer[place : place + count]:
            known.append(token)
        place, state.num_tokens = place + count, len(known)
        if place == len(turn.answer):
            break
        chunk = Chunk(state, 1, is_decode=True)
        drafter.propose([chunk], 64, lambda _, wanted: wanted)
        count = 1 + num_right(chunk.drafts, turn.answer[place:])
        drafter.observe({name: count - 1})
        yield count, len(chunk.drafts)
    drafter.end(state)


def num_right(guesses: Sequence[int], answer: Sequence[int]) -> int:
    """How many guesses the answer begins with."""
    pairs = zip(guesses, answer, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def llama_row(python: str, text: str, model: str, groups: Sequence[Group], longest: int) -> Row:
    """llama.cpp with and without its prompt lookup, on its own greedy answers."""
    gguf = resolve_model(model) / "model.gguf"
    prompts = [turn.prompt for group in groups for turn in group.turns]
    task = {"model": str(gguf), "prompts": prompts, "longest": longest, "most": LLAMA_DRAFTS}
    task |= {"threads": usable_cores(), "max_tokens": LONGEST_PROMPT + 1000}
    command = [python, str(HERE / "contenders" / "llama_lookup.py")]
    done = subprocess.run(command, input=json.dumps(task), stdout=-1, text=True, check=True)
    return Row(text, model, "llama.cpp", 1, "none", 1, **json.loads(done.stdout))


def main(
    model: Annotated[str, typer.Option(help="As --model of prefixcache serve.")] = DEFAULT_MODEL,
    name: Annotated[str | None, typer.Option(help="Of the model in the record.")] = None,
    activations: Annotated[str, typer.Option(help="exact or int8.")] = "exact",
    streams: int = 1,
    text: Annotated[
        list[str] | None, typer.Option(help="chats, edits, rewrites, quotes, noise.")
    ] = None,
    groups: Annotated[int, typer.Option(help="Of turns: one a stream each.")] = 9,
    longest: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    passes: int = 2,
    force: Force = Force.RECORDED,
    simulate_only: Annotated[bool, typer.Option("--simulate")] = False,
    llama_python: Annotated[
        str | None, typer.Option(help="Interpreter that has llama-cpp-python.")
    ] = None,
    threads: int = usable_cores(),
    output: Path | None = None,
) -> None:
    """Measure and print one table."""
    names = text or ["chats", "edits", "quotes", "noise"]
    console = Console(width=200, highlight=False)
    if simulate_only:
        for line in simulate(Texts(DEFAULT_MODEL), names, TURNS):
            console.print(line)
        return
    if force is Force.RECORDED:
        prefixcache.runner.cpu.cpu_runner.Sampler = RecordedSampler
    bench = Bench(model, activations, streams, threads)
    texts = Texts(DEFAULT_MODEL, bench.vocab_size)
    label = name or Path(model).stem
    rows: list[Row] = []
    for of_text in names:
        is_noise = of_text == "noise"
        count, num_passes = (NOISE_GROUPS, 1) if is_noise else (groups, passes)
        in_groups = grouped(texts.turns(of_text, TURNS), count, streams, longest)
        setting = (of_text, label, activations, streams, force.value)
        made = [Row(*setting, number) for number in range(1, num_passes + 1)]
        measure(bench, made, in_groups, longest)
        if llama_python is not None and not is_noise:
            made.append(llama_row(llama_python, of_text, model, in_groups, longest))
        rows += made
        for row in made:
            console.print(shown(row))
    if output is not None:
        write(output, rows, threads)


def shown(row: Row) -> str:
    """The row in words."""
    plain, guessed = (statistics.median(getattr(row, way)) for way in WAYS)
    return (
        f"{row.text}, {row.model} {row.activations}, {row.streams} streams, pass {row.which_pass}, "
        f"{row.force}: plain {plain:.1f} tok/s, guessed {guessed:.1f}, ratio "
        f"{statistics.median(row.ratios):.2f} ({min(row.ratios):.2f} to {max(row.ratios):.2f}); "
        f"{row.tokens_a_step:.2f} tokens a step, {row.accepted} of {row.drafted} guesses right"
    )


def write(path: Path, rows: Sequence[Row], threads: int) -> None:
    """Puts the rows in the place of those of the same settings."""
    keys = {tuple(map(str, row.key)) for row in rows}
    names = ("text", "model", "activations", "streams", "force", "which_pass")
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in old if tuple(str(row[name]) for name in names) not in keys]
    write_record(path, threads=threads, rows=kept + [asdict(row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
