"""Public traces through simulated replicas behind a router: a record and a picture of hit rates.

    python benches/core/fleet.py [--record benches/record/fleet.json] [--plot docs/fleet.svg]

Rows are routers on each trace at 64 replicas, on one at 1,024 too, and one server with all the
memory. Takes about four minutes on an idle machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from recorded import INK, QUIET, Rows, record_and_draw

COMMAND = "cargo bench --package prefixcache-replay --bench replicas -- --as-json"
OURS, OTHERS, BOUND = "#0c6b52", "#9aa5b1", "#486581"
COLORS = {"prefix": OURS, "one server": BOUND}


def draw(made: dict[str, Any]) -> Figure:
    rows: Rows = made["rows"]
    runs = list(dict.fromkeys((row["trace"], row["replicas"]) for row in rows))
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.12)
    figure = Figure(figsize=(9.6, 2.1 * len(runs)), layout=layout)
    figure.set_facecolor("white")
    panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        draw_run(axes, run, [row for row in rows if (row["trace"], row["replicas"]) == run])
    footer = f"Token hit rate in percent, spread of computed tokens. {made['date'][:10]}"
    figure.supxlabel(footer, x=0.01, ha="left", fontsize=8.5, color=QUIET)
    return figure


def draw_run(axes: Axes, run: tuple[str, int], rows: Rows) -> None:
    names = [row["policy"] for row in rows]
    rates = [row["hit_percent"] for row in rows]
    bars = axes.barh(names, rates, color=[COLORS.get(name, OTHERS) for name in names])
    labels = [f"{row['hit_percent']:.1f}, spread {row['spread_of_tokens']:.2f}" for row in rows]
    labels[0] = f"{rates[0]:.1f}"
    axes.bar_label(bars, labels, padding=4, fontsize=8.5, color=INK)
    trace, replicas = run
    axes.set_title(f"{trace}, {replicas:,} replicas", loc="left", fontsize=11, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(rates))
    axes.set_xticks([])
    axes.tick_params(length=0, labelcolor=INK, labelsize=9)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    record_and_draw(
        __doc__,
        COMMAND,
        draw,
        Path("benches/record/fleet.json"),
        Path("docs/fleet.svg"),
    )
