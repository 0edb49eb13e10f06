"""A report as one page: table, picture, settings and machine in a file that loads nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from prefixcache.tools.bench.reports.plots import draw_svg
from prefixcache.tools.bench.reports.report import Report, medians
from prefixcache.tools.bench.reports.tables import heading, lines

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --quiet: #616e7c; --rule: #e4e7eb; --back: #fff;
  --wrong: #9b1c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --quiet: #9aa5b1; --rule: #3e4c59;
  --back: #1f2933; --wrong: #ffb4b4; } }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--back); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } .quiet { color: var(--quiet); } .wrong { color: var(--wrong); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid var(--rule); text-align: left; }
.numbers td, .numbers thead th { text-align: right; }
.numbers th:first-child { text-align: left; font-weight: normal; }
figure { margin: 1rem 0; background: #fff; border-radius: 0.5rem; padding: 0.5rem; }
figure svg { display: block; width: 100%; height: auto; }
code { overflow-wrap: anywhere; }
"""


def write_page(report: Report, path: Path) -> None:
    """Writes the page, its parents made where needed. The report must hold records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(report), encoding="utf-8")


def page(report: Report) -> str:
    """The page's HTML."""
    model = escape(str(report.settings["model"]))
    parts = [
        f"<h1>{model}: what the prefix cache saves</h1>",
        f"<p>{escape(heading(report))}</p>",
        *_paragraphs("wrong", report.errors),
        f'<figure role="img" aria-label="{escape(_in_words(report))}">{draw_svg(report)}</figure>',
        _numbers(report),
        *_paragraphs("quiet", report.remarks),
        *_facts("Settings", report.settings),
        *_facts("Machine", report.machine),
        f'<p class="quiet">{escape(report.date)}<br><code>{escape(report.command)}</code></p>',
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>prefixcache bench: {model}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _in_words(report: Report) -> str:
    """The picture for whoever does not see it."""
    told = [f"{heading(report)}."]
    for label, cells in lines(medians(report)):
        names = (variant.name for variant in report.variants)
        told.append(f"{label}: {', '.join(map(' '.join, zip(names, cells, strict=True)))}.")
    return " ".join(told)


def _numbers(report: Report) -> str:
    names = "".join(f'<th scope="col">{escape(variant.name)}</th>' for variant in report.variants)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for label, cells in lines(medians(report))
    )
    return (
        f'<div class="scroll"><table class="numbers"><thead><tr><td></td>{names}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _paragraphs(kind: str, texts: Iterable[str]) -> list[str]:
    return [f'<p class="{kind}">{escape(text)}</p>' for text in texts]


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _facts(title: str, facts: Mapping[str, Any]) -> list[str]:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(_shown(value))}</td></tr>'
        for name, value in facts.items()
        if value not in (None, [], "")
    )
    return [f"<h2>{title}</h2>", f'<div class="scroll"><table>{rows}</table></div>']
