"""The picture of what the cache saves, for a README's width on a light background."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from prefixcache.bench.client import RequestRecord
from prefixcache.bench.report import Report, Variant, describe

_INK = "#1f2933"
_QUIET = "#7b8794"
_RULE = "#e4e7eb"
_COMPUTED = "#486581"
_COMPUTED_TINT = "#bcccdc"
_SKIPPED = "#9fe0cb"
_SKIPPED_INK = "#0c6b52"
_BAR = 0.52


def draw(report: Report, path: Path) -> None:
    """Writes the picture; the file's ending chooses its format (png, svg, pdf).

    Left: prompt tokens that were computed, and those the cache skipped. Right: time to first token
    of each request as a dot, the median as a bar. Both from the run whose duration is the median.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, wspace=0.06)
    figure = Figure(figsize=(10, 1.9 + 0.62 * len(report.variants)), layout=layout)
    figure.set_facecolor("white")
    tokens, ttft = figure.subplots(1, 2)
    _draw_tokens(tokens, report.variants)
    _draw_ttft(ttft, report.variants)
    figure.supxlabel(_footer(report), x=0.01, ha="left", fontsize=8.5, color=_QUIET)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def _draw_tokens(axes: Axes, variants: Sequence[Variant]) -> None:
    medians = [variant.median for variant in variants]
    total = max(median.computed_tokens + median.cached_tokens for median in medians)
    for row, median in enumerate(medians):
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
    medians = [variant.median.ttft_p50 * 1e3 for variant in variants]
    longest = max(record.ttft for variant in variants for record in _typical_run(variant)) * 1e3
    for row, (variant, median) in enumerate(zip(variants, medians, strict=True)):
        times = [record.ttft * 1e3 for record in _typical_run(variant)]
        color = _SKIPPED if variant.median.cached_tokens else _COMPUTED_TINT
        axes.barh(row, median, _BAR, color=color)
        axes.scatter(times, _spread(row, len(times)), s=12, color=_INK, alpha=0.6, linewidths=0)
        label = _ttft_label(median, medians[0] if row else None)
        axes.text(1.04 * longest, row, label, va="center", color=_INK)
    _dress(axes, "Time to first token (bar: median, dots: requests)", [""] * len(variants))
    axes.set_xlim(0, 1.45 * longest)


def _ttft_label(median: float, baseline: float | None) -> str:
    times = "" if baseline is None else f"\n{baseline / median:.1f} times sooner"
    return f"{median:,.0f} ms{times}"


def _spread(row: int, count: int) -> list[float]:
    """Heights across a bar, in sending order, so that dots do not hide each other."""
    step = 0.7 * _BAR / max(count - 1, 1)
    return [row - 0.35 * _BAR + step * index for index in range(count)]


def _dress(axes: Axes, title: str, names: Sequence[str]) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, color=_INK, pad=10)
    axes.set_yticks(range(len(names)), names, fontsize=11, color=_INK)
    axes.tick_params(length=0, labelcolor=_INK)
    axes.xaxis.set_visible(False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(_RULE)


def _typical_run(variant: Variant) -> Sequence[RequestRecord]:
    """The run whose duration is the median."""
    order = sorted(range(len(variant.runs)), key=lambda run: variant.summaries[run].duration)
    return variant.runs[order[len(order) // 2]]


def _footer(report: Report) -> str:
    settings, machine = report.settings, report.machine
    return (
        f"{_model(settings)}: {describe(settings)}. "
        f"{machine['cpu']}, {machine['cores']} cores. {report.date[:10]}"
    )


def _model(settings: dict[str, Any]) -> str:
    dtype = settings.get("dtype", "auto")
    name = Path(settings["model"]).name
    return name if dtype == "auto" else f"{name}, {dtype}"
