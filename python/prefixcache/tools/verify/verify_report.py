"""What was found, as tables, as JSON, and as an exit status."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prefixcache.tools.bench.machine import now
from prefixcache.tools.boxes import boxed
from prefixcache.tools.verify.comparison import Change, Comparison
from prefixcache.tools.verify.rounds import Round

EQUAL, DIFFERS, NOT_ASKED = 0, 1, 2
# Rounds in which nothing hits: what changes there, the cache alone did not change.
_CONTROLS = ("cold again", "concurrent, cold")
_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All rounds with one server. `cooling` tells how texts were asked without a hit, if at all."""

    url: str
    model: str
    api: str
    seed: int
    tolerance: float
    cooling: str | None
    notes: tuple[str, ...]
    rounds: tuple[Round, ...]
    command: str
    date: str = field(default_factory=now)

    @property
    def status(self) -> Literal[0, 1, 2]:
        """Of the process. Equal answers say nothing of the cache where none was seen to hit."""
        if any(comparison.change != "nothing" for _, comparison in self.comparisons()):
            return DIFFERS
        return EQUAL if self.num_hits else NOT_ASKED

    @property
    def num_hits(self) -> int:
        """Answers that were compared and hit."""
        return sum(later.num_hits or 0 for later in self.rounds[1:])

    def comparisons(self) -> Iterator[tuple[str, Comparison]]:
        """Of all rounds, with their names."""
        for each_round in self.rounds:
            for comparison in each_round.comparisons(self.tolerance):
                yield each_round.name, comparison


def verdict(report: Report) -> list[str]:
    """Sentences, the answer first."""
    total = sum(1 for _ in report.comparisons())
    lines = [_VERDICTS[report.status].format(total=total, hits=report.num_hits)]
    changed = {name for name, comparison in report.comparisons() if comparison.change != "nothing"}
    if changed & set(_CONTROLS):
        lines.append("Answers change without a hit too: it is not the cache alone.")
    elif changed and report.cooling is not None:
        lines.append("Without a hit nothing changed: it is the cache.")
    return [*lines, *_remarks(report)]


_VERDICTS = {
    EQUAL: "Equal: {total} answers compared, {hits} of them hit.",
    DIFFERS: "Differs: {total} answers compared, {hits} of them hit.",
    NOT_ASKED: "Not known: {total} answers were equal, but none was seen to hit.",
}


def _remarks(report: Report) -> Iterator[str]:
    if any(not each_round.reports_hits for each_round in report.rounds):
        yield "The server reports no cached_tokens: hits are inferred from TTFT."
    if report.cooling is None:
        yield "No way was found to ask the same text twice without a hit: there is no control."
    else:
        yield f"Cold again means: {report.cooling}."
    yield from report.notes


def rounds_table(report: Report) -> str:
    """A line a round: what hit, how many answers differ in tokens, or in logprobs alone."""
    head = ("asked", "hits", "tokens", "TTFT ms", "answer", "logprobs", "at most")
    return boxed(head, [_cells(each_round, report.tolerance) for each_round in report.rounds])


def _cells(each_round: Round, tolerance: float) -> list[str]:
    comparisons = each_round.comparisons(tolerance)
    hits = "?" if each_round.num_hits is None else str(each_round.num_hits)
    cells = [
        each_round.name,
        f"{hits} of {len(each_round.asked)}",
        _hit_share(each_round),
        f"{each_round.ttft * 1e3:,.0f}",
    ]
    if not comparisons:
        return [*cells, "", "", ""]
    largest = f"{max(each.largest for each in comparisons):.3g}"
    return [*cells, _count(comparisons, "answer"), _count(comparisons, "logprobs"), largest]


def _count(comparisons: Sequence[Comparison], change: Change) -> str:
    return str(sum(comparison.change == change for comparison in comparisons))


def _hit_share(each_round: Round) -> str:
    if not each_round.reports_hits:
        return "?"
    hit = sum(each.answer.cached_tokens or 0 for each in each_round.asked)
    total = sum(each.answer.prompt_tokens or 0 for each in each_round.asked)
    return f"{hit / max(total, 1):.0%}"


def differences(report: Report) -> list[str]:
    """A line for each of the first differences, and one above them; none where there are none."""
    lines = [
        f"{each_round.name}, question {number} differs in {each.change} at {each.position}: "
        f"expected {each.expected}, got {each.got}"
        for each_round in report.rounds
        for number, each in enumerate(each_round.comparisons(report.tolerance), 1)
        if each.change != "nothing"
    ]
    if not lines:
        return []
    first = f", the first {_MOST_SHOWN}" if len(lines) > _MOST_SHOWN else ""
    return [f"{len(lines)} differences{first}:", *lines[:_MOST_SHOWN]]


def to_json(report: Report) -> dict[str, Any]:
    """What `--output` writes."""
    fields = ("command", "date", "url", "model", "api", "seed", "tolerance", "cooling")
    return {name: getattr(report, name) for name in fields} | {
        "status": report.status,
        "verdict": verdict(report),
        "rounds": [_round_json(each_round, report.tolerance) for each_round in report.rounds],
    }


def _round_json(each_round: Round, tolerance: float) -> dict[str, Any]:
    return {
        "name": each_round.name,
        "reports_hits": each_round.reports_hits,
        "answers": [asdict(each.answer) | {"hit": each.hit} for each in each_round.asked],
        "comparisons": [asdict(each) for each in each_round.comparisons(tolerance)],
    }
