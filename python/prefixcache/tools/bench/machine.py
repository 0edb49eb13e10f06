"""Facts of the machine and the versions: no number is worth anything without them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prefixcache.config.machine import machine_memory

_PACKAGES = ("prefixcache", "torch", "transformers", "numpy")


def run_facts(command: str | None = None) -> dict[str, Any]:
    """What a record begins with: the command, by default this script's, its time and machine."""
    return {
        "command": command or shlex.join(["python", *sys.argv]),
        "date": now(),
        "machine": machine_facts(),
    }


def write_record(path: Path | None, command: str | None = None, **results: Any) -> None:
    """Writes what a bench found, behind its `run_facts`; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(run_facts(command) | results) + "\n")


def now() -> str:
    """The time in ISO 8601, in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def machine_facts() -> dict[str, str | int]:
    """Processor, cores this process may use, memory in GiB, and versions of what computes."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(machine_memory()[0] / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    } | {name: _version(name) for name in _PACKAGES}


def usable_cores() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name, and on Linux the family and model, since cloud machines hide the name."""
    fields = _first_processor(cpuinfo)
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in fields:
        return name
    return f"{name} (family {fields['cpu family']}, model {fields.get('model', '?')})"


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    try:
        lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
