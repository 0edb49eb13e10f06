"""A report as one page: table, picture, settings and machine in a file that loads nothing else."""

# Of matplotlib's keywords.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
from pathlib import Path

from jinja2 import Environment, PackageLoader

from prefixcache.tools.bench.reports.plots import picture
from prefixcache.tools.bench.reports.report import Report, medians
from prefixcache.tools.bench.reports.tables import heading, lines

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def write_page(report: Report, path: Path) -> None:
    """Writes the page, its parents made where needed. The report must hold records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(report), encoding="utf-8")


def page(report: Report) -> str:
    """The page's HTML."""
    loader = PackageLoader("prefixcache.tools.bench", "reports")
    template = Environment(loader=loader, autoescape=True).get_template("page.html.jinja")
    return template.render(
        report=report,
        heading=heading(report),
        lines=lines(medians(report)),
        picture=_svg(report),
    )


def _svg(report: Report) -> str:
    """The picture as an SVG element."""
    file = io.StringIO()
    picture(report).savefig(file, format="svg", metadata=_NO_METADATA)
    return file.getvalue()[file.getvalue().index("<svg") :]
