"""Whether this tree may be published: `python release/publishable.py v0.1.0` names what is missing.

Exit status 1 until the package has addresses and people, security reports have somewhere to go,
and the tag is the version that pyproject.toml, Cargo.toml and a dated entry of the changelog have.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = {
    "pyproject.toml": {
        r"^\[project\.urls\]": "[project.urls]",
        r"^(?:authors|maintainers) = \[": "authors or maintainers",
        r'^version = "{version}"$': "version {version}",
    },
    "Cargo.toml": {r'^version = "{version}"$': "version {version}"},
    "CHANGELOG.md": {r"^## {version} - \d{{4}}-\d\d-\d\d$": "a day for {version}"},
    "SECURITY.md": {r"\S@\S|https://": "an address for reports"},
}


def lacking(root: Path, tag: str) -> Iterator[str]:
    """What each file does not have."""
    version = tag.removeprefix("v")
    for name, patterns in NEEDED.items():
        text = (root / name).read_text(encoding="utf-8")
        for pattern, what in patterns.items():
            if not re.search(pattern.format(version=re.escape(version)), text, re.MULTILINE):
                yield f"{name} lacks {what.format(version=version)}"


if __name__ == "__main__":
    sys.exit("\n".join(lacking(ROOT, sys.argv[1])) or None)
