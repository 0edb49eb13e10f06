"""Orders of eviction on public traces: a record and a picture of token hit rates.

    python benches/core/policies.py [--record benches/record/policies.json]
                                    [--plot docs/eviction-policies.svg]

Runs `make bench-eviction`, whose rows are LRU, reuse-queue and the offline optimum on each trace,
at sizes of the pool from 1 to 50 percent of the blocks that the trace's prompts have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from recorded import INK, QUIET, RULE, Rows, record_and_draw

COMMAND = "cargo bench --package prefixcache-replay --bench eviction -- --as-json"
PERCENTS = (1, 2, 5, 10, 20, 50)
COLORS = {"optimum": "#9aa5b1", "lru": "#486581", "reuse-queue": "#0c6b52"}


def draw(made: dict[str, Any]) -> Figure:
    rows: Rows = made["rows"]
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.12)
    figure = Figure(figsize=(9.6, 3.2), layout=layout)
    figure.set_facecolor("white")
    for axes, trace in zip(figure.subplots(1, len(traces)), traces, strict=True):
        draw_trace(axes, trace, {row["order"]: row for row in rows if row["trace"] == trace})
    footer = f"Token hit rate in percent by the size of the pool. {made['date'][:10]}"
    figure.supxlabel(footer, x=0.01, ha="left", fontsize=8.5, color=QUIET)
    return figure


def draw_trace(axes: Axes, trace: str, rows: dict[str, dict[str, Any]]) -> None:
    for order, color in COLORS.items():
        rates = rows[order]["hit_percent"]
        axes.plot(PERCENTS, rates, color=color, linewidth=2, marker="o", markersize=4, label=order)
    axes.set_title(trace, loc="left", fontsize=11.5, color=INK, pad=10)
    axes.set_xscale("log")
    axes.set_xticks(PERCENTS, [f"{percent}%" for percent in PERCENTS])
    axes.minorticks_off()
    axes.tick_params(length=0, labelcolor=INK)
    axes.grid(axis="y", color=RULE)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.legend(loc="lower right", frameon=False, fontsize=8.5, labelcolor=INK)


if __name__ == "__main__":
    record_and_draw(
        __doc__,
        COMMAND,
        draw,
        Path("benches/record/policies.json"),
        Path("docs/eviction-policies.svg"),
    )
