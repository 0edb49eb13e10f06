"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

Rows = Sequence[Sequence[str]]


def boxed(head: Sequence[str], *sections: Rows) -> str:
    """Cells under a head, the first column to the left, with lines around and between sections.

    A row may end early.
    """
    columns = zip_longest(head, *(row for rows in sections for row in rows), fillvalue="")
    widths = [max(map(len, column)) for column in columns]

    def line(cells: Sequence[str], side: str) -> str:
        padded = [*cells, *[""] * (len(head) - len(cells))]
        _, *others = map(str.rjust, padded, widths)
        return f" {side} ".join([f"{side} {padded[0].ljust(widths[0])}", *others]) + f" {side}"

    def rule(begin: str, fill: str, between: str, end: str) -> str:
        return begin + between.join(fill * (width + 2) for width in widths) + end

    lines = [rule("┏", "━", "┳", "┓"), line(head, "┃"), rule("┡", "━", "╇", "┩")]
    for number, rows in enumerate(sections):
        lines += [rule("├", "─", "┼", "┤")] if number else []
        lines += [line(row, "│") for row in rows]
    return "\n".join([*lines, rule("└", "─", "┴", "┘")])
