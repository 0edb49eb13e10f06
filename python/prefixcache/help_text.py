"""Help of a command in groups, in which no option's name is cut, however narrow the terminal is."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from typer.core import TyperCommand, TyperOption


class GroupedCommand(TyperCommand):
    """Options stand under their `rich_help_panel`, groups in the order of their first option.

    typer's own tables share one line among five columns and cut names to fit.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the groups."""
        groups: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups[_group(param)].append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def _group(param: object) -> str:
    if isinstance(param, TyperOption):
        return param.rich_help_panel or "Options"
    return "Arguments"
