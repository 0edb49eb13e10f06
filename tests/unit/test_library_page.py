"""Every block of code on docs/tutorials/library.md runs, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "library.md"
FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page_runs() -> None:
    text = PAGE.read_text()
    namespace: dict[str, Any] = {}
    ran = 0
    for fence in FENCES.finditer(text):
        if fence[1] == "python":
            line = text.count("\n", 0, fence.start(2))
            exec(compile("\n" * line + fence[2], str(PAGE), "exec"), namespace)
            ran += 1
    assert ran >= 8
    for name in ("cache", "pool"):
        namespace[name].validate()
        assert namespace[name].stats()["blocks_in_use"] == 0
