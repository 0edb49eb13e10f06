"""Licences of the crates that are linked into the wheel: `release/RUST_LICENCES.txt`.

The list, and the texts as the crates ship them, each once. The wheel carries the file, as those
licences ask for. `--check` only says whether the list is the one that Cargo.lock leads to now.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "release" / "RUST_LICENCES.txt"
PACKAGE, _TARGET = "prefixcache-py", "x86_64-unknown-linux-gnu"
_LINE = "-" * 80
_TEXTS = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "UNLICENSE*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    crates = linked_crates()
    listed = list_of(crates)
    if options.check:
        sys.exit(0 if FILE.read_text().startswith(listed) else f"{FILE}: run {__file__}")
    FILE.write_text(listed + texts_of(crates))
    print(f"{len(crates)} crates")


def linked_crates() -> list[dict[str, Any]]:
    """Cargo's metadata of every crate that is not ours, by name and version."""
    command = ["cargo", "tree", "--locked", "--package", PACKAGE, "--edges", "normal"]
    form = ["--prefix", "none", "--format", "{p}", "--target", _TARGET]
    lines = subprocess.check_output([*command, *form], text=True, cwd=ROOT).splitlines()
    wanted = {tuple(line.split()[:2]) for line in lines if line and "(/" not in line}
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    packages = json.loads(subprocess.check_output(command, cwd=ROOT))["packages"]
    known = [p for p in packages if (p["name"], f"v{p['version']}") in wanted]
    return sorted(known, key=lambda package: (package["name"], package["version"]))


def list_of(crates: list[dict[str, Any]]) -> str:
    title = "Rust crates that are linked into prefixcache, and their licences\n\n"
    return title + "".join(f"{c['name']} {c['version']}: {c['license']}\n" for c in crates)


def texts_of(crates: list[dict[str, Any]]) -> str:
    """Each text once, under the names of the crates that ship it."""
    crates_of: defaultdict[str, list[str]] = defaultdict(list)
    for crate in crates:
        folder = Path(crate["manifest_path"]).parent
        for file in sorted({file for form in _TEXTS for file in folder.glob(form)}):
            if file.is_file():
                text = file.read_text(errors="replace").strip()
                crates_of[text].append(f"{crate['name']} ({file.name})")
    return "".join(
        f"\n{_LINE}\n{', '.join(names)}\n{_LINE}\n\n{text}\n" for text, names in crates_of.items()
    )


if __name__ == "__main__":
    main()
