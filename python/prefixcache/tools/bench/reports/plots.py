"""The picture of what the cache saves, for a README's width."""

# Of matplotlib's keywords.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prefixcache.tools.bench.reports.report import Report, Variant
from prefixcache.tools.bench.reports.tables import describe
from prefixcache.tools.pictures import INK, RULE, dress, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COMPUTED = "#486581"
_COMPUTED_TINT = "#bcccdc"
_SKIPPED = "#9fe0cb"
_SKIPPED_INK = "#0c6b52"
_BAR = 0.52
# Groups of requests by the length of their prompts, each of which is a point of the line.
_MOST_GROUPS = 10


def draw(report: Report, path: Path) -> None:
    """Writes the picture; the file's ending chooses its format (png, svg, pdf)."""
    save(picture(report), path)


def picture(report: Report) -> Figure:
    """What the cache saves, at a glance, of the runs whose durations are the medians.

    Left: prompt tokens that were computed, and those the cache skipped. Right: the median time to
    first token as a bar, with a line to the 99th percentile. Below, where lengths differ: time to
    first token by the length of the prompt.
    """
    variants = [variant for variant in report.variants if variant.typical_run]
    lengths = [record.prompt_tokens for variant in variants for record in variant.typical_run]
    heights = [1.9 + 0.62 * len(variants)]
    if max(lengths) > 1.5 * min(lengths):
        heights.append(3.0)
    figure = new_figure(10, sum(heights), _footer(report))
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    _draw_tokens(figure.add_subplot(grid[0, 0]), variants)
    _draw_ttft(figure.add_subplot(grid[0, 1]), variants)
    if len(heights) > 1:
        _draw_lengths(figure.add_subplot(grid[1, :]), variants)
    return figure


def _draw_tokens(axes: Axes, variants: Sequence[Variant]) -> None:
    medians = [variant.median for variant in variants]
    total = max(median.prompt_tokens for median in medians)
    for row, median in enumerate(medians):
        computed, cached = median.computed_tokens, median.cached_tokens
        if computed is None or cached is None:
            parts = [(median.prompt_tokens, "tokens, hits not reported", RULE, INK)]
        else:
            parts = [
                (computed, "computed", _COMPUTED, "white"),
                (cached, "skipped", _SKIPPED, _SKIPPED_INK),
            ]
        left = 0.0
        for tokens, what, color, ink in parts:
            bar = axes.barh(row, tokens, _BAR, left=left, color=color)
            if tokens > 0.25 * total:
                axes.bar_label(bar, [f"{tokens:,.0f} {what}"], label_type="center", color=ink)
            elif tokens:
                above = row - _BAR / 2 - 0.04
                axes.text(left, above, f"{tokens:,.0f}", color=_COMPUTED, va="bottom")
            left += tokens
    _dress_bars(axes, "Prompt tokens", [variant.name for variant in variants])
    axes.set_xlim(0, total)


def _draw_ttft(axes: Axes, variants: Sequence[Variant]) -> None:
    medians = [(variant.median.ttft_p50 or 0.0) * 1e3 for variant in variants]
    slow = [
        float(np.percentile([record.ttft * 1e3 for record in variant.typical_run], 99))
        for variant in variants
    ]
    longest = max(*slow, *medians)
    for row, (variant, median) in enumerate(zip(variants, medians, strict=True)):
        color = _SKIPPED if variant.median.cached_tokens else _COMPUTED_TINT
        axes.barh(row, median, _BAR, color=color)
        axes.plot([median, slow[row]], [row, row], color=_COMPUTED, linewidth=1.5, marker="|")
        sooner = f"\n{medians[0] / median:.1f} times sooner" if row else ""
        end = max(median, slow[row]) + 0.03 * longest
        axes.text(end, row, f"{median:,.0f} ms{sooner}", va="center", color=INK)
    _dress_bars(axes, "Time to first token, ms (bar: median, line: to p99)", [""] * len(variants))
    axes.xaxis.set_visible(True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(0, 1.35 * longest)


def _draw_lengths(axes: Axes, variants: Sequence[Variant]) -> None:
    """Requests as dots, and a line through the medians of groups of like length."""
    for variant in variants:
        color = _SKIPPED_INK if variant.median.cached_tokens else _COMPUTED
        records = sorted(variant.typical_run, key=lambda record: record.prompt_tokens)
        points = np.array([(record.prompt_tokens, record.ttft * 1e3) for record in records])
        axes.scatter(*points.T, s=10, color=color, alpha=0.35, linewidths=0)
        groups = np.array_split(points, min(_MOST_GROUPS, len(points)))
        medians = np.array([np.median(group, axis=0) for group in groups])
        axes.plot(*medians.T, color=color, linewidth=2, label=variant.name)
    dress(axes, "Time to first token (ms) by prompt length (tokens)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.legend(
        frameon=False,
        labelcolor=INK,
        ncols=len(variants),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
    )


def _dress_bars(axes: Axes, title: str, names: Sequence[str]) -> None:
    dress(axes, title, spine="left")
    axes.set_yticks(range(len(names)), names, fontsize=11)
    axes.xaxis.set_visible(False)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _footer(report: Report) -> str:
    machine, settings = report.machine, report.settings
    name, dtype = Path(settings["model"]).name, settings.get("dtype", "auto")
    model = name if dtype == "auto" else f"{name}, {dtype}"
    return (
        f"{model}: {describe(settings)}\n"
        f"{machine['cpu']}, {machine['cores']} cores. {report.date[:10]}"
    )
