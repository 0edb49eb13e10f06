"""The picture of hit rates by size, for a page's width on a light background."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from prefixcache.tools.replay.run import Row, TraceResult

_INK = "#1f2933"
_QUIET = "#7b8794"
_RULE = "#e4e7eb"
_BOUND = "#9aa5b1"
_COLORS = ("#486581", "#0c6b52", "#b44d12", "#7b3f9e")


def draw(traces: Sequence[TraceResult], path: Path) -> None:
    """Writes the picture; the file's ending chooses its format (png, svg, pdf)."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.12)
    figure = Figure(figsize=(max(4.8, 3.4 * len(traces)), 3.4), layout=layout)
    figure.set_facecolor("white")
    for axes, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        _draw_trace(axes, trace)
    unit = "percent of the trace's blocks" if _in_percent(traces[0]) else "blocks"
    footer = f"Token hit rate in percent by the size of the pool, in {unit}"
    figure.supxlabel(footer, x=0.01, ha="left", fontsize=8.5, color=_QUIET)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def _in_percent(trace: TraceResult) -> bool:
    return trace.unique_blocks is not None


def _draw_trace(axes: Axes, trace: TraceResult) -> None:
    unique = trace.unique_blocks
    if trace.infinite is not None:
        axes.axhline(
            100 * trace.infinite, color=_BOUND, linewidth=1, linestyle=":", label="infinite"
        )
    if trace.curve is not None:
        optimum = [100 * rate for rate in trace.curve.optimum]
        axes.plot(range(1, 101), optimum, color=_BOUND, linewidth=2, label="optimum")
    by_name = defaultdict[str, list[Row]](list)
    for row in trace.rows:
        by_name[row.setting.name].append(row)
    for color, (name, rows) in zip(_COLORS * len(by_name), by_name.items(), strict=False):
        rows.sort(key=lambda row: row.blocks)
        sizes = [100 * row.blocks / unique if unique else row.blocks for row in rows]
        rates = [100 * row.hit_rate for row in rows]
        axes.plot(sizes, rates, color=color, linewidth=2, marker="o", markersize=4, label=name)
    _dress(axes, trace)


def _dress(axes: Axes, trace: TraceResult) -> None:
    axes.set_title(trace.name, loc="left", fontsize=11.5, color=_INK, pad=10)
    axes.set_xscale("log")
    if _in_percent(trace):
        ticks = (1, 2, 5, 10, 20, 50, 100)
        axes.set_xticks(ticks, [f"{tick}%" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.tick_params(length=0, labelcolor=_INK, labelsize=8.5)
    axes.grid(axis="y", color=_RULE)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK)
