"""The picture of hit rates by size."""

# Of matplotlib's keywords.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prefixcache.tools.pictures import INK, RULE, dress, new_figure, save
from prefixcache.tools.replay.run import Row, TraceResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BOUND = "#9aa5b1"
_COLORS = ("#486581", "#0c6b52", "#b44d12", "#7b3f9e")
_TICKS = (1, 2, 5, 10, 20, 50, 100)


def draw(traces: Sequence[TraceResult], path: Path) -> None:
    """Writes the picture; the file's ending chooses its format (png, svg, pdf)."""
    unit = "blocks" if traces[0].unique_blocks is None else "percent of the trace's blocks"
    footer = f"Token hit rate in percent by the size of the pool, in {unit}"
    figure = new_figure(max(4.8, 3.4 * len(traces)), 3.4, footer)
    panels = figure.subplots(1, len(traces), squeeze=False)[0]
    for axes, trace in zip(panels, traces, strict=True):
        _draw_trace(axes, trace)
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(
        lines, names, frameon=False, fontsize=9, labelcolor=INK, ncols=len(names),
        loc="outside upper left",
    )  # fmt: skip
    save(figure, path)


def _draw_trace(axes: Axes, trace: TraceResult) -> None:
    unique = trace.unique_blocks
    if trace.infinite is not None:
        infinite = 100 * trace.infinite
        axes.axhline(infinite, color=_BOUND, linewidth=1, linestyle=":", label="infinite")
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
    dress(axes, trace.name)
    axes.set_xscale("log")
    if unique is not None:
        axes.set_xticks(_TICKS, [f"{tick}%" for tick in _TICKS])
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.grid(axis="y", color=RULE)
