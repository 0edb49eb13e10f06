"""What an eviction costs against the number of cached blocks: a record and a picture.

    python benches/core/evictions.py [--record benches/record/evictions.json]
                                     [--plot docs/cost-per-eviction.svg]

Runs the eviction part of `cargo bench --package prefixcache-core --bench latency`: 16 blocks are
taken from a pool that is full of cached ones, 2,000 times, and put back with other content. The
plain pool, one thread's hash map and linked list, is measured in turn with the lock-free one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from recorded import INK, QUIET, RULE, Rows, record_and_draw

COMMAND = "cargo bench --package prefixcache-core --bench latency -- --evictions-as-json"
COLORS = {"lock-free": "#0c6b52", "plain": "#486581"}


def draw(made: dict[str, Any]) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
    figure = Figure(figsize=(7.2, 3.4), layout=layout)
    figure.set_facecolor("white")
    axes = figure.subplots()
    for pool, color in COLORS.items():
        draw_pool(axes, pool, [row for row in made["rows"] if row["pool"] == pool], color)
    dress(axes, made["rows"])
    machine = made["machine"]
    footer = f"{machine['cpu']}, {machine['cores']} cores. {made['date'][:10]}"
    figure.supxlabel(footer, x=0.01, ha="left", fontsize=8.5, color=QUIET)
    return figure


def draw_pool(axes: Axes, pool: str, rows: Rows, color: str) -> None:
    cached = [row["cached"] for row in rows]
    times = [per_block(row) for row in rows]
    axes.plot(cached, times, color=color, linewidth=2, marker="o", markersize=5)
    # Named at the small pools, where the lines are apart.
    axes.annotate(pool, (cached[0], times[0]), (0, 8), textcoords="offset points", color=color)


def per_block(row: dict[str, Any]) -> float:
    """The median time of one eviction in nanoseconds."""
    return row["p50_ns"] / row["evicted"]


def dress(axes: Axes, rows: Rows) -> None:
    sizes = sorted({row["cached"] for row in rows})
    axes.set_title(
        f"Evicting one block, ns (median of batches of {rows[0]['evicted']})",
        loc="left", fontsize=11.5, color=INK, pad=10,
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xlim(sizes[0] * 0.7, sizes[-1] * 1.5)
    axes.set_xlabel("cached blocks", color=INK)
    axes.set_ylim(0, 1.15 * max(per_block(row) for row in rows))
    axes.minorticks_off()
    axes.tick_params(length=0, labelcolor=INK)
    axes.grid(axis="y", color=RULE)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)


if __name__ == "__main__":
    record_and_draw(
        __doc__,
        COMMAND,
        draw,
        Path("benches/record/evictions.json"),
        Path("docs/cost-per-eviction.svg"),
    )
