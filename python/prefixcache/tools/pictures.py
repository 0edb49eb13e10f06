"""How pictures of results look. Matplotlib is an extra, and imported where one is drawn."""

# Of matplotlib's keywords.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prefixcache.exceptions import FieldError, how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, RULE = "#1f2933", "#7b8794", "#e4e7eb"
NEEDS_MATPLOTLIB = f"needs matplotlib: {how_to_install('plot')}."

_ENDINGS = (".png", ".svg", ".pdf")
_LIGHT, _DARK = "-light.svg", "-dark.svg"
_AT_NIGHT = {
    INK: "#e4e7eb",
    QUIET: "#9aa5b1",
    RULE: "#3e4c59",
    "#0c6b52": "#3ecf9f",
    "#9fe0cb": "#17453a",
    "#486581": "#7ea3c9",
    "#bcccdc": "#3e4c59",
}
"""Colours on a dark page."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_picture(flag: str, file: Path) -> None:
    """Raises `FieldError` for a file of another ending, and where matplotlib is not installed."""
    if file.suffix.lower() not in _ENDINGS:
        raise FieldError(flag, f"draws {', '.join(_ENDINGS)}, not {str(file)!r}.")
    if not can_draw():
        raise FieldError(flag, NEEDS_MATPLOTLIB)


def new_figure(width: float, height: float, footer: str) -> Figure:
    """An empty figure on a light background, in inches, with a line below."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.06)
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    figure.supxlabel(footer, x=0.01, ha="left", fontsize=8.5, color=QUIET)
    return figure


def dress(axes: Axes, title: str, spine: Literal["left", "bottom"] = "bottom") -> None:
    """Sets a panel's title, and leaves one line of its frame."""
    axes.set_title(title, loc="left", fontsize=11.5, color=INK, pad=10)
    axes.tick_params(length=0, labelcolor=INK, labelsize=9)
    axes.spines[:].set_visible(False)
    axes.spines[spine].set(visible=True, color=RULE)


def save(figure: Figure, path: Path) -> None:
    """Writes the picture; the file's ending chooses its format (png, svg, pdf).

    With NAME-light.svg comes NAME-dark.svg, both without a background.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.name.endswith(_LIGHT):
        figure.savefig(path, dpi=200)
        return
    for axes in figure.axes:
        axes.patch.set_visible(False)
    figure.savefig(path, facecolor="none", metadata={"Date": None})
    dark = re.sub("|".join(_AT_NIGHT), lambda match: _AT_NIGHT[match[0]], path.read_text())
    path.with_name(path.name.removesuffix(_LIGHT) + _DARK).write_text(dark)
