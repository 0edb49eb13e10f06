"""Known advisories against what is locked: when that was last asked, and what came of it.

`python release/audit.py` reads its note and needs no network: it says when the tools last
ran, whether what is locked has changed since, and what they found (exit status 1). With `--run` it
asks them again and rewrites the note: cargo-deny about Cargo.lock by the RustSec database,
pip-audit about requirements/runtime.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTE = ROOT / "release" / "audit.json"
LOCKED = {"rust": ROOT / "Cargo.lock", "python": ROOT / "requirements" / "runtime.txt"}
_DATABASES = Path.home() / ".cargo" / "advisory-dbs"

Note = dict[str, dict[str, Any] | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="ask the tools again")
    parser.add_argument("--offline", action="store_true", help="by the RustSec copy that is here")
    options = parser.parse_args()
    note: Note = json.loads(NOTE.read_text())
    if options.run:
        tools: dict[str, Callable[[], dict[str, Any]]] = {
            "rust": lambda: ask_cargo_deny(offline=options.offline),
            "python": ask_pip_audit,
        }
        note |= {name: ask(name, tool) or note[name] for name, tool in tools.items()}
        NOTE.write_text(json.dumps(note, indent=1) + "\n")
    has_findings = [tell(name, found) for name, found in note.items()]
    sys.exit(any(has_findings))


def ask(name: str, tool: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """What goes into the note; None when the tool is missing or could not look."""
    try:
        today = datetime.now(timezone.utc).date().isoformat()
        return tool() | {"date": today, "locked": locked(name)}
    except (OSError, RuntimeError) as error:
        print(f"{name}: not asked: {error}")
        return None


def locked(name: str) -> str:
    """What tells one state of a lock file from another."""
    return hashlib.sha256(LOCKED[name].read_bytes()).hexdigest()


def tell(name: str, found: dict[str, Any] | None) -> bool:
    """Prints what is known; whether that is an advisory."""
    if found is None:
        print(f"{name}: never audited")
        return False
    is_same = found["locked"] == locked(name)
    state = "as it is locked now" if is_same else "before what is locked changed"
    known = ", ".join(found["findings"]) or "nothing found"
    print(f"{name}: {found['tool']} on {found['date']} by {found['database']}, {state}: {known}")
    return bool(found["findings"])


def ask_cargo_deny(*, offline: bool) -> dict[str, Any]:
    """Raises `RuntimeError` when it could not look."""
    flags = ["--offline"] if offline else []
    command = ["cargo", "deny", *flags, "--format", "json", "check", "advisories"]
    asked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [json.loads(line) for line in asked.stderr.splitlines() if line.startswith("{")]
    found = [one["fields"] for one in lines if one["type"] == "diagnostic"]
    errors = [one for one in found if one["severity"] == "error"]
    advisories = sorted({one["advisory"]["id"] for one in errors if one.get("advisory")})
    if asked.returncode and not advisories:
        raise RuntimeError(asked.stderr[-500:])
    version = subprocess.check_output(["cargo", "deny", "--version"], text=True).strip()
    return {"tool": version, "database": f"RustSec of {_database_date()}", "findings": advisories}


def _database_date() -> str:
    copies = sorted(_DATABASES.glob("*/.git"))
    command = ["git", "-C", copies[-1].parent, "log", "-1", "--format=%ct"]
    seconds = int(subprocess.check_output(command, text=True))
    return datetime.fromtimestamp(seconds, timezone.utc).date().isoformat()


def ask_pip_audit() -> dict[str, Any]:
    """Raises `RuntimeError` when it could not look."""
    flags = ["--format", "json", "--progress-spinner", "off", "--no-deps", "--disable-pip"]
    command = ["pip-audit", *flags, "--requirement", LOCKED["python"]]
    asked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if not asked.stdout:
        raise RuntimeError(asked.stderr[-500:])
    packages = json.loads(asked.stdout)["dependencies"]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if skipped:
        raise RuntimeError(f"{len(skipped)} of {len(packages)} packages are unknown where it looks")
    found = [v["id"] for package in packages for v in package["vulns"]]
    version = subprocess.check_output(["pip-audit", "--version"], text=True).strip()
    return {"tool": version, "database": "PyPI's of that day", "findings": sorted(found)}


if __name__ == "__main__":
    main()
