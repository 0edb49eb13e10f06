"""Makes BENCHMARKS.md and the README's chart from `rows.toml` and the records that it names.

    python benches/page.py                 # writes BENCHMARKS.md, docs/img/peers-{light,dark}.svg
    python benches/page.py run L1          # runs row L1 again and compares it with its record
    python benches/page.py run L1 --write  # and puts the new record in the place of the old one

A row gets its numbers from its record by paths such as `rows > trace=taubench > hit_percent > 1`:
keys, places in lists, and `key=value` (with commas for several) for an element of a list. A list of
numbers at the end is runs: their median counts. A row that is `like` an earlier one has its fields,
but for those that it names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter
from typing import Any
from xml.sax.saxutils import escape

if sys.version_info >= (3, 11):
    import tomllib  # noqa: TID251
else:
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parent
RECORDS = HERE / "record"
PAGE = ROOT / "BENCHMARKS.md"
CHART = {tone: ROOT / f"docs/img/peers-{tone}.svg" for tone in ("light", "dark")}
TIE = 0.03
"""Ratios this close to 1 are a tie."""


@dataclass(frozen=True)
class Row:
    """One question of the table, and what answers it again."""

    id: str
    question: str
    peer: str
    setting: str
    claim: str
    command: str
    minutes: float
    record: str
    tolerance: float
    at: list[str]
    ours: str
    theirs: str
    page: str
    better: str = "higher"
    needs: list[str] = field(default_factory=list)

    def results(self, record: dict[str, Any]) -> list[Result]:
        paths = ([side.replace("{}", one) for side in (self.ours, self.theirs)] for one in self.at)
        return [Result(*(value(record, path) for path in pair), self.better) for pair in paths]

    def said(self, record: dict[str, Any]) -> str:
        """The claim with the numbers of `record`."""
        found = self.results(record)
        return self.claim.format(
            ours=[number(one.ours) for one in found],
            theirs=[number(one.theirs) for one in found],
            ratio=[one.shown for one in found],
        )


@dataclass(frozen=True)
class Result:
    """A measured pair; `ratio` is above 1 where ours is better."""

    ours: float
    theirs: float
    better: str

    @property
    def ratio(self) -> float:
        best, other = (self.ours, self.theirs)[:: 1 if self.better == "higher" else -1]
        return best / other if other else float("inf" if best else 1)

    @property
    def shown(self) -> str:
        if self.ratio == float("inf"):
            return f"{number(self.ours)} to {number(self.theirs)}"
        return f"{self.ratio:.{1 if self.ratio >= 4 else 2}f}"

    @property
    def outcome(self) -> str:
        return "tie" if abs(self.ratio - 1) <= TIE else "ahead" if self.ratio > 1 else "**behind**"


def value(record: Any, path: str) -> float:
    """The number at `path`."""
    at = record
    for key in path.split(" > "):
        if "=" in key:
            wanted = dict(part.split("=") for part in key.split(","))
            (at,) = [one for one in at if all(str(one[k]) == v for k, v in wanted.items())]
        else:
            at = at[int(key)] if isinstance(at, list) else at[key]
    return float(statistics.median(at) if isinstance(at, list) else at)


def number(x: float) -> str:
    return f"{x:,.{0 if x >= 100 or x == int(x) else 1 if x >= 10 else 2}f}"


def settings(*, recorded: bool = True) -> tuple[list[Row], dict[str, Any]]:
    """The rows, those that were never run only if asked for, and everything else in `rows.toml`."""
    asked = tomllib.loads((HERE / "rows.toml").read_text())
    rows: list[Row] = []
    for one in asked.pop("row"):
        like = next((row for row in rows if row.id == one.get("like")), None)
        new = {name: value for name, value in one.items() if name != "like"}
        rows.append(Row(**new) if like is None else replace(like, **new))
    return [one for one in rows if not recorded or (RECORDS / one.record).exists()], asked


def read(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / name).read_text())


def machine(record: dict[str, Any]) -> str:
    about = record["machine"]
    cpu = settings()[1]["processors"].get(about["cpu"], about["cpu"])
    gpu = f"{about['gpu'].split(',')[0]}, " if "gpu" in about else ""
    return f"{gpu}{cpu}, {about['cores']} cores, {record['date'][:10]}"


def page() -> str:
    rows, asked = settings()
    records = {row.record: read(row.record) for row in rows}
    machines = list(dict.fromkeys(machine(record) for record in records.values()))
    lines = ["| | question | peer | setting | ratio | result | machine |", "|" + "---|" * 7]
    details: list[str] = []
    for row in rows:
        record = records[row.record]
        found = row.results(record)
        ratios, outcomes = (
            ", ".join(getattr(one, of) for one in found) for of in ("shown", "outcome")
        )
        lines.append(
            f"| [{row.id}]({row.page}) | {row.question} | {row.peer} | {row.setting} | {ratios} "
            f"| {outcomes} | {machines.index(machine(record)) + 1} |"
        )
        details.append(
            f'- <a id="{row.id.lower()}"></a>**{row.id}**: {row.said(record)} '
            f"[Record](benches/record/{row.record}), {row.minutes:g} min."
        )
    named = [f"{i}. {text}" for i, text in enumerate(machines, 1)]
    texts = {"table": lines, "machines": named, "claims": details}
    return Formatter().vformat(asked["page"], (), {k: "\n".join(v) for k, v in texts.items()})


def chart(tone: str) -> str:
    """Bars of each contender in each panel, as SVG without a library: the same bytes everywhere."""
    asked = settings()[1]["chart"]
    record = read(asked["record"])
    ink, quiet, *fills = asked[tone]
    width, panel, bar = 760, 380, 17
    rows = (len(asked["panels"]) + 1) // 2
    step = 30 + len(asked["contenders"]) * (bar + 4) + 14
    height = 40 + rows * step + 18
    style = f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="{ink}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>',
        f"<title>{escape(asked['title'])}</title>",
        f'<text x="0" y="16" font-size="14" font-weight="600">{escape(asked["title"])}</text>',
    ]
    for i, (title, key) in enumerate(asked["panels"].items()):
        left, top = i % 2 * panel, 40 + i // 2 * step
        values = [value(record, f"values > {key} > {who}") for who in asked["contenders"].values()]
        out.append(f'<text x="{left}" y="{top + 14}" fill="{quiet}">{escape(title)}</text>')
        for j, (name, x) in enumerate(zip(asked["contenders"], values, strict=True)):
            y = top + 24 + j * (bar + 4)
            length = max(1, round(170 * x / max(values), 1))
            weight = ' font-weight="600"' if j == 0 else ""
            box = f'x="{left + 112}" y="{y}" width="{length}" height="{bar}" rx="2"'
            out += [
                f'<text x="{left}" y="{y + 13}"{weight}>{name}</text>',
                f'<rect {box} fill="{fills[j]}"/>',
                f'<text x="{left + 118 + length}" y="{y + 13}"{weight}>{number(x)}</text>',
            ]
    about = f"{asked['about']} {machine(record)}."
    out.append(f'<text x="0" y="{height - 6}" font-size="11" fill="{quiet}">{escape(about)}</text>')
    return "\n".join([*out, "</svg>", ""])


def run(row: Row, *, write: bool) -> int:
    """Runs the row's command; 1 if its claim does not hold within its tolerance."""
    new = ROOT / "target" / "bench-row" / row.record
    new.parent.mkdir(parents=True, exist_ok=True)
    for need in row.needs:
        print(f"needs: {need}")
    command = row.command.replace("{record}", str(new))
    print(f"about {row.minutes:g} minutes: {command}", flush=True)
    if subprocess.run(command, shell=True, cwd=ROOT, check=False).returncode:
        return 2
    again = json.loads(new.read_text())
    old = read(row.record) if (RECORDS / row.record).exists() else again
    for when, record in (("recorded", old), ("now", again)):
        print(f"{when}: {row.said(record)} ({machine(record)})")
    pairs = zip(row.results(old), row.results(again), strict=True)
    holds = all(now.ratio >= was.ratio * (1 - row.tolerance) for was, now in pairs)
    print(f"the claim {'holds' if holds else 'does not hold'} within {row.tolerance:.0%}")
    if write:
        (RECORDS / row.record).write_text(json.dumps(again, indent=1) + "\n")
        write_all()
    return 0 if holds else 1


def made() -> dict[Path, str]:
    """Every file that this script writes."""
    return {PAGE: page()} | {path: chart(tone) for tone, path in CHART.items()}


def write_all() -> None:
    for path, text in made().items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("do", nargs="?", choices=["write", "run"], default="write")
    parser.add_argument("id", nargs="?", help="of the row to run")
    parser.add_argument("--write", action="store_true", help="keep the new record")
    asked = parser.parse_args()
    if asked.do == "write":
        write_all()
        return 0
    rows = {row.id: row for row in settings(recorded=False)[0]}
    if asked.id not in rows:
        parser.error(f"rows are {', '.join(rows)}")
    return run(rows[asked.id], write=asked.write)


if __name__ == "__main__":
    raise SystemExit(main())
