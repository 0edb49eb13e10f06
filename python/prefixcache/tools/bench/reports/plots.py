"""The picture of what the cache saves, for a README's width on a light background."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import StrMethodFormatter

from prefixcache.tools.bench.reports.report import Report, Variant
from prefixcache.tools.bench.reports.tables import describe

_INK = "#1f2933"
_QUIET = "#7b8794"
_RULE = "#e4e7eb"
_COMPUTED = "#486581"
_COMPUTED_TINT = "#bcccdc"
_SKIPPED = "#9fe0cb"
_SKIPPED_INK = "#0c6b52"
_BAR = 0.52
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11.5, "color": _INK, "pad": 10}


def draw(report: Report, path: Path) -> None:
    """Writes the picture; the file's ending chooses its format (png, svg, pdf)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(report).savefig(path, dpi=200)


def draw_svg(report: Report) -> str:
    """The picture as an SVG element, to stand in a page."""
    file = io.StringIO()
    picture(report).savefig(file, format="svg", metadata=_NO_METADATA)
    return file.getvalue()[file.getvalue().index("<svg") :]


def picture(report: Report) -> Figure:
    """What the cache saves, at a glance, of the runs whose durations are the medians.

    Left: prompt tokens that were computed, and those the cache skipped. Right: time to first token
    of each request as a dot, the median as a bar. Below, where lengths differ: time to first token
    by the length of the prompt.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, wspace=0.06)
    has_lengths = _lengths_differ(report.variants)
    bars = 1.9 + 0.62 * len(report.variants)
    figure = Figure(figsize=(10, bars + (3.0 if has_lengths else 0)), layout=layout)
    figure.set_facecolor("white")
    grid = figure.add_gridspec(
        2 if has_lengths else 1, 2, height_ratios=[bars, 3.0][: 1 + has_lengths]
    )
    _draw_tokens(figure.add_subplot(grid[0, 0]), report.variants)
    _draw_ttft(figure.add_subplot(grid[0, 1]), report.variants)
    if has_lengths:
        _draw_lengths(figure.add_subplot(grid[1, :]), report.variants)
    figure.supxlabel(_footer(report), x=0.01, ha="left", fontsize=8.5, color=_QUIET)
    return figure


def _lengths_differ(variants: Sequence[Variant]) -> bool:
    """Whether there is anything to see in times by length."""
    lengths = [record.prompt_tokens for one in variants for record in one.typical_run]
    return max(lengths) > 1.5 * min(lengths)


def _draw_tokens(axes: Axes, variants: Sequence[Variant]) -> None:
    medians = [variant.median for variant in variants]
    total = max(median.prompt_tokens for median in medians)
    for row, median in enumerate(medians):
        if median.computed_tokens is None or median.cached_tokens is None:
            axes.barh(row, median.prompt_tokens, _BAR, color=_RULE)
            told = f"{median.prompt_tokens:,.0f}, hits not reported"
            _write_inside(axes, median.prompt_tokens / 2, row, told, _INK)
            continue
        computed, cached = median.computed_tokens, median.cached_tokens
        axes.barh(row, computed, _BAR, color=_COMPUTED)
        axes.barh(row, cached, _BAR, left=computed, color=_SKIPPED)
        _label_computed(axes, row, computed, total)
        if cached > 0.25 * total:
            middle = computed + cached / 2
            _write_inside(axes, middle, row, f"{cached:,.0f} skipped", _SKIPPED_INK)
    _dress(axes, "Prompt tokens", [variant.name for variant in variants])
    axes.set_xlim(0, total)


def _label_computed(axes: Axes, row: int, computed: float, total: float) -> None:
    """Inside the bar where it fits, above its left end where it does not."""
    if computed > 0.25 * total:
        _write_inside(axes, computed / 2, row, f"{computed:,.0f} computed", "white")
    else:
        above = row - _BAR / 2 - 0.04
        axes.text(0, above, f"{computed:,.0f}", color=_COMPUTED, fontsize=10, va="bottom")


def _write_inside(axes: Axes, x: float, row: int, text: str, color: str) -> None:
    axes.text(x, row, text, color=color, ha="center", va="center", fontsize=10)


def _draw_ttft(axes: Axes, variants: Sequence[Variant]) -> None:
    medians = [(variant.median.ttft_p50 or 0.0) * 1e3 for variant in variants]
    longest = max(record.ttft for variant in variants for record in variant.typical_run) * 1e3
    for row, (variant, median) in enumerate(zip(variants, medians, strict=True)):
        times = [record.ttft * 1e3 for record in variant.typical_run]
        color = _tint(variant)
        axes.barh(row, median, _BAR, color=color)
        axes.scatter(times, _spread(row, len(times)), s=12, color=_INK, alpha=0.6, linewidths=0)
        label = _ttft_label(median, medians[0] if row else None)
        axes.text(1.04 * longest, row, label, va="center", color=_INK)
    _dress(axes, "Time to first token (bar: median, dots: requests)", [""] * len(variants))
    axes.set_xlim(0, 1.45 * longest)


def _tint(variant: Variant) -> str:
    return _SKIPPED if variant.median.cached_tokens else _COMPUTED_TINT


def _draw_lengths(axes: Axes, variants: Sequence[Variant]) -> None:
    """Requests as dots, and through them the medians of ranges of lengths."""
    for variant in variants:
        color = _SKIPPED_INK if variant.median.cached_tokens else _COMPUTED
        records = sorted(variant.typical_run, key=lambda record: record.prompt_tokens)
        lengths = np.array([record.prompt_tokens for record in records])
        times = np.array([record.ttft * 1e3 for record in records])
        axes.scatter(lengths, times, s=10, color=color, alpha=0.35, linewidths=0)
        ranges = _ranges(lengths)
        middles = [[np.median(part[places]) for places in ranges] for part in (lengths, times)]
        axes.plot(*middles, color=color, linewidth=2, label=variant.name)
    axes.set_title("Time to first token (ms) by prompt length (tokens)", **_TITLE)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(length=0, labelcolor=_QUIET, labelsize=9)
    axes.grid(axis="y", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(frameon=False, fontsize=10, labelcolor=_INK, ncols=len(variants), **place)


def _ranges(lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Places of sorted lengths, of each tenth of the way to the longest where there are any."""
    tenths = np.linspace(lengths[0], lengths[-1], 11)[1:-1]
    parts = np.split(np.arange(len(lengths)), np.searchsorted(lengths, tenths, side="right"))
    return [part for part in parts if len(part)]


def _ttft_label(median: float, baseline: float | None) -> str:
    times = "" if baseline is None else f"\n{baseline / median:.1f} times sooner"
    return f"{median:,.0f} ms{times}"


def _spread(row: int, count: int) -> list[float]:
    """Heights across a bar, in sending order, so that dots do not hide each other."""
    step = 0.7 * _BAR / max(count - 1, 1)
    return [row - 0.35 * _BAR + step * index for index in range(count)]


def _dress(axes: Axes, title: str, names: Sequence[str]) -> None:
    axes.set_title(title, **_TITLE)
    axes.set_yticks(range(len(names)), names, fontsize=11, color=_INK)
    axes.tick_params(length=0, labelcolor=_INK)
    axes.xaxis.set_visible(False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(_RULE)


def _footer(report: Report) -> str:
    machine = report.machine
    return (
        f"{_model(report.settings)}: {describe(report.settings)}\n"
        f"{machine['cpu']}, {machine['cores']} cores. {report.date[:10]}"
    )


def _model(settings: dict[str, Any]) -> str:
    dtype = settings.get("dtype", "auto")
    name = Path(settings["model"]).name
    return name if dtype == "auto" else f"{name}, {dtype}"
