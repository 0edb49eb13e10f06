"""The blocks of code on a page, and what is said of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?:<!-- fragment: (?P<why>[^\n]+) -->\n\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code. A fragment cannot run alone; `why` says what it would need."""

    page: Path
    line: int
    language: str
    code: str
    why: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def lines(self) -> list[str]:
        """The commands of a shell, each on one line."""
        joined = self.code.replace("\\\n", " ")
        found, open_line = [], ""
        for line in joined.splitlines():
            open_line = f"{open_line} {line}" if open_line else line
            if open_line.count("'") % 2 == 0:
                found.append(open_line)
                open_line = ""
        return found


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of the page, in order."""
    text = page.read_text()
    for one in _FENCE.finditer(text):
        line = text.count("\n", 0, one.start("code"))
        yield Block(page, line, one["language"], one["code"], one["why"])
